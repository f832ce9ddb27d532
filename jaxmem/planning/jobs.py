"""Traces a job's programs from its configuration, for the devices of a plan."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

from jaxmem import checkpoints, remat
from jaxmem.models.decoder import Decoder, HeadConfig, ModelConfig
from jaxmem.planning.phase import Phase, device_bytes, host_bytes
from jaxmem.score.run import ScoreConfig, token_stats
from jaxmem.train import starting
from jaxmem.train.jobs import dpo, sft
from jaxmem.train.jobs.accumulated import AccumulatedProgram
from jaxmem.train.jobs.config import (
    Config,
    DistillJobConfig,
    DpoJobConfig,
    GrpoJobConfig,
)
from jaxmem.train.jobs.distill_program import DistillProgram
from jaxmem.train.jobs.policy_program import PolicyProgram
from jaxmem.train.program import DecoderProgram, gradient_shapes

TrainConfig = Config | GrpoJobConfig | DpoJobConfig | DistillJobConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """The programs that a configuration runs.

    Attributes:
        phases: the programs, in the order in which a step runs them.
        restored: bytes that a checkpoint restores to one device.
        on_host: bytes of state on the host, for one device.
        notes: further sentences for the reader.
    """

    phases: tuple[Phase, ...]
    restored: int = 0
    on_host: int = 0
    notes: tuple[str, ...] = ()


def of_config(config: TrainConfig | ScoreConfig, packed: bool = True) -> Job:
    """The programs of a job, inside of `jaxmem.devices.target`.

    Args:
        config: of training, or of scoring.
        packed: whether rows of supervised training hold several documents.

    Returns:
        The job.

    Raises:
        ValueError: as the job itself raises: sizes are not divisible by the mesh, or a
            checkpoint cannot be read.
    """
    if isinstance(config, ScoreConfig):
        return _of_score(config)
    config = starting.resolved(config)
    if isinstance(config, GrpoJobConfig):
        return _of_policy(config)
    if isinstance(config, DpoJobConfig):
        return _of_pairs(config)
    if isinstance(config, DistillJobConfig):
        return _of_student(config)
    return _of_supervised(config, packed)


def backward(config: TrainConfig, packed: bool = True) -> Phase:
    """The phase of `of_config` that computes the gradients of a micro-batch."""
    config = starting.resolved(config)
    if isinstance(config, GrpoJobConfig):
        program = PolicyProgram(config)
        return _gradients(program, _weights(program), _held(program))
    if isinstance(config, DpoJobConfig):
        return _of_pairs(config).phases[-1]
    if isinstance(config, DistillJobConfig):
        phases = _of_student(config).phases
        return next(phase for phase in phases if phase.name == "gradients")
    return _of_supervised(config, packed).phases[0]


def _of_supervised(config: Config, packed: bool) -> Job:
    vocab_size = config.model.vocab_size or config.data.vocab_size
    program = sft.Program(config, vocab_size)
    program.choose_policy(lambda: program.trace_step(config.head, packed), _silent())
    rows = config.data.batch_size * config.data.sequence_length
    given = _weights(program)
    if program.streamed is None:
        given |= {"moments": program.state_shapes.optimizer}
    step = Phase(
        "train step" if program.streamed is None else "gradients",
        program.trace_step(config.head, packed),
        given,
        held=_streamed_slices(program),
        parts=_parts(program, rows, made_here=True),
        tokens=rows * config.run.accumulate,
        head=functools.partial(program.trace_head, config.head),
    )
    return _job(program, [step])


def _of_pairs(config: DpoJobConfig) -> Job:
    """The reference is scored once, before the first step, and so runs in none."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "of the checkpoint"
    program = dpo.Program(config, vocab_size)
    program.choose_policy(program.trace_step, _silent())
    weights, moments = _weights(program), {}
    if program.streamed is None:
        moments = {"moments": program.state_shapes.optimizer}
    tokens = 2 * config.data.batch_size * config.data.sequence_length
    evaluated = config.data.held_out and config.eval.every
    reference = Phase(
        "reference",
        program.trace_logprobs(),
        weights,
        held=moments if evaluated else {},  # the same program scores what is held out
        tokens=tokens,
        runs=0,
    )
    step = Phase(
        "gradients" if program.streamed else "train step",
        program.trace_step(),
        weights | moments,
        held=_streamed_slices(program),
        parts=_parts(program, tokens, made_here=True),
        tokens=tokens * config.run.accumulate,
    )
    note = "the reference is scored once, before the first step"
    return dataclasses.replace(_job(program, [reference, step]), notes=(note,))


def _of_student(config: DistillJobConfig) -> Job:
    if config.distill.mode == "offline":
        raise ValueError(
            "distill.mode='offline' has no plan: what it takes depends on the columns "
            "of data.source; plan run.job='sft' for a model of these sizes"
        )
    assert config.model.vocab_size is not None, "of the teacher"
    program = DistillProgram(config, config.model.vocab_size)
    program.choose_policy_by_gradients(_silent())
    weights, others = _weights(program), _streamed_slices(program)
    if program.streamed is None:
        others["moments"] = program.state_shapes.optimizer
    taught = {"teacher": program.teacher.state_shapes.params}
    phases = _taught(program, weights, others)
    micro_batches = math.ceil(phases[0].runs)
    if config.is_on_policy:
        phases.insert(0, _rollout(program, weights, others | taught))
    if program.streamed is None:
        phases.append(_update_of(program, taught, 1))
    job = _job(program, phases)
    states = device_bytes(program.teacher.states(program.shapes[-1]))
    return dataclasses.replace(job, on_host=job.on_host + micro_batches * states)


def _taught(program: DistillProgram, weights, others) -> list[Phase]:
    """The teacher's states of micro-batches, and the student's gradients."""
    config, teacher, shape = program.config, program.teacher, program.shapes[-1]
    tokens, runs = shape[0] * shape[1], float(config.run.accumulate)
    if config.is_on_policy:
        runs = config.distill.samples * config.longest / tokens
    taught = teacher.state_shapes.params
    sums = gradient_shapes(program.state_shapes.params)
    return [
        Phase(
            "teacher",
            teacher.trace_states(shape),
            {"teacher": taught},
            weights | others,
            tokens=tokens,
            runs=runs,
        ),
        Phase(
            "gradients",
            program.trace_gradients(shape),
            weights | {"gradients": sums, "teacher's head": teacher.head_shapes},
            others | {"teacher's other weights": teacher.without_head(taught)},
            _parts(program, tokens),
            tokens,
            runs=runs,
        ),
    ]


def _of_policy(config: GrpoJobConfig) -> Job:
    program = PolicyProgram(config)
    program.choose_policy_by_gradients(_silent())
    weights, held = _weights(program), _held(program)
    phases = [
        _rollout(program, weights, held),
        _logprobs(program, weights, held),
        _gradients(program, weights, held),
    ]
    if program.streamed is None:
        phases.append(_update(program, held))
    return _job(program, phases)


def _held(program: PolicyProgram) -> dict[str, Any]:
    """What a run has on the device in addition to the weights."""
    arrays = _streamed_slices(program)
    if program.streamed is None:
        arrays["moments"] = program.state_shapes.optimizer
    if program.config.grpo.kl_coefficient:
        arrays["reference weights"] = program.state_shapes.params
    return arrays


def _gradients(program, weights, held) -> Phase:
    config, grpo = program.config, program.config.grpo
    shape = program.shapes(grpo.max_tokens_train)[-1]
    tokens = shape[0] * shape[1]
    return Phase(
        "gradients",
        program.trace_gradients(shape, config.head),
        weights | {"gradients": gradient_shapes(program.state_shapes.params)},
        held,
        _parts(program, tokens),
        tokens,
        runs=grpo.epochs * grpo.samples * config.longest / tokens,
        head=functools.partial(program.trace_head, shape, config.head),
    )


def _rollout(program, weights, held) -> Phase:
    config = program.config
    return Phase(
        "rollout",
        program.trace_sample(),
        weights,
        held,
        {"keys and values": _cache_bytes(program)},
        program.prompts[0].shape[0] * config.sampling.max_new_tokens,
        turns=config.sampling.max_new_tokens - 1,
    )


def _logprobs(program, weights, held) -> Phase:
    config = program.config
    shape = program.shapes(config.grpo.max_tokens_forward)[-1]
    tokens, passes = shape[0] * shape[1], 1 + bool(config.grpo.kl_coefficient)
    return Phase(
        "log-probs",
        program.trace_logprobs(shape),
        weights,
        held,
        tokens=tokens,
        runs=passes * config.grpo.samples * config.longest / tokens,
    )


def _update(program, held) -> Phase:
    grpo = program.config.grpo
    rest = {name: tree for name, tree in held.items() if name != "moments"}
    return _update_of(program, rest, grpo.minibatches * grpo.epochs)


def _update_of(program: AccumulatedProgram, rest, runs: int) -> Phase:
    given = {
        "trained weights": program.state_shapes.params,
        "moments": program.state_shapes.optimizer,
    }
    return Phase(
        "update",
        program.trace_update(),
        given | {"gradients": gradient_shapes(program.state_shapes.params)},
        {"frozen weights": program.frozen_shapes} | rest,
        runs=runs,
    )


def _of_score(config: ScoreConfig) -> Job:
    """A forward pass of one micro-batch of the widest rows, on one device."""
    described = checkpoints.read_config(config.model)
    dtype = config.dtype or described.dtype or "float32"
    model = dataclasses.replace(described.model, dtype=dtype, param_dtype=dtype)
    head = HeadConfig(chunk=config.chunk)
    decoder = nnx.eval_shape(lambda: Decoder(model, head, rngs=nnx.Rngs(0)))
    width = min(config.max_tokens, described.max_positions)
    ids = jax.ShapeDtypeStruct((config.max_tokens // width, width), jnp.int32)
    traced = token_stats.trace(decoder, ids, ids, ids, ids)
    phase = Phase(
        "forward",
        traced,
        {"weights": nnx.state(decoder)},
        tokens=ids.size,
    )
    return Job((phase,), notes=("a device scores alone: --devices adds none",))


def _job(program: DecoderProgram, phases) -> Job:
    state = program.state_shapes
    return Job(tuple(phases), device_bytes(state), host_bytes(state))


def _weights(program: DecoderProgram) -> dict[str, Any]:
    weights = {"trained weights": program.state_shapes.params}
    if program.frozen_shapes:
        weights["frozen weights"] = program.frozen_shapes
    return weights


def _parts(
    program: DecoderProgram, tokens: int, made_here: bool = False
) -> Mapping[str, int]:
    """Known memory of a micro-batch's backward pass, in bytes per device."""
    sizes = {}
    if made_here:
        sums = gradient_shapes(program.state_shapes.params)
        sizes["gradients"] = device_bytes(sums)
    kept = kept_bytes(
        program.model_config, program.policy, tokens, program.layout.sizes
    )
    return sizes if kept is None else sizes | {"activations kept": kept}


def kept_bytes(
    model: ModelConfig,
    policy: remat.Policy | None,
    tokens: int,
    mesh: Mapping[str, int],
) -> int | None:
    """Bytes per device that a policy saves in all blocks; None if they are not named.

    Args:
        model: sizes of the decoder.
        policy: rematerialisation policy.
        tokens: tokens of a micro-batch on all devices.
        mesh: sizes of the mesh axes.

    Returns:
        The bytes.
    """
    if policy is None or policy.dots or policy.last:
        return None
    item = jnp.dtype(model.dtype).itemsize
    queries, keys = (n * model.head_dim * item for n in (model.heads, model.kv_heads))
    split = {
        "q": queries, "k": keys, "v": keys, "attn_out": queries,
        "attn_lse": 4 * model.heads, "gate": model.ff * item, "up": model.ff * item,
    }  # fmt: skip
    if model.attention == "cudnn":  # its output has the same checkpoint name
        split["attn_lse"] += split.pop("attn_out")
    widths = sum(split.get(name, 0) for name in policy.save) / mesh["tensor"]
    if "block_in" not in policy.offload:
        widths += model.hidden * item
    rows = mesh["data"] * mesh["fsdp"] * mesh["sequence"]
    return int(model.layers * tokens * widths / rows)


def _cache_bytes(program: PolicyProgram | DistillProgram) -> int:
    """Bytes of a rollout's KV cache on one device."""
    config, model = program.config, program.model_config
    slots = config.task.prompt_length + config.sampling.max_new_tokens - 1
    numbers = 2 * model.layers * model.kv_heads * model.head_dim * (-(-slots // 8) * 8)
    mesh = program.layout.sizes
    parts = mesh["data"] * mesh["fsdp"] * mesh["sequence"] * mesh["tensor"]
    item = jnp.dtype(model.dtype).itemsize
    return program.prompts[0].shape[0] * numbers * item // parts


def _streamed_slices(program: DecoderProgram) -> dict[str, Any]:
    """The two slices of host-resident moments that are on the device at a time."""
    if program.streamed is None:
        return {}
    slices = list(_slices(program.state_shapes.optimizer))
    largest = max(slices, key=host_bytes)
    return {"moments under way": [_on_device(largest)] * 2}


def _slices(moments: Any) -> Iterator[Any]:
    for parts in jax.tree.leaves(moments, is_leaf=lambda x: isinstance(x, list)):
        yield from parts


def _on_device(tree):
    def one(x):
        place = x.sharding.with_memory_kind("device")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(one, tree)


def _silent() -> Console:
    return Console(quiet=True)
