"""MaxText's distillation, as a stand-in of the strategy whose methods are replaced."""

import builtins
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.integrations import maxtext
from jaxmem.integrations._replace import IntegrationError
from tests.helpers.cases import slow
from tests.helpers.maxtext import (
    Adapter,
    MaxModel,
    maxtext_config,
    vocab_tiling_linen_loss,
    vocab_tiling_nnx_loss,
)
from tests.helpers.maxtext_strategy import (
    CombinedDistillationStrategy,
    DistillationForwardOutput,
)
from tests.helpers.stand_ins import (
    B,
    T,
    V,
    assert_same,
    holds_originals,
    install,
    states,
)

pytestmark = [pytest.mark.usefixtures("quick_compilation"), holds_originals]
UTILS = "maxtext.trainers.post_train.distillation.distillation_utils"
K = 4


@pytest.fixture
def fake_maxtext(monkeypatch):
    install(
        monkeypatch,
        "0.2.5",
        maxtext__utils__vocabulary_tiling={
            "vocab_tiling_nnx_loss": vocab_tiling_nnx_loss,
            "vocab_tiling_linen_loss": vocab_tiling_linen_loss,
        },
        maxtext__integration__tunix__tunix_adapter={"TunixMaxTextAdapter": Adapter},
        maxtext__trainers__post_train__distillation__distillation_utils={
            "CombinedDistillationStrategy": CombinedDistillationStrategy,
        },
    )
    return sys.modules[UTILS]


def forward_of(config):
    """As MaxText's `create_forward_fn(config)`."""

    def model_forward_fn(model, input_tokens, cache=None, **kwargs):
        logits = model(decoder_input_tokens=input_tokens)
        features = model.token_embedder(input_tokens)
        return DistillationForwardOutput(logits, features, jnp.sum(features) * 1e-3)

    return model_forward_fn


def strategy_of(utils, forward=None, kind=None, **options):
    forward = forward or forward_of(None)
    kind = kind or utils.CombinedDistillationStrategy
    options = dict(vocab_size=V, temperature=1.7, alpha=0.6, max_steps=10) | options
    return kind(forward, forward, **options)


def data():
    targets = jnp.abs(states()[1]) % V
    segments = jnp.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]])
    return jnp.abs(states(1)[1]) % V, targets.at[0, 0].set(0), segments


def models(**changes):
    student = MaxModel(maxtext_config(**changes))
    tied = maxtext_config(logits_via_embedding=True, final_logits_soft_cap=2.0)
    teacher = MaxModel(tied)
    for model in (student, teacher):
        model.token_embedder.embedding[...] *= 5
    return student, teacher


def step_of(strategy, student, teacher, offline=False):
    """Results of MaxText's train step: loss, metrics, gradient; and the eval loss."""
    ids, targets, segments = data()
    definition, weights = nnx.split(student)
    rng = np.random.default_rng(3)
    columns = np.argsort(rng.normal(size=(B, T, V)))[..., :K]
    saved = DistillationForwardOutput(
        jnp.asarray(rng.normal(size=(B, T, K))), top_k_indices=jnp.asarray(columns)
    )

    def step(weights, teacher):
        theirs = saved
        if not offline:
            theirs = strategy.teacher_forward_fn(model=teacher, input_tokens=ids)
        theirs = jax.tree.map(jax.lax.stop_gradient, theirs)

        def total(weights):
            model = nnx.merge(definition, weights)
            output = strategy.student_forward_fn(model=model, input_tokens=ids)
            labels = strategy.create_labels(targets, targets_segmentation=segments)
            evaluated = strategy.compute_eval_loss(output, labels)
            loss, metrics = strategy.compute_loss(output, theirs, labels, step=3)
            return loss, (metrics, evaluated)

        return jax.value_and_grad(total, has_aux=True)(weights)

    return nnx.jit(step)(weights, teacher)


@pytest.mark.parametrize(
    ("features", "offline"),
    [(0.3, True), slow(0.0, False), slow(0.0, True), slow(0.3, False)],
)
def test_loss_metrics_and_gradient(offline, features, fake_maxtext):
    pair, options = models(), dict(offline=offline)
    theirs = step_of(strategy_of(fake_maxtext, beta_feature=features), *pair, **options)
    with maxtext.applied(chunk=4), jaxmem.report() as calls:
        strategy = strategy_of(fake_maxtext, beta_feature=features)
        ours = step_of(strategy, *pair, **options)
    verbs = {call.verb for call in calls.calls}
    online = {"divergence_loss", "divergence"}  # the second at temperature 1, a metric
    assert verbs == {"logprobs"} | ({"selected_logprobs"} if offline else online)
    assert theirs[0][1][0]["distill/kl_div_at_T"][0] > 1
    assert_same(ours, theirs)


def plus_one(model, input_tokens):
    output = forward_of(None)(model, input_tokens)
    return output.replace(logits=output.logits + 1)


@pytest.mark.slow
def test_maxtext_strategies_left_alone(fake_maxtext, capsys):
    def check(reason, forward=None, **changes):
        student, teacher = models()
        vars(student.config).update(changes)
        theirs = step_of(strategy_of(fake_maxtext, forward), student, teacher)
        with maxtext.applied():
            ours = step_of(strategy_of(fake_maxtext, forward), student, teacher)
        assert f"not patched: {reason}" in capsys.readouterr().out
        assert_same(ours, theirs)

    check("multi-token prediction has its own head", mtp_num_layers=1)
    check("parameter_memory_host_offload", parameter_memory_host_offload=True)
    check("the student's forward function returns logits", mtp_num_layers=1)
    check("a forward function does more with logits than return them", plus_one)


def test_strategy_with_its_own_loss_gets_arrays(fake_maxtext):
    class Own(CombinedDistillationStrategy):
        def compute_loss(self, student_output, teacher_output, labels, step=None):
            total = jnp.sum(student_output.logits * labels)
            return total + jnp.sum(teacher_output.logits), {}

    theirs = step_of(strategy_of(fake_maxtext, kind=Own), *models())
    with maxtext.applied():
        ours = step_of(strategy_of(fake_maxtext, kind=Own), *models())
    assert_same(ours, theirs)


def test_strategy_works_after_undo(fake_maxtext):
    with maxtext.applied():
        strategy = strategy_of(fake_maxtext)
        step = functools.partial(step_of, strategy)
        with jaxmem.report() as calls:
            ours = nnx.eval_shape(step, *models())
    assert calls.calls
    with jaxmem.report() as calls:
        assert nnx.eval_shape(step, *models()) == ours
    assert not calls.calls


def test_labels_can_be_looked_at(fake_maxtext):
    _, targets, segments = data()
    theirs = strategy_of(fake_maxtext).create_labels(targets, segments)
    with maxtext.applied():
        ours = strategy_of(fake_maxtext).create_labels(targets, segments)
    np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_maxtext_without_tunix_has_no_distillation(fake_maxtext, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, UTILS)
    with pytest.raises(IntegrationError, match=r"no .*CombinedDistillationStrategy"):
        maxtext.apply()
    real = builtins.__import__

    def import_module(name):
        if name == UTILS:
            raise ModuleNotFoundError("No module named 'tunix'", name="tunix.sft")
        return real(name, fromlist=["x"])

    monkeypatch.setattr("importlib.import_module", import_module)
    with maxtext.applied():
        printed = capsys.readouterr().out
        assert f"not patched: {UTILS}:CombinedDistillationStrategy" in printed
        assert "(No module named 'tunix')" in printed
        tiling = sys.modules["maxtext.utils.vocabulary_tiling"]
        assert tiling.vocab_tiling_nnx_loss is not vocab_tiling_nnx_loss
