"""Results and gradients from recorded entries beside other ways, in bare GEMMs.

    python -m benchmarks.run_recorded --out recorded_h200.csv
    python -m benchmarks.run_recorded --cpu --out recorded_cpu.csv

For each head and kind of data (`benchmarks/sampled_data.py`), entries are recorded
under old weights, and every path runs under new ones: each number of hidden is moved by
`step` standard deviations of its row, and each of W by a third of that. Times are of
log-probabilities, forward and with gradients. Errors are those of one draw of entries:
of ln Z, the root mean square and the mean over tokens in nats, beside the error that
the entries estimate; of the gradients, the relative distance from the exact ones. A
path that fails is recorded so, and the others go on.
"""

import argparse
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import results, sampled_data
from benchmarks.run_sampled import attempt, noise
from jaxmem.base import timing
from jaxmem.commands.bench import stopwatch

KEYS = ("path", "data", "step", "n", "d", "v", "slots", "dtype", "chunk", "device")
SHAPES: dict[str, tuple[int, int, int]] = {
    "Qwen3-8B": (8192, 4096, 151936),
    "Qwen3-0.6B": (8192, 1024, 151936),
    "Llama-3.1-8B": (8192, 4096, 128256),
    "Gemma-3 270M": (8192, 640, 262144),
    "gpt-oss": (8192, 2880, 201088),
}
CPU_SHAPES = {"small": (1024, 256, 32768)}
STEPS = (0.01, 0.03, 0.1)  # times are taken at the first
EXACT, SAMPLE, INT8, RECORDED = "exact", "Sample", "int8", "recorded"
FORWARD, BOTH, HIDDEN = "forward", "forward and both gradients", "forward and dH"


class Path(NamedTuple):
    """A way to the loss and the wanted gradients."""

    kind: str
    wanted: tuple[int, ...] | None
    what: str

    @property
    def name(self) -> str:
        return f"logprobs, {self.kind}, {self.what}"

    def run(self, options, h, W, y, entries, key) -> tuple[jax.Array, tuple]:
        """(loss, gradients)."""
        ways = {
            EXACT: {},
            SAMPLE: {"gradient": jaxmem.Sample(options["k"]), "key": key},
            INT8: {"gradient": jaxmem.Sample(options["k"], "int8"), "key": key},
            RECORDED: {"gradient": jaxmem.Recorded(entries)},
        }

        def loss(h, W):
            way = ways[self.kind] | {"chunk": options["chunk"]}
            return -jnp.mean(jaxmem.logprobs(h, W, y, **way))

        if self.wanted is None:
            return loss(h, W), ()
        return jax.value_and_grad(loss, self.wanted)(h, W)


PATHS = [
    Path(EXACT, None, FORWARD),
    Path(EXACT, (0, 1), BOTH),
    Path(SAMPLE, (0, 1), BOTH),
    Path(INT8, (0, 1), BOTH),
    Path(RECORDED, None, FORWARD),
    Path(RECORDED, (0, 1), BOTH),
    Path(RECORDED, (0,), HIDDEN),
]
RECORD = "record_entries"


@functools.partial(jax.jit, static_argnums=3)
def updated(h, W, key, step: float):
    """Hidden states and W after an update; the first channel is the popularity."""
    of_h, of_W = jax.random.split(key)
    size = jnp.std(h[:, 1:].astype(jnp.float32), axis=1, keepdims=True)
    moved = step * size * jax.random.normal(of_h, h.shape)
    of_W = step / 3 * h.shape[1] ** -0.5 * jax.random.normal(of_W, W.shape, W.dtype)
    inside = jnp.arange(h.shape[1]) > 0
    h = (h.astype(jnp.float32) + jnp.where(inside, moved, 0)).astype(h.dtype)
    return h, W + jnp.where(inside, of_W, 0).astype(W.dtype)


def record(options, h, W, y, key):
    return jaxmem.record_entries(h, W, y, options["k"], key, chunk=options["chunk"])


def normalisers(options, h, W, y, entries):
    """(exact ln Z, estimated ln Z, its estimated error) of each token."""

    def loss_fn(stats):
        return stats.logprob, {"logsumexp": stats.logsumexp, "logprob": stats.logprob}

    run = functools.partial(jaxmem.token_loss, loss_fn, h, W, y, chunk=options["chunk"])
    exact, new = run()[1], run(gradient=jaxmem.Recorded(entries))[1]
    return exact["logsumexp"], new["logsumexp"], new["forward_error"]


def errors(options, programs, h, W, y, entries) -> dict[str, Any]:
    """Columns: errors of ln Z over the tokens."""
    exact, new, error = programs["normalisers"](h, W, y, entries)
    far, is_lost = new - exact, jnp.isinf(error)
    change = jnp.where(entries.label_logit == 0, 0, exact - entries.logsumexp)
    row = {
        "lnz_rms": jnp.sqrt(jnp.mean(jnp.where(is_lost, 0, far) ** 2)),
        "lnz_mean": jnp.mean(jnp.where(is_lost, 0, far)),
        "lnz_told": jnp.sqrt(jnp.mean(jnp.where(is_lost, 0, error) ** 2)),
        "lnz_change_rms": jnp.sqrt(jnp.mean(change**2)),
    }
    row = {name: float(f"{float(x):.3g}") for name, x in row.items()}
    return row | {"lost": int(jnp.sum(is_lost))}


def compiled(options, operands) -> dict[str, Any]:
    """Programs by name, compiled side by side; those that failed are left out."""
    h, W, y, entries, key = operands
    functions: dict[str, tuple[Callable, tuple]] = {
        path.name: (path.run, operands)
        for path in PATHS
        if path.kind != INT8 or h.dtype == jnp.bfloat16
    }
    functions |= {
        RECORD: (record, (h, W, y, key)),
        "normalisers": (normalisers, (h, W, y, entries)),
    }

    def one(item):
        name, (function, operands) = item
        jitted = jax.jit(functools.partial(function, options))
        return attempt(f"compile {name}", lambda: jitted.lower(*operands).compile())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = dict(zip(functions, pool.map(one, functions.items()), strict=True))
    return {name: program for name, program in compiled.items() if program is not None}


def entries_like(shape, k: int):
    """Shapes of the entries, before any are recorded."""
    floats = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, k), *[shape] * 4)]
    columns = jax.ShapeDtypeStruct((*shape, k), jnp.int32)
    return jaxmem.RecordedEntries(columns, *floats)


def measure(asked, name: str, shape, kind: str, programs: dict) -> list[dict]:
    """One row a path; programs are those of the shape, of any kind of data."""
    n, d, v = shape
    facts = {"head": name, "n": n, "d": d, "v": v, "dtype": asked.dtype, "data": kind}
    facts |= {"chunk": asked.chunk, "slots": asked.k}
    options = {"k": asked.k, "chunk": asked.chunk}
    dtype, key = jnp.dtype(asked.dtype), jax.random.key(1)
    h, W, y = sampled_data.problem(kind, shape, dtype)
    if not programs:
        programs |= compiled(options, (h, W, y, entries_like((n,), asked.k), key))
    entries = programs[RECORD](h, W, y, key)
    kept = jnp.sum(entries.columns < v, axis=1)
    facts |= {"kept_mean": round(float(jnp.mean(kept)), 2)}
    rows = []
    for step in asked.step or STEPS:
        new_h, new_W = updated(h, W, jax.random.key(2), step)
        operands = new_h, new_W, y, entries, key
        of_step = facts | {"step": step}
        exact, found, runs = None, {}, {}
        for path in [path for path in PATHS if path.name in programs]:
            if step != STEPS[0] and path.what != BOTH:
                continue
            outcome = attempt(f"run {path.name}", programs[path.name], *operands)
            if outcome is None:
                continue
            runs[path.name] = functools.partial(programs[path.name], *operands)
            if path == Path(EXACT, (0, 1), BOTH):
                exact = outcome
            far = noise(outcome, exact) if exact is not None and outcome[1] else {}
            far.pop("loss_equal_bits", None)
            found[path.name] = far
            if path.kind == RECORDED:
                of_entries = (programs, new_h, new_W, y, entries)
                found[path.name] |= errors(options, *of_entries)
            outcome = None
        taken: dict[str, Any] = dict.fromkeys(found)
        unit_ms = None
        if step == STEPS[0]:
            gemm = jax.jit(lambda h, W: h @ W.T).lower(h, W).compile()
            runs[RECORD] = functools.partial(programs[RECORD], h, W, y, key)
            exact = None  # its gradients' memory
            unit_ms, taken = timing.take_turns(
                stopwatch(), functools.partial(gemm, h, W), runs, asked.repetitions
            )
        rows += [
            of_step | {"path": path} | _times(timed, unit_ms, programs[path])
            | found.get(path, {})
            for path, timed in taken.items()
        ]  # fmt: skip
        for row in rows[-len(taken) :]:
            print(row, flush=True)
    return rows


def _times(timed, unit_ms, program) -> dict[str, Any]:
    if timed is None:
        return {}
    temp = program.memory_analysis().temp_size_in_bytes
    return {
        "ms": round(timed.ms, 3), "over_gemm": round(timed.over_unit, 3),
        "spread": round(timed.spread, 3), "gemm_ms": round(unit_ms, 3),
        "temp_mib": round(temp / 2**20, 1),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--cpu", action="store_true", help="the shapes for a CPU")
    flags.add_argument("--dtype", help="bfloat16; on a CPU float32")
    flags.add_argument("--chunk", type=int, default=2048)
    flags.add_argument("--k", type=int, default=128)
    flags.add_argument("--data", action="append", help="policy, flat or peaked")
    flags.add_argument("--step", action="append", type=float, help="default: three")
    flags.add_argument("--head", action="append", help="one of the heads; default all")
    flags.add_argument("--shape", help="N,D,V instead of the heads")
    flags.add_argument("--repetitions", type=int, default=3)
    flags.add_argument("--out", default="recorded.csv")
    return flags


def main(arguments=None) -> None:
    asked = parser().parse_args(arguments)
    asked.dtype = asked.dtype or ("float32" if asked.cpu else "bfloat16")
    shapes = CPU_SHAPES if asked.cpu else SHAPES
    shapes = {name: shapes[name] for name in asked.head or shapes}
    if asked.shape:
        shapes = {"": tuple(map(int, asked.shape.split(",")))}
    print(jax.devices()[0].device_kind, jax.__version__)
    for name, shape in shapes.items():
        programs: dict[str, Any] = {}
        for kind in asked.data or ("policy", "flat"):
            run = functools.partial(measure, asked, name, shape, kind, programs)
            rows = attempt(f"{name} {kind}", run) or [{"path": "failed", "data": kind}]
            rows = [row | results.provenance() for row in rows]
            print("wrote", results.merge(asked.out, rows, KEYS), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
