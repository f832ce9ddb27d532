"""The programs of a job for `jaxmem plan`, and what is in memory while they run."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.models.decoder import ModelConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.memory import shard_bytes
from jaxmem.train.program import DecoderProgram, gradient_shapes

BACKWARD = ("train step", "gradients")  # names of the phase that takes the gradients


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program, traced for the devices of a plan.

    Attributes:
        name: name of the program, such as "update"; one of `BACKWARD` if it computes
            the gradients of a micro-batch.
        trace: traces the program with shapes, inside of `jaxmem.devices.target`.
        arguments: shapes of its arguments by name, such as "moments"; other arguments
            count as "inputs".
        held: shapes of other arrays on the device while it runs, by name.
        parts: known parts of its temporaries by name, in bytes per device.
        tokens: tokens that one run reads or generates, on all devices.
        runs: runs in one step of the job.
        micro_batches: number that one run goes through, one after the other.
        turns: maximum iterations of a loop whose length is not static.
        head: traces the head alone; None if the program has none.
    """

    name: str
    trace: Callable[[], jax.stages.Traced]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    held: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    runs: float = 1
    micro_batches: int = 1
    turns: int = 1
    head: Callable[[], jax.stages.Traced] | None = None

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The program; traced at the first use."""
        return self.trace()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that a configuration runs.

    Attributes:
        phases: the programs, in the order in which a step runs them.
        model: sizes of the decoder.
        head: options of its head.
        restored: bytes that a checkpoint restores to one device.
        on_host: bytes of state on the host, for one device.
        notes: further sentences for the reader.
    """

    phases: tuple[Phase, ...]
    model: ModelConfig
    head: HeadConfig
    restored: int = 0
    on_host: int = 0
    notes: tuple[str, ...] = ()

    @property
    def backward(self) -> Phase:
        """The phase that computes the gradients of a micro-batch; else the last one."""
        backward = (phase for phase in self.phases if phase.name in BACKWARD)
        return next(backward, self.phases[-1])


def of_program(program: DecoderProgram, phases: Iterable[Phase]) -> Programs:
    """The programs of a job, and the state that its checkpoints restore."""
    state = program.state_shapes
    return Programs(
        tuple(phases), program.model_config, program.config.head,
        device_bytes(state), host_bytes(state),
    )  # fmt: skip


def of_step(
    program: DecoderProgram,
    trace: Callable[[], jax.stages.Traced],
    tokens: int,
    micro_batches: int = 1,
    head: Callable[[], jax.stages.Traced] | None = None,
) -> Phase:
    """The phase of a whole step, or of its gradients if the moments are streamed."""
    arguments = weights_of(program)
    if program.streamed is None:
        arguments |= {"moments": program.state_shapes.optimizer}
    sums = device_bytes(gradient_shapes(program.state_shapes.params))
    return Phase(
        "gradients" if program.streamed else "train step",
        trace,
        arguments,
        held=streamed_slices(program),
        parts={"gradients": sums} | activations(program, tokens),
        tokens=tokens * micro_batches,
        micro_batches=micro_batches,
        head=head,
    )


def weights_of(program: DecoderProgram) -> dict[str, Any]:
    """Shapes of the weights, by name."""
    weights = {"trained weights": program.state_shapes.params}
    if program.frozen_shapes:
        weights["frozen weights"] = program.frozen_shapes
    return weights


def moments_beside(program: DecoderProgram) -> dict[str, Any]:
    """Shapes of the moments on the device while another program runs, by name."""
    if program.streamed is not None:
        return streamed_slices(program)
    return {"moments": program.state_shapes.optimizer}


def streamed_slices(program: DecoderProgram) -> dict[str, Any]:
    """The two slices of host-resident moments that are on the device at a time."""
    if program.streamed is None:
        return {}
    moments = program.state_shapes.optimizer
    leaves = jax.tree.leaves(moments, is_leaf=lambda x: isinstance(x, list))
    largest = max((part for parts in leaves for part in parts), key=host_bytes)
    return {"optimizer slices in transfer": [_on_device(largest)] * 2}


def _on_device(tree: Any) -> Any:
    def move(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding.with_memory_kind("device")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(move, tree)


def activations(program: DecoderProgram, tokens: int) -> dict[str, int]:
    """Bytes per device that the blocks keep of a micro-batch, where that is known."""
    model, policy, mesh = program.model_config, program.policy, program.layout.sizes
    if policy is None or policy.dots or policy.last:
        return {}
    if set(model.mixers) - {"attention", "latent"} or model.has_global_heads:
        return {}  # layers differ in what they keep
    item = jnp.dtype(model.dtype).itemsize
    queries, keys = (n * model.head_dim * item for n in (model.heads, model.kv_heads))
    by_value = model.value_width / model.head_dim
    split = {
        "q": queries, "k": keys, "v": keys * by_value, "attn_out": queries * by_value,
        "attn_lse": 4 * model.heads, "gate": model.mlp.gated * _mean_ff(model) * item,
        "up": _mean_ff(model) * item,
    }  # fmt: skip
    if model.attention == "cudnn":  # its output has the same checkpoint name
        split["attn_lse"] += split.pop("attn_out")
    widths = sum(split.get(name, 0) for name in policy.save) / mesh["tensor"]
    if "block_in" not in policy.offload:
        widths += model.hidden * item
    rows = mesh["data"] * mesh["fsdp"] * mesh["sequence"]
    return {"activations kept": int(model.layers * tokens * widths / rows)}


def _mean_ff(model: ModelConfig) -> float:
    """Mean width of the layers' "up"; of layers with experts, the shared expert's."""
    kinds = (model.feed_forwards * model.layers)[: model.layers]
    shared = model.experts.shared_ff or 0
    widths = [shared if kind == "experts" else model.ff for kind in kinds]
    return sum(widths) / model.layers


def device_bytes(tree: Any) -> int:
    """Bytes on one device of arrays or shapes with shardings; none for host memory."""
    return sum(map(shard_bytes, filter(_is_on_device, jax.tree.leaves(tree))))


def host_bytes(tree: Any) -> int:
    """Bytes that one device's shards take on the host."""
    leaves = jax.tree.leaves(tree)
    return sum(shard_bytes(leaf) for leaf in leaves if not _is_on_device(leaf))


def _is_on_device(leaf):
    sharding = getattr(leaf, "sharding", None)
    return getattr(sharding, "memory_kind", None) not in (
        "pinned_host",
        "unpinned_host",
    )
