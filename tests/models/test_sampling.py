"""Samples against the distribution that they claim to come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem import devices
from jaxmem.models.decoder import Decoder
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.models.sampling import (
    Sampler,
    SamplingConfig,
    prepared,
    row_keys,
    sample,
    truncate,
)
from tests.helpers.cases import slow
from tests.helpers.decoders import whole
from tests.helpers.sampling import (
    EOS,
    LENGTHS,
    PAD,
    PROMPTS,
    SMALL,
    decoder,
    run,
    sampler,
)

# These programs are tiny: all their time would go into optimizing them.
pytestmark = pytest.mark.usefixtures("quick_compilation")


def read(model, samples):
    """Hidden states [B, R, D] that must have chosen the samples of PROMPTS."""
    rows, slots = samples.tokens.shape
    at = np.arange(rows)[:, None], LENGTHS[:, None] + np.arange(slots)
    tokens = np.pad(PROMPTS, ((0, 0), (0, slots)))
    tokens[at] = samples.tokens
    return whole(model, tokens)[at[0], at[1] - 1]


def truncated(logits, temperature=1.0, top_k=None, top_p=None, support=None, min_p=0.0):
    """Ids left and their log-probabilities, one row in float64, the slow way."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    order = sorted(range(len(p)), key=lambda v: (-p[v], v))[:top_k]
    total, kept, held = p[order].sum(), [], 0.0
    for v in order:
        if (top_p is not None and held >= top_p) or p[v] < min_p * p.max():
            break
        kept.append(v)
        held += p[v] / total
    kept = kept[:support]
    return kept, np.log(p[kept] / p[kept].sum())


# -------------------------------------------------------------- truncation


@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=5),
        dict(top_k=1),
        dict(top_p=0.6, support=17),
        dict(top_p=1e-6, support=3),
        dict(top_p=0.9, support=2),  # cut to the support
        dict(top_p=0.8, top_k=6),
        dict(top_p=0.8, top_k=6, support=9, temperature=0.5),
        dict(top_p=0.7, support=17, temperature=3.0),
        dict(min_p=0.3, support=17),
        dict(min_p=0.2, top_p=0.8, top_k=9, temperature=2.0),
        dict(min_p=1.0, top_k=4),
    ],
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_truncate_keeps_top_k_and_nucleus(settings, spread):
    logits = np.random.default_rng(1).normal(size=(4, 17)).astype(np.float32) * spread
    quick = jax.jit(truncate, static_argnums=1)
    logprobs, ids = jax.device_get(quick(logits, SamplingConfig(**settings)))
    for row in range(4):
        kept, expected = truncated(logits[row], **settings)
        left = len(ids[row]) - len(kept)
        np.testing.assert_array_equal(ids[row], kept + [-1] * left)
        np.testing.assert_allclose(logprobs[row, : len(kept)], expected, atol=1e-5)
        np.testing.assert_array_equal(logprobs[row, len(kept) :], -np.inf)


@pytest.mark.parametrize(
    "settings",
    [
        slow(dict(top_p=0.7, temperature=2.0)),
        dict(top_p=0.95, min_p=0.01),
        slow(dict(min_p=0.02)),
    ],
)
def test_support_of_all_ids_needs_no_ids(settings):
    logits = np.random.default_rng(1).normal(size=(4, 17)).astype(np.float32) * 3
    config = SamplingConfig(support=17, **settings)
    sampler = Sampler(config, (), PAD, keep_support=False)
    logprobs, ids = jax.device_get(jax.jit(sampler._truncate)(logits))
    assert ids is None
    for row in range(4):
        kept, expected = truncated(logits[row], **settings)
        assert 1 < len(kept) < 17
        others = np.setdiff1d(np.arange(17), kept)
        np.testing.assert_allclose(logprobs[row, kept], expected, atol=1e-5)
        np.testing.assert_array_equal(logprobs[row, others], -np.inf)


def test_truncate_prefers_lower_id_of_equals():
    quick = jax.jit(truncate, static_argnums=1)
    given = np.zeros((1, 9), "f4"), SamplingConfig(top_k=4, top_p=0.6)
    logprobs, ids = jax.device_get(quick(*given))
    np.testing.assert_array_equal(ids, [[0, 1, 2, -1]])
    np.testing.assert_allclose(logprobs[0, :3], -np.log(3), rtol=1e-6)


def test_cold_softmax_gives_best_token_everything():
    logits = np.random.default_rng(2).normal(size=(50, 61)).astype(np.float32)
    quick = jax.jit(truncate, static_argnums=1)
    logprobs, _ = quick(logits, SamplingConfig(temperature=1e-6))
    np.testing.assert_array_equal(logprobs.max(axis=-1), 0)


@pytest.mark.parametrize("top_p", [None, 1.0])
def test_default_truncates_nothing(top_p):
    logits = jnp.array([[0.0, 2.0, -4.0]])
    logprobs, ids = truncate(logits, SamplingConfig(temperature=2.0, top_p=top_p))
    assert ids is None
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits / 2), rtol=1e-6)


def test_full_nucleus_keeps_tiny_probabilities():
    logits = jnp.array([[0.0, -8.0, -16.0, -17.0, -18.0, -30.0]])
    got = truncate(logits, SamplingConfig(top_k=6, top_p=1.0))
    np.testing.assert_array_equal(got[1], [range(6)])
    np.testing.assert_array_equal(got[0], jax.nn.log_softmax(logits))


# ----------------------------------------------------------- probabilities


POLICIES = pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        slow({}, 1.0),
        ({"tied": True, "logits.softcap": 0.3, "qk_norm.enabled": True}, 0.05),
    ],
)


@pytest.mark.slow
@POLICIES
def test_logprobs_are_those_of_the_whole_policy(changes, temperature):
    model = decoder(**changes)
    made = run(model, temperature=temperature)
    hidden = read(model, made)
    labels = np.where(made.mask, made.tokens, -1)
    expected = model.head.logprobs(hidden, labels, temperature=temperature)
    assert made.support_ids is None
    # Hidden states differ by 1e-6; logits, by that and 1 / temperature.
    np.testing.assert_allclose(made.logprobs, expected, atol=1e-5 / temperature)
    assert made.logprobs[made.mask].std() > 0.03


@pytest.mark.full
@POLICIES
def test_truncated_logprobs_within_support(changes, temperature):
    model = decoder(**changes)
    settings = dict(temperature=temperature, top_k=6, top_p=0.7)
    made = run(model, **settings)
    hidden = read(model, made)
    tied = model.config.tied
    expected = jaxmem.support_logprobs(
        hidden,
        jaxmem.Head(
            model.embed.embedding[...] if tied else model.head.kernel[...],
            softcap=model.config.logits.softcap,
        ),
        np.where(made.mask, made.tokens, -1),
        made.support_ids,
        temperature=temperature,
    )
    np.testing.assert_allclose(made.logprobs, expected, atol=1e-5 / temperature)
    assert made.support_ids.shape == (5, 12, 6)
    logits, sizes = np.asarray(model.logits(hidden)), set()
    for row, slot in zip(*np.nonzero(made.mask), strict=True):
        kept, _ = truncated(logits[row, slot], **settings)
        ids = made.support_ids[row, slot]
        assert set(ids[ids >= 0]) == set(kept)
        sizes.add(len(kept))
    assert 1 < max(sizes) < 6
    np.testing.assert_array_equal(made.support_ids[~made.mask], -1)


def chi_square_bound(degrees):
    """A χ² that a right sampler exceeds once in 100,000 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.265 * spread**0.5) ** 3


# test_generate compares frequencies of tokens from truncated distributions.
@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.1),
        dict(temperature=0.1, top_k=4, top_p=0.85, support=5),
    ],
)
def test_sampled_pairs_follow_distribution(settings):
    model, rows = decoder(), 4096
    prompts, lengths = np.full((rows, 2), 5, np.int32), np.full(rows, 2, np.int32)
    lengths[::2] = 1  # a prompt of its own, and slots that differ
    made = run(model, prompts, lengths, max_new_tokens=2, **settings)
    for first_row in (0, 1):
        length = lengths[first_row]
        sequences = np.full((7, 3), 5, np.int32)
        sequences[:, length] = np.arange(7)
        logits = np.asarray(model.logits(whole(model, sequences)))
        expected = np.zeros((7, 7))
        first, logp = truncated(logits[0, length - 1], **settings)
        for token, p in zip(first, np.exp(logp), strict=True):
            if token == EOS:
                expected[token, PAD] = p
                continue
            second, logp_next = truncated(logits[token, length], **settings)
            expected[token, second] = p * np.exp(logp_next)
        seen = np.zeros((7, 7))
        np.add.at(seen, tuple(made.tokens[first_row::2].T), 1)
        assert expected.sum() == pytest.approx(1)
        assert not seen[expected == 0].any()
        expected *= rows // 2
        common = expected >= 5
        rest = np.array([[x[~common].sum()] for x in (seen, expected)])
        cells = np.c_[np.stack([seen[common], expected[common]]), rest]
        cells = cells[:, cells[1] > 0]
        statistic = np.sum((cells[0] - cells[1]) ** 2 / cells[1])
        assert statistic < chi_square_bound(cells.shape[1] - 1)
        assert 5 < cells.shape[1]


# ------------------------------------------------------------------- rules


@pytest.mark.parametrize("settings", [{}, slow(dict(top_k=6, top_p=0.7))])
def test_eos_ends_its_row(settings):
    made = run(decoder(), seed=1, **settings)
    slots = np.arange(12)
    np.testing.assert_array_equal(made.mask, slots < made.lengths[:, None])
    np.testing.assert_array_equal(made.tokens[~made.mask], PAD)
    np.testing.assert_array_equal(made.logprobs[~made.mask], 0)
    assert (made.logprobs[made.mask] < 0).all()
    last = made.tokens[np.arange(5), made.lengths - 1]
    assert (last[made.lengths < 12] == EOS).all()
    assert not (made.tokens[slots < made.lengths[:, None] - 1] == EOS).any()
    assert 1 <= (made.lengths < 12).sum()
    assert made.lengths.max() > made.lengths.min() + 2
    if settings:
        among = (made.support_ids == made.tokens[..., None]).any(axis=-1)
        np.testing.assert_array_equal(made.support_ids[~made.mask], -1)
        assert among[made.mask].all()


@pytest.mark.slow
def test_sampling_ends_with_last_row_eos_may_be_pad(monkeypatch):
    calls = []
    decode = Decoder.decode

    def counted(self, tokens, cache, live, **options):
        jax.debug.callback(lambda: calls.append(1))
        return decode(self, tokens, cache, live, **options)

    monkeypatch.setattr(Decoder, "decode", counted)
    config, key = SamplingConfig(max_new_tokens=40), jax.random.key(2)
    made = jax.jit(
        lambda model: sample(
            model, PROMPTS, LENGTHS, key, config, eos_id=EOS, pad_id=EOS
        )
    )(decoder())
    jax.effects_barrier()
    assert 1 < made.lengths.max() < 40
    # The first token comes from the prompt, and the last is not read again.
    assert len(calls) == made.lengths.max() - 1
    np.testing.assert_array_equal(made.mask, np.arange(40) < made.lengths[:, None])
    np.testing.assert_array_equal(made.tokens[~made.mask], EOS)
    fewer = run(decoder(), seed=2)
    np.testing.assert_array_equal(
        made.tokens[:, :12][fewer.mask], fewer.tokens[fewer.mask]
    )


def test_tokens_depend_on_key():
    first, again, other = (run(decoder(), seed=s) for s in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (first.tokens != other.tokens).any()
    same = [np.full((5, 4), 5, np.int32), np.full(5, 4, np.int32)]
    rows = run(decoder(), *same, seed=3).tokens
    assert len({tuple(row) for row in rows}) == 5


@pytest.mark.slow
def test_row_independent_of_others():
    model, prompts, lengths = decoder(), PROMPTS.copy(), LENGTHS.copy()
    before = run(model, seed=5, temperature=0.1)
    prompts[[0, 2]], lengths[[0, 2]] = (prompts[[0, 2]] + 1) % 7, 3
    after = run(model, prompts, lengths, seed=5, temperature=0.1)
    assert (before.tokens[[0, 2]] != after.tokens[[0, 2]]).any()
    for row in (1, 3):
        np.testing.assert_array_equal(before.tokens[row], after.tokens[row])
        np.testing.assert_array_equal(before.logprobs[row], after.logprobs[row])


@pytest.mark.slow
def test_tokens_independent_of_batch_split_and_order():
    config = SamplingConfig(max_new_tokens=12)
    sampler = Sampler(config, (EOS, 5), PAD, keep_support=False)
    start, advance = jax.jit(sampler.start), jax.jit(sampler.advance)

    def drawn(order, *stops):
        keys = row_keys(jax.random.key(7), np.array(order))
        state = start(decoder(), PROMPTS[order], LENGTHS[order], keys)
        for stop in stops:
            state = advance(decoder(), state, stop)
        return state

    order = np.arange(5)
    whole, parts = drawn(order, 12), drawn(order, 1, 2, 9, 99)
    jax.tree.map(np.testing.assert_array_equal, whole.drawn, parts.drawn)
    assert whole.drawn.support_ids is None
    swapped = drawn(order[::-1], 12).drawn.tokens[:, ::-1]
    np.testing.assert_array_equal(swapped, whole.drawn.tokens)
    last = np.asarray(whole.drawn.mask).sum(axis=0) - 1
    ends = np.asarray(whole.drawn.tokens)[last, order]
    assert (np.isin(ends, (EOS, 5)) | (last == 11)).all() and (ends == 5).any()


@pytest.mark.slow
def test_unrolled_layers_draw_same_tokens():
    model = decoder(layers=2)

    def drawn(unroll):
        sampler = Sampler(SamplingConfig(max_new_tokens=12), (EOS,), PAD, unroll=unroll)
        keys = row_keys(jax.random.key(7), np.arange(5))
        state = jax.jit(sampler.start)(model, PROMPTS, LENGTHS, keys)
        lowered = jax.jit(sampler.advance).lower(model, state, 12)
        loops = lowered.as_text().count("stablehlo.while")
        return lowered.compile()(model, state, 12).drawn, loops

    (one, loops), (by_loop, more_loops) = drawn(True), drawn(False)
    assert loops < more_loops
    np.testing.assert_array_equal(one.tokens, by_loop.tokens)
    np.testing.assert_allclose(one.logprobs, by_loop.logprobs, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{"self_attn.qkv_bias": True, "qk_norm.enabled": True}, {}]
)
def test_joined_projections_draw_the_same_tokens(changes):
    definition, weights = nnx.split(decoder(**changes))
    rng = np.random.default_rng(0)  # biases are initialised to zero
    weights = jax.tree.map(lambda w: w + 0.1 * rng.standard_normal(w.shape), weights)
    apart, joined = (nnx.merge(definition, weights) for _ in range(2))
    joined.blocks.attention.join()
    names = "/".join(str(path) for path in nnx.to_flat_state(nnx.state(joined)))
    assert "joined" in names and "'query'" not in names
    expected, made = run(apart), run(joined)
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=1e-5)
    assert len(set(made.tokens[made.mask])) > 2


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Trace programs as for a GPU."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")


def test_projections_joined_before_loop_on_one_gpu(as_on_a_gpu):
    def draw(model):
        key, config = jax.random.key(0), SamplingConfig(max_new_tokens=3)
        return sample(model, PROMPTS, LENGTHS, key, config, eos_id=EOS, pad_id=PAD)

    model = decoder(dtype="bfloat16", head_dim=16, layers=2)
    program: Any = jax.make_jaxpr(draw)(model).jaxpr
    (loop,) = (each for each in program.eqns if each.primitive.name == "while")
    joined = [
        each for each in program.eqns
        if each.primitive.name == "concatenate" and each.outvars[0].aval.ndim == 3
    ]  # fmt: skip
    (matrix,) = joined[0].outvars
    assert len(joined) == 1 and matrix.aval.shape == (2, 32, 128)  # of all layers
    assert matrix in loop.invars
    assert "bf16[32,32]" not in str(loop)  # the projection of keys alone


@pytest.mark.parametrize("target", ["query", "key", "value"])
def test_projections_with_adapters_stay_apart(target, as_on_a_gpu):
    adapted = decoder(lora_rank=2, lora_targets=(target,))
    assert hasattr(prepared(adapted).blocks.attention, "query")
    assert hasattr(prepared(decoder()).blocks.attention, "joined")
    assert hasattr(decoder().blocks.attention, "query")  # it is not changed


@pytest.mark.parametrize("fsdp", [1, 2])
def test_on_a_mesh_projections_stay_apart(fsdp, as_on_a_gpu):
    with Layout(MeshConfig(fsdp=fsdp)).context():
        made = jax.eval_shape(lambda: nnx.state(prepared(decoder())))
    assert ("query" in made["blocks"]["attention"]) == (fsdp > 1)


def test_sampling_loop_reads_compute_type_weights():
    model, shape = decoder(dtype="bfloat16"), f"[{SMALL.hidden},{SMALL.ff}]"
    program = jax.make_jaxpr(sampler(max_new_tokens=2))(
        model, PROMPTS, LENGTHS, jax.random.key(0)
    )
    _, _, loop = str(program).partition("while[")
    assert f"bf16{shape}" in loop
    assert f"f32{shape}" not in loop.replace("bf16", "")


def test_invalid_length_gives_nan():
    lengths = LENGTHS.copy()
    lengths[1] = 5
    made = run(decoder(), lengths=lengths, temperature=1.0)
    assert np.isnan(made.logprobs[1]).all()
    assert np.isfinite(made.logprobs[[0, 2, 3, 4]]).all()


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(temperature=0.0), "temperature must be positive and finite, got 0.0"),
        (dict(temperature=float("inf")), "temperature must be .*finite, got inf"),
        (dict(top_k=0), "top_k must be at least 1, got 0"),
        (dict(top_p=0.0, top_k=2), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1, top_k=2), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(min_p=1.1, top_k=2), r"min_p must be in \(0, 1\], got 1.1"),
        (dict(top_p=0.9), "support must be given for a top_p .* without top_k, got"),
        (dict(min_p=0.1), "support must be given for .* min_p without top_k, got None"),
        (dict(support=5), "support must be None if top_k, .* all None, got 5"),
        (dict(support=5, top_p=1.0), "support must be None if .*, got 5"),
        (dict(support=0, top_p=0.9), "support must be at least 1, got 0"),
        (dict(support=5, top_k=6), "support must be at least top_k=6, got 5"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=f"SamplingConfig.{message}"):
        SamplingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [(dict(top_k=8), "top_k"), (dict(top_p=0.5, support=8), "support")],
)
def test_truncate_refuses_more_than_vocabulary(settings, name):
    with pytest.raises(ValueError, match=f"{name} must be at most 7 .*got 8"):
        truncate(jnp.zeros((1, 7)), SamplingConfig(**settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(prompts=PROMPTS[0]),
            r"prompts must be integers \[B, P\], got int32\(4,\)",
        ),
        (
            dict(prompts=PROMPTS * 1.0),
            r"prompts must be integers .*got float64\(5, 4\)",
        ),
        (dict(prompt_lengths=LENGTHS[:2]), r"prompt_lengths must .*\(5,\), got \(2,\)"),
        (dict(prompt_lengths=LENGTHS - 2), "prompt_lengths must be from 0 to .*got -1"),
        (dict(prompt_lengths=LENGTHS + 1), "prompt_lengths must be .*the 4 .*got 5"),
        (dict(eos_id=7), r"eos_id must be .* in \[0, 7\), got 7"),
        (dict(pad_id=-1), r"pad_id must be .* in \[0, 7\), got -1"),
    ],
)
def test_impossible_requests_are_refused_by_name(changes, message):
    request = dict(prompts=PROMPTS, prompt_lengths=LENGTHS, eos_id=EOS, pad_id=PAD)
    key, config = jax.random.key(0), SamplingConfig()
    with pytest.raises(ValueError, match=message):
        sample(decoder(), key=key, config=config, **request | changes)


def test_most_probable_ids_are_of_the_truncated_distribution():
    logits = np.random.default_rng(0).normal(size=(2, 400)).astype(np.float32) * 3
    config = SamplingConfig(top_p=0.6, support=400)
    made = Sampler(config, (), 0, keep_support=False)
    ids, logprobs = made.most_probable(logits, 9)
    whole, all_ids = truncate(logits, config)
    np.testing.assert_array_equal(ids, all_ids[:, :9])
    np.testing.assert_allclose(logprobs, whole[:, :9], rtol=1e-6)
    few = Sampler(SamplingConfig(), (), 0).most_probable(logits[:, :5], 9)[0]
    assert few.shape == (2, 9) and (np.asarray(few)[:, 5:] == -1).all()
