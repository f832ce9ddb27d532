"""A frozen matrix of a block as codes, decoded where it is used."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxmem.models import coded_weights


@jax.custom_vjp
def product(x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The product of x [..., inputs] and a coded matrix, in the type of x.

        y = x Wᵀ,   dx = dy W

    W is decoded in the forward pass and again in the backward pass: the residuals are
    its codes and scales, which have no gradient.
    """
    W = coded_weights.decode(arrays, x.dtype)
    return lax.dot_general(x, W, (((x.ndim - 1,), (1,)), ((), ())))


def _product_backward(arrays, dy):
    # Without a loop around it, XLA would keep the forward pass's matrix for this one.
    scales, dy = lax.optimization_barrier((coded_weights.decode_scales(arrays), dy))
    arrays = {"codes": arrays["codes"], "scales": scales}
    W = coded_weights.decode(arrays, dy.dtype)
    return lax.dot_general(dy, W, (((dy.ndim - 1,), (0,)), ((), ()))), None


product.defvjp(lambda x, arrays: (product(x, arrays), arrays), _product_backward)


def draw_codes(
    key: jax.Array, shape: tuple[int, ...], init: Any, dtype: Any, base: str,
    double: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """The codes of an initial kernel [..., inputs, outputs], as a dense one is drawn.

    Under `jax.vmap` kernels are drawn one after the other, so that one is alive.
    """

    @jax.custom_batching.sequential_vmap
    def drawn(key: jax.Array) -> dict[str, jax.Array]:
        matrix = init(key, shape, dtype).swapaxes(-1, -2)
        return coded_weights.encode(matrix, base, double)

    return drawn(key)


class CodedArrays(nnx.Module):
    """The arrays of a coded matrix, "kernel_codes" and so on."""

    matrix_name = "kernel"

    def set_arrays(self, arrays: Mapping[str, jax.Array]) -> None:
        """Set the arrays, named as in `coded_weights`."""
        for name, array in arrays.items():
            setattr(self, f"{self.matrix_name}_{name}", nnx.Param(array))

    @property
    def codes(self) -> dict[str, jax.Array]:
        """The arrays, named as in `coded_weights`."""
        attributes = {
            name: f"{self.matrix_name}_{name}" for name in coded_weights.ARRAYS
        }
        return {
            name: getattr(self, attribute)[...]
            for name, attribute in attributes.items()
            if hasattr(self, attribute)
        }


class CodedLinear(CodedArrays):
    """`nnx.Linear`, with its arguments, whose frozen matrix is coded in a base."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        base: str,
        double: bool,
        use_bias: bool,
        kernel_init: Any,
        rngs: nnx.Rngs,
        **types: Any,
    ):
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.param_dtype = types["dtype"], types["param_dtype"]
        shape = in_features, out_features
        key, dtype = rngs.params(), self.param_dtype
        drawn = draw_codes(key, shape, kernel_init, dtype, base, double)
        self.set_arrays(drawn)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(out_features, self.param_dtype))

    @property
    def kernel(self) -> jax.Array:
        """The decoded matrix [in_features, out_features] in the compute type."""
        return coded_weights.decode(self.codes, self.dtype).T

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Map [..., in_features] to [..., out_features]."""
        out = product(inputs.astype(self.dtype), self.codes)
        return out if self.bias is None else out + self.bias[...].astype(out.dtype)
