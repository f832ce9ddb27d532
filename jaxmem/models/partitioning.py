"""The device mesh of a run, and how weights and batches are sharded over it.

    data      shards rows of a batch; weights are replicated
    fsdp      shards rows of a batch; also weights, moments and gradients
    sequence  shards tokens of a row; weights as along fsdp
    tensor    shards heads, the width of the feed-forward layer, the vocabulary

XLA inserts the communication of a step. The shardings of jit's inputs are given here, a
few intermediate values are constrained, and attention and the head contain explicit
collectives.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem import devices
from jaxmem.base.fields import check
from jaxmem.base.ranges import integers
from jaxmem.head.maths import vocab_shards
from jaxmem.heads.verbs import HeadSharding
from jaxmem.models import coded_weights

AXES = ("data", "fsdp", "sequence", "tensor")
ROWS = ("data", "fsdp")
TOKENS = PartitionSpec(ROWS, "sequence")  # of [B, T, ...]

# Specs of weights' last axes, by the end of their names; all others are replicated.
PARTS = ("fsdp", "sequence")
_WEIGHTS = {
    r"(embed|tied_to|layer_inputs/table)/embedding": ("tensor", PARTS),
    r"head/kernel": (PARTS, "tensor"),
    r"(query|key|value|gate|up)/kernel": (PARTS, "tensor"),
    r"(delta_output|inject)/kernel": (None, PARTS),
    r"(layer_inputs/project|inject_gate)/kernel": (PARTS, None),
    r"(delta_(query|key|value|gate)|query_down|latent|rotated)/kernel": (PARTS, None),
    r"(output|down)/kernel": ("tensor", PARTS),
    r"(query|key|value|gate|up|head)/bias": ("tensor",),
    r"attention/sinks": ("tensor",),
}

# Of the enclosing `Layout.context`, as its mesh is.
_SPECS: contextvars.ContextVar[Mapping[str, PartitionSpec] | None] = (
    contextvars.ContextVar("specs", default=None)
)

_PREFETCH = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Unrolls the loop by two, so that the second block's weights are all-gathered while
    # the first one computes.
    "xla_gpu_enable_while_loop_double_buffering": True,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices of a run."""

    data: Annotated[
        int, integers(1), "number of parts into which the rows of a batch are sharded"
    ] = 1
    fsdp: Annotated[
        int,
        integers(1),
        "number of parts into which rows, weights and moments are sharded",
    ] = 1
    sequence: Annotated[
        int,
        integers(1),
        "number of parts into which the tokens of each row, weights and moments are "
        "sharded",
    ] = 1
    tensor: Annotated[
        int,
        integers(1),
        "number of parts into which heads, feed-forward layers and the vocabulary are "
        "sharded",
    ] = 1
    prefetch: Annotated[
        bool,
        "on GPUs, XLA all-gathers a block's weights while the block before it runs",
    ] = True

    def __post_init__(self):
        check(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of `AXES`."""
        return tuple(getattr(self, name) for name in AXES)

    @property
    def by_rows(self) -> "MeshConfig":
        """A mesh of the same devices with `sequence` folded into `fsdp`.

        It suits work that processes each token independently.
        """
        rows = self.fsdp * self.sequence
        return dataclasses.replace(self, fsdp=rows, sequence=1)


class Layout:
    """The shardings of a run's arrays; on one device, arrays have none and do not move.

    `specs` are partition specs of weights by name, of a model of one's own; None: those
    of a decoder's. The mesh is None for one device, and `sizes` are devices along each
    axis.

    Raises:
        ValueError: there are fewer devices than the mesh has, or a process would have
            none of them.
    """

    def __init__(
        self, config: MeshConfig, specs: Mapping[str, PartitionSpec] | None = None
    ):
        count, present = math.prod(config.sizes), devices.current()
        fits = count <= len(present)
        if jax.process_count() > 1:  # each process must have devices of the mesh
            fits = count == len(present)
        if not fits:
            sizes = " x ".join(f"mesh.{k}={getattr(config, k)}" for k in AXES)
            raise ValueError(
                f"{sizes} makes {count} devices, but there are {len(present)} in "
                f"{jax.process_count()} processes"
            )
        self.mesh: Mesh | None = None
        self.sizes: dict[str, int] = dict(zip(AXES, config.sizes, strict=True))
        self._prefetch, self.specs = config.prefetch, specs
        if count > 1:
            # Devices of one host are adjacent along the last axes, which send most.
            grid = np.array(present[:count]).reshape(config.sizes)
            self.mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def compiler_options(self) -> dict[str, Any]:
        """Options for `jax.jit` of a step: overlap communication with computation."""
        return _PREFETCH if self.mesh is not None and self._prefetch else {}

    def context(self) -> contextlib.AbstractContextManager:
        """The context manager in which a run's functions must be traced."""
        return self._context() if self.mesh else contextlib.nullcontext()

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        before = _SPECS.set(self.specs)
        try:
            with jax.set_mesh(self.mesh):
                yield
        finally:
            _SPECS.reset(before)

    def of_weights(self, shapes: Any) -> Any:
        """Structs of weights with shardings, which must divide them."""
        return self._with_shardings(
            shapes, functools.partial(_weight_spec, specs=self.specs)
        )

    def of_moments(self, shapes: Any, weights: Any) -> Any:
        """`of_weights` of an optimizer's state, which has some arrays per weight.

        An array of its weight's shape is sharded like that; others, such as sums over
        the rows of a matrix, are replicated.
        """
        leaves = jax.tree_util.tree_leaves_with_path(weights)
        whole = {(_path_name(path), leaf.shape) for path, leaf in leaves}

        def spec_of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
            parts = name.split("/")  # the weight's name comes last
            ends = ("/".join(parts[i:]) for i in range(len(parts)))
            own = next((end for end in ends if (end, shape) in whole), None)
            return _weight_spec(own, shape, self.specs) if own else PartitionSpec()

        return self._with_shardings(shapes, spec_of)

    def of_tokens(self, shapes: Any) -> Any:
        """Shapes of arrays [..., B, T], with their shardings."""
        return self._with_shardings(shapes, lambda _, shape: _token_spec(len(shape)))

    def of_rows(self, shapes: Any) -> Any:
        """Shapes of arrays [B, ...], with their shardings."""
        return self._with_shardings(shapes, lambda _, shape: PartitionSpec(ROWS))

    def of_cache(self, cache: Any) -> Any:
        """Shapes of a decoder's KV cache, with their shardings.

        States are [layers, B, ...], those of heads [layers, B, heads, ...] with five
        axes.
        """

        def spec_of(name: str, shape: tuple[int, ...]) -> PartitionSpec:
            by_head = len(shape) == 5 and shape[2] % self.sizes["tensor"] == 0
            return PartitionSpec(None, ROWS, "tensor" if by_head else None)

        names = "positions", "lengths", "routes", "tokens"
        of_rows = self.of_rows({name: getattr(cache, name) for name in names})
        slot = self.whole(cache.slot)
        return cache._replace(
            layers=self._with_shardings(cache.layers, spec_of), slot=slot, **of_rows
        )

    def of_head(self, weights: Any, hidden: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Shardings of a head alone: its weights, hidden states and labels."""
        weights = self.of_weights({"head": weights})["head"]
        return weights, self.of_hidden(hidden), self.of_tokens(labels)

    def of_hidden(self, shapes: Any) -> Any:
        """Shapes of arrays [B, T, ...], with their shardings."""
        return self._with_shardings(shapes, lambda _, shape: TOKENS)

    def whole(self, shapes: Any) -> Any:
        """Shapes of replicated arrays, with their shardings."""
        return self._with_shardings(shapes, lambda _, shape: PartitionSpec())

    def _with_shardings(self, shapes, spec_of):
        mesh = self.mesh
        if mesh is None:
            return shapes

        def placed(path, leaf):
            spec = spec_of(_path_name(path), leaf.shape)
            _check_divides(_path_name(path), leaf.shape, spec, mesh)
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(placed, shapes)

    def place(self, batch: Any, structs: Any = None) -> Any:
        """Copy numpy arrays to the devices; each process provides its own shards.

        Arrays are [..., B, T], unless `structs` have their shardings.
        """
        mesh = self.mesh
        if mesh is None:
            return batch

        def shard(x, sharding):
            return jax.make_array_from_callback(
                x.shape, sharding, lambda index: x[index]
            )

        if structs is not None:
            return jax.tree.map(shard, batch, shardings(structs))
        return jax.tree.map(
            lambda x: shard(x, NamedSharding(mesh, _token_spec(x.ndim))), batch
        )

    def jit(self, run: Callable, out: Any = None, **options) -> Any:
        """`jax.jit`, in `context`, with the shardings of structs `out` for results."""
        places = None if self.mesh is None or out is None else shardings(out)
        return jax.jit(run, out_shardings=places, **options)

    def carried(self, results: Any, arguments: Iterable[Any]) -> Any:
        """Shardings of `results` for `jax.jit`: those of equal arguments, or None.

        A part of the results is equal to an argument that has its structure, shapes and
        types; XLA chooses the shardings of the parts that equal none.
        """
        if self.mesh is None:
            return None
        places = {_tree_type(argument): shardings(argument) for argument in arguments}
        return jax.tree.map(
            lambda part: places.get(_tree_type(part)),
            results,
            is_leaf=lambda part: _tree_type(part) in places,
        )

    def own_rows(self, rows: int) -> list[int]:
        """The indices of a batch's rows that this process's devices read."""
        if self.mesh is None:
            return list(range(rows))
        sharding = NamedSharding(self.mesh, PartitionSpec(ROWS))
        parts: Any = sharding.addressable_devices_indices_map((rows,)).values()
        return sorted({i for (part,) in parts for i in range(rows)[part]})


def shardings(structs: Any) -> Any:
    """The shardings of structs that have one, for `jax.jit(out_shardings=)`."""
    return jax.tree.map(lambda struct: getattr(struct, "sharding", None), structs)


def _tree_type(structs: Any) -> Any:
    """Structure, shapes and types of structs."""
    leaves, structure = jax.tree.flatten(structs)
    return structure, tuple((np.shape(x), jnp.result_type(x)) for x in leaves)


def current() -> Any:
    """The mesh of the enclosing `Layout.context`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES else None


def head_sharding() -> HeadSharding | None:
    """The head's sharding on the mesh of the enclosing `Layout.context`, or None."""
    mesh = current()
    if mesh is None:
        return None
    vocab = "tensor" if mesh.shape["tensor"] > 1 else None
    return HeadSharding(tokens=TOKENS, vocab=vocab, W_fsdp=PARTS)


def constrain_activations(x: jax.Array) -> jax.Array:
    """Constrain x [B, T, ...] to the sharding of tokens; without a mesh, return x."""
    if current() is None:
        return x
    return _constrain(x, TOKENS)


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [B, T, D] of an embedding table [V, D] on the enclosing mesh."""

    def on_device(table, ids):
        # Typed before the all-gather: gradients are then reduce-scattered.
        table = vocab_shards.vary(table, frozenset(("data", *PARTS)))
        table = lax.all_gather(table, PARTS, axis=1, tiled=True)
        local = ids - lax.axis_index("tensor") * len(table)
        rows = table.at[jnp.clip(local, 0, len(table) - 1)].get()
        is_here = (local >= 0) & (local < len(table))
        return lax.psum(jnp.where(is_here[..., None], rows, 0), "tensor")

    specs = PartitionSpec("tensor", PARTS), TOKENS
    return jax.shard_map(on_device, in_specs=specs, out_specs=TOKENS)(table, ids)


def as_stored(tree: Any) -> Any:
    """Constrain weights, or their gradients, to their sharding between steps."""
    if current() is None:
        return tree

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _constrain(
            leaf, _weight_spec(_path_name(path), leaf.shape, _SPECS.get())
        ),
        tree,
    )


def gathered(tree: Any) -> Any:
    """All-gather a block's weights for its use.

    The constraint is needed because XLA might move the activations instead. A block
    that is recomputed all-gathers its weights again. Gradients are reduce-scattered.
    """
    if current() is None:
        return tree

    def gather(path, leaf):
        stored = _weight_spec(_path_name(path), leaf.shape)
        used = PartitionSpec(*(None if axes == PARTS else axes for axes in stored))
        if used == stored:
            return leaf
        if coded_weights.is_coded(_path_name(path)):  # it has no gradient
            return _constrain(leaf, used)
        return _change_spec(stored, used, leaf)

    return jax.tree_util.tree_map_with_path(gather, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _change_spec(
    stored: PartitionSpec, used: PartitionSpec, leaf: jax.Array
) -> jax.Array:
    return _constrain(leaf, used)


_change_spec.defvjp(
    lambda stored, used, leaf: (_constrain(leaf, used), None),
    lambda stored, used, _, gradient: (_constrain(gradient, stored),),
)


def _constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)


def _token_spec(axes: int) -> PartitionSpec:
    return PartitionSpec(*(None,) * (axes - 2), *TOKENS)


def _weight_spec(
    name: str,
    shape: tuple[int, ...],
    specs: Mapping[str, PartitionSpec] | None = None,
) -> PartitionSpec:
    if specs is not None:
        return specs.get(name, PartitionSpec())
    if coded_weights.is_coded(name):
        return _coded_spec(name, shape)
    for pattern, axes in _WEIGHTS.items():
        if re.search(f"(^|/){pattern}$", name):
            # Blocks are stacked along leading axes.
            return PartitionSpec(*(None,) * (len(shape) - len(axes)), *axes)
    return PartitionSpec()


def _coded_spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of an array of a coded matrix, which is [outputs, inputs].

    Codes of an embedding table are [rows, features], as the table is. Codes and scales
    of others are sharded as the kernel would be; as scales are of whole blocks,
    a shard's are, too. Scales of whole rows, and of scales, are on every device.
    """
    kernel, array = coded_weights.split_path(name)
    if kernel.endswith("embedding"):
        return _weight_spec(kernel, shape) if array == "codes" else PartitionSpec()
    if array in ("codes", "scales"):
        *leading, inputs, outputs = _weight_spec(kernel, shape) or (None, None)
        is_row = array == "scales" and shape[-1] == 1
        return PartitionSpec(*leading, outputs, None if is_row else inputs)
    return PartitionSpec()


def _path_name(path) -> str:
    return "/".join(str(key.key) for key in path if hasattr(key, "key"))


def _check_divides(name, shape, spec, mesh):
    for size, axes in zip(shape, spec, strict=False):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            sizes = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{sizes} must divide {size}, an axis of {name or 'a batch'} {shape}"
            )
