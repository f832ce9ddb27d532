"""Error of W's gradient in bfloat16 against the number of chunks, and its figure.

    python -m benchmarks.run_dw_error

Three ways to sum over chunks: jaxmem's float32 sums inside the rule; a scan that is
differentiated, whose sum jax carries in W's type; materialised logits, one GEMM.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import lax

import jaxmem
from benchmarks import results

N, D, V = 8192, 64, 1024
CHUNKS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def token_loss(h, W, y):
    z = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).sum()


def scanned(h, W, y, n_chunks):
    """The usual chunked loss: a checkpointed scan, left to autodiff."""

    @jax.checkpoint
    def body(total, part):
        return total + token_loss(part[0], W, part[1]), None

    parts = h.reshape(n_chunks, -1, D), y.reshape(n_chunks, -1)
    return lax.scan(body, 0.0, parts)[0]


def fused(h, W, y, n_chunks):
    return -jaxmem.logprobs(h, W, y, N // n_chunks).sum()


def relative_error(loss, h, W, y):
    """Against the same gradient of the same bfloat16 numbers, in float32."""
    got = jax.jit(jax.grad(loss, 1))(h, W, y).astype(jnp.float32)
    exact = [x.astype(jnp.float32) for x in (h, W)]
    want = jax.jit(jax.grad(token_loss, 1))(*exact, y)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def measure():
    keys = jax.random.split(jax.random.key(0), 3)
    # A shared direction gives the sum a sign, as a real objective does.
    h = (jax.random.normal(keys[0], (N, D)) + 1).astype(jnp.bfloat16)
    W = (jax.random.normal(keys[1], (V, D)) * D**-0.5).astype(jnp.bfloat16)
    y = jax.random.randint(keys[2], (N,), 0, V)
    rows = []
    for n in CHUNKS:
        paths = {
            "jaxmem": functools.partial(fused, n_chunks=n),
            "scan_by_autodiff": functools.partial(scanned, n_chunks=n),
            "materialised": token_loss,
        }
        errors = {k: relative_error(loss, h, W, y) for k, loss in paths.items()}
        rows.append({"chunks": n, **{k: f"{e:.2e}" for k, e in errors.items()}})
    return rows


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    x = [int(row["chunks"]) for row in rows]
    styles = {"scan_by_autodiff": "s-", "materialised": "--", "jaxmem": "o-"}
    for name, style in styles.items():
        label = name.replace("_", " ")
        ax.plot(x, [float(row[name]) for row in rows], style, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("chunks")
    ax.set_ylabel("relative error of dW, bfloat16")
    ax.legend(frameon=False)
    fig.savefig(path, dpi=160)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes none
    rows = measure()
    for row in rows:
        print(row)
    print("wrote", results.write("dw_error.csv", rows))
    plot(results.read("dw_error.csv"), results.FOLDER / "dw_error.png")
