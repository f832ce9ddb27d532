"""Losses and advantages of one's own: trained, resumed, planned and checked."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import losses
from jaxmem.base.user_code import UserCodeError
from jaxmem.commands import cli
from jaxmem.data.documents import Batch
from jaxmem.head.maths.gradients import Sample
from jaxmem.heads.nnx import LMHead
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import advantages, pair_objective, policy_losses
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.pair_objective import PAIR_LOSSES, DpoConfig, PairLoss
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES, PolicyLoss
from jaxmem.train.jobs.policy_objective import (
    GrpoConfig,
    PolicyBatch,
    PolicyHeadOptions,
    average,
    policy_loss,
)
from jaxmem.train.metrics import PolicyMetrics
from tests.helpers import own_loss, runs
from tests.helpers.fake_devices import fake as fake, numbered as numbered
from tests.helpers.kills import kill_before

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "jobs"
GIN = """
run.job = "grpo"
run.steps = 4
run.checkpoint_every = 3
run.out_dir = "run"
run.compare_heads = False
grpo.loss = "own_loss.py:soft_clip"
grpo.advantage = "own_loss.py:ranks"
grpo.prompts = 4
grpo.group_size = 4
grpo.minibatches = 2
grpo.max_tokens_train = 32
grpo.max_tokens_forward = 64
task.digits = 1
task.answer = "sum"
task.reward = "prefix"
sampling.max_new_tokens = 3
head.chunk = 16
model.layers = 1
model.hidden = 16
model.ff = 16
model.heads = 1
model.kv_heads = 1
model.head_dim = 16
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = pathlib.Path(own_loss.__file__).read_text()
    pathlib.Path("own_loss.py").write_text(text)
    pathlib.Path("own.gin").write_text(GIN)


train = functools.partial(runs.train, "own.gin")
steps = functools.partial(runs.steps, kind=PolicyMetrics)


def written(text):
    """The file of a loss, as `grpo.loss` names its `mine`."""
    head = "import jax, jax.numpy as jnp, numpy as np\nfrom jaxmem import losses\n"
    head += "from jaxmem.train.jobs.policy_losses import PolicyLoss\n"
    head += "from jaxmem.train.jobs.pair_objective import PairLoss\n"
    pathlib.Path("mine.py").write_text(head + text + "\n")
    return "mine.py:mine"


# ----------------------------------------------------------------------- a run


@pytest.mark.full
@pytest.mark.usefixtures("one_program")
def test_own_loss_trains_and_kill_resumes_bitwise(monkeypatch):
    result, _ = train()
    assert len(result.history) == 4 and all(s.grad_norm > 0 for s in result.history)
    kill_before(4, grpo.Grpo, monkeypatch, lambda: train("run.out_dir=cut"))
    _, said = train("run.out_dir=cut")
    assert "resuming cut at step 3" in said and "has changed" not in said
    assert steps("cut") == steps("run")
    path = pathlib.Path("own_loss.py")
    path.write_text(path.read_text().replace("0.01 * entropy", "0.02 * entropy"))
    _, said = train("run.out_dir=cut", "run.steps=5")
    assert "own_loss.py has changed" in said


def test_own_loss_planned_by_command(fake, numbered, capsys):
    assert cli.main(["plan", "own.gin", "--device", "h200", "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert "gradients" in [phase["name"] for phase in phases]
    loss = written("def mine(logprob, advantages):\n    return logprob.mean()")
    assert cli.main(["plan", "own.gin", f"grpo.loss={loss}", "--device", "h200"]) == 2
    said = capsys.readouterr().err
    assert "grpo.loss='mine.py:mine' must return a loss per token" in said


def test_config_loads_without_own_loss():
    config, _ = configuration.load("own.gin", ["grpo.loss=absent.py:mine"])
    assert jobs.job_of(config).config.grpo.loss == "absent.py:mine"
    with pytest.raises(UserCodeError, match="grpo.loss: cannot import absent.py"):
        jobs.job_of(config).build()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.loss=own_loss.py:reinforce", "grpo.clip_low=0.1"],
         "grpo.clip_low must be None for loss='own_loss.py:reinforce', got 0.1"),
        (["grpo.clip_low=1.5"], "grpo.clip_low must be in [0, 1], or None, got 1.5"),
        (["grpo.max_tokens_forward=48", "mesh.data=2"],
         "grpo.max_tokens_forward=48 holds 3 rows of 16 tokens, which mesh.data=2"),
    ],
)  # fmt: skip
def test_own_loss_refuses_settings(overrides, message):
    config, _ = configuration.load("own.gin", overrides)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jobs.job_of(config).build()


# ------------------------------------------------------------------ policy's losses


def test_policy_loss_of_function_averages_tokens():
    config = GrpoConfig(loss="own_loss.py:reinforce")
    made = average(config, [1, 4], 8)
    np.testing.assert_array_equal(made.weights, [1, 1])
    assert made.normalizer == 5 and config.clips is None
    assert config.advantage_name == "grpo" and not config.has_reference
    ratios = jnp.array([-1.0, 1.0])
    assert not config.policy_loss.clipped(ratios, ratios, config.clips).any()


def test_policy_loss_row_facts():
    config = GrpoConfig(loss="own_loss.py:soft_clip", clip_high=0.3)
    made = average(config, [1, 4], 8)
    np.testing.assert_allclose(made.weights, [1, 0.25])
    assert config.clips == (0.2, 0.3) and config.advantage_name == "rloo"
    assert config.differentiates_entropy and not config.has_sequence_ratio
    loss, log_ratio = config.policy_loss, jnp.array([1.0, 1.0, -1.0, -1.0])
    clipped = loss.clipped(log_ratio, jnp.array([1.0, -1, 1, -1]), config.clips)
    np.testing.assert_array_equal(clipped, [1, 0, 0, 1])


def test_policy_loss_gets_named_arrays():
    loss = written(
        "def mine(advantages, ref_logprob, sequence_log_ratio, other=2.0):\n"
        "    return other * advantages * ref_logprob + sequence_log_ratio"
    )
    config = GrpoConfig(loss=loss)
    assert config.has_reference and config.has_sequence_ratio
    assert not config.differentiates_entropy
    arrays = {
        name: jnp.full(2, float(i)) for i, name in enumerate(policy_losses.ARRAYS)
    }
    out = config.policy_loss.of_tokens(arrays, config.clips)
    of = {name: i for i, name in enumerate(policy_losses.ARRAYS)}
    want = 2 * of["advantages"] * of["ref_logprob"] + of["sequence_log_ratio"]
    np.testing.assert_array_equal(out, [want, want])


def own_rows():
    """Labels, log-probabilities of an older policy, advantages and weights."""
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 14, (2, 8)).astype(np.int32)
    old, advantages, weights = rng.normal(size=(3, 2, 8)).astype("f4")
    batch = Batch(labels, labels, labels, labels)
    return PolicyBatch(batch, old - 2, advantages, np.abs(weights), None)


@functools.cache
def own_gradients(call):
    """((loss, metrics), gradients) of the loss of own_loss.py."""
    definition, head = nnx.split(LMHead(8, 14, rngs=nnx.Rngs(0)))
    hidden = np.random.default_rng(1).normal(size=(2, 8, 8)).astype("f4")
    config = GrpoConfig(loss="own_loss.py:soft_clip")

    @jax.jit
    def gradients(head, hidden, key):
        def loss(head, hidden):
            module = nnx.merge(definition, head)
            of_key = dataclasses.replace(call, key=key) if call.sample else call
            return policy_loss(module, hidden, own_rows(), 7.0, config, of_key)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(head, hidden)

    return gradients(head, hidden, jax.random.key(0))


ONE_PASS = PolicyHeadOptions(0.7, "fused")
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


def test_own_loss_in_one_pass_is_the_materialised_one():
    one_pass, rows = own_gradients(ONE_PASS), own_rows()
    jax.tree.map(close, one_pass, own_gradients(PolicyHeadOptions(0.7, "materialised")))
    told = one_pass[0][1]
    ratio = np.exp(told["logprob"] - rows.old_logprob)
    clipped = np.where(rows.advantages > 0, ratio > 1.4, ratio < 0.8)
    np.testing.assert_array_equal(
        told["clip_fraction"], clipped & (rows.batch.labels >= 0)
    )


@pytest.mark.full
def test_own_loss_with_sampled_gradients_is_the_same():
    sampled = own_gradients(PolicyHeadOptions(0.7, "fused", sample=Sample(4)))
    close(sampled[0][0], own_gradients(ONE_PASS)[0][0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sampled[1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine = 3", "grpo.loss: mine.py:mine must be a PolicyLoss or a function, got"),
        ("def mine(logprob, foo): return logprob",
         "grpo.loss='mine.py:mine': mine takes 'foo', which must be one of logprob"),
        ("def mine(logprob, /): return logprob", "mine takes 'logprob', which must"),
        ("mine = PolicyLoss(losses.sapo, clips=True)",
         "cannot import mine.py (line 5): ValueError: PolicyLoss.clips=True needs a"),
        ("mine = PolicyLoss(losses.sapo, 'words')",
         "PolicyLoss.average must be one of ('sequences', 'tokens', 'slots'), got"),
        ("mine = PolicyLoss(losses.sapo, dual_clip=3.0)",
         "PolicyLoss.dual_clip=3.0 needs a surrogate with a parameter dual_clip"),
        ("def mine(logprob):\n    return logprob + 'a'",
         "grpo.loss='mine.py:mine' raised (line 6) TypeError: "),
        ("def mine(logprob): return logprob.sum()",
         "grpo.loss='mine.py:mine' must return a loss per token, floats of shape (24"),
        ("def mine(logprob): return (logprob, {})",
         "must return a loss per token, floats of shape (24,) for arguments of that"),
        ("def mine(logprob): return logprob - logprob.mean()",
         "grpo.loss='mine.py:mine' must compute a token's loss from that token's values"
         " only, but it combines the tokens of a chunk, by reduce_sum"),
        ("def mine(logprob): return logprob / logprob.size",
         "but it depends on the number of tokens in a chunk, by a number"),
        ("def mine(logprob): return logprob * jnp.arange(len(logprob))",
         "but it depends on a token's position in its chunk, by"),
        ("def mine(logprob): return logprob * jnp.ones(24)",
         "grpo.loss='mine.py:mine' must take any number of tokens, but takes 24 only"),
    ],
)  # fmt: skip
def test_policy_loss_refused(text, message):
    with pytest.raises(UserCodeError, match=re.escape(message)) as raised:
        policy_losses.load(written(text))
    assert "\n" not in str(raised.value) and "grpo.loss" in str(raised.value)


def test_pages_list_losses_and_advantages():
    page = (DOCS / "grpo.md").read_text()
    assert re.findall(r'^\| "(\w+)" \|', page, re.M) == [
        *POLICY_LOSSES, *advantages.ADVANTAGES,
    ]  # fmt: skip
    page = (DOCS / "preferences.md").read_text()
    assert re.findall(r'^\| "(\w+)" \|', page, re.M) == [*PAIR_LOSSES]


def test_describe_keys_lists_rows():
    for section, field, rows in (
        ("grpo", "loss", POLICY_LOSSES),
        ("grpo", "advantage", advantages.ADVANTAGES),
        ("dpo", "loss", PAIR_LOSSES),
    ):
        lines = [*configuration.describe_keys(section)]
        (line,) = (x for x in lines if x.startswith(f"{section}.{field} = "))
        listed = ", ".join(map(repr, rows))
        assert f'one of {listed}, or "file.py:name" or "package.module:name"' in line


# --------------------------------------------------------------------- advantages

REWARDS = np.array([[1, 0, 0, 1], [0.5, 2, np.nan, 0.5], [np.nan] * 4], np.float32)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_leave_out_unrewarded(name):
    got, live = advantages.load(name)(REWARDS), ~np.isnan(REWARDS)
    assert got.dtype == np.float32 and not got[~live].any() and got[live].any()
    want = {
        "grpo": losses.grpo_advantages,
        "dr_grpo": functools.partial(losses.grpo_advantages, normalize_std=False),
        "rloo": losses.rloo_advantages,
        "reinforce_plus_plus": losses.reinforce_plus_plus_advantages,
        "batch_std": losses.batch_std_advantages,
    }[name]
    wanted = jax.jit(want)(REWARDS, where=live)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_advantage_name_defaults_to_the_loss():
    assert GrpoConfig(loss="dr_grpo").advantage_name == "dr_grpo"
    assert GrpoConfig(loss="dapo").advantage_name == "grpo"
    assert GrpoConfig(loss="dr_grpo", advantage="rloo").advantage_name == "rloo"
    message = "GrpoConfig.advantage must be one of 'grpo', 'dr_grpo', 'rloo', 'reinf"
    with pytest.raises(ValueError, match=message):
        GrpoConfig(advantage="gae")


def test_own_advantages_leave_out_unrewarded():
    got = advantages.load("own_loss.py:ranks")(REWARDS)
    np.testing.assert_allclose(
        got, np.array([[2, -2, -2, 2], [-1, 2, 0, -1], [0] * 4]) / 3, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rewards[0]", "must return an advantage for each of the rewards, number"
         "s of shape (3, 4), got shape (4,)"),
        ("return None", "numbers of shape (3, 4), got None"),
        ("return rewards * np.inf", "finite numbers of float32, got inf for sample 0 of"
         " prompt 0 of the step, whose rewards are [1.0, 0.0, 0.0, 1.0]"),
        ("return 1 / len(rewards[9])", "raised (line 6) IndexError: index 9 is out"),
    ],
)  # fmt: skip
def test_own_advantages_refused(body, message):
    compare = advantages.load(written(f"def mine(rewards):\n    {body}"))
    message = f"grpo.advantage='mine.py:mine' .*{re.escape(message)}"
    with pytest.raises(UserCodeError, match=message), np.errstate(all="ignore"):
        compare(REWARDS)


def test_own_advantages_keep_rewards():
    compare = advantages.load(written("def mine(rewards):\n    rewards[:] = 7\n    ret"
                                      "urn rewards"))  # fmt: skip
    rewards = REWARDS.copy()
    got = compare(rewards)
    np.testing.assert_array_equal(rewards, REWARDS)
    np.testing.assert_array_equal(got, np.where(np.isnan(REWARDS), 0, 7))


# -------------------------------------------------------------------------- pairs


def test_own_pair_loss_oracle():
    rng = np.random.default_rng(0)
    lp, reference = rng.normal(size=(2, 5, 2)).astype("f4") * 4
    config = DpoConfig(loss="own_loss.py:hinge", label_smoothing=0.1)
    h = (lp - reference) @ [1, -1]
    want = 0.9 * np.maximum(1 - 0.1 * h, 0) + 0.1 * np.maximum(1 + 0.1 * h, 0)
    made, told = pair_objective.pair_losses(config, lp, reference)
    np.testing.assert_allclose(made, want, rtol=1e-5)
    np.testing.assert_allclose(told["margin"], 0.1 * h, rtol=1e-4, atol=1e-6)
    assert config.pair_loss == PairLoss(config.pair_loss.function)
    assert config.pair_loss.has_reference and config.numbers == {
        "beta": 0.1, "gamma": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine = 'a'", "dpo.loss: mine.py:mine must be a PairLoss or a function, got"),
        ("def mine(chosen, lengths): return chosen",
         "dpo.loss='mine.py:mine': mine takes 'lengths', which must be one of chosen"),
        ("def mine(chosen): return chosen.mean()",
         "dpo.loss='mine.py:mine' must return a loss per pair, floats of shape (24,)"),
        ("def mine(chosen): return chosen - chosen.mean()",
         "must compute a pair's loss from that pair's values only, but it combines the"
         " pairs of a micro-batch, by reduce_sum"),
    ],
)  # fmt: skip
def test_pair_loss_refused(text, message):
    with pytest.raises(UserCodeError, match=re.escape(message)):
        pair_objective.load(written(text))


@pytest.mark.parametrize(
    ("text", "numbers", "message"),
    [
        ("def mine(chosen): return chosen", dict(beta=0.2),
         "DpoConfig.beta must be None for loss='mine.py:mine', which has no beta, got"),
        ("def mine(chosen, gamma): return chosen * gamma", {},
         "DpoConfig.gamma must be a number for loss='mine.py:mine', which has no defa"),
    ],
)  # fmt: skip
def test_own_pair_loss_refuses_numbers(text, numbers, message):
    with pytest.raises(ValueError, match=message):
        DpoConfig(loss=written(text), **numbers).check_loss()


def test_pair_losses_default_numbers():
    numbers = {name: DpoConfig(loss=name).numbers for name in PAIR_LOSSES}
    assert numbers.pop("simpo") == {"beta": 2.0, "gamma": 0.5}
    assert all(x == {"beta": 0.1, "gamma": None} for x in numbers.values())
    reads = {name for name, loss in PAIR_LOSSES.items() if loss.has_reference}
    assert reads == {"sigmoid", "ipo", "ipo_mean"}
    with pytest.raises(ValueError, match="DpoConfig.gamma must be None for loss='sig"):
        DpoConfig(gamma=0.5)
    assert PolicyLoss(losses.grpo).has_reference
    assert not POLICY_LOSSES["grpo"].has_reference
