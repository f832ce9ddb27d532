"""The policy that `remat.fit` picks, against all of its candidates, measured.

    python -m benchmarks.run_fit --out fit_h200.csv

One process compiles and times every candidate, and asks for the best under six limits
of memory, from what the leanest takes to what the largest does. Another reads the
allocator's peaks (`run_offload`). A row is a candidate, or a limit.
"""

import argparse
import functools
import inspect
import statistics
from typing import Any

import jax

from benchmarks import results, run_offload, stack, workers
from jaxmem import remat

SHARES = (
    0.02,
    0.15,
    0.3,
    0.5,
    0.75,
    1.01,
)  # of the way from the leanest to the largest
LAST = (1, 2)  # blocks that may be kept whole
KEYS = ("candidate", "limit_gib", "layers", "width", "tokens", "device")
GIB = run_offload.GIB


class Known:
    """A traced step that is compiled once."""

    def __init__(self, sizes, policy):
        self.traced = stack.trace(sizes, stack.Variant(policy))
        self.jaxpr = self.traced.jaxpr
        self.compiled: jax.stages.Compiled | None = None

    def lower(self):
        return self

    def compile(self):
        if self.compiled is None:
            self.compiled = self.traced.lower().compile()
        return self.compiled


class Step:
    """policy -> what `remat.fit` reads, each traced and compiled once."""

    def __init__(self, sizes):
        self.sizes, self.known = sizes, {}

    def __call__(self, policy):
        if policy not in self.known:
            self.known[policy] = Known(self.sizes, policy)
        return self.known[policy]


def work(args):
    """Rows: candidates with their times, then limits with what was picked."""
    sizes = stack.SIZES[args.sizes]
    step = Step(sizes)
    rates = remat.measure_rates()
    if args.sizes == "tiny":  # a CPU's link, made up
        rates = remat.Rates(rates.products, 1e12, 1e12)
    remat.fit(step, 2**50, last=LAST, rates=rates, show=None)  # traces all of them
    # More than two names on the host take longer than making all of them again.
    asked = [p for p in step.known if p is None or len(p.offload) < 3]
    programs = run_offload.compile_all(
        sizes, {stack.text_of(p): stack.Variant(p) for p in asked}
    )
    for policy, known in step.known.items():
        known.compiled = programs.get(stack.text_of(policy))
    seconds = times(sizes, programs, args.rounds)
    common = {
        "layers": sizes.layers,
        "width": sizes.width,
        "tokens": sizes.rows * sizes.length,
    }
    table = {}
    for text, run in programs.items():
        row = common | {"candidate": text, "ms": round(seconds[text] * 1e3, 2)}
        table[text] = remat.device_bytes(run), row["ms"]
        row["program_gib"] = round(table[text][0] / GIB, 4)
        workers.send(row | results.provenance())
    least, most = min(b for b, _ in table.values()), max(b for b, _ in table.values())
    for share in SHARES:
        limit = int(least + share * (most - least))
        workers.send(common | choice(step, limit, rates, table) | results.provenance())


def choice(step, limit, rates, table) -> dict[str, Any]:
    """What is picked under a limit, and the best there was."""
    text = stack.text_of(remat.fit(step, limit, last=LAST, rates=rates))
    if text not in table:
        return {"candidate": text, "limit_gib": round(limit / GIB, 4)}
    best = min((ms, other) for other, (size, ms) in table.items() if size <= limit)
    return {
        "candidate": text,
        "limit_gib": round(limit / GIB, 4),
        "ms": table[text][1],
        "program_gib": round(table[text][0] / GIB, 4),
        "best": best[1],
        "best_ms": best[0],
        "over_best": round(table[text][1] / best[0], 4),
    }


def times(sizes, programs, rounds) -> dict[str, float]:
    """Seconds of a step, the median over rounds in which all take turns."""
    weights, h = run_offload.operands(sizes, stack.Variant(None))
    taken: dict[str, list] = {text: [] for text in programs}
    for i in range(rounds + 1):
        for text, run in programs.items():
            seconds, weights = run_offload.seconds_of(run, weights, h)
            if i:
                taken[text].append(seconds)
    return {text: statistics.median(values) for text, values in taken.items()}


def drive(args):
    """Times in one process, peaks in another."""
    with workers.compilation_cache() as environment:
        common = [f"--sizes={args.sizes}", f"--rounds={args.rounds}"]
        start = functools.partial(workers.start, environment=environment)
        rows = []
        for row in start("benchmarks.run_fit", arguments=["--worker", *common]):
            rows.append(row)
            print(row, flush=True)
        programs = [row for row in rows if "limit_gib" not in row]  # others: choices
        sizes = {row["candidate"]: row["program_gib"] for row in programs}
        asked = [f"--variant={text}" for text in sorted(sizes, key=sizes.__getitem__)]
        asked += ["--worker=run", f"--first={rows[0]['candidate']}", "--rounds=0"]
        runs = start("benchmarks.run_offload", arguments=[*asked, common[0]])
        by_text = {row["variant"]: row.get("peak_gib", "") for row in runs}
        for row in rows:
            row["peak_gib"] = by_text.get(row["candidate"], "")
        results.merge(args.out, rows, KEYS)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--sizes", choices=list(stack.SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="fit.csv", help="in benchmarks/results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    (work if args.worker else drive)(args)


if __name__ == "__main__":
    main()
