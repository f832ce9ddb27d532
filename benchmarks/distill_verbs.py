"""Verbs of distillation beside materialised jax, in units of the same run.

One row per path: milliseconds, the ratio to its unit, MiB of temporaries by the
compiler. The unit of a forward pass is `token_stats`' forward pass ("stats"); that of a
forward and backward pass from columns is the bare GEMM `hidden @ W.T` ("gemm"); that of
two heads is the sum of the four products that no implementation avoids ("four"): the
logits of student and teacher, and both gradients of the student. Materialised paths
make logits [N, V] in float32. Operands are random normal, of which sampled gradients
with K=128 keep all 128 entries of a token; in paths named "policy" they keep about 40
(`sampled_data.py`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import on_jax, results, sampled_data, workers
from jaxmem.base import timing
from jaxmem.commands.bench import stopwatch

KEYS = ("n", "d", "teacher_d", "v", "dtype", "path", "chunk", "device")
COLUMNS, DRAWS, SLOTS = 64, 16, 128  # k of top-k; ids per token; sampled entries
# by the names of the records
KINDS = {"kl": jaxmem.ReverseKL, "forward_kl": jaxmem.ForwardKL, "jsd": jaxmem.JSD}


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a path: a teacher's columns, or its head of a width; and data."""

    teacher_d: int | None = None
    data: str = "normal"

    def make(self, shape, dtype):
        """hidden, W, and the teacher: (ids, log-probabilities), or (hidden, W)."""
        n, _, v = shape
        if self.data != "normal":
            h, W, _ = sampled_data.problem(self.data, shape, dtype)
            of_teacher = n, self.teacher_d or 0, v
            return h, W, *sampled_data.problem(self.data, of_teacher, dtype, 1)[:2]
        h, W, _ = on_jax.problem(shape, dtype)
        if self.teacher_d:
            teacher, teacher_W, _ = on_jax.problem((n, self.teacher_d, v), dtype)
            return h, W, -teacher, teacher_W
        k = min(COLUMNS, v)
        ids = (jnp.arange(n)[:, None] * 7 + jnp.arange(k) * (v // k)) % v
        logprobs = jax.nn.log_softmax(jax.random.normal(jax.random.key(5), (n, k)))
        return h, W, ids.astype(jnp.int32), logprobs - 0.1


@dataclasses.dataclass(frozen=True)
class Path:
    """A call of the operands, and the name of its unit."""

    call: Callable[..., Any]
    unit: str
    operands: Operands = Operands()


# ------------------------------------------------------------------ materialised


def logits(h, W):
    return jnp.matmul(h, W.T, preferred_element_type=jnp.float32)


def materialised_topk(h, W, ids, teacher_logprobs):
    return jax.lax.top_k(jax.nn.log_softmax(logits(h, W)), ids.shape[1])


def materialised_draws(h, W, ids, teacher_logprobs):
    """One draw after another: at once, the noise alone would be 16 times the logits."""
    z, keys = logits(h, W), jax.random.split(jax.random.key(0), DRAWS)
    return jax.lax.map(lambda key: jax.random.categorical(key, z), keys)


def materialised_topk_kl(h, W, ids, teacher_logprobs):
    """Forward KL with a rest of 1 - Σ p, as trainers write it."""
    ln_p = jnp.take_along_axis(jax.nn.log_softmax(logits(h, W)), ids, axis=1)
    p, q = jnp.exp(ln_p), jnp.exp(teacher_logprobs)
    rest_p, rest_q = (jnp.maximum(1 - x.sum(1), 1e-7) for x in (p, q))
    of_columns = (q * (teacher_logprobs - ln_p)).sum(1)
    return (of_columns + rest_q * jnp.log(rest_q / rest_p)).mean()


def materialised_divergence(kind, h, W, teacher, teacher_W):
    ln_p = jax.nn.log_softmax(logits(h, W))
    ln_q = jax.nn.log_softmax(logits(teacher, teacher_W))
    p, q = jnp.exp(ln_p), jnp.exp(ln_q)
    if kind == "kl":
        return (p * (ln_p - ln_q)).sum(1).mean()
    if kind == "forward_kl":
        return (q * (ln_q - ln_p)).sum(1).mean()
    ln_m = jnp.log((p + q) / 2)
    return ((p * (ln_p - ln_m)).sum(1) + (q * (ln_q - ln_m)).sum(1)).mean() / 2


def four_products(h, W, teacher, teacher_W):
    """The products of any divergence of two heads, with logits in hidden's type."""
    z, y = h @ W.T, teacher @ teacher_W.T
    return z @ W, y.T @ h


# ------------------------------------------------------------------------ paths


def with_gradients(loss):
    """Value of a loss, and its gradients by hidden and W."""

    def run(h, W, *others):
        return jax.value_and_grad(lambda h, W: loss(h, W, *others), (0, 1))(h, W)

    return run


def cross_entropy(stats):
    return -stats.logprob


def paths_of_columns(chunk) -> dict[str, Path]:
    """Paths that read one head, or the teacher's columns beside it."""

    def target(ids, logprobs):
        return jaxmem.ForwardKL(jaxmem.Columns(ids, logprobs))

    def topk_kl(h, W, *columns):
        return jaxmem.divergence(h, W, target(*columns), chunk).mean()

    def topk_kl_and_token_loss(h, W, ids, logprobs):
        ce = jaxmem.token_loss(cross_entropy, h, W, ids[:, 0], chunk=chunk)[0]
        return topk_kl(h, W, ids, logprobs) + ce

    def topk_kl_loss(h, W, ids, logprobs):
        return jaxmem.divergence_loss(
            lambda stats, divergence: divergence + cross_entropy(stats), h, W,
            ids[:, 0], target(ids, logprobs), chunk=chunk,
        )[0]  # fmt: skip

    def topk(h, W, ids, logprobs):
        return jaxmem.topk(h, W, ids.shape[1], chunk)

    def sample_ids(h, W, *_):
        return jaxmem.sample_ids(h, W, DRAWS, jax.random.key(0), chunk)

    forward = {
        "topk": topk, "topk materialised": materialised_topk,
        "sample_ids": sample_ids, "sample_ids materialised": materialised_draws,
    }  # fmt: skip
    losses = {
        "topk_kl with gradients": topk_kl,
        "topk_kl and token_loss with gradients": topk_kl_and_token_loss,
        "topk_kl_loss with gradients": topk_kl_loss,
        "topk_kl with gradients materialised": materialised_topk_kl,
    }
    return {name: Path(call, "stats") for name, call in forward.items()} | {
        name: Path(with_gradients(loss), "gemm") for name, loss in losses.items()
    }


def paths_of_two_heads(kind, chunk, teacher_d) -> dict[str, Path]:
    """Paths to a divergence: one pass, per token, W frozen, sampled, materialised."""

    def target(*teacher):
        return KINDS[kind](jaxmem.Teacher(*teacher))

    def per_token(h, W, *teacher, **options):
        return jaxmem.divergence(h, W, target(*teacher), chunk, **options).mean()

    def one_pass(h, W, *teacher):
        labels = jnp.zeros(len(h), jnp.int32)
        return jaxmem.divergence_loss(
            lambda stats, divergence: divergence, h, W, labels, target(*teacher),
            chunk=chunk,
        )[0]  # fmt: skip

    def sampled(*heads):
        key = jax.random.key(1)
        return per_token(*heads, gradient=jaxmem.Sample(SLOTS), key=key)

    def frozen(h, W, *teacher):
        return per_token(h, jax.lax.stop_gradient(W), *teacher)

    name = f"{kind} with gradients, teacher D={teacher_d}"
    losses = {
        f"divergence_loss {name}": one_pass, name: per_token,
        f"{name}, W frozen": frozen, f"{name}, K={SLOTS}": sampled,
        f"{name} materialised": functools.partial(materialised_divergence, kind),
    }  # fmt: skip
    operands = Operands(teacher_d)
    paths = {
        name: Path(with_gradients(loss), "four", operands)
        for name, loss in losses.items()
    }
    policy = Path(with_gradients(sampled), "four", Operands(teacher_d, "policy"))
    return paths | {f"{name}, K={SLOTS}, policy": policy}


def paths_of(chunk, depths, verbs=()) -> dict[str, Path]:
    """Paths by name, of all verbs or of those that are named by a first word."""
    paths = paths_of_columns(chunk)
    for teacher_d in depths:
        for kind in KINDS:
            paths |= paths_of_two_heads(kind, chunk, teacher_d)
    return {k: x for k, x in paths.items() if not verbs or k.split()[0] in verbs}


UNITS: dict[str, Callable] = {
    "gemm": lambda h, W, *_: h @ W.T,
    "stats": lambda h, W, ids, logprobs: jaxmem.token_stats(h, W, ids[:, 0]),
    "four": four_products,
}


# ------------------------------------------------------------------ measurement


def measure(shape, dtype, chunk, paths, repetitions) -> Iterator[dict[str, Any]]:
    """A row per path of the same operands, each beside its unit.

    A path that fails, or has no memory, has a note, and the others go on.
    """
    (kind,) = {path.operands for path in paths.values()}
    operands = kind.make(shape, dtype)
    ready = {name: compiled(path.call, operands) for name, path in paths.items()}
    programs = {name: program for name, (program, _) in ready.items() if program}
    for unit in {"gemm", *(path.unit for path in paths.values())}:
        programs[unit] = jax.jit(UNITS[unit]).lower(*operands).compile()
    runs = {name: functools.partial(run, *operands) for name, run in programs.items()}
    gemm = runs.pop("gemm")
    gemm_ms, taken = timing.take_turns(stopwatch(), gemm, runs, repetitions)
    for name, path in paths.items():
        of_unit = 1.0 if path.unit == "gemm" else taken[path.unit].over_unit
        yield {
            "n": shape[0], "d": shape[1], "teacher_d": kind.teacher_d or "",
            "v": shape[2], "dtype": jnp.dtype(dtype).name, "path": name,
            "chunk": chunk, "gemm_ms": round(gemm_ms, 3), "unit": path.unit,
            **columns(taken.get(name), of_unit), **ready[name][1],
            "repetitions": repetitions, **results.provenance(),
        }  # fmt: skip


def compiled(call, operands) -> tuple[Any, dict[str, Any]]:
    """(the program or None, columns: MiB and seconds, or a note)."""
    start = time.perf_counter()
    try:
        program = jax.jit(call).lower(*operands).compile()
    except Exception as error:  # a path's own
        if on_jax.is_out_of_memory(error):
            return None, {"note": timing.OUT_OF_MEMORY}
        return None, {"note": f"failed: {workers.said(error)}"}
    seconds = round(time.perf_counter() - start, 1)
    temporary = on_jax.memory_bytes(program)[2]
    return program, {"temp_mib": round(temporary / 2**20, 1), "compile_s": seconds}


def columns(result, of_unit) -> dict[str, Any]:
    """Milliseconds, and ratios to the GEMM and to the unit."""
    if result is None:  # out of memory while it ran, or as the path's note says
        return {"note": timing.OUT_OF_MEMORY}
    return {
        "ms": round(result.ms, 3),
        "over_gemm": round(result.over_unit, 3),
        "over_unit": round(result.over_unit / of_unit, 3),
        "spread": round(result.spread, 3),
    }


def run(shape, dtype, chunk, depths, verbs: Sequence[str], repetitions):
    """Rows of all paths, those of the same operands together."""
    paths = paths_of(chunk, depths, verbs)
    for operands in dict.fromkeys(path.operands for path in paths.values()):
        same = {k: path for k, path in paths.items() if path.operands == operands}
        yield from measure(shape, getattr(jnp, dtype), chunk, same, repetitions)
