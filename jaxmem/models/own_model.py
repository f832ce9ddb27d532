"""A model of one's own: what its module must have, and how trainers use it.

    hidden_states(tokens, positions, segment_ids) -> [B, T, D]
    head_weight() -> the nnx.Param [V, D] or [D, V] that maps these to logits

Any Flax NNX module with these two methods is trained, sampled from and scored as a
`Decoder` is. With `prefill` and `decode` it is sampled from without recomputation, and
with `extend` in the place of `decode` conversations keep its cache. Its partition specs
are those in the metadata of its parameters.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec

from jaxmem.head.maths.head import Head, as_head
from jaxmem.heads.nnx import HeadSharding, LMHead
from jaxmem.models import partitioning
from jaxmem.models.config import DTYPES, ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.positions import Branches, Ids
from jaxmem.models.training_head import HeadConfig, head_options
from jaxmem.models.weights import merge_module, split_module


class OwnError(ValueError):
    """A model that cannot be used; the message says why."""


class Own(Protocol):
    """Interface of a user's model: `hidden_states` and `head_weight` are required.

    With `prefill` and `decode` sampling does not recompute; with `extend` in the place
    of `decode` the cache can be kept, too.
    """

    def hidden_states(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Final hidden states [B, T, D] of packed rows.

        A token sees itself and those before it in its document. All arguments are [B,
        T]: `positions` of tokens in their documents, from 0, and `segment_ids` the
        document of each in its row; 0 is padding.
        """
        ...

    def head_weight(self) -> nnx.Param | Head:
        """The parameter [V, D] or [D, V] of the head; or a `Head` of parameters."""
        ...

    def prefill(
        self, prompts: jax.Array, lengths: jax.Array, max_length: int
    ) -> tuple[jax.Array, Any]:
        """Hidden states [B, D] of each prompt's last token, and a cache.

        Prompts [B, P] come first in their rows, and have `lengths` [B] from 1 to P. The
        cache must have room for `max_length` tokens of a row.
        """
        ...

    def decode(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Hidden states [B, D] of one more token a row, [B], and the next cache."""
        ...

    def extend(
        self, tokens: jax.Array, lengths: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Hidden states [B, D] of each row's last new token, and the next cache.

        The new ids [B, M] come first in their rows, and `lengths` [B] says how many
        there are, from 0 to M. A row of 0 stays as it is, and its hidden state is not
        used.
        """
        ...


class UncachedRows(NamedTuple):
    """Tokens of rows in the place of a cache; sampling reads all of them again."""

    tokens: jax.Array  # [B, T]
    lengths: jax.Array  # [B] number of a row's tokens


class OwnModel(nnx.Module):
    """A module with the methods of `Own`, as the trainers use a `Decoder`.

    The names of its weights start with "body/". Its config has the model's own width,
    type and vocabulary, and defaults; `head` has the verbs of its head. The module
    reads its weights in the types that it made them in, also while these are trained,
    in float32.

    Raises:
        OwnError: a method is missing, or returns what it must not.
    """

    def __init__(self, body: Any, config: ModelConfig, head: HeadConfig):
        self.body = body
        _check_methods(body)
        _check_weights(body)
        hidden = _hidden_shape(body)
        self.head = _make_head(body, hidden, head)
        self.config = ModelConfig(
            factory=config.factory,
            checkpoint=config.checkpoint,
            hidden=hidden.shape[-1],
            dtype=str(hidden.dtype),
            vocab_size=self.head.vocab_size or self.head.out_features,
        )
        if (config.vocab_size or 0) > (rows := self.config.vocab_size or 0):
            raise OwnError(
                f"{_class_name(body)}.head_weight() has {rows} entries, and the data's "
                f"vocabulary {config.vocab_size}: make it of config.vocab_size"
            )
        weights: dict[str, Any] = dict(
            traverse_util.flatten_dict(split_module(self)[1], sep="/")
        )
        self.types = tuple((name, str(w.dtype)) for name, w in weights.items())
        if partitioning.current() is not None:
            self.specs()  # which raises for axes that the mesh does not have

    def __call__(
        self,
        tokens: Ids,
        segment_ids: Ids | None,
        positions: Ids,
        branches: Branches | None = None,
        routes: Ids | None = None,
    ) -> jax.Array:
        """Hidden states [B, T, D]; see `Decoder`. Routes are never recorded."""
        del branches, routes
        tokens = jnp.asarray(tokens)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        return self._in_own_types().body.hidden_states(
            tokens, jnp.asarray(positions), jnp.asarray(segment_ids)
        )

    def _in_own_types(self) -> "OwnModel":
        """The model with weights in the types that the module made them in."""
        definition, weights = split_module(self)
        flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
        if all(flat[name].dtype == dtype for name, dtype in self.types):
            return self
        cast = {name: flat[name].astype(dtype) for name, dtype in self.types}
        return merge_module(definition, traverse_util.unflatten_dict(cast, sep="/"))

    def routed(self, *arguments: Any) -> tuple[jax.Array, None]:
        """See `Decoder`; None, as nothing is known of routers."""
        return self(*arguments), None

    @property
    def head_path(self) -> str:
        """See `Decoder`."""
        W = as_head(self.body.head_weight()).W
        return next(name for name, variable in _named_variables(self) if variable is W)

    @property
    def recomputes(self) -> bool:
        """See `Decoder`."""
        return not hasattr(self.body, "prefill")

    @property
    def extends(self) -> bool:
        """True if several tokens can follow on a cache, in some of its rows."""
        return self.recomputes or hasattr(self.body, "extend")

    def in_compute_type(self) -> tuple[Any, Any]:
        """See `Decoder`: the module casts as it likes."""
        # A head in float32 reads the weights as they are trained, here as in a step.
        is_wide = jnp.dtype(self.config.dtype).itemsize >= 4
        return nnx.split(self if is_wide else self._in_own_types())

    def join(self) -> None:
        """See `Decoder`: there is nothing to join."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `Decoder`."""
        return self.head.float_logits(hidden)

    def prefill(
        self, prompts: Ids, lengths: Ids, max_length: int, *, records: bool = False
    ) -> tuple[jax.Array, Any]:
        """See `Decoder`; without a cache, rows of tokens are kept."""
        del records  # the program refuses them
        prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32)
        if not self.recomputes:
            body = self._in_own_types().body
            return body.prefill(prompts, lengths, max_length)
        unused = [(0, 0), (0, max_length - prompts.shape[1])]
        return self._last_hidden(UncachedRows(jnp.pad(prompts, unused), lengths))

    def decode(
        self, tokens: Ids, cache: Any, live: Any = None, *, unroll: bool = False
    ) -> tuple[jax.Array, Any]:
        """See `Decoder`; without `extend`, rows that have ended are read, too."""
        del unroll
        tokens = jnp.asarray(tokens)
        if not self.extends:
            return self._in_own_types().body.decode(tokens, cache)
        live = jnp.ones(len(tokens), bool) if live is None else live
        return self.extend(tokens[:, None], live, cache)

    def extend(self, tokens: Ids, lengths: Ids, cache: Any) -> tuple[jax.Array, Any]:
        """See `Decoder`; for a model that `extends`."""
        tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)
        if not self.recomputes:
            return self._in_own_types().body.extend(tokens, lengths, cache)
        read, before = cache
        steps = jnp.arange(tokens.shape[1])
        places = jnp.where(
            steps < lengths[:, None], before[:, None] + steps, read.shape[1]
        )
        rows = jnp.arange(len(tokens))[:, None]
        read = read.at[rows, places].set(tokens, mode="drop")
        return self._last_hidden(UncachedRows(read, before + lengths))

    def _last_hidden(self, rows: UncachedRows) -> tuple[jax.Array, UncachedRows]:
        """Hidden states [B, D] of the last token of each row, and the rows."""
        tokens, lengths = rows
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        filled = places < lengths[:, None]
        hidden = self(jnp.where(filled, tokens, 0), filled.astype(jnp.int32), places)
        return hidden[jnp.arange(len(tokens)), lengths - 1], rows

    def specs(self) -> dict[str, PartitionSpec]:
        """The partition spec of each weight, by its name; those of `head` as well."""
        by_name = {}
        for prefix, module in (("", self), ("head/", self.head)):
            specs = nnx.get_partition_spec(nnx.state(module))
            for path, variable in nnx.to_flat_state(specs):
                spec = variable.get_value()
                name = prefix + "/".join(map(str, path))
                for axis in jax.tree.leaves(tuple(spec)):
                    if axis not in partitioning.AXES:
                        raise OwnError(
                            f"the parameter {name} is sharded over {axis!r}, and the "
                            f"axes of the mesh are {', '.join(partitioning.AXES)}"
                        )
                by_name[name] = spec
        return by_name


LanguageModel = Decoder | OwnModel


def _class_name(body: Any) -> str:
    return type(body).__name__


def _named_variables(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """Names and variables of a module, each once."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield "/".join(map(str, path)), node


def _check_methods(body: Any) -> None:
    if not isinstance(body, nnx.Module):
        raise OwnError(f"must return an nnx.Module, got {_class_name(body)}")
    for name in ("hidden_states", "head_weight"):
        if not callable(getattr(body, name, None)):
            raise OwnError(f"{_class_name(body)} has no method {name!r}")
    names = "prefill", "decode", "extend"
    has = [name for name in names if hasattr(body, name)]
    if has and not ("prefill" in has and len(has) > 1):
        raise OwnError(
            f"{_class_name(body)} has only {has[0]!r}; cached decoding needs "
            "'prefill', and 'decode' or 'extend'"
        )


def _check_weights(body: nnx.Module) -> None:
    """Raise for variables that are not trained and could not be kept."""
    for path, node in nnx.iter_graph(body):
        numbered = any(isinstance(part, str) and part.isdigit() for part in path)
        if numbered and isinstance(node, nnx.Variable):
            raise OwnError(
                f"{_class_name(body)}: {'/'.join(map(str, path))} has a number for a "
                "name; use an nnx.List, or another name"
            )
    for name, variable in _named_variables(body):
        if not isinstance(variable, nnx.Param):
            raise OwnError(
                f"{_class_name(body)}: {name} is an "
                f"nnx.{_class_name(variable)}, and only parameters (nnx.Param) are "
                "kept from step to step: leave out dropout and running statistics"
            )


def _hidden_shape(body: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of the hidden states of a few tokens; nothing is computed."""
    ids, named = jax.ShapeDtypeStruct(_probe_shape(), jnp.int32), _class_name(body)
    hidden = jax.eval_shape(body.hidden_states, ids, ids, ids)
    shape = getattr(hidden, "shape", ())
    if len(shape) != 3 or shape[:2] != ids.shape:
        got = shape or _class_name(hidden)
        raise OwnError(
            f"{named}.hidden_states must return [B, T, D], got {got} for tokens "
            f"{ids.shape}"
        )
    if str(hidden.dtype) not in DTYPES:
        raise OwnError(
            f"{named}.hidden_states must return one of {', '.join(DTYPES)}, got "
            f"{hidden.dtype}"
        )
    return hidden


def _probe_shape(rows: int = 1) -> tuple[int, int]:
    """The shape [B, T] of a few tokens, which the mesh divides."""
    around = partitioning.current()
    sizes = dict.fromkeys(partitioning.AXES, 1) if around is None else around.shape
    return rows * sizes["data"] * sizes["fsdp"], 8 * sizes["sequence"]


def _make_head(body: Any, hidden: jax.ShapeDtypeStruct, options: HeadConfig) -> LMHead:
    """The head that reads the module's own parameters."""
    head_operands, depth = as_head(body.head_weight()), hidden.shape[-1]
    named = f"{_class_name(body)}.head_weight()"
    for part in (head_operands.W, head_operands.bias):
        if part is not None and all(part is not x for _, x in _named_variables(body)):
            raise OwnError(
                f"{named} must return an nnx.Param of the model, got "
                f"{_class_name(part)}, which is not among its parameters"
            )
    shape = head_operands.W.shape
    if len(shape) != 2 or depth not in shape or shape[0] == shape[1]:
        raise OwnError(
            f"{named} must be [V, D] or [D, V] with D = {depth}, as hidden_states "
            f"returns, and V another number; got {shape}"
        )
    on_mesh = partitioning.current() is not None
    head = LMHead(
        depth,
        shape[0] if shape[1] == depth else shape[1],
        tied_to=head_operands.W,
        softcap=head_operands.softcap,
        vocab_size=head_operands.vocab_size,
        dtype=hidden.dtype,
        sharding=HeadSharding(tokens=partitioning.TOKENS) if on_mesh else None,
        **head_options(options),
    )
    head.bias = nnx.data(head_operands.bias)
    return head


class Probe(NamedTuple):
    """Rows of two documents each, which differ in some tokens.

    Row 1 differs from row 0 in the first document, row 2 in the last token, and row 3
    in the first token of the second document.
    """

    tokens: np.ndarray  # [B, T]; all rows are those four, again and again
    positions: np.ndarray
    segment_ids: np.ndarray

    @classmethod
    def of(cls, vocab_size: int) -> "Probe":
        """Rows for the enclosing mesh."""
        rows, width = _probe_shape(4)
        half = width // 2
        tokens = np.tile(np.arange(width) % vocab_size, (rows, 1))
        tokens[1::4, :half] += 1
        tokens[2::4, -1] += 1
        tokens[3::4, half] += 1
        places = np.tile(np.arange(width), (rows, 1))
        return cls(tokens % vocab_size, places % half, places // half + 1)

    def problem(self, hidden: np.ndarray, packs: bool) -> str | None:
        """The fault of a model that returned `hidden` [B, T, D]; None without one.

        `packs` is True if a row may have several documents.
        """
        half = hidden.shape[1] // 2

        def change(row: int, places: slice) -> float:
            return float(np.abs(hidden[row, places] - hidden[0, places]).max())

        least = 1e-6 * float(np.abs(hidden[0]).max())
        allowed = max(0.1 * change(3, slice(half + 1, None)), least)
        if change(2, slice(half, -1)) > allowed:
            return "lets a token see later tokens"
        if packs and change(1, slice(half, None)) > allowed:
            return (
                "lets a document see another document of its row: tokens may attend "
                "only to tokens with equal segment_ids"
            )
        return None


def random_weights(shapes: Any) -> Any:
    """Weights of these shapes with which all parts of a model have an effect."""
    leaves, tree = jax.tree.flatten(shapes)

    def draw(number: int, leaf: Any) -> jax.Array:
        # A hash of each entry's place: XLA takes long to compile a generator a leaf.
        bits = jnp.full(leaf.shape, number, jnp.uint32)
        for axis in range(len(leaf.shape)):
            bits ^= jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
            bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
        scale = leaf.shape[-2] ** -0.5 if len(leaf.shape) > 1 else 1.0
        uniform = bits.astype(jnp.float32) / 2.0**31 - 1
        return (scale * math.sqrt(3) * uniform).astype(leaf.dtype)

    numbers = range(1, len(leaves) + 1)
    return jax.tree.unflatten(tree, map(draw, numbers, leaves))


def recomputation(tokens: int, row: int | None = None) -> str:
    """A sentence on the cost of sampling up to `tokens` tokens without a cache."""
    what = "its row" if row is None else f"its row of {row}"
    return (
        f"the model of model.factory has no cached decoding (prefill, decode), so that "
        f"sampling recomputes: each of up to {tokens} tokens of a completion reads all "
        f"of {what}, {tokens} times the products that a cache leaves"
    )
