"""Log-probabilities of heads against exact ones, and what corrections reject for it.

    python -m benchmarks.run_mismatch

One engine samples from the exact distribution, in float64, of bfloat16 hidden states
and weights; a head computes the same tokens' log-probabilities from the same numbers.
Heads: jaxmem's; logits in float32; logits stored in bfloat16, with a softmax in
float32; log-probabilities of the last one stored in bfloat16. Logits are normal with a
standard deviation of 1 (flat), 3 (policy) or 8 (peaked).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import results
from jaxmem import losses

SEQUENCES, TOKENS, D, V = 64, 256, 128, 16384
SPREADS = {"flat": 1.0, "policy": 3.0, "peaked": 8.0}
BANDS = {"strict": (0.999, 1.002), "1_01": (0.99, 1.01), "icepop": (0.5, 5.0)}


def fused(h, W, y):
    return jaxmem.logprobs(h, W, y, chunk=256)


def materialised(h, W, y, round_logits=None, round_logprobs=None):
    """Logits and their softmax in float32, of which one or both are rounded."""
    rounded = round_logits or _as_it_is

    def part(args):
        h, y = args
        z = rounded(jnp.matmul(h, W.T, preferred_element_type=jnp.float32))
        lp = jax.nn.log_softmax(z)
        return jnp.take_along_axis(lp, y[:, None], 1)[:, 0]

    parts = jax.lax.map(part, (h.reshape(-1, 256, h.shape[1]), y.reshape(-1, 256)))
    return (round_logprobs or _as_it_is)(parts.ravel())


def _as_it_is(x):
    return x


def in_bfloat16(x):
    """Rounded; a conversion there and back may be compiled away."""
    return jax.lax.reduce_precision(x, 8, 7)


HEADS = {
    "jaxmem": fused,
    "float32 logits": materialised,
    "bfloat16 logits": lambda *a: materialised(*a, in_bfloat16),
    "bfloat16 log-probs": lambda *a: materialised(*a, in_bfloat16, in_bfloat16),
}


def problem(spread, rng, tokens):
    """Hidden states, weights, tokens drawn from them, and exact log-probabilities."""
    h = jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16)
    W = rng.standard_normal((V, D)) * (spread / D**0.5)
    W = jnp.asarray(W, jnp.bfloat16)
    exact_h, exact_W = (np.asarray(x.astype(jnp.float32), np.float64) for x in (h, W))
    labels, logprobs = np.empty(tokens, np.int32), np.empty(tokens)
    for start in range(0, tokens, 512):
        here = slice(start, start + 512)
        z = exact_h[here] @ exact_W.T
        z -= z.max(1, keepdims=True)
        lse = np.log(np.exp(z).sum(1))
        labels[here] = (z + rng.gumbel(size=z.shape)).argmax(1)
        chosen = np.take_along_axis(z, labels[here, None], 1)[:, 0]
        logprobs[here] = chosen - lse
    return h, W, jnp.asarray(labels), logprobs


def measure(sequences=SEQUENCES, length=TOKENS):
    rows = []
    for data, spread in SPREADS.items():
        rng = np.random.default_rng(0)
        h, W, y, exact = problem(spread, rng, sequences * length)
        for head, logprobs in HEADS.items():
            got = np.asarray(jax.jit(logprobs)(h, W, y))
            rows.append({"data": data, "spread": spread, "head": head,
                         "sequences": sequences, "length": length, "d": D, "v": V,
                         **rejected(got, exact, sequences)})  # fmt: skip
    return rows


def rejected(got, exact, sequences):
    """Errors in nats, and percentages of tokens and sequences that corrections drop."""
    report = jaxmem.mismatch_report(got, exact.astype(np.float32))
    error = np.abs(got - exact)  # in float64; the report's exact ones are rounded
    row = {"mean_error": f"{error.mean():.2e}", "max_error": f"{error.max():.2e}"}
    shape = (sequences, -1)
    given = got.reshape(shape), exact.reshape(shape).astype(np.float32)
    ids = np.ones(given[0].shape, int)
    for name, (low, high) in BANDS.items():
        weights = losses.icepop_weights(*given, low=low, high=high)
        row[f"tokens_outside_{name}"] = f"{100 * float((weights == 0).mean()):.3f}"
    for name in ("geometric_mean", "every_token"):
        weights = losses.sequence_mask_weights(*given, ids, statistic=name)
        dropped = float((weights == 0).all(1).mean())
        row[f"sequences_dropped_{name}"] = f"{100 * dropped:.1f}"
    assert abs(float(report.inside_strict) * 100
               + float(row["tokens_outside_strict"]) - 100) < 1e-2  # fmt: skip
    return row


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes none
    rows = measure()
    for row in rows:
        print(row)
    print("wrote", results.write("mismatch_cpu.csv", rows))
