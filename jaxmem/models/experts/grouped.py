"""A function of each row and of the weights of the groups that the row chooses.

Rows are sorted by group into tiles of one group each, so that no row meets a group that
it does not choose. On a Hopper GPU the sorted rows are stored, and kernels multiply all
tiles in one launch (`grouped_sorted`); elsewhere one loop runs over the tiles and
stores no more than one of them (`grouped_loop`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import devices
from jaxmem.head.maths import call_report, vocab_shards
from jaxmem.models.experts import grouped_loop, grouped_rows
from jaxmem.models.experts.grouped_rows import Arguments, Function

_KERNELS = "products of sorted rows"


def apply(function: Function, weights: Any, x: jax.Array, choice, scale) -> jax.Array:
    """The sum over a row's choices of a function of the row and the group's weights.

        out_n = Σ_k function(weights[choice_nk], x_n, scale_nk)

    The function computes each row of x [N, D] alone, by `GroupedRows`; it is
    hashable, and closes over no arrays. Weights are arrays [groups, ...], the K choices
    of a row are different, and the result is f32. Residuals are the arguments: the
    function runs again.
    """
    axes = vocab_shards.varying((weights, x, choice, scale))
    weights, x, choice, scale = vocab_shards.vary((weights, x, choice, scale), axes)
    why_not = refuses(x)
    groups = len(jax.tree.leaves(weights)[0])
    shapes = {"x": x.shape, "choice": choice.shape, "groups": (groups,)}
    runs = "loop" if why_not else "hopper"
    call_report.record("experts", shapes, runs, why_not or _KERNELS)
    return _apply_vjp(why_not is None, function, weights, x, choice, scale)


def refuses(x: jax.Array) -> str | None:
    """The reason why rows like x take the loop; None if kernels run."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"kernels multiply bfloat16 or float16, x is {x.dtype}"
    if devices.backend() != "gpu":
        return f"kernels need an NVIDIA Hopper GPU, jax runs on {devices.backend()!r}"
    from jaxmem.head.backends import hopper

    why_not = hopper.refuses_machine()
    return f"of the kernels: {why_not}" if why_not else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply_vjp(by_kernels, function, weights, x, choice, scale):
    return _apply_sums(by_kernels, function, weights, x, choice, scale)[0]


def _backend_module(by_kernels: bool):
    """The module with `tile_rows`, `sums` and `gradients`."""
    if not by_kernels:
        return grouped_loop
    from jaxmem.models.experts import grouped_sorted

    return grouped_sorted


def _apply_sums(by_kernels, function, weights, x, choice, scale):
    module, groups = _backend_module(by_kernels), len(jax.tree.leaves(weights)[0])
    tiles = grouped_rows.tiles(choice, groups, module.tile_rows(choice.size, groups))
    arguments = Arguments(weights, x, scale, tiles)
    return module.sums(function, arguments), arguments


def _apply_forward(by_kernels, function, *primals):
    leaves = jax.tree.leaves(primals[0], is_leaf=grouped_rows.is_primal)
    values = jax.tree.map(lambda x: x.value, primals, is_leaf=grouped_rows.is_primal)
    out, arguments = _apply_sums(by_kernels, function, *values)
    return out, (grouped_rows.flags(leaves), arguments)


def _apply_backward(by_kernels, function, residuals, slope):
    flags, arguments = residuals
    leaves, structure = jax.tree.flatten(arguments.weights)
    trained = grouped_rows.flagged(flags)

    def run(rows, some, weights, x, scale):
        """The function, where `some` are the trained leaves of the weights."""
        each = dict(enumerate(jax.tree.leaves(weights)))
        each |= dict(zip(trained, some, strict=True))
        weights = structure.unflatten(each[i] for i in range(len(each)))
        return function(rows, weights, x, scale)

    some = [leaves[i] for i in trained]
    dsome, dx, dscale = _backend_module(by_kernels).gradients(
        run, some, arguments, slope
    )
    every: list[jax.Array | None] = [None] * len(leaves)
    for i, gradient in zip(trained, dsome, strict=True):
        every[i] = gradient.astype(leaves[i].dtype)
    scale, x = arguments.scale, arguments.x
    dweights = jax.tree.unflatten(structure, every)
    return dweights, dx.astype(x.dtype), None, dscale.reshape(scale.shape)


_apply_vjp.defvjp(_apply_forward, _apply_backward, symbolic_zeros=True)
