"""Bytes that a head on a mesh would send: compiled for devices that are not there.

A training step of `token_stats`: forward, and the gradients of hidden and W. Devices
that split the vocabulary share 8192 tokens, all others have as many of their own. Bytes
are read off the compiled program; nothing runs. All of it is in float32, as XLA for
CPUs widens 16-bit arrays before it sends them: in 16 bits, what W costs is half, and
the rest is the same.
"""

import importlib.metadata
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from benchmarks import results
from jaxmem.planning import collectives

TOKENS = 8192  # of a group that splits the vocabulary
AXES = ("data", "fsdp", "tensor")
MESHES = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (8, 1, 1), (1, 8, 1), (2, 4, 1), (8, 1, 8)]
MESHES += [(1, 8, 8), (64, 1, 1), (1, 64, 1), (64, 1, 8), (8, 8, 8), (1, 64, 8)]
MESHES += [(512, 1, 1), (1, 512, 1)]
LARGEST = 512


def rows(shape: tuple[int, int]) -> Iterator[dict]:
    """One a mesh, for hidden states of D and V columns; and one of twice as many."""
    jax.config.update("jax_num_cpu_devices", LARGEST)
    d, v = shape
    for sizes, columns in [*((mesh, v) for mesh in MESHES), ((8, 8, 8), 2 * v)]:
        yield row_of(sizes, d, columns)


def row_of(sizes: tuple[int, ...], d: int, v: int, tokens: int = TOKENS) -> dict:
    """Bytes that a device sends in a ring, and those of what is reduced a token."""
    parts = dict.fromkeys(("statistics", "hidden", "weights"), 0.0)
    payloads = dict(parts)
    for c in collectives.of(compiled(sizes, d, v, tokens)):
        of_rows = {f"f32[{k},{tokens}]": "statistics" for k in (2, 3)}
        name = (of_rows | {f"f32[{tokens},{d}]": "hidden"}).get(c.array, "weights")
        parts[name] += c.moved * c.times
        payloads[name] += c.payload * c.times
    return {
        "devices": math.prod(sizes),
        **dict(zip(AXES, sizes, strict=True)),
        "tokens": tokens, "d": d, "v": v, "dtype": "float32",
        "statistics_bytes_per_token": round(payloads["statistics"] / tokens, 2),
        "statistics_sent_bytes_per_token": round(parts["statistics"] / tokens, 2),
        "hidden_bytes_per_token": round(payloads["hidden"] / tokens, 2),
        "hidden_sent_bytes_per_token": round(parts["hidden"] / tokens, 2),
        "weights_sent_mib": round(parts["weights"] / 2**20, 1),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "date": results.today(),
    }  # fmt: skip


def compiled(
    sizes: tuple[int, ...], d: int, v: int, tokens: int
) -> jax.stages.Compiled:
    """A step on a mesh of data, fsdp and tensor axes."""
    devices = jax.devices()[: math.prod(sizes)]
    kinds = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(sizes, AXES, devices=devices, axis_types=kinds)
    verb = jaxmem.sharding.parallel(
        jaxmem.token_stats, mesh, vocab="tensor", tokens=("data", "fsdp"), W_fsdp="fsdp"
    )

    def operand(spec, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def step(h, W, y, g):
        def run(h, W):
            made = verb(h, W, y)
            return made.logprob, made.entropy

        made, pull = jax.vjp(run, h, W)
        return made, pull((g, g))

    n, of_tokens = sizes[0] * sizes[1] * tokens, P(("data", "fsdp"))
    operands = (
        operand(of_tokens, (n, d)),
        operand(P("tensor", "fsdp"), (v, d)),
        operand(of_tokens, (n,), jnp.int32),
        operand(of_tokens, (n,)),
    )
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(step, compiler_options=options).lower(*operands).compile()
