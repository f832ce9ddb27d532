"""Reinforcement learning: reward by rollout; seconds and GiB by phase.

    python -m benchmarks.run_grpo
    python -m benchmarks.run_grpo --phases grpo_qwen3_8b_h200.csv grpo_qwen3_8b_h200.gin
    python -m benchmarks.run_grpo --phases grpo_qwen3_8b_h200.csv --run DIR CONFIG.gin

The first runs both arithmetic configs and writes grpo_arithmetic_cpu.csv and a figure;
the second runs one config, with overrides after its name, and writes what its phases
took, with their shares of a step, and the rewards, which are a part of the rollout; the
third reads the phases from what `jaxmem train` left in a folder.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import tempfile
import time
from unittest import mock

from benchmarks import results
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.rollout import prompt_tasks

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
ARITHMETIC = ("grpo_arithmetic.gin", "grpo_arithmetic_multitoken.gin")
OF_ENTRIES = (
    "forward_error", "head_error", "head_rejected", "head_checked",
    "head_without_estimate",
)  # fmt: skip
FIELDS = ("reward", "accuracy", "entropy", "sum_pi_squared", "kl", "mismatch_max")


def train(name, overrides=()):
    """A run's history, its summary, and its seconds (wall clock, CPU)."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = configuration.load(
            CONFIGS / name, [f"run.out_dir={folder}", *overrides]
        )
        start = time.perf_counter(), time.process_time()
        made = jobs.train(*loaded)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        summary = json.loads((made.out_dir / "summary.json").read_text("utf-8"))
    return made.history, summary, seconds


def curve(name, overrides=(), every=10):
    """A row for the first rollout, every tenth, and the last; the whole history."""
    history, _, (wall, cpu) = train(name, overrides)
    rows, passed = [], 0.0
    for step in history:
        passed += step.seconds
        if step.step in (1, len(history)) or step.step % every == 0:
            rows.append(
                {
                    "config": name,
                    "step": step.step,
                    "seconds": round(passed, 1),
                    **{f: rounded(getattr(step, f)) for f in FIELDS},
                    "tokens_per_second": round(step.tokens_per_second),
                    "run_seconds": round(wall),
                    "run_cpu_seconds": round(cpu),
                }
            )
    return rows, history


def phases(name, overrides=()):
    """A row a phase of a run of this config, made here and now, and one of rewards."""
    with timed_rewards() as rewards:
        history, summary, _ = train(name, overrides)
    last = history[-1]._asdict()
    rows = _of(name, overrides, summary, last)
    spent = {row["phase"]: row["seconds"] for row in rows}
    spent["rewards"] = round(statistics.median(rewards), 6)
    spent["step"] = round(statistics.median(step.seconds for step in history), 3)
    same = {key: rows[0][key] for key in ("config", "overrides", "tokens")}
    rows += [same | {"phase": phase} for phase in ("rewards", "step")]
    for row in rows:
        row["seconds"] = spent[row["phase"]]
        row["share"] = round(row["seconds"] / spent["step"], 4)
    whole = rows[-1]
    whole["tokens_per_second"] = round(whole["tokens"] / whole["seconds"])
    return [row | results.provenance() for row in rows]


@contextlib.contextmanager
def timed_rewards():
    """A list of the seconds that each call of a task's `grade` takes in the context."""
    seconds = []

    def timed(grade):
        def run(*arguments):
            start = time.perf_counter()
            graded = grade(*arguments)
            seconds.append(time.perf_counter() - start)
            return graded

        return run

    with contextlib.ExitStack() as patches:
        for task in (prompt_tasks.ArithmeticTask, prompt_tasks.OwnPrompts):
            patches.enter_context(mock.patch.object(task, "grade", timed(task.grade)))
        yield seconds


def phases_of(folder, name, overrides=()):
    """A row a phase of a run that `jaxmem train` made."""
    folder = pathlib.Path(folder)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    last = json.loads((folder / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    where = {k: summary[k] for k in ("device", "jax")} | {"date": results.today()}
    return [row | where for row in _of(name, overrides, summary, last)]


def _of(name, overrides, summary, last):
    """Median seconds of a step, and memory by the compiler and by the device."""
    return [
        {
            "config": name,
            "overrides": " ".join(overrides),
            "phase": phase,
            "tokens": last["tokens"],
            "seconds": round(told["seconds"], 3),
            "temporary_gib": round(told["temporary"] / 2**30, 2),
            "program_gib": round(told["peak"] / 2**30, 2),
            "device_peak_gib": rounded(summary["peak_gib"]),
            "mismatch_mean": rounded(last["mismatch_mean"]),
            **{k: rounded(last[k]) for k in OF_ENTRIES if last.get(k) is not None},
        }
        for phase, told in summary["phases"].items()
    ]


def draw(path, histories):
    """Reward by rollout, one line a config."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    panel = figure.subplots()
    for name, history in histories.items():
        steps, rewards = zip(*((s.step, s.reward) for s in history), strict=True)
        panel.plot(steps, rewards, label=name.removesuffix(".gin"))
    panel.set(xlabel="rollout", ylabel="reward", ylim=(0, 1))
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=150)


def rounded(value, digits=4):
    """To significant digits; empty where there is no value."""
    return "" if value is None else float(f"{value:.{digits}g}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="grpo_arithmetic_cpu.csv")
    parser.add_argument(
        "--phases", metavar="OUT.csv", help="what a config's phases take"
    )
    parser.add_argument("--run", metavar="DIR", help="of --phases: a run that is made")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args(arguments)
    if asked.phases:
        made = (phases_of, asked.run) if asked.run else (phases,)
        rows = made[0](*made[1:], asked.config, asked.overrides)
        print("wrote", results.save(asked.phases, rows))
        return
    overrides = [word for word in (asked.config, *asked.overrides) if word]
    made = {name: curve(name, overrides) for name in ARITHMETIC}
    rows = [row for rows, _ in made.values() for row in rows]
    path = results.write(asked.out, rows)
    draw(path.with_suffix(".png"), {name: h for name, (_, h) in made.items()})
    print("wrote", path)


if __name__ == "__main__":
    main()
