"""EasyDeL, as a stand-in of the function that is replaced."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.integrations import easydel
from tests.helpers.cases import slow
from tests.helpers.stand_ins import (
    Config,
    D,
    V,
    agree,
    assert_same,
    holds_originals,
    install,
    log_softmax,
    states,
)

pytestmark = [pytest.mark.usefixtures("quick_compilation"), holds_originals]


def compute_per_token_logps_and_entropies_from_hidden_states(
    model, hidden_states, targets, *, token_chunk_size, vocab_chunk_size, return_entropy
):
    module = model if hasattr(model, "compute_lm_logits") else model.model
    logps, entropy = log_softmax(module.make_lm_head_fn()(hidden_states), targets)
    return logps, entropy if return_entropy else None


class EasyLinear(nnx.Linear):
    scale = 1.0

    def _scale_operator(self, x):
        return x * self.scale


class EasyModel(nnx.Module):
    def __init__(self, tied=False, bias=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.lm_head = EasyLinear(D, V, use_bias=bias, rngs=rngs)
        if bias:
            self.lm_head.bias[...] = jnp.sin(jnp.arange(V))
        self.config = Config(tie_word_embeddings=tied)

    def get_lm_head(self):
        return self.lm_head

    def get_embedding(self):
        return self.embed

    def compute_lm_logits(self, hidden):
        return self.make_lm_head_fn()(hidden)

    def make_lm_head_fn(self):
        tied = self.config.tie_word_embeddings
        W = self.embed.embedding[...].T if tied else self.lm_head.kernel[...]
        bias = 0.0 if self.lm_head.bias is None else self.lm_head.bias[...]
        return lambda hidden: self.lm_head._scale_operator(hidden @ W) + bias

    make_lm_head_fn.__module__ = "easydel.infra.base_module"


@pytest.fixture
def fake_easydel(monkeypatch):
    function = compute_per_token_logps_and_entropies_from_hidden_states
    contents = {function.__name__: function}
    install(
        monkeypatch,
        "0.3.0",
        easydel__trainers___logprob_utils=contents,
        easydel__trainers__grpo=contents,
    )
    return sys.modules["easydel.trainers.grpo"]


def easy_value(module, return_entropy=True):
    def value(model, hidden):
        call = vars(module)["compute_per_token_logps_and_entropies_from_hidden_states"]
        return call(
            model, hidden, states()[1], token_chunk_size=2, vocab_chunk_size=None,
            return_entropy=return_entropy,
        )  # fmt: skip

    return value


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [dict(tied=True), slow(dict(tied=True, bias=True)), slow(dict()), dict(bias=True)],
)
def test_easydel_logps_and_entropies(options, fake_easydel):
    model, value = EasyModel(**options), easy_value(fake_easydel)
    theirs = agree(value, model)
    with easydel.applied(chunk=4):
        ours = agree(value, model)
        assert easy_value(fake_easydel, False)(model, states()[0])[1] is None
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["scale", "cap", "own"])
def test_easydel_heads_that_are_left_alone(kind, fake_easydel, capsys):
    reason = {
        "scale": "the head of EasyModel scales its logits",
        "cap": "EasyModel clips its logits",
        "own": "Own defines its own make_lm_head_fn",
    }[kind]

    class Own(EasyModel):
        def make_lm_head_fn(self):
            return lambda hidden: 2 * EasyModel.make_lm_head_fn(self)(hidden)

    model = Own() if kind == "own" else EasyModel()
    if kind == "scale":
        model.lm_head.scale = 3.0
    if kind == "cap":
        model._logit_cap_feature = "clip"
    value = easy_value(fake_easydel)
    with easydel.applied():
        got = value(model, states()[0])
    jax.tree.map(np.testing.assert_array_equal, got, value(model, states()[0]))
    assert reason in capsys.readouterr().out
