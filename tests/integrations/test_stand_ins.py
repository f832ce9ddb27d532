"""MaxText, SkyRL-tx and EasyDeL, as stand-ins of the one function each is known by.

None of them can be installed beside every jax that jaxmem supports. A stand-in has the
function's name, arguments and results, and the modules that it reads, and computes with
logits, as the original does in pieces; what calls it is not there.
"""

import importlib.metadata
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

from jaxmem.integrations import easydel, maxtext, skyrl, tunix
from jaxmem.integrations._head import Head

pytestmark = pytest.mark.usefixtures("quick_compilation")
B, T, D, V = 2, 5, 16, 37


def states(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    return hidden, jnp.asarray(rng.integers(0, V, (B, T)))


def install(monkeypatch, version, **modules):
    """Put modules where imports find them, dots written as __."""
    for name, contents in modules.items():
        name = name.replace("__", ".")
        for end in range(1, name.count(".") + 1):
            outer = ".".join(name.split(".")[:end])
            if outer not in sys.modules:
                monkeypatch.setitem(sys.modules, outer, types.ModuleType(outer))
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def agree(value, model, *args, gradients=None):
    """Of both ways to the same numbers, values and gradients by weights and states."""
    definition, weights = nnx.split(model)

    def total(weights, hidden):
        results = value(nnx.merge(definition, weights), hidden, *args)
        leaves = [x for x in jax.tree.leaves(results) if x is not None]
        # Different weights for each number, so that none can hide another.
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape))
                   for x in leaves), results  # fmt: skip

    hidden, _ = states()
    both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(both)(weights, hidden)


def assert_same(ours, theirs):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        ours,
        theirs,
    )


def log_softmax(logits, labels):
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


# ------------------------------------------------------------------ MaxText


class Config(types.SimpleNamespace):
    """What of MaxText's config the head reads."""

    def __hash__(self):
        return id(self)


def maxtext_config(**changes):
    options = dict(
        dtype=jnp.float32, logits_dot_in_fp32=False, logits_via_embedding=False,
        normalize_embedding_logits=True, final_logits_soft_cap=0.0,
        parameter_memory_host_offload=False, z_loss_multiplier=0.0, num_vocab_tiling=2,
        enable_dropout=True, dropout_rate=0.0,
    )  # fmt: skip
    return Config(**options | changes)


class MaxDecoder(nnx.Module):
    def __init__(self, config, rngs):
        self.decoder_norm = nnx.RMSNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.0)
        self.config = config
        if not config.logits_via_embedding:
            self.logits_dense = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def apply_output_head(self, shared_embedding, y, deterministic, model_mode):
        y = self.dropout(self.decoder_norm(y), deterministic=deterministic)
        config = self.config
        if not config.logits_via_embedding:
            return self.logits_dense(y)
        table = jnp.asarray(shared_embedding.embedding[...], jnp.bfloat16)
        logits = jnp.dot(y, table.T)
        if config.normalize_embedding_logits:
            logits = logits / jnp.sqrt(D)
        if config.final_logits_soft_cap:
            cap = config.final_logits_soft_cap
            logits = jnp.tanh(logits / cap) * cap
        return logits


class MaxModel(nnx.Module):
    def __init__(self, config):
        rngs = nnx.Rngs(0)
        self.token_embedder = nnx.Embed(V, D, rngs=rngs)
        self.decoder, self.config = MaxDecoder(config, rngs), config

    def __call__(self, decoder_input_tokens, **_):
        hidden = self.token_embedder(decoder_input_tokens)
        return self.decoder.apply_output_head(
            self.token_embedder, hidden, deterministic=True, model_mode="train"
        )


def tiled_loss(logits, data, config):
    picked, _ = log_softmax(logits, data["targets"])
    z_loss = config.z_loss_multiplier * jax.nn.logsumexp(logits, axis=-1) ** 2
    mask = data["targets_segmentation"] != 0
    return jnp.sum((z_loss - picked) * mask), jnp.sum(z_loss * mask)


def vocab_tiling_nnx_loss(model, hidden_states, data, config, is_train):
    logits = model.decoder.apply_output_head(
        model.token_embedder, hidden_states, deterministic=True, model_mode="train"
    )
    return tiled_loss(logits, data, config)


def vocab_tiling_linen_loss(hidden_states, data, config, model, params, is_train):
    logits = model.apply(
        params,
        hidden_states,
        deterministic=True,
        method="logits_from_hidden_states_for_vocab_tiling",
    )
    return tiled_loss(logits, data, config)


class Adapter:
    """A stand-in of TunixMaxTextAdapter."""

    def __init__(self, base):
        self.base = base

    def __call__(self, input_tokens, positions, cache, attention_mask):
        return self.base(input_tokens), None


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
        maxtext__layers__decoders={"attend_on_embedding": attend_on_embedding},
    )
    return sys.modules


def maxtext_data():
    _, targets = states()
    segments = jnp.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]])
    return {"targets": targets, "targets_segmentation": segments}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="untied"),
        pytest.param(dict(z_loss_multiplier=0.1), id="z-loss"),
        pytest.param(
            dict(logits_via_embedding=True, final_logits_soft_cap=0.3,
                 z_loss_multiplier=0.1),
            id="tied, capped, normalised",
        ),
        pytest.param(
            dict(logits_via_embedding=True, normalize_embedding_logits=False), id="tied"
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


@pytest.mark.parametrize("tied", [False, True])
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
        assert isinstance(head, Head)
        hidden = tunix.hidden_states(adapter, tokens, None, None, None)
    logits, _ = Adapter(model)(tokens, None, None, None)
    np.testing.assert_allclose(hidden @ head.W, logits, atol=1e-5)


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
        model.decoder.logits_dense.w_lora_a = 1
    tiling = fake_maxtext["maxtext.utils.vocabulary_tiling"]
    args = model, states()[0], data, config, True
    with maxtext.applied():
        got = tiling.vocab_tiling_nnx_loss(*args)
    np.testing.assert_array_equal(got, vocab_tiling_nnx_loss(*args))
    assert f"left as it is: {reason}" in capsys.readouterr().out


# ----------------------------------------------------------------- SkyRL-tx


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
        mine = None if adapter_indices is None else jnp.repeat(adapter_indices, length)
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
    install(monkeypatch, "0.9", skyrl__tx__utils__logits_processor=contents)


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        (dict(tied=True), None),
        (dict(), None),
        (dict(adapters=3), None),
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


def test_a_skyrl_head_of_another_kind_is_left_alone(fake_skyrl, capsys):
    model, (hidden, labels) = SkyModel(), states()
    model.lm_head = nnx.Sequential(lambda hidden, mine: hidden)
    with skyrl.applied():
        model._compute_chunked_logprobs(hidden, labels, 4, None)
    assert "lm_head of SkyModel is a Sequential" in capsys.readouterr().out


# ------------------------------------------------------------------ EasyDeL


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


@pytest.mark.parametrize(
    "options", [dict(tied=True), dict(tied=True, bias=True), dict(), dict(bias=True)]
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
        "own": "Own has a make_lm_head_fn of its own",
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


# ------------------------------------------------------- Tunix after its 0.1.7


def compute_chunked_logps(
    model, hidden_states, target_ids, temperature, chunk_size, return_entropy
):
    logits = model.compute_final_logits(hidden_states).astype(jnp.float32)
    logits = logits / temperature if temperature else logits
    logps, entropy = log_softmax(logits, target_ids)
    return (logps, entropy) if return_entropy else logps


class TunixModel(nnx.Module):
    __module__ = "tunix.models.stand_in.model"

    def __init__(self, tied):
        rngs = nnx.Rngs(0)
        self.config = Config(final_logit_softcap=0.5)
        self.embedder = nnx.Module()
        table = nnx.initializers.normal(1.0)(rngs(), (V, D))
        self.embedder.input_embedding = nnx.Param(table)
        if not tied:
            self.lm_head = nnx.Module()
            self.lm_head.einsum_str = "BTD,DV->BTV"
            self.lm_head.w = nnx.Param(nnx.initializers.normal(1.0)(rngs(), (D, V)))

    def compute_final_logits(self, hidden):
        tied = not hasattr(self, "lm_head")
        W = self.embedder.input_embedding[...].T if tied else self.lm_head.w[...]
        return 0.5 * jnp.tanh(hidden @ W / 0.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_tunix_chunked_logps(tied, temperature, monkeypatch):
    contents = {"compute_chunked_logps": compute_chunked_logps}
    install(monkeypatch, "0.1.8", tunix__rl__common=contents)
    module, labels = sys.modules["tunix.rl.common"], states()[1]

    def value(model, hidden):
        return module.compute_chunked_logps(model, hidden, labels, temperature, 2, True)

    model = TunixModel(tied)
    theirs = agree(value, model)
    with tunix.applied(chunk=4):
        ours = agree(value, model)
        assert module.compute_chunked_logps is not compute_chunked_logps
        alone = module.compute_chunked_logps(model, states()[0], labels, 1.0, 2, False)
    assert_same(ours, theirs)
    assert alone.shape == (B, T)
