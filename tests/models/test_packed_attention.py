"""Attention of packed rows by cuDNN's ragged kernel: documents, call and results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models import attention
from jaxmem.models.kernels import packed_attention
from jaxmem.models.positions import Sight

IDS = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3], [0, 0, 4, 4, 0, 0]])


def test_documents_are_runs_of_the_batch():
    batch = packed_attention.documents(jnp.asarray(IDS), limit=3)
    starts = [0, 3, 5, 6, 7, 8, 12, 14, 16]
    np.testing.assert_array_equal(batch.starts, [*starts, 18])
    np.testing.assert_array_equal(batch.lengths, np.diff([*starts, 18]))
    index = [[0, 0, 0, 1, 1, 2], [3, 4, 5, 5, 5, 5], [6, 6, 7, 7, 8, 8]]
    np.testing.assert_array_equal(batch.index, index)
    assert batch.fit


def test_documents_after_the_last_are_empty():
    batch = packed_attention.documents(jnp.asarray(IDS), limit=5)
    np.testing.assert_array_equal(batch.starts[9:], 18)
    np.testing.assert_array_equal(batch.lengths[9:], 0)


@pytest.mark.parametrize(
    ("ids", "limit", "fits"),
    [
        pytest.param(IDS, 3, True, id="as many as there may be"),
        pytest.param(IDS, 2, False, id="more"),
        pytest.param([[1, 2, 1, 3]], 4, False, id="a document in two parts"),
        pytest.param([[1, 0, 1, 1]], 4, False, id="padding inside of a document"),
        pytest.param([[5, 0, 0, 9]], 4, True, id="padding between documents"),
        pytest.param([[2, 2, 1, 1]], 4, False, id="falling"),
    ],
)
def test_documents_fit_if_few_and_rising(ids, limit, fits):
    batch = packed_attention.documents(jnp.asarray(ids), limit)
    assert bool(batch.fit) == fits


def test_logsumexps_of_tokens_and_documents_are_the_same():
    batch = packed_attention.documents(jnp.asarray(IDS), limit=4)
    by_token = jnp.arange(2.0 * 18).reshape(2, 18)
    by_document = packed_attention.by_document(by_token, batch, 6)
    assert by_document.shape == (12, 2, 6)
    np.testing.assert_array_equal(by_document[1, :, :2], by_token[:, 3:5])
    np.testing.assert_array_equal(
        packed_attention.by_token(by_document, batch), by_token
    )


def test_call_has_lengths_and_offsets_of_documents():
    """Lowered for CUDA: the fields that XLA reads, and operands of their shapes."""
    query, key = (jnp.zeros((3, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def step(query, key, ids, dout):
        batch = packed_attention.documents(ids, limit=8)
        forward = packed_attention.attend_forward(query, key, key, batch, 0.5)
        return packed_attention.attend_backward(
            query, key, key, batch, 0.5, forward, dout
        )

    traced = jax.jit(step).trace(query, key, jnp.zeros((3, 64), jnp.int32), query)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for target, results in (
        ("Softmax", "tensor<3x4x64x64xbf16>, tensor<24x4x64xf32>, tensor<0xui8>"),
        ("SoftmaxBackward", "tensor<3x4x64x64xbf16>, tensor<3x2x64x64xbf16>"),
    ):
        line = next(
            each for each in text.splitlines() if f"@__cudnn$fmha{target}(" in each
        )
        assert "tensor<3x8xi32>, tensor<3x8xi32>, tensor<3x9xi32>" in line
        assert results in line
        fields = line.replace("\\22", "'")
        assert "'max_seg_per_batch': 8" in fields
        assert "'mask_type': 'PADDING_CAUSAL'" in fields


def rows_of(rng, shape, longest):
    """Ids of documents of random lengths, with padding at the end."""
    rows, length = shape
    ids = np.zeros(shape, np.int32)
    for row in range(rows):
        start, count = 0, 1
        while start < length - 9:
            end = start + int(rng.integers(1, longest))
            ids[row, start:end] = count
            start, count = end, count + 1
    ids[:, -7:] = 0
    return ids


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("longest", "limit"), [(700, 16), (40, 64), (40, 8)], ids=["long", "short", "many"]
)
def test_packed_attention_equals_xla(width, longest, limit):
    """Results and gradients in bfloat16; "many" do not fit, and take the bias."""
    rng = np.random.default_rng(longest + width)
    shapes = (3, 1024, 8, width), (3, 1024, 2, width), (3, 1024, 2, width)
    operands = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes]
    dout = jnp.asarray(rng.normal(size=shapes[0]), jnp.bfloat16)
    ids = jnp.asarray(rows_of(rng, (3, 1024), longest))
    batch = packed_attention.documents(ids, limit)
    assert bool(batch.fit) == (limit != 8)
    sights = {
        attention.attend_by_cudnn: Sight(ids, packed=batch),
        attention.attend: Sight(ids),
    }
    results = []
    for attend, sight in sights.items():
        function = functools.partial(attend, sight=sight, scale=width**-0.5)
        if attend is attention.attend:  # in float32, a reference
            operands = [x.astype(jnp.float32) for x in operands]
            dout = dout.astype(jnp.float32)

        @jax.jit
        def step(dout, *operands, function=function):
            out, pull = jax.vjp(lambda q, k, v: function(q, k, v), *operands)
            return out, *pull(dout)

        results.append(step(dout, *operands))
    is_token = np.asarray(ids > 0)[..., None, None]
    for ours, reference in zip(*results, strict=True):
        scale = float(jnp.abs(reference).max())
        error = jnp.where(is_token, ours.astype(jnp.float32) - reference, 0)
        assert float(jnp.abs(error).max()) < 0.01 * scale
