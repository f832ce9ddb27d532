"""The norm of the residual stream by kernels: against float64; lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import devices, remat
from jaxmem.kernels import residual_norm
from jaxmem.models import normed_products
from tests import hlo
from tests.cases import slow
from tests.kernels import needs_pallas
from tests.models import test_layers

pytestmark = [
    needs_pallas,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

OFFSET, EPSILON = 1.0, 1e-2
# Rows and their width, arrays that are added first, and those that read the result.
CASES = [((64, 256), 1, 2), ((5, 384), 0, 3), ((48, 128), 0, 1), ((96, 2176), 1, 3)]


def problem(dtype, shape, added, readers):
    """x, more, scale, the gradients by y, and the gradient by s of what is beside."""
    rng = np.random.default_rng(0)

    def draw(shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    more = draw(shape) if added else None
    slopes = tuple(draw(shape) for _ in range(readers))
    return draw(shape), more, draw(shape[1]), slopes, draw(shape)


def exact(x, more, scale, slopes, beside):
    """s, y, ds, y and dscale in float64; s rounded once, as the others read it."""
    s = x if more is None else x + more
    s, scale, beside = (np.asarray(a, np.float64) for a in (s, scale, beside))
    g = sum(np.asarray(slope, np.float64) for slope in slopes)
    r = 1 / np.sqrt(np.mean(s**2, axis=-1, keepdims=True) + EPSILON)
    scale = OFFSET + scale
    mean = np.mean(g * scale * s, axis=-1, keepdims=True)
    ds = beside + r * g * scale - r**3 * s * mean
    return s, r * s * scale, ds, r * s * scale, (g * r * s).sum(0)


def by_kernels(x, more, scale, slopes, beside):
    numbers = scale, OFFSET, EPSILON
    s, y = residual_norm.forward(x, more, *numbers)
    return s, y, *residual_norm.backward(s, slopes, beside, *numbers)


def check(got, want, dtype):
    """One rounding to the dtype; sums in float32."""
    dtypes = (dtype, dtype, dtype, dtype, "float32")
    for ours, theirs, kind in zip(got, want, dtypes, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, kind)
        largest = max(1.0, np.abs(theirs).max())
        atol = 4 * largest * float(jnp.finfo(kind).eps)
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_against_float64(dtype, case, triton_interpreted):
    given = problem(dtype, *case)
    check(by_kernels(*given), exact(*given), dtype)


@pytest.fixture
def fused(monkeypatch):
    """As on a GPU, but on few rows."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    monkeypatch.setattr(normed_products, "_FEWEST", 1)
    monkeypatch.setattr(residual_norm, "_NARROWEST", 64)


def test_what_is_normalised_is_the_rounded_sum(triton_interpreted):
    """Else y, in an error of its own of half a unit, would have that of s as well."""
    x, more, scale, *rest = problem("bfloat16", (64, 256), 1, 1)
    _, y = residual_norm.forward(x, more, scale, OFFSET, EPSILON)
    want = exact(x, more, scale, *rest)[1]
    half = 0.51 * float(jnp.finfo("bfloat16").eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=half)


def under_a_policy(config, w, x, *rest):
    def block(x, w):
        return test_layers.lean(config, w, x, *rest)

    return remat.block(block, "dots", scanned=False)(x, w)


LORA = dict(lora_rank=4, lora_targets=("query", "up"))


@pytest.mark.parametrize(
    "block, name, dtype, changes",
    [
        slow(test_layers.lean, "Mistral", "float32", LORA),
        slow(test_layers.lean, "Qwen3", "bfloat16", {}),
        slow(test_layers.lean, "Qwen2", "float32", {}),
        slow(under_a_policy, "Llama", "float32", {}),
        (under_a_policy, "Gemma 3", "bfloat16", {}),
    ],
)  # fmt: skip
def test_a_block_with_it_is_as_exact(
    block, name, dtype, changes, triton_interpreted, request
):
    """Of the result and of each gradient: the error against float64."""
    config = test_layers.config_of(name, dtype=dtype, **changes)
    given = test_layers.problem(config)
    usual = test_layers.with_gradients(test_layers.lean, config, dtype, *given)
    with jax.enable_x64(True):
        exact = test_layers.with_gradients(
            test_layers.ordinary, config, jnp.float64, *given
        )
    request.getfixturevalue("fused")
    got = test_layers.with_gradients(block, config, dtype, *given)
    unit, (times, more) = float(jnp.finfo(dtype).eps), test_layers.TYPES[dtype]
    for key, want in exact.items():
        if key.endswith("key/bias"):  # moves all of a query's scores alike
            continue
        bound = times * test_layers.error(usual[key], want) + more * unit
        assert test_layers.error(got[key], want) <= bound, key
    assert any((got[key] != usual[key]).any() for key in exact)  # the kernel ran


@pytest.mark.parametrize(
    "policy",
    [
        "none", "save_attention", slow("dots_and_attention"), slow("dots"),
        slow("full"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [slow("Qwen3"), "Gemma 3"])
def test_a_block_with_it_keeps_less(name, policy, request):
    """No number per row where all is kept, and nowhere more."""
    config = test_layers.config_of(name, dtype="bfloat16")
    usual = test_layers.shaped(config, policy)
    request.getfixturevalue("fused")
    lean = test_layers.shaped(config, policy)
    saved = policy in ("none", "dots_and_attention")  # "norm_rms", of two norms
    assert lean.bytes_per_token == usual.bytes_per_token - 8 * saved


def test_the_shapes_that_it_supports(monkeypatch):
    widths = 1024, 1152, 2560, 3584, 4096, 5120, 5376, 8192
    assert all(map(residual_norm.supports, widths))
    assert not any(map(residual_norm.supports, (64, 1000, 16384, 128 * 33)))
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    is_fused = [
        normed_products.is_fused(jnp.zeros(shape, "bfloat16"))
        for shape in [(8, 128, 1024), (1, 1040, 128), (2, 520, 64), (1, 1032, 128),
                      (1, 512, 128)]
    ]  # fmt: skip
    assert is_fused == [True, True, False, False, False]


def test_no_derivative_of_higher_order_in_silence(fused, triton_interpreted):
    config = test_layers.config_of("Llama", dtype="float32")
    weights, x, _, *rest = test_layers.problem(config)
    run = functools.partial(test_layers.lean, config, weights)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: run(x, *rest), (x,), (x,))


def test_lowered_for_a_gpu():
    given = problem("bfloat16", (64, 1024), 1, 3)
    text = hlo.lowered_for_an_h200(by_kernels, *given)
    assert "residual_norm" in text and "residual_norm_backward" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, ((4096, 1024), 1, 3), ((64, 5120), 0, 2), ((32, 8192), 1, 1)],
    ids=str,
)  # fmt: skip
def test_on_a_gpu(case):
    given = problem("bfloat16", *case)
    check(jax.jit(by_kernels)(*given), exact(*given), "bfloat16")
