"""Policies of rematerialisation: equal numbers, and what goes where."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import remat
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, TOKENS, WIDTH = 4, 6, 8
LAST_WHOLE = remat.PRESETS["offload_block"] | remat.Policy(last=1)
OFFLOADING = [
    LAST_WHOLE, *(slow(k) for k, p in remat.PRESETS.items() if p and p.offload)
]  # fmt: skip


def block(h, w):
    """Attention of a kind and a gated layer, all of its values named."""
    q, k, v = (remat.name(h @ w[x], x) for x in "qkv")
    scores = q @ k.T
    lse = remat.name(jax.nn.logsumexp(scores, axis=-1), "attn_lse")
    out = remat.name(jnp.exp(scores - lse[:, None]) @ v, "attn_out")
    h = h + out
    gate, up = remat.name(h @ w["gate"], "gate"), remat.name(h @ w["up"], "up")
    return h + jnp.tanh(gate) * up


def weights(layers=LAYERS, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)) * 0.2, jnp.float32)
        for name in ("q", "k", "v", "gate", "up")
    }


@pytest.fixture(scope="module")
def h():
    return jnp.asarray(
        np.random.default_rng(1).normal(size=(TOKENS, WIDTH)), jnp.float32
    )


def loss(w, h, policy, **options):
    return jnp.sum(jnp.sin(remat.scan_blocks(block, w, h, policy, **options)))


@pytest.fixture(scope="module")
def want(h):
    """By a plain loop, in which nothing is made again."""

    def plain(w, h):
        for i in range(LAYERS):
            h = block(h, {k: x[i] for k, x in w.items()})
        return jnp.sum(jnp.sin(h))

    return jax.jit(jax.value_and_grad(plain, (0, 1)))(weights(), h)


def assert_close(got, want):
    def close(a, b):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    jax.tree.map(close, got, want)


def gradient(policy, **options):
    return jax.jit(jax.value_and_grad(functools.partial(loss, policy=policy, **options),
                                      (0, 1)))  # fmt: skip


QUICK = ("full", 1), ("save_attention", 1)


@pytest.mark.parametrize(
    "name, group",
    [
        (name, group) if (name, group) in QUICK else slow(name, group)
        for name in remat.PRESETS
        for group in (1, 2)
    ],
)
def test_presets_give_equal_gradients(name, group, h, want):
    assert_close(gradient(name, group=group)(weights(), h), want)


def whole(name, last):
    """The policy of that name, which keeps the last blocks whole."""
    return remat.PRESETS[name] | remat.Policy(last=last)


WITH_LAST = [slow("full", 3, 1), slow("save_attention", 2, 2), slow("dots", 2, 1),
             slow("offload_attention", 1, 1), ("offload_block", 2, 2)]  # fmt: skip


@pytest.mark.parametrize("name, last, group", WITH_LAST)
def test_last_blocks_may_keep_everything(name, last, group, h, want):
    policy = whole(name, last)
    run = gradient(policy, group=group)
    assert_close(run(weights(), h), want)
    sent = len(policy.offload)
    total = functools.partial(loss, policy=policy, group=group)
    assert placements(total, weights(), h) == (0, 0)  # nothing is gone back through
    assert placements(run, weights(), h) == (sent, sent)
    groups = (LAYERS - last) // group  # those after the scan send nothing
    inputs = groups * 4 * TOKENS * WIDTH if name == "offload_block" else 0
    assert inputs == 0 or remat.host_bytes(run, weights(), h) == inputs


def placements(fn, *args):
    """Counts of transfers to each kind of memory in a program for CUDA."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return tuple(
        text.count(f'_xla_buffer_placement = "{kind}"')
        for kind in ("pinned_host", "device")
    )


@pytest.mark.parametrize("name", remat.PRESETS)
def test_offload_copies_once_per_block_each_way(name, h):
    policy = remat.PRESETS[name]
    n = len(policy.offload) if policy else 0
    assert placements(gradient(name), weights(), h) == (n, n)


def test_host_bytes_of_names_in_all_blocks(h):
    a_token_and_width = 4 * TOKENS * WIDTH
    cases = {
        "full": 0,
        "offload_block": LAYERS * a_token_and_width,
        "offload_attention": LAYERS * (5 * a_token_and_width + 4 * TOKENS),
    }
    for name, bytes_ in cases.items():
        assert remat.host_bytes(gradient(name), weights(), h) == bytes_
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_two(w, h):
        return jax.shard_map(
            functools.partial(loss, policy="offload_block"),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
        )(w, h)

    there = remat.host_bytes(jax.jit(jax.grad(on_two)).trace(weights(), h))
    assert there == 2 * cases["offload_block"]
    grouped = gradient("offload_block", group=2)
    assert remat.host_bytes(grouped, weights(), h) == LAYERS // 2 * a_token_and_width


def saved_bytes(name, **options):
    """Bytes that a scan over blocks keeps, by the compiler."""
    w, h = weights(16), jnp.zeros((256, WIDTH))
    return (
        gradient(name, **options).lower(w, h).compile().memory_analysis()
    ).temp_size_in_bytes


@pytest.mark.slow
def test_saved_names_take_memory():
    nothing, attention, all_ = map(saved_bytes, ("full", "save_attention", "none"))
    assert nothing < attention < all_
    assert saved_bytes("full", group=4) > nothing  # four blocks alive at once


def test_stack_not_copied_for_last_blocks_or_groups():
    w, h = weights(16), jnp.zeros((1, WIDTH))
    size = sum(x.nbytes for x in w.values())
    for policy, group in ((remat.Policy(last=1), 1), ("full", 2)):
        compiled = jax.jit(loss, static_argnums=2, static_argnames="group").lower(
            w, h, policy, group=group
        ).compile()  # fmt: skip
        account: Any = compiled.memory_analysis()
        assert account.temp_size_in_bytes < size / 2


@pytest.mark.slow
def test_derivatives_forward_too(h):
    """And by the number of blocks in integers, which have none."""
    numbered = weights() | {"index": jnp.arange(LAYERS)}

    def counting(h, w):
        return block(h, w) * (1 + w["index"])

    def total(h, policy):
        return jnp.sum(remat.scan_blocks(counting, numbered, h, policy))

    @functools.partial(jax.jit, static_argnums=1)
    def both(h, policy):
        _, forward = jax.jvp(functools.partial(total, policy=policy), (h,), (h,))
        return forward, jnp.sum(jax.grad(total)(h, policy) * h)

    for policy in ("full", LAST_WHOLE):
        np.testing.assert_allclose(*both(h, policy), rtol=1e-5)


def test_policies_join():
    save, offload = remat.Policy(save=["q"]), remat.Policy(offload=["q", "block_in"])
    assert save | offload == remat.Policy(save=["q"], offload=["block_in"])
    assert (remat.PRESETS["dots"] | offload).dots
    assert (remat.Policy(last=2) | save | remat.Policy(last=1)).last == 2
    back = remat.Policy(offload=["k"], offload_src="pinned_host", offload_dst="device")
    with pytest.raises(ValueError, match="both policies offload"):
        back | offload


def test_products_kept_beside_names_run_once(h):
    def products(name):
        text = str(jax.make_jaxpr(gradient(name))(weights(), h))
        return text.count("dot_general")

    both = remat.PRESETS["dots"] | remat.Policy(offload=["block_in"])
    assert products("full") > products(both) == products("dots")
    assert placements(gradient(both), weights(), h) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OFFLOADING)
def test_under_vmap_microbatches_and_donation(policy, h, want):
    _, (dw, dh) = jax.vmap(gradient(policy), (None, 0))(weights(), jnp.stack([h, h]))
    assert_close(jax.tree.map(lambda x: x[1], (dw, dh)), want[1])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, batches):
        def add(total, h):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, h, policy)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)
        return total

    made = step(weights(), jnp.stack([h, h]))
    assert_close(made, jax.tree.map(lambda x: 2 * x, want[1][0]))


@pytest.mark.parametrize("policy", OFFLOADING)
def test_under_shard_map(policy, h, want):
    """Tokens do not see each other here: each device has rows of its own."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)

    def total(w, h):
        def local(w, h):
            part = loss(w, h[0], policy)
            return jax.lax.psum(part, "data")

        spec = jax.tree.map(lambda _: P(), w), P("data")
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())(w, h)

    batches = jnp.stack([h, h])
    value, (dw, dh) = jax.jit(jax.value_and_grad(total, (0, 1)))(weights(), batches)
    value_wanted, (dw_wanted, dh_wanted) = want
    doubled = jax.tree.map(lambda x: 2 * x, (value_wanted, dw_wanted))
    assert_close((value, dw), doubled)
    assert_close(dh[1], dh_wanted)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["save_attention", "offload_block", LAST_WHOLE])
def test_remat_beside_the_head(policy, h):
    """A custom_vjp outside of the blocks, and one inside a block."""
    table = jnp.asarray(np.random.default_rng(2).normal(size=(32, WIDTH)), jnp.float32)
    labels = jnp.arange(TOKENS)

    def with_head(h, w):
        total = jaxmem.logprobs(h, table, labels, 16)
        return h + w["gate"][0, 0] * jnp.tanh(total)[:, None]

    def total(w, h, policy):
        h = remat.scan_blocks(with_head, w, h, policy)
        return jaxmem.logprobs(h, table, labels, 16).sum()

    made, wanted = (
        jax.jit(jax.grad(functools.partial(total, policy=p), (0, 1)))(weights(), h)
        for p in (policy, "none")
    )
    assert_close(made, wanted)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"offload": ("residual",)}, "offload has names that no block uses: residual"),
        (
            {"save": ["quarry"]},
            "save has names that no block uses: quarry; known names are",
        ),
        ({"offload": "q"}, "offload must be a sequence of names, got 'q'"),
        (
            {"save": ["q", "k"], "offload": ["k"]},
            "save and offload must not share names, got k in both",
        ),
        ({"offload_dst": "disk"}, "offload_src and offload_dst must be.*'disk'"),
        ({"last": -1}, "last must be a number of blocks, got -1"),
    ],
)
def test_impossible_policies(wrong, message):
    """No name is taken in silence of which nothing would be offloaded."""
    with pytest.raises(ValueError, match=message):
        remat.Policy(**wrong)


def test_cudnn_kernel_kept_by_name_of_logsumexp():
    """jax's primitive, as the policy is asked about it; a GPU test sees its effect."""
    kernel = types.SimpleNamespace(name="dot_product_attention_fwd_wrapper")
    assert remat.Policy(save=["attn_lse"])(kernel) is True
    for other in (remat.Policy(save=["attn_out"]), remat.Policy(offload=["attn_lse"])):
        assert other(kernel) is not True


def test_names_of_ones_own():
    mine = remat.Policy(save=["mine"], known=["mine"])
    assert mine.save == ("mine",)
    assert mine == remat.Policy(save=("mine",), known=("mine",))
    assert (mine | remat.Policy(offload=["block_in"])).save == ("mine",)


@pytest.mark.parametrize("name, last", [("full", 0), slow("none", 0), slow("dots", 2)])
def test_remat_in_unrolled_blocks(name, last, h, want):
    policy = whole(name, last) if last else name
    run = gradient(policy, unroll=True)
    assert_close(run(weights(), h), want)
    assert "stablehlo.while" not in run.lower(weights(), h).as_text()


def test_blocks_that_cannot_be(h):
    with pytest.raises(ValueError, match="must be one of 'none', 'full'.*got 'half'"):
        remat.block(block, "half")
    with pytest.raises(ValueError, match="needs blocks in one jax.lax.scan"):
        remat.block(block, "offload_block", scanned=False)
    with pytest.raises(ValueError, match="needs blocks in one jax.lax.scan"):
        remat.scan_blocks(block, weights(), h, "offload_block", unroll=True)
    with pytest.raises(ValueError, match="group must divide the 4 blocks, got 3"):
        remat.scan_blocks(block, weights(), h, "full", group=3)
    for policy, group in ((remat.Policy(last=4), 1), (LAST_WHOLE, 2)):
        with pytest.raises(ValueError, match="below the 4 blocks, got 4|divide the 3"):
            remat.scan_blocks(block, weights(), h, policy, group=group)
    one = {k: x[0] for k, x in weights().items()}
    with pytest.raises(ValueError, match="one block cannot tell.*remat.scan_blocks"):
        jax.grad(lambda h: remat.block(block, LAST_WHOLE)(h, one).sum())(h)
    uneven = weights() | {"q": weights(3)["q"]}
    with pytest.raises(ValueError, match=r"one leading axis.*\[3, 4\]"):
        remat.scan_blocks(block, uneven, h, "full")


def test_compiler_options_follow_from_policy():
    apart = {"xla_gpu_enable_dynamic_slice_fusion": False}
    assert remat.compiler_options("full") == {}
    for saves in (None, "none", "dots", "save_attention"):
        assert remat.compiler_options(saves) == apart
        assert remat.compiler_options(saves, unroll=True) == {}
    options = remat.compiler_options("offload_block")
    assert "xla_gpu_enable_pipelined_host_offloading" in options
    assert not apart.keys() & options.keys()
    jax.jit(jnp.sin, compiler_options=apart)(1.0)  # XLA refuses unknown options


def program(host=0, temp=0, text="S(5)", devices=1):
    account = types.SimpleNamespace(
        host_temp_size_in_bytes=host, temp_size_in_bytes=temp
    )
    return types.SimpleNamespace(
        as_text=lambda: text,
        memory_analysis=lambda: account,
        input_shardings=[types.SimpleNamespace(device_set=range(devices))],
    )


def test_verify_believes_the_program_alone(monkeypatch):
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="compiled is for a CPU"):
            remat.verify(program(), 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jaxmem.remat.blocks._BROKEN_JAXLIB", ())
    remat.verify(program(host=100, temp=5), 100, without=program(temp=6))
    remat.verify(program(host=50, devices=2), 100)  # each has its own
    for less in (program(host=90), program(host=100, text="")):
        with pytest.raises(RuntimeError, match="promises 100 bytes on the host"):
            remat.verify(less, 100)
    text = """S(5)
  %sine.1 = f32[4]{0:S(5)} sine(%x), frontend_attributes={_xla_compute_type="host"}
  ROOT %add.2 = f32[4]{0} add(%y, %y)"""
    with pytest.raises(RuntimeError, match=r"XLA computes on the host: sine\.1;"):
        remat.verify(program(host=100, text=text), 100)
    with pytest.raises(RuntimeError, match="no fewer than the 6 without offloading"):
        remat.verify(program(host=100, temp=6), 100, without=program(temp=6))


def test_jaxlib_with_wrong_gradients_is_refused(monkeypatch):
    import jaxlib

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jaxmem.remat.blocks._BROKEN_JAXLIB", (jaxlib.__version__,))
    with pytest.raises(RuntimeError, match="openxla/xla#46231.*0.11.2 or newer"):
        remat.block(block, "offload_block")
    remat.block(block, "save_attention")
