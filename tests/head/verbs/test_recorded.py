"""gradient=Recorded(entries): results and gradients from entries of old logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Recorded
from jaxmem.head.maths import eight_bits, recorded
from tests.helpers import oracle
from tests.helpers.cases import Case, full
from tests.helpers.recorded import (
    FLOATS,
    dense_entries,
    enumerate_starts,
    exact,
    moved,
    starts_of_each_set,
    take,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V, K = 6, 24, 40, 7
KEY = jax.random.key(3)


@functools.cache
def problem(std=2.5, n=N, v=V):
    """(h, W) under which entries are recorded, (h, W) after an update, labels."""
    h, W, y = Case(n, D, v, std=std).make()
    return (h, W), moved(h, W, 0.1), y


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_sums_have_no_bias(monkeypatch):
    """Over all starts: Z, Σ z e^z, Σ e^2z, and the gradient of Z."""
    enumerate_starts(monkeypatch)
    (h, W), (new_h, new_W), y = problem()
    for i in range(3):
        p = softmax(np.float64(h[i]) @ np.float64(W).T)
        p[y[i]] = 0
        starts, weights, _ = starts_of_each_set(np.float32(p), K)
        n = len(starts)
        many = [np.repeat(x[i : i + 1], n, axis=0) for x in (h, new_h, y)]
        entries = dense_entries(many[0], W, many[2], K, jnp.asarray(starts))
        want, slopes = oracle.head(
            new_h[i : i + 1], new_W, y[i : i + 1], {"logsumexp": np.ones(1)}
        )

        def statistics(h, W, many=many, entries=entries):
            stats = jaxmem.token_stats(h, W, many[2], gradient=Recorded(entries))
            return jnp.sum(stats.logsumexp), stats

        slope, stats = jax.grad(statistics, has_aux=True)(many[1], new_W)
        found = {k: np.float64(getattr(stats, k)) for k in FLOATS}
        Z = np.exp(found["logsumexp"])
        exact_Z = np.exp(want["logsumexp"][0])

        def sums(x, Z):
            return Z, Z * (x["logsumexp"] - x["entropy"]), Z**2 * x["sum_pi_squared"]

        firsts = {k: x[0] for k, x in want.items()}
        for got, expected in zip(sums(found, Z), sums(firsts, exact_Z), strict=True):
            assert np.std(got) > 1e-3 * abs(expected)
            np.testing.assert_allclose(weights @ got, expected, rtol=2e-5)
        mean = weights @ (np.float64(slope) * Z[:, None])
        np.testing.assert_allclose(mean, exact_Z * slopes[0][0], atol=2e-5 * exact_Z)
        # Ratios of sums have a bias of second order.
        variance = weights @ (Z / exact_Z - 1) ** 2
        bias = weights @ found["logsumexp"] - want["logsumexp"][0]
        assert abs(bias + variance / 2) < 0.2 * variance + 1e-6
        lnp_bias = weights @ found["logprob"] - want["logprob"][0]
        np.testing.assert_allclose(lnp_bias, -bias, atol=2e-6)


def test_gradient_bias_is_of_second_order(monkeypatch):
    """The gradient of −ln p, within the bound of docs/sampled.md."""
    enumerate_starts(monkeypatch)
    (h, W), _, y = problem()
    biases = []
    for size in (0.0, 0.1):
        new_h, new_W = moved(h, W, size)
        p = softmax(np.float64(h[0]) @ np.float64(W).T)
        p[y[0]] = 0
        starts, weights, _ = starts_of_each_set(np.float32(p), K)
        many = [np.repeat(x[:1], len(starts), axis=0) for x in (h, new_h, y)]
        entries = dense_entries(many[0], W, many[2], K, jnp.asarray(starts))

        def loss(h, new_W=new_W, many=many, entries=entries):
            found = jaxmem.logprobs(h, new_W, many[2], gradient=Recorded(entries))
            return -jnp.sum(found)

        slope = weights @ np.float64(jax.grad(loss)(many[1]))
        _, (want, *_) = oracle.head(new_h[:1], new_W, y[:1], {"logprob": -np.ones(1)})
        z = [np.float64(a[0]) @ np.float64(b).T for a, b in ((h, W), (new_h, new_W))]
        delta = np.abs(np.expm1(z[1] - z[0])).max()
        terms = softmax(z[1]) @ np.abs(np.float64(new_W))
        bound = (delta + delta**2) / (K - 1) * terms
        bias = np.abs(slope - want[0])
        assert np.all(bias <= bound + 2e-5)
        biases.append(bias.max())
    assert biases[0] < 2e-6 < 1e-4 < biases[1]


def test_unchanged_weights_give_exact_results():
    (h, W), _, y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    got = jaxmem.token_stats(h, W, y, gradient=Recorded(entries))
    want = jaxmem.token_stats(h, W, y)
    for name in FLOATS:
        np.testing.assert_allclose(
            getattr(got, name), getattr(want, name), atol=2e-6, err_msg=name
        )
    np.testing.assert_array_equal(got.is_argmax, want.is_argmax)


HEADS = {
    "plain": {},
    "dv": {"layout": "dv"},
    "all": {
        "bias": np.linspace(-1, 1, V, dtype=np.float32), "softcap": 4.0,
        "vocab_size": V - 3, "temperature": np.linspace(0.6, 1.2, N, dtype=np.float32),
        "layout": "dv",
    },
}  # fmt: skip
WEIGHTS = np.linspace(0.5, 1.5, N, dtype=np.float32)


def policy(stats, weight):
    smooth = 0.3 * stats.entropy + 0.1 * stats.logsumexp**2 - stats.sum_pi_squared
    told = {k: getattr(stats, k) for k in FLOATS}
    return weight * (smooth - stats.logprob), told


def told_and_slopes(verb, h, head, y, entries, **options):
    """(results by name, gradients by hidden and the head), with one row masked."""
    options["gradient"] = Recorded(entries)

    def value(h, head):
        if verb == "token_loss":
            operands = policy, h, head, y, WEIGHTS[: len(y)]
            return jaxmem.token_loss(*operands, normalizer=1, **options)
        if verb == "logprobs":
            told = {"logprob": jaxmem.logprobs(h, head, y, **options)}
        else:
            told = jaxmem.token_stats(h, head, y, **options)._asdict()
        g = WEIGHTS[: len(y)]
        return sum(jnp.sum(g * told[k]) for k in told if k != "is_argmax"), told

    (_, told), slopes = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))(
        h, head
    )
    return told, slopes


def cotangents(verb, results):
    g = np.float64(WEIGHTS)
    if verb == "logprobs":
        return {"logprob": g}
    if verb == "token_stats":
        return dict.fromkeys(FLOATS, g)
    return {"logprob": -g, "entropy": 0.3 * g, "sum_pi_squared": -g,
            "logsumexp": 0.2 * g * results["logsumexp"]}  # fmt: skip


@pytest.mark.parametrize("verb, name", [
    ("token_loss", "all"), full("token_loss", "plain"), full("token_stats", "plain"),
    full("token_stats", "all"), ("logprobs", "dv"), full("logprobs", "all"),
])  # fmt: skip
@pytest.mark.parametrize("implementation", ["xla"])
def test_formulas_of_the_estimator(verb, name, implementation):
    options = dict(HEADS[name])
    layout = options.pop("layout", "vd")
    (h, W), (new_h, new_W), y = problem()
    y = np.where(np.arange(N) == 2, -1, y % (V - 3)).astype(np.int32)
    temperature = options.pop("temperature", 1.0)
    described = options | {"layout": layout}

    def head(W):
        return jaxmem.Head(W if layout == "vd" else W.T, **described)

    run = functools.partial(jaxmem.record_entries, temperature=temperature)
    entries = run(h, head(W), y, K, KEY)
    new_h = np.where(np.arange(N)[:, None] == 2, np.nan, new_h)
    told, (dh, dhead) = told_and_slopes(
        verb, new_h, head(new_W), y, entries, temperature=temperature,
        implementation=implementation,
    )  # fmt: skip
    given = options | {"temperature": temperature}
    results, _ = exact(new_h, new_W, y, entries, {"logprob": np.zeros(N)}, **given)
    g = cotangents(verb, results)
    results, slopes = exact(new_h, new_W, y, entries, g, **given)
    for key in set(told) - {"is_argmax"}:
        np.testing.assert_allclose(
            told[key], results[key], rtol=2e-5, atol=5e-6, err_msg=key
        )
    assert ("forward_error" in told) == (verb == "token_loss")
    dW = dhead.W if layout == "vd" else dhead.W.T
    for got, want in zip((dh, dW, dhead.bias), slopes, strict=True):
        if got is not None:
            limit = 1e-5 * np.abs(want).max()
            np.testing.assert_allclose(got, want, atol=limit, rtol=2e-4)


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_estimates_are_near_the_exact_ones(shift):
    """A shift of all logits hardly varies over the draws, and is not told as error."""
    (h, W), _, y = problem(n=64, v=300)
    entries = jaxmem.record_entries(h, W, y, 32, KEY)
    new_h, new_W = moved(h, W, 0.02)
    new_h = np.concatenate([new_h, np.full((64, 1), shift, np.float32)], axis=1)
    new_W = np.concatenate([new_W, np.ones((300, 1), np.float32)], axis=1)
    told, _ = told_and_slopes_of_64(new_h, new_W, y, entries)
    want = jaxmem.token_stats(new_h, new_W, y)
    far = np.asarray(told["logsumexp"] - want.logsumexp)
    error = np.asarray(told[eight_bits.ERROR])
    assert np.all(np.isfinite(error)) and error.min() > 0
    ratio = np.sqrt(np.mean(far**2)) / np.sqrt(np.mean(error**2))
    assert 0.5 < ratio < 1.5, ratio
    assert np.sqrt(np.mean(far**2)) < 0.02


def told_and_slopes_of_64(h, W, y, entries):
    def loss_fn(stats):
        return -stats.logprob, {"logsumexp": stats.logsumexp}

    run = functools.partial(jaxmem.token_loss, loss_fn, gradient=Recorded(entries))
    loss, told = jax.jit(run)(h, W, y)
    return told, loss


@pytest.mark.parametrize("shift", [-12.0, 40.0])
def test_row_without_estimate_has_the_values_of_its_record(shift):
    """All logits of a token move far: Ẑ1 has no digits, or would overflow."""
    (h, W), _, y = problem()
    h = np.concatenate([h, np.ones((N, 1), np.float32)], axis=1)
    h[1, :-1] *= 40  # so that one column, which is kept, has nearly all of the mass
    W = np.concatenate([W, np.zeros((V, 1), np.float32)], axis=1)
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    new_h, new_W = h.copy(), W.copy()
    new_h[:, -1], new_W[:, -1] = 0, 1
    new_h[1, -1] = shift
    told, (dh, dW) = told_and_slopes("token_loss", new_h, new_W, y, entries)
    error = np.asarray(told[eight_bits.ERROR])
    assert np.isinf(error[1]) and np.all(np.isfinite(np.delete(error, 1)))
    want = jaxmem.token_stats(h, W, y)
    for name in FLOATS:
        got, old = np.asarray(told[name]), np.asarray(getattr(want, name))
        np.testing.assert_allclose(got, old, rtol=1e-5, atol=1e-5)
    assert all(np.all(np.isfinite(x)) for x in (dh, dW))
    # As under the weights of the record, but for W, whose rows are the new ones.
    of_record, _ = told_and_slopes("token_loss", h, W, y, entries)[1]
    np.testing.assert_allclose(dh[1, :-1], of_record[1, :-1], rtol=1e-3, atol=1e-4)


def test_nan_of_an_active_row_is_not_hidden():
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    new_h = new_h.copy()
    new_h[4] = np.nan
    stats = jaxmem.token_stats(new_h, new_W, y, gradient=Recorded(entries))
    assert np.isnan(stats.logprob[4])
    assert np.all(np.isfinite(np.delete(np.asarray(stats.logprob), 4)))


def test_frozen_head_and_frozen_hidden_give_the_same_gradients():
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)

    def loss(h, W):
        return jnp.sum(jaxmem.logprobs(h, W, y, gradient=Recorded(entries)))

    both = jax.grad(loss, (0, 1))(new_h, new_W)
    for i in (0, 1):
        np.testing.assert_allclose(
            jax.grad(loss, i)(new_h, new_W), both[i], rtol=1e-6, atol=1e-7
        )


def test_entries_are_constants():
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)

    def total(floats):
        given = entries._replace(**floats)
        return jnp.sum(jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(given)))

    floats = {"logits": entries.logits, "logsumexp": entries.logsumexp}
    slopes = jax.grad(total)(floats)
    assert not any(np.asarray(x).any() for x in slopes.values())


def test_tokens_shape_scan_and_remat():
    """Entries travel as pytrees through jit, scan and remat, cut as labels are."""
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    want = jax.grad(
        lambda W: jnp.sum(jaxmem.logprobs(new_h, W, y, gradient=Recorded(entries)))
    )(new_W)

    def cut(x):
        return jnp.reshape(x, (2, 3, *x.shape[1:]))

    def loss(W, part):
        h, y, entries = part
        found = jaxmem.logprobs(h[None], W, y[None], gradient=Recorded(entries))
        assert found.shape == (1, 3)
        return jnp.sum(found)

    def step(W, h, y, entries):
        def add(total, part):
            part = (*part[:2], jax.tree.map(lambda x: x[None], part[2]))
            return total + jax.grad(jax.checkpoint(loss))(W, part), None

        parts = jax.tree.map(cut, (h, y, entries))
        return jax.lax.scan(add, jnp.zeros_like(W), parts)[0]

    got = jax.jit(step)(new_W, new_h, y, entries)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_slots_that_do_not_count():
    """Ids out of range, and the label's, are empty slots."""
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    want = jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(entries))
    more = jnp.stack([jnp.full(N, V), jnp.full(N, -1), jnp.asarray(y)], axis=1)
    wide = entries._replace(
        columns=jnp.concatenate([more.astype(jnp.int32), entries.columns], axis=1),
        logits=jnp.concatenate([jnp.full((N, 3), 1.0), entries.logits], axis=1),
    )
    got = jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(wide))
    # With three more slots, columns count as drawn with larger probabilities.
    sampling = [recorded.sampling_of(k, V) for k in (K, K + 3)]
    assert sampling[1].rate > sampling[0].rate
    assert np.all(np.abs(got - want) < 0.2) and np.all(np.isfinite(got))
    narrow = wide._replace(columns=wide.columns[:, :K], logits=wide.logits[:, :K])
    dropped = entries._replace(
        columns=jnp.concatenate(
            [jnp.full((N, 3), recorded.EMPTY), entries.columns[:, : K - 3]], axis=1
        ),
        logits=jnp.concatenate([jnp.zeros((N, 3)), entries.logits[:, : K - 3]], axis=1),
    )
    np.testing.assert_array_equal(
        jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(narrow)),
        jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(dropped)),
    )


def changed(**fields):
    (h, W), _, y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    return Recorded(entries._replace(**{k: f(entries) for k, f in fields.items()}))


@pytest.mark.parametrize("gradient, kind, message", [
    (lambda: Recorded(3), TypeError, "must have jaxmem.RecordedEntries, got 3"),
    (lambda: changed(columns=lambda e: jnp.float32(e.columns)), TypeError,
     "gradient.entries.columns must be int32, got float32"),
    (lambda: changed(logits=lambda e: jnp.bfloat16(e.logits)), TypeError,
     "gradient.entries.logits must be float32, got bfloat16"),
    (lambda: changed(logits=lambda e: e.columns), TypeError,
     "gradient.entries.logits must be float32, got int32"),
    (lambda: changed(logsumexp=lambda e: e.logsumexp[:-1]), ValueError,
     r"gradient.entries.logsumexp must have shape \(6,\), that of the tokens, got"),
    (lambda: changed(logits=lambda e: e.logits[:, 1:]), ValueError,
     r"gradient.entries.logits must have shape \(6, 7\), that of the tokens and K"),
    (lambda: changed(columns=lambda e: e.columns[:, :0]), ValueError,
     "from 1 to less than vocab_size=40 entries a token, got"),
    (lambda: changed(columns=lambda e: jnp.tile(e.columns, 6)), ValueError,
     "from 1 to less than vocab_size=40 entries a token, got"),
])  # fmt: skip
def test_wrong_entries_are_named(gradient, kind, message):
    (h, W), _, y = problem()
    with pytest.raises(kind, match=message):
        jaxmem.logprobs(h, W, y, gradient=gradient())


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (0, "k must be from 1 to 39, less than the vocabulary, got 0"),
        (V, "k must be from 1 to 39, less than the vocabulary, got 40"),
        (1.5, "k must be an integer, less than the vocabulary, got 1.5"),
    ],
)
def test_record_entries_names_its_own_k(k, message):
    (h, W), _, y = problem()
    with pytest.raises(ValueError, match=f"^{message}$"):
        jaxmem.record_entries(h, W, y, k, KEY)


def test_record_entries_names_a_missing_key_and_a_vocabulary_of_one():
    (h, W), _, y = problem()
    with pytest.raises(TypeError, match="^key must be a PRNG key, .* got None$"):
        jaxmem.record_entries(h, W, y, K, None)
    with pytest.raises(ValueError, match="^W must have at least 2 entries of the voc"):
        jaxmem.record_entries(h, W[:1], y, 1, KEY)


def test_other_functions_refuse_recorded_entries():
    (h, W), _, y = problem()
    gradient = Recorded(jaxmem.record_entries(h, W, y, K, KEY))
    of = "is of logprobs, token_stats and token_loss"
    target = jaxmem.ReverseKL(jaxmem.Teacher(h, W))
    with pytest.raises(NotImplementedError, match=f"{of}.*no labels"):
        jaxmem.entropy(h, W, gradient=gradient)
    with pytest.raises(NotImplementedError, match=f"{of}.*reads more"):
        jaxmem.divergence(h, W, target, gradient=gradient)
    with pytest.raises(NotImplementedError, match=f"{of}.*reads more"):
        jaxmem.topk(h, W, 2, gradient=gradient)
    with pytest.raises(NotImplementedError, match=f"{of}.*reads more"):
        jaxmem.selected_logprobs(h, W, y[:, None], gradient=gradient)
    with pytest.raises(NotImplementedError, match=f"{of}.*reads more"):
        jaxmem.divergence_loss(lambda stats, D: D, h, W, y, target, gradient=gradient)
    with pytest.raises(NotImplementedError, match="vocab_groups cannot be combined"):
        jaxmem.logprobs(h, W, y, gradient=gradient, vocab_groups=2)
    with pytest.raises(ValueError, match="key must not be given"):
        jaxmem.logprobs(h, W, y, gradient=gradient, key=KEY)


def test_metric_named_as_the_error_is_refused():
    (h, W), _, y = problem()
    gradient = Recorded(jaxmem.record_entries(h, W, y, K, KEY))

    def loss_fn(stats):
        return -stats.logprob, {eight_bits.ERROR: stats.entropy}

    with pytest.raises(ValueError, match="forward_error"):
        jaxmem.token_loss(loss_fn, h, W, y, gradient=gradient)


def test_report_has_no_logits_of_the_vocabulary():
    (h, W), _, y = problem()
    gradient = Recorded(jaxmem.record_entries(h, W, y, K, KEY))
    with jaxmem.report() as calls:
        jax.eval_shape(functools.partial(jaxmem.logprobs, gradient=gradient), h, W, y)
    said = str(calls.calls[0])
    assert "no logits" in said and f"{K} entries a token, logits of these" in said
    assert calls.calls[0].live_logits_bytes == 0


def test_no_product_over_the_vocabulary():
    """Neither the forward pass nor the gradient by hidden multiplies matrices."""
    (h, W), _, y = problem()
    gradient = Recorded(jaxmem.record_entries(h, W, y, K, KEY))

    def loss(h):
        return jnp.sum(jaxmem.logprobs(h, W, y, gradient=gradient))

    assert "dot_general" not in str(jax.make_jaxpr(jax.grad(loss))(h))


@pytest.mark.full
@pytest.mark.parametrize("verb", ["logprobs", "token_loss"])
def test_memory_as_documented(verb):
    n, d, v, k = 1024, 32, 8192, 32
    floats = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((n, k), *[(n,)] * 4)]
    columns = jax.ShapeDtypeStruct((n, k), jnp.int32)
    entries = jaxmem.RecordedEntries(columns, *floats)
    h, W = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((n, d), (v, d)))
    labels = jax.ShapeDtypeStruct((n,), jnp.int32)

    def loss(h, W, y, entries):
        options = {"gradient": Recorded(entries), "chunk": 64}
        if verb == "logprobs":
            return jnp.sum(jaxmem.logprobs(h, W, y, **options))
        return jaxmem.token_loss(
            lambda stats: stats.entropy - stats.logprob, h, W, y, **options
        )[0]

    for wanted, a_slot, sums in ((0,), 32, 0), ((0, 1), 40, 4 * v * d):
        run = jax.jit(jax.grad(loss, wanted))
        program = run.lower(h, W, labels, entries).compile()
        temp = program.memory_analysis().temp_size_in_bytes
        want = a_slot * n * (k + 1) + sums
        assert 0.5 * want < temp < 1.1 * want


@pytest.mark.parametrize("split", [
    {"vocab": "a"}, full({"tokens": "a"}), full({"vocab": "a", "tokens": "b"}),
])  # fmt: skip
def test_over_a_mesh_as_on_one_device(split):
    axes = tuple(split.values())
    mesh = jax.make_mesh(
        (2,) * len(axes), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    (h, W), (new_h, new_W), y = problem(v=V)
    y = np.where(np.arange(N) == 2, -1, y)
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    public = jaxmem.sharding.parallel(jaxmem.token_loss, mesh, **split)

    def value(verb, h, W):
        gradient = Recorded(entries)
        return verb(policy, h, W, y, WEIGHTS, gradient=gradient, normalizer=1)

    runs = [
        jax.jit(
            jax.value_and_grad(functools.partial(value, verb), (0, 1), has_aux=True)
        )(new_h, new_W)
        for verb in (jaxmem.token_loss, public)
    ]
    for want, got in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    made = jaxmem.sharding.parallel(jaxmem.record_entries, mesh, **split)(
        h, W, y, k=K, key=KEY
    )
    np.testing.assert_array_equal(made.columns, entries.columns)
    for want, got in zip(entries[1:], made[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_tokens_split_by_jit(kind):
    """Entries are split by their types, or as XLA splits the tokens."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(axis_type,))
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)

    def loss(h, W, y, entries):
        return jnp.sum(jaxmem.logprobs(h, W, y, gradient=Recorded(entries)))

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    want = run(new_h, new_W, y, entries)
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    split_h, split_y, split = jax.device_put((new_h, y, entries), along)
    got = run(split_h, new_W, split_y, split)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_under_vmap():
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    want = jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(entries))

    def one(h, y, entries):
        return jaxmem.logprobs(h, new_W, y, gradient=Recorded(entries))

    cut = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), (new_h, y, entries))
    np.testing.assert_allclose(jax.vmap(one)(*cut).reshape(-1), want, atol=1e-6)


def test_entries_of_some_tokens_give_their_results():
    (h, W), (new_h, new_W), y = problem()
    entries = jaxmem.record_entries(h, W, y, K, KEY)
    every = jaxmem.logprobs(new_h, new_W, y, gradient=Recorded(entries))
    some = np.array([4, 1])
    few = jaxmem.logprobs(
        new_h[some], new_W, y[some], gradient=Recorded(take(entries, some))
    )
    np.testing.assert_allclose(few, every[some], atol=1e-6)
