"""Bad arguments of packing, losses and token_loss: named, at once, and in one line."""

import inspect

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import losses, packing
from tests.helpers import nasty
from tests.helpers.described import described

pytestmark = pytest.mark.usefixtures("quick_compilation")


def deep(levels):
    made = []
    for _ in range(levels):
        made = [made]
    return made


class Opaque:
    """No array, and long to print."""

    def __repr__(self):
        return "a line\n" * 1000


# No number among them asks for much memory where it is allowed.
BAD = [
    None, True, "x", b"x", "x" * 10_000, 0, -1, 1, 3, 1.5, -0.5, 1e-300, 1e39, 1e300,
    float("nan"), float("inf"), 2**31, -(2**63), 10**30, 10**400, 10**5000, 1j,
    [], [1], [[1, 2], [3]], [10**30], [None], [[]], ["a"], (1, 2, 3), {"a": 1}, {1},
    deep(70), deep(5000), range(3), iter([1]), len, float, Opaque(),
    np.zeros(7), np.zeros((2, 2, 2)), np.zeros((0, 3)), np.float32(0.5), np.int8(1),
    np.array(["a"]), np.array("2020", "M8[Y]"), np.array([None]), np.zeros(3, "i4,f4"),
    np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]), np.zeros(3, np.longdouble),
    np.full(3, np.nan), np.full(3, 2**40), np.zeros(3, bool), np.zeros(3, complex),
    jax.ShapeDtypeStruct((3,), jnp.float32),
]  # fmt: skip


def of_jax():
    """Made late, so that collecting the tests starts no device."""
    return [
        jnp.zeros(7), jnp.zeros(3, jnp.float8_e4m3fn), jnp.zeros(3, jnp.int4),
        jnp.zeros(3, complex), jax.random.key(0), jnp.zeros(3, bool), jnp.int32(1),
    ]  # fmt: skip


@st.composite
def calls(draw, table):
    """(verb, good arguments but for one, what an error must name).

    Shapes that disagree may be said of the other argument.
    """
    verb, good = draw(st.sampled_from(sorted(table.items())))
    name = draw(st.sampled_from(sorted(good)))
    bad = draw(st.integers(0, len(BAD) + 6))
    value = BAD[bad] if bad < len(BAD) else of_jax()[bad - len(BAD)]
    shaped = isinstance(value, (int, float, list, tuple, range, np.ndarray, np.generic))
    named = list(good) if shaped or isinstance(value, jax.Array) else [name]
    return verb, good | {name: value}, named


def public(module):
    return {
        name
        for name, thing in vars(module).items()
        if inspect.isfunction(thing)
        and not name.startswith("_")
        and thing.__module__.startswith("jaxmem")
        and thing.__doc__
        and ">>>" in thing.__doc__
    }


# ---------------------------------------------------------------------- packing

PACKED = packing.pack([2, 3], 4)
PACKING = {
    "pack": dict(
        lengths=[2, 3], max_tokens=8, row_lengths=(4, 8), ranks=2, quadratic=0.1
    ),
    "buckets": dict(max_tokens=8, count=2),
    "first_fit_decreasing": dict(lengths=[2, 3], capacity=8),
    "karmarkar_karp": dict(costs=[1.0, 2.0, 3.0], k=2),
    "support_to_csr": dict(
        support_ids=[[1, -1], [2, 3], [4, 5]], where=[True, True, False], capacity=9
    ),
    "csr_to_support": dict(ids=[1, 2, 3], offsets=[0, 1, 3], max_ids=2),
    "take_supports": dict(ids=[1, 2, 3], offsets=[0, 1, 3], tokens=[1, 0], capacity=9),
    "place": dict(values=[[1, 2], [3, 4, 5]], fill=0),
    "unpack": dict(results=[np.zeros((1, 4)), np.zeros((1, 4))]),
}


@nasty.profile(300)
@hypothesis.given(calls(PACKING))
def test_packing(call):
    verb, arguments, named = call
    function = getattr(packing, verb, None) or getattr(PACKED, verb)
    nasty.outcome(lambda: function(**arguments), *named)


# ----------------------------------------------------------------------- losses

THREE, IDS = np.array([-1.0, -2.0, -0.5], np.float32), np.array([1, 1, 2])
CLIPS = dict(clip_low=0.2, clip_high=0.2)
RATIO = dict(logprob=THREE, old_logprob=THREE, advantages=THREE)
PAIRS = dict.fromkeys(("chosen", "rejected", "ref_chosen", "ref_rejected"), THREE)
WHERE = dict(where=np.array([True, True, False]))
GROUPS = dict(rewards=THREE, group_ids=IDS, num_groups=3) | WHERE
LOSSES = {
    "cross_entropy": dict(logprob=THREE),
    "sft": dict(logprob=THREE, weights=THREE),
    "z_loss": dict(logsumexp=THREE, coefficient=0.1),
    "label_smoothing": dict(logprob=THREE, mean_logprob=THREE, smoothing=0.1),
    "mean_logit": dict(
        hidden=np.zeros((3, 2), np.float32), W=np.zeros((5, 2), np.float32),
        temperature=1.0, softcap=None, bias=np.zeros(5, np.float32), vocab_size=4,
        layout="vd", **WHERE,
    ),
    "dpo": PAIRS | dict(beta=0.1),
    "ipo": PAIRS | dict(beta=0.1),
    "simpo": dict(chosen=THREE, rejected=THREE, beta=2.0, gamma=0.5),
    "orpo": dict(chosen=THREE, rejected=THREE, beta=0.1),
    "policy_gradient": dict(logprob=THREE, advantages=THREE),
    "ppo_clip": RATIO | CLIPS | dict(dual_clip=3.0),
    "grpo": RATIO | CLIPS | dict(ref_logprob=THREE, beta=0.04),
    "dr_grpo": RATIO | CLIPS,
    "dapo": RATIO | CLIPS,
    "gspo": dict(logprob=THREE, sequence_log_ratio=THREE, advantages=THREE) | CLIPS,
    "cispo": RATIO | CLIPS,
    "sapo": RATIO | dict(temperature_pos=1.0, temperature_neg=1.05),
    "entropy_bonus": dict(entropy=THREE, coefficient=0.1),
    "kl_k1": dict(logprob=THREE, ref_logprob=THREE),
    "kl_k2": dict(logprob=THREE, ref_logprob=THREE),
    "kl_k3": dict(logprob=THREE, ref_logprob=THREE),
    "kl_low_variance": dict(logprob=THREE, ref_logprob=THREE, limit=10.0),
    "truncated_importance_weights": dict(
        logprob=THREE, rollout_logprob=THREE, cap=2.0
    ),
    "masked_importance_weights": dict(logprob=THREE, rollout_logprob=THREE, cap=2.0),
    "icepop_weights": dict(logprob=THREE, rollout_logprob=THREE, low=0.5, high=5.0),
    "sequence_mask_weights": dict(
        logprob=THREE, rollout_logprob=THREE, segment_ids=IDS, low=0.9, high=1.1,
        statistic="every_token", **WHERE,
    ),
    "sequence_sum": dict(values=THREE, segment_ids=IDS, num_segments=3) | WHERE,
    "sequence_log_ratio": dict(logprob=THREE, old_logprob=THREE, segment_ids=IDS)
    | WHERE,
    "sequence_mean_weights": dict(segment_ids=IDS, num_sequences=2) | WHERE,
    "grpo_advantages": GROUPS | dict(normalize_std=True, epsilon=1e-6),
    "rloo_advantages": GROUPS,
    "batch_std_advantages": GROUPS | dict(epsilon=1e-6),
    "reinforce_plus_plus_advantages": dict(rewards=THREE, epsilon=1e-6) | WHERE,
    "multi_token_labels": dict(labels=IDS, heads=2, segment_ids=IDS),
}  # fmt: skip


@nasty.profile(400)
@hypothesis.given(calls(LOSSES))
def test_losses(call):
    verb, arguments, named = call
    nasty.outcome(lambda: loss_of(verb)(**arguments), *named)


def loss_of(verb):
    function = getattr(losses, verb)
    return described(function) if verb == "mean_logit" else function


def test_tables_cover_all_public_arguments():
    assert public(losses) == set(LOSSES)
    assert public(packing) == set(PACKING) - {"place", "unpack"}
    for table, module in ((LOSSES, losses), (PACKING, packing)):
        for name, good in table.items():
            function = getattr(module, name, None) or getattr(packing.Packing, name)
            assert {*good, "self"} >= {*inspect.signature(function).parameters}
            if module is losses:
                assert np.isfinite(loss_of(name)(**good)).all()


# ------------------------------------------------------------------- token_loss


def objective(stats, advantage):
    return -advantage * stats.logprob


TOKEN_LOSS = dict(
    loss_fn=objective, hidden=np.ones((3, 4), np.float32),
    W=np.ones((8, 4), np.float32), labels=np.array([0, 1, 7]), per_token=THREE,
    chunk=16, normalizer=3, temperature=1.0, softcap=30.0,
    bias=np.zeros(8, np.float32), vocab_size=8, layout="vd",
    axis_name=None, implementation="xla", **WHERE,
)  # fmt: skip
NOT_LOSSES = [
    lambda stats: stats.logprob, lambda: 0, int, lambda stats, a: None,
    lambda stats, a: stats.logprob[:1], lambda stats, a: (stats.logprob, {"a": "b"}),
    lambda stats, a: (stats.logprob, {1: a}), lambda stats, a: stats,
    jax.jit(lambda stats: stats.logprob), lambda *, stats: stats, dict, str,
]  # fmt: skip


def token_loss(per_token, loss_fn, hidden, W, labels, **options):
    call = described(jaxmem.token_loss)
    return call(loss_fn, hidden, W, labels, per_token, **options)


@pytest.mark.slow
@nasty.profile(150)
@hypothesis.given(calls({"token_loss": TOKEN_LOSS}))
def test_token_loss(call):
    _, arguments, named = call
    nasty.outcome(lambda: token_loss(**arguments), *named)


@pytest.mark.parametrize("loss_fn", NOT_LOSSES)
def test_token_loss_of_what_is_no_loss(loss_fn):
    loaded, _ = nasty.outcome(
        lambda: token_loss(**TOKEN_LOSS | {"loss_fn": loss_fn}), "loss_fn"
    )
    assert not loaded


def test_errors_raised_by_a_loss_stay():
    def broken(stats, advantage):
        return stats.logprob + "a"

    with pytest.raises(TypeError) as raised:
        token_loss(**TOKEN_LOSS | {"loss_fn": broken})
    assert "loss_fn must" not in str(raised.value)
    assert any("raised by loss_fn" in note for note in raised.value.__notes__)
