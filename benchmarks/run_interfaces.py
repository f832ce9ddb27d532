"""Representative calls of the functions: their bits, and what their programs do.

    python -m benchmarks.run_interfaces --when after
    python -m benchmarks.run_interfaces --when after --devices 2

Two versions of the package compute the same where the bits of values and gradients,
the products and collectives of the compiled programs, and their temporary bytes agree.
"""

import argparse
import re
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import results

NAME, KEYS = "interfaces_cpu.csv", ("call", "when", "devices")
N, D, V, K, CHUNK = 96, 32, 384, 8, 32
_PRODUCT = re.compile(r" dot\(|custom_call_target=\"[^\"]*matmul")
_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all)\(")
SAMPLE = {"gradient": jaxmem.Sample(K), "key": np.array([0, 0], np.uint32)}


def _head(seed, depth):
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, depth), np.float32)
    W = rng.standard_normal((V, depth), np.float32) * 2 * depth**-0.5
    return jnp.asarray(h), jnp.asarray(W)


def _data():
    rng = np.random.default_rng(2)
    y = jnp.asarray(rng.integers(0, V, N, dtype=np.int32)).at[::7].set(-1)
    ids = jnp.asarray(rng.integers(0, V, (N, K), dtype=np.int32))
    bias = jnp.asarray(rng.standard_normal(V, np.float32))
    g = jnp.asarray(rng.standard_normal(N, np.float32))
    log_q = jnp.log(jnp.full((N, K), 0.9 / K))
    return SimpleNamespace(y=y, ids=ids, bias=bias, g=g, log_q=log_q)


def _of_one_head(h, W, x):
    """Calls as (function, operands), differentiated by all operands."""
    low, both = (h.astype(jnp.bfloat16), W.astype(jnp.bfloat16)), (h, W)

    def logprobs(h, W, **options):
        return jaxmem.logprobs(h, W, x.y, CHUNK, **options).sum()

    def with_options(h, W, bias):
        return logprobs(
            h, jaxmem.Head(W.T, bias, softcap=9.0, vocab_size=V - 9), temperature=0.7,
            where=x.g > 0,
        )  # fmt: skip

    def stats(h, W):
        return sum(v.sum() for v in jaxmem.token_stats(h, W, x.y, CHUNK)[:4])

    def of_logits(z):
        return jaxmem.logprobs_from_logits(z, x.y, CHUNK).sum()

    blocks = {"gradient": jaxmem.Recompute(blocks=3)}
    return {
        "logprobs": (logprobs, both),
        "logprobs bfloat16": (logprobs, low),
        "logprobs options": (with_options, (h, W, x.bias)),
        "logprobs frozen": (lambda h: logprobs(h, W), (h,)),
        "logprobs blocks": (lambda h, W: logprobs(h, W, **blocks), low),
        "logprobs sampled": (lambda h, W: logprobs(h, W, **SAMPLE), both),
        "logprobs groups": (lambda h, W: logprobs(h, W, vocab_groups=4), both),
        "token_stats": (stats, both),
        "entropy": (lambda h, W: jaxmem.entropy(h, W, CHUNK).sum(), both),
        "logprobs_from_logits": (of_logits, (h @ W.T,)),
    }


def _of_losses_and_columns(h, W, x):
    def reinforce(stats, advantages):
        return -advantages * stats.logprob + 0.1 * stats.entropy

    def loss(h, W, **more):
        return jaxmem.token_loss(reinforce, h, W, x.y, x.g, chunk=CHUNK, **more)[0]

    def selected(h, W):
        return jaxmem.selected_logprobs(h, W, x.ids, CHUNK).sum()

    def support(h, W):
        return jaxmem.support_logprobs(h, W, x.ids[:, 0], x.ids).sum()

    def topk(h, W):
        return jaxmem.topk(h, W, K, CHUNK).logprobs.sum()

    both = (h, W)
    return {
        "token_loss": (loss, both),
        "token_loss frozen": (lambda h: loss(h, W), (h,)),
        "token_loss sampled": (lambda h, W: loss(h, W, **SAMPLE), both),
        "selected_logprobs": (selected, both),
        "support_logprobs": (support, both),
        "topk": (topk, both),
    }


def _of_divergences(h, W, x):
    teacher, both, jm = jaxmem.Teacher(*_head(1, 2 * D)), (h, W), jaxmem

    def distil(stats, divergence):
        return divergence - 0.1 * stats.logprob

    def of(target, **options):
        return lambda h, W: jm.divergence(h, W, target, CHUNK, **options).sum()

    def mixed(target):
        return lambda h, W: jm.divergence_loss(
            distil, h, W, x.y, target, chunk=CHUNK
        )[0]  # fmt: skip

    columns, drawn = jm.Columns(x.ids, x.log_q), jm.Drawn(x.ids)
    return {
        "reverse_kl": (of(jm.ReverseKL(teacher)), both),
        "forward_kl frozen": (lambda h: of(jm.ForwardKL(teacher))(h, W), (h,)),
        "jsd sampled": (of(jm.JSD(teacher, 0.3), **SAMPLE), both),
        "columns": (of(jm.ForwardKL(columns)), both),
        "loss of heads": (mixed(jm.ReverseKL(teacher)), both),
        "loss of columns": (mixed(jm.ForwardKL(columns)), both),
        "loss of draws": (mixed(jm.ForwardKL(drawn)), both),
    }


def _of_a_mesh(h, W, x):
    mesh = jax.make_mesh((2,), ("tensor",))
    teacher = jaxmem.Teacher(*_head(1, 2 * D))
    columns = jaxmem.Columns(x.ids, x.log_q)

    def sharded(verb, *more):
        run = jaxmem.sharding.parallel(verb, mesh, vocab="tensor")
        return (lambda h, W: run(h, W, *more, CHUNK).sum()), (h, W)

    return {
        "by tokens": _of_one_head(h, W, x)["logprobs"],
        "sharded logprobs": sharded(jaxmem.logprobs, x.y),
        "sharded kl": sharded(jaxmem.divergence, jaxmem.ReverseKL(teacher)),
        "sharded columns": sharded(jaxmem.divergence, jaxmem.ForwardKL(columns)),
    }


def _bits(tree) -> str:
    data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    return f"{zlib.crc32(data):08x}"


def measure(function, operands) -> dict:
    """The columns of one call."""
    both = jax.value_and_grad(function, tuple(range(len(operands))))
    compiled = jax.jit(both).lower(*operands).compile()
    value, gradients = compiled(*operands)
    text = compiled.as_text()
    return {
        "value_bits": _bits(value),
        "gradient_bits": _bits(gradients),
        "products": len(_PRODUCT.findall(text)),
        "collectives": len(_COLLECTIVE.findall(text)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--when", required=True, help="of the package: before or after")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--csv", default=NAME)
    asked = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", asked.devices)
    h, W = _head(0, D)
    groups = _of_one_head, _of_losses_and_columns, _of_divergences
    groups = groups if asked.devices == 1 else (_of_a_mesh,)
    calls = {k: v for group in groups for k, v in group(h, W, _data()).items()}
    rows = {name: measure(*call) for name, call in calls.items()}
    where = {"when": asked.when, "devices": asked.devices}
    facts = results.provenance()
    made = [{"call": name} | where | row | facts for name, row in rows.items()]
    print("wrote", results.merge(asked.csv, made, KEYS))


if __name__ == "__main__":
    main()
