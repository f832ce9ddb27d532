"""Programs of the "hopper" backend, lowered over parts of the vocabulary."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

import jaxmem
from tests.helpers import oracle
from tests.helpers.described import described


def lowered(traced):
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_none_writes_into_a_slice(text, kept):
    """Assert that a result written in place leaves by a barrier (`ring.in_place`).

    Exponentials, which a scan may have stacked, come by one, too; what a loop carries,
    or a function is given, must not.
    """
    lines, come = text.splitlines(), 0
    in_place = [i for i, line in enumerate(lines) if "output_operand_aliases" in line]
    assert in_place
    for i in in_place:
        before, line, after = (x.split(" = ", 1) for x in lines[i - 1 : i + 2])
        assert after[1].startswith(f"stablehlo.optimization_barrier {line[0].strip()} ")
        if before[1:] and before[1].startswith("stablehlo.optimization_barrier"):
            come += f", {before[0].strip()})" in line[1]
    assert bool(come) == kept
    assert not re.search(r"optimization_barrier %(arg|iterArg)\w*\s", text)


def in_parts(total, check_vma=True, n_devices=1):
    """Value and gradients of total, whose vocabulary is split over devices."""
    mesh = jax.make_mesh(
        (n_devices,), ("tensor",), devices=jax.devices()[:n_devices],
        axis_types=(AxisType.Auto,),
    )  # fmt: skip
    return jax.jit(
        jax.shard_map(
            lambda h, W, y: jax.value_and_grad(total, (0, 1))(h, W, y),
            mesh=mesh, in_specs=(P(), P("tensor"), P()),
            out_specs=(P(), (P(), P("tensor"))), check_vma=check_vma,
        )
    )  # fmt: skip


def of_token(stats):
    return 0.5 * stats.logprob + 0.3 * stats.entropy


def by_stats(h, W, y, **options):
    return of_token(described(jaxmem.token_stats)(h, W, y, **options)).sum()


def by_loss(h, W, y, **options):
    return described(jaxmem.token_loss)(of_token, h, W, y, **options)[0]


PARTS = [(300, 256), (5120, 256), (300,)]
TYPES = (jnp.bfloat16, jnp.bfloat16, jnp.int32)


def traced_in_parts(total, check_vma=True, n_devices=None, shapes=PARTS):
    operands = map(jax.ShapeDtypeStruct, shapes, TYPES)
    n_devices = n_devices or len(jax.devices())
    return in_parts(total, check_vma, n_devices).trace(*operands)


# As training on several devices asks of XLA, for communication beside computation.
UNROLLED = {"xla_gpu_enable_while_loop_double_buffering": True}


def close(got, want):
    """Up to roundings to 8 bits."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        np.testing.assert_allclose(a, b, atol=2**-7 * np.abs(b).max())


def check_entropy_alone(h, W, y, argnums=(0, (0, 1))):
    """A verb without labels has the gradients of its statistic in float64."""

    def alone(h, W):
        return jnp.sum(jaxmem.entropy(h, W, chunk=16, implementation="hopper"))

    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    _, (dh, dW, _) = oracle.head(h, W, y, {"entropy": np.ones(len(y))})
    for argnum in argnums:
        close(jax.grad(alone, argnum)(h, W), dh if argnum == 0 else (dh, dW))
