"""Tunix models as its recipes configure them: qwix LoRA and quantisation.

The head is jaxmem's wherever the head itself is plain, whatever other layers have. Runs
where google-tunix and qwix are installed.
"""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem import integrations
from jaxmem.integrations import tunix
from jaxmem.integrations._head import NotServed
from jaxmem.integrations._replace import IntegrationError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own, at import
    qwix = pytest.importorskip("qwix", reason="needs qwix")
    pytest.importorskip("tunix.rl.common", reason="needs google-tunix")
    dpo_trainer = importlib.import_module("tunix.sft.dpo.dpo_trainer")

from tests.helpers import tunix_models as plain
from tests.helpers.tunix_models import as_tunix_sets_flax, peft_trainer, tokens

__all__ = ["as_tunix_sets_flax"]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # their own
    pytest.mark.usefixtures("quick_compilation", "as_tunix_sets_flax"),
]


def changed(provider, tied=True):
    """A model after qwix, with LoRA matrices that are not zero."""
    model = plain.qwen(tied)
    inputs = plain_inputs(tokens((1, 4)))
    model = qwix.quantize_model(model, provider, **inputs, rngs=nnx.Rngs(1))
    _, lora, _ = nnx.split(model, nnx.LoRAParam, ...)
    nnx.update(model, jax.tree.map(lambda x: x + 0.05, lora))
    return model


def plain_inputs(ids):
    mask = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return dict(
        input_tokens=ids, positions=positions, cache=None,
        attention_mask=jnp.broadcast_to(mask, (len(ids), *mask.shape)),
    )  # fmt: skip


def lora(path, **options):
    return qwix.LoraProvider(module_path=path, rank=2, alpha=4.0, **options)


def trained_int8(path):
    rule = qwix.QuantizationRule(
        module_path=path, weight_qtype=jnp.int8, act_qtype=jnp.int8
    )
    return qwix.QtProvider([rule])


def sft(model):
    inputs = plain_inputs(tokens((2, 8)))
    del inputs["cache"]
    mask = jnp.array([[1] * 8, [1] * 5 + [0] * 3])
    loss = peft_trainer._default_loss_fn(model, input_mask=mask, **inputs)
    return loss if plain.LOGITS else loss.primary_loss.compute()


def dpo(model):
    ids = tokens((4, 8))
    inputs = plain_inputs(ids)
    example = dpo_trainer.TrainExample(
        input_ids=ids, positions=inputs["positions"], logits_to_keep=4,
        attention_mask=inputs["attention_mask"], completion_mask=jnp.ones((4, 4)),
        ref_chosen_logps=jnp.array([-20.0, -21.0]),
        ref_rejected_logps=jnp.array([-22.0, -20.0]),
    )  # fmt: skip
    return dpo_trainer.dpo_loss_fn(model, example)[0]


def grpo(model):
    prompts, completions = plain.batch()
    logps = plain.logps(model, prompts, completions)
    return jnp.mean(jnp.exp(logps + 6.0) * jnp.array([[1.0], [-0.5]]))


def loss_and_gradient(loss_fn, model):
    """As Tunix's trainer takes them: the gradient is of the LoRA weights alone."""
    of_lora = nnx.DiffState(0, nnx.LoRAParam)
    loss, gradient = nnx.jit(nnx.value_and_grad(loss_fn, argnums=of_lora))(model)
    return loss, jax.tree.leaves(gradient)


def assert_near(ours, theirs):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        ours,
        theirs,
    )


@pytest.mark.parametrize("loss_fn", [sft, dpo, grpo])
def test_lora_on_a_layer_is_served(loss_fn):
    theirs = loss_and_gradient(loss_fn, changed(lora(".*q_proj")))
    assert len(theirs[1]) == 2 and all(np.abs(x).max() > 1e-5 for x in theirs[1])
    with tunix.applied(chunk=4, strict=True), jaxmem.report() as calls:
        ours = loss_and_gradient(loss_fn, changed(lora(".*q_proj")))
    assert {call.verb for call in calls.calls} == {"logprobs"}
    assert_near(ours, theirs)


@pytest.mark.slow
def test_tunix_trains_lora_with_the_same_losses():
    theirs = plain.sft_losses(model=changed(lora(".*q_proj")))
    with tunix.applied(chunk=4, strict=True):
        ours = plain.sft_losses(model=changed(lora(".*q_proj")))
    assert len(ours) == 3 and theirs[0] != theirs[-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    "provider",
    [
        lambda: lora(".*gate_proj", weight_qtype="nf4"),  # QLoRA
        lambda: trained_int8(".*q_proj"),
    ],
)
def test_quantised_layers_below_the_head_are_served(provider):
    model = changed(provider(), tied=False)
    theirs = sft(model)
    with tunix.applied(chunk=4, strict=True):
        np.testing.assert_allclose(sft(model), theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        (lambda: lora(".*lm_head"), "the head of Qwen3 has LoRA"),
        # Its weights are plain, and are quantised in the call.
        (
            lambda: trained_int8(".*lm_head"),
            "the head of Qwen3 does more than multiply by its weights",
        ),
    ],
)
def test_head_that_qwix_changes_is_left_to_tunix(provider, reason, capsys):
    model = changed(provider(), tied=False)
    theirs = [loss_fn(model) for loss_fn in (sft, grpo)]
    with tunix.applied(chunk=4):
        ours = [loss_fn(model) for loss_fn in (sft, grpo)]
        status = {each.name: each for each in tunix.status().functions}
    np.testing.assert_array_equal(ours, theirs)
    assert f"not patched: {reason}" in capsys.readouterr().out
    for name in (
        "sft.peft_trainer:_default_loss_fn",
        "rl.common:compute_per_token_logps",
    ):
        each = status[f"tunix.{name}"]
        assert each.served == 0 and sum(each.refused.values()) == 1
        assert next(iter(each.refused)).startswith(reason)
    with tunix.applied(strict=True), pytest.raises(IntegrationError, match=reason):
        sft(model)


def test_quantised_head_is_refused():
    rule = qwix.QuantizationRule(module_path=".*lm_head", weight_qtype=jnp.int8)
    with pytest.raises(
        NotServed, match="the head of Qwen3 is quantised, or not a plain"
    ):
        tunix.head_of(changed(qwix.PtqProvider([rule]), tied=False))


def test_status_counts_calls_that_are_served():
    definition, weights = nnx.split(changed(lora(".*q_proj")))
    with tunix.applied(chunk=4):
        jax.eval_shape(lambda weights: sft(nnx.merge(definition, weights)), weights)
        (status,) = [each for each in integrations.status() if each.name == "tunix"]
    by_name = {each.name: each for each in status.functions}
    assert status.is_applied and not tunix.status().is_applied
    assert by_name["tunix.sft.peft_trainer:_default_loss_fn"].served == 1
    assert "_default_loss_fn: served 1\n" in str(status)
    assert "get_per_token_logps: not called\n" in str(status)
