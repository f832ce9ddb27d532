"""Compare the tests of several trees: their coverage, and the mutants that they kill.

    python -m tests.mutants_of_trees --tree before=../before --tree after=. \\
        --count 160 --seconds 430 --out benchmarks/results

First each quick test file of `tests/head` runs once in its own tree. This gives the
lines of `jaxmem/head` that it executes, and the tests that fail without any mutant,
which are left out. Then mutants are drawn from the functions that have the same text in
all trees. In each tree, those test files run that execute a line of the mutant's
statement, the likeliest first, until one fails. Each process has one core and one
thread. Compiled programs of unchanged code are shared, by a key of the whole program.

OUT/coverage_head_cpu.csv has the lines of each module, and OUT/mutants_head_cpu.csv has
one row for each mutant and tree, written as soon as it is known. The totals leave out
mutants that are not decided in all trees within the seconds.
"""

import argparse
import ast
import collections
import csv
import dataclasses
import fnmatch
import itertools
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import coverage
import coverage.parser

from tests.mutants import Mutant, draw, mutants_of

PACKAGE, TESTS = "jaxmem/head", "tests/head"
MARKED = "not (full or slow or gpu)"
# Modules whose functions quick tests run on CPUs. Of others only coverage is measured.
MODULES = (
    "jaxmem/head/maths/*.py", "jaxmem/head/verbs/*.py", "jaxmem/head/backends/xla*.py",
    "jaxmem/head/backends/choose.py",
)  # fmt: skip
FIRST = ("test_functions", "test_reference", "test_api")  # after the module's own tests
COLUMNS = (
    "tree", "module", "function", "before", "after", "verdict", "killed_by", "seconds",
)  # fmt: skip
PART = 40  # seconds of test files that one process runs
PYTHONPATH = [x for x in [os.environ.get("PYTHONPATH")] if x]
_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist")


@dataclasses.dataclass(frozen=True)
class FileRun:
    """A test file in an unchanged tree: its time, failures, and executed lines."""

    seconds: float
    failed: tuple[str, ...]
    lines: dict[str, frozenset[int]]  # by module


@dataclasses.dataclass
class Trial:
    """One mutant in one tree, and its test files in parts that run alone."""

    number: int
    label: str
    mutant: Mutant
    parts: list[list[str]]
    passed: int = 0  # parts
    seconds: float = 0.0
    verdict: str = ""
    killed_by: str = ""

    def row(self):
        module, function, before, after = self.mutant[:4]
        where = self.label, module, function, before, after
        return *where, self.verdict, self.killed_by, round(self.seconds)


class Runner:
    """Processes of pytest, each on its own core and in its own copy of a tree."""

    def __init__(self, trees: dict[str, pathlib.Path], folder, deadline):
        self.trees, self.folder, self.deadline = trees, pathlib.Path(folder), deadline

    def is_over(self) -> bool:
        """True after the deadline."""
        return time.monotonic() > self.deadline

    def copy_of(self, label, core) -> pathlib.Path:
        """The tree's copy that belongs to a core."""
        copy = self.folder / label / str(core)
        if not copy.exists():
            for part in ("jaxmem", "tests"):
                shutil.copytree(self.trees[label] / part, copy / part, ignore=_COPIED)
            shutil.copy(self.trees[label] / "pyproject.toml", copy)
        return copy

    def pytest(self, root, core, files, limit, measured=()):
        """The process that ran test files of a tree; None if its time was over."""
        flags = ("--xla_cpu_multi_thread_eigen=false", "intra_op_parallelism_threads=1")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), *PYTHONPATH]),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "XLA_FLAGS": " ".join(flags),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "COVERAGE_CORE": "sysmon",
        }
        command = [
            *("taskset", "-c", str(core), sys.executable, "-m", *measured, "pytest"),
            *("-n", "0", "-q", "-rfE", "-p", "no:cacheprovider", "-m", MARKED, *files),
        ]
        limit = min(limit, self.deadline - time.monotonic())
        try:
            return subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True,
                timeout=max(limit, 0.1),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None

    def measure(self, label, file, core) -> FileRun | None:
        """Run a test file of an unchanged tree."""
        root, start = self.copy_of(label, core), time.monotonic()
        name = f"{label}-{file.replace('/', '-')}.coverage"
        data_file = self.folder / name
        measured = (
            "coverage",
            "run",
            f"--data-file={data_file}",
            f"--source={PACKAGE}",
        )
        done = self.pytest(root, core, [file], 600, (*measured, "-m"))
        if done is None:
            return None
        data = coverage.CoverageData(str(data_file))
        data.read()
        lines = {
            str(pathlib.Path(path).relative_to(root)): frozenset(data.lines(path) or ())
            for path in data.measured_files()
        }
        return FileRun(time.monotonic() - start, failures(done.stdout), lines)


def failures(output: str) -> tuple[str, ...]:
    """Names of tests that failed, and of files that could not be collected."""
    return tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE))


def test_files(root: pathlib.Path) -> list[str]:
    """Files of tests, the longest text first."""
    files = sorted((root / TESTS).rglob("test_*.py"), key=lambda x: -x.stat().st_size)
    return [x.relative_to(root).as_posix() for x in files if "_gpu" not in x.stem]


def each_on_a_core(cores, work: queue.Queue, do):
    """do(item, core) for all items, and for those that it adds meanwhile."""

    def loop(core):
        while True:
            item = work.get()
            try:
                do(item, core)
            finally:
                work.task_done()

    for core in cores:
        threading.Thread(target=loop, args=(core,), daemon=True).start()
    work.join()


def drawn_of(trees, count, seed, modules) -> list[tuple[Mutant, ...]]:
    """Mutants of functions with the same text in all trees, one of each tree."""
    first, *_ = trees.values()
    paths = sorted(
        x.relative_to(first).as_posix() for x in first.glob(f"{PACKAGE}/**/*.py")
    )
    each = {}
    for path in paths:
        has_all = all((root / path).exists() for root in trees.values())
        if has_all and any(fnmatch.fnmatch(path, x) for x in modules):
            each[path] = list(_shared(path, trees.values()))
    return draw(each, count, seed)


def _shared(path, roots):
    parsed = [ast.parse((root / path).read_text("utf-8")) for root in roots]
    tables = [_functions(tree) for tree in parsed]
    for name in tables[0]:
        same = [table[name] for table in tables if name in table]
        if len(same) == len(tables) and len({ast.unparse(x) for x in same}) == 1:
            pairs = zip(parsed, same, strict=True)
            each = (mutants_of(tree, path, x) for tree, x in pairs)
            yield from zip(*each, strict=True)


def _functions(tree):
    """Functions and methods of a module by name, without names that occur twice."""
    found = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    names = [x.name for x in found]
    return {x.name: x for x in found if names.count(x.name) == 1}


def parts_of(mutant: Mutant, runs: dict[str, FileRun]) -> list[list[str]]:
    """Test files that execute a mutant's statement, in groups of `PART` seconds."""
    stem, lines = pathlib.Path(mutant.module).stem, {*mutant.lines}
    files = [
        f for f, run in runs.items() if lines & run.lines.get(mutant.module, set())
    ]
    likely = (f"test_{stem}", *FIRST)

    def order(file):
        name = pathlib.Path(file).stem
        return (
            likely.index(name) if name in likely else len(likely),
            runs[file].seconds,
        )

    startup = min(run.seconds for run in runs.values())
    parts, left = [], 0.0
    for file in sorted(files, key=order):
        seconds = runs[file].seconds - startup
        if not parts or seconds > left:
            parts.append([])
            left = PART
        parts[-1].append(file)
        left -= seconds
    return parts


class Trials:
    """Trials of mutants in the order of their numbers, and the decided ones."""

    def __init__(self, runner: Runner, runs: dict[str, dict[str, FileRun]], write):
        self.runner, self.runs, self.write = runner, runs, write
        self.work = queue.PriorityQueue()
        self.lock, self.tie = threading.Lock(), itertools.count()
        self.decided: list[Trial] = []

    def add(self, number, label, mutant):
        """Begin with the likeliest part of the mutant's tests."""
        trial = Trial(number, label, mutant, parts_of(mutant, self.runs[label]))
        if trial.parts:
            self.put(trial, trial.parts[:1])
        else:
            self.decide(trial, "not executed")

    def put(self, trial, parts):
        for part in parts:
            self.work.put((trial.number, next(self.tie), trial, part))

    def decide(self, trial, verdict, killed_by=""):
        trial.verdict, trial.killed_by = verdict, killed_by
        self.decided.append(trial)
        self.write(trial.row())

    def run(self, item, core):
        """Test a mutant by one part, unless another one or the end came before."""
        *_, trial, part = item
        if trial.verdict or self.runner.is_over():
            return
        root, runs = self.runner.copy_of(trial.label, core), self.runs[trial.label]
        path, start = root / trial.mutant.module, time.monotonic()
        original = path.read_text("utf-8")
        failed = [f"--deselect={x}" for file in part for x in runs[file].failed]
        limit = 60 + 3 * sum(runs[file].seconds for file in part)
        path.write_text(trial.mutant.source, "utf-8")
        try:
            done = self.runner.pytest(root, core, ["-x", *failed, *part], limit)
        finally:
            path.write_text(original, "utf-8")
        with self.lock:
            trial.seconds += time.monotonic() - start
            if not trial.verdict:
                self.judge(trial, done)

    def judge(self, trial, done):
        """Decide the trial if a test has failed, or if all have passed."""
        if done is None:
            if not self.runner.is_over():
                self.decide(trial, "killed", "time")
        elif done.returncode not in (0, 5):  # 5: none of the tests is chosen
            named = failures(done.stdout) or (done.stderr.strip()[-200:],)
            self.decide(trial, "killed", named[0])
        else:
            trial.passed += 1
            if trial.passed == len(trial.parts):
                self.decide(trial, "survived")
            elif trial.passed == 1:
                self.put(trial, trial.parts[1:])


def write_coverage(path, trees, runs):
    """Write statements, and those that were executed, by tree and module."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("tree", "module", "statements", "executed"))
        for label, root in trees.items():
            for module in sorted(root.glob(f"{PACKAGE}/**/*.py")):
                name = module.relative_to(root).as_posix()
                parser = coverage.parser.PythonParser(filename=str(module))
                parser.parse_source()
                of_files = [run.lines.get(name, ()) for run in runs[label].values()]
                executed = parser.first_lines(set().union(*of_files))
                counts = len(parser.statements), len(executed & parser.statements)
                writer.writerow((label, name, *counts))


def main() -> None:
    """Measure each tree's tests, test mutants by them, and print the totals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="append", required=True, metavar="LABEL=DIR")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--module", action="append", help="a pattern of paths")
    parser.add_argument("--test", action="append", help="of the test files these only")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    labelled = (x.split("=", 1) for x in arguments.tree)
    trees = {label: pathlib.Path(root).resolve() for label, root in labelled}
    cores = sorted(os.sched_getaffinity(0))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(trees, folder, time.monotonic() + arguments.seconds)
        runs = measured(runner, cores, arguments.test or ["*"])
        write_coverage(arguments.out / "coverage_head_cpu.csv", trees, runs)
        modules = arguments.module or MODULES
        drawn = drawn_of(trees, arguments.count, arguments.seed, modules)
        path = arguments.out / "mutants_head_cpu.csv"
        decided = tried(runner, cores, runs, drawn, path)
    print_totals(decided, trees)


def measured(runner, cores, patterns) -> dict[str, dict[str, FileRun]]:
    """The run of each test file of each unchanged tree."""
    runs, work = {label: {} for label in runner.trees}, queue.Queue()
    files = {label: test_files(root) for label, root in runner.trees.items()}
    for of_trees in itertools.zip_longest(*files.values()):
        for label, file in zip(runner.trees, of_trees, strict=True):
            if file and any(fnmatch.fnmatch(file, x) for x in patterns):
                work.put((label, file))

    def measure(item, core):
        label, file = item
        run = runner.measure(label, file, core)
        if run is not None:
            runs[label][file] = run
            print(label, file, round(run.seconds), *run.failed, flush=True)

    each_on_a_core(cores, work, measure)
    return runs


def tried(runner, cores, runs, drawn, path) -> list[Trial]:
    """Trials that were decided in time, whose rows stand in the file at `path`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(row):
            writer.writerow(row)
            file.flush()
            print(*row, sep="  ", flush=True)

        writer.writerow(COLUMNS)
        trials = Trials(runner, runs, write)
        for number, mutants in enumerate(drawn):
            for label, mutant in zip(runner.trees, mutants, strict=True):
                trials.add(number, label, mutant)
        each_on_a_core(cores, trials.work, trials.run)
    return trials.decided


def print_totals(decided, trees):
    """Print each tree's count of killed mutants, of those decided in all trees."""
    labels = collections.defaultdict(dict)
    for trial in decided:
        labels[trial.number][trial.label] = trial
    whole = [x for x in labels.values() if len(x) == len(trees)]
    for label in trees:
        killed = sum(x[label].verdict == "killed" for x in whole)
        print(f"{label}: {killed} of {len(whole)} killed")


if __name__ == "__main__":
    main()
