"""Carries out the sections that are asked for, and writes what came of them."""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks import results
from tests import faults
from tests.faults import disks, own_code, stops, strangers
from tests.faults.jobs import Job, Row, jobs


def sections(
    work: dict[str, Job], killed: int, signalled: int
) -> dict[str, Callable[[], Iterator[Row]]]:
    named: dict[str, Callable[[], Iterator[Row]]] = {
        f"kills_{name}": functools.partial(stops.kills, job, killed)
        for name, job in work.items()
    }
    for name, job in work.items():
        if job.lines:
            named[f"signals_{name}"] = functools.partial(stops.signals, job, signalled)
    named["signals_others"] = functools.partial(stops.other_signals, work["sft"])
    named["disks"] = functools.partial(disks.full_disks, work)
    named["second"] = functools.partial(disks.second_processes, work)
    named["damages"] = functools.partial(disks.damages, work["sft"])
    named["healthy"] = functools.partial(disks.healthy, work["sft"])
    folder = work["sft"].folder
    for name, section in {
        "guests": own_code.guests,
        "environments": own_code.environments,
        "two_processes": own_code.two_processes,
        "data": strangers.data,
        "foreign_runs": strangers.foreign_runs,
        "directories": strangers.directories,
    }.items():
        named[name] = functools.partial(section, folder)
    return named


def main() -> int:
    parser = argparse.ArgumentParser(description=faults.__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sections, a pattern of names")
    parser.add_argument("--kills", type=int, default=10, help="of each job")
    parser.add_argument("--signals", type=int, default=2, help="to each job at work")
    parser.add_argument("--at-once", type=int, default=2, help="sections side by side")
    parser.add_argument("--out", default="faults_cpu.csv")
    parser.add_argument(
        "--table", action="store_true", help="print the table of docs/reliability.md"
    )
    parser.add_argument("--list", action="store_true", help="print the sections")
    arguments = parser.parse_args()
    if arguments.table:
        columns = "fault", "tries", "lost", "wrong"
        print("|", " | ".join(columns), "|\n|---|---|---|---|")
        first = "kill -9, ", "signal"  # faults with many tries, and then by name
        for row in sorted(
            results.read(arguments.out),
            key=lambda row: (
                [not row["fault"].startswith(x) for x in first],
                row["fault"],
            ),
        ):
            print("|", " | ".join(row[name] for name in columns), "|")
        return 0
    if arguments.list:
        with tempfile.TemporaryDirectory() as folder:
            print(*sections(jobs(pathlib.Path(folder)), 1, 1), sep="\n")
        return 0
    # A shell ignores SIGINT for what it starts in the background, and for its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/huggingface"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        work, rows, writing = jobs(pathlib.Path(folder)), [], threading.Lock()

        def carry_out(section: Callable[[], Iterator[Row]]) -> None:
            for row in section():
                row.message = row.message.replace(f"{folder}/", "")
                counts = f"{row.tries:3} tries {row.lost:3} lost {row.wrong} wrong"
                print(f"{row.fault:42} {counts}\n    {row.message}", flush=True)
                made = dataclasses.asdict(row) | results.provenance()
                with writing:
                    rows.append(row)
                    results.merge(arguments.out, [made], ["fault"])

        named = sections(work, arguments.kills, arguments.signals)
        chosen = [f for name, f in named.items() if re.search(arguments.only, name)]
        with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(carry_out, chosen))
    print(f"{time.monotonic() - began:.0f} seconds")
    return int(any(row.lost or row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
