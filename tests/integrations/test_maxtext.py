"""MaxText, as a stand-in of the functions that are replaced."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

from jaxmem.integrations import maxtext, tunix
from jaxmem.integrations._head import ModelHead
from tests.helpers.cases import full, slow
from tests.helpers.maxtext import (
    Adapter,
    MaxModel,
    maxtext_config,
    vocab_tiling_linen_loss,
    vocab_tiling_nnx_loss,
)
from tests.helpers.maxtext_strategy import CombinedDistillationStrategy
from tests.helpers.stand_ins import (
    Config,
    D,
    V,
    agree,
    assert_same,
    holds_originals,
    install,
    states,
)

pytestmark = [pytest.mark.usefixtures("quick_compilation"), holds_originals]


@pytest.fixture
def fake_maxtext(monkeypatch):
    install(
        monkeypatch,
        "0.2.4",
        maxtext__utils__vocabulary_tiling={
            "vocab_tiling_nnx_loss": vocab_tiling_nnx_loss,
            "vocab_tiling_linen_loss": vocab_tiling_linen_loss,
        },
        maxtext__trainers__train={"vocab_tiling_nnx_loss": vocab_tiling_nnx_loss},
        maxtext__integration__tunix__tunix_adapter={"TunixMaxTextAdapter": Adapter},
        maxtext__trainers__post_train__distillation__distillation_utils={
            "CombinedDistillationStrategy": CombinedDistillationStrategy
        },
        maxtext__layers__decoders={"attend_on_embedding": attend_on_embedding},
    )
    return sys.modules


def maxtext_data():
    _, targets = states()
    segments = jnp.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]])
    return {"targets": targets % V, "targets_segmentation": segments}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="untied"),
        pytest.param(
            dict(z_loss_multiplier=0.1), id="z-loss", marks=pytest.mark.slow
        ),
        pytest.param(
            dict(logits_via_embedding=True, final_logits_soft_cap=0.3,
                 z_loss_multiplier=0.1),
            id="tied, capped, normalised",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(logits_via_embedding=True, normalize_embedding_logits=False),
            id="tied",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_maxtext_loss(changes, fake_maxtext):
    config, data = maxtext_config(**changes), maxtext_data()
    model = MaxModel(config)

    def value(model, hidden):
        train = fake_maxtext["maxtext.trainers.train"]
        return train.vocab_tiling_nnx_loss(model, hidden, data, config, True)

    theirs = agree(value, model)
    with maxtext.applied(chunk=4):
        ours = agree(value, model)
        again = fake_maxtext["maxtext.utils.vocabulary_tiling"]
        assert again.vocab_tiling_nnx_loss is not vocab_tiling_nnx_loss
    assert_same(ours, theirs)
    assert fake_maxtext["maxtext.trainers.train"].vocab_tiling_nnx_loss is (
        vocab_tiling_nnx_loss
    )


def attend_on_embedding(query, embedding_table, *_, **__):
    return jnp.dot(query, jnp.asarray(embedding_table, jnp.bfloat16).T)


class LinenModel(nn.Module):
    config: Config

    def setup(self):
        self.token_embedder = nn.Embed(V, D)
        self.decoder = LinenDecoder(self.config)

    def logits_from_hidden_states_for_vocab_tiling(self, hidden, deterministic):
        return self.decoder.apply_output_head(self.token_embedder, hidden)

    def __call__(self, tokens):
        return self.logits_from_hidden_states_for_vocab_tiling(
            self.token_embedder(tokens), True
        )


class LinenDecoder(nn.Module):
    config: Config

    @nn.compact
    def apply_output_head(self, shared_embedding, y):
        y = nn.RMSNorm(name="decoder_norm")(y)
        if self.config.logits_via_embedding:
            decoders = sys.modules["maxtext.layers.decoders"]
            return decoders.attend_on_embedding(y, shared_embedding.embedding)
        return nn.Dense(V, use_bias=False, name="logits_dense")(y)


@pytest.mark.parametrize("tied", [False, full(True)])
def test_maxtext_linen_loss(tied, fake_maxtext):
    config = maxtext_config(
        logits_via_embedding=tied, normalize_embedding_logits=False,
        z_loss_multiplier=0.1,
    )  # fmt: skip
    model, data = LinenModel(config), maxtext_data()
    params = model.init(jax.random.key(0), data["targets"])

    def total(params, hidden):
        tiling = fake_maxtext["maxtext.utils.vocabulary_tiling"]
        return tiling.vocab_tiling_linen_loss(
            hidden, data, config, model, params, True
        )[0]

    def both():  # compiled anew, with what stands there then
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, states()[0])

    theirs = both()
    with maxtext.applied(chunk=4):
        ours = both()
    assert_same(ours, theirs)


def test_maxtext_adapter_gives_tunix_hidden_states(fake_maxtext):
    model = MaxModel(maxtext_config())
    tokens = states()[1]
    with maxtext.applied():
        adapter = fake_maxtext[
            "maxtext.integration.tunix.tunix_adapter"
        ].TunixMaxTextAdapter(model)
        head = tunix.head_of(adapter)
        assert isinstance(head, ModelHead)
        hidden = tunix.hidden_states(adapter, tokens, None, None, None)
    logits, _ = Adapter(model)(tokens, None, None, None)
    np.testing.assert_allclose(hidden @ head.head.W, logits, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            dict(parameter_memory_host_offload=True),
            "parameter_memory_host_offload keep",
        ),
        (dict(quant=1), "logits_dense is quantised"),
        (dict(lora=1), "logits_dense has LoRA"),
    ],
)
def test_maxtext_heads_that_are_left_alone(change, reason, fake_maxtext, capsys):
    config, data = maxtext_config(), maxtext_data()
    model = MaxModel(config)
    vars(config).update(change)
    if "quant" in change:
        model.decoder.logits_dense.quant = 1
    if "lora" in change:
        model.decoder.logits_dense.w_lora_a = nnx.LoRAParam(jnp.zeros((D, 2)))
    tiling = fake_maxtext["maxtext.utils.vocabulary_tiling"]
    args = model, states()[0], data, config, True
    with maxtext.applied():
        got = tiling.vocab_tiling_nnx_loss(*args)
    np.testing.assert_array_equal(got, vocab_tiling_nnx_loss(*args))
    assert f"not patched: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [True, slow(False)])
def test_linen_decoder_inside_nnx_is_left_alone(tied, fake_maxtext, capsys):
    """pure_nnx=True with pure_nnx_decoder=False, in MaxText's words."""
    config, data = maxtext_config(logits_via_embedding=tied), maxtext_data()
    model, hidden = MaxModel(config), states()[0]
    call = {"deterministic": True, "model_mode": "train"}
    decoder = nnx.bridge.ToNNX(BridgedDecoder(config), rngs=nnx.Rngs(0))
    model.decoder = decoder.lazy_init(
        model.token_embedder, hidden, method="apply_output_head", **call
    )
    tiling = fake_maxtext["maxtext.utils.vocabulary_tiling"]
    args = model, hidden, data, config, True
    with maxtext.applied():
        got = tiling.vocab_tiling_nnx_loss(*args)
    np.testing.assert_array_equal(got, vocab_tiling_nnx_loss(*args))
    assert "its decoder is a Linen module inside NNX" in capsys.readouterr().out


class BridgedDecoder(LinenDecoder):
    @nn.compact
    def apply_output_head(self, shared_embedding, y, deterministic, model_mode):
        y = nn.RMSNorm(name="decoder_norm")(y)
        if self.config.logits_via_embedding:
            return y @ shared_embedding.embedding[...].T
        return nn.Dense(V, use_bias=False, name="logits_dense")(y)
