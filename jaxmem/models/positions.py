"""Positions and attention masks per kind of layer: rotary angles, documents, windows.

A "global" layer attends to its document up to the query; a "local" layer attends to the
last `window` tokens of that, and may have its own rotary wavelengths; a "chunked" one
attends to what its document has since the last multiple of `window`; an "unrotated" one
is global without rotation. All blocks of a decoder run in one loop, so the tables
of each kind are computed once, and each layer indexes them by its kind.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import devices
from jaxmem.head.backends import hopper
from jaxmem.models import partitioning
from jaxmem.models.config import KINDS, ModelConfig
from jaxmem.models.kernels import packed_attention

Ids = jax.Array | np.ndarray  # integers, on the device or on the host


class Rotation(NamedTuple):
    """Rotation of a layer's queries and keys: tables of cosines and sines."""

    cosines: jax.Array  # from `rope_tables`; or those of all kinds on a leading axis
    sines: jax.Array
    kind: jax.Array | None = None  # the layer's index on that axis
    growth: jax.Array | None = None  # [B, T, 1, 1] factor of queries; or of all kinds
    rotates: jax.Array | None = (
        None  # True: the layer rotates; or of all kinds; None: yes
    )

    def turn(self, x: jax.Array) -> jax.Array:
        """Rotate heads [B, T, heads, head_dim] by their positions."""
        pairs = x.shape[-1] // 2
        tables = (table[..., :pairs] for table in (self.cosines, self.sines))
        return apply_rope(x, *tables, self.kind)

    def grow(self, query: jax.Array) -> jax.Array:
        """Queries times their growth, if there is one."""
        if self.growth is None:
            return query
        growth = self.growth if self.kind is None else self.growth[self.kind]
        return (query * growth).astype(query.dtype)

    def if_rotated(self, changed: jax.Array, x: jax.Array) -> jax.Array:
        """`changed` in layers that rotate, and x in others."""
        if self.rotates is None:
            return changed
        rotates = self.rotates if self.kind is None else self.rotates[self.kind]
        return jnp.where(rotates, changed, x)


def used_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kinds that the pattern has, in the order of `KINDS`."""
    return tuple(kind for kind in KINDS if kind in config.pattern)


def layer_kinds(config: ModelConfig) -> np.ndarray | None:
    """[layers] index of each layer's kind in `used_kinds`; None if there is one."""
    used = used_kinds(config)
    if len(used) == 1:
        return None
    kinds = config.by_layer("pattern")
    return np.array([used.index(kind) for kind in kinds], np.int32)


def by_kind(config: ModelConfig, make: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Apply `make` to each kind of layer, and select a result by a layer's kind.

    `make` maps a kind to a pytree of arrays of the same shapes for every kind. Returns
    a function from a layer's entry of `layer_kinds`, which may be traced, to its
    kind's.
    """
    used = used_kinds(config)
    if len(used) == 1:
        only = make(used[0])
        return lambda _: only
    stacked = jax.tree.map(lambda *tables: jnp.stack(tables), *map(make, used))
    return lambda kind: jax.tree.map(lambda tables: tables[kind], stacked)


def rope_frequencies(
    config: ModelConfig, kind: str = "global", lengths: jax.Array | None = None
) -> jax.Array:
    """Rotary angle per position of each pair, f32 [..., d / 2], for one kind of layer.

        f_i = theta^(-2i / d),   then, if scaled,   f_i ((1 - s_i) / factor + s_i)
        linear:  s_i = 0;   listed:  the same, with a factor for each i
        dynamic: not scaled, but theta is theta (1 + factor (n / limit - 1))^(d / (d-2))
        llama3:  s_i = clip((original f_i / 2π - low) / (high - low), 0, 1)
        yarn:    s_i = clip((j(low) - i) / (j(low) - j(high)), 0, 1),
                 j(n) = d ln(original / 2πn) / (2 ln theta), within [0, d - 1]

    "local" layers with a `rope.local_theta` are not scaled, and "unrotated" ones have
    frequencies of 0. `lengths` [..., 1], the tokens n of a document, choose
    "listed" factors; without them, and up to `rope.limit`, short documents' are taken.

    Reference: Su et al., "RoFormer", 2021, arXiv:2104.09864; linear: Chen et al., 2023,
    arXiv:2306.15595; llama3: the Llama team, 2024, arXiv:2407.21783; yarn: Peng et al.,
    2023, arXiv:2309.00071.
    """
    rope, width = config.rope, rope_width(config, kind)
    theta = rope.theta
    if kind == "unrotated":
        return jnp.zeros(width // 2)
    scaled = is_scaled(config, kind)
    if not scaled and kind == "local" and rope.local_theta is not None:
        theta = rope.local_theta
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    is_dynamic = scaled and rope.scaling == "dynamic"
    if is_dynamic and lengths is not None:
        assert rope.limit is not None
        excess = jnp.maximum(lengths / rope.limit - 1, 0)
        theta *= (1 + rope.factor * excess) ** (width / (width - 2))
    frequencies = theta**-exponents
    if kind == "global" and rope.proportion is not None:
        count = int(rope.proportion * width // 2)
        frequencies = jnp.where(jnp.arange(width // 2) < count, frequencies, 0)
    if not scaled or is_dynamic:
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "listed":
        factors = rope.short_factors, rope.long_factors
        return frequencies / _choose_by_length(config, lengths, *factors)
    low, high = rope.low_factor, rope.high_factor
    if rope.scaling == "llama3":
        turns = rope.original_length * frequencies / (2 * jnp.pi)
        # Equal limits are a step.
        kept = jnp.clip((turns - low) / max(high - low, 1e-6), 0, 1)
    else:
        first, last = _yarn_limits(config, width)
        kept = 1 - jnp.clip((jnp.arange(width // 2) - first) / (last - first), 0, 1)
    return frequencies * ((1 - kept) / rope.factor + kept)


def rope_magnitude(config: ModelConfig, kind: str, lengths: jax.Array | None) -> Any:
    """Factor of cosines and sines; `lengths` are as in `rope_frequencies`."""
    if not is_scaled(config, kind):
        return 1.0
    short, long = config.rope.attention_factor, config.rope.long_attention_factor
    return short if long is None else _choose_by_length(config, lengths, short, long)


def _choose_by_length(
    config: ModelConfig, lengths: jax.Array | None, short: Any, long: Any
):
    """`long` for documents of more than `rope.limit` tokens, `short` for others."""
    short, long = (jnp.asarray(x, jnp.float32) for x in (short, long))
    if lengths is None or config.rope.limit is None:
        return short
    return jnp.where(lengths > config.rope.limit, long, short)


def rope_width(config: ModelConfig, kind: str) -> int:
    """Numbers of a head that are rotated in a kind of layer."""
    wide = config.self_attn.global_head_dim
    return wide if kind == "global" and wide is not None else config.rope_width


def is_scaled(config: ModelConfig, kind: str) -> bool:
    """True if the wavelengths of a kind of layer are scaled."""
    if config.rope.scaling is None or kind == "unrotated":
        return False
    return kind != "local" or config.rope.local_theta is None


def _yarn_limits(config: ModelConfig, width: int) -> tuple[float, float]:
    """The pairs between which wavelengths go from unscaled to scaled."""

    def pair(turns: float) -> float:
        longest = config.rope.original_length / (turns * 2 * math.pi)
        return width * math.log(longest) / (2 * math.log(config.rope.theta))

    first, last = pair(config.rope.high_factor), pair(config.rope.low_factor)
    if config.rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last + 0.001 if first == last else last


def rope_tables(
    positions: Ids, frequencies: jax.Array, magnitude: Any = 1.0
) -> Rotation:
    """Cosines and sines, f32 [B, T, 1, d / 2], of position x frequency.

    Frequencies are [d / 2] or [B, T or 1, 1, d / 2], and the magnitude is a factor of
    both.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return Rotation(magnitude * jnp.cos(angles), magnitude * jnp.sin(angles))


@jax.custom_vjp
def apply_rope(
    x: jax.Array, cosines: jax.Array, sines: jax.Array, kind: jax.Array | None = None
) -> jax.Array:
    """Rotate each pair (x_i, x_{i + d/2}) by its angle, in f32.

    The first d numbers of each head of x [B, T, heads, head_dim] are rotated. Tables
    are those of `rope_tables`, or of several kinds of layers on a leading axis, and
    `kind` is then the index on that. Only they are residuals, because the backward pass
    applies the inverse rotation; they have no gradients.
    """
    return _rotate_pairs(x, 1, cosines, sines, kind)


def _rotate_pairs(x, direction, cosines, sines, kind):
    if kind is not None:
        cosines, sines = cosines[kind], sines[kind]
    rest = x[..., 2 * cosines.shape[-1] :]
    x = x[..., : 2 * cosines.shape[-1]]
    # Reverse an axis of size 2 instead of splitting the row: XLA fuses the reversal
    # with its neighbours, but would store halves that are split.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signed = direction * jnp.stack([-sines, sines], axis=-2)
    rotated = halves * cosines[..., None, :] + jnp.flip(halves, -2) * signed
    rotated = rotated.reshape(x.shape).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _rope_forward(x, *tables):
    return _rotate_pairs(x, 1, *tables), tables


def _rope_backward(tables, gradient):
    return _rotate_pairs(gradient, -1, *tables), None, None, None


apply_rope.defvjp(_rope_forward, _rope_backward)


class Branches(NamedTuple):
    """The layout of rows of one prompt and k blocks that continue it, T slots in all.

    T = prompt + k · width, and documents are those of a block.
    """

    prompt: int  # slots of the prompt
    width: int  # slots of a block


class Sight(NamedTuple):
    """The keys that a layer's queries see, in addition to causality.

    A layer builds its mask [B, 1, T, T] from this only where it needs it.
    """

    segment_ids: Ids | None = None  # [B, T] document per token; None: one per row
    # tokens a query sees, including its own, or [B, T] of each query; None: all
    window: Ids | int | None = None
    branches: Branches | None = None  # of rows with a prompt that blocks share
    # [B, T or 1, S - T] which of the first keys each query sees
    prefix: jax.Array | None = None
    # the documents of queries without a prefix, for cuDNN's ragged kernel
    packed: packed_attention.PackedRows | None = None

    @property
    def mask(self) -> jax.Array | None:
        """The `document_mask`; None if a row is one document.

        Then a query sees all tokens before it, or as many as attention by cuDNN, which
        needs no mask for it, is told by `window`.
        """
        if self.segment_ids is None:
            return None
        mask = document_mask(self.segment_ids, self.window)
        if self.prefix is None:
            return mask
        rows, _, before = self.prefix.shape
        first = (rows, 1, mask.shape[2], before)
        first = jnp.broadcast_to(self.prefix[:, None], first)
        return jnp.concatenate([first, mask], axis=3)


def document_mask(segment_ids: Ids, window: Ids | int | None = None) -> jax.Array:
    """[B, 1, T, T], true where query and key share a document and the window.

    Causality is not included: attention applies it. Padding (segment 0) sees padding,
    so that no row of the softmax is empty. A window is a number of tokens, with the
    query's own, or [B, T] one of each query.
    """
    mask = segment_ids[:, :, None] == segment_ids[:, None, :]
    if window is not None:
        slots = jnp.arange(segment_ids.shape[1])
        mask = mask & (slots[:, None] - slots < jnp.asarray(window)[..., None])
    return mask[:, None]


def window(config: ModelConfig, kind: str, positions: Ids) -> jax.Array | int | None:
    """Tokens that a kind of layer attends to, maybe of each position; None: all."""
    if kind == "chunked":
        assert config.self_attn.window is not None
        return jnp.asarray(positions) % config.self_attn.window + 1
    return config.self_attn.window if kind == "local" else None


def documents(
    config: ModelConfig,
    positions: Ids,
    segment_ids: Ids | None,
    branches: Branches | None = None,
) -> Callable[[Any], Sight]:
    """A function from a layer's entry of `layer_kinds` to its `Sight`.

    Without `segment_ids` [B, T] a row is one document.
    """
    if config.self_attn.window is None:
        packed = None
        if segment_ids is not None and branches is None and _takes_packed_rows(config):
            packed = packed_attention.documents(jnp.asarray(segment_ids, jnp.int32))
        return lambda kind: Sight(segment_ids, branches=branches, packed=packed)
    chunked = "chunked" in config.pattern
    if segment_ids is None and (chunked or config.attention != "cudnn"):
        segment_ids = jnp.zeros_like(positions)
    shape = positions.shape if chunked else ()

    # Global layers have a window too: in one loop, layers may differ by data only.
    def width(kind: str) -> jax.Array:
        own = window(config, kind, positions)
        return jnp.broadcast_to(positions.shape[1] if own is None else own, shape)

    widths = by_kind(config, width)
    return lambda kind: Sight(segment_ids, widths(kind))


def _takes_packed_rows(config: ModelConfig) -> bool:
    """True if cuDNN's ragged kernel attends: on a Hopper GPU, and not on a mesh."""
    if config.attention != "cudnn" or partitioning.current() is not None:
        return False
    if devices.is_stand_in():  # CPUs have no capability of their own
        return devices.backend() == "gpu" and devices.has_wgmma()
    return hopper.refuses_machine() is None


def document_lengths(
    config: ModelConfig, positions: Ids, segment_ids: Ids | None
) -> jax.Array | None:
    """[B, T] tokens of each token's document; None where they do not matter.

    Raises a ValueError where documents are not given, and they matter.
    """
    if config.rope.limit is None:
        return None
    if segment_ids is None:
        raise ValueError(
            "segment_ids must be given with model.rope.limit, as rotary wavelengths "
            "depend on the tokens of a document, got None"
        )
    same = document_mask(segment_ids)[:, 0]
    return jnp.max(jnp.where(same, positions[:, None], 0), axis=-1) + 1


def sights(
    config: ModelConfig,
    positions: Ids,
    visible: Callable[[Any], Any],
    lengths: jax.Array | None,
) -> Callable[[Any], tuple[Any, Rotation]]:
    """A function from an entry of `layer_kinds` to visible keys and a `Rotation`.

    `visible` maps the same entry to the keys that a layer of the kind sees, and
    `lengths` [B, T or 1] are tokens of each document so far; None: they do not matter.
    """
    by_pair = None
    if config.rope.limit is not None and lengths is not None:
        by_pair = lengths[..., None, None]
    widest = max(rope_width(config, kind) for kind in used_kinds(config))

    def tables(kind: str) -> Rotation:
        frequencies = rope_frequencies(config, kind, by_pair)
        # Kinds whose heads are narrower read a part of these tables.
        unused = (0, widest // 2 - frequencies.shape[-1])
        frequencies = jnp.pad(frequencies, [(0, 0)] * (frequencies.ndim - 1) + [unused])
        magnitude = rope_magnitude(config, kind, by_pair)
        return rope_tables(positions, frequencies, magnitude)

    ropes = [tables(kind)._replace(**_query_fields(config, kind, positions))
            for kind in used_kinds(config)]  # fmt: skip
    if len(ropes) == 1:
        return lambda kind: (visible(kind), ropes[0])
    # Index the tables where they are used: the loop would store each selection.
    every = jax.tree.map(lambda *tables: jnp.stack(tables), *ropes)
    return lambda kind: (visible(kind), every._replace(kind=kind))


def _query_fields(
    config: ModelConfig, kind: str, positions: Ids
) -> dict[str, jax.Array]:
    """Fields of `Rotation` that change queries of a kind of layer beside the turn."""
    fields, growth = {}, config.self_attn.query_growth
    steps = positions // config.rope.original_length
    if config.self_attn.unrotated_growth is not None:
        growth = config.self_attn.unrotated_growth if kind == "unrotated" else 0.0
        steps = (positions + 1) // config.self_attn.unrotated_growth_length
    if growth is not None:
        wide = steps[..., None, None].astype(jnp.float32)
        fields["growth"] = 1 + growth * jnp.log1p(wide)
    if config.qk_norm.rotated_only:
        fields["rotates"] = jnp.asarray(kind != "unrotated")
    return fields
