"""Errors of the normaliser with 8-bit operands, corrected or not: see `run_lowbit`."""

import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import sampled_data

SHAPES = ((8192, 4096, 151936), (8192, 2880, 201088), (16384, 640, 262144))
CHANNELS = 16
KINDS = {"int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}
DRAWS = 4


def product(h, W):
    """h Wᵀ in float32, exact products."""
    h, W = h.astype(jnp.float32), W.astype(jnp.float32)
    return jnp.matmul(h, W.T, precision=lax.Precision.HIGHEST)


def widest(h, W, count: int = CHANNELS):
    """Channels that are largest relative to their rows, in hidden or in W."""

    def size(x):
        x = jnp.abs(x.astype(jnp.float32))
        return jnp.max(x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True)), axis=0)

    score = jnp.maximum(size(h) / jnp.mean(size(h)), size(W) / jnp.mean(size(W)))
    return lax.top_k(score, count)[1]


@functools.partial(jax.jit, static_argnames=("dtype", "count"))
def split(h, W, dtype, count: int = CHANNELS):
    """((8-bit hidden, scale), (8-bit W, scale), the channels of both in bfloat16)."""
    from benchmarks.lowbit_forward import quantised

    if not count:
        return quantised(h, dtype), quantised(W, dtype), None
    at = widest(h, W, count)
    wide = tuple(x[:, at].astype(jnp.bfloat16) for x in (h, W))
    h, W = (x.at[:, at].set(0) for x in (h, W))
    return quantised(h, dtype), quantised(W, dtype), wide


def logits_of(h, W, wide):
    """The logits that the kernel multiplies, with exact sums."""
    z = product(h[0], W[0]) * h[1][:, None] * W[1]
    return z if wide is None else z + product(*wide)


def corrected(z, exps, m, y, slots: int, u):
    """ln S of rows, one per draw [draws, rows].

    exps are e^(ẑ - m) except the label's, which is exact.
    """
    others = jnp.arange(z.shape[1]) != y[:, None]
    exact = jnp.exp(z - m[:, None])
    exps = jnp.where(others, exps, 0)
    sums = jnp.sum(exps, axis=1) + jnp.sum(jnp.where(others, 0, exact), axis=1)
    q = jnp.minimum(1, slots * exps / sums[:, None])
    ends = jnp.cumsum(q, axis=1)
    terms = jnp.where(q > 0, (exact - exps) / jnp.maximum(q, 1e-30), 0)

    def draw(u):
        before = jnp.floor(ends - q + u[:, None])
        kept = (jnp.floor(ends + u[:, None]) > before) | (q >= 1)
        return jnp.log(sums + jnp.sum(jnp.where(kept, terms, 0), axis=1)) + m

    return lax.map(draw, u)


@functools.partial(jax.jit, static_argnames="slots")
def errors_of(h, W, y, exps, m, raw, slots: int, key):
    """(raw, corrected [draws, rows], expected square of ẑ's error) of some rows."""
    z = product(h, W)
    exact = jax.nn.logsumexp(z, axis=1)
    u = jax.random.uniform(key, (DRAWS, len(y)))
    found = corrected(z, exps, m, y, slots, u) - exact
    other = jnp.log(jnp.maximum(exps, 1e-37)) + m[:, None]
    keep = (exps > 1e-30) & (jnp.arange(z.shape[1]) != y[:, None])
    p = jnp.exp(z - exact[:, None])
    square = jnp.sum(jnp.where(keep, p * (other - z) ** 2, 0), axis=1)
    return raw - exact, found, square


@jax.jit
def emulated(h, W, wide):
    """(e^(ẑ - m) in bfloat16's precision, m, ln Σ e^ẑ)."""
    z = logits_of(h, W, wide)
    m = jnp.max(z, axis=1)
    exps = jnp.exp(z - m[:, None]).astype(jnp.bfloat16).astype(jnp.float32)
    return exps, m, jax.nn.logsumexp(z, axis=1)


def summary(parts) -> dict[str, Any]:
    """Columns of the errors of all rows."""
    raw, found, square = (
        np.concatenate([np.asarray(x, np.float64) for x in xs], axis=-1)
        for xs in zip(*parts, strict=True)
    )
    return {
        "rows": raw.size, "draws": DRAWS,
        "logit_rms": sig(np.sqrt(square.mean())),
        "raw_rms": sig(np.sqrt((raw**2).mean())), "raw_mean": sig(raw.mean()),
        "corrected_rms": sig(np.sqrt((found**2).mean())),
        "corrected_mean": sig(found.mean()),
        "mean_band": sig(1.96 * found.mean(axis=0).std() / np.sqrt(raw.size)),
    }  # fmt: skip


def sig(x) -> float:
    return float(f"{float(x):.3g}")


def errors(h, W, y, slots, rows_at_once=128):
    """Rows of errors of both types, with and without channels in 16 bits."""
    for name, dtype in KINDS.items():
        for count in (CHANNELS, 0):
            of_h, of_W, wide = split(h, W, dtype, count)
            per_slots: dict[int, list] = {k: [] for k in slots}
            for i in range(0, len(h), rows_at_once):
                s = slice(i, i + rows_at_once)
                here = None if wide is None else (wide[0][s], wide[1])
                exps, m, raw = emulated((of_h[0][s], of_h[1][s]), of_W, here)
                for k, parts in per_slots.items():
                    key = jax.random.key(1000 * k + i)
                    found = errors_of(h[s], W, y[s], exps, m, raw, k, key)
                    parts.append(jax.device_get(found))
            for k, parts in per_slots.items():
                facts = {"path": name, "product": "exact", "slots": k}
                yield {**facts, "channels": count, **summary(parts)}


def run_errors(asked):
    shape = tuple(map(int, asked.shape[0].split(","))) if asked.shape else SHAPES[0]
    for kind in sampled_data.KINDS:
        rows, d, v = asked.rows, *shape[1:]
        problem = sampled_data.problem(kind, (rows, d, v), jnp.bfloat16)
        for row in errors(*problem, asked.slots):
            yield {"data": kind, "n": rows, "d": d, "v": v, **row}


def run_trained(asked):
    """Hidden states of held-out rows of a decoder that learned from its own sources."""
    from benchmarks import run_sampled_training as training
    from jaxmem.data.documents import Batch, load_tokenizer
    from jaxmem.train import configuration

    given = [*training.CPU, *asked.overrides]
    overrides = list({text.split("=")[0]: text for text in given}.values())
    with tempfile.TemporaryDirectory() as folder:
        overrides += [f"data.cache_dir={folder!r}", "data.source='stdlib'"]
        config, _ = configuration.load(training.CONFIG, overrides)
        tokenizer = load_tokenizer(config.data)
        rows = training.read_rows(config, "stdlib", tokenizer, config.run.steps)
    prepared = training.prepare(config, "exact", 0)
    program = prepared[0]
    state, losses, _ = training.take_steps(prepared, program.initial_state(), rows, 0)
    print("losses", losses[:3], losses[-3:], flush=True)
    model = program.model(state.params, program.frozen())
    batch = Batch(*(x[: config.data.batch_size * 2] for x in rows.held_out))
    h = model(batch.tokens, batch.segment_ids, batch.positions)
    h = h.reshape(-1, h.shape[-1]).astype(jnp.bfloat16)
    from flax import nnx

    kernel = nnx.to_pure_dict(nnx.split(model.head)[1])["kernel"]
    W, y = kernel.T.astype(jnp.bfloat16), jnp.asarray(batch.labels).ravel()
    chosen = jnp.flatnonzero(y >= 0)[: asked.rows]
    h, y = h[chosen], y[chosen]
    loss = jnp.mean(jax.nn.logsumexp(product(h, W), axis=1)) - jnp.mean(
        jnp.sum(h.astype(jnp.float32) * W[y].astype(jnp.float32), axis=1)
    )
    facts = {"data": "trained", "n": len(y), "d": h.shape[1], "v": len(W)}
    facts |= {"steps": config.run.steps, "held_out_loss": sig(loss)}
    for row in errors(h, W, y, asked.slots):
        yield {**facts, **row}
