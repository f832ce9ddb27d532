"""Attention of packed rows by cuDNN's ragged kernel: documents, call and results."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import devices
from jaxmem.models import attention, positions
from jaxmem.models.kernels import packed_attention
from jaxmem.models.positions import Sight
from jaxmem.remat import liveness
from tests.helpers import decoders
from tests.helpers.sampling import SMALL

pytestmark = pytest.mark.usefixtures("quick_compilation")
documents = jax.jit(packed_attention.documents)

IDS = np.zeros((3, 64), np.int32)
IDS[0, :40], IDS[0, 40:43], IDS[0, 43:60] = 1, 2, 3  # of 64: whole, 1 / 16, whole
IDS[1, :16], IDS[1, 16:32], IDS[1, 32:64] = 4, 5, 6  # two of 64 / 4 at most, whole
IDS[2, 5:6], IDS[2, 6:10], IDS[2, 20:25] = 7, 8, 9  # two of 64 / 16, one of 64 / 4


def test_documents_are_grouped_by_length():
    batch = documents(jnp.asarray(IDS))
    expected = [
        (64, [0, 43, 96], [40, 17, 32]),
        (16, [64, 80, 148], [16, 16, 5]),
        (4, [40, 133, 134], [3, 1, 4]),
    ]
    assert batch.fit
    members = np.zeros(IDS.shape, int)
    for group, (longest, starts, lengths) in zip(batch.groups, expected, strict=True):
        assert group.longest == longest
        count = 3 * 4 * 64 // longest
        padding = [0] * (count - 3)
        np.testing.assert_array_equal(group.lengths, [*lengths, *padding])
        np.testing.assert_array_equal(group.starts, [*starts, *(192 for _ in padding)])
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            one = np.asarray(group.index).reshape(-1)[start : start + length]
            np.testing.assert_array_equal(one, index)
        members += np.asarray(group.member)
    np.testing.assert_array_equal(members, IDS > 0)


@pytest.mark.parametrize(
    ("ids", "fits"),
    [
        pytest.param([[1] * 16 + [2] * 16], True, id="two"),
        pytest.param([[*range(1, 33)]], True, id="a document a token"),
        pytest.param([[*range(1, 6), 0]], False, id="5 of a length without groups"),
        pytest.param([[1, 2, 1, 3]], False, id="a document in two parts"),
        pytest.param([[1, 0, 1, 1]], False, id="padding inside of a document"),
        pytest.param([[5, 0, 0, 9]], True, id="padding between documents"),
        pytest.param([[2, 2, 1, 1]], False, id="falling"),
        pytest.param([[0, 0, 0, 0]], True, id="padding alone"),
    ],
)
def test_documents_fit_if_few_and_rising(ids, fits):
    assert bool(documents(jnp.asarray(ids)).fit) == fits


def test_more_than_64_short_documents_of_a_row_do_not_fit():
    ids = np.repeat(np.arange(1, 65), 2)
    assert documents(jnp.asarray(ids[None])).fit
    ids = np.arange(1, 129)
    assert not documents(jnp.asarray(ids[None])).fit


def test_logsumexps_of_tokens_and_documents_are_the_same():
    by_token = jnp.arange(2.0 * 192).reshape(2, 192)
    total = jnp.zeros_like(by_token)
    for group in documents(jnp.asarray(IDS)).groups:
        by_document = packed_attention.by_document(by_token, group)
        assert by_document.shape == (group.starts.size, 2, group.longest)
        again = packed_attention.by_token(by_document, group)
        total += jnp.where(group.member.reshape(-1), again, 0)
    np.testing.assert_array_equal(total, jnp.where(IDS.reshape(-1) > 0, by_token, 0))


def test_call_has_lengths_and_offsets_of_documents():
    """Lowered for CUDA: the fields that XLA reads, and operands of their shapes."""
    query, key = (jnp.zeros((3, 64, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def step(query, key, ids, dout):
        batch = packed_attention.documents(ids)
        forward = packed_attention.attend_forward(query, key, key, batch, 0.5)
        return packed_attention.attend_backward(
            query, key, key, batch, 0.5, forward, dout
        )

    traced = jax.jit(step).trace(query, key, jnp.zeros((3, 64), jnp.int32), query)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    results = [
        f"tensor<{n}x4x{t}x64xbf16>, tensor<{4 * n}x4x{t}xf32>, tensor<0xui8>"
        for n, t in ((3, 64), (12, 16), (48, 4))
    ] + [
        f"tensor<{n}x4x{t}x64xbf16>, tensor<{n}x2x{t}x64xbf16>, tensor<{n}x2x{t}x64x"
        for n, t in ((3, 64), (12, 16), (48, 4))
    ]
    assert len(calls) == len(results) == 6
    for line, shapes, n in zip(calls, results, (3, 12, 48) * 2, strict=True):
        assert shapes in line
        assert f"tensor<{n}x4xi32>, tensor<{n}x4xi32>, tensor<{n}x5xi32>" in line
        fields = line.replace("\\22", "'")
        assert "'max_seg_per_batch': 4" in fields
        assert "'mask_type': 'PADDING_CAUSAL'" in fields


@pytest.mark.usefixtures("lowered_anywhere", "cudnn_on_xla")
def test_sampler_calls_ragged_kernel_where_no_cache_is_read():
    """Prompts are packed rows; tokens behind those of a cache see its keys, too."""
    model = decoders.drawn(
        dataclasses.replace(SMALL, attention="cudnn", dtype="bfloat16")
    )
    prompts, lengths = jnp.ones((2, 16), jnp.int32), jnp.array([16, 9])

    def prefill(model):
        return model.prefill(prompts, lengths, 32)

    def extend(model, cache):
        return model.extend(prompts, lengths, cache)

    def count_calls(function, *operands):
        traced = jax.jit(function).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        return lowered.count("@__cudnn$fmhaSoftmax(")

    cache = jax.eval_shape(prefill, model)[1]
    assert count_calls(prefill, model) == 3  # one for each group, in a loop over layers
    assert count_calls(extend, model, cache) == 0


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="has cuDNN")
@pytest.mark.parametrize("packed", [True, False])
def test_attend_by_cudnn_names_the_backend_that_lacks_it(packed):
    batch = documents(jnp.asarray(IDS)) if packed else None
    x = jax.ShapeDtypeStruct((*IDS.shape, 2, 16), jnp.bfloat16)

    def attend(x):
        sight = Sight(jnp.asarray(IDS), packed=batch)
        return attention.attend_by_cudnn(x, x, x, sight, scale=1.0)

    with pytest.raises(ValueError, match="model.attention='cudnn' needs an NVIDIA GPU"):
        jax.eval_shape(attend, x)


@pytest.mark.usefixtures("cudnn_on_xla")
@pytest.mark.parametrize(("rows", "is_ragged"), [(3, True), (4, False)])
def test_offsets_above_32_bits_take_the_bias(rows, is_ragged):
    """4 · 131,072 · 32 · 128 = 2^31 elements."""
    shapes = [(rows, 131_072, heads, 128) for heads in (32, 8, 8)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def attend(ids, query, key, value):
        sight = Sight(ids, packed=packed_attention.documents(ids))
        return attention.attend_by_cudnn(query, key, value, sight, scale=0.1)

    ids = jax.ShapeDtypeStruct((rows, 131_072), jnp.int32)
    jaxpr = str(jax.make_jaxpr(attend)(ids, *operands))
    assert ("fmhaSoftmax" in jaxpr) == is_ragged


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
@pytest.mark.parametrize("longest", [1024, 200, 60, 9])
def test_packed_attention_equals_xla(width, longest):
    """Results and gradients in bfloat16; the shortest do not fit, and take the bias."""
    rng = np.random.default_rng(longest + width)
    shapes = (3, 1024, 8, width), (3, 1024, 2, width), (3, 1024, 2, width)
    operands = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes]
    dout = jnp.asarray(rng.normal(size=shapes[0]), jnp.bfloat16)
    ids = jnp.asarray(rows_of(rng, (3, 1024), longest))
    batch = packed_attention.documents(ids)
    assert bool(batch.fit) == (longest > 9)
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


def peak_of(device, sight):
    """Bytes of a gradient alive at once, as a plan by shapes for a device counts."""
    like = jax.ShapeDtypeStruct((3, 64, 4, 16), jnp.bfloat16)

    def total(query, key, value):
        out = attention.attend_by_cudnn(query, key, value, sight(), scale=1.0)
        return jnp.sum(out.astype(jnp.float32))

    with devices.stand_in(device):
        return liveness.peak(jax.jit(jax.grad(total)).trace(like, like, like))


def test_plan_by_shapes_counts_the_workspace_of_each_document():
    ids = jnp.asarray(IDS)
    packed = peak_of("h200", lambda: Sight(ids, packed=documents(ids)))
    whole = peak_of("h200", Sight)
    workspace = 4 * 3 * 64 * 4 * (16 + 1)  # of whole rows
    assert packed - whole > 3 * workspace  # four documents of a row's length


def test_packed_rows_are_taken_on_hopper_alone():
    config = dataclasses.replace(SMALL, attention="cudnn", dtype="bfloat16")
    has_kernels = jax.__version_info__ >= (0, 11)
    for device, expected in (("h200", has_kernels), ("l40s", False)):
        with devices.stand_in(device):
            assert positions._takes_packed_rows(config) is expected
    assert not positions._takes_packed_rows(config)


@pytest.mark.parametrize(
    "changes, is_advised",
    [
        ({}, True),
        ({"attention": "xla"}, False),
        ({"dtype": "float32"}, False),
        ({"self_attn.window": 8, "pattern": ("local",)}, False),
    ],
)
def test_advice_names_cudnn_if_its_kernel_can_run(monkeypatch, changes, is_advised):
    config = SMALL.replaced({"dtype": "bfloat16"} | changes)
    assert attention.advice(config) is None  # no GPU
    monkeypatch.setattr(attention.hopper, "refuses_machine", lambda: None)
    line = attention.advice(config)
    assert (line is not None and "model.attention='cudnn'" in line) is is_advised
