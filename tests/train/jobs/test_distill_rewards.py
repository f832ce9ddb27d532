"""Distillation with rewards: the policy gradient, and runs that learn from both."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem import losses
from jaxmem.data.rewards import RewardError
from jaxmem.heads.nnx import LMHead
from jaxmem.train import configuration
from jaxmem.train.jobs.distill import job as distill, sources
from jaxmem.train.jobs.distill_objective import DistillConfig, Targets, distill_loss
from jaxmem.train.jobs.policy_objective import PolicyHeadOptions
from jaxmem.train.metrics import DistillMetrics
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.kills import kill_before
from tests.helpers.runs import refused, write

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
SUMS = """
task.source = "arithmetic"
task.answer = "sum"
task.reward = "prefix"
sampling.max_new_tokens = 3
distill.mode = "on_policy"
distill.divergence = "reverse_kl"
distill.teacher = "llama"
distill.prompts = 8
distill.completions = 8
distill.max_tokens = 256
model.layers = 1
model.hidden = 32
model.ff = 32
model.heads = 2
model.kv_heads = 1
model.head_dim = 16
model.tied = False
model.embedding.scaled = True
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.weight_decay = 0.0
run.job = "distill"
run.steps = 6
run.checkpoint_every = 3
run.out_dir = "run"
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A teacher that can spell sums, but not add; and a config."""
    monkeypatch.chdir(tmp_path)
    letters = "abcdefghijklmnopqrstuvwxy+=0123456789"
    texts.checkpoint("llama", pathlib.Path(), letters=letters)
    pathlib.Path("distill.gin").write_text(SUMS)


train = functools.partial(runs.train, "distill.gin")
steps = functools.partial(runs.steps, kind=DistillMetrics)


def resumed(monkeypatch, *overrides):
    """Steps of a run that was killed before the fifth, and taken up again."""

    def cut():
        return train("run.out_dir=cut", *overrides)

    kill_before(5, distill.Distill, monkeypatch, cut)
    assert len(steps("cut")) == 4
    assert "resuming cut at step 3" in cut()[1]
    return steps("cut")


# ---------------------------------------------------------------- gradient


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [slow(1.0), 0.7])
def test_policy_gradient_equals_dense_float64(temperature):
    """Rewards add to the gradient; statistics stay those at temperature 1."""
    rng = np.random.default_rng(0)
    student, teacher = (LMHead(d, 20, use_bias=False, rngs=nnx.Rngs(d)) for d in (8, 6))
    hidden, states = (rng.normal(size=(2, 5, d)).astype("f4") for d in (8, 6))
    labels = np.where(rng.random((2, 5)) < 0.3, -1, rng.integers(0, 20, (2, 5)))
    labels = labels.astype(np.int32)
    advantages = np.where(labels < 0, np.nan, rng.normal(size=(2, 5))).astype("f4")
    definition, weights = nnx.split(student)
    call, config = (
        PolicyHeadOptions(temperature, "fused"),
        DistillConfig(reward_weight=0.6),
    )

    def run(weights, hidden, advantages):
        head = nnx.merge(definition, weights)
        return distill_loss(
            config, head, jnp.asarray(hidden), Targets(labels, advantages),
            teacher.teacher(states), jnp.float32(7), call,
        )  # fmt: skip

    slope = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    (loss, told), (dW, dh) = slope(weights, hidden, advantages)
    (pure, told_pure), (dW_pure, dh_pure) = slope(weights, hidden, None)

    W = np.asarray(student.kernel[...], "f8")
    z, live = hidden.astype("f8") @ W, labels >= 0
    A = np.where(live, advantages, 0).astype("f8")
    chosen = np.eye(20)[labels]
    dz = -0.6 * A[..., None] * (chosen - softmax(z / temperature)) / temperature / 7
    tight = dict(rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(loss - pure, -0.6 * A.sum() / 7, **tight)
    np.testing.assert_allclose(dh - dh_pure, dz @ W.T, **tight)
    (dW, dW_pure) = (jax.tree.leaves(x)[0] for x in (dW, dW_pure))
    np.testing.assert_allclose(
        dW - dW_pure, np.einsum("btd,btv->dv", hidden.astype("f8"), dz), **tight
    )
    ce = -np.log(np.sum(softmax(z) * chosen, -1))
    np.testing.assert_allclose(told["ce"], np.where(live, ce, 0), **tight)
    for name, value in told_pure.items():
        np.testing.assert_allclose(told[name], value, **tight)


def test_unrewarded_completions_have_no_advantage():
    source = object.__new__(sources.StudentSamples)  # without a compiled sampler
    given = "distill.prompts=3", "distill.completions=4", "distill.reward_weight=0.5"
    source._config = configuration.load("distill.gin", given)[0]
    rewards = np.random.default_rng(0).random((3, 4)).astype("f4")
    rewards[0], rewards[1, 2] = np.nan, np.nan
    made = source._compare_rewards(1, rewards.ravel()).reshape(3, 4)
    assert not made[0].any() and made[1, 2] == 0
    compare = jax.jit(losses.grpo_advantages)
    rest = made[1, [0, 1, 3]], compare(rewards[1, [0, 1, 3]])
    np.testing.assert_allclose(*rest, rtol=1e-5)
    np.testing.assert_allclose(made[2], compare(rewards[2]), rtol=1e-5)
    message = "step 4: none of 12 completions has a reward; correct task.reward, or"
    with pytest.raises(RewardError, match=message):
        source._compare_rewards(4, np.full(12, np.nan, "f4"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("temperatures", "verbs"),
    [
        ((1.0, 1.0), ["divergence_loss"]),
        ((2.0, 1.0), ["divergence_loss"]),
        ((1.0, 0.7), ["divergence_loss", "token_loss"]),
    ],
)
def test_one_pass_for_each_temperature(temperatures, verbs):
    student, teacher = (LMHead(d, 20, rngs=nnx.Rngs(d)) for d in (8, 6))
    hidden, states = jnp.ones((2, 5, 8)), jnp.ones((2, 5, 6))
    labels = jnp.ones((2, 5), jnp.int32)
    of_divergence, of_sampler = temperatures
    config = DistillConfig(
        temperature=of_divergence, loss_weight=0.5, reward_weight=0.6
    )
    with jaxmem.report() as traced:
        _, told = distill_loss(
            config, student, hidden, Targets(labels, jnp.ones((2, 5))),
            teacher.teacher(states), jnp.float32(7),
            PolicyHeadOptions(of_sampler, "fused"),
        )  # fmt: skip
    assert [call.verb for call in traced.calls] == verbs
    target = jaxmem.ForwardKL(teacher.teacher(states))
    want = student.divergence(hidden, target, temperature=of_divergence)
    np.testing.assert_allclose(told["divergence"], want, rtol=1e-5)
    stats = student.token_stats(hidden, labels)
    np.testing.assert_allclose(told["ce"], -stats.logprob, rtol=1e-6)


# -------------------------------------------------------------------- runs


TOLD = "reward", "accuracy", "degenerate", "unrewarded"


# The test of the gradient above covers a loss without rewards, and the next test the
# metrics.
@pytest.mark.slow
def test_weight_of_0_records_rewards_learns_nothing():
    """Samples are shown without rewards, too."""
    pathlib.Path("pure.gin").write_text(SUMS.replace('task.reward = "prefix"', ""))
    runs.train("pure.gin", "run.out_dir=pure")
    shown = pathlib.Path("pure/samples.jsonl").read_text().splitlines()
    assert len(shown) == 8 and json.loads(shown[0])["reward"] is None
    page = pathlib.Path("pure/report.html").read_text()
    assert "Samples of the last rollout" in page and ">Reward<" not in page
    train("distill.reward_weight=0.0")
    wanted, made = steps("pure"), steps()
    assert all(step[name] is None for step in wanted for name in TOLD)
    assert all(0 <= step[name] <= 1 for step in made for name in TOLD)
    assert [s | dict.fromkeys(TOLD) for s in made] == wanted and len(made) == 6
    one, other = (
        pathlib.Path(run, "model", "model.safetensors").read_bytes()
        for run in ("run", "pure")
    )
    assert one == other


OWN = """
def vowels(completions, extra, **others):
    return [sum(c in "aeiou" for c in text) + n for text, n in zip(completions, extra)]

def short(completions, **others):
    return [-len(text.replace(" ", "")) for text in completions]
"""
ROWS = [{"prompt": f"{a}{b}", "extra": 0.5} for a in "abcdef" for b in "xywuv"]
OF_A_FILE = (
    "task.source=prompts.jsonl", "task.reward=('own.py:vowels', 'own.py:short')",
    "task.reward_weights=(1.0, 0.1)", "task.max_prompt_tokens=8", "task.held_out=0.2",
    "sampling.temperature=0.8", "eval.every=3",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("one_program")
def test_rewards_are_learned_and_resume_bitwise(monkeypatch):
    pathlib.Path("own.py").write_text(OWN)
    write("prompts.jsonl", ROWS)
    gin = "\n".join(x for x in SUMS.split("\n") if not x.startswith("task."))
    pathlib.Path("distill.gin").write_text(gin)
    result, _ = train("distill.reward_weight=0.5", *OF_A_FILE)
    last = result.history[-1]
    assert last.reward == pytest.approx(
        last.rewards["own.py:vowels"] + 0.1 * last.rewards["own.py:short"], rel=1e-5
    )
    assert last.held_out_loss == pytest.approx(
        last.held_out_divergence - 0.5 * last.held_out_reward, rel=1e-5
    )
    summary = json.loads(pathlib.Path("run/summary.json").read_text())
    assert summary["held_out_reward"] == last.held_out_reward
    page = pathlib.Path("run/report.html").read_text()
    assert "Reward: own.py:vowels" in page and "Samples of the last rollout" in page
    shown = pathlib.Path("run/samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, shown):
        letters = [t.strip() for t in sample["tokens"] if len(t.strip()) == 1]
        vowels = sum(letter in "aeiou" for letter in letters)
        worth = vowels + 0.5 - 0.1 * len(letters)
        assert sample["reward"] == pytest.approx(worth, abs=1e-6)
        prompt = sample["prompt"].removeprefix("<s>").replace(" ", "")
        assert prompt in {row["prompt"] for row in ROWS}
        assert len(sample["tokens"]) == len(sample["logprobs"]) <= 3
    cut = resumed(monkeypatch, "distill.reward_weight=0.5", *OF_A_FILE)
    assert cut == steps() and len(cut) == 6


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "task.reward has no effect without distill.reward_weight; set "),
        (["distill.reward_weight=-1.0"], "distill.reward_weight must be at least 0"),
        (["distill.reward_weight=0.5", "distill.completions=1"],
         "distill.completions=1 must be at least 2 for distill.reward_weight=0.5"),
        (["distill.reward_weight=0.5", "sampling.top_k=4"],
         "=0.5 needs sampling.top_k, top_p and min_p to be None: its policy"),
        (["distill.reward_weight=0.5", "mesh.data=3"],
         "which mesh.data=3 x mesh.fsdp=1 must divide; distill.max_tokens="),
        (["distill.reward_weight=0.0", "sampling.max_new_tokens=2"],
         "sampling.max_new_tokens=2 must be at least 3, the longest answer of task."),
        (["distill.reward_weight=0.5", "distill.loss_weight=0.5"],
         "distill.loss_weight=0.5 must stay 0 for distill.mode='on_policy'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(overrides, message):
    refused("distill.gin", overrides, message)


def test_weight_of_0_needs_no_advantages():
    """One completion of a prompt will do, and truncated draws."""
    overrides = ["distill.completions=1", "sampling.top_k=4"]
    config, _ = configuration.load(
        "distill.gin", ["distill.reward_weight=0.0", *overrides]
    )
    assert config.distill.reward_weight == 0 and config.sampling.truncates


@pytest.mark.parametrize("mode", ["text", "offline"])
def test_rewards_are_of_samples(mode):
    pathlib.Path("text.gin").write_text(
        "distill.teacher='llama'\nrun.job='distill'\nmodel.checkpoint='llama'\n"
    )
    with pytest.raises(ValueError, match=r"distill.reward_weight=0.0 needs distill.m"):
        configuration.load(
            "text.gin", [f"distill.mode={mode}", "distill.reward_weight=0.0"]
        )
