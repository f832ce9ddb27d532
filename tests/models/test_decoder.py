"""The decoder against plain numpy, and the promises that packing rests on."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import Recompute, remat
from jaxmem.models import layers
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.positions import (
    Sight,
    rope_frequencies,
    rope_tables,
)
from jaxmem.models.training_head import HeadConfig, head_loss
from tests.helpers import decoders

SMALL = ModelConfig(
    layers=2, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=8, vocab_size=61
)


pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def decoder(policy="full", **changes):
    config = SMALL.replaced(changes)
    return decoders.drawn(config, policy=policy)


def frequencies(head_dim, theta):
    config = SMALL.replaced({"head_dim": head_dim, "rope.theta": theta})
    return rope_frequencies(config)


def parameters(model):
    definition, weights = nnx.split(model)
    return definition, nnx.to_pure_dict(weights)


def run(model, batch):
    return jax.jit(lambda model: model(*batch))(model)


def rows_of(*documents, length):
    """One row that holds the documents one after the other, then padding."""
    tokens, segments, positions = (np.zeros((1, length), np.int32) for _ in range(3))
    start = 0
    for number, document in enumerate(documents, 1):
        here = slice(start, start + len(document))
        tokens[0, here], segments[0, here] = document, number
        positions[0, here] = np.arange(len(document))
        start += len(document)
    return tokens, segments, positions


def random_document(length, seed):
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, length)


# ------------------------------------------------------------------ pieces


def test_rope_is_the_textbook_rotation():
    where = np.array([[0, 1, 7, 300]])
    x = np.random.default_rng(0).normal(size=(1, 4, 2, 6))
    tables = rope_tables(jnp.asarray(where), frequencies(6, 100.0))
    rotated = np.asarray(tables.turn(jnp.asarray(x, jnp.float32)))
    for t, position in enumerate(where[0]):
        for i in range(3):
            turn = np.exp(1j * position * 100.0 ** (-2 * i / 6))
            expected = (x[0, t, :, i] + 1j * x[0, t, :, i + 3]) * turn
            np.testing.assert_allclose(rotated[0, t, :, i], expected.real, atol=1e-4)
            np.testing.assert_allclose(
                rotated[0, t, :, i + 3], expected.imag, atol=1e-4
            )


def test_rope_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(query_position, key_position):
        rotated = [
            rope_tables(jnp.array([[p]]), frequencies(8, 10_000.0)).turn(x)
            for x, p in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 1e-2


def dense_attention(attention, x, segment_ids, positions):
    """Attention in float64 numpy, one query and head at a time."""
    config = attention.config
    kernel = {
        name: np.asarray(getattr(attention, name).kernel[...], np.float64)
        for name in ("query", "key", "value", "output")
    }
    width, half = config.head_dim, config.head_dim // 2
    frequencies = config.rope.theta ** (-np.arange(half) * 2 / width)

    def turned(vector, position):
        angle = position * frequencies
        first, second = vector[:half], vector[half:]
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ]
        )

    out = np.zeros((len(x), config.heads * width))
    for t in range(len(x)):
        seen = [s for s in range(t + 1) if segment_ids[s] == segment_ids[t]]
        for head in range(config.heads):
            mine = slice(head * width, (head + 1) * width)
            shared = head // (config.heads // config.kv_heads)
            theirs = slice(shared * width, (shared + 1) * width)
            query = turned((x[t] @ kernel["query"])[mine], positions[t])
            scores = np.array(
                [
                    query @ turned((x[s] @ kernel["key"])[theirs], positions[s])
                    for s in seen
                ]
            ) / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            values = np.array([(x[s] @ kernel["value"])[theirs] for s in seen])
            out[t, mine] = (weights / weights.sum()) @ values
    return out @ kernel["output"]


@pytest.mark.slow
def test_attention_grouped_causal_within_document():
    attention = layers.Attention(SMALL, rngs=nnx.Rngs(3))
    _, segments, positions = rows_of(range(5), range(4), length=11)
    x = np.random.default_rng(0).normal(size=(1, 11, SMALL.hidden)).astype(np.float32)
    got, _ = attention.mix(
        [read(jnp.asarray(x)) for read in attention.readers],
        Sight(jnp.asarray(segments)),
        rope_tables(jnp.asarray(positions), frequencies(8, SMALL.rope.theta)),
    )
    expected = dense_attention(attention, x[0], segments[0], positions[0])
    np.testing.assert_allclose(got[0], expected, atol=2e-5)


def test_scanned_blocks_equal_blocks_in_sequence():
    model = decoder()
    tokens, segments, positions = rows_of(random_document(9, 0), length=9)

    @jax.jit
    def one_after_the_other(model):
        definition, weights = nnx.split(model.blocks)
        x = model.embed(tokens)
        rope = rope_tables(positions, frequencies(8, SMALL.rope.theta))
        for layer in range(SMALL.layers):
            of_one = jax.tree.map(lambda w, i=layer: w[i], weights)
            x, *_ = nnx.merge(definition, of_one).read(x, Sight(segments), rope)
        return model.norm(x)

    made = run(model, (tokens, segments, positions))
    np.testing.assert_allclose(made, one_after_the_other(model), atol=1e-5)


def test_layers_start_with_weights_of_their_own():
    config = dataclasses.replace(SMALL, hidden=8, ff=8, heads=1, kv_heads=1)
    gate = Decoder(config, rngs=nnx.Rngs(0)).blocks.feed_forward.gate.kernel[...]
    assert gate.shape == (SMALL.layers, 8, 8)
    assert float(jnp.max(jnp.abs(gate[0] - gate[1]))) > 0.01


# ---------------------------------------------------------------- promises


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_document_equals_document_alone(qk_norm):
    model = decoder(**{"qk_norm.enabled": qk_norm, "embedding.scaled": True})
    first, second = random_document(6, 1), random_document(7, 2)
    packed = run(model, rows_of(first, second, length=16))
    alone = run(model, rows_of(first, length=6)), run(model, rows_of(second, length=7))
    np.testing.assert_allclose(packed[0, :6], alone[0][0], atol=1e-5)
    np.testing.assert_allclose(packed[0, 6:13], alone[1][0], atol=1e-5)
    assert bool(jnp.all(jnp.isfinite(packed)))  # padding too


def test_decoder_is_causal():
    model = decoder()
    document = random_document(10, 3)
    changed = document.copy()
    changed[6] = (changed[6] + 1) % SMALL.vocab_size
    before = run(model, rows_of(document, length=10))
    after = run(model, rows_of(changed, length=10))
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert float(jnp.max(jnp.abs(before[0, 6:] - after[0, 6:]))) > 1e-3


def gradients(definition, weights, logits="fused"):
    return jax.jit(jax.value_and_grad(loss_of(definition, logits)))(weights)


def loss_of(definition, logits="fused"):
    batch = rows_of(random_document(8, 4), random_document(5, 5), length=15)
    labels = np.roll(batch[0], -1)
    labels[0, [7, 12, 13, 14]] = -1

    def loss(weights):
        model = nnx.merge(definition, weights)
        hidden = model(*batch)
        return head_loss(model.head, hidden, labels, 11, logits)[0]

    return loss


@pytest.mark.slow
def test_tied_weights_get_sum_of_both_gradients():
    tied, tied_weights = parameters(decoder())
    untied, weights = parameters(decoder(tied=False))
    weights = {**tied_weights, "head": weights["head"]}
    weights["head"]["kernel"] = tied_weights["embed"]["embedding"].T
    _, apart = gradients(untied, weights)
    _, together = gradients(tied, tied_weights)
    assert "head" not in together
    expected = apart["embed"]["embedding"] + apart["head"]["kernel"].T
    np.testing.assert_allclose(together["embed"]["embedding"], expected, atol=1e-6)
    assert float(jnp.max(jnp.abs(apart["embed"]["embedding"]))) > 1e-4
    assert float(jnp.max(jnp.abs(apart["head"]["kernel"]))) > 1e-4


@pytest.mark.full
def test_bfloat16_keeps_float32_weights_and_gradients():
    model = decoder(dtype="bfloat16")
    batch = rows_of(random_document(12, 6), length=12)
    hidden = run(model, batch)
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        hidden.astype(jnp.float32), run(decoder(), batch), atol=0.06, rtol=0.03
    )
    definition, weights = parameters(model)
    gradient = jax.eval_shape(jax.grad(loss_of(definition)), weights)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))


def test_embedding_gradients_are_summed_in_float32():
    # 4096 times 1 in bfloat16 stops growing at 256.
    model = decoder(dtype="bfloat16", layers=1)
    definition, weights = parameters(model.embed)

    def total(weights):
        embed = nnx.merge(definition, weights)
        return jnp.sum(embed(jnp.zeros(4096, jnp.int32)).astype(jnp.bfloat16))

    gradient = jax.grad(total)(weights)["embedding"]
    np.testing.assert_array_equal(gradient[0], 4096.0)


def test_attention_in_float16_needs_a_gpu():
    tokens = jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="model.dtype='float16' needs a GPU"):
        decoder(dtype="float16", layers=1)(tokens, tokens + 1, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dots", "dots_and_attention", "save_attention", "offload_attention"]
)
def test_remat_preset_changes_no_number(name):
    """And sends what it says to the host, once in the loop over blocks."""
    results = {}
    for policy in ("full", name):
        definition, weights = parameters(decoder(policy, layers=2))
        gradient = jax.jit(jax.grad(loss_of(definition)))
        results[policy] = gradient(weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        results["full"],
        results[name],
    )
    text = gradient.trace(weights).lower(lowering_platforms=("cuda",)).as_text()
    sent = text.count('_xla_buffer_placement = "pinned_host"')
    assert sent == {"offload_attention": len(remat.PRESETS[name].offload)}.get(name, 0)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        pytest.param(
            {
                "layers": 28,
                "hidden": 1024,
                "ff": 3072,
                "heads": 16,
                "kv_heads": 8,
                "head_dim": 128,
                "vocab_size": 151_936,
                "qk_norm.enabled": True,
            },
            596_049_920,
            id="Qwen3-0.6B",
        ),
        pytest.param(
            dict(
                layers=32,
                hidden=4096,
                ff=14_336,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab_size=128_256,
                tied=False,
            ),
            8_030_261_248,
            id="Llama-3-8B",
        ),
    ],
)
def test_published_sizes_count_published_parameters(changes, count):
    config = SMALL.replaced(changes)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.split(abstract)[1]))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count


@pytest.mark.gpu
def test_cudnn_attention_equals_xla_on_packed_rows():
    changes = dict(dtype="bfloat16", head_dim=64, hidden=128)
    batch = rows_of(random_document(70, 7), random_document(40, 8), length=128)
    got = {
        name: run(decoder(attention=name, **changes), batch)
        for name in ("xla", "cudnn")
    }
    np.testing.assert_allclose(
        got["cudnn"][:, :110].astype(jnp.float32),
        got["xla"][:, :110].astype(jnp.float32),
        atol=0.08,
    )


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(heads=4, kv_heads=3), "kv_heads must be a divisor of heads=4, got 3"),
        (dict(head_dim=7), "head_dim must be even .*got 7"),
        (dict(layers=0), "layers must be above 0, got 0"),
        (dict(vocab_size=-1), "vocab_size must be above 0, or None, got -1"),
        ({"logits.softcap": 0.0}, "logits.softcap must be above 0, or None, got 0.0"),
        (dict(dtype="float8"), "dtype must be one of 'float32', .*got 'float8'"),
        ({"mlp.activation": "tanh"}, "mlp.activation must be 'silu' or .*got 'tanh'"),
        (dict(attention="flash"), "attention must be 'xla' or .*got 'flash'"),
        (dict(pattern=("near",)), "pattern must be of 'global', 'local', 'chunked'"),
        (
            dict(pattern=("local",)),
            "self_attn.window must be given where pattern has 'local'",
        ),
        (
            {"self_attn.window": 4},
            "self_attn.window must be given where pattern has 'local'",
        ),
        (dict(mixers=("reuse", "attention")), "mixers must be of 'attention' before"),
        ({"rope.scaling": "dynamic"}, "rope.limit must be given with rope.scaling="),
        (
            {"mlp.reuse_ff": 8},
            "mlp.reuse_ff must be left out where no layer is 'reuse'",
        ),
        ({"rope.scaling": "su"}, "rope.scaling must be 'linear' or .*got 'su'"),
        (
            {"attention": "cudnn", "self_attn.softcap": 5.0},
            "attention must be None or 'xla' with self_attn.softcap",
        ),
        (
            dict(attention="cudnn", dtype="float32"),
            "attention must be None or 'xla' with dtype='float32', got 'cudnn'",
        ),
    ],
)
def test_impossible_models_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"ModelConfig.{message}"):
        SMALL.replaced(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(logits="lean"), "logits must be 'fused' or .*, got 'lean'"),
        (dict(chunk=0), "chunk must be a positive number of tokens.*got 0"),
        (dict(chunk="big"), "chunk must be a positive number .*got 'big'"),
        (dict(gradient=2), "gradient must be None, .*got 2"),
        (dict(gradient=("sample",)), r"gradient must be None, .*got \('sample',\)"),
        (dict(gradient=("keep", 2)), r"gradient must be None, .*got \('keep', 2\)"),
        (dict(gradient=("sample", 0)), "gradient: Sample.k must be in .*, got 0"),
        (
            dict(gradient=("recompute", 2), logits="materialised"),
            r"gradient=\('recompute', 2\) needs logits='fused'",
        ),
        (dict(vocab_groups=12), "vocab_groups must be a power of two, .*got 12"),
        (dict(vocab_groups=True), "vocab_groups must be a power of two, .*got True"),
        (
            dict(vocab_groups=8, logits="materialised"),
            "vocab_groups=8 needs logits='fused'",
        ),
        (
            dict(vocab_groups=8, gradient=("sample", 4)),
            "vocab_groups=8 must be None with gradient=",
        ),
    ],
)
def test_impossible_heads_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"HeadConfig.{message}"):
        HeadConfig(**changes)


def test_head_gradient_blocks_of_configuration():
    head = HeadConfig(gradient=("recompute", 2))
    assert Decoder(SMALL, head, rngs=nnx.Rngs(0)).head.gradient == Recompute(2)
    assert head.using("materialised") == HeadConfig("materialised")


def test_groups_of_the_vocabulary_reach_the_head():
    config = HeadConfig(vocab_groups=8)
    assert Decoder(SMALL, config, rngs=nnx.Rngs(0)).head.vocab_groups == 8
    assert config.using("materialised").vocab_groups is None


def test_decoder_without_vocab_size_is_refused():
    with pytest.raises(ValueError, match="vocab_size is None: set it"):
        decoder(vocab_size=None)


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
def test_pad_row_look_ups_have_no_gradient(tied):
    """As torch's nn.Embedding(padding_idx); a tied head still trains the row."""
    tokens = jnp.array([[3, 5, 7, 5, 9, 1]])
    positions = jnp.arange(6)[None]

    def gradient(pad_row, is_head_frozen=False):
        made = decoder(tied=tied, pad_row=pad_row)
        definition, weights = nnx.split(made)

        def loss(weights):
            model = nnx.merge(definition, weights)
            hidden = model(tokens, None, positions)
            if is_head_frozen:
                head = jax.lax.stop_gradient(made.embed.embedding[...])
                return jnp.sum(jnp.sin(hidden @ head.T))
            return model.head.loss(hidden, jnp.roll(tokens, -1, 1))

        return np.asarray(jax.jit(jax.grad(loss))(weights)["embed"]["embedding"][...])

    free, padded = gradient(None), gradient(5)
    others = np.arange(len(free)) != 5
    np.testing.assert_array_equal(padded[others], free[others])
    of_look_ups = gradient(None, is_head_frozen=True)[5]
    assert np.abs(of_look_ups).max() > 0
    assert not gradient(5, is_head_frozen=True)[5].any()
    assert (np.abs(padded[5]).max() > 0) == tied
    assert np.abs(padded[5] - free[5]).max() > 0


@pytest.mark.full
def test_layer_inputs_pad_row_has_no_gradient():
    """Gemma 3n has a second table, which has the same padding_idx."""
    tokens = jnp.array([[3, 5, 7, 5, 9, 1]])

    def gradient(pad_row):
        definition, weights = nnx.split(
            decoder(pad_row=pad_row, **{"embedding.per_layer_width": 4})
        )

        def loss(weights):
            hidden = nnx.merge(definition, weights)(tokens, None, jnp.arange(6)[None])
            return jnp.sum(jnp.sin(hidden))

        @jax.jit
        def of_table(weights):
            gradients = nnx.to_pure_dict(jax.grad(loss)(weights))
            return gradients["layer_inputs"]["table"]["embedding"]

        return np.asarray(of_table(weights))

    free, padded = gradient(None), gradient(5)
    assert np.abs(free[5]).max() > 0 and not padded[5].any()
    others = np.arange(len(free)) != 5
    np.testing.assert_array_equal(padded[others], free[others])
