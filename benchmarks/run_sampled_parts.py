"""Sampled derivatives of the head on one GPU, part by part, beside the exact ones.

    python -m benchmarks.run_sampled_parts --out sampled_parts_h200.csv

For each kind of data (`benchmarks/sampled_data.py`): how many entries are kept; the
error of the gradients of one draw, and whether the mean of several draws comes nearer
to the exact gradient as it must; then the time of every part and of all together, in
bare GEMMs `hidden @ W.T` of the same run. A part that fails is said, and the others go
on.
"""

import argparse
import concurrent.futures
import functools
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results, sampled_data
from jaxmem import timing
from jaxmem.backends import hopper, hopper_sampled, xla_sampled
from jaxmem.bench import stopwatch
from jaxmem.core import backend_operands, column_sampling, row_stats
from jaxmem.core.column_sampling import Sampling
from jaxmem.core.spec import Spec

OUTPUTS = ("logprob",)
SAVED = ("logprob", "max", "log_sum")
# (at_once, unroll, sums) of `sampled_products.Launch` that are tried.
TO_HIDDEN = [(8, 4, 1), (4, 4, 1), (4, 8, 1), (2, 8, 1), (2, 16, 1), (1, 16, 1)]
TO_W = [(8, 4, 8), (8, 8, 8), (4, 8, 8), (8, 4, 4), (8, 4, 16), (8, 2, 8)]


class Head(NamedTuple):
    """Static facts of one head."""

    spec: Spec
    sampling: Sampling

    @classmethod
    def of(cls, shape, slots, chunk, dtype, frozen=False):
        _, _, v = shape
        spec = Spec(
            v, v, chunk, OUTPUTS, np.dtype(dtype), "vd", frozen_head=frozen,
            gradient_samples=slots,
        )  # fmt: skip
        return cls(spec, hopper_sampled.sampling_of(spec))


def operands(h, W, y, seed=0):
    keys = column_sampling.token_keys(jax.random.key(seed), y.shape)
    rows = backend_operands.Rows(y, y >= 0, None, column_sampling.draws(keys))
    return backend_operands.Factors(h, W, None), rows


def exact_forward(head, h, W, y):
    return hopper.forward(head.spec, *operands(h, W, y), SAVED)


def forward(head, h, W, y, seed):
    return hopper_sampled.forward(head.spec, *operands(h, W, y, seed), SAVED)


def saved(outputs):
    return row_stats.Outputs(*(outputs.get(k) for k in row_stats.Outputs._fields))


def cotangents(y):
    """Of a mean over the tokens."""
    return row_stats.Cotangents(jnp.full(len(y), -1 / len(y)), None, None, None)


def derivative(head, h, W, y, outputs, entries):
    _, rows = operands(h, W, y)
    return xla_sampled.derivative(
        head.spec, head.sampling, rows, saved(outputs), cotangents(y), entries
    )


def both(head, h, W, y, seed):
    """(gradients of hidden and W, log-probabilities)."""
    outputs, entries = forward(head, h, W, y, seed)
    source, rows = operands(h, W, y)
    grads = hopper_sampled.backward(
        head.spec, source, rows, saved(outputs), cotangents(y), entries
    )
    return grads, outputs["logprob"]


def exact_both(head, h, W, y):
    source, rows = operands(h, W, y)
    outputs = hopper.forward(head.spec, source, rows, SAVED)
    grads = hopper.backward(head.spec, source, rows, saved(outputs), cotangents(y))
    return grads, outputs["logprob"]


def launch_exps(head, h, W, y):
    """One launch of the forward kernel that stores exponentials and tiles' sums."""
    from jaxmem.kernels import active, padding
    from jaxmem.kernels.forward import statistics_and_exps

    source, rows = operands(h, W, y)
    padded = padding.head(head.spec, source)
    env = hopper.launch_env(head.spec, padded, len(y), "exps")
    block = active.in_one_block(rows.active, env.n_rows)
    arrays = hopper.inputs(head.spec, padded, rows, block)
    return statistics_and_exps(env, *arrays, tile_sums=True)


def select_exps(head, width, stats, kept, y, starts):
    """What follows each launch."""
    from jaxmem.kernels import sampled_select

    rows = row_stats.finish(stats, y >= 0)
    normaliser = row_stats.Normaliser(rows.max, rows.log_sum)
    facts = sampled_select.OfRows(y, stats.label_logit, stats.max, normaliser)
    return sampled_select.entries(
        head.sampling, width, kept, facts, starts, jnp.int32(len(y))
    )


class Part(NamedTuple):
    """A program, what it runs on, and how often all tokens take it."""

    run: Callable[..., Any]
    operands: tuple
    times: float = 1.0


def parts(head, frozen, shape, sweep, made) -> dict[str, Part]:
    """Every part by name, on what was computed before."""
    h, W, y = made["problem"]
    outputs, entries, dz, pairs = (
        made[k] for k in ("outputs", "entries", "dz", "pairs")
    )
    chunk = min(head.spec.chunk, len(y))
    width = hopper.launch_env(
        head.spec, backend_operands.Factors(h, W, None), chunk, "exps"
    ).tiles.columns
    times, seed = len(y) / chunk, jnp.int32(7)
    first = y[:chunk]
    _, rows = operands(h, W, first)
    starts = xla_sampled.starts_of(head.spec, head.sampling, rows)
    bind = functools.partial
    found = {
        "exact forward": Part(bind(exact_forward, head), (h, W, y)),
        "forward with selection": Part(bind(forward, head), (h, W, y, seed)),
        "of it, launches": Part(bind(launch_exps, head), (h[:chunk], W, first), times),
        "of it, selection": Part(
            bind(select_exps, head, width), (*made["launch"], first, starts), times
        ),
        "derivative": Part(bind(derivative, head), (h, W, y, outputs, entries)),
        "sort": Part(column_sampling.sort_by_column, (dz,)),
    }
    found |= both_products(sweep, h, W, dz, pairs)
    found |= {
        "forward and both gradients": Part(bind(both, head), (h, W, y, seed)),
        "forward and dH, frozen": Part(bind(both, frozen), (h, W, y, seed)),
        "exact forward and both gradients": Part(bind(exact_both, head), (h, W, y)),
    }
    return found


def both_products(sweep, h, W, dz, pairs) -> dict[str, Part]:
    """Both products, with their default launch or with all launches of a sweep."""
    from jaxmem.kernels import sampled_products

    by_name = {}
    tried = [sampled_products.Launch(*x) for x in TO_HIDDEN] if sweep else []
    for launch in tried or [sampled_products.TO_HIDDEN]:
        run = functools.partial(
            sampled_products.to_hidden, layout="vd", dtype=h.dtype, launch=launch
        )
        by_name[f"dH {_brief(launch)}"] = Part(run, (dz, W))
    like = jax.ShapeDtypeStruct(W.shape, W.dtype)
    tried = [sampled_products.Launch(*x) for x in TO_W] if sweep else []
    for launch in tried or [sampled_products.TO_W]:
        run = functools.partial(
            sampled_products.to_weights, like=like, layout="vd", launch=launch
        )
        by_name[f"dW {_brief(launch)}"] = Part(run, (pairs, h))
    return by_name


def _brief(launch):
    return f"{launch.at_once}/{launch.unroll}/{launch.sums}"


def prepared(head, problem) -> dict:
    """What the parts run on."""
    h, W, y = problem
    outputs, entries = jax.jit(functools.partial(forward, head))(h, W, y, jnp.int32(7))
    run = functools.partial(derivative, head)
    dz = jax.jit(run)(h, W, y, outputs, entries)
    pairs = jax.jit(column_sampling.sort_by_column)(dz)
    chunk = min(head.spec.chunk, len(y))
    launch = jax.jit(functools.partial(launch_exps, head))
    return {
        "problem": problem, "outputs": outputs, "entries": entries, "dz": dz,
        "pairs": pairs, "launch": launch(h[:chunk], W, y[:chunk]),
    }  # fmt: skip


def kept(head, made) -> dict:
    """Columns: entries of a token, slots that are used, the longest column."""
    entries, columns = made["entries"], np.asarray(made["pairs"].columns)
    p, at = np.asarray(entries.p), np.arange(1, entries.p.shape[1] + 1)
    lengths = np.bincount(columns, minlength=head.spec.columns + 1)[:-1]
    return {
        "kept_mean": round(float((p > 0).sum(1).mean()), 2),
        "kept_max": int((p > 0).sum(1).max()),
        "slots_mean": round(float(np.where(p > 0, at, 0).max(1).mean()), 2),
        "columns_with_entries": int((lengths > 0).sum()),
        "longest_column": int(lengths.max()),
    }


@functools.partial(jax.jit, donate_argnums=0)
def _add(total, x):
    return jax.tree.map(lambda t, a: t + a.astype(jnp.float32), total, x)


@jax.jit
def _distance(a, b, scale):
    def norm(x, y):
        return jnp.sqrt(jnp.sum((x.astype(jnp.float32) * scale - y) ** 2))

    return [norm(x, y) / norm(jnp.zeros_like(y), y) for x, y in zip(a, b, strict=True)]


def errors(programs, made, draws) -> dict:
    """Columns: one draw's distance from the exact gradient; the mean's, over what the
    mean of independent draws without bias would have, 1."""
    h, W, y = made["problem"]
    exact, logprob = programs["exact forward and both gradients"](h, W, y)
    want = [exact.hidden.astype(jnp.float32), exact.W.astype(jnp.float32)]
    total, single, equal = [jnp.zeros_like(x) for x in want], [], True
    for seed in range(draws):
        grads, ours = programs["forward and both gradients"](h, W, y, jnp.int32(seed))
        equal &= bool(jnp.array_equal(ours, logprob))
        got = [grads.hidden, grads.W]
        single.append([float(x) for x in _distance(got, want, 1.0)])
        total = _add(total, got)
    mean = [float(x) for x in _distance(total, want, 1 / draws)]
    again, _ = programs["forward and both gradients"](h, W, y, jnp.int32(0))
    more, _ = programs["forward and both gradients"](h, W, y, jnp.int32(0))
    single = np.sqrt(np.mean(np.square(single), axis=0))
    return {
        "dh_deviation": float(f"{single[0]:.4g}"),
        "dW_deviation": float(f"{single[1]:.4g}"),
        "dh_mean_over_expected": round(mean[0] / single[0] * draws**0.5, 3),
        "dW_mean_over_expected": round(mean[1] / single[1] * draws**0.5, 3),
        "draws": draws, "logprob_equal_bits": equal,
        "gradients_equal_bits": bool(jnp.array_equal(again.W, more.W))
        & bool(jnp.array_equal(again.hidden, more.hidden)),
    }  # fmt: skip


def attempt(name, run, *arguments):
    """What run returns, or None after its traceback."""
    start = time.perf_counter()
    try:
        return jax.block_until_ready(run(*arguments))
    except Exception:  # a part's own: the others go on
        print(f"FAILED {name}", flush=True)
        traceback.print_exc()
        return None
    finally:
        print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)


def compiled(found: dict[str, Part]) -> dict[str, Any]:
    """Programs by name, compiled side by side."""

    def one(item):
        name, part = item
        lowered = jax.jit(part.run).lower(*part.operands)
        return attempt(f"compile {name}", lowered.compile)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = {name: pool.submit(one, (name, part)) for name, part in found.items()}
    made = {name: attempt(name, future.result) for name, future in futures.items()}
    return {name: program for name, program in made.items() if program is not None}


def measure(kind, shape, head, frozen, asked, cache) -> list[dict]:
    """One row a part."""
    facts = {
        "n": shape[0], "d": shape[1], "v": shape[2], "slots": head.sampling.slots,
        "chunk": head.spec.chunk, "data": kind,
    }  # fmt: skip
    problem = attempt(
        f"{kind} data", sampled_data.problem, kind, shape, head.spec.compute_dtype
    )
    made = problem and attempt(f"{kind} inputs", prepared, head, problem)
    if made is None:
        return [{**facts, "part": "failed"}]
    facts |= attempt("kept", kept, head, made) or {}
    print(facts, flush=True)
    found = parts(head, frozen, shape, asked.sweep, made)
    if not cache:  # the same programs for all data
        cache |= compiled(found)
    quality = attempt("errors", errors, cache, made, asked.draws) or {}
    print(quality, flush=True)
    h, W, _ = problem
    gemm = jax.jit(lambda h, W: h @ W.T).lower(h, W).compile()
    runs = {}
    for name, part in found.items():
        run = functools.partial(cache[name], *part.operands) if name in cache else None
        if run and attempt(f"run {name}", run) is not None:
            runs[name] = run
    unit_ms, taken = timing.take_turns(
        stopwatch(), functools.partial(gemm, h, W), runs, asked.repetitions
    )
    rows = []
    for name, timed in taken.items():
        row = {**facts, "part": name, **_time(timed, found[name].times, unit_ms)}
        row["temp_mib"] = round(
            cache[name].memory_analysis().temp_size_in_bytes / 2**20, 1
        )
        rows.append(row | (quality if name == "forward and both gradients" else {}))
        print(f"{kind:7} {name:36} {row}", flush=True)
    return rows


def _time(timed, times, unit_ms):
    if timed is None:
        return {"ms": timing.OUT_OF_MEMORY, "gemm_ms": round(unit_ms, 3)}
    return {
        "ms": round(timed.ms * times, 4),
        "over_gemm": round(timed.over_unit * times, 4),
        "spread": round(timed.spread, 3), "gemm_ms": round(unit_ms, 3),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--shape", default="8192,4096,151936")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--slots", type=int, default=128)
    made.add_argument("--chunk", type=int, default=1024)
    made.add_argument("--data", nargs="*", default=list(sampled_data.KINDS))
    made.add_argument("--sweep", action="store_true", help="several ways to sum rows")
    made.add_argument("--draws", type=int, default=16)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--out", default="sampled_parts.csv")
    return made


def main(arguments=None) -> None:
    asked = parser().parse_args(arguments)
    shape = tuple(map(int, asked.shape.split(",")))
    dtype = jnp.dtype(asked.dtype)
    head, frozen = (
        Head.of(shape, asked.slots, asked.chunk, dtype, x) for x in (False, True)
    )
    print(jax.devices()[0].device_kind, jax.__version__, shape, head.sampling)
    rows, cache = [], {}
    for kind in asked.data:
        new = attempt(kind, measure, kind, shape, head, frozen, asked, cache)
        rows += new or []
        print("wrote", results.write(asked.out, rows), flush=True)


if __name__ == "__main__":
    main()
