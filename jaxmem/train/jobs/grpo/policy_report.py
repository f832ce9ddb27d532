"""Phases of a policy's step, planned or measured, and lines that a run prints."""

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.train import metrics, phases
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram, PolicyPrograms
from jaxmem.train.jobs.rollout.prompts import Task
from jaxmem.train.jobs.rollout_metrics import Rollout
from jaxmem.train.metrics import HeadCost, PolicyMetrics
from jaxmem.train.phases import Phase
from jaxmem.train.program import gradient_shapes

_MANY_REJECTED = 0.1  # share of micro-batches; entries save less than they cost then


def phases_of(program: PolicyProgram) -> list[Phase]:
    """The programs of a step, for a plan."""
    config, grpo = program.config, program.config.grpo
    weights, held = phases.weights_of(program), phases.moments_beside(program)
    if grpo.has_reference:
        held["reference weights"] = program.state_shapes.params
    forward = program.shapes(grpo.max_tokens_forward)[-1]
    backward = program.shapes(grpo.max_tokens_train)[-1]
    parts = grpo.minibatches  # each reads the prompts of its completions
    passes = config.passes.count + grpo.has_reference
    planned = [
        *program.rollout_phases(held),
        Phase(
            "log-probs",
            functools.partial(program.trace_logprobs, forward),
            weights,
            held,
            tokens=math.prod(forward),
            runs=passes * config.slots_read() / math.prod(forward),
        ),
        Phase(
            "gradients",
            program.trace_backward,
            weights | {"gradients": gradient_shapes(program.state_shapes.params)},
            held,
            phases.activations(program, math.prod(backward)),
            math.prod(backward),
            runs=grpo.epochs * config.slots_read(parts) / math.prod(backward),
            head=functools.partial(program.trace_head, backward, config.head),
        ),
    ]
    if not config.samples_itself:
        planned = [phase for phase in planned if phase.name != "rollout"]
    planned = [phase for phase in planned if phase.runs]
    if program.streamed is None:
        planned.append(program.update_phase(held, grpo.minibatches * grpo.epochs))
    return planned


def head_costs(program: PolicyProgram, compiled: PolicyPrograms) -> dict[str, HeadCost]:
    """Memory of a micro-batch with either head."""
    shape = program.shapes(program.config.grpo.max_tokens_train)[-1]
    of_shape = functools.partial(program.compile_gradients, shape)
    head_of = functools.partial(program.trace_head, shape)
    step = compiled.gradients[shape]
    return metrics.head_costs(program.config.head, step, of_shape, head_of)


def timed_phases(
    history: Sequence[PolicyMetrics], compiled: PolicyPrograms
) -> list[metrics.PhaseCost]:
    """Median seconds of each phase, and the memory of its largest program."""
    programs = {
        "rollout": [x for x in compiled.sample or () if x is not None],
        "old": [*compiled.logprobs.values()],
        "reference": [*compiled.reference.values()],
        "update": [*compiled.gradients.values(), compiled.update],
    }
    return [
        metrics.PhaseCost(
            name,
            statistics.median(getattr(step, f"{name}_seconds") for step in history),
            max(map(metrics.memory_of, group), key=lambda memory: memory.peak),
        )
        for name, group in programs.items()
        if group
    ]


def entries_summary(history: Sequence[PolicyMetrics]) -> dict[str, Any]:
    """Fields of summary.json about recorded entries; None in runs without any.

    `head_error` is the mean of the steps', and the others are sums over the steps.
    """
    checked = [step for step in history if step.head_checked]
    errors = [step.head_error for step in checked if step.head_error is not None]
    counts = "head_rejected", "head_checked", "head_without_estimate"
    return {
        "head_error": statistics.fmean(errors) if errors else None,
        **{
            name: sum(getattr(step, name) or 0 for step in checked) if checked else None
            for name in counts
        },
    }


def advice_on_entries(
    config: GrpoJobConfig, history: Sequence[PolicyMetrics]
) -> Iterator[str]:
    """Yield a line for a run whose entries were often rejected."""
    summary = entries_summary(history)
    rejected, checked = summary["head_rejected"], summary["head_checked"]
    k = config.head.recorded
    if k is None or not checked or rejected < _MANY_REJECTED * checked:
        return
    yield (
        f"head.gradient={config.head.gradient}: {rejected:,} of {checked:,} "
        f"micro-batches ({rejected / checked:.0%}) were computed twice, because their "
        f"errors exceeded grpo.max_head_error={config.grpo.max_head_error:g}: use "
        f'("sample", {k}), more entries than {k}, a smaller optimizer.learning_rate or '
        "fewer updates per rollout, or raise grpo.max_head_error"
    )


def examples(task: Task, rollout: Rollout, count: int = 3) -> Iterator[str]:
    """Lines with the text of `count` completions, evenly spaced over a rollout."""
    count = min(count, len(rollout.advantages))
    stride = len(rollout.advantages) // count
    for i in range(0, count * stride, stride):
        prompt, answer = task.shown(rollout.prompts, rollout.completions, i)
        verdict = "right" if rollout.graded.right[i] else "wrong"
        yield f"{prompt} {answer[:60]}  ({verdict})"
