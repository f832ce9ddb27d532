"""Learning curves of reinforcement learning on a CPU.

curves: the shipped arithmetic jobs as they are, and with prompts that are read once per
group and slots that are refilled. These savings change when something is computed, not
what is learned: curves differ by rounding, which the optimizer enlarges.

replay: policies that learn within their sampler's support, under three truncations:
the shares of tokens whose ratio of the trainer's probability to the sampler's is inside
[0.9, 1.1], with the trainer's probability over the vocabulary and within the support.

fractions: rewards by rollout where a share `grpo.token_fraction` of the tokens is
learned from: as runs draw them, in proportion to bounds of their gradients, and, for
comparison, with equal probabilities.

entries: rewards of the last rollouts with exact gradients, with sampled ones, and from
entries that the sampler records, with the median seconds of phases.
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from unittest import mock

import numpy as np

from benchmarks import run_grpo
from jaxmem.train.jobs.grpo import minibatches

VARIANTS = {
    "as shipped": (),
    "savings": ("grpo.share_prompts=True", "grpo.row_lengths=(32,)",
                "sampling.slots=128"),
}  # fmt: skip
COLORS = {"as shipped": "tab:blue", "savings": "tab:orange"}
CURVE = ("step", "reward", "accuracy", "entropy", "run_cpu_seconds")
REPLAYED = run_grpo.ARITHMETIC[1]
SAMPLERS = (
    "top_p=0.8 support=14",
    "top_k=4",
    "min_p=0.3 support=14",
)
FRACTIONS = ("reward", "entropy", "grad_norm", "token_share", "token_weight_max")
RATIOS = ("unreplayed_inside_1_1", "ratios_inside_1_1", "ratios_outside_1_25",
          "mismatch_p99", "support_mean", "reward")  # fmt: skip


def curves(seeds, overrides):
    """(rows of both configs, rewards by rollout [config][variant, seed])."""
    rows, histories = [], {name: {} for name in run_grpo.ARITHMETIC}
    for name, variant, seed in itertools.product(histories, VARIANTS, range(seeds)):
        given = (f"run.seed={seed}", *VARIANTS[variant], *overrides)
        of_run, history = run_grpo.curve(name, given)
        histories[name][variant, seed] = [step.reward for step in history]
        facts = {"config": name, "variant": variant, "seed": seed}
        rows += [facts | {key: row[key] for key in CURVE} for row in of_run]
        print(rows[-1], flush=True)
    return rows, histories


def draw(path, histories):
    """Draw reward by rollout, a panel per config and a line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, len(histories), sharey=True, squeeze=False)[0]
    for panel, (name, runs) in zip(panels, histories.items(), strict=True):
        for (variant, seed), rewards in runs.items():
            panel.plot(
                range(1, len(rewards) + 1), rewards, color=COLORS[variant],
                alpha=0.7, linewidth=1, label=None if seed else variant,
            )  # fmt: skip
        panel.set(title=name.removesuffix(".gin"), xlabel="rollout", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward")
    panels[0].legend()
    figure.savefig(path, dpi=150)


def replay(steps, overrides) -> Iterator[dict]:
    """Rows of so many rollouts under each truncation."""
    for sampler in SAMPLERS:
        given = [f"sampling.{word}" for word in sampler.split()]
        history, _, _ = run_grpo.train(
            REPLAYED, [f"run.steps={steps}", *given, *overrides]
        )
        facts = {"config": REPLAYED, "sampler": sampler}
        yield from some_steps(history, facts, RATIOS, every=20)


def fractions(shares, config, seeds, workers, overrides) -> Iterator[dict]:
    """Rows of each share, draw and seed, and their `windows`.

    `workers` runs take place at a time, on a core each.
    """
    runs = [
        (share, draw, seed)
        for share in shares
        for draw in ("importance", "uniform")[: 2 if share < 1 else 1]
        for seed in range(seeds)
    ]
    given = [(config, *run, overrides) for run in runs]
    rows = []
    for found in on_cores(workers, _fraction, given):
        yield from found
        rows += found
    yield from windows(rows)


def on_cores(workers, run, given) -> Iterator:
    """Results of run(*arguments) in processes, `workers` at a time, on a core each."""
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in itertools.islice(itertools.cycle(os.sched_getaffinity(0)), workers):
        cores.put(core)
    with concurrent.futures.ProcessPoolExecutor(
        workers, context, initializer=_use_core, initargs=(cores,)
    ) as pool:
        yield from pool.map(run, *zip(*given, strict=True))


def _use_core(cores) -> None:
    """Run this process on one core, so that runs at a time do not slow each other."""
    os.sched_setaffinity(0, {cores.get()})


def _fraction(config, share, draw, seed, overrides) -> list[dict]:
    """Rows of one run; equal bounds give all tokens the same probability."""
    given = [f"grpo.token_fraction={share}", f"run.seed={seed}", *overrides]
    patch = contextlib.nullcontext()
    if draw == "uniform":
        patch = mock.patch.object(
            minibatches, "gradient_bounds", lambda _, part: np.zeros(part.old.shape)
        )
    with patch:
        history, _, (_, cpu) = run_grpo.train(config, given)
    facts = {"config": config, "token_fraction": share, "draw": draw, "seed": seed}
    facts |= {"run_cpu_seconds": round(cpu)}
    return [*some_steps(history, facts, FRACTIONS, 10)]


def windows(rows) -> Iterator[dict]:
    """Means of the rewards in each third of a run, over its rows, of all seeds.

    `lowest` and `highest` are the means of single seeds.
    """
    last = max(row["step"] for row in rows)
    ends = [round(last * k / 3) for k in range(4)]
    for share, draw in dict.fromkeys((x["token_fraction"], x["draw"]) for x in rows):
        runs = [x for x in rows if (x["token_fraction"], x["draw"]) == (share, draw)]
        for before, end in itertools.pairwise(ends):
            by_seed: dict[int, list[float]] = {}
            for row in runs:
                if before < row["step"] <= end:
                    by_seed.setdefault(row["seed"], []).append(row["reward"])
            means = [float(np.mean(rewards)) for rewards in by_seed.values()]
            if means:
                yield {
                    "config": runs[0]["config"],
                    "token_fraction": share,
                    "draw": draw,
                    "seed": "all",
                    "step": f"{before + 1} to {end}",
                    "reward": run_grpo.rounded(np.mean(means)),
                    "lowest": run_grpo.rounded(min(means)),
                    "highest": run_grpo.rounded(max(means)),
                }


HEADS = {
    "exact": (),
    "sampled": ("head.gradient=('sample', 4)",),
    "recorded": ("head.gradient=('recorded', 4)",),
    "recorded, bound 0.1": (
        "head.gradient=('recorded', 4)",
        "grpo.max_head_error=0.1",
    ),
}
LAST = 20  # rollouts whose rewards are averaged


def entries(heads, seeds, workers, overrides) -> Iterator[dict]:
    """A row of each head and seed: `workers` runs at a time, on a core each."""
    runs = [(head, seed, overrides) for head in heads for seed in range(seeds)]
    yield from on_cores(workers, _entries, runs)


def _entries(head, seed, overrides) -> dict:
    """The row of one run."""
    given = (*HEADS[head], f"run.seed={seed}", *overrides)
    history, _, (wall, _) = run_grpo.train(REPLAYED, given)
    errors = [step.head_error for step in history if step.head_error is not None]
    checked = sum(step.head_checked or 0 for step in history)
    rejected = sum(step.head_rejected or 0 for step in history)

    def mean(name):
        values = [getattr(step, name) for step in history[-LAST:]]
        return run_grpo.rounded(statistics.mean(values))

    def median(name):
        values = [getattr(step, name) for step in history]
        return run_grpo.rounded(statistics.median(values))

    return {
        "config": REPLAYED,
        "head": head,
        "seed": seed,
        "rollouts": len(history),
        "last_reward": mean("reward"),
        "last_accuracy": mean("accuracy"),
        "last_entropy": mean("entropy"),
        "head_error": run_grpo.rounded(statistics.median(errors)) if errors else "",
        "rejected_share": round(rejected / checked, 4) if checked else "",
        "rollout_seconds": median("rollout_seconds"),
        "update_seconds": median("update_seconds"),
        "run_seconds": round(wall),
    }


def some_steps(history, facts, fields, every) -> Iterator[dict]:
    """A row of the first step, of the last one, and of each multiple of `every`."""
    for step in history:
        if step.step in (1, len(history)) or step.step % every == 0:
            numbers = {name: run_grpo.rounded(getattr(step, name)) for name in fields}
            yield {**facts, "step": step.step, **numbers}
