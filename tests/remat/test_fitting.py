"""The chooser: what fits, what is fastest by the count of products, what is said."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxmem import devices, remat
from jaxmem.remat import cost, fitting, liveness

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, TOKENS, WIDTH, FF = 4, 512, 8, 32
INPUTS = 4 * LAYERS * TOKENS * WIDTH  # bytes of all blocks' inputs
GATES = 4 * LAYERS * TOKENS * FF  # of what each of the wide layers makes
FAST = remat.Rates(1e9, 1e15, 1e15)  # operations a second, bytes a second
NO_HOST = remat.Rates(1e9, 0.0, 0.0)


def block(h, w):
    q = remat.name(h @ w["q"], "q")
    gate = remat.name(jnp.sin(h + q) @ w["gate"], "gate")
    up = remat.name(jnp.sin(h + q) @ w["up"], "up")
    return h + (jnp.tanh(gate) * jnp.sin(up)) @ w["down"]


SHAPES = {
    "q": (WIDTH, WIDTH), "gate": (WIDTH, FF), "up": (WIDTH, FF), "down": (FF, WIDTH)
}  # fmt: skip


def loss(w, h, policy):
    return jnp.sum(jnp.sin(remat.scan_blocks(block, w, h, policy)))


@functools.cache
def traced(policy):
    w = {k: jax.ShapeDtypeStruct((LAYERS, *s), jnp.float32) for k, s in SHAPES.items()}
    h = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    return jax.jit(jax.grad(functools.partial(loss, policy=policy))).trace(w, h)


@functools.cache
def needs(policy):
    """Bytes of the device, were it one with a host beside it."""
    compiled = traced(policy).lower().compile()
    return remat.device_bytes(compiled) - remat.host_bytes(traced(policy))


def on_gpu(policy):
    """The step as a GPU would compile it: what goes to the host takes no room."""
    compiled = traced(policy).lower().compile()
    real = compiled.memory_analysis()
    assert real is not None
    there = remat.host_bytes(traced(policy))
    account = types.SimpleNamespace(
        argument_size_in_bytes=real.argument_size_in_bytes,
        output_size_in_bytes=real.output_size_in_bytes,
        alias_size_in_bytes=real.alias_size_in_bytes,
        temp_size_in_bytes=real.temp_size_in_bytes - there,
    )
    program = types.SimpleNamespace(
        memory_analysis=lambda: account, input_shardings=compiled.input_shardings
    )
    lowered = types.SimpleNamespace(compile=lambda: program)
    return types.SimpleNamespace(jaxpr=traced(policy).jaxpr, lower=lambda: lowered)


def products(policy):
    return cost.products(traced(policy).jaxpr.jaxpr)


def chosen(limit, rates, **options):
    said = []
    policy = remat.fit(on_gpu, limit, rates=rates, show=said.append, **options)
    return policy, said[0]


# -------------------------------------------------------------------- counts


def test_products_counted_as_often_as_they_run():
    def f(x, w):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jnp.einsum("bij,bkj->bik", *[jax.lax.scan(body, x, w)[0]] * 2)

    x, w = jnp.ones((2, 3, 5)), jnp.ones((7, 5, 5))
    jaxpr = jax.make_jaxpr(f)(x, w).jaxpr
    assert cost.products(jaxpr) == 7 * 2 * (2 * 3 * 5 * 5) + 2 * (2 * 3 * 3 * 5)


def test_products_of_saved_names_run_once():
    rows = 2 * LAYERS * TOKENS
    once = rows * (WIDTH * WIDTH + 3 * WIDTH * FF)
    assert products(None) == 3 * once
    # The product with "down" gives the block's result, which nothing backward needs.
    assert products(remat.Policy()) == 4 * once - rows * WIDTH * FF
    saved = products(remat.Policy(save=["gate"]))
    assert saved == products(remat.Policy()) - rows * WIDTH * FF


def test_attention_s_results_are_kept_together():
    """One of them alone saves less than both: the forward pass runs again."""
    sizes = dict.fromkeys(("block_in", "attn_out", "gate", "attn_lse"), 1)
    assert fitting._group_names(sizes) == [
        ("block_in",),
        ("gate",),
        ("attn_out", "attn_lse"),
    ]
    assert fitting._group_names({"attn_lse": 1}) == [("attn_lse",)]
    assert fitting._group_names({"gate": 1}) == [("gate",)]


def test_bytes_by_name():
    sizes = cost.bytes_by_name(traced(None).jaxpr.jaxpr)
    assert sizes == {"block_in": INPUTS, "q": INPUTS, "gate": GATES, "up": GATES}


def test_micro_batches_share_room_of_kept_and_sent():
    def step(policy, batches):
        def add(total, h):
            value, slopes = jax.value_and_grad(loss)(w, h, policy)
            return jax.tree.map(jnp.add, total, slopes), value

        w = {k: jnp.zeros((LAYERS, *shape)) for k, shape in SHAPES.items()}
        return jax.lax.scan(add, w, batches)

    batches = jnp.zeros((3, TOKENS, WIDTH))
    jaxpr = jax.make_jaxpr(functools.partial(step, None))(batches).jaxpr
    sizes = {"block_in": INPUTS, "q": INPUTS, "gate": GATES, "up": GATES}
    assert cost.bytes_by_name(jaxpr) == sizes
    offloading = functools.partial(step, remat.PRESETS["offload_block"])
    assert remat.host_bytes(offloading, batches) == INPUTS
    sent = cost.bytes_to_host(jax.make_jaxpr(offloading)(batches).jaxpr)
    assert sent == 3 * INPUTS


# -------------------------------------------------------------------- choice


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 1.01])
def test_fit_chooses_fastest_policy(share):
    """Held against every set of names, all of them compiled."""
    least, most = needs(remat.Policy()), needs(None)
    limit = int(least + share * (most - least))
    policy, _ = chosen(limit, NO_HOST)
    assert needs(policy) <= limit
    every = [remat.Policy(save=s) for s in _subsets(("q", "gate", "up"))]
    fit = [p for p in [None, *every] if needs(p) <= limit]
    assert products(policy) == min(map(products, fit))


def _subsets(names):
    return [
        tuple(k for i, k in enumerate(names) if 2**i & chosen)
        for chosen in range(2 ** len(names))
    ]


@pytest.mark.parametrize("share", [0.3, 1])
def test_fit_counts_shapes_where_nothing_can_be_compiled(share):
    def uncompiled(policy):
        step = traced(policy)
        return types.SimpleNamespace(jaxpr=step.jaxpr, args_info=step.args_info)

    def count(policy):
        step = uncompiled(policy)
        return liveness.argument_bytes(step) + liveness.peak(step)

    least, most = count(remat.Policy()), count(None)
    limit, said = int(least + share * (most - least)), []
    with devices.stand_in("h200"):
        policy = remat.fit(uncompiled, limit, show=said.append)
    fitting = [p for p in remat.PRESETS.values() if count(p) <= limit]
    assert count(policy) <= limit
    assert products(policy) <= min(map(products, fitting))
    assert (policy is None) == (share == 1) and said[0].count("chosen") == 1


@pytest.mark.slow
def test_fit_offloads_to_make_room():
    limit = needs(remat.Policy()) - INPUTS // 2
    policy, said = chosen(limit, FAST)
    assert policy is not None and "block_in" in policy.offload
    assert needs(policy) <= limit
    assert "chosen\n" in said + "\n"
    # All that is named can wait on the host where the link is free.
    assert products(policy) == products(remat.Policy(save=["q", "gate", "up"]))


@pytest.mark.full
def test_fit_keeps_last_blocks_whole():
    """The last block's residuals are freed before there are gradients.

    Here that takes less memory than to recompute the block, and fewer products.
    """
    last = remat.Policy(last=1)
    limit = needs(last)
    assert limit < needs(remat.Policy()) and products(last) < products(remat.Policy())
    policy, said = chosen(limit, NO_HOST, last=[1, 3])
    assert policy == last
    assert re.search(r"^full; last 1 whole .* chosen$", said, re.MULTILINE), said
    assert re.search(r"^full; last 3 whole .* (over|would take)", said, re.MULTILINE)
    with pytest.raises(ValueError, match="no policy fits"):
        chosen(limit, NO_HOST)


@pytest.mark.full
def test_fit_combines_offload_and_last_blocks():
    limit = needs(remat.Policy(offload=["block_in"], last=1))
    policy, _ = chosen(limit, FAST, last=[1], names=["block_in"])
    assert policy == remat.Policy(offload=["block_in"], last=1)


@pytest.mark.full
def test_memory_is_that_of_each_device():
    """Rows over two devices: each keeps its half of what is named."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(shape, *axes):
        where = jax.sharding.NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    @functools.cache
    def step(policy):
        w = {k: place((LAYERS, *shape)) for k, shape in SHAPES.items()}
        run = jax.jit(jax.grad(functools.partial(loss, policy=policy)))
        return run.trace(w, place((TOKENS, WIDTH), "data"))

    least, most = (
        remat.device_bytes(step(p).lower().compile())
        for p in (remat.Policy(), remat.Policy(save=["q", "gate", "up"]))
    )
    assert most < least + 0.7 * (INPUTS + 2 * GATES)
    options = dict(names=["q", "gate", "up"], rates=NO_HOST, show=None)
    assert remat.fit(step, most, **options) == remat.Policy(save=["q", "gate", "up"])


@pytest.mark.full
def test_fit_exposed_copies_are_last_resort():
    seconds = products(None) / 3 / FAST.products
    hidden = 1.2 * INPUTS / seconds  # a link that carries the inputs, and no more
    limit = needs(remat.Policy()) - INPUTS // 2
    policy, _ = chosen(limit, remat.Rates(FAST.products, hidden, hidden))
    assert policy is not None and policy.offload == ("block_in",)
    policy, said = chosen(limit, remat.Rates(FAST.products, hidden / 10, hidden / 10))
    assert policy is not None and policy.offload == ("block_in",)
    assert re.search(r"chosen; nothing hides \d+ ms of its copies", said)
    keeps, _ = chosen(needs(remat.Policy()), remat.Rates(1e9, hidden / 10, hidden / 10))
    assert keeps == remat.Policy()


@pytest.mark.full
def test_fit_table_gives_reasons(monkeypatch):
    _, said = chosen(needs(remat.Policy(save=["q"])), NO_HOST)
    head, *rows = said.splitlines()
    assert re.split(" {2,}", head) == [
        "policy", "GiB device", "GiB host", "ms by formula", "measured", "why not"
    ]  # fmt: skip
    assert sum(row.endswith("chosen") for row in rows) == 1
    for reason in ("slower", "would take about", "a CPU has no separate memory"):
        assert any(reason in row for row in rows), said
    _, said = chosen(10**9, FAST, host_limit=INPUTS - 1)
    assert "over 0.000 GiB on the host" in said
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    _, without = chosen(10**9, FAST)
    assert without == said


def test_fit_measures_and_takes_fastest_candidate(monkeypatch):
    """Whatever the formula says; here, a clock on which keeping more takes longer."""
    real, seen = fitting._step_seconds, []

    def run(compiled):
        assert real(compiled) > 0
        seen.append(remat.device_bytes(compiled))
        return float(seen[-1])

    monkeypatch.setattr(fitting, "_step_seconds", run)
    said = []
    policy = remat.fit(traced, 10**9, rates=NO_HOST, trials=3, show=said.append)
    assert len(seen) == 3
    kept = remat.device_bytes(traced(policy).lower().compile())
    assert kept == min(seen) < max(seen)
    (row,) = [line for line in said[0].splitlines() if line.endswith("chosen")]
    assert f"{kept * 1e3:.1f}" in row


def test_names_of_ones_own_choice():
    policy, _ = chosen(needs(remat.Policy()) + 2 * GATES, NO_HOST, names=["up"])
    assert policy == remat.Policy(save=["up"])


def test_fit_names_of_steps_own_blocks():
    def own(h, w):
        return h + jnp.tanh(remat.name(h @ w["gate"], "mine")) @ w["down"]

    @functools.cache
    def step(policy):
        def total(w, h):
            return jnp.sum(jnp.sin(remat.scan_blocks(own, w, h, policy)))

        shapes = {k: (LAYERS, *SHAPES[k]) for k in ("gate", "down")}
        w = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        h = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
        return jax.jit(jax.grad(total)).trace(w, h)

    least, mine = (
        remat.device_bytes(step(policy).lower().compile())
        for policy in (remat.Policy(), remat.Policy(save=["mine"], known=["mine"]))
    )
    assert least < mine
    policy = remat.fit(step, mine, names=["mine"], rates=NO_HOST, show=None)
    assert policy is not None and policy.save == ("mine",)


# -------------------------------------------------------------------- errors


def test_fit_refuses_too_low_a_limit():
    with pytest.raises(ValueError, match=r"no policy fits memory_limit=1,000 bytes"):
        chosen(1000, NO_HOST)


def test_names_that_the_step_does_not_give():
    with pytest.raises(
        ValueError, match="the step names block_in, .*but not down; name"
    ):
        chosen(10**9, NO_HOST, names=["down"])

    def bare(policy):
        return jax.jit(lambda x: x * 2).trace(jnp.ones(3))

    with pytest.raises(ValueError, match="names nothing, but not values of a block"):
        remat.fit(bare, 10**9, rates=NO_HOST)


def test_numbers_of_last_blocks_that_are_none():
    with pytest.raises(ValueError, match=r"last must be numbers .* above 0, got \[0\]"):
        remat.fit(on_gpu, 10**9, last=[0], rates=NO_HOST)


def test_fit_refuses_measuring_in_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for measuring in ({"rates": None}, {"rates": NO_HOST, "trials": 2}):
        with pytest.raises(ValueError, match="remat.fit measures in each process"):
            remat.fit(on_gpu, 10**9, **measuring)
    chosen = remat.fit(on_gpu, 10**9, rates=NO_HOST, show=None)
    assert chosen is None  # everything fits


def test_fit_auto_needs_a_device_limit():
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="'auto' needs a device that reports"):
            remat.fit(on_gpu, "auto", rates=NO_HOST)


def test_rates_are_measured():
    rates = remat.measure_rates(jnp.float32, 64)
    assert rates.products > 0
    if jax.default_backend() == "cpu":
        assert (rates.to_host, rates.from_host) == (0, 0)


def test_policy_described_by_name_or_names():
    assert fitting.describe(None) == "none"
    assert fitting.describe(remat.PRESETS["offload_block"]) == "offload_block"
    both = remat.Policy(save=["q", "k"], offload=["block_in"])
    assert fitting.describe(both) == "save q, k; offload block_in"
    last = remat.PRESETS["offload_block"] | remat.Policy(last=4)  # pyright: ignore
    assert fitting.describe(last) == "offload_block; last 4 whole"
