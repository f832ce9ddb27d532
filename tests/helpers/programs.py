"""Compiled programs: their memory, and their matrix products."""

import re

import jax
import jax.numpy as jnp
import jaxlib.version

F32, BF16 = jnp.float32, jnp.bfloat16


def shapes(n, d, v, dtype=F32, w_dtype=None):
    return (
        jax.ShapeDtypeStruct((n, d), dtype),
        jax.ShapeDtypeStruct((v, d), w_dtype or dtype),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )


def compiled(fn, *operands):
    """LLVM's optimizations, which take most of the time, change no buffer."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(fn).lower(*operands).compile(options)


def count_gemms(text):
    return len(re.findall(r" dot\(|cublas.*gemm|__onednn\$matmul", text))


# (tokens, D, V, chunk): V a multiple of 128, as every padded vocabulary is.
SIZES = [
    (1024, 64, 4096, 128), (4096, 64, 4096, 128), (2048, 128, 16384, 256),
    (2048, 32, 50304, 64), (4096, 256, 8192, 512),
]  # fmt: skip
CPU = jax.default_backend() == "cpu"
CUBLAS = 32 * 2**20  # its workspace
PERCENT = 1.04  # statistics, row ids, the chunk's hidden states
# XLA for CPUs in jaxlib 0.10 keeps exponentials beside logits, and widens 16-bit
# arrays whole to take rows of them; the docstrings say so.
OLD_XLA = CPU and jaxlib.version.__version_info__ < (0, 11)
