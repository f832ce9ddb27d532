"""The decoder that computes the same as one with adapters, or with codes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxmem.models import coded_weights, lora, structure
from jaxmem.models.config import PLAIN, ModelConfig
from jaxmem.models.decoder import Decoder, abstract_decoder
from jaxmem.models.weights import by_path


class Merged(NamedTuple):
    """A decoder without adapters and codes, and the differences of its matrices.

    A difference is the root mean square over all matrices that were coded, relative to
    that of the weights.
    """

    decoder: Decoder
    rounding: float  # from the sums of decoded matrices and adapters
    coding: float | None  # of the codes from the original matrices, if these are known


def merge(decoder: Decoder, norms: Mapping[str, Any] | None = None) -> Decoder:
    """The decoder without adapters and codes that computes the same, up to rounding.

        W' = W + alpha / rank · A B,   in float32, rounded once

    `norms` are those that DoRA has learned, as in `lora.merged`.

    `save` can save it; an adapter of a tied head unties the head. The adapted matrices
    are copied. Coded matrices are decoded, one layer at a time, and are on the host.
    """
    if decoder.config.base is not None:
        return merge_codes(decoder).decoder
    config, weights = decoder.config, nnx.to_pure_dict(nnx.split(decoder)[1])
    return _with_weights(
        decoder, lora.merged(weights, config, config.tied, norms or {})
    )


def merge_codes(
    decoder: Decoder, original: Callable[[str], Any] | None = None
) -> Merged:
    """`merge` of a decoder with codes, and the differences of its matrices.

    `original` is a function of a kernel's path in the merged decoder, which returns the
    kernel that was coded; None: it is not known.
    """
    config, sources = decoder.config, _Sources(decoder)
    merged = lora.merged(sources.outside_blocks(), config, config.tied)
    arrays: dict[str, Any] = dict(traverse_util.flatten_dict(merged, sep="/"))
    sums = np.zeros(4)
    for path in by_path(_abstract(decoder)):
        if path in arrays:
            continue
        known = original(path) if original and sources.is_coded(path) else None
        layers = []
        for number, (kernel, index) in enumerate(sources.of(path)):
            one = known if known is None or index is None else known[number]
            layer, squares = sources.merged(kernel, index, one)
            layers.append(layer)
            sums += np.asarray(squares, np.float64)
        arrays[path] = layers[0] if index is None else np.stack(layers)
    rounding, all_weights, coding, originals = sums
    return Merged(
        _with_weights(decoder, traverse_util.unflatten_dict(arrays, sep="/")),
        math.sqrt(rounding / (all_weights or 1)),
        None if original is None else math.sqrt(coding / (originals or 1)),
    )


class _Sources:
    """The weights of a decoder with codes, by the paths of the merged decoder."""

    def __init__(self, decoder: Decoder):
        config = decoder.config
        self._flat, self._dtype = by_path(decoder), jnp.dtype(config.param_dtype)
        self._scale = lora.scale(config)
        self._merged_stacks = structure.stacks(_plain_config(config))
        self._own = {
            layer: (stack.name, index)
            for stack in structure.stacks(config).values()
            for index, layer in enumerate(stack.layers)
        }

    def outside_blocks(self) -> dict[str, Any]:
        """Weights that are neither of blocks nor coded, nested by name."""
        stacks = {name for name, _ in self._own.values()}
        kept = {
            path: array
            for path, array in self._flat.items()
            if path.partition("/")[0] not in stacks and not coded_weights.is_coded(path)
        }
        return traverse_util.unflatten_dict(kept, sep="/")

    def of(self, path: str) -> Iterator[tuple[str, int | None]]:
        """The path here of a weight of each layer, and the layer's index there."""
        name, _, rest = path.partition("/")
        stack = self._merged_stacks.get(name)
        if stack is None:
            yield path, None
            return
        for layer in stack.layers:
            own, index = self._own[layer]
            yield f"{own}/{rest}", index

    def is_coded(self, path: str) -> bool:
        """True if a layer of a merged kernel is coded."""
        return any(f"{kernel}_codes" in self._flat for kernel, _ in self.of(path))

    def merged(
        self, path: str, index: int | None, original: Any
    ) -> tuple[np.ndarray, Any]:
        """One layer of a weight, and sums of squares of a coded matrix."""

        def one(name: str) -> jax.Array:
            array = self._flat[name]
            return array if index is None else array[index]

        names = {name: f"{path}_{name}" for name in coded_weights.ARRAYS}
        coded = {name: one(p) for name, p in names.items() if p in self._flat}
        start = path.removesuffix("kernel")
        adapter = None
        if path.endswith("/kernel") and f"{start}lora_a" in self._flat:
            adapter = tuple(one(f"{start}lora_{x}") for x in "ab")
        if not coded and adapter is None:
            return np.asarray(one(path)), np.zeros(4)
        base = coded or one(path)
        is_table = path.endswith("embedding")
        merged = _merge_matrix(
            base, adapter, original, self._scale, self._dtype, is_table
        )
        return jax.device_get(merged)


@functools.partial(jax.jit, static_argnames=("scale", "dtype", "is_table"))
def _merge_matrix(
    base: Mapping[str, jax.Array] | jax.Array,
    adapter: tuple[jax.Array, jax.Array] | None,
    original: jax.Array | None,
    scale: float,
    dtype: Any,
    is_table: bool,
) -> tuple[jax.Array, jax.Array]:
    """A kernel [..., inputs, outputs], or a table, of codes or weights, rounded once.

    And the sums of squares of: rounding, the kernel, the codes' differences from the
    original, and the original.
    """
    is_coded = isinstance(base, Mapping)
    if is_coded:
        W = coded_weights.decode(base, jnp.float32)
        W = W if is_table else W.swapaxes(-1, -2)
    else:
        W = base.astype(jnp.float32)
    squares = [jnp.zeros(())] * 2
    if original is not None and is_coded:
        wide = original.astype(jnp.float32)
        squares = [jnp.sum(jnp.square(W - wide)), jnp.sum(jnp.square(wide))]
    if adapter is not None:
        A, B = (x.astype(jnp.float32) for x in adapter)
        W = W + scale * jnp.matmul(A, B, precision="highest")
    rounded = W.astype(dtype)
    lost = jnp.sum(jnp.square(rounded.astype(jnp.float32) - W)) * is_coded
    total = jnp.sum(jnp.square(W)) * is_coded
    return rounded, jnp.stack([lost, total, *squares])


def _plain_config(config: ModelConfig) -> ModelConfig:
    """The config of a merged decoder."""
    return dataclasses.replace(
        config,
        lora_rank=0,
        lora_head=False,
        lora_saved=(),
        tied=config.tied and not config.lora_head,
        **PLAIN,
    )


def _abstract(decoder: Decoder) -> Decoder:
    return abstract_decoder(_plain_config(decoder.config), policy=decoder.policy)


def _with_weights(decoder: Decoder, weights: Any) -> Decoder:
    """The merged decoder of weights that are nested by name."""
    return nnx.merge(nnx.split(_abstract(decoder))[0], weights)
