"""Tunix's LogitStrategy with both heads replaced: the same losses and gradients."""

import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.head.maths.head import Head
from jaxmem.integrations import tunix
from jaxmem.integrations._distillation import DeferredLogits, forward_kl_of_largest
from jaxmem.integrations._head import ModelHead, Options

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Tunix's own, at import
    pytest.importorskip("tunix.rl.common", reason="needs google-tunix")
    strategies = importlib.import_module("tunix.distillation.strategies")
    trainers = importlib.import_module("tunix.distillation.distillation_trainer")
    sharding_utils = importlib.import_module("tunix.sft.sharding_utils")

from tests.helpers.cases import slow
from tests.helpers.tunix_models import V, as_tunix_sets_flax, qwen, tokens

__all__ = ["as_tunix_sets_flax"]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Tunix's own
    pytest.mark.usefixtures("quick_compilation", "as_tunix_sets_flax"),
]


def forward(model, input_tokens, input_mask, positions, attention_mask):
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return logits[:, :-1, :]


def labels(input_tokens, input_mask, n=V, **_):
    one_hot = jax.nn.one_hot(input_tokens[:, 1:], n)
    return one_hot * input_mask[:, 1:].astype(one_hot.dtype)[..., None]


def inputs_of(example):
    ids = jnp.asarray(example.input_tokens)
    mask = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))
    return dict(
        input_tokens=ids, input_mask=jnp.asarray(example.input_mask),
        positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
        attention_mask=jnp.broadcast_to(mask, (len(ids), *mask.shape)),
    )  # fmt: skip


def example(seed=0, rows=2):
    mask = np.array([[1] * 8, [1] * 5 + [0] * 3] * (rows // 2))
    ids = np.asarray(tokens((rows, 8), seed))
    return trainers.TrainingInput(input_tokens=ids, input_mask=mask)


def strategy_of(student=forward, teacher=forward, labels=labels, **options):
    return strategies.LogitStrategy(student, teacher, labels, **options)


def models(dtype=jnp.float32):
    """A student with a tied head and a wider teacher with its own."""
    student, teacher = qwen(dtype=dtype), qwen(tied=False, dtype=dtype)
    # Random heads of this size say nothing: logits of a few units do.
    student.embedder.input_embedding[...] *= 3
    teacher.lm_head.w[...] *= 30
    return student, teacher


def loss_of(strategy, student, teacher):
    """(student's weights, teacher's output) to (loss, metrics), and both of them."""
    inputs = inputs_of(example())
    output = strategy.get_teacher_outputs(teacher, inputs)
    definition, weights = nnx.split(student)

    def loss(weights, output):
        merged = nnx.merge(definition, weights)
        return strategy.get_train_loss(merged, output, inputs)

    return loss, (weights, output)


def losses(strategy, student, teacher):
    """((loss, metrics), gradient by the student's weights), and the eval loss."""
    loss, given = loss_of(strategy, student, teacher)
    inputs, definition = inputs_of(example()), nnx.split(student)[0]

    @jax.jit
    def both(weights, output):
        made = jax.value_and_grad(loss, has_aux=True)(weights, output)
        return made, strategy.get_eval_loss(nnx.merge(definition, weights), inputs)

    return both(*given)


@functools.cache
def of_tunix():
    """`losses` of Tunix's own strategy, with its defaults."""
    return losses(strategy_of(), *models())


def values(strategy, student, teacher):
    """(loss, metrics) alone, for what only calls one function or another."""
    loss, given = loss_of(strategy, student, teacher)
    return jax.jit(loss)(*given)


def assert_near(ours, theirs, rtol=2e-5):
    def near(a, b):
        size = float(np.max(np.abs(b))) if b.size else 0.0
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(size, 1e-6))

    jax.tree.map(near, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "temperature", "k"),
    [
        (0.7, 2.5, 0),
        (0.7, 2.5, 4),
        (0.7, 1.0, 0),
        (0.0, 1.0, 0),
        (1.0, 1.0, 0),
        (0.0, 2.5, 0),
        (1.0, 2.5, 0),
        (1.0, 1.0, 4),
        (0.0, 2.5, 4),
    ],
)
def test_loss_metrics_and_gradient(alpha, temperature, k):
    """Over the vocabulary, or the teacher's k largest logits alone."""
    options = dict(alpha=alpha, temperature=temperature, distill_top_k=k)
    theirs = losses(strategy_of(**options), *models())
    with tunix.applied(chunk=4), jaxmem.report() as calls:
        ours = losses(strategy_of(**options), *models())
    assert [call.verb for call in calls.calls] == [
        *(["topk", "divergence", "logprobs"] if k else ["divergence_loss"]),
        *["logprobs"] * 2,
    ]  # fmt: skip
    assert float(theirs[0][0][1]["distill/kl_div"]) > 0.03
    assert_near(ours, theirs)


def test_too_large_top_k_raises_as_in_tunix(capsys):
    with pytest.raises(Exception) as theirs:
        values(strategy_of(distill_top_k=V + 1), *models())
    with tunix.applied(), pytest.raises(theirs.type) as ours:
        values(strategy_of(distill_top_k=V + 1), *models())
    assert str(ours.value) == str(theirs.value)
    assert f"distill_top_k={V + 1} exceeds {V} logits" in capsys.readouterr().out


def test_equal_logits_largest_by_smaller_id():
    """As in `jax.lax.top_k`; a head with a softcap and a temperature of its own."""
    rng = np.random.default_rng(0)
    W = jnp.asarray(rng.normal(size=(12, 4)), "f4")
    student = ModelHead(Head(W, layout="vd"), jnp.float32)
    columns = np.repeat(rng.integers(-2, 3, (4, 4)), 3, axis=0).astype("f4")
    teacher = Head(jnp.asarray(columns), softcap=3.0, layout="vd")
    teacher = ModelHead(teacher, jnp.float32, 0.7)
    states = [jnp.asarray(rng.integers(-2, 3, (5, 4)), "f4") for _ in range(2)]
    pair = [
        DeferredLogits(h, head)
        for h, head in zip(states, (student, teacher), strict=True)
    ]
    z, y = (x.array() for x in pair)

    def both(k, z, y):
        top, ids = jax.lax.top_k(y, k)
        log_p = jax.nn.log_softmax(jnp.take_along_axis(z, ids, -1) / 1.5)
        want = optax.kl_divergence(log_p, jax.nn.softmax(top / 1.5))
        return forward_kl_of_largest(*pair, k, 1.5, Options(chunk=4)), want

    for k in (2, 4):
        made, want = jax.jit(both, static_argnums=0)(k, z, y)
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_tunix_is():
    exact = of_tunix()[0][0]
    student, teacher = models()

    def rounded(model):
        half = qwen(tied=not hasattr(model, "lm_head"), dtype=jnp.bfloat16)
        nnx.update(half, jax.tree.map(jnp.bfloat16, nnx.state(model)))
        return half

    halves = rounded(student), rounded(teacher)
    theirs = values(strategy_of(), *halves)
    with tunix.applied():
        ours = values(strategy_of(), *halves)
    error = abs(float(theirs[0] - exact[0]))
    assert abs(float(ours[0] - exact[0])) <= 2 * error + 1e-2


def trained(strategy, steps=3, evaluated=None):
    """The student's weights after Tunix's own trainer."""
    student, teacher = models()
    config = trainers.TrainingConfig(eval_every_n_steps=2, max_steps=steps)
    trainer = trainers.DistillationTrainer(
        student, teacher, strategy, optax.sgd(0.1), config
    ).with_gen_model_input_fn(inputs_of)
    trainer.train([example(seed) for seed in range(steps)], evaluated)
    return nnx.state(student, nnx.Param)


def add_one(model, **inputs):
    return forward(model, **inputs) + 1


def over_part(model, **inputs):
    return forward(model, **inputs)[..., :-1]


def no_logits(model, **inputs):
    return jnp.zeros((*inputs["input_tokens"][:, 1:].shape, V))


def smooth(**inputs):
    return 0.9 * labels(**inputs) + 0.1 / V


def dense(**inputs):
    return jnp.asarray(np.eye(V))[inputs["input_tokens"][:, 1:]]


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (dict(student=add_one), "student_forward_fn does more with logits than"),
        slow(dict(teacher=add_one), "teacher_forward_fn does more with logits than"),
        (dict(teacher=no_logits), "teacher_forward_fn does not return its model's"),
        (dict(student=no_logits), "student_forward_fn does not return its model's"),
        (dict(labels=smooth), "labels_fn does more with jax.nn.one_hot(...) than"),
        (dict(labels=dense), "labels_fn does not return jax.nn.one_hot(...), or"),
    ],
)
def test_tunix_strategies_left_alone(functions, reason, capsys):
    theirs = values(strategy_of(**functions), *models())
    with tunix.applied():
        ours = values(strategy_of(**functions), *models())
    assert f"not patched: {reason}" in capsys.readouterr().out
    assert_near(ours, theirs)


def test_wrong_function_raises_as_in_tunix():
    functions = dict(student=over_part, teacher=over_part)  # V - 1 columns, labels V
    with pytest.raises(Exception) as theirs:
        values(strategy_of(**functions), *models())
    with tunix.applied(), pytest.raises(theirs.type) as ours:
        values(strategy_of(**functions), *models())
    assert str(ours.value) == str(theirs.value)


@pytest.mark.slow
def test_heads_with_lora_are_left_alone(capsys):
    for which in (0, 1):
        pair = models()
        owner = pair[1].lm_head if which else pair[0].embedder
        owner.w_lora_a = nnx.LoRAParam(jnp.zeros((16, 2)))
        theirs = values(strategy_of(), *pair)
        with tunix.applied():
            assert_near(values(strategy_of(), *pair), theirs)
        assert "the head of Qwen3 has LoRA" in capsys.readouterr().out


def test_strategies_with_another_loss_are_left_alone(capsys):
    class Own(strategies.LogitStrategy):
        def compute_loss(self, student_output, teacher_output, labels):
            return jnp.sum(student_output), {}

    with tunix.applied():
        output = Own(forward, forward, labels).get_teacher_outputs(
            models()[1], inputs_of(example())
        )
    assert output.shape == (2, 7, V)
    assert "not patched: Own has its own loss of logits" in capsys.readouterr().out

    class Features(strategies.BaseStrategy):
        def compute_loss(self, student_output, teacher_output, labels):
            return jnp.mean((student_output - teacher_output) ** 2)

        def compute_eval_loss(self, student_output, labels):
            return jnp.mean(student_output)

    theirs = values(Features(forward, forward, labels), *models())
    with tunix.applied():
        ours = values(Features(forward, forward, labels), *models())
    assert_near(ours, theirs)
    said = "not patched: Features compares other things than logits"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_mesh_shards_the_batch_and_not_the_head():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    inputs = inputs_of(example())
    theirs = trained(strategy_of(), steps=1)
    with tunix.applied(), mesh:
        assert_near(trained(strategy_of(), steps=1), theirs, rtol=1e-4)
        output = strategy_of().get_teacher_outputs(models()[1], inputs)
        batch = trainers.TrainingInput(
            input_tokens=inputs["input_tokens"], input_mask=inputs["input_mask"],
            teacher_output=output,
        )  # fmt: skip
        made = sharding_utils.shard_input(batch, ("fsdp",))
    for x in (made.input_tokens, made.teacher_output.hidden):
        assert x.sharding.spec == jax.sharding.PartitionSpec("fsdp")
    assert made.teacher_output.head.head.W is output.head.head.W
