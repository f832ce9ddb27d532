r"""Is a forward pass in 8 bits fast and exact enough for sampled gradients?

    run="python -m benchmarks.run_lowbit"
    $run times --data flat policy peaked --out lowbit_h100.csv
    $run errors --rows 1024 --slots 128 512 --out lowbit_errors.csv
    $run trained data.vocab_size=8192 model.hidden=256 model.ff=704 \
        model.head_dim=64 --rows 1024 --slots 128 512 --out lowbit_errors.csv

times: the kernel of `lowbit_forward.py`, with several tiles, in bare GEMMs of bfloat16
of the same run, next to the bfloat16 kernel that stores exponentials; its statistics
against float32 products of the same 8-bit operands; and what is left of the error of
the normaliser when K entries are corrected.

errors: the same error with exact products of 8-bit operands, in XLA, for each kind of
data; trained: for hidden states and the head of a decoder that is trained first.

The estimate. Let ẑ be the logits in 8 bits, with 16 channels in 16 bits (those that are
largest relative to their row, in hidden or W). An entry is kept with probability
q = min(1, K p̂); the label always is. With z of kept entries computed exactly,

    S = Σ e^ẑ + Σ_kept (e^z - e^ẑ) / q

has the mean Σ e^z. `raw_*` are errors of ln Σ e^ẑ in nats, `*_mean` their mean over
tokens and draws, `logit_rms` that of ẑ under the exact probabilities.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results, sampled_data
from benchmarks.lowbit_errors import (
    CHANNELS,
    KINDS,
    SHAPES,
    errors_of,
    logits_of,
    run_errors,
    run_trained,
    sig,
    split,
    summary,
)  # fmt: skip
from jaxmem import timing
from jaxmem.bench import stopwatch

KEYS = ("path", "data", "n", "d", "v", "slots", "channels", "device")
CHECKED = 512  # rows whose errors are computed


def variants(d: int) -> dict[str, dict]:
    """Tiles by name."""
    base = dict(depth=128, stages=4, slots=1, stored=64, group=2, cluster=2, panel=8)
    small = dict(base, depth=64, stages=7, slots=2)
    lag = 3 if d > 512 else 2
    return {
        "": base,
        "lag": dict(base, lag=lag),
        "half stages": small,
        "half stages, lag": dict(small, lag=4),
        "lag, added": dict(base, lag=lag, added=True),
        "lag, one sum": dict(base, lag=lag, all_sums=False),
        "lag, nothing stored": dict(base, stored=0, lag=lag),
        "three stages, lag": dict(base, stages=3, slots=4, lag=2),
        "16 channels": dict(base, depth=64, stages=6, channels=CHANNELS),
        "16 channels, lag": dict(
            base, depth=64, stages=6, channels=CHANNELS, lag=4
        ),
    }  # fmt: skip


def low_env(shape, dtype, tiles):
    from benchmarks import lowbit_forward as low
    from jaxmem.backends import hopper

    n, d, v = shape
    return low.Env(low.Tiles8(**tiles), n, d, v, np.dtype(dtype), hopper.n_blocks())


def bf16_forward(shape):
    """Today's kernel that stores exponentials."""
    from jaxmem.backends import hopper
    from jaxmem.kernels import forward, logits, tuned

    n, d, v = shape
    env = logits.Env(
        tuned.DEFAULTS["exps"], n, d, v, v, "vd", np.dtype(jnp.bfloat16), None,
        hopper.n_blocks(),
    )  # fmt: skip

    def run(h, W, y):
        active = jnp.array([n], jnp.int32)
        return forward.statistics_and_exps(env, h, W, y, active, tile_sums=True)

    return run


@jax.jit
def _log_sums(stats):
    low = stats.max + jnp.log(stats.sum_others + jnp.exp(stats.label_logit - stats.max))
    return low


def checked(shape, kernel_out, problem, quantised, slots):
    """Columns: the kernel's statistics against float32, and the errors left over."""
    n, d, v = shape
    (h, W, y), (of_h, of_W, _, wide) = problem, quantised
    stats, exps, largest = kernel_out
    if exps is None:
        return {}
    parts, worst = [], {"lse": 0.0, "label": 0.0, "entropy": 0.0, "exps": 0.0}
    starts = range(0, n, max(n // (CHECKED // 128), 128))
    for i in list(starts)[: CHECKED // 128]:
        s = slice(i, i + 128)
        here = None if wide is None else (wide[0][s], wide[1])
        part = _stats_of(stats, s)
        e = _exps(exps[s], largest[:, s], part.max)
        found = _against(part, e, of_h[0][s], of_h[1][s], of_W, here, y[s])
        worst = {k: max(x, float(found[k])) for k, x in worst.items()}
        key = jax.random.key(i)
        parts.append(
            jax.device_get(
                errors_of(h[s], W, y[s], e, part.max, _log_sums(part), slots, key)
            )
        )
    row = {f"{k}_max_error": sig(x) for k, x in worst.items()}
    return row | {"slots": slots} | summary(parts)


def _stats_of(stats, rows):
    return type(stats)(*(x[rows] for x in stats))


@jax.jit
def _exps(exps, largest, m):
    """e^(ẑ - m) as stored."""
    columns = jnp.repeat(largest.T, 256, axis=1)[:, : exps.shape[1]]
    return exps.astype(jnp.float32) * jnp.exp(columns - m[:, None])


@jax.jit
def _against(stats, e, h, scale, W, wide, y):
    z = logits_of((h, scale), W, wide)
    lse = jax.nn.logsumexp(z, axis=1)
    label = jnp.take_along_axis(z, y[:, None], axis=1)[:, 0]
    p = jnp.exp(z - lse[:, None])
    entropy = lse - jnp.sum(p * z, axis=1)
    sums = stats.sum_others + jnp.exp(stats.label_logit - stats.max)
    got = jnp.log(sums) - stats.sum_shifted / sums
    want = jnp.where(jnp.arange(z.shape[1]) == y[:, None], 0, p)
    got_p = e * jnp.exp(stats.max - lse)[:, None]
    far = jnp.max(jnp.where(want > 1e-6, jnp.abs(got_p / want - 1), 0))
    return {
        "lse": jnp.max(jnp.abs(_log_sums(stats) - lse)),
        "label": jnp.max(jnp.abs(stats.label_logit - label)),
        "entropy": jnp.max(jnp.abs(got - entropy)),
        "exps": far,
    }


def attempt(name, run, *operands):
    try:
        return jax.block_until_ready(run(*operands))
    except Exception:
        print("FAILED", name, flush=True)
        traceback.print_exc(limit=-4)
        return None


def candidates(shape, problem, asked):
    """(path, static facts, operands) of each kernel."""
    h, W, y = problem
    for kind, dtype in KINDS.items():
        made = {c: split(h, W, dtype, c) for c in (0, CHANNELS)}
        for name, tiles in variants(shape[1]).items():
            path = f"{kind}, {name}" if name else kind
            if asked and path not in asked:
                continue
            if tiles.get("added") and kind != "int8":
                continue
            if shape[1] % tiles["depth"]:  # no part of a swizzled row
                continue
            of_h, of_W, wide = made[tiles.get("channels", 0)]
            yield path, low_env(shape, dtype, tiles), (of_h, of_W, y, wide)


def run_times(asked):
    shapes = [tuple(map(int, x.split(","))) for x in asked.shape or ()] or SHAPES
    for shape in shapes:
        programs: dict[str, Any] = {}
        for kind in asked.data:
            yield from times(shape, kind, asked, programs)
        jax.clear_caches()


def compiled(shape, data, problem, asked, programs):
    """{path: (static facts, operands)} of kernels whose programs are compiled."""
    from benchmarks import lowbit_forward as low

    pending = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for path, env, operands in candidates(shape, problem, asked.variants):

            def forward(*operands, env=env):
                return low.statistics_and_exps(env, *operands)

            # Data with popular columns are no use in 8 bits without these channels.
            if data != "flat" and not env.tiles.channels:
                continue
            pending[path] = env, operands
            if path not in programs:
                lowered = attempt(path, jax.jit(forward).lower, *operands)
                programs[path] = lowered and pool.submit(lowered.compile)
    for path in pending:
        if isinstance(programs[path], concurrent.futures.Future):
            programs[path] = attempt(path, programs[path].result)
    return {path: x for path, x in pending.items() if programs[path] is not None}


def kernels(shape, data, problem, asked, programs):
    """(path, run, columns) of each kernel that runs."""
    for path, (env, operands) in compiled(
        shape, data, problem, asked, programs
    ).items():
        program = programs[path]
        out = attempt(path, program, *operands)
        if out is None:
            continue
        tiles = dataclasses.asdict(env.tiles)
        facts = {k: tiles[k] for k in ("depth", "stages", "lag", "stored", "added")}
        facts |= {"buffers": tiles["slots"], "channels": tiles["channels"]}
        got = attempt(f"check {path}", checked, shape, out, problem, operands, 128)
        facts |= got or {}
        print(path, facts, flush=True)
        del out
        yield path, functools.partial(program, *operands), facts


def others(shape, data, problem, asked, programs):
    """(path, run, no columns) of today's kernel, and of W's copy in 8 bits."""
    from benchmarks import lowbit_forward as low

    h, W, y = problem
    if "bfloat16" not in programs:
        lowered = jax.jit(bf16_forward(shape)).lower(h, W, y)
        programs["bfloat16"] = lowered.compile()
    yield "bfloat16", functools.partial(programs["bfloat16"], h, W, y), {}
    for kind, dtype in KINDS.items():
        if asked.variants is None and data == "flat":
            program = jax.jit(functools.partial(low.quantised, dtype=dtype))
            program = program.lower(W).compile()
            yield f"{kind}, W in 8 bits", functools.partial(program, W), {}


def times(shape, data, asked, programs):
    n, d, v = shape
    problem = sampled_data.problem(data, shape, jnp.bfloat16)
    h, W, _ = problem
    gemm = jax.jit(lambda h, W: h @ W.T).lower(h, W).compile()
    found = [
        x for made in (others, kernels)
        for x in made(shape, data, problem, asked, programs)
    ]  # fmt: skip
    facts = {path: columns for path, _, columns in found}
    unit_ms, taken = timing.take_turns(
        stopwatch(), functools.partial(gemm, h, W),
        {path: run for path, run, _ in found}, asked.repetitions,
    )  # fmt: skip
    for path, timed in taken.items():
        row = {"path": path, "data": data, "n": n, "d": d, "v": v}
        if timed is not None:
            row |= {
                "ms": round(timed.ms, 3), "over_gemm": round(timed.over_unit, 3),
                "spread": round(timed.spread, 3), "gemm_ms": round(unit_ms, 3),
            }  # fmt: skip
        yield row | facts[path]


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("times", "errors", "trained"))
    parser.add_argument("--shape", action="append")
    parser.add_argument("--data", nargs="+", default=["flat"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--slots", type=int, nargs="+", default=[128])
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", default="lowbit.csv")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    asked = parser.parse_args(arguments)
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    runs = {"times": run_times, "errors": run_errors, "trained": run_trained}
    for row in runs[asked.what](asked):
        print(row, flush=True)
        row = row | results.provenance()
        results.merge(asked.out, [row], KEYS)


if __name__ == "__main__":
    main()
