"""vocab_groups: results and gradients of the same bits, whatever splits the vocabulary.

Programs are compiled as users' are: without optimizations, any of them would agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import Case
from tests.helpers.described import described
from tests.helpers.programs import compiled
from tests.helpers.token_stats import FLOATS
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, error

if jax.device_count() < 8:  # on one GPU; a CPU counts as eight (tests/conftest.py)
    pytest.skip(f"needs 8 devices, has {jax.device_count()}", allow_module_level=True)

N, D, V, CHUNK = 24, 32, 1280, 16
EVERY = {
    "softcap": 5.0,
    "vocab_size": V - 170,  # all of the last group of eight, and part of another
    "temperature": np.linspace(0.5, 2, N, dtype=np.float32),
    "where": np.arange(N) % 5 > 0,
}


def parallel(verb, shards, tokens=1):
    """Over a mesh; as it is for 0 shards."""
    if not shards:
        return verb
    mesh = jax.make_mesh(
        (tokens, shards), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: tokens * shards],
    )  # fmt: skip
    return jaxmem.sharding.parallel(verb, mesh, vocab="tensor", tokens="data")


@functools.cache
def problem(dtype="float32", v=V):
    """(h, W, bias, y); one token is masked and not a number."""
    h, W, y = Case(N, D, v, std=3.0).make()
    y = y % (v - 170)
    h[3], y[3] = np.nan, -1
    h, W = (jnp.asarray(x, dtype) for x in (h, W))
    return h, W, np.linspace(-2, 2, v, dtype=np.float32), y


@functools.cache
def cotangents():
    rng = np.random.default_rng(1)
    return {k: rng.standard_normal(N).astype(np.float32) for k in FLOATS}


def of_token_stats(verb, h, W, bias, y, **options):
    token_stats = described(verb(jaxmem.token_stats))
    return token_stats(h, W, y, CHUNK, bias=bias, **options)._asdict()


def of_logprobs(verb, h, W, bias, y, **options):
    logprobs = described(verb(jaxmem.logprobs))
    return {"logprob": logprobs(h, W, y, CHUNK, bias=bias, **options)}


def of_frozen(verb, h, W, bias, y, **options):
    return of_logprobs(verb, h, *jax.lax.stop_gradient((W, bias, y)), **options)


def of_entropy(verb, h, W, bias, y, **options):
    where = options.pop("where", True) & (y >= 0)
    entropy = described(verb(jaxmem.entropy))
    return {"entropy": entropy(h, W, CHUNK, bias=bias, where=where, **options)}


def loss_fn(stats, weight):
    return weight * stats.entropy - stats.logprob, stats._asdict()


def of_token_loss(verb, h, W, bias, y, **options):
    of_tokens = described(verb(functools.partial(jaxmem.token_loss, loss_fn)))
    weight = cotangents()["logprob"]
    loss, told = of_tokens(h, W, y, weight, chunk=CHUNK, bias=bias, **options)
    return {"loss": loss, "told": told}


def with_gradients(call, shards, dtype, **options):
    """Every result, and gradients by (h, W, bias), on the host."""
    verb = functools.partial(parallel, shards=shards)
    *trained, y = problem(dtype)
    g = cotangents() | {"loss": np.float32(1)}

    @jax.jit
    def run(*trained):
        def floats(*trained):
            made = call(verb, *trained, y, **options)
            return {k: made[k] for k in g if k in made}, made

        floats, pull, made = jax.vjp(floats, *trained, has_aux=True)
        return made, pull({k: g[k] for k in floats})

    return jax.device_get(run(*trained))


def assert_same_bits(got, want):
    got, want = (jax.tree.leaves_with_path(x) for x in (got, want))
    for (path, a), (_, b) in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes(), path


CASES = {
    "token_stats": (of_token_stats, 8, {}),
    "token_stats, every option": (of_token_stats, 8, EVERY),
    "logprobs": (of_logprobs, 2, {"softcap": 5.0}),
    "logprobs of a frozen head": (of_frozen, 2, {}),
    "entropy": (of_entropy, 2, {"temperature": 0.7}),
    "token_loss": (of_token_loss, 2, {}),
    "token_loss, every option": (of_token_loss, 8, EVERY),
}


@functools.cache
def made_of(name, dtype, shards=0):
    call, groups, options = CASES[name]
    return with_gradients(call, shards, dtype, vocab_groups=groups, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "shards"), [
    ("token_stats, every option", "bfloat16", 8), ("token_stats", "float32", 2),
    ("token_loss", "bfloat16", 2), ("logprobs of a frozen head", "bfloat16", 2),
    ("token_stats", "float32", 1), ("token_stats", "float32", 4),
    ("token_stats", "float32", 8), ("logprobs", "float32", 2),
    ("entropy", "float32", 2), ("token_stats", "bfloat16", 4),
    ("token_stats, every option", "float32", 1),
    ("token_stats, every option", "float32", 2),
    ("token_stats, every option", "float32", 4), ("token_loss", "float32", 2),
    ("token_loss, every option", "float32", 4),
    ("token_loss, every option", "bfloat16", 2),
    ("token_loss, every option", "bfloat16", 8),
])  # fmt: skip
def test_bits_do_not_depend_on_the_shards(name, dtype, shards):
    assert_same_bits(made_of(name, dtype, shards), made_of(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("token_stats", "float32"),
        ("token_stats, every option", "bfloat16"),
        ("token_stats, every option", "float32"),
    ],
)
def test_as_exact_as_without_groups(name, dtype):
    """Against float64: twice the other's error, plus an epsilon."""
    options = dict(CASES[name][2])
    made, gradients = made_of(name, dtype)
    rough, rough_gradients = with_gradients(of_token_stats, 0, dtype, **options)
    h, W, bias, y = problem(dtype)
    on = options.pop("where", True)
    exact, derivatives = oracle.head(h, W, y, cotangents(), bias=bias, on=on, **options)
    pairs = [(STATS_EPSILON, made[k], rough[k], exact[k]) for k in FLOATS]
    for a, b, c in zip(gradients, rough_gradients, derivatives, strict=True):
        pairs.append((EPSILON[dtype], a, b, c))
    for epsilon, a, b, c in pairs:
        assert error(a, c) <= 2 * error(b, c) + epsilon


@pytest.mark.slow
def test_bits_do_not_depend_on_the_verb():
    """A policy's update and the log-probabilities that it is compared with."""
    h, W, bias, y = problem()
    weight = cotangents()["logprob"]
    options = {"chunk": CHUNK, "vocab_groups": 2}

    @jax.jit
    def update(h, W):
        def loss(h, W):
            head = jaxmem.Head(W, bias)
            return jaxmem.token_loss(loss_fn, h, head, y, weight, **options)

        return jax.grad(loss, (0, 1), has_aux=True)(h, W)

    told = jax.device_get(update(h, W)[1])
    head = jaxmem.Head(W, bias)
    stats = jax.jit(lambda *x: jaxmem.token_stats(*x, y, **options))(h, head)
    logprobs = jax.jit(lambda *x: jaxmem.logprobs(*x, y, **options))(h, head)
    stats = {k: np.asarray(x, np.float32) for k, x in stats._asdict().items()}
    assert_same_bits(stats, told)
    assert_same_bits(np.asarray(logprobs), told["logprob"])


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "tokens"), [(2, 4), (1, 2)])
def test_columns_that_do_not_divide_are_padded(shards, tokens):
    """As W padded by hand is, on one device; each device has a part of the tokens."""
    h, W, bias, y = problem("float32", 1003)
    options = {"vocab_groups": 4, "chunk": CHUNK}

    def run(verb, W, bias):
        call = lambda h, head: verb(h, head, y, **options)  # noqa: E731
        return np.asarray(jax.jit(call)(h, jaxmem.Head(W, bias, vocab_size=1003)))

    got = run(parallel(jaxmem.logprobs, shards, tokens), W, bias)
    W, bias = np.pad(W, [(0, 1), (0, 0)], constant_values=7), np.pad(bias, (0, 1))
    assert_same_bits(got, run(jaxmem.logprobs, W, bias))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_in_a_shard_map_without_types(layout):
    """jax sums hidden's gradient there, in no order of ours; all else is the same."""
    h, W, bias, y = problem()
    W = W if layout == "vd" else W.T
    of_W = P("tensor") if layout == "vd" else P(None, "tensor")

    def logprobs(axis_name, h, W, bias):
        head = jaxmem.Head(W, bias, layout=layout)
        return jaxmem.logprobs(h, head, y, CHUNK, axis_name=axis_name, vocab_groups=2)

    def both(logprobs, *operands):
        values, vjp = jax.vjp(logprobs, *operands)
        dh, dW, dbias = vjp(cotangents()["logprob"])
        return (values, dW, dbias), dh

    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,),
                         devices=jax.devices()[:2])  # fmt: skip
    sharded = jax.shard_map(
        functools.partial(logprobs, "tensor"), mesh=mesh,
        in_specs=(P(), of_W, P("tensor")), out_specs=P(), check_vma=False,
    )  # fmt: skip
    alone = functools.partial(logprobs, None)
    got, want = (
        jax.device_get(jax.jit(functools.partial(both, f))(h, W, bias))
        for f in (sharded, alone)
    )
    assert_same_bits(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_groups_hold_less_than_all_logits():
    """Logits and float32 sums of W's gradient are a group's."""
    h, W = jnp.zeros((256, 64)), jnp.zeros((8192, 64))
    y = jnp.zeros(256, jnp.int32)

    def temporary(groups):
        def total(h, W):
            return jaxmem.logprobs(h, W, y, 256, vocab_groups=groups).sum()

        made = compiled(jax.grad(total, (0, 1)), h, W)
        return made.memory_analysis().temp_size_in_bytes

    assert temporary(4) < 0.6 * temporary(None)


REFUSED = [
    ({"vocab_groups": 6}, ValueError,
     "vocab_groups must be a power of two, at least 2, or None, got 6"),
    ({"vocab_groups": True}, ValueError,
     "vocab_groups must be a power of two, at least 2, or None, got True"),
    ({"vocab_groups": 512}, ValueError,
     "vocab_groups must divide the 1280 columns of W, got 512; pad W to 1536 "
     "columns and pass jaxmem.Head(W, vocab_size=…)"),
    ({"vocab_groups": 2, "gradient": jaxmem.Sample(4), "key": jax.random.key(0)},
     NotImplementedError,
     "vocab_groups cannot be combined with gradient=Sample(k=4, forward='exact'); "
     "pass one of both"),
    ({"vocab_groups": 2, "gradient": jaxmem.Recompute(2)}, NotImplementedError,
     "vocab_groups cannot be combined with gradient=Recompute(blocks=2); pass one "
     "of both"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_refused(options, kind, message):
    h, W, _, y = problem()
    with pytest.raises(kind) as refusal:
        described(jaxmem.logprobs)(h, W, y, **options)
    assert str(refusal.value) == message


def test_fewer_groups_than_shards_are_refused():
    h, W, _, y = problem()
    with pytest.raises(ValueError) as refusal:
        parallel(jaxmem.logprobs, 8)(h, W, y, vocab_groups=4)
    assert str(refusal.value) == (
        "vocab_groups must be a multiple of the 8 shards of the vocabulary, got 4"
    )
