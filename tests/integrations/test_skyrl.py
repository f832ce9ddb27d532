"""SkyRL-tx, as a stand-in of the method that is replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.integrations import skyrl
from tests.helpers.cases import slow
from tests.helpers.stand_ins import (
    D,
    V,
    agree,
    assert_same,
    install,
    log_softmax,
    states,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


class LoRALinear(nnx.Linear):
    """A stand-in of SkyRL's, whose adapters are of rows."""

    def __init__(self, adapters, dtype, rngs):
        super().__init__(
            D, V, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.max_lora_adapters = adapters
        if adapters:
            normal = nnx.initializers.normal(0.5)
            self.lora_A = nnx.Param(normal(rngs(), (adapters, D, 3), dtype))
            self.lora_B = nnx.Param(normal(rngs(), (adapters, 3, V), dtype))
            self.lora_scaling = nnx.Variable(jnp.arange(1, adapters + 1, dtype=dtype))

    def __call__(self, x, adapter_indices=None):
        base = super().__call__(x)
        if not self.max_lora_adapters or adapter_indices is None:
            return base
        mine = adapter_indices
        A, B = self.lora_A[...][mine], self.lora_B[...][mine]
        low = jnp.einsum("td,tdr,trv->tv", x, A, B)
        return base + low * self.lora_scaling[...][mine][:, None]


class LogitsProcessorMixin:
    def _compute_chunked_logprobs(
        self, hidden_states, target_ids, chunk_size, adapter_indices
    ):
        length = target_ids.shape[1]
        if adapter_indices is None:
            adapter_indices = jnp.zeros(len(target_ids), jnp.int32)
        mine = jnp.repeat(adapter_indices, length)
        logits = self.get_lm_head()(hidden_states.reshape(-1, D), mine)
        picked = jnp.take_along_axis(logits, target_ids.reshape(-1, 1), axis=-1)
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return (picked - normalizer).reshape(target_ids.shape)


class SkyModel(LogitsProcessorMixin, nnx.Module):
    def __init__(self, tied=False, adapters=0, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.model = nnx.Dict(
            embed_tokens=nnx.Embed(V, D, dtype=dtype, param_dtype=dtype, rngs=rngs)
        )
        self.lm_head = nnx.data(None if tied else LoRALinear(adapters, dtype, rngs))

    def get_lm_head(self):
        table = self.model.embed_tokens.embedding
        return self.lm_head or (lambda hidden, adapters=None: hidden @ table[...].T)


@pytest.fixture
def fake_skyrl(monkeypatch):
    contents = {"LogitsProcessorMixin": LogitsProcessorMixin}
    install(monkeypatch, "0.4.0", skyrl__tx__utils__logits_processor=contents)


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        slow(dict(tied=True), None),
        slow(dict(), None),
        slow(dict(adapters=3), None),
        (dict(adapters=3), jnp.array([2, 0])),
    ],
)
def test_skyrl_logprobs(options, adapters, fake_skyrl):
    model, (_, labels) = SkyModel(**options), states()

    def value(model, hidden):
        return model._compute_chunked_logprobs(hidden, labels, 4, adapters)

    theirs = agree(value, model)
    with skyrl.applied(chunk=4):
        ours = agree(value, model)
    assert_same(ours, theirs)


@pytest.mark.slow
def test_skyrl_bfloat16_is_float32_after_the_head(fake_skyrl):
    model, (hidden, labels) = SkyModel(dtype=jnp.bfloat16), states(dtype=jnp.bfloat16)
    args = hidden, labels, 4, None
    theirs = model._compute_chunked_logprobs(*args)
    with skyrl.applied():
        ours = model._compute_chunked_logprobs(*args)
    wide = [x.astype(jnp.float32) for x in (hidden, model.lm_head.kernel[...])]
    exact, _ = log_softmax(wide[0] @ wide[1], labels)
    assert (theirs.dtype, ours.dtype) == (jnp.bfloat16, jnp.float32)
    assert np.abs(ours - exact).max() < 1e-5 < np.abs(theirs - exact).max()


def test_skyrl_head_of_another_kind_is_left_alone(fake_skyrl, capsys):
    model, (hidden, labels) = SkyModel(), states()
    model.lm_head = nnx.Sequential(lambda hidden, mine: hidden)
    with skyrl.applied():
        model._compute_chunked_logprobs(hidden, labels, 4, None)
    assert "lm_head of SkyModel is a Sequential" in capsys.readouterr().out


def test_skyrl_tx_has_the_module_tx(monkeypatch, capsys):
    """The distribution of 0.3.0 and before; `skyrl` of later ones has skyrl.tx."""
    contents = {"LogitsProcessorMixin": LogitsProcessorMixin}
    install(monkeypatch, {"skyrl-tx": "0.3.0"}, tx__utils__logits_processor=contents)
    model, (hidden, labels) = SkyModel(), states()
    with jaxmem.report() as calls:
        with skyrl.applied():
            model._compute_chunked_logprobs(hidden, labels, 4, None)
    assert len(calls.calls) == 1
    assert "skyrl 0.3.0: tx.utils.logits_processor:Logits" in capsys.readouterr().out


def test_skyrl_tied_table_beside_an_image_model(fake_skyrl):
    model, (hidden, labels) = SkyModel(tied=True), states()
    inner, model.model = model.model, nnx.Dict(language_model=model.model)
    model.get_lm_head = lambda: lambda h, _: h @ inner.embed_tokens.embedding[...].T
    theirs = model._compute_chunked_logprobs(hidden, labels, 4, None)
    with skyrl.applied(), jaxmem.report() as calls:
        ours = model._compute_chunked_logprobs(hidden, labels, 4, None)
    assert len(calls.calls) == 1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
