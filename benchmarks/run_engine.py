"""GRPO with an engine: rewards by age of the rollouts, and seconds of a step.

    python -m benchmarks.run_engine curves
    python -m benchmarks.run_engine curves --seeds 0 --out PART.csv
    python -m benchmarks.run_engine summary PART.csv ... --out engine_staleness_cpu.csv
    python -m benchmarks.run_engine steps --config grpo_qwen3_8b_h200.gin

Both start `jaxmem serve` in a process of its own, and train through its address.

curves: the arithmetic job on a CPU, three seeds, with completions that are 0, 1 and 4
updates old, without a correction and with two. The server samples all groups that have
been asked for before it loads new weights, so that each group is as old as it may be:
a fast engine. A summary adds rows over all seeds. The job refuses runs without a
correction, which this script turns off.

steps: seconds of a step with the run's own sampler, and with a server on a second GPU
that samples before each update, or during it.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from unittest import mock

from benchmarks import results, run_grpo
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.rollout.engine_source import EngineSource
from jaxmem.train.results import export

PROGRAM = (sys.executable, "-m", "benchmarks.run_engine")
VARIANTS = (
    (0, None), (1, None), (1, "tis"), (1, "icepop"), (4, None), (4, "tis"),
    (4, "icepop"),
)  # fmt: skip
# Sizes that a checkpoint sets.
SIZES = (
    "vocab_size layers hidden ff heads kv_heads head_dim tied rope.theta norm.eps "
    "qk_norm.enabled mlp.activation embedding.scaled"
).split()
FROM_CHECKPOINT = [f"model.{name}=None" for name in SIZES]
LAST = 20  # steps whose mean reward is compared
PHASES = (
    "seconds", "rollout_seconds", "old_seconds", "reference_seconds", "update_seconds",
    "waiting_seconds", "push_seconds", "engine_idle_seconds",
    "engine_tokens_per_second", "staleness_mean",
)  # fmt: skip


class OldestGroups(EngineSource):
    """Gives the engine new weights when it has sampled everything it was asked for."""

    def _push(self, version, weights):
        if self._groups is not None:
            for attempt in self._starts:
                self._groups.result(attempt)
        return super()._push(version, weights)


@contextlib.contextmanager
def server(model, weights, slots, length, device=None):
    """The address of a `jaxmem serve` for the time of the context."""
    command = [
        sys.executable, "-m", "jaxmem", "serve", str(model), "--port", "0",
        "--weights", str(weights), "--slots", str(slots), "--max-len", str(length),
    ]  # fmt: skip
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    process = subprocess.Popen(
        command, env=os.environ | chosen, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield _address(process)
    finally:
        process.terminate()
        process.communicate()


def _address(process):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://[\w.]+:\d+", line):
            return found[0]
    raise SystemExit("jaxmem serve ended:\n" + "".join(lines))


def curves(seeds, overrides):
    """Rows of each variant and seed: reward by step, and the age of its tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start, weights = folder / "start", folder / "weights"
        weights.mkdir()
        config, given = run_grpo.ARITHMETIC[0], ["optimizer.learning_rate=1e-30"]
        jobs.train(*_loaded(config, [*given, "run.steps=1", f"run.out_dir={start}"]))
        with server(start / "model", weights, slots=512, length=5) as url:
            for seed, variant in itertools.product(seeds, VARIANTS):
                staleness, correction = variant
                given = [
                    *FROM_CHECKPOINT, f"model.checkpoint={start / 'model'}",
                    f"run.seed={seed}", f"grpo.correction={correction}",
                    f"rollouts.max_staleness={staleness}", "rollouts.engine=vllm",
                    f"rollouts.urls={url}", f"rollouts.weights={weights}",
                    "rollouts.concurrency=512", f"task.seed={seed}",
                ]  # fmt: skip
                facts = {
                    "max_staleness": staleness,
                    "correction": correction or "none",
                    "seed": seed,
                }
                for row in _curve(config, [*given, *overrides]):
                    yield facts | row


def _curve(config, overrides):
    """A row for every tenth step, and one for the last steps together."""
    with (
        mock.patch("jaxmem.train.jobs.grpo.job.EngineSource", OldestGroups),
        mock.patch.object(GrpoJobConfig, "_check_engine"),
    ):
        history, _, _ = run_grpo.train(config, overrides)
    ages = statistics.fmean(step.staleness_mean for step in history)
    for step in history:
        if step.step == 1 or step.step % 10 == 0:
            yield {
                "step": step.step,
                "reward": run_grpo.rounded(step.reward),
                "entropy": run_grpo.rounded(step.entropy),
                "staleness_mean": run_grpo.rounded(step.staleness_mean),
                "dropped": run_grpo.rounded(step.dropped),
            }
    yield {
        "step": f"last {LAST}",
        "reward": run_grpo.rounded(
            statistics.fmean(step.reward for step in history[-LAST:])
        ),
        "staleness_mean": run_grpo.rounded(ages),
    }


def summary(rows):
    """Rows over all seeds: the reward of the last steps, its mean and its range."""
    last = [row for row in rows if row["step"] == f"last {LAST}"]
    for staleness, correction in VARIANTS:
        named = str(staleness), correction or "none"
        alike = [x for x in last if (str(x["max_staleness"]), x["correction"]) == named]
        rewards = [float(row["reward"]) for row in alike]
        if rewards:
            yield {
                "max_staleness": staleness,
                "correction": correction or "none",
                "seed": f"all {len(rewards)}",
                "step": f"last {LAST}",
                "reward": run_grpo.rounded(statistics.fmean(rewards)),
                "lowest": min(rewards),
                "highest": max(rewards),
                "staleness_mean": alike[0]["staleness_mean"],
                **{key: alike[0][key] for key in ("device", "jax", "jaxlib", "date")},
            }


def _loaded(config, overrides):
    return configuration.load(run_grpo.CONFIGS / config, overrides)


def write_start(directory, config):
    """Write a checkpoint of the random weights that a run of the config starts from."""
    job = jobs.job_of(_loaded(config, [])[0])
    job.program = job.make_program(job.vocabulary())
    trained = job.program.initial_state().params
    model = job.program.model(trained, job.program.frozen())
    export(directory, model, job, directory.parent)


CASES = {
    "own": ("own sampler, adapters", True, None),
    "0": ("engine, adapters, max_staleness=0", True, 0),
    "1": ("engine, adapters, max_staleness=1", True, 1),
    "own-whole": ("own sampler, whole weights", False, None),
    "whole-0": ("engine, whole weights, max_staleness=0", False, 0),
    "whole-1": ("engine, whole weights, max_staleness=1", False, 1),
}
ADAPTERS = "model.lora_rank=16", "optimizer.trainable=None"


def steps(config, overrides, cases, count, parent):
    """Rows of medians by case, in their order."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = pathlib.Path(name)
        start, weights = folder / "start", folder / "weights"
        weights.mkdir()
        subprocess.run([*PROGRAM, "start", str(start), "--config", config], check=True)
        given = [*FROM_CHECKPOINT, *overrides, f"run.steps={count}"]
        given += [f"model.checkpoint={start}"]
        loaded, _ = _loaded(config, given)
        slots, length = loaded.grpo.samples, loaded.longest + 1
        # A server has adapters or other whole weights, but not both.
        for adapters, alike in itertools.groupby(cases, lambda case: CASES[case][1]):
            with server(start, weights, slots, length, device=1) as url:
                for case in alike:
                    label, _, staleness = CASES[case]
                    settings = [*given, f"run.out_dir={folder / case}"]
                    settings += ADAPTERS if adapters else ()
                    if staleness is not None:
                        settings += _through(url, weights, staleness)
                    yield _row(config, label, settings)


def _through(url, weights, staleness):
    """Settings of a run whose rollouts are of an engine."""
    settings = [
        f"rollouts.max_staleness={staleness}", "rollouts.engine=vllm",
        f"rollouts.urls={url}", f"rollouts.weights={weights}",
    ]  # fmt: skip
    return [*settings, "grpo.correction=icepop"] if staleness else settings


def _row(config, case, overrides):
    """Medians over all steps but the first two, which compile and fill the queue."""
    command = [sys.executable, "-m", "jaxmem", "train", run_grpo.CONFIGS / config]
    subprocess.run(
        [*command, *overrides],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        check=True,
    )
    out = next(x for x in overrides if x.startswith("run.out_dir=")).partition("=")[2]
    lines = (pathlib.Path(out) / "metrics.jsonl").read_text("utf-8").splitlines()[2:]
    history = [json.loads(line) for line in lines]
    row = {"case": case, "tokens": history[-1]["tokens"]}
    for name in PHASES:
        values = [step[name] for step in history if step.get(name) is not None]
        row[name] = run_grpo.rounded(statistics.median(values)) if values else ""
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    asked = kinds.add_parser("curves")
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked.add_argument("--out", default="engine_staleness_cpu.csv")
    asked = kinds.add_parser("steps")
    asked.add_argument("--config", default="grpo_qwen3_8b_h200.gin")
    asked.add_argument("--count", type=int, default=8)
    asked.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    asked.add_argument("--run", type=int, default=1, help="number of this run")
    asked.add_argument("--folder", default="/dev/shm", help="for all weights")
    asked.add_argument("--out", default="engine_steps_h200.csv")
    for parser_of_kind in kinds.choices.values():
        parser_of_kind.add_argument("--set", nargs="*", default=[])
    asked = kinds.add_parser("summary")
    asked.add_argument("parts", nargs="+")
    asked.add_argument("--out", default="engine_staleness_cpu.csv")
    asked = kinds.add_parser("start")
    asked.add_argument("directory", type=pathlib.Path)
    asked.add_argument("--config", required=True)
    args = parser.parse_args(arguments)
    if args.kind == "start":
        write_start(args.directory, args.config)
        return
    if args.kind == "summary":
        rows = [row for part in args.parts for row in results.read(part)]
        print("wrote", results.save(args.out, [*rows, *summary(rows)]))
        return
    if args.kind == "curves":
        rows_of_runs = curves(args.seeds, args.set)
    else:
        measured = steps(args.config, args.set, args.cases, args.count, args.folder)
        rows_of_runs = ({"run": args.run} | row for row in measured)
    rows, path = [], None
    for row in rows_of_runs:
        print(row, flush=True)
        rows.append(row | results.provenance())
        path = results.save(args.out, rows)
    print("wrote", path)


if __name__ == "__main__":
    main()
