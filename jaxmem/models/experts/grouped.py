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

    The function computes each row of x [N, D] alone, by `grouped_rows.Rows`; it is
    hashable, and closes over no arrays. Weights are arrays [groups, ...], the K choices
    of a row are different, and the result is f32. Residuals are the arguments: the
    function runs again.
    """
    around = vocab_shards.varying((weights, x, choice, scale))
    weights, x, choice, scale = vocab_shards.vary((weights, x, choice, scale), around)
    why_not = refuses(x)
    groups = len(jax.tree.leaves(weights)[0])
    shapes = {"x": x.shape, "choice": choice.shape, "groups": (groups,)}
    runs = "loop" if why_not else "hopper"
    call_report.record("experts", shapes, runs, why_not or _KERNELS)
    return _apply(why_not is None, function, weights, x, choice, scale)


def refuses(x: jax.Array) -> str | None:
    """Why rows like x take the loop; None if kernels run."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"kernels multiply bfloat16 or float16, x is {x.dtype}"
    if devices.backend() != "gpu":
        return f"kernels need an NVIDIA Hopper GPU, jax runs on {devices.backend()!r}"
    from jaxmem.head.backends import hopper

    why_not = hopper.refuses_machine()
    return f"of the kernels: {why_not}" if why_not else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(by_kernels, function, weights, x, choice, scale):
    return _run(by_kernels, function, weights, x, choice, scale)[0]


def _way(by_kernels: bool):
    """The module with `tile_rows`, `sums` and `gradients`."""
    if not by_kernels:
        return grouped_loop
    from jaxmem.models.experts import grouped_sorted

    return grouped_sorted


def _run(by_kernels, function, weights, x, choice, scale):
    way, groups = _way(by_kernels), len(jax.tree.leaves(weights)[0])
    found = grouped_rows.tiles(choice, groups, way.tile_rows(choice.size, groups))
    arguments = Arguments(weights, x, scale, found)
    return way.sums(function, arguments), arguments


def _forward(by_kernels, function, *primals):
    leaves = jax.tree.leaves(primals[0], is_leaf=grouped_rows.is_primal)
    values = jax.tree.map(lambda x: x.value, primals, is_leaf=grouped_rows.is_primal)
    out, arguments = _run(by_kernels, function, *values)
    return out, (grouped_rows.flags(leaves), arguments)


def _backward(by_kernels, function, residuals, slope):
    found, arguments = residuals
    leaves, structure = jax.tree.flatten(arguments.weights)
    trained = grouped_rows.flagged(found)

    def run(rows, some, weights, x, scale):
        """The function, with some of the weights apart."""
        each = dict(enumerate(jax.tree.leaves(weights)))
        each |= dict(zip(trained, some, strict=True))
        weights = structure.unflatten(each[i] for i in range(len(each)))
        return function(rows, weights, x, scale)

    some = [leaves[i] for i in trained]
    by_some, by_x, by_scale = _way(by_kernels).gradients(run, some, arguments, slope)
    every: list[jax.Array | None] = [None] * len(leaves)
    for i, gradient in zip(trained, by_some, strict=True):
        every[i] = gradient.astype(leaves[i].dtype)
    scale, x = arguments.scale, arguments.x
    by_weights = jax.tree.unflatten(structure, every)
    return by_weights, by_x.astype(x.dtype), None, by_scale.reshape(scale.shape)


_apply.defvjp(_forward, _backward, symbolic_zeros=True)
