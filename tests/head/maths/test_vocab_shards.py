"""axis_name: a vocabulary split over devices, inside the caller's own shard_map.

The mesh is made of fake devices. Every number is held against float64, and may be
wrong by twice what one device gets wrong, plus an epsilon.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.head.maths import vocab_shards
from tests.helpers import crossing, functions, oracle
from tests.helpers.cases import Case, full, slow
from tests.helpers.crossing import Setting, check as compare
from tests.helpers.described import described
from tests.helpers.functions import FUNCTIONS
from tests.helpers.meshes import MESHES, ByHand, collectives, jit, mesh_of
from tests.helpers.targets import of_two_heads
from tests.helpers.token_stats import FLOATS
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_close

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, D, V, CHUNK = 24, 8, 37, 8
COLUMNS = 40  # of all shards, the last ones padding


def sharded(fn, name="2x4", n_per_token=1, out=None, **options):
    """fn(h, W, *per_token, axis_name=) over global arrays; W [V, D] or logits."""
    shape, tokens, vocabulary = MESHES[name]
    return jax.shard_map(
        functools.partial(fn, axis_name=vocabulary),
        mesh=mesh_of(shape),
        in_specs=(P(tokens), P(vocabulary), *(P(tokens),) * n_per_token),
        out_specs=P(tokens) if out is None else out,
        **options,
    )


@functools.cache
def problem(seed=0, columns=COLUMNS, v=V):
    """One data shard of four (or of eight) has nothing but padding."""
    h, W, y = Case(N, D, columns, std=3.0).make(seed)
    y = y % v
    y[6:12], y[3] = -1, -1
    h[6:12] = np.nan
    return h, W, y


def cotangents():
    rng = np.random.default_rng(1)
    return {k: rng.standard_normal(N).astype(np.float32) for k in FLOATS}


def stats(h, W, y, axis_name=None, vocab_size=V, **options):
    got = described(jaxmem.token_stats)(
        h, W, y, CHUNK, axis_name=axis_name, vocab_size=vocab_size, **options
    )
    return {k: v for k, v in got._asdict().items() if k in FLOATS}


def with_gradients(fn, *operands):
    """Results, and gradients by (h, W) for `cotangents`; the same twice, in bits."""

    @jit
    def both(h, W, *rest):
        got, pull = jax.vjp(lambda h, W: fn(h, W, *rest), h, W)
        return got, pull({k: cotangents()[k] for k in got})

    first, again = both(*operands), both(*operands)
    for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    return first


def check(got, alone, want):
    """(outputs, (dh, dW)) of the shards, of one device, and in float64."""
    for name in got[0]:
        assert_close(got[0][name], alone[0][name], want[0][name], STATS_EPSILON, name)
    for name, a, b, c in zip(("dh", "dW"), got[1], alone[1], want[1], strict=False):
        assert_close(a, b, c, EPSILON[a.dtype.name], name)
        assert not np.isnan(a).any()


@functools.cache
def alone_and_exact():
    h, W, y = problem()
    g = cotangents()
    return with_gradients(stats, h, W, y), oracle.head(h, W, y, g, vocab_size=V)


# Functions that read W by its shards, each over a mesh; the others gather it.
OF_SHARDS = [
    name for name, function in FUNCTIONS.items()
    if not re.search("loss|logits|record|teacher", name)
]  # fmt: skip
TOKENS_TOGETHER = ("sample_ids", "support_logprobs of ragged ids")


def on_meshes():
    """Each function on a mesh, with and without jax's check of types."""
    for i, name in enumerate(OF_SHARDS):
        mesh = "1x8" if name in TOKENS_TOGETHER else [*MESHES][-1 - i % len(MESHES)]
        case = name, mesh, i % 2 == 0
        yield case if i == 0 else full(*case) if i < 8 else slow(*case)


@pytest.mark.parametrize("name, mesh, check_vma", list(on_meshes()))
def test_function_by_hand(name, mesh, check_vma):
    setting = Setting(tokens=(N,), temperature="token")
    compare(name, setting, ByHand(mesh, check_vma))


@pytest.mark.full
def test_shards_of_nothing_but_padding():
    """Masked rows are exactly 0; of eight parts of five columns, two have tokens."""
    h, W, y = problem(v=9)
    run = functools.partial(stats, vocab_size=9)
    want = oracle.head(h, W, y, cotangents(), vocab_size=9)
    got, gradients = with_gradients(sharded(run, "1x8"), h, W, y)
    check((got, gradients), with_gradients(run, h, W, y), want)
    assert not gradients[0][y < 0].any()
    assert not any(value[y < 0].any() for value in got.values())


def test_hidden_is_rounded_after_its_parts_are_summed():
    """Parts that cancel: 0.75 · 255 rounded to bfloat16 would leave -0.25."""
    h = jnp.zeros((2, 2), jnp.bfloat16)
    W = jnp.array([[0, 255], [0, 254], [0, 255], [0, 256]], jnp.bfloat16)
    split = sharded(functools.partial(described(jaxmem.logprobs), layout="vd"))
    run = jit(jax.grad(lambda h: split(h, W, jnp.zeros(2, jnp.int32)).sum()))
    assert not run(h).any()


def loss_fn(stats, advantage):
    return -advantage * stats.logprob + 0.1 * stats.entropy + stats.logsumexp**2, {
        "square": stats.sum_pi_squared,
        "right": stats.is_argmax,
    }


def mixed_loss(h, W, y, advantage, axis_name=None, **options):
    total, metrics = described(jaxmem.token_loss)(
        loss_fn, h, W, y, advantage, chunk=CHUNK, normalizer=7.0,
        axis_name=axis_name, vocab_size=V, **options,
    )  # fmt: skip
    if axis_name:  # tokens of the other data shards
        total = lax.psum(total, "data")
    return total, metrics


@pytest.mark.parametrize(
    ("check_vma", "frozen"), [full(False, False), slow(True, False), slow(True, True)]
)
def test_loss_in_one_pass(check_vma, frozen):
    h, W, y = problem()
    advantage = np.linspace(-1, 1, N, dtype=np.float32)

    def fn(h, W, *args, **options):
        W = lax.stop_gradient(W) if frozen else W
        return mixed_loss(h, W, *args, **options)

    split = sharded(fn, n_per_token=2, out=(P(), P("data")), check_vma=check_vma)
    both = [
        jit(jax.value_and_grad(f, (0, 1, 3), has_aux=True))(h, W, y, advantage)
        for f in (split, fn)
    ]
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert both[0][1][1].any() != frozen
    if check_vma:
        value = jit(split)(h, W, y, advantage)[0]  # statistics alone, no gradients
        np.testing.assert_allclose(value, both[0][0][0], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_frozen_head_and_entropy(check_vma):
    h, W, y = problem()

    def run(h, W, y, axis_name=None):
        options = {"vocab_size": V, "axis_name": axis_name, "layout": "vd"}
        fixed = lax.stop_gradient(W)
        return {
            "logprob": described(jaxmem.logprobs)(h, fixed, y, CHUNK, **options),
            "entropy": described(jaxmem.entropy)(h, W, CHUNK, where=y >= 0, **options),
        }

    results, gradients = with_gradients(sharded(run, check_vma=check_vma), h, W, y)
    g = {k: cotangents()[k] for k in results}
    want, (dh, *_) = oracle.head(h, W, y, g, vocab_size=V)
    _, (_, dW, _) = oracle.head(h, W, y, {"entropy": g["entropy"]}, vocab_size=V)
    for got, wanted in zip(
        [*results.values(), *gradients],
        [*(want[k] for k in results), dh, dW],
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_from_logits():
    h, W, y = problem()
    logits = np.nan_to_num(h) @ W.T

    def run(logits, y, axis_name=None):
        options = {"vocab_size": V, "axis_name": axis_name}
        lp = jaxmem.logprobs_from_logits(logits, y, CHUNK, **options)
        stats = jaxmem.token_stats_from_logits(logits, y, CHUNK, **options)
        return jnp.cos(lp) + stats.entropy * stats.logsumexp + stats.sum_pi_squared

    split = jax.shard_map(
        functools.partial(run, axis_name="tensor"), mesh=mesh_of(MESHES["2x4"][0]),
        in_specs=(P("data", "tensor"), P("data")), out_specs=P("data"),
    )  # fmt: skip

    def both(f):
        value, pull = jax.vjp(lambda z: f(z, y), logits)
        return value, pull(jnp.ones(N))[0]

    for got, want in zip(
        *(jit(lambda f=f: both(f))() for f in (split, run)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_hidden_gathered_from_its_parts():
    """Gathered parts have a type that may differ; all_gather sums their cotangents."""
    h, W, y = problem()

    def run(h, W, y, axis_name):
        return stats(lax.all_gather(h, axis_name, tiled=True), W, y, axis_name)

    split = jax.shard_map(
        functools.partial(run, axis_name="tensor"), mesh=mesh_of(MESHES["2x4"][0]),
        in_specs=(P(("data", "tensor")), P("tensor"), P("data")), out_specs=P("data"),
    )  # fmt: skip
    check(with_gradients(split, h, W, y), *alone_and_exact())


@pytest.mark.full
def test_gradients_taken_inside():
    h, W, y = problem()

    def run(h, W, y, axis_name):
        def loss(h, W):
            got = stats(h, W, y, axis_name)
            return sum(jnp.sum(jnp.cos(x)) for x in got.values())

        return jax.grad(loss, (0, 1))(h, W)

    split = sharded(run, out=(P("data"), P("tensor")))
    for a, b in zip(jit(split)(h, W, y), exact_of_cosines(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def exact_of_cosines():
    """Gradients of hidden and W of a sum of cosines of the statistics."""
    none = {"logprob": np.zeros(N)}
    got, _ = oracle.head(*problem(), none, vocab_size=V)
    g = {k: -np.sin(x) for k, x in got.items()}
    return oracle.head(*problem(), g, vocab_size=V)[1][:2]


@pytest.mark.full
def test_tokens_alone_may_be_split_too():
    """No axis_name, but jax's types: loops and derivatives keep to them."""
    h, W, y = problem()
    split = jax.shard_map(
        stats, mesh=mesh_of({"data": 8}), in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
    )  # fmt: skip
    check(with_gradients(split, h, W, y), *alone_and_exact())


def verbs_without_axis_name():
    """By name, (h, W, bias, other, ids) -> a number a token."""
    teacher = np.linspace(-1, 1, 6 * V, dtype=np.float32).reshape(V, 6)

    def divergence(verb):
        return lambda h, W, bias, other, ids: verb(
            h, jaxmem.Head(W, bias), other, teacher, CHUNK, where=ids[:, 0] >= 0
        )

    def selected(h, W, bias, other, ids):
        got = jaxmem.selected_logprobs(h, jaxmem.Head(W, bias=bias), ids, CHUNK)
        return got @ jnp.arange(3.0)

    def support(h, W, bias, other, ids):
        warm = 1 + other[:, 0] ** 2
        head, y = jaxmem.Head(W, bias), ids[:, 0]
        return jaxmem.support_logprobs(h, head, y, ids, CHUNK, temperature=warm)

    def ragged(h, W, bias, other, ids):
        offsets = jnp.arange(ids.shape[0] + 1) * 3
        options = {"offsets": offsets, "max_ids": 4}
        given = ids[:, 0], ids.ravel(), 1
        return jaxmem.support_logprobs(h, jaxmem.Head(W, bias), *given, **options)

    names = "reverse_kl", "forward_kl", "jsd"
    got = {name: divergence(of_two_heads(name)) for name in names}
    return (
        got
        | {"selected_logprobs": selected, "support_logprobs": support}
        | {"ragged supports": ragged}
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "name, of_hidden",
    [
        (name, of_hidden) if (name, of_hidden) == ("reverse_kl", P())
        else slow(name, of_hidden)  # with the same derivative rules
        for name in verbs_without_axis_name()
        for of_hidden in (P("data"), P())
    ],
    ids=str,
)  # fmt: skip
def test_verbs_that_need_all_of_W(name, of_hidden):
    """Values and gradients of tokens that differ by device, or are the same on all."""
    verb, rng = verbs_without_axis_name()[name], np.random.default_rng(2)
    n = N if of_hidden else N // 4
    h, other = (rng.standard_normal((m, d), np.float32) for m, d in ((n, D), (N, 6)))
    W, ids = problem()[1][:V], rng.integers(0, V, (N, 3))
    bias = np.linspace(-2, 2, V, dtype=np.float32)
    ids[6:12], ids[1, 1] = -1, -1
    tokens = P("data")
    split = jax.shard_map(
        verb, mesh=mesh_of(MESHES["4x2"][0]), out_specs=tokens,
        in_specs=(of_hidden, P(), P(), tokens, tokens),
    )  # fmt: skip

    def alone(h, *rest):
        return verb(jnp.tile(h, (N // n, 1)), *rest)

    def run(fn):
        def total(h, W, bias):
            results = fn(h, W, bias, other, ids)
            return jnp.sum(jnp.sin(results)), results

        return jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(h, W, bias)

    got, want = run(split), run(alone)
    assert want[0][1].any() and all(x.any() for x in want[1])
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_under_scan_remat_and_donation():
    h, W, y = problem()
    split = sharded(stats)

    def total(h, W, y):
        return sum(jnp.sum(jnp.cos(x)) for x in split(h, W, y).values())

    def scanned(h, W):
        def body(carry, part):
            return carry + jax.checkpoint(total)(part[0], W, part[1]), None

        parts = h.reshape(3, -1, D), y.reshape(3, -1)
        return lax.scan(body, 0.0, parts)[0]

    run = jit(jax.grad(scanned, (0, 1)), donate_argnums=(0, 1))
    got = run(jnp.asarray(h), jnp.asarray(W))
    for a, b in zip(got, exact_of_cosines(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_vmap_where_other_axes_are_left_to_jax():
    h, W, y = problem()

    def run(h, W, y, axis_name):
        return jax.vmap(
            lambda h, y: jaxmem.logprobs(
                h, jaxmem.Head(W, vocab_size=V), y, axis_name=axis_name
            )
        )(h.reshape(2, -1, D), y.reshape(2, -1))

    split = jax.shard_map(
        functools.partial(run, axis_name="tensor"), mesh=mesh_of(MESHES["2x4"][0]),
        in_specs=(P(), P("tensor"), P()), out_specs=P(), axis_names={"tensor"},
    )  # fmt: skip
    got = jit(jax.grad(lambda *a: jnp.cos(split(*a)).sum(), (0, 1)))(h, W, y)
    results, _ = oracle.head(h, W, y, {"logprob": np.zeros(N)}, vocab_size=V)
    g = {"logprob": -np.sin(results["logprob"])}
    want = oracle.head(h, W, y, g, vocab_size=V)[1][:2]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_shards_have_the_same_bits(optimized):
    h, W, y = problem()
    split = jit(
        sharded(
            lambda *a, axis_name: jax.tree.map(lambda x: x[None], stats(*a, axis_name)),
            out=P("tensor", "data"),
            check_vma=False,
        )
    )
    for got in split(h, W, y).values():
        np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selected_logprobs", "support_logprobs"])
def test_collectives_of_ids(name):
    """Each array once for all tokens of a device, by all-reduces; W is not gathered."""
    h, W, y = (np.nan_to_num(x) for x in problem())
    ids = np.where(np.arange(5) == 0, np.maximum(y, 0)[:, None], np.arange(5))

    def run(h, W):
        head = jaxmem.Head(W, vocab_size=V, layout="vd")
        operands = (ids,) if name == "selected_logprobs" else (y, ids)
        return getattr(ByHand("2x4"), name)(h, head, *operands, chunk=4).sum()

    text = jax.jit(jax.grad(run, (0, 1))).lower(h, W).compile().as_text()
    # XLA may make one all-reduce of several arrays.
    reduced = re.findall(r" = ([^=]*?) all-reduce(?:-start)?\(", text)
    got = re.findall(r"f32\[[\d,]*\]", " ".join(reduced))
    n = N // 2
    gradients = [f"f32[{n},{D}]", f"f32[{COLUMNS // 4},{D}]"]  # dW over the tokens
    rows = [*("f32[12]",) * 3, "f32[12,5]"]  # maximum, two sums, and at ids
    if name == "support_logprobs":
        rows = ["f32[2,12]", "f32[3,12]"]
    assert sorted(got) == sorted([*rows, *gradients])
    assert not re.search("all-gather|all-to-all|collective-permute", text)


def test_errors_of_ids():
    h, W, y = (np.nan_to_num(x) for x in problem())
    ids = np.maximum(y, 0)[:, None]
    with pytest.raises(ValueError, match="axis_name='tensor' must be bound by an encl"):
        jaxmem.selected_logprobs(h, W, ids, axis_name="tensor")
    with pytest.raises(ValueError, match="axis_name='tensor' must be bound by an encl"):
        jaxmem.support_logprobs(h, W, y, ids, axis_name="tensor")
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis, o"):
        jaxmem.selected_logprobs(h, W, ids, axis_name=3)
    whole = jax.shard_map(
        functools.partial(jaxmem.selected_logprobs, axis_name="tensor"),
        mesh=mesh_of({"tensor": 8}), in_specs=(P(), P(), P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="W must be this shard's part of the vocabula"):
        whole(h, W, ids)
    above = jax.shard_map(
        lambda h, W: jaxmem.selected_logprobs(
            h, jaxmem.Head(W, vocab_size=V), np.full((N, 1), V), axis_name="tensor"
        ),
        mesh=mesh_of({"tensor": 8}), in_specs=(P(), P("tensor")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"ids must be below vocab_size={V}, got {V}"):
        above(h, W)


@pytest.mark.full
@pytest.mark.parametrize("name", [
    x for x in OF_SHARDS if re.search("ids$|columns|selected|support", x)
    and x != "sample_ids"
])  # fmt: skip
def test_invalid_id_is_nan_in_its_token(name):
    """An id that no shard has, or that a shard has as padding."""
    setting = Setting(tokens=(N,), mask="none", temperature="token")
    p, bad = crossing.problem(setting), np.isin(np.arange(N), [2, 7])
    p["log_q"] = np.nan_to_num(p["log_q"], nan=-3)
    of = "support" if "support" in name else "ids"
    p["labels"], p["ids"] = p["support"][:, 0], np.maximum(p["ids"], 0)
    p[of][[2, 7], 1] = functions.VOCAB, 2**31 - 1
    p["widths"] = np.full_like(p["widths"], functions.K + 1)
    mesh = ByHand("1x8" if name in TOKENS_TOGETHER else "2x4")
    result, gradients = crossing.run(mesh, name, setting, ("hidden",), p)
    np.testing.assert_array_equal(np.isnan(result.reshape(N, -1)).any(1), bad)
    np.testing.assert_array_equal(np.isnan(gradients["hidden"]).any(1), bad)
    p["used"] = np.float32(~bad)
    _, gradients = crossing.run(mesh, name, setting, ("hidden",), p)
    assert np.isfinite(gradients["hidden"]).all()


STATISTICS = [("pmax", "f32[2,12]"), ("psum_invariant", "f32[3,12]")]
DHIDDEN = ("psum_invariant", f"f32[12,{D}]")


@pytest.mark.slow
@pytest.mark.parametrize("v", [37, 801])
def test_communication_independent_of_vocabulary(v):
    h, W, y = problem(columns=-(-v // 8) * 8, v=v)
    split = sharded(functools.partial(stats, vocab_size=v))

    def dhidden(h, W, y):
        return jax.grad(lambda h: sum(jnp.sum(x) for x in split(h, W, y).values()))(h)

    assert collectives(split, h, W, y) == STATISTICS
    assert collectives(dhidden, h, W, y) == [*STATISTICS, DHIDDEN]


def test_token_loss_collectives():
    """Statistics once a chunk, inside the loop; hidden's gradient once; no W."""
    h, W, y = problem()

    def dhidden(h, W, y):
        split = sharded(mixed_loss, n_per_token=2, out=(P(), P("data")))
        return jax.grad(lambda h: split(h, W, y, jnp.ones(N))[0])(h)

    chunk = [("pmax", f"f32[2,{CHUNK}]"), ("psum_invariant", f"f32[3,{CHUNK}]")]
    assert collectives(dhidden, h, W, y) == [*chunk, DHIDDEN]


@pytest.mark.parametrize("fn", [stats, mixed_loss], ids=["stats", "loss"])
def test_shards_hold_one_chunk_of_logits(fn):
    h, W, y = problem()
    is_loss = fn is mixed_loss
    rest = (y, np.ones(N, np.float32)) if is_loss else (y,)
    out = (P(), P("data")) if is_loss else None
    split = sharded(fn, n_per_token=len(rest), out=out)

    def grad(h, W):
        return jax.grad(
            lambda h, W: sum(jnp.sum(x) for x in jax.tree.leaves(split(h, W, *rest))),
            (0, 1),
        )(h, W)

    text = jax.jit(grad).lower(h, W).as_text()
    assert f"<{CHUNK}x10xf32" in text and "<12x10xf32" not in text


def test_invalid_label_is_nan_alone():
    h, W, y = (np.nan_to_num(x) for x in problem())
    y = np.where(np.arange(N) == 2, V, np.maximum(y, 0))  # a column, but of padding
    y[5] = COLUMNS + 1
    got = jit(sharded(stats))(h, W, y)
    assert np.isnan(got["logprob"][np.array([2, 5])]).all()
    assert np.isfinite(np.delete(got["logprob"], [2, 5])).all()
    assert np.isfinite(got["logsumexp"]).all()


def refusal(kind, *operands, fn=stats, **options):
    with pytest.raises(kind) as caught:
        jit(sharded(fn, **options))(*operands)
    return str(caught.value)


def test_unbound_axis_name_is_refused():
    h, W, y = problem()
    run = lambda *a, axis_name: stats(*a, "vocabulary")  # noqa: E731
    assert refusal(ValueError, h, W, y, fn=run) == (
        "axis_name='vocabulary' must be bound by an enclosing jax.shard_map, which "
        "binds 'data', 'tensor'; for arrays that are not split by hand use "
        "jaxmem.sharding.parallel"
    )


def test_weights_that_are_not_split():
    h, W, y = problem()
    run = lambda h, _, y, axis_name: stats(h, jnp.asarray(W), y, axis_name)  # noqa: E731
    assert refusal(ValueError, h, W, y, fn=run) == (
        "W must be this shard's part of the vocabulary, but is the same along mesh "
        "axis 'tensor'; split it in in_specs of jax.shard_map, as in P('tensor', None) "
        "for [V, D]"
    )


def test_more_vocabulary_than_the_shards_have():
    run = functools.partial(stats, vocab_size=COLUMNS + 1)
    assert refusal(ValueError, *problem(), fn=run) == (
        "vocab_size must be an integer from 1 to 40, the number of columns, got 41"
    )


def test_gathered_bit_for_bit():
    """A zero's sign and a NaN's payload too, and typed as replicated."""
    bits = np.array([0x80000000, 0x7FC12345, 0x00000001, 0xFF800000], np.uint32)
    given = np.concatenate([bits, bits[::-1]]).view(np.float32)

    def both(x):
        return vocab_shards.gather(("tensor",), x), vocab_shards.gather(
            ("data", "tensor"), x
        )

    mesh = mesh_of({"data": 2, "tensor": 4})
    one, two = jit(
        jax.shard_map(
            both, mesh=mesh, in_specs=P(("data", "tensor")), out_specs=(P("data"), P())
        )
    )(given)
    np.testing.assert_array_equal(np.ravel(one).view(np.int32), given.view(np.int32))
    np.testing.assert_array_equal(np.ravel(two).view(np.int32), given.view(np.int32))


def test_rows_are_summed_in_a_tree():
    """Not in order, of which 1e8 and 1 would leave 0; of rows that do not divide."""
    parts = np.array([1e8, 1.0, -1e8, 1.0, 3.0, 4.0, 5.0, 6.0], np.float32)
    given = parts[:, None, None] * np.ones((8, 5, 3), np.float32)
    total = jit(
        jax.shard_map(
            lambda x: vocab_shards.sum_rows_in_order(("tensor",), x[0]),
            mesh=mesh_of({"tensor": 8}), in_specs=P("tensor"), out_specs=P(),
        )
    )(given)  # fmt: skip
    a, b, c, d, *rest = parts
    want = ((a + b) + (c + d)) + np.float32(sum(rest))
    np.testing.assert_array_equal(total, np.full((5, 3), want))
    assert want == vocab_shards.sum_tree(parts)
