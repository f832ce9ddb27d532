"""Meshes with explicit axes: every case beside its twin with automatic axes."""

import functools
import math
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
import jaxmem.heads.linen
import jaxmem.heads.nnx
from jaxmem import losses, packing
from tests.helpers import targets
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D, V, K = 8, 4, 8, 24, 3
AXES = {"data": 4, "tensor": 2}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# How each argument is sharded; what is not named is whole.
TOKENS = dict.fromkeys(("h", "y", "ids", "where", "temperature", "a"), P("data"))
SHARDINGS = {
    "tokens": TOKENS,
    "vocabulary": TOKENS | {"W": P("tensor"), "bias": P("tensor")},
    "depth": TOKENS | {"W": P(None, "tensor"), "h": P("data", None, "tensor")},
    "all": dict.fromkeys(TOKENS, P("data", "tensor"))
    | {"W": P("tensor", "data"), "bias": P("data")},
    "hidden": {"h": P(None, "data")},
    "W": {"W": P("tensor")},
    "bias": {"bias": P(("tensor", "data"))},
    "labels": {"y": P("data"), "ids": P("data")},
    "where": {"where": P("tensor", "data")},
    "temperature": {"temperature": P(None, "tensor")},
    "per_token": {"a": P("data")},
    "each its own way": {
        "h": P("data", None, "tensor"), "W": P("data"), "bias": P("tensor"),
        "y": P("tensor"), "ids": P("tensor"), "where": P("data", "tensor"),
        "temperature": P(None, "data"), "a": P("tensor"),
    },
}  # fmt: skip


@functools.cache
def problem():
    rng = np.random.default_rng(0)
    y = rng.integers(0, V, (B, T), np.int32)
    rest = rng.integers(-1, V, (B, T, K - 1), np.int32)
    return {
        "h": rng.standard_normal((B, T, D), np.float32),
        "W": rng.standard_normal((V, D), np.float32),
        "bias": rng.standard_normal(V, np.float32),
        "y": np.where(rng.random((B, T)) < 0.1, -1, y),
        "ids": np.concatenate([y[..., None], rest], -1),
        "where": rng.random((B, T)) < 0.8,
        "temperature": rng.uniform(0.5, 2, (B, T)).astype(np.float32),
        "a": rng.standard_normal((B, T), np.float32),
    }


def options(x):
    return {k: x[k] for k in ("where", "temperature")}


def head(x):
    return jaxmem.Head(x["W"], x["bias"])


def logprobs(x):
    return jaxmem.logprobs(x["h"], head(x), x["y"], 16, **options(x))


def token_stats(x):
    stats = jaxmem.token_stats(x["h"], head(x), x["y"], None, **options(x))
    return stats.logprob + stats.entropy * stats.sum_pi_squared


def entropy(x):
    frozen = jaxmem.Head(jax.lax.stop_gradient(x["W"]), x["bias"])
    return jaxmem.entropy(x["h"], frozen, None, **options(x))


def token_loss(x):
    def loss(stats, a):
        return a * stats.logprob + stats.entropy, {"entropy": stats.entropy}

    per_token = x["a"]
    return jaxmem.token_loss(
        loss, x["h"], head(x), x["y"], per_token, chunk=16, **options(x)
    )


def reverse_kl(x):
    given = x["h"], head(x), -x["h"], head(x)
    return targets.reverse_kl(*given, None, **options(x))


def forward_kl(x):
    return targets.forward_kl(x["h"], head(x), -x["h"], x["W"], None, **options(x))


def jsd(x):
    return targets.jsd(x["h"], head(x), -x["h"], x["W"], None, **options(x))


def selected_logprobs(x):
    ids = x["ids"]
    return jaxmem.selected_logprobs(x["h"], head(x), ids, None, **options(x)).sum(-1)


def support_logprobs(x):
    given = x["h"], head(x), x["y"], x["ids"]
    return jaxmem.support_logprobs(*given, **options(x))


def topk(x):
    return jaxmem.topk(x["h"], head(x), K, None, **options(x)).logprobs.sum(-1)


def topk_kl(x):
    said = jnp.full((B, T, K), -2.0)
    given = x["h"], head(x), x["ids"], said
    return targets.of_columns("jsd")(*given, None, **options(x))


def sample_ids(x):
    ids = jaxmem.sample_ids(x["h"], head(x), K, jax.random.key(0), None, **options(x))
    return ids.astype(jnp.float32).sum(-1) + x["h"].sum(-1)


def ragged_support_logprobs(x):
    csr = packing.support_to_csr(problem()["ids"])
    given = x["h"], head(x), x["y"], csr.ids
    more = options(x) | {"offsets": csr.offsets, "max_ids": K}
    return jaxmem.support_logprobs(*given, **more)


def logits(x):
    kept = {k: x[k] for k in ("where", "temperature")}
    return jaxmem.logprobs_from_logits(x["h"], x["y"] % D, None, **kept)


def stats_of_logits(x):
    return jaxmem.token_stats_from_logits(x["h"], x["y"] % D, 16).entropy


def mean_logit(x):
    return losses.mean_logit(x["h"], head(x), **options(x))


VERBS = [
    token_stats, entropy, reverse_kl, forward_kl, jsd, selected_logprobs,
    support_logprobs, ragged_support_logprobs, topk, topk_kl, sample_ids, logits,
    stats_of_logits, mean_logit,
]  # fmt: skip


def placed(kinds, shardings):
    """The problem's arrays on a mesh of axes of these kinds."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds)
    return {
        k: jax.device_put(x, NamedSharding(mesh, shardings.get(k, P())))
        for k, x in problem().items()
    }


def with_gradients(verb, place=lambda made: made):
    """A function to the verb's result, placed, and gradients of the float arrays."""

    def of_floats(floats, x):
        made = place(verb(x | floats))
        per_token = made if isinstance(made, jax.Array) else made[0]
        return jnp.sum(per_token * (x["a"] if jnp.ndim(per_token) else 1)), made

    def both(x):
        floats = {k: x[k] for k in ("h", "W", "bias")}
        (_, made), gradients = jax.value_and_grad(of_floats, has_aux=True)(floats, x)
        return made, gradients

    return both


def collectives(compiled):
    """(number of collectives of a program, their bytes)."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.+?) (?:{kinds})(?:-start)?\(", compiled.as_text())
    shapes = re.findall(r"(pred|s32|f32)\[([\d,]*)\]", " ".join(found))
    return len(found), sum(
        {"pred": 1, "s32": 4, "f32": 4}[kind]
        * math.prod(map(int, filter(None, shape.split(","))))
        for kind, shape in shapes
    )


def check(verb, shardings, kinds=(EXPLICIT, EXPLICIT), in_context=True):
    """Numbers, placement and collectives are those of automatic axes."""
    x, twin = placed(kinds, shardings), placed((AUTO, AUTO), shardings)
    with jax.set_mesh(x["h"].sharding.mesh) if in_context else nullcontext():
        compiled = jax.jit(with_gradients(verb)).lower(x).compile()
        made, gradients = compiled(x)
    for name, gradient in gradients.items():
        assert jax.typeof(gradient) == jax.typeof(x[name])

    mesh = twin["h"].sharding.mesh
    as_there, of_gradients = jax.tree.map(
        lambda y: NamedSharding(mesh, y.sharding.spec), (made, gradients)
    )
    compiled_twin = (
        jax.jit(
            with_gradients(
                verb, lambda made: jax.lax.with_sharding_constraint(made, as_there)
            ),
            out_shardings=(as_there, of_gradients),
        )
        .lower(twin)
        .compile()
    )
    want = jax.tree.leaves(compiled_twin(twin))
    for got, like in zip(jax.tree.leaves((made, gradients)), want, strict=True):
        np.testing.assert_allclose(got, like, rtol=1e-5, atol=1e-5)
    count, size = collectives(compiled)
    most, largest = collectives(compiled_twin)
    assert count <= most and size <= largest, ((count, size), (most, largest))
    return made


def check_types(verb, shardings, kinds=(EXPLICIT, EXPLICIT)):
    """The types of the verb's result; asserts that the derivative can be traced."""
    x = placed(kinds, shardings)
    seen = []
    with jax.set_mesh(x["h"].sharding.mesh):
        jax.eval_shape(
            lambda x: seen.append(jax.tree.map(jax.typeof, with_gradients(verb)(x))), x
        )
    ((made, gradients),) = seen
    for name, gradient in gradients.items():
        assert gradient == jax.typeof(x[name])
    return made


TOGETHER = ["each its own way", "vocabulary", "depth", "all"]  # tests below: the last 3


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_whatever_is_sharded(name):
    check(token_loss, SHARDINGS[name])


ALONE = [name for name in SHARDINGS if name not in TOGETHER[1:]]
OF_KL = ["hidden", "W", "bias", "where", "temperature"]


@pytest.mark.parametrize(
    "verb, name", [(token_loss, x) for x in ALONE] + [(reverse_kl, x) for x in OF_KL]
)
def test_one_argument_alone_is_sharded(verb, name):
    check_types(verb, SHARDINGS[name])


@pytest.mark.full
@pytest.mark.every_function
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "name, spec",
    {
        "all": P("data", "tensor"),
        "hidden": P(None, "data"),
        "each its own way": P("tensor", None),  # as labels
    }.items(),
)
def test_results_are_sharded_as_tokens_are(verb, name, spec):
    of_hidden = entropy, reverse_kl, forward_kl, jsd, mean_logit, topk, sample_ids
    if verb in of_hidden and "own" in name:
        spec = P("data", None)  # as hidden, where there are no labels
    shardings = SHARDINGS[name] | {"a": spec}
    assert check_types(verb, shardings).sharding.spec == spec


def test_labels_precede_hidden_in_sharding_an_axis():
    def spec(y, h):
        x = placed((EXPLICIT, EXPLICIT), {"y": y, "h": h, "W": P("tensor")})
        made = jax.eval_shape(lambda x: jaxmem.logprobs(x["h"], x["W"], x["y"]), x)
        return made.sharding.spec

    assert spec(P("data"), P(None, "tensor")) == P("data", "tensor")
    assert spec(P(None, "data"), P("data")) == P("data", None)
    assert spec(P(("tensor", "data")), P("data")) == P(("tensor", "data"), None)
    assert spec(P(), P(None, None, "data")) == P(None, None)


@pytest.mark.slow
def test_axes_of_both_kinds():
    check(token_loss, SHARDINGS["all"], (EXPLICIT, AUTO), in_context=False)
    check_types(token_loss, SHARDINGS["all"], (AUTO, EXPLICIT))


@pytest.mark.parametrize("compare", [check_types, slow(check)])
def test_inside_scan_remat_and_vmap(compare):
    def verb(x):
        def body(total, _):
            each = jax.vmap(lambda h, y: jaxmem.logprobs(h, x["W"], y, 16))
            return total + each(x["h"], x["y"]), None

        return jax.lax.scan(jax.checkpoint(body), 0 * x["a"], length=2)[0]

    compare(verb, SHARDINGS["vocabulary"])


@pytest.mark.slow
def test_inside_a_shard_map_that_binds_other_axes():
    x = placed((EXPLICIT, EXPLICIT), TOKENS | {"W": P("tensor")})
    h, W, y = x["h"], x["W"], x["y"]

    def total(h, W, y):
        made = jaxmem.logprobs(h, W, y, 16).sum()
        loss = jaxmem.token_loss(lambda s: s.logprob, h, W, y, normalizer=1.0)[0]
        return jax.lax.psum(made + loss, "data")

    split = jax.shard_map(
        jax.grad(total), in_specs=(P("data"), P(), P("data")), out_specs=P("data"),
        axis_names={"data"},
    )  # fmt: skip
    with jax.set_mesh(h.sharding.mesh):
        got = jax.jit(split)(h, W, y)
    want = jax.grad(lambda h: 2 * jaxmem.logprobs(h, *numpy("W", "y"), 16).sum())
    np.testing.assert_allclose(got, want(*numpy("h")), rtol=1e-5, atol=1e-5)


def numpy(*names):
    return [jnp.asarray(problem()[name]) for name in names]


@pytest.mark.slow
def test_outside_of_jit():
    x = placed((EXPLICIT, EXPLICIT), SHARDINGS["vocabulary"])
    with jax.set_mesh(x["h"].sharding.mesh):
        got = jaxmem.logprobs(x["h"], x["W"], x["y"], 16)
        with pytest.raises(ValueError, match=f"labels must be below .*={V}, got {V}"):
            jaxmem.logprobs(x["h"], x["W"], 0 * x["y"] + V)
        of_numpy = jaxmem.logprobs(*(problem()[k] for k in ("h", "W", "y")), 16)
    for made in (got, of_numpy):
        np.testing.assert_allclose(
            made, jaxmem.logprobs(*numpy("h", "W", "y"), 16), rtol=1e-5, atol=1e-5
        )
    assert jax.typeof(got).sharding.spec == P("data", None)


@pytest.mark.full
def test_gradients_left_to_be_summed():
    """A `reduced` operand has a gradient of which each device keeps a part."""
    x = placed((EXPLICIT, EXPLICIT), TOKENS)

    def gradient(h, W, y):
        W = jax.sharding.reshard(W, P(reduced={"data"}))
        made = jax.grad(lambda W: jaxmem.logprobs(h, W, y, 16).sum())(W)
        assert jax.typeof(made).sharding.spec.unreduced == {"data"}
        return jax.sharding.reshard(made, P())

    with jax.set_mesh(x["h"].sharding.mesh):
        got = jax.jit(gradient)(x["h"], x["W"], x["y"])
    h, W, y = numpy("h", "W", "y")
    want = jax.grad(lambda W: jaxmem.logprobs(h, W, y, 16).sum())(W)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------ what loss_fn closes over


def closing(beta):
    """A loss that uses beta in the ways that it may."""
    inner = jax.jit(lambda x: jnp.where(x < -beta, x * beta, jnp.clip(x, -1, beta)))
    return lambda stats, a: inner(stats.logprob) * a + beta * stats.entropy


def relu(beta, stats):
    return jax.nn.relu(beta + stats.logprob)


def branch(beta, stats):
    return jax.lax.cond(beta > 0, lambda p: p * beta, jnp.exp, stats.logprob)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_loss_functions_may_close_over_arrays(kind):
    x = placed((kind, kind), SHARDINGS["vocabulary"])
    given = [x[k] for k in ("h", "W", "y", "a")]

    def gradient(h, W, y, a, beta):
        return jax.grad(lambda h: jaxmem.token_loss(closing(beta), h, W, y, a)[0])(h)

    with jax.set_mesh(x["h"].sharding.mesh):
        half = jnp.float32(0.5)
        traced = jax.jit(gradient)(*given, half)
        jax.eval_shape(functools.partial(gradient, beta=half), *given)
    want = gradient(*numpy("h", "W", "y", "a"), 0.5)
    np.testing.assert_allclose(traced, want, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("loss_fn", [slow(relu), branch])
def test_loss_closure_that_would_need_types(loss_fn):
    x = placed((EXPLICIT, EXPLICIT), TOKENS)

    def total(loss_fn):
        return jaxmem.token_loss(loss_fn, x["h"], x["W"], x["y"])[0]

    with jax.set_mesh(x["h"].sharding.mesh):
        beta = jnp.float32(0.5)
        with pytest.raises(NotImplementedError, match="loss_fn closes over.*Partial"):
            total(functools.partial(loss_fn, beta))
        got = total(jax.tree_util.Partial(loss_fn, beta))
    h, W, y = numpy("h", "W", "y")
    want = jaxmem.token_loss(functools.partial(loss_fn, 0.5), h, W, y)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_loss_closure_over_sharded_table():
    x = placed((EXPLICIT, EXPLICIT), TOKENS | {"bias": P("data")})
    with jax.set_mesh(x["h"].sharding.mesh):
        with pytest.raises(NotImplementedError, match="loss_fn closes over.*Partial"):
            jaxmem.token_loss(
                lambda stats, ids: stats.logprob * x["bias"][ids[:, 0]],
                x["h"], x["W"], x["y"], x["ids"],
            )  # fmt: skip


# -------------------------------------------------------------------- heads and losses


def nnx_head(x):
    head = jaxmem.heads.nnx.LMHead(D, V, rngs=nnx.Rngs(0), softcap=9.0)
    head.kernel[...], head.bias[...] = x["W"].T, x["bias"]
    return head, lambda method, *args: getattr(head, method)(*args)


def linen_head(x):
    head = jaxmem.heads.linen.LMHead(V, softcap=9.0)
    variables = {"params": {"kernel": x["W"].T, "bias": x["bias"]}}
    return head, lambda method, *args: head.apply(variables, *args, method=method)


def loss_and_logits(make):
    def verb(x):
        call = make(x)[1]
        loss = call("loss", x["h"], x["y"], x["where"])
        z = call("__call__", x["h"])
        return loss + jnp.sum(z**2), {"z": z}

    return verb


@pytest.mark.parametrize("make", [nnx_head, linen_head])
@pytest.mark.parametrize(
    "name, spec",
    {"vocabulary": ("data", None, "tensor"), "all": ("data", "tensor", None)}.items(),
)
def test_types_of_heads(make, name, spec):
    made = check_types(loss_and_logits(make), SHARDINGS[name])
    assert made[1]["z"].sharding.spec == P(*spec)


@pytest.mark.slow
def test_nnx_jit():
    x = placed((EXPLICIT, EXPLICIT), SHARDINGS["vocabulary"])
    mesh = x["h"].sharding.mesh
    with jax.set_mesh(mesh):
        head = jaxmem.heads.nnx.LMHead(
            D, V, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "tensor")}
        )

        @nnx.jit
        def gradient(head, h, y):
            return nnx.grad(lambda head: head.loss(h, y))(head)

        got = gradient(head, x["h"], x["y"])
        kernel = jax.device_get(head.kernel[...])
    assert jax.typeof(got.kernel[...]).sharding.spec == P(None, "tensor")
    h, y = numpy("h", "y")
    want = jax.grad(lambda k: -jaxmem.logprobs(h, k, y).sum() / (y >= 0).sum())
    np.testing.assert_allclose(got.kernel[...], want(kernel), rtol=1e-4, atol=1e-6)


def of_sequences(x):
    lp, ids, where = x["a"], x["ids"][..., 0] % 3, x["where"]
    return {
        "sum": losses.sequence_sum(lp, ids, num_segments=3, where=where),
        "ratio": losses.sequence_log_ratio(lp, 2 * lp, ids, where=where),
        "masked": losses.sequence_mask_weights(
            lp, 1.001 * lp, ids, low=0.5, high=2.0, where=where
        ),
        "weights": losses.sequence_mean_weights(ids, where=where),
        "grpo": losses.grpo_advantages(lp),
        "rloo": losses.rloo_advantages(lp, ids, num_groups=3),
        "batch_std": losses.batch_std_advantages(lp, ids, num_groups=3),
        "reinforce_plus_plus": losses.reinforce_plus_plus_advantages(lp),
        "token": losses.grpo(lp, 2 * lp, 3 * lp, lp),
        "mismatch": jaxmem.mismatch_report(lp, 2 * lp, where),
    }


@pytest.mark.full
def test_losses_of_sequences():
    x = placed((EXPLICIT, EXPLICIT), SHARDINGS["all"])
    with jax.set_mesh(x["h"].sharding.mesh):
        got = jax.jit(of_sequences)(x)
    want = jax.jit(of_sequences)(problem())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert got.pop("sum").sharding.spec == P("data", None)
    assert not any(x.sharding.spec for x in got.pop("mismatch"))
    assert {x.sharding.spec for x in got.values()} == {P("data", "tensor")}
