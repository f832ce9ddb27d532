"""Low-rank adapters of frozen matrices: x W + alpha / rank · x A B.

B is initialised to 0, so that training starts from the unmodified model. The matrices
are named "lora_a" and "lora_b", next to the name of the kernel, so
`optimizer.trainable = "/lora_"` trains only them.

Reference: Hu et al., "LoRA", 2021, arXiv:2106.09685.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxmem.heads.nnx import LMHead
from jaxmem.heads.verbs import Weights
from jaxmem.models.coded_linear import CodedLinear
from jaxmem.models.config import SAVED, ModelConfig


def scale(options: ModelConfig) -> float:
    """The factor of A B: alpha / rank."""
    return options.lora_alpha / (options.lora_rank or 1)


def matrices(options: ModelConfig, shape: tuple[int, ...], dtype, rngs: nnx.Rngs):
    """A, initialised uniformly within 1 / sqrt(inputs), and B, initialised to zeros.

    They are of a matrix [..., inputs, outputs].
    """
    *leading, inputs, outputs = shape
    key, bound, rank = rngs.params(), inputs**-0.5, options.lora_rank or 1
    A = jax.random.uniform(key, (*leading, inputs, rank), jnp.float32, -bound, bound)
    B = jnp.zeros((*leading, rank, outputs), dtype)
    return nnx.Param(A.astype(dtype)), nnx.Param(B)


class Adapted(nnx.Module):
    """A matrix with a low-rank adapter, for a class before the matrix's own.

    `options` precede the arguments of that class.
    """

    def __init__(self, options: ModelConfig, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        matrix: Any = self
        shape = matrix.in_features, matrix.out_features
        self.lora_a, self.lora_b = matrices(
            options, shape, matrix.param_dtype, keywords["rngs"]
        )
        self.lora_scale = scale(options)

    def __call__(self, inputs: jax.Array, **options: Any) -> jax.Array:
        """Map [..., in_features] to [..., out_features]."""
        matrix: Any = super()
        out = matrix.__call__(inputs, **options)
        A, B = (x[...].astype(out.dtype) for x in (self.lora_a, self.lora_b))
        low = (inputs.astype(out.dtype) @ A) * self.lora_scale
        return out + low @ B


class LoraLinear(Adapted, nnx.Linear):
    """`nnx.Linear`, with its arguments, and a low-rank adapter of its kernel."""


class LoraCodedLinear(Adapted, CodedLinear):
    """`CodedLinear`, with its arguments, and a low-rank adapter of its matrix."""


class LoraHead(LMHead):
    """`LMHead` with an adapter, appended to W and to h as `rank` more features.

        logits = [h, s h A] [W; B],   s = alpha / rank

    The verbs need no change for it, and W is rounded as without an adapter. The
    backward pass computes the whole gradient of [W; B], although only that of B is
    used: a head with an adapter costs as much as a trained head.
    """

    def __init__(self, options: ModelConfig, *, rngs: nnx.Rngs, **keywords: Any):
        super().__init__(rngs=rngs, **keywords)
        dtype = keywords.get("param_dtype", jnp.float32)
        shape = self.in_features, self.out_features
        self.lora_a, self.lora_b = matrices(options, shape, dtype, rngs)
        self.lora_scale = scale(options)

    def widened(self, hidden: jax.Array, W: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands [h, s h A] and [W; B], in hidden's dtype."""
        A, B = (x[...].astype(hidden.dtype) for x in (self.lora_a, self.lora_b))
        low = (hidden @ A) * self.lora_scale
        tied = self.layout == "vd"
        W = jnp.concatenate(
            [W.astype(hidden.dtype), B.T if tied else B], axis=int(tied)
        )
        return jnp.concatenate([hidden, low], axis=-1), W

    def _prepare(self, hidden) -> tuple[jax.Array, Weights]:
        hidden, weights = super()._prepare(hidden)
        hidden, W = self.widened(hidden, weights.head.W)
        head = dataclasses.replace(weights.head, W=W)
        return hidden, weights._replace(head=head)


def trainable(saved: Sequence[str]) -> str:
    """The `optimizer.trainable` of adapters, and of the matrices saved with them."""
    whole = "".join(f"|^{SAVED[name]}$" for name in saved)
    return "(^|/)lora_[ab]$" + whole


def is_adapter(path: str) -> bool:
    """True if a weight's name, like "head/lora_a", is that of an adapter."""
    return path.rpartition("/")[2] in ("lora_a", "lora_b")


def is_saved(path: str, options: ModelConfig) -> bool:
    """True if a weight is saved with the adapters: it is one, or of `lora_saved`."""
    return is_adapter(path) or path in [SAVED[name] for name in options.lora_saved]


def adapters_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters among weights, nested as these are; {} if there are none."""
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(weights), sep="/"))
    return traverse_util.unflatten_dict(
        {path: leaf for path, leaf in flat.items() if is_adapter(path)}, sep="/"
    )


def merged(
    weights: Mapping[str, Any],
    options: ModelConfig,
    tied: bool,
    norms: Mapping[str, jax.Array] = MappingProxyType({}),
) -> dict[str, Any]:
    """The weights of the model without adapters that computes the same.

        W' = W + alpha / rank · A B,   in float32, rounded once

    Weights are nested by name. The adapter of a `tied` head makes a kernel of its own
    for the head, so that the embedding is unchanged. DoRA has learned the `norms` [...,
    out] of the columns of W', where they are not NaN, by paths like "head/lora_norm".

    Reference: Liu et al., "DoRA", 2024, arXiv:2402.09353.
    """
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(weights), sep="/"))
    out = {path: weight for path, weight in flat.items() if not is_adapter(path)}
    for path in filter(lambda path: path.endswith("/lora_a"), flat):
        kernel = path.removesuffix("lora_a") + "kernel"
        A, B = (flat[path[:-1] + x].astype(jnp.float32) for x in "ab")
        at_tied_head = tied and kernel == "head/kernel"
        W = flat["embed/embedding"].T if at_tied_head else flat[kernel]
        added = scale(options) * jnp.matmul(A, B, precision="highest")
        new = W.astype(jnp.float32) + added
        if (norm := norms.get(path.removesuffix("a") + "norm")) is not None:
            factor = norm / jnp.linalg.norm(new, axis=-2)
            new *= jnp.where(jnp.isnan(norm), 1.0, factor)[..., None, :]
        out[kernel] = new.astype(W.dtype)
    return traverse_util.unflatten_dict(out, sep="/")
