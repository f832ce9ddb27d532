"""Codes of frozen matrices in 4 and 8 bits, and the matrices that they stand for.

A matrix is [outputs, inputs], with any leading axes. Its arrays:

    base    name          type, shape                    contents
    nf4     codes         uint8 [outputs, inputs / 2]    two codes; high bits first
            scales        uint8 [outputs, inputs / 64]   indices of DYNAMIC
            scale_scales  float32 [blocks / 256]         of 256 scales in flat order
            scale_offset  float32 []                     the mean of all scales
    int8    codes         int8 [outputs, inputs]
            scales        float32 [outputs, inputs / 128]

    nf4:    W = NF4[code] · scale,   scale = DYNAMIC[index] · scale_scale + scale_offset
    int8:   W = code · scale

All of it is in float32, and W is rounded once. A block of inputs shares a scale, and
the shapes say how long it is. `scales` of nf4 may be float32, too; `scale_scales` and
`scale_offset` are then left out.

References: Dettmers et al., "QLoRA", 2023, arXiv:2305.14314; Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2021, arXiv:2110.02861.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BASES = ("nf4", "int8")
ARRAYS = ("codes", "scales", "scale_scales", "scale_offset")
BLOCKS = {"nf4": 64, "int8": 128}  # inputs that share a scale
_LEAF = re.compile(rf"(^|.*/)(kernel|embedding)_({'|'.join(ARRAYS)})$")
NESTED = 256  # scales that share a scale of theirs

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact 0.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def _dynamic_values() -> np.ndarray:
    """The 256 values of the dynamic type: 2^i fractions of each of 7 powers of 10.

    Their roundings are those of bitsandbytes, whose `torch.linspace` counts a rounded
    step from the nearer end.
    """
    positive = []
    for i in range(7):
        index, last = np.arange(2**i + 1), 2**i
        step = float(np.float32((1 - 0.1) / last))
        edges = np.where(
            index <= last // 2,
            float(np.float32(0.1)) + index * step,
            1 - (last - index) * step,
        ).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        positive.append(np.float32(10.0 ** (i - 6)) * middles)
    values = np.concatenate(positive)
    ends = np.array([0, 1], np.float32)
    return np.sort(np.concatenate([values, -values, ends]))


DYNAMIC = _dynamic_values()


def is_coded(path: str) -> bool:
    """True if a weight's name is that of an array of a coded matrix."""
    return _LEAF.match(path) is not None


def split_path(path: str) -> tuple[str, str]:
    """The path of a coded matrix, and the name in `ARRAYS` of its array at a path."""
    match = _LEAF.match(path)
    assert match is not None, path
    start, matrix, name = match.groups()
    return start + matrix, name


def kernel_path(path: str) -> str:
    """The path of a weight, or of the matrix that an array of codes or scales is of."""
    return split_path(path)[0] if is_coded(path) else path


def base_of(codes: Any) -> str:
    """The base of codes."""
    return "int8" if codes.dtype == jnp.int8 else "nf4"


def matrix_shape(codes: Any) -> tuple[int, ...]:
    """The shape [..., outputs, inputs] of the matrix that codes are of."""
    *rows, width = codes.shape
    return (*rows, 2 * width if codes.dtype == jnp.uint8 else width)


def count_weights(path: str, array: Any) -> int:
    """The number of weights that an array of this name has: of scales none."""
    if not is_coded(path):
        return math.prod(array.shape)
    return math.prod(matrix_shape(array)) if path.endswith("_codes") else 0


def shapes(outputs: int, inputs: int, base: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the arrays of a matrix.

    Raises:
        ValueError: the inputs are not whole blocks.
    """
    matrix = jax.ShapeDtypeStruct((outputs, inputs), jnp.float32)
    return jax.eval_shape(lambda x: encode(x, base), matrix)


def encode(
    matrix: jax.Array, base: str, double: bool = True, block: int | None = None
) -> dict[str, jax.Array]:
    """The arrays of a matrix [..., outputs, inputs] in a base of `BASES`.

    A scale is the largest magnitude of a block, for int8 divided by 127; each weight
    has the nearest code. int8 has a scale for a whole row whose inputs are no multiple
    of 128; `block` is another number of inputs that share a scale. Scales of nf4 are
    indices of DYNAMIC if `double`, and else float32.

    Raises:
        ValueError: nf4, and the inputs are no multiple of 64.
    """
    inputs = matrix.shape[-1]
    block = block or BLOCKS[base]
    if inputs % block:
        if base == "nf4":
            raise ValueError(
                f"nf4 has blocks of {block} inputs, which must divide the {inputs} "
                "inputs of a matrix"
            )
        block = inputs
    wide = matrix.astype(jnp.float32).reshape(*matrix.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    inverse = 1 / jnp.where(largest == 0, 1, largest)[..., None]
    if base == "int8":
        codes = jnp.round(wide * (127 * inverse)).astype(jnp.int8)
        return {"codes": codes.reshape(matrix.shape), "scales": largest / 127}
    codes = _nearest(wide * inverse).reshape(*matrix.shape[:-1], -1, 2)
    packed = codes[..., 0] << 4 | codes[..., 1]
    scales = _encode_scales(largest) if double else {"scales": largest}
    return {"codes": packed} | scales


def _nearest(x: jax.Array) -> jax.Array:
    """The code of the NF4 value nearest to each of x, the lower one of two."""
    codes = jnp.zeros(x.shape, jnp.uint8)
    for middle in _middles(NF4):
        codes += (x > middle).astype(jnp.uint8)
    return codes


def _middles(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return ((wide[:-1] + wide[1:]) / 2).astype(np.float32)


def _encode_scales(scales: jax.Array) -> dict[str, jax.Array]:
    """The arrays of scales [..., outputs, blocks of a row]."""
    leading, count = scales.shape[:-2], scales.shape[-2] * scales.shape[-1]
    flat = scales.reshape(*leading, count)
    offset = jnp.mean(flat, axis=-1)
    groups = -(-count // NESTED)
    unused = [(0, 0)] * len(leading) + [(0, groups * NESTED - count)]
    centred = jnp.pad(flat - offset[..., None], unused)
    centred = centred.reshape(*leading, groups, NESTED)
    largest = jnp.max(jnp.abs(centred), axis=-1)
    scaled = centred / jnp.where(largest == 0, 1, largest)[..., None]
    indices = jnp.searchsorted(jnp.asarray(_middles(DYNAMIC)), scaled)
    indices = indices.reshape(*leading, -1)[..., :count]
    return {
        "scales": indices.reshape(scales.shape).astype(jnp.uint8),
        "scale_scales": largest,
        "scale_offset": offset,
    }


def decode(arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The matrix [..., outputs, inputs] of arrays from `encode`, in a type."""
    codes = arrays["codes"]
    scales = decode_scales(arrays)
    if codes.dtype == jnp.int8:
        values, shape = codes.astype(jnp.float32), codes.shape
    else:
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        values = _look_up("nf4", _unpack(codes))
    blocks = values.reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).astype(dtype).reshape(shape)


def _unpack(packed: jax.Array) -> jax.Array:
    """Codes [..., 2] of bytes, those of the high bits first.

    The operations have no constants of the matrix's size, which `jax.checkpoint` would
    compute before a loop over layers, and keep.
    """
    return jnp.stack([packed >> jnp.uint8(4), packed & jnp.uint8(15)], axis=-1)


def decode_scales(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The scales float32 [..., outputs, blocks of a row] of arrays from `encode`."""
    scales = arrays["scales"]
    if scales.dtype != jnp.uint8:
        return scales
    count = scales.shape[-2] * scales.shape[-1]
    nested = jnp.repeat(arrays["scale_scales"], NESTED, axis=-1)[..., :count]
    wide = _look_up("dynamic", scales) * nested.reshape(scales.shape)
    wide = wide + arrays["scale_offset"][..., None, None]
    # Otherwise XLA would compute a scale once for each of the weights that share it.
    return jax.lax.optimization_barrier(wide)


# As a call, the table is no constant of a rule, which jax.checkpoint cannot have.
@functools.partial(jax.jit, static_argnames="name")
def _look_up(name: str, indices: jax.Array) -> jax.Array:
    """The values of a table at indices, all of which are in it."""
    table = jnp.asarray({"nf4": NF4, "dynamic": DYNAMIC}[name])
    return table.at[indices].get(mode="promise_in_bounds")
