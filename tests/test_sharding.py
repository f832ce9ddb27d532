"""jaxmem.sharding.parallel: global arrays on a mesh give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from tests.helpers.cases import Case, full, slow
from tests.helpers.crossing import Setting, check
from tests.helpers.functions import FUNCTIONS
from tests.helpers.meshes import PLANS, SEQUENCES, OnMesh, collectives, jit, parallel
from tests.helpers.targets import of_columns, of_two_heads

if jax.device_count() < 8:  # on one GPU; a CPU counts as eight (tests/conftest.py)
    pytest.skip(f"needs 8 devices, has {jax.device_count()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D, V, CHUNK = 3, 7, 8, 37, 8
MIXED = (AxisType.Explicit, AxisType.Auto) * 2
FORMS = [
    *map(OnMesh, PLANS),
    *(OnMesh("sequences", kind) for kind in (AxisType.Explicit, MIXED, MIXED[::-1])),
    *(OnMesh("2x4", changes=((split, None),)) for split in ("vocab", "tokens")),
]
SPLIT = Setting(tokens=(3, 5), columns=37, temperature="token")


def on_meshes():
    """Each function on three meshes; each function's first row on one is in `full`."""
    names = [name for name in FUNCTIONS if name != "record_entries"]  # draws by shard
    firsts = {name.split()[0]: name for name in reversed(names)}.values()
    for i, name in enumerate(names):
        for j in range(3):
            mark = full if j == 0 and name in firsts else slow
            yield mark(name, FORMS[(i + 4 * j) % len(FORMS)])


@pytest.mark.parametrize("name, form", list(on_meshes()), ids=str)
def test_function_on_a_mesh(name, form):
    check(name, SPLIT, form)


@functools.cache
def problem():
    """h [B, T, D], W [V, D], y [B, T], bias [V]; the second sequence is masked."""
    h, W, y = Case(B * T, D, V, std=3.0).make()
    h, y = h.reshape(B, T, D), y.reshape(B, T)
    h[1], y[1], y[2, 3] = np.nan, -1, -1
    return h, W, y, np.linspace(-2, 2, V, dtype=np.float32)


def assert_same(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def loss_fn(scale, stats, advantage, pair):
    loss = -scale * advantage * stats.logprob + pair[:, 0] * stats.entropy
    return loss, {"right": stats.is_argmax, "square": stats.sum_pi_squared}


@pytest.mark.parametrize(
    ("name", "normalizer"), [("2x4", None), slow("sequences", 5.0)]
)
def test_token_loss_counts_the_tokens_of_all_devices(name, normalizer):
    """Devices with unequal masks; an array that loss_fn closes over; every option."""
    h, W, y, bias = problem()
    advantage = np.linspace(-1, 1, B * T, dtype=np.float32).reshape(B, T)
    pair = np.stack([advantage, advantage], -1)
    temperature = np.linspace(0.3, 3, B * T, dtype=np.float32).reshape(B, T)
    where = None if normalizer is None else np.arange(T) != 2

    def run(verb):
        def total(h, W, bias, advantage, scale, temperature, where):
            return verb(
                functools.partial(loss_fn, scale), h,
                jaxmem.Head(W.T, bias, 5.0, V, "dv"), y, advantage, pair, chunk=CHUNK,
                where=where, temperature=temperature, normalizer=normalizer,
            )  # fmt: skip

        grad = jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))
        return grad(h, W, bias, advantage, jnp.float32(0.7), temperature, where)

    want = run(jaxmem.token_loss)
    assert abs(want[0][0]) > 0.01 and want[0][1]["square"].any()
    assert_same(run(parallel(jaxmem.token_loss, name)), want)


@pytest.mark.full
def test_topk_of_all_columns_tied_on_shards():
    h, W = np.zeros((4, D), np.float32), np.zeros((V, D), np.float32)
    made = parallel(jaxmem.topk, "1x8")(h, W, V)
    np.testing.assert_array_equal(made.ids, np.tile(np.arange(V), (4, 1)))
    np.testing.assert_allclose(made.logprobs, -np.log(V), rtol=1e-6)


@pytest.mark.slow
def test_eager_calls_without_jit():
    h, W, y, _ = problem()
    made = parallel(jaxmem.logprobs, "2x4")(h, W, y)
    assert_same(made, jaxmem.logprobs(h, W, y))


@pytest.mark.full
def test_sharded_operands_stay_so_and_may_be_donated():
    h, W, y, _ = problem()
    h, y = (np.repeat(x, 4, 1)[:2] for x in (h, y))  # [2, 28]
    W = np.pad(W, [(0, 3), (0, 0)])
    verb = parallel(jaxmem.logprobs, "sequences", vocab="tensor", W_fsdp="fsdp")
    mesh = jax.make_mesh(*PLANS["sequences"][:2], axis_types=(AxisType.Auto,) * 4)
    specs = SEQUENCES, P("tensor", "fsdp")
    tokens, weights = (NamedSharding(mesh, spec) for spec in specs)
    h, W, y = jax.device_put((h, W, y), (tokens, weights, tokens))

    def step(h, W, y):
        head = functools.partial(jaxmem.Head, vocab_size=V)
        made, pull = jax.vjp(lambda h, W: verb(h, head(W), y), h, W)
        return made, *pull(jnp.ones_like(made))

    made, dh, dW = jax.jit(step, donate_argnums=(0, 1))(h, W, y)
    assert made.sharding.is_equivalent_to(tokens, 2)
    assert dh.sharding.is_equivalent_to(tokens, 3)
    assert dW.sharding.is_equivalent_to(weights, 2)
    assert h.is_deleted() and W.is_deleted()


@pytest.mark.full
def test_collectives_of_weights_split_along_D():
    """Gathered along D for the call; scattered first and summed then, part by part."""
    h, W, y, _ = problem()
    h, y, W = h.repeat(4, 0), y.repeat(4, 0), np.pad(W, [(0, 3), (0, 0)])
    verb = parallel(jaxmem.logprobs, "W in parts of D")

    def dW(h, W, y):
        head = functools.partial(jaxmem.Head, vocab_size=V)
        return jax.grad(lambda W: verb(h, head(W), y).sum())(W)

    n = 12 * T // 4
    assert collectives(dW, h, W, y) == [
        ("all_gather", "f32[20,8]"),
        ("pmax", f"f32[2,{n}]"),
        ("psum_invariant", f"f32[3,{n}]"),
        ("reduce_scatter", "f32[20,4]"),
        ("psum_invariant", "f32[20,4]"),
    ]


MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
ERRORS = [
    (
        {"verb": len},
        TypeError,
        "verb must be a function of jaxmem's that takes axis_name, such as "
        "jaxmem.logprobs, or a functools.partial of one with arguments by name, got "
        "<built-in function len>",
    ),
    (
        {"vocab": 3},
        TypeError,
        "vocab must be the name of a mesh axis, or a tuple of names, got 3",
    ),
    (
        {"tokens": "batch"},
        ValueError,
        "tokens must name axes of the mesh, ('data', 'tensor'), got 'batch'",
    ),
    (
        {"tokens": ("data", "tensor")},
        ValueError,
        "vocab and tokens must split along different mesh axes, got 'tensor' twice",
    ),
    (
        {"W_fsdp": "tensor"},
        ValueError,
        "W_fsdp must name mesh axes that split tokens too, got 'tensor', and "
        "tokens=('data',)",
    ),
    (
        {"W_fsdp": ("data", "data")},
        ValueError,
        "W_fsdp must name a mesh axis once, got ('data', 'data')",
    ),
    (
        {"tokens": P(None, "data")},
        ValueError,
        "tokens must split no more axes than hidden has of tokens, 1, got 2",
    ),
    (
        {"axis_name": "tensor"},
        ValueError,
        "axis_name must not be given to what jaxmem.sharding.parallel made, which "
        "passes its own vocab",
    ),
    (
        {"W_fsdp": "data"},
        ValueError,
        "W_fsdp must make parts of one size of hidden's last axis D=3, got 2 parts",
    ),
    (
        {"labels": np.array([0, 9, 0])},
        ValueError,
        "labels must be below vocab_size=5, got 9; mark padding with a negative label "
        "or with where=",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS)
def test_error(changes, kind, message):
    how = {"verb": jaxmem.logprobs, "vocab": "tensor", "tokens": "data"} | changes
    call = {
        k: how.pop(k) for k in ("labels", "axis_name", "implementation") if k in how
    }
    call = {"labels": np.zeros(3, np.int32)} | call
    with pytest.raises(kind) as caught:
        run = jaxmem.sharding.parallel(how.pop("verb"), MESH, **how)
        run(hidden=np.ones((3, 3), np.float32), W=np.ones((5, 3), np.float32), **call)
    assert str(caught.value) == message


def test_partial_with_positional_data_is_refused():
    partial = functools.partial(jaxmem.logprobs, np.ones((3, 3), np.float32))
    with pytest.raises(TypeError, match="partial of one with arguments by name, got"):
        jaxmem.sharding.parallel(partial, MESH, vocab="tensor")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_token_with_W_gathered(kind):
    h, W, y, _ = problem()
    split = functools.partial(parallel, name="2x4", kind=kind, tokens=None)
    teacher = jaxmem.Teacher(h[0, 1], W)
    for verb, operands in (
        (jaxmem.divergence, (h[0, 0], W, jaxmem.ReverseKL(teacher))),
        (jaxmem.selected_logprobs, (h[0, 0], W, y[0, :3])),
        (jaxmem.logprobs, (h[0, 0], W, y[0, 0])),
    ):
        run = jit(
            jax.value_and_grad(lambda *xs, f: f(*xs).sum(), (0, 1)), static_argnames="f"
        )
        assert_same(run(*operands, f=split(verb)), run(*operands, f=verb))


def test_results_of_several_a_token_stay_split():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    verb = jaxmem.sharding.parallel(jaxmem.selected_logprobs, mesh, tokens="data")
    ids = np.zeros((16, 3), np.int32)
    made = jit(verb)(np.ones((16, D), np.float32), problem()[1], ids)
    assert made.sharding.spec == P("data", None)


@pytest.mark.full
def test_collectives_of_W_gathered():
    """As with a part of it: scattered first and summed then."""
    h, W = np.nan_to_num(problem()[0]), np.pad(problem()[1], [(0, 3), (0, 0)])
    verb = parallel(jaxmem.divergence, "W in parts of D")
    verb = of_two_heads("reverse_kl", verb)
    other = np.ones((B, T, 2), np.float32), np.ones((40, 2), np.float32)
    other = other[0], jaxmem.Head(other[1], vocab_size=V)
    dW = jax.grad(lambda W, h: verb(h, jaxmem.Head(W, vocab_size=V), *other).sum())
    scattered = [made for made in collectives(dW, W, h) if "gather" not in made[0]]
    assert scattered == [
        ("reduce_scatter", f"f32[20,{D}]"),
        ("reduce_scatter", f"f32[20,{D // 2}]"),
        ("psum_invariant", f"f32[20,{D // 2}]"),
    ]


# What a device's part does not show of operands that are wrong. Five tokens and six are
# three on each of two devices; 2³² + 1 is 1 in 32 bits.
FIVE, SIX = np.ones((5, 4), np.float32), np.ones((6, 4), np.float32)
HEAD = {"hidden": FIVE, "W": np.ones((7, 4), np.float32)}
OF_SIX = jaxmem.Head(HEAD["W"], vocab_size=6)
TWO_HEADS = HEAD | {"teacher_hidden": FIVE, "teacher_W": HEAD["W"]}
SELECTED = HEAD | {"ids": np.zeros((5, 1), np.int64)}
SUPPORT = HEAD | {"labels": np.zeros(5, np.int64), "support_ids": SELECTED["ids"]}
COLUMNS = SELECTED | {"logprobs": -FIVE[:, :1]}
RAGGED = {"support_ids": np.zeros(5, int), "offsets": np.arange(6), "max_ids": 1}
GOOD = {
    "reverse_kl": TWO_HEADS,
    "jsd": TWO_HEADS,
    jaxmem.selected_logprobs: SELECTED,
    jaxmem.support_logprobs: SUPPORT,
    jaxmem.topk: HEAD | {"k": 2},
    "columns": COLUMNS,
    jaxmem.sample_ids: HEAD | {"n": 2, "key": jax.random.key(0)},
}
WRONG = [
    ("reverse_kl", {"teacher_hidden": SIX}),
    ("jsd", {"teacher_hidden": SIX}),
    ("reverse_kl", {"teacher_hidden": FIVE[0, 0]}),
    ("reverse_kl", {"teacher_W": HEAD["W"][:, :3]}),
    ("reverse_kl", {"teacher_W": HEAD["W"][:6]}),
    ("reverse_kl", {"teacher_W": jaxmem.Head(HEAD["W"], np.ones(6, np.float32))}),
    ("reverse_kl", {"where": np.ones(6, bool)}),
    ("reverse_kl", {"teacher_temperature": np.ones(6)}),
    (jaxmem.selected_logprobs, {"ids": np.zeros((6, 1), int)}),
    (jaxmem.selected_logprobs, {"ids": np.full((5, 1), 2**32 + 1)}),
    (jaxmem.selected_logprobs, {"ids": np.full((5, 1), 7)}),
    (jaxmem.selected_logprobs, {"ids": np.full((5, 1), 6), "W": OF_SIX}),
    (jaxmem.selected_logprobs, {"ids": FIVE}),
    (jaxmem.selected_logprobs, {"temperature": np.ones(6)}),
    (jaxmem.support_logprobs, {"labels": np.zeros(6, int)}),
    (jaxmem.support_logprobs, {"labels": np.full(5, 2**32)}),
    (jaxmem.support_logprobs, {"labels": jnp.full(5, 3)}),
    (jaxmem.support_logprobs, {"support_ids": np.zeros((6, 1), int)}),
    (jaxmem.support_logprobs, {"support_ids": np.full((5, 1), 2**32)}),
    (jaxmem.support_logprobs, {"support_ids": np.zeros((5, 0), int)}),
    (jaxmem.topk, {"k": 8}),
    (jaxmem.topk, {"where": np.ones(6, bool)}),
    ("columns", {"ids": np.full((5, 1), 2**32 + 1)}),
    ("columns", {"ids": np.full((5, 1), 6), "W": OF_SIX}),
    ("columns", {"logprobs": -SIX[:, :1]}),
    ("columns", {"logprobs": FIVE[:, :1]}),
    (jaxmem.sample_ids, {"n": 0}),
    (jaxmem.sample_ids, {"key": jax.random.split(jax.random.key(0), 6)}),
    (jaxmem.sample_ids, {"key": None}),
    (jaxmem.support_logprobs, RAGGED | {"max_ids": None}),
    (jaxmem.support_logprobs, {"max_ids": 1}),
    (jaxmem.support_logprobs, RAGGED | {"offsets": np.arange(6) - 1}),
    (jaxmem.support_logprobs, RAGGED | {"offsets": np.arange(5)}),
    (jaxmem.support_logprobs, RAGGED | {"support_ids": np.full(5, 7)}),
    (jaxmem.support_logprobs, RAGGED | {"support_ids": np.ones(5, int)}),
]


@pytest.mark.parametrize(
    ("verb", "changes"),
    WRONG,
    ids=[f"{getattr(f, '__name__', f)} {[*c]}" for f, c in WRONG],
)
def test_errors_of_verb_with_W_gathered(verb, changes):
    given, by_name = GOOD[verb] | changes, of_two_heads
    if verb == "columns":
        verb, by_name = "forward_kl", of_columns
    call = functools.partial(by_name, verb) if isinstance(verb, str) else lambda f: f
    verb = jaxmem.divergence if isinstance(verb, str) else verb
    with pytest.raises((TypeError, ValueError)) as want:
        call(verb)(**given)
    with pytest.raises(want.type) as got:
        call(jaxmem.sharding.parallel(verb, MESH, tokens="data"))(**given)
    assert str(got.value) == str(want.value)


@pytest.mark.full
def test_unseen_bad_ragged_support_is_nan_in_its_token():
    """Too many ids, and one that does not exist; ids of another token are not moved."""
    verb = jaxmem.sharding.parallel(jaxmem.support_logprobs, MESH, tokens="data")
    y, ids = np.arange(5), np.array([0, 1, 5, 6, 1, 2, 2**31 - 1, 3, 3, 4])
    run = jax.jit(
        lambda ids, offsets: verb(*HEAD.values(), y, ids, offsets=offsets, max_ids=3)
    )
    made = run(ids, np.array([0, 1, 5, 7, 9, 10]))
    np.testing.assert_array_equal(np.isnan(made), [False, True, True, False, False])
    np.testing.assert_array_equal(made[np.array([0, 3, 4])], 0)


def test_unseen_id_beyond_32_bits_does_not_wrap():
    """An id beyond 32 bits gives NaN, as in the verb; a masked one nothing."""
    verb = jaxmem.sharding.parallel(jaxmem.selected_logprobs, MESH, tokens="data")
    with jax.enable_x64(True):
        ids = jnp.full((5, 1), 2**32 + 1).at[0].set(1)
        run = jax.jit(lambda ids, where: verb(*HEAD.values(), ids, where=where))
        made = run(ids, np.arange(5) < 4)[:, 0]
    np.testing.assert_array_equal(np.isnan(made), [False, True, True, True, False])


@pytest.mark.slow
def test_under_scan_and_remat():
    h, W, y, _ = (np.nan_to_num(x) for x in problem())
    verb = parallel(jaxmem.token_stats, "2x4")

    def total(verb, h, W, y):
        made = verb(h, W, y, CHUNK)
        return jnp.sum(jnp.cos(made.logprob) + made.entropy * made.logsumexp)

    def scanned(h, W):
        def body(carry, part):
            return carry + jax.checkpoint(functools.partial(total, verb))(
                part[0], W, part[1]
            ), None

        return jax.lax.scan(body, 0.0, (h, y))[0]

    got = jit(jax.grad(scanned, (0, 1)), donate_argnums=0)(jnp.asarray(h), W)
    alone = functools.partial(total, jaxmem.token_stats)
    assert_same(got, jit(jax.grad(lambda h, W: alone(h, W, y), (0, 1)))(h, W))
