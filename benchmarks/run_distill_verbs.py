"""The verbs of distillation beside materialised jax, in bare GEMMs of the same run.

    python -m benchmarks.run_distill_verbs --out distill_verbs_h200.csv
    python -m benchmarks.run_distill_verbs --shape 1024,512,32768 --dtype float32 \
        --chunk 256 --verb topk_kl --verb topk_kl_loss --out distill_verbs_cpu.csv

One row a path: milliseconds, the ratio to its unit, MiB of temporaries by the compiler.
The unit of a forward pass is `token_stats`' forward pass; that of a forward and
backward pass with `topk_kl` is the bare GEMM `hidden @ W.T`; and that of two heads the
sum of the four products that no implementation avoids: the logits of student and
teacher, and both gradients of the student. Materialised paths make [N, V] logits in
float32. Operands are random normal, of which sampled gradients with K=128 keep all 128
entries of a token; in paths named "policy" they keep about 40 (`sampled_data.py`). A
path that fails is recorded so, and the others go on.
"""

import argparse
import functools
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import on_jax, results, sampled_data, workers
from jaxmem import timing
from jaxmem.bench import stopwatch

SHAPE = (8192, 4096, 151936)
K, DRAWS = 64, 16
KEYS = ("n", "d", "teacher_d", "v", "dtype", "path", "chunk", "device")
# by the names of the records
KINDS = {"kl": jaxmem.ReverseKL, "forward_kl": jaxmem.ForwardKL, "jsd": jaxmem.JSD}


class Path(NamedTuple):
    """A call of operands by name, what it is a multiple of, and what it reads."""

    call: Callable[..., Any]
    unit: str
    teacher_d: int | None = None
    data: str = "normal"


def with_gradients(loss):
    """Value and gradients of hidden and W."""

    def run(h, W, *others):
        return jax.value_and_grad(lambda h, W: loss(h, W, *others), (0, 1))(h, W)

    return run


def logits(h, W):
    return jnp.matmul(h, W.T, preferred_element_type=jnp.float32)


def cross_entropy(stats):
    return -stats.logprob


def materialised_topk(h, W, ids, said):
    return jax.lax.top_k(jax.nn.log_softmax(logits(h, W)), ids.shape[1])


def materialised_topk_kl(h, W, ids, said):
    """Forward KL with a rest by 1 - Σ p, as trainers write it."""
    ln_p = jnp.take_along_axis(jax.nn.log_softmax(logits(h, W)), ids, axis=1)
    p, q = jnp.exp(ln_p), jnp.exp(said)
    rest_p, rest_q = (jnp.maximum(1 - x.sum(1), 1e-7) for x in (p, q))
    whole = (q * (said - ln_p)).sum(1) + rest_q * jnp.log(rest_q / rest_p)
    return whole.mean()


def materialised_draws(h, W, ids, said):
    """One after another: at once, the noise alone would be 16 times the logits."""
    z, keys = logits(h, W), jax.random.split(jax.random.key(0), DRAWS)
    return jax.lax.map(lambda key: jax.random.categorical(key, z), keys)


def materialised_of_two(verb):
    def loss(h, W, teacher, teacher_W):
        ln_p = jax.nn.log_softmax(logits(h, W))
        ln_q = jax.nn.log_softmax(logits(teacher, teacher_W))
        p, q = jnp.exp(ln_p), jnp.exp(ln_q)
        if verb == "kl":
            return (p * (ln_p - ln_q)).sum(1).mean()
        if verb == "forward_kl":
            return (q * (ln_q - ln_p)).sum(1).mean()
        ln_m = jnp.log((p + q) / 2)
        return ((p * (ln_p - ln_m)).sum(1) + (q * (ln_q - ln_m)).sum(1)).mean() / 2

    return loss


def four_products(h, W, teacher, teacher_W):
    """What any divergence of two heads computes, with logits in hidden's type."""
    z, y = h @ W.T, teacher @ teacher_W.T
    return z @ W, y.T @ h


def paths_of(chunk, depths) -> dict[str, Path]:
    """Every path by name."""

    def topk_kl(h, W, ids, said):
        target = jaxmem.ForwardKL(jaxmem.Columns(ids, said))
        return jaxmem.divergence(h, W, target, chunk).mean()

    def mixed(h, W, ids, said):
        labels, ce = ids[:, 0], functools.partial(jaxmem.token_loss, cross_entropy)
        return topk_kl(h, W, ids, said) + ce(h, W, labels, chunk=chunk)[0]

    def topk_kl_loss(h, W, ids, said):
        return jaxmem.divergence_loss(
            lambda stats, divergence: divergence + cross_entropy(stats), h, W,
            ids[:, 0], jaxmem.ForwardKL(jaxmem.Columns(ids, said)), chunk=chunk,
        )[0]  # fmt: skip

    def topk(h, W, ids, said):
        return jaxmem.topk(h, W, ids.shape[1], chunk)

    paths = {
        "topk": Path(topk, "stats"),
        "topk materialised": Path(materialised_topk, "stats"),
        "sample_ids": Path(
            lambda h, W, *_: jaxmem.sample_ids(h, W, DRAWS, jax.random.key(0), chunk),
            "stats",
        ),
        "sample_ids materialised": Path(materialised_draws, "stats"),
        "topk_kl with gradients": Path(with_gradients(topk_kl), "gemm"),
        "topk_kl and token_loss with gradients": Path(with_gradients(mixed), "gemm"),
        "topk_kl_loss with gradients": Path(with_gradients(topk_kl_loss), "gemm"),
        "topk_kl with gradients materialised": Path(
            with_gradients(materialised_topk_kl), "gemm"
        ),
    }
    for depth in depths:
        for verb in KINDS:
            paths |= paths_of_two(verb, chunk, depth)
    return paths


def paths_of_two(verb, chunk, depth) -> dict[str, Path]:
    """Paths to a divergence: a token's, in a loss, sampled, frozen, materialised."""

    def target_of(*teacher):
        return KINDS[verb](jaxmem.Teacher(*teacher))

    def each(h, W, *teacher, **options):
        target = target_of(*teacher)
        return jaxmem.divergence(h, W, target, chunk, **options).mean()

    def one_pass(h, W, teacher, teacher_W):
        labels = jnp.zeros(len(h), jnp.int32)
        return jaxmem.divergence_loss(
            lambda stats, divergence: divergence, h, W, labels,
            target_of(teacher, teacher_W), chunk=chunk,
        )[0]  # fmt: skip

    def sampled(*heads):
        return each(*heads, gradient=jaxmem.Sample(128), key=jax.random.key(1))

    def frozen(*heads):
        h, W, *teacher = heads
        return each(h, jax.lax.stop_gradient(W), *teacher)

    name = f"{verb} with gradients, teacher D={depth}"
    losses = {
        name: each, f"divergence_loss {name}": one_pass, f"{name}, K=128": sampled,
        f"{name}, W frozen": frozen, f"{name} materialised": materialised_of_two(verb),
    }  # fmt: skip
    unit = f"four {depth}"
    paths = {k: Path(with_gradients(x), unit, depth) for k, x in losses.items()}
    name = f"{name}, K=128"
    return paths | {f"{name}, policy": paths[name]._replace(data="policy")}


def units_of(depths) -> dict[str, Path]:
    """What the paths are multiples of."""

    def stats(h, W, ids, said):
        return jaxmem.token_stats(h, W, ids[:, 0])

    made = {"gemm": Path(lambda h, W, *_: h @ W.T, ""), "stats": Path(stats, "")}
    return made | {f"four {d}": Path(four_products, "", d) for d in depths}


def operands_of(shape, dtype, teacher_d, data="normal"):
    """hidden, W, and a teacher: K columns, or a head."""
    n, _, v = shape
    if data != "normal":
        h, W, _ = sampled_data.problem(data, shape, dtype)
        return h, W, *sampled_data.problem(data, (n, teacher_d, v), dtype, 1)[:2]
    h, W, _ = on_jax.problem(shape, dtype)
    if teacher_d:
        teacher, teacher_W, _ = on_jax.problem((n, teacher_d, v), dtype)
        return h, W, -teacher, teacher_W
    width = min(K, v)
    ids = (jnp.arange(n)[:, None] * 7 + jnp.arange(width) * (v // width)) % v
    said = jax.nn.log_softmax(jax.random.normal(jax.random.key(5), (n, width)))
    return h, W, ids.astype(jnp.int32), said - 0.1


def compiled(path, operands) -> tuple[Any, dict[str, Any]]:
    """(the program or None, columns: MiB, seconds, or what went wrong)."""
    start = time.perf_counter()
    try:
        made = jax.jit(path.call).lower(*operands).compile()
        temp = on_jax.memory_bytes(made)[2]
        taken = round(time.perf_counter() - start, 1)
        return made, {"temp_mib": round(temp / 2**20, 1), "compile_s": taken}
    except Exception as error:  # a path's own: said, and the others go on
        if on_jax.is_out_of_memory(error):
            return None, {"note": timing.OUT_OF_MEMORY}
        return None, {"note": f"failed: {workers.said(error)}"}


def measure(shape, dtype, chunk, operands_kind, repetitions, wanted=None):
    """One row a path that reads such (teacher_d, data), each beside its unit."""
    teacher_d, data = operands_kind
    depths = (teacher_d,) if teacher_d else ()
    every = {
        name: path
        for name, path in paths_of(chunk, depths).items()
        if (path.teacher_d, path.data) == operands_kind
        and (not wanted or name.split()[0] in wanted)
    }
    if not every:
        return
    operands = operands_of(shape, dtype, teacher_d, data)
    units = units_of(depths)
    needed = {"gemm", *(path.unit for path in every.values())}
    ready = {k: compiled(p, operands) for k, p in every.items()}
    unit_runs = {k: jax.jit(units[k].call).lower(*operands).compile() for k in needed}
    programs = unit_runs | {k: run for k, (run, _) in ready.items() if run is not None}
    runs = {k: functools.partial(run, *operands) for k, run in programs.items()}
    gemm = runs.pop("gemm")
    gemm_ms, taken = timing.take_turns(stopwatch(), gemm, runs, repetitions)
    for name, path in every.items():
        of_unit = 1.0 if path.unit == "gemm" else taken[path.unit].over_unit
        yield {
            "n": shape[0], "d": shape[1], "teacher_d": teacher_d or "", "v": shape[2],
            "dtype": jnp.dtype(dtype).name, "path": name, "chunk": chunk,
            "gemm_ms": round(gemm_ms, 3), "unit": path.unit.split()[0],
            **_columns(taken.get(name), of_unit), **ready[name][1],
            "repetitions": repetitions, **results.provenance(),
        }  # fmt: skip


def _columns(found, of_unit):
    if found is None:
        return {"ms": timing.OUT_OF_MEMORY}
    return {
        "ms": round(found.ms, 3),
        "over_gemm": round(found.over_unit, 3),
        "over_unit": round(found.over_unit / of_unit, 3),
        "spread": round(found.spread, 3),
    }


def parser():
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    workers.add_two_heads(made, out="distill_verbs.csv")
    made.add_argument("--chunk", type=int, action="append", help="of the verbs; 1024")
    made.add_argument("--verb", action="append", help="of the paths; all")
    return made


def main(arguments=None):
    args = parser().parse_args(arguments)
    shapes = workers.shapes_of(args) if args.shape else [SHAPE]
    for shape in shapes:
        for chunk in args.chunk or [1024]:
            depths = args.teacher_depth or (shape[1], 2 * shape[1])
            of_two_heads = itertools.product(depths, ("normal", "policy"))
            for kind in ((None, "normal"), *of_two_heads):
                rows = measure(
                    shape, getattr(jnp, args.dtype), chunk, kind, args.repetitions,
                    args.verb,
                )  # fmt: skip
                for row in rows:
                    results.merge(args.out, [row], KEYS)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
