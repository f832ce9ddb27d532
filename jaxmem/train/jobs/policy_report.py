"""What a policy's run prints and leaves at its end."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from jaxmem.train import metrics, plots, report
from jaxmem.train.jobs.policy_program import Compiled, PolicyProgram
from jaxmem.train.jobs.questions import Task
from jaxmem.train.jobs.rollout_metrics import Rollout
from jaxmem.train.metrics import HeadCost, Phase, PolicyMetrics


def head_costs(program: PolicyProgram, compiled: Compiled) -> dict[str, HeadCost]:
    """Memory of a micro-batch with either head; the one that trained is not redone."""
    trained = program.config.head
    shape = program.shapes(program.config.grpo.max_tokens_train)[-1]
    costs = {}
    for implementation in ("fused", "materialised"):
        head = trained.using(implementation)
        step = compiled.gradients[shape]
        if head != trained:
            step = program.compile_gradients(shape, head)
        costs[implementation] = HeadCost(
            head=metrics.memory_of(program.compile_head(shape, head)),
            step=metrics.memory_of(step),
        )
    return costs


def phases_of(history: list[PolicyMetrics], compiled: Compiled) -> list[Phase]:
    """What each phase took: median seconds, and the largest of its programs."""
    programs = {
        "rollout": [compiled.sample],
        "old": compiled.logprobs.values(),
        "reference": compiled.reference.values(),
        "update": [*compiled.gradients.values(), compiled.update],
    }
    return [
        metrics.phase_of(name, history, programs[name])
        for name in programs
        if name != "reference" or history[-1].kl is not None
    ]


def write(
    out_dir: Path,
    history: list[PolicyMetrics],
    costs: dict[str, HeadCost],
    phases: list[Phase],
    shown: Iterable[str],
    console: Console,
) -> None:
    """Print what a run cost and gained, and leave its summary, figure and report.

    Args:
        out_dir: directory of the run.
        history: its steps.
        costs: memory by implementation of the head; may be empty.
        phases: of a step.
        shown: lines of completions to print.
        console: receives the lines.
    """
    if costs:
        console.print(metrics.cost_table(costs))
    console.print(metrics.phase_table(phases))
    for line in shown:
        console.print(line, highlight=False, markup=False)
    console.print(
        f"reward {history[0].reward:.3f} -> {history[-1].reward:.3f} in "
        f"{len(history)} rollouts, {metrics.tokens_per_second(history):,.0f} tokens/s",
        highlight=False,
    )
    metrics.save_policy_summary(out_dir / "summary.json", history, costs, phases)
    plots.save(out_dir / "report.png", history, costs, "reward", "reward")
    report.finish(out_dir, console)


def examples(task: Task, rollout: Rollout, count: int = 3) -> Iterator[str]:
    """Some completions of the last rollout, as they read."""
    count = min(count, len(rollout.advantages))
    each = len(rollout.advantages) // count
    for i in range(0, count * each, each):
        prompt, answer = task.shown(rollout.asked, rollout.completions, i)
        verdict = "right" if rollout.graded.right[i] else "wrong"
        yield f"{prompt} {answer[:60]}  ({verdict})"
