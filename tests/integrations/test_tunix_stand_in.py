"""Tunix 0.1.8, as a stand-in: it is no release yet, and not what the suite installs.

`test_tunix` runs against the package itself, either version of it.
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import jaxmem
from jaxmem.integrations import tunix
from tests.helpers.cases import slow
from tests.helpers.stand_ins import (
    B,
    Config,
    D,
    T,
    V,
    agree,
    assert_same,
    holds_originals,
    install,
    log_softmax,
    states,
)

BASE = "tunix.distillation.strategies.base_strategy:BaseStrategy"
pytestmark = [pytest.mark.usefixtures("quick_compilation"), holds_originals]


def gathered(logits, ids):
    """Log-probabilities at ids as an index of an array: -1 is the last."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logp, ids[..., None], axis=-1)[..., 0]


def process_ids(prompts, completions, pad_id, eos_id, segments=None, positions=None):
    ids = jnp.concatenate([prompts, completions], axis=1)
    if segments is not None:
        return ids, positions, None, None
    mask = ids != pad_id
    return ids, jnp.cumsum(mask, axis=1), mask, mask.astype(jnp.int32)


def compute_per_token_logps(
    graphdef, state, prompt_tokens, completion_tokens, pad_id, eos_id, images=None,
    stop_gradient=True, return_entropy=False, segment_ids=None, segment_positions=None,
    temperature=1.0, chunk_size=0,
):  # fmt: skip
    model, packed = nnx.merge(graphdef, state), segment_ids is not None
    ids, positions, mask, padding = process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    logits, _ = model(
        ids, positions=positions, cache=None, attention_mask=mask,
        segment_ids=segment_ids if packed else padding,
    )  # fmt: skip
    kept = ids.shape[1] - 1 if packed else completion_tokens.shape[1]
    logits = logits[:, -kept - 1 : -1] / (temperature or 1.0)
    made = gathered(logits, ids[:, -kept:]), log_softmax(logits, ids[:, -kept:])[1]
    if packed:
        first = 0.0 if chunk_size else jnp.log(V)
        made = [
            jnp.pad(x, ((0, 0), (1, 0)), constant_values=c)
            for x, c in zip(made, (0.0, first), strict=True)
        ]
    made = jax.lax.stop_gradient(tuple(made)) if stop_gradient else tuple(made)
    return made if return_entropy else made[0]


def compute_chunked_logps(
    model, hidden_states, target_ids, temperature, chunk_size, return_entropy
):
    logits = model.compute_final_logits(hidden_states).astype(jnp.float32)
    logits = logits / temperature if temperature else logits
    entropy = log_softmax(logits, target_ids)[1]
    logps = gathered(logits, target_ids)
    return (logps, entropy) if return_entropy else logps


def get_per_token_logps(
    model, input_tokens, positions, attn_mask, logits_to_keep, images=None
):
    logits, _ = model(
        input_tokens, positions=positions, attention_mask=attn_mask, cache=None
    )
    kept = logits[:, -logits_to_keep - 1 : -1]
    return gathered(kept, input_tokens[:, -logits_to_keep:])


@struct.dataclass
class WeightedMetric:
    unreduced_sum: jax.Array
    denominator: jax.Array
    eps: float | None = struct.field(default=None, pytree_node=False)


@struct.dataclass
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict


def _default_loss_fn(
    model, input_tokens, input_mask, positions, attention_mask, images=None
):
    logits, _ = model(input_tokens, positions, None, attention_mask)
    logp = jax.nn.log_softmax(logits[:, :-1])
    one_hot = jax.nn.one_hot(input_tokens[:, 1:], V) * input_mask[:, 1:, None]
    loss = WeightedMetric(-jnp.sum(logp * one_hot), jnp.sum(input_mask[:, 1:]), 1e-8)
    return LossOutput(loss, {})


class BaseStrategy:
    def __init__(self, student_forward_fn, teacher_forward_fn, labels_fn):
        self._student_forward_fn = nnx.jit(student_forward_fn)
        self._teacher_forward_fn = nnx.jit(teacher_forward_fn)
        self._labels_fn = nnx.jit(labels_fn)

    def get_teacher_outputs(self, teacher_model, inputs):
        return jax.lax.stop_gradient(self._teacher_forward_fn(teacher_model, **inputs))

    def get_student_outputs(self, student_model, inputs):
        return self._student_forward_fn(student_model, **inputs)

    def get_train_loss(self, student_model, teacher_output, inputs):
        output = self.get_student_outputs(student_model, inputs)
        return self.compute_loss(output, teacher_output, self._labels_fn(**inputs))

    def get_eval_loss(self, student_model, inputs):
        output = self.get_student_outputs(student_model, inputs)
        output = jax.lax.stop_gradient(output)
        return self.compute_eval_loss(output, self._labels_fn(**inputs))


class LogitStrategy(BaseStrategy):
    __module__ = "tunix.distillation.strategies.logit"
    temperature, alpha, distill_top_k = 2.0, 0.7, 0

    def compute_loss(self, student_output, teacher_output, labels):
        log_p, log_q = (
            jax.nn.log_softmax(x / self.temperature)
            for x in (student_output, teacher_output)
        )
        kl = jnp.mean(jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1))
        soft = kl * self.temperature**2
        hard = self.compute_eval_loss(student_output, labels)[0]
        return self.alpha * soft + (1 - self.alpha) * hard, {
            "distill/soft_loss": soft, "distill/hard_loss": hard,
            "distill/kl_div": kl,
            "distill/teacher_loss": self.compute_eval_loss(teacher_output, labels)[0],
        }  # fmt: skip

    def compute_eval_loss(self, student_output, labels):
        logp = jax.nn.log_softmax(student_output)
        return -jnp.mean(jnp.sum(labels * logp, axis=-1)), {}


def shard_input(input_data, data_sharding_axis):
    return jax.tree.map(lambda x: x + 0, input_data)


class Embedder(nnx.Module):
    def __init__(self, rngs):
        table = nnx.initializers.normal(1.0)(rngs(), (V, D))
        self.input_embedding = nnx.Param(table)

    def decode(self, x):
        return x @ self.input_embedding[...].T


class Einsum(nnx.Module):
    einsum_str = "BTD,DV->BTV"

    def __init__(self, rngs):
        self.w = nnx.Param(nnx.initializers.normal(1.0)(rngs(), (D, V)))

    def __call__(self, x):
        return x @ self.w[...]


class TunixModel(nnx.Module):
    __module__ = "tunix.models.stand_in.model"

    def __init__(self, tied=False):
        rngs = nnx.Rngs(0)
        self.config = Config(final_logit_softcap=0.5)
        self.embedder = Embedder(rngs)
        if not tied:
            self.lm_head = Einsum(rngs)

    def __call__(
        self, tokens, positions=None, cache=None, attention_mask=None, segment_ids=None
    ):
        if segment_ids is None and attention_mask is None:
            raise TypeError("nothing says which tokens are padding")
        hidden = self.embedder.input_embedding[...][tokens]
        return self.compute_final_logits(hidden + jnp.sin(positions)[..., None]), cache

    def compute_final_logits(self, hidden):
        tied = not hasattr(self, "lm_head")
        z = self.embedder.decode(hidden) if tied else self.lm_head(hidden)
        return 0.5 * jnp.tanh(z / 0.5)


@pytest.fixture
def fake_tunix(monkeypatch):
    common = [
        process_ids, compute_per_token_logps, compute_chunked_logps, get_per_token_logps
    ]  # fmt: skip
    utils = types.SimpleNamespace(WeightedMetric=WeightedMetric, LossOutput=LossOutput)
    install(
        monkeypatch,
        "0.1.8",
        tunix__rl__common={function.__name__: function for function in common},
        tunix__sft__peft_trainer={
            "_default_loss_fn": _default_loss_fn, "utils": utils
        },
        tunix__sft__sharding_utils={"shard_input": shard_input},
        tunix__distillation__strategies__base_strategy={"BaseStrategy": BaseStrategy},
    )  # fmt: skip
    of_module = {
        **{f.__name__: "tunix.rl.common" for f in common},
        "_default_loss_fn": "tunix.sft.peft_trainer",
    }
    monkeypatch.setattr(  # where the functions of this file were defined
        "inspect.getmodule", lambda f: sys.modules[of_module[f.__name__]]
    )
    return lambda name: vars(sys.modules[of_module[name]])[name]


def ids(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(1, V, (B, T)))


def assert_alike(value, model):
    """With and without jaxmem; which then was called, once a trace."""
    theirs = agree(value, model)
    with tunix.applied(chunk=4), jaxmem.report() as calls:
        ours = agree(value, model)
    assert len(calls.calls) == 1
    assert_same(ours, theirs)


PACKED = {
    "segment_ids": jnp.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]]),
    "segment_positions": jnp.array([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]),
}


@pytest.mark.parametrize(
    ("tied", "temperature", "entropy", "packed", "chunk_size"),
    [
        (True, 0.7, True, True, 2),
        slow(False, 0.0, True, False, 0),
        slow(False, 1.0, False, False, 2),
        slow(False, 1.0, False, True, 0),
        slow(True, 0.7, True, False, 0),
        slow(True, 0.7, True, False, 2),
        slow(True, 0.7, True, True, 0),
        slow(False, 0.0, True, False, 2),
        slow(False, 0.0, True, True, 0),
        slow(False, 0.0, True, True, 2),
        slow(False, 1.0, False, False, 0),
        slow(False, 1.0, False, True, 2),
    ],
)
def test_logps_and_entropies(
    tied, temperature, entropy, packed, chunk_size, fake_tunix
):
    prompts = jnp.zeros((B, 0), jnp.int32) if packed else ids(1).at[0, :2].set(0)

    def value(model, hidden):
        return fake_tunix("compute_per_token_logps")(
            *nnx.split(model), prompts, completion_tokens=ids(), pad_id=0, eos_id=2,
            stop_gradient=False, return_entropy=entropy, temperature=temperature,
            chunk_size=chunk_size, **(PACKED if packed else {}),
        ), jnp.sum(hidden)  # fmt: skip

    assert_alike(value, TunixModel(tied))


@pytest.mark.full
def test_gradient_only_where_asked_for(fake_tunix):
    def total(state, graphdef):
        with tunix.applied():
            made = fake_tunix("compute_per_token_logps")(
                graphdef, state, ids(1), ids(), 0, 2
            )
        return jnp.sum(made)

    graphdef, state = nnx.split(TunixModel())
    gradient = jax.grad(total, allow_int=True)(state, graphdef)
    assert not any(np.any(x) for x in jax.tree.leaves(gradient))


def test_preferences(fake_tunix):
    places = jnp.broadcast_to(jnp.arange(T), (B, T))

    def value(model, hidden):
        mask = jnp.ones((B, T, T), bool)
        return fake_tunix("get_per_token_logps")(
            model, ids(), places, mask, 3
        ), jnp.sum(hidden)

    assert_alike(value, TunixModel())


def test_supervised_loss_returns_sums_to_divide(fake_tunix):
    places = jnp.broadcast_to(jnp.arange(T), (B, T))
    weights = jnp.array([[0, 1, 1, 1, 1], [1, 1, 0.5, 0, 0]])

    def value(model, hidden):
        mask = jnp.ones((B, T, T), bool)
        loss = fake_tunix("_default_loss_fn")(model, ids(), weights, places, mask)
        assert isinstance(loss, LossOutput) and loss.primary_loss.eps == 1e-8
        return loss, jnp.sum(hidden)

    assert_alike(value, TunixModel())


@pytest.mark.parametrize(
    ("temperature", "tied"),
    [(0.7, False), slow(0.0, True), slow(0.7, True), slow(0.0, False)],
)
def test_chunked_logps(tied, temperature, fake_tunix):
    def value(model, hidden):
        return fake_tunix("compute_chunked_logps")(
            model, hidden, states()[1], temperature, 2, True
        )

    assert_alike(value, TunixModel(tied))
    with tunix.applied():
        alone = fake_tunix("compute_chunked_logps")(
            TunixModel(tied), states()[0], states()[1], 1.0, 2, False
        )
    assert alone.shape == (B, T)


@pytest.mark.full
def test_distillation(fake_tunix):
    places = jnp.broadcast_to(jnp.arange(T), (B, T))
    inputs = {"tokens": ids(), "positions": places, "mask": jnp.ones((B, T, T), bool)}
    weights = jnp.array([[1, 1, 0, 1], [0, 1, 1, 0]])

    def forward(model, tokens, positions, mask):
        return model(tokens, positions, None, mask)[0][..., :-1, :]

    def labels(tokens, **_):
        return weights[..., None] * jax.nn.one_hot(tokens[:, 1:], V)

    def value(model, hidden):
        strategy = LogitStrategy(forward, forward, lambda **x: labels(**x))
        output = strategy.get_teacher_outputs(TunixModel(tied=True), inputs)
        batch = sys.modules["tunix.sft.sharding_utils"].shard_input([output], ())
        loss, metrics = strategy.get_train_loss(model, batch[0], inputs)
        metrics = jax.lax.stop_gradient(metrics)  # the trainer's are auxiliary
        return loss, metrics, strategy.get_eval_loss(model, inputs), jnp.sum(hidden)

    theirs = agree(value, TunixModel())
    with tunix.applied(chunk=4), jaxmem.report() as calls:
        ours = agree(value, TunixModel())
    verbs = [call.verb for call in calls.calls]
    assert sorted(verbs) == ["divergence_loss", "logprobs", "logprobs"]
    assert_same(ours, theirs)


@pytest.mark.slow
def test_ids_are_what_an_index_is(fake_tunix):
    """From the end where negative, also as eos_id=-1; NaN where there is none."""
    completions = ids().at[0].set(jnp.array([-1, -V, 3, V, -V - 1]))

    model, places = TunixModel(), jnp.broadcast_to(jnp.arange(T), (B, T))
    mask = jnp.ones((B, T, T), bool)
    calls = {
        "compute_per_token_logps": lambda ids_: (
            *nnx.split(model), ids(1), ids_, 0, -1,
        ),
        "get_per_token_logps": lambda ids: (model, ids, places, mask, T - 1),
        "compute_chunked_logps": lambda ids: (model, states()[0], ids, 1.0, 2, False),
    }  # fmt: skip
    theirs = [fake_tunix(name)(*args(completions)) for name, args in calls.items()]
    with tunix.applied():
        ours = [
            jax.jit(lambda ids, name=name: fake_tunix(name)(*calls[name](ids)))
            for name in calls
        ]
        for run, want in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(run(completions), want, atol=2e-6)
            assert np.isnan(want).sum() == 2


def test_it_prints_what_is_replaced(fake_tunix, capsys):
    with tunix.applied():
        pass
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == [
        "tunix.rl.common:compute_per_token_logps",
        "tunix.rl.common:compute_chunked_logps",
        "tunix.rl.common:get_per_token_logps",
        "tunix.sft.peft_trainer:_default_loss_fn",
        *(
            f"{BASE}.get_{name}"
            for name in ("teacher_outputs", "train_loss", "eval_loss")
        ),
        "tunix.sft.sharding_utils:shard_input",
    ]
