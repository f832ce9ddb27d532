"""Phases of a policy's step, planned or measured, and lines that a run prints."""

import functools
import math
import statistics
from collections.abc import Iterator, Sequence

from jaxmem.train import metrics, phases
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram, PolicyPrograms
from jaxmem.train.jobs.rollout.prompts import Task
from jaxmem.train.jobs.rollout_metrics import Rollout
from jaxmem.train.metrics import HeadCost, PolicyMetrics
from jaxmem.train.phases import Phase
from jaxmem.train.program import gradient_shapes


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


def examples(task: Task, rollout: Rollout, count: int = 3) -> Iterator[str]:
    """Lines with the text of `count` completions, evenly spaced over a rollout."""
    count = min(count, len(rollout.advantages))
    stride = len(rollout.advantages) // count
    for i in range(0, count * stride, stride):
        prompt, answer = task.shown(rollout.prompts, rollout.completions, i)
        verdict = "right" if rollout.graded.right[i] else "wrong"
        yield f"{prompt} {answer[:60]}  ({verdict})"
