"""Tunix itself, with its head replaced: the same numbers, in its own loops.

Runs where google-tunix is installed, 0.1.7, or 0.1.8 from its sources.
"""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.integrations import tunix
from jaxmem.integrations._distillation import DeferredLogits
from jaxmem.integrations._head import NotServed
from jaxmem.integrations._tunix_models import without_logits
from tests.helpers.cases import slow
from tests.helpers.tunix_models import (
    LOGITS,
    V,
    algo_core,
    as_tunix_sets_flax as as_tunix_sets_flax,
    batch,
    common,
    gemma,
    logps,
    qwen,
    sft_losses,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Tunix's own
    pytest.mark.usefixtures("quick_compilation", "as_tunix_sets_flax"),
]
needs_0_1_7 = pytest.mark.skipif(not LOGITS, reason="needs google-tunix 0.1.7")


def logps_and_entropies(model, prompts, completions, **options):
    """As Tunix's algorithms ask for them."""
    asked = "return_logits" if LOGITS else "return_entropy"
    made, second = logps(
        model, prompts, completions, algo_core.common, **{asked: True}, **options
    )
    return made, algo_core.compute_entropy_from_logits(second) if LOGITS else second


@pytest.mark.parametrize(
    ("temperature", "tied"),
    [
        (1.0, True),  # test_tunix_stand_in has the other cases
        slow(1.0, False),
        *(slow(t, tied) for t in (0.7, 0.0) for tied in (True, False)),
    ],
)
def test_logps_and_entropies(tied, temperature):
    model, arguments = qwen(tied), batch()
    theirs, entropy = logps_and_entropies(model, *arguments, temperature=temperature)
    with tunix.applied(chunk=4), jaxmem.report() as calls:
        ours = logps(model, *arguments, temperature=temperature)
        again, made = logps_and_entropies(model, *arguments, temperature=temperature)
    assert [call.verb for call in calls.calls] == ["logprobs", "token_stats"]
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    np.testing.assert_allclose(again, theirs, atol=2e-6)
    np.testing.assert_allclose(made, entropy, atol=4e-6)
    assert algo_core.common is common


def capped():
    config = gemma.ModelConfig.gemma2_2b()
    changes = dict(num_layers=1, num_embed=V, embed_dim=16, hidden_dim=24, num_heads=2,
                   head_dim=8, num_kv_heads=1, final_logit_softcap=0.5)  # fmt: skip
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def test_head_of_model_has_its_softcap():
    assert tunix.head_of(capped()).head.softcap == 0.5


@needs_0_1_7
def test_logits_that_others_ask_for_stay_logits(capsys):
    with tunix.applied():
        _, logits = logps(qwen(), *batch(), return_logits=True)
    assert logits.shape == (2, 6, V)
    assert "return_logits=True) is asked for logits" in capsys.readouterr().out


def test_lora_and_unknown_heads_are_left_alone(capsys):
    model, arguments = qwen(), batch()
    model.embedder.w_lora_a = nnx.LoRAParam(jnp.zeros((16, 2)))
    with tunix.applied():
        ours = logps(model, *arguments)
    np.testing.assert_array_equal(ours, logps(model, *arguments))
    assert "the head of Qwen3 has LoRA" in capsys.readouterr().out
    with pytest.raises(NotServed, match="none of Tunix's own models"):
        tunix.head_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_threads_tracing_one_class_get_own_states():
    models, barrier = [qwen() for _ in range(3)], threading.Barrier(3, timeout=60)
    positions, mask = jnp.arange(4)[None], jnp.ones((1, 4, 4), bool)
    results = [None] * 3

    def trace(i):
        def run(ids):
            barrier.wait()
            if i == 2:  # a rollout, which wants its logits
                return models[i](ids, positions, None, mask)[0]
            return tunix.hidden_states(models[i], ids, positions, None, mask)

        results[i] = jax.jit(run)(tokens((1, 4)))

    threads = [threading.Thread(target=trace, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [x.shape[-1] for x in results] == [16, 16, V]
    table = models[0].embedder.input_embedding[...]
    np.testing.assert_allclose(results[0] @ table.T, results[2], atol=1e-5)
    np.testing.assert_array_equal(results[0], results[1])


def test_without_logits_affects_one_model():
    ids, positions = tokens((1, 4)), jnp.arange(4)[None]
    mask, (student, teacher) = jnp.ones((1, 4, 4), bool), (qwen(), qwen())
    with without_logits(student):
        assert isinstance(student(ids, positions, None, mask)[0], DeferredLogits)
        logits = teacher(ids, positions, None, mask)[0]
    assert isinstance(logits, jax.Array) and logits.shape == (1, 4, V)


def grpo_loss(model):
    prompts, completions = batch()
    old = logps(model, prompts, completions, stop_gradient=True)
    example = types.SimpleNamespace(
        prompt_ids=prompts, completion_ids=completions,
        completion_mask=(completions != 0).astype(jnp.float32),
        advantages=jnp.array([1.0, -0.5]), old_per_token_logps=old - 0.1,
        ref_per_token_logps=old + 0.05, segment_ids=None, segment_positions=None,
    )  # fmt: skip
    config = types.SimpleNamespace(
        beta=0.04, epsilon=0.2, loss_algo="grpo", epsilon_high=0.2, epsilon_c=3.0,
        loss_agg_mode="token-mean", temperature=0.9, kl_loss_mode="kl",
        kl_clamp_value=None,
    )  # fmt: skip
    definition, weights = nnx.split(model)

    def loss(weights):
        merged = nnx.merge(definition, weights)
        made = algo_core.grpo_loss_fn(merged, example, config, pad_id=0, eos_id=2)
        if LOGITS:
            return made
        return made.primary_loss.compute(), made.aux_metrics

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, aux), gradient = both(weights)
    return value, aux, gradient


@pytest.mark.slow
def test_grpo_loss_its_metrics_and_gradients():
    theirs = grpo_loss(qwen(tied=False))
    with tunix.applied(chunk=4):
        ours = grpo_loss(qwen(tied=False))
    assert "entropy" in theirs[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        ours,
        theirs,
    )


@pytest.mark.slow
def test_tunix_trains_with_the_same_losses():
    theirs = sft_losses()
    with tunix.applied(chunk=4):
        ours = sft_losses()
    assert len(ours) == 3 and theirs[0] != theirs[-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
