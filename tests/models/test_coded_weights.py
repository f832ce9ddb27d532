"""Codes of matrices against a float64 reference that shares no code with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models import coded_weights
from tests.helpers.codes import decode, encode

pytestmark = pytest.mark.usefixtures("quick_compilation")

NF4 = np.array(
    """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
    -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
    0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0""".split(),
    np.float64,
)


def dynamic_map() -> np.ndarray:
    """The signed dynamic map of 8 bits, as its paper defines it."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means, *-means]
    return np.sort(values)


def oracle(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays of nf4 of a matrix [outputs, inputs], and what they stand for."""
    blocks = matrix.astype(np.float64).reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    scaled = blocks / largest[:, None]
    codes = np.abs(scaled[..., None] - NF4).argmin(-1)
    flat = codes.reshape(-1)
    packed = (flat[::2] * 16 + flat[1::2]).reshape(len(matrix), -1)
    offset, table = largest.mean(), dynamic_map()
    indices, nested, scales = [], [], []
    for start in range(0, len(largest), 256):
        part = largest[start : start + 256] - offset
        nested.append(np.abs(part).max())
        index = np.abs(part[:, None] / nested[-1] - table).argmin(-1)
        indices.extend(index)
        scales.extend(table[index] * nested[-1] + offset)
    arrays = {
        "codes": packed, "scales": np.reshape(indices, (len(matrix), -1)),
        "scale_scales": np.array(nested), "scale_offset": np.array(offset),
    }  # fmt: skip
    return arrays, (NF4[codes] * np.array(scales)[:, None]).reshape(matrix.shape)


def matrix(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    spread = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return (rng.normal(size=shape) * spread).astype(np.float32)


def test_dynamic_is_the_map_of_the_paper():
    assert coded_weights.DYNAMIC.shape == (256,)
    np.testing.assert_allclose(coded_weights.DYNAMIC, dynamic_map(), rtol=2e-7)


def test_encode_is_the_reference():
    x = matrix(96, 256)  # 384 blocks: one nested group and a half
    codes, decoded = oracle(x)
    arrays = encode(jnp.asarray(x), "nf4")
    types = {name: str(array.dtype) for name, array in arrays.items()}
    assert types == {
        "codes": "uint8", "scales": "uint8",
        "scale_scales": "float32", "scale_offset": "float32",
    }  # fmt: skip
    for name, expected in codes.items():
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-5)
    np.testing.assert_allclose(
        decode(arrays, jnp.float32), decoded, rtol=1e-5, atol=1e-6
    )


def test_decode_rounds_once():
    arrays = encode(jnp.asarray(matrix(8, 128)), "nf4")
    wide = decode(arrays, jnp.float32)
    narrow = decode(arrays, jnp.bfloat16)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_decode_reads_all_codes_of_the_high_bits_first():
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(8, 32)
    arrays = {"codes": codes, "scales": jnp.full((8, 1), 2.0)}
    pairs = np.stack([NF4[np.arange(256) // 16], NF4[np.arange(256) % 16]], -1)
    decoded = decode(arrays, jnp.float32)
    np.testing.assert_array_equal(decoded, 2 * pairs.reshape(8, 64).astype(np.float32))


@pytest.mark.parametrize("inputs, scales", [(256, 2), (96, 1)])
def test_encode_of_int8_has_an_error_of_half_a_step(inputs: int, scales: int):
    x = matrix(8, inputs)
    arrays = encode(jnp.asarray(x), "int8")
    assert arrays["codes"].dtype == jnp.int8
    assert arrays["scales"].shape == (8, scales)
    steps = np.abs(x).reshape(8, scales, -1).max(-1).repeat(inputs // scales, 1) / 127
    error = np.abs(np.asarray(decode(arrays, jnp.float32)) - x)
    assert np.all(error <= 0.5001 * steps) and error.max() > 0.3 * steps.max() / 2


@pytest.mark.parametrize("base", coded_weights.BASES)
def test_encode_of_a_stack_is_that_of_each_matrix(base: str):
    x = jnp.asarray(matrix(3, 4, 128))
    stacked = encode(x, base)
    for i in range(3):
        for name, array in encode(x[i], base).items():
            np.testing.assert_array_equal(stacked[name][i], array)
    decoded = decode(stacked, jnp.bfloat16)
    assert decoded.shape == x.shape and decoded.dtype == jnp.bfloat16


@pytest.mark.parametrize("base", coded_weights.BASES)
def test_encode_of_zeros_is_zeros(base: str):
    arrays = encode(jnp.zeros((2, 128)), base)
    np.testing.assert_array_equal(decode(arrays, jnp.float32), 0)


def test_shapes_are_4_bits_and_an_eighth():
    arrays = coded_weights.shapes(4096, 12288, "nf4")
    size = sum(array.size * array.dtype.itemsize for array in arrays.values())
    assert abs(8 * size / (4096 * 12288) - 4.127) < 1e-3


def test_encode_without_double_quantisation_has_the_largest_magnitudes():
    x = matrix(8, 128)
    arrays = encode(jnp.asarray(x), "nf4", double=False)
    assert arrays.keys() == {"codes", "scales"}
    np.testing.assert_array_equal(
        arrays["scales"], np.abs(x.reshape(8, 2, 64)).max(axis=-1)
    )


def test_encode_refuses_part_of_a_block():
    with pytest.raises(ValueError, match="64 inputs, which must divide the 96 inputs"):
        encode(jnp.zeros((2, 96)), "nf4")


def test_decode_is_without_an_array_of_float32_weights():
    arrays = coded_weights.shapes(64, 4096, "nf4")
    compiled = jax.jit(lambda x: coded_weights.decode(x, jnp.bfloat16)).lower(arrays)
    account = compiled.compile().memory_analysis()
    assert account.temp_size_in_bytes < 64 * 4096 * 4
