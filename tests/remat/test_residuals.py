"""Residuals of a block: names, shapes, types, bytes per token."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import remat

H = jax.ShapeDtypeStruct((2, 8, 4), jnp.bfloat16)
W = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)


def block(h, w):
    return h + jnp.tanh(remat.name(h @ w, "gate")) @ w


def listed(kept):
    return {(each.name, each.shape, str(each.dtype)) for each in kept}


def test_names_shapes_types_and_bytes_per_token():
    kept = remat.residuals(block, H, W)
    # And a form of tanh's derivative that depends on jax's version.
    shape = (2, 8, 4), "bfloat16"
    assert {("block_in", *shape), ("tanh", *shape)} < listed(kept)
    assert kept.tokens == 16
    assert kept.nbytes == 3 * 2 * 16 * 4
    assert kept.bytes_per_token == 24
    lines = str(kept).splitlines()
    assert len(lines) == 4 and lines[-1].split() == ["total", "24.0", "bytes/token"]
    assert "bfloat16[2, 8, 4]" in lines[0]


def test_residuals_of_a_policy():
    saved = remat.residuals(remat.block(block, "full"), H, W)
    assert listed(saved) == {("block_in", (2, 8, 4), "bfloat16")}
    gate = remat.block(block, remat.Policy(save=["gate"]))
    assert {each.name for each in remat.residuals(gate, H, W)} == {"block_in", "gate"}
    products = remat.residuals(remat.block(block, "dots"), H, W)
    assert {each.name for each in products} == {"block_in", "dot_general"}


def test_residuals_count_arrays_once_not_arguments():
    def twice(h, w, shift):
        x = remat.name(jnp.sin(h), "x")
        return h + (x @ w) * (x @ w) + shift

    kept = remat.residuals(twice, H, W, H)
    names = [each.name for each in kept]
    assert names.count("x") == 1
    assert names.count("block_in") <= 1
    frozen = jnp.ones((4, 4), jnp.bfloat16)
    kept = remat.residuals(lambda h: remat.block(block, "full")(h, frozen), H)
    assert listed(kept) == {("block_in", (2, 8, 4), "bfloat16")}


def test_inside_of_nested_functions():
    """By name through jit, recompute and a custom derivative."""

    @jax.custom_vjp
    def square(x):
        return x * x

    def forward(x):
        root = remat.name(x + 1, "k")
        return square(x), root

    square.defvjp(forward, lambda root, dy: (dy * root,))

    def nested(h, w):
        part = remat.recompute(lambda h: jnp.sin(remat.name(h @ w, "q")), save=["q"])
        return jax.jit(square)(part(h))

    assert {each.name for each in remat.residuals(nested, H, W)} == {
        "block_in", "q", "k"
    }  # fmt: skip


def test_residuals_of_a_pytree():
    kept = remat.residuals(lambda h: {k: x * x for k, x in h.items()}, {"a": H, "b": H})
    assert [each.name for each in kept] == ["block_in", "block_in"]
    assert kept.bytes_per_token == 2 * 2 * 4


def test_recompute_keeps_its_arguments_alone():
    def plain(h, w):
        return jnp.sin(jnp.sin(jnp.sin(h @ w)))

    def part(h, w):
        return remat.recompute(plain)(h, w)

    assert len(remat.residuals(plain, H, W).entries) > 1
    assert listed(remat.residuals(part, H, W)) == {("block_in", H.shape, "bfloat16")}
    # A policy around it decides alone.
    dots = remat.residuals(remat.block(part, "dots"), H, W)
    assert {each.name for each in dots} == {"block_in", "dot_general"}
    h, w = jnp.ones((2, 4)), jnp.eye(4)
    got, want = (jax.grad(lambda h, f=f: f(h, w).sum())(h) for f in (part, plain))
    assert jnp.allclose(got, want)


def test_only_what_runs_apart_has_a_barrier():
    """And what it closes over has none: of slices, XLA would make copies for it."""

    def part(h, w):
        return remat.recompute(lambda h: jnp.sin(jnp.sin(h @ w)))(h)

    def barriers(policy, **options):
        def total(w, h):
            return remat.scan_blocks(part, w, h, policy, **options).sum()

        w, h = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
        text = jax.jit(jax.grad(total)).lower(w, h).as_text()
        return [line for line in text.splitlines() if "optimization_barrier" in line]

    assert barriers(None) == barriers("full") == []
    assert barriers("full", unroll=True)
    apart = barriers(None, unroll=True)
    assert apart and not [line for line in apart if "tensor<4x4x" in line]


@pytest.mark.parametrize(
    ("block", "args", "error", "message"),
    [
        ("dots", (H,), TypeError, r"block must be a function of \(h, \*rest\), got 'd"),
        (
            block,
            (jnp.ones(3, int), W),
            TypeError,
            r"h must contain floating.*int32\[3\]",
        ),
        (block, ((), W), TypeError, r"h must contain floating-point arrays.*got \(\)"),
        (block, (H,), ValueError, "residuals of 'block' cannot be listed: .*'w'"),
        (
            lambda h: jax.lax.while_loop(lambda h: h.sum() < 1, jnp.sin, h),
            (H,),
            ValueError,
            "<lambda>' cannot be listed: .*while_loop",
        ),
    ],
)
def test_blocks_that_cannot_be_listed(block, args, error, message):
    with pytest.raises(error, match=message):
        remat.residuals(block, *args)


def test_residuals_of_unknown_policy_are_refused():
    with pytest.raises(ValueError, match="'dots_and_attention'.*got 'dots_and_norms'"):
        remat.residuals(remat.block(block, "dots_and_norms"), H, W)
