"""Peaks of traced programs, from arrays whose sizes are known."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.remat import liveness

N = 64
BYTES = 4 * N * N
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def peak(fn, *shapes, donate=()):
    return liveness.peak(jax.jit(fn, donate_argnums=donate).trace(*shapes))


def test_peak_counts_operands_and_result_of_a_product():
    assert peak(lambda a, b: (a @ b) @ b, SQUARE, SQUARE) == 2 * BYTES


def test_peak_leaves_out_what_elementwise_readers_fuse():
    assert peak(lambda a: jnp.sum(jnp.sin(jnp.cos(a) + 1)), SQUARE) == 4
    assert peak(lambda a: jnp.sin(a) @ a, SQUARE) == 2 * BYTES


def test_peak_leaves_out_results_that_nothing_needs():
    assert peak(lambda a: jnp.sum(a) + 0 * (a @ a)[0, 0] * 0, SQUARE) > 4
    assert peak(lambda a: [a @ a, jnp.sum(a)][1], SQUARE) == 4


def test_peak_reuses_donated_arguments():
    def step(a):
        return a + 1

    assert peak(step, SQUARE) == BYTES and peak(step, SQUARE, donate=0) == 0


@pytest.mark.parametrize("length", [2, 5])
def test_peak_of_loop_has_stack_carry_and_one_iteration(length):
    def run(a):
        def body(carry, _):
            carry = carry @ a
            return carry, carry

        return jnp.sum(jax.lax.scan(body, a, None, length=length)[1])

    # The stack and the carry; the new carry inside of an iteration.
    assert peak(run, SQUARE) == (length + 2) * BYTES


def test_peak_of_loop_moves_constants_into_it():
    def run(a):
        ones = jnp.ones((N, N))
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ ones, a)

    assert peak(run, SQUARE) <= 3 * BYTES


def test_stacked_is_of_residuals_that_the_forward_loop_keeps():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])

    stack = jax.ShapeDtypeStruct((7, N, N), jnp.float32)
    traced = jax.jit(jax.grad(loss)).trace(stack, SQUARE)
    assert liveness.stacked(traced, 7) == 7 * 2 * BYTES  # x and x @ w, or its cosine
    assert liveness.stacked(traced, 6) == 0
