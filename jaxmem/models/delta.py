"""The gated delta rule: a state of fixed size in the place of keys and values.

    S_t = e^{g_t} S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - e^{g_t} S_{t-1}ᵀ k_t)
    o_t = S_tᵀ q_t

for each head, where queries and keys have length 1 and queries 1/sqrt(width). Tokens of
a chunk are computed together: within it, the u_t solve a triangular system.

Reference: Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
_einsum = functools.partial(jnp.einsum, precision="highest")


class DeltaInputs(NamedTuple):
    """Float32 inputs of the rule for each token, and the token's document."""

    query: jax.Array  # [B, T, H, K] of length 1 / sqrt(K)
    key: jax.Array  # [B, T, H, K] of length 1
    value: jax.Array  # [B, T, H, V]
    decay: jax.Array  # [B, T, H] g, at most 0
    rate: jax.Array  # [B, T, H] β
    documents: jax.Array  # int32 [B, T], which are only compared


def run(
    inputs: DeltaInputs, before: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs f32 [B, T, H, V] of all tokens, and the state after the last.

    A document starts with a state of 0; each row's first document goes on from
    `before`, f32 [B, H, K, V], if it is given. A token with g = 0 and β = 0 changes
    nothing. Residuals are the inputs and a state for each chunk.
    """
    length = inputs.query.shape[1]
    size = min(CHUNK, length)
    padding = -length % size

    def chunked(x: jax.Array, mode: str = "constant") -> jax.Array:
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, mode=mode)
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    parts = DeltaInputs(
        *map(chunked, inputs[:-1]), documents=chunked(inputs.documents, "edge")
    )
    rows, _, heads, width = inputs.query.shape
    if before is None:
        shape = rows, heads, width, inputs.value.shape[-1]
        before = jnp.zeros(shape, jnp.float32)
    start = before, inputs.documents[:, 0]
    (state, _), out = lax.scan(
        jax.checkpoint(_run_chunk, prevent_cse=False), start, parts
    )
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(rows, -1, *out.shape[3:])[:, :length], state


def _run_chunk(carry, chunk: DeltaInputs):
    """The state and document after a chunk, and outputs of its tokens."""
    state, document = carry
    query, key, documents = chunk.query, chunk.key, chunk.documents
    total = jnp.moveaxis(jnp.cumsum(chunk.decay, axis=1), 1, 2)  # [B, H, C]
    same = documents[:, :, None] == documents[:, None, :]
    order = jnp.arange(len(query[0]))
    seen = (same & (order[:, None] >= order))[:, None]
    between = jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # [B, H, C, C], decay from a token to a later one
    # The share of the state that is left at each token of the state's document.
    goes_on = (documents == document[:, None])[:, None]
    left = jnp.where(goes_on, jnp.exp(total), 0)

    rate = jnp.moveaxis(chunk.rate, 1, 2)
    overlap = _einsum("bihk,bjhk->bhij", key, key) * between * rate[..., None]
    before = _einsum("bihk,bhkv->bhiv", key, state) * left[..., None]
    errors = rate[..., None] * (jnp.moveaxis(chunk.value, 1, 2) - before)
    update = jax.scipy.linalg.solve_triangular(
        overlap, errors, lower=True, unit_diagonal=True
    )
    out = _einsum("bihk,bhkv->bhiv", query, state) * left[..., None]
    reads = _einsum("bihk,bjhk->bhij", query, key) * between
    out = out + _einsum("bhij,bhjv->bhiv", reads, update)
    # The last token's row has the shares of updates that are left after the chunk.
    kept = _einsum("bjhk,bhj,bhjv->bhkv", key, between[..., -1, :], update)
    state = left[..., -1][..., None, None] * state + kept
    return (state, documents[:, -1]), jnp.moveaxis(out, 2, 1)


def step(state: jax.Array, inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    """The rule for one more token of a row: f32 [B, 1, H, V], and its next state."""
    query, key, value, decay, rate = (x[:, 0] for x in inputs[:-1])
    state = jnp.exp(decay)[..., None, None] * state
    update = rate[..., None] * (value - _einsum("bhk,bhkv->bhv", key, state))
    state = state + key[..., None] * update[..., None, :]
    return _einsum("bhk,bhkv->bhv", query, state)[:, None], state


def convolve(x: jax.Array, taps: jax.Array, documents: jax.Array) -> jax.Array:
    """A causal convolution of each channel within documents: f32 [B, T, C].

    y_tc = Σ_j taps_c,J-1-j x_{t-j},c
    """
    wide, out = x.astype(jnp.float32), 0.0
    for back in range(taps.shape[1]):
        behind = jnp.pad(wide, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        earlier = jnp.maximum(jnp.arange(x.shape[1]) - back, 0)
        inside = (documents == documents[:, earlier]) & (jnp.arange(x.shape[1]) >= back)
        tap = taps[:, taps.shape[1] - 1 - back].astype(jnp.float32)
        out = out + jnp.where(inside[..., None], behind * tap, 0)
    return jnp.asarray(out)
