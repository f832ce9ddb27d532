"""Whether sampled gradients have the exact mean, and how much noise they add.

    python -m benchmarks.run_sampled_evidence

With W the identity, hidden's gradient is the logits' own derivative, entry by entry.
For every differentiable output, and a loss of all of them by `token_loss`, whole and
with the vocabulary on two devices: many draws of a few tokens, from flat to peaked,
against the derivative dz in float64. With z = (mean - dz) / (|dz| √((1/q - 1)/draws))
of entries that are kept with probability q < 1:

    mean_z2            1 without bias and with that variance; of random_entries numbers,
                       of which those of one token follow from one uniform number a
                       draw, so that far fewer are independent
    outside_95         0.05 without bias: share of |z| > 1.96
    largest_z          the largest |z|
    exact_error        largest error of the entries that are not random
    noise_over_label   trace of the covariance over that of the one-hot label's noise,
                       Σ p (1 - p), of a log-probability; below bound = 1 / (K - 1)
    largest_count      most entries of any draw that are not zero; K + 1, or that of
                       two parts, at most

    python -m benchmarks.run_sampled_evidence --int8 --out sampled_int8_bias_cpu.csv

With forward="int8" results are random, too. For each of them, over tokens: rms and mean
of (draw - exact), the mean's band without bias, and the bias of second order that is
expected of ln S, -Var(S) / 2 S²; for hidden's gradient of each, norms relative to the
exact one: of one draw's error, of the mean's, and what it would be without bias.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxmem
from benchmarks import results

V, K = 512, 32
SHARPNESS = (0.5, 2.0, 4.0, 8.0) * 4  # of each token
OUTPUTS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")
WEIGHTS = (-1.0, 0.5, 0.2, 0.3)  # of the outputs in one loss


def problem():
    """(logits [N, V], labels [N])."""
    rng = np.random.default_rng(0)
    n = len(SHARPNESS)
    z = np.float32(np.array(SHARPNESS)[:, None] * rng.standard_normal((n, V)))
    return z, rng.integers(0, V, n).astype(np.int32)


def derivatives(z, labels) -> dict[str, np.ndarray]:
    """Of each output by the logits, in float64."""
    z = z.astype(np.float64)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    onehot, ln_p = np.arange(V) == labels[:, None], np.log(p)
    entropy = -np.sum(p * ln_p, 1, keepdims=True)
    made = {
        "logprob": onehot - p, "entropy": -p * (ln_p + entropy), "logsumexp": p,
        "sum_pi_squared": 2 * p * (p - np.sum(p * p, 1, keepdims=True)),
    }  # fmt: skip
    made["token_loss"] = sum(w * made[k] for w, k in zip(WEIGHTS, OUTPUTS, strict=True))
    return made | {"p": p}


def loss_of(stats):
    return sum(w * getattr(stats, k) for w, k in zip(WEIGHTS, OUTPUTS, strict=True))


def draws(output, parts, count, z, labels) -> np.ndarray:
    """[draws, N, V]: the logits' sampled derivative."""
    verb = jaxmem.token_loss if output == "token_loss" else jaxmem.token_stats
    if parts > 1:
        kinds = (AxisType.Auto,)
        mesh = jax.make_mesh((parts,), ("v",), kinds, devices=jax.devices()[:parts])
        verb = jaxmem.sharding.parallel(verb, mesh, vocab="v")
    h, y = (jnp.tile(x, (count,) + (1,) * (x.ndim - 1)) for x in (z, labels))
    number = len(OUTPUTS) if output == "token_loss" else OUTPUTS.index(output)
    key = jax.random.fold_in(jax.random.key(parts), number)
    options = {"gradient": jaxmem.Sample(K), "key": key, "layout": "vd"}

    def loss(h):
        if output == "token_loss":
            return verb(loss_of, h, jnp.eye(V), y, normalizer=1, **options)[0]
        return jnp.sum(getattr(verb(h, jnp.eye(V), y, **options), output))

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(jax.grad(loss))(h)).reshape(count, len(z), V)


def row(output, parts, count) -> dict:
    """What the draws of one output say."""
    z, labels = problem()
    want = derivatives(z, labels)
    p, want = want["p"], want[output]
    got = draws(output, parts, count, z, labels).astype(np.float64)
    # What an entry that is kept with probability q has; of those kept, and left out,
    # often enough for a mean to be nearly normal.
    q = np.minimum(1, K * p)
    q[np.arange(len(labels)), labels] = 1
    random = count * np.minimum(q, 1 - q) > 10
    exact = (K * p > 1.001) | (q == 1)
    deviation = np.abs(want) * np.sqrt(np.maximum(1 / q - 1, 0) / count)
    scores = ((got.mean(0) - want) / np.where(random, deviation, 1))[random]
    made = {
        "output": output, "parts": parts, "slots": K, "v": V, "draws": count,
        "random_entries": int(random.sum()),
        "mean_z2": round(float(np.mean(scores**2)), 3),
        "outside_95": round(float(np.mean(np.abs(scores) > 1.96)), 4),
        "largest_z": round(float(np.abs(scores).max()), 2),
        "exact_entries": int(exact.sum()),
        "exact_error": float(f"{np.abs(got.mean(0) - want)[exact].max():.2g}"),
        "largest_count": int((got != 0).sum(-1).max()),
    }  # fmt: skip
    if output == "logprob":
        ratio = got.var(0).sum(1) / np.sum(p * (1 - p), 1)
        made |= {
            "noise_over_label": round(float(ratio.max()), 5),
            "bound": round(1 / (K - 1), 5),
        }
    return made


def rounded_problem():
    """(hidden, W, labels) in bfloat16, from flat to peaked, with two large channels."""
    rng, n, d = np.random.default_rng(1), len(SHARPNESS), 64
    h = np.array(SHARPNESS)[:, None] * rng.standard_normal((n, d)) / 2
    W = rng.standard_normal((V, d)) * d**-0.5
    for channel, factor in (3, 30), (5, 1 / 30):
        h[:, channel] *= factor
        W[:, channel] /= factor
    h, W = (jnp.asarray(x, jnp.bfloat16) for x in (h, W))
    return h, W, rng.integers(0, V, n).astype(np.int32)


def rows_in_8_bits(count) -> list[dict]:
    """One for each output."""
    h, W, labels = rounded_problem()
    wide, n = np.asarray(W, np.float64), len(labels)
    z = np.asarray(h, np.float64) @ wide.T
    slopes = derivatives(z, labels)
    p = slopes["p"]
    lse = np.log(np.sum(np.exp(z - z.max(1, keepdims=True)), 1)) + z.max(1)
    exact = {
        "logprob": z[np.arange(n), labels] - lse, "logsumexp": lse,
        "entropy": -np.sum(p * np.log(p), 1), "sum_pi_squared": np.sum(p * p, 1),
    }  # fmt: skip
    many, y = jnp.tile(h, (count, 1)), jnp.tile(labels, count)
    options = {"gradient": jaxmem.Sample(K, "int8"), "key": jax.random.key(2)}

    @functools.partial(jax.jit, static_argnums=0)
    def run(output, h):
        def loss(h):
            values = getattr(jaxmem.token_stats(h, W, y, **options), output)
            return jnp.sum(values), values

        return jax.grad(loss, has_aux=True)(h)

    made = []
    for output in OUTPUTS:
        dh, values = (np.asarray(x, np.float64) for x in run(output, many))
        errors = values.reshape(count, n) - exact[output]
        dh, want = dh.reshape(count, n, -1), slopes[output] @ wide
        size, far = np.linalg.norm(want), dh - want
        one = np.sqrt(np.mean(np.sum(far**2, (1, 2)))) / size
        row = {
            "output": output, "slots": K, "v": V, "draws": count,
            "rms": np.sqrt(np.mean(errors**2)), "mean": errors.mean(),
            "band": 1.96 * np.sqrt(np.mean(errors.var(0)) / errors.size),
            "expected_bias": -errors.var(0).mean() / 2 if output == "logsumexp" else "",
            "dh_one": one, "dh_mean": np.linalg.norm(far.mean(0)) / size,
            "dh_without_bias": one / count**0.5,
        }  # fmt: skip
        made.append({k: float(f"{x:.3g}") if isinstance(x, np.floating) else x
                     for k, x in row.items()})  # fmt: skip
        print(made[-1], flush=True)
    return made


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4096)
    parser.add_argument("--int8", action="store_true", help="results in 8 bits")
    parser.add_argument("--out", default="sampled_bias_cpu.csv")
    asked = parser.parse_args(arguments)
    if jax.config.jax_num_cpu_devices < 2:
        jax.config.update("jax_num_cpu_devices", 2)
    if asked.int8:
        print("wrote", results.write(asked.out, rows_in_8_bits(asked.draws)))
        return
    rows = []
    for parts in (1, 2):
        for output in (*OUTPUTS, "token_loss"):
            rows.append(row(output, parts, asked.draws))
            print(rows[-1], flush=True)
    print("wrote", results.write(asked.out, rows))


if __name__ == "__main__":
    main()
