"""Sampled gradients beside exact ones, in bare GEMMs of the same run.

    python -m benchmarks.run_sampled --out sampled_h200.csv
    python -m benchmarks.run_sampled --cpu --out sampled_cpu.csv

For each head and kind of data (`benchmarks/sampled_data.py`), through the public
functions: forward, forward and both gradients, and forward and hidden's gradient alone,
exact and with K samples; then K by itself. Before a path is timed, its loss is compared
with the exact one's bits, and its gradients with the exact ones: `dh_deviation` and
`dW_deviation` are the relative distance of one draw, which is noise, not error. A path
that fails is recorded so, and the others go on.
"""

import argparse
import concurrent.futures
import functools
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import results, sampled_data
from jaxmem.base import timing
from jaxmem.commands.bench import stopwatch
from jaxmem.head.maths import eight_bits
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.spec import CallOptions, Spec
from jaxmem.head.verbs import arguments

KEYS = ("path", "data", "n", "d", "v", "dtype", "chunk", "device")
SLOTS = 128
COPY = "W in 8 bits"
SWEEP = (16, 32, 64, 256, 512, 1024)  # other K, of one head and kind
MAIN = (8192, 4096, 151936)
# Of each, every kind of data or the one that is like a policy's.
SHAPES: dict[tuple[int, int, int], tuple[str, ...]] = {
    MAIN: ("policy", "flat", "peaked"),
    (32768, 4096, 128256): ("policy",),
    (2048, 4096, 131072): ("policy",),
    (8192, 4096, 50257): ("policy",),
    (8192, 2304, 256000): ("policy",),
    (8192, 4096, 128256): ("policy",),  # these three are in the figure of plot_head.py
    (2048, 4096, 128256): ("policy",),
    (131072, 4096, 128256): ("policy",),
}
CPU_SHAPES: dict[tuple[int, int, int], tuple[str, ...]] = {
    (8192, 256, 32768): ("policy", "flat", "peaked"),
}


class Path(NamedTuple):
    """A way to the loss and, of `wanted`, its gradients: None for the loss alone."""

    verb: str  # logprobs or token_loss
    slots: int | None = None
    frozen: bool = False
    wanted: tuple[int, ...] | None = (0, 1)
    forward: Any = "exact"  # of `jaxmem.Sample`
    calls: int = 1  # in one program, which share W's copy in 8 bits; timed per call

    @property
    def name(self) -> str:
        what = "forward" if self.wanted is None else "forward and both gradients"
        if self.frozen:
            what = "forward and dH, W frozen"
        kind = "exact" if self.slots is None else f"K={self.slots}"
        kind += "" if self.forward == "exact" else f" {self.forward}"
        calls = "" if self.calls == 1 else f", each of {self.calls} calls"
        return f"{self.verb}, {kind}, {what}{calls}"

    def run(self, chunk: int, h, W, y, key) -> tuple[jax.Array, tuple]:
        """(loss, gradients)."""
        options: dict[str, Any] = {"chunk": chunk}
        if self.slots is not None:
            options |= {"gradient": jaxmem.Sample(self.slots, self.forward), "key": key}

        def loss(h, W):
            if self.verb == "token_loss":
                return jaxmem.token_loss(_negative, h, W, y, **options)[0]
            rolled = [(jnp.roll(h, i, 0), jnp.roll(y, i)) for i in range(self.calls)]
            found = [jaxmem.logprobs(h, W, y, **options) for h, y in rolled]
            return -jnp.mean(jnp.stack(found))

        if self.wanted is None:
            return loss(h, W), ()
        wanted = (0,) if self.frozen else self.wanted
        return jax.value_and_grad(loss, wanted)(h, W)


def _negative(stats):
    return -stats.logprob


def paths_of(shape, sweep: bool, forward: str = "exact") -> dict[str, Path]:
    """By name; the exact ones first. With int8 few of them, and that beside K alone."""
    if forward == "int8":
        paths = [
            Path("logprobs", wanted=None),
            Path("logprobs"),
            Path("logprobs", SLOTS),
            Path("logprobs", SLOTS, wanted=None, forward=forward),
            Path("logprobs", SLOTS, forward=forward),
            Path("logprobs", SLOTS, calls=2),
            Path("logprobs", SLOTS, forward=forward, calls=2),
        ]
        return {path.name: path for path in paths}
    paths = [
        Path("logprobs", wanted=None),
        Path("logprobs"),
        Path("token_loss"),
        Path("logprobs", frozen=True),
        Path("logprobs", SLOTS),
        Path("token_loss", SLOTS),
        Path("logprobs", SLOTS, frozen=True),
    ]
    if shape != MAIN:
        paths = [path for path in paths if path != Path("token_loss", SLOTS)]
    if sweep:
        paths += [Path("logprobs", slots) for slots in SWEEP]
    return {path.name: path for path in paths}


def rounded_weights(shape, h, W, y):
    """W's copy in 8 bits, which a call makes unless another one has made it."""
    spec = Spec(
        shape[2],
        shape[2],
        len(h),
        ("logprob",),
        np.dtype(h.dtype),
        "vd",
        forward="int8",
    )
    rows = TokenRows(y, jnp.ones(len(h), jnp.bool_), None)
    return eight_bits.of_call(spec, Factors(h, W, None), rows)


def kept(chunk: int, slots: int, h, W, y) -> dict[str, Any]:
    """Columns: mean and largest number of entries of a token, the label's not."""
    gradient, key = jaxmem.Sample(slots), jax.random.key(0)
    options = CallOptions(chunk=chunk, gradient=gradient, key=key)
    operands = arguments.read_head(h, W)
    call = arguments.call("logprobs", ("logprob",), operands, y, options)
    forward = call.backend.sampler.forward
    run = jax.jit(lambda *operands: forward(call.spec, *operands, ("logprob",))[1].p)
    counts = jnp.sum(run(call.source, call.rows) > 0, axis=1)
    return {
        "kept_mean": round(float(jnp.mean(counts)), 2),
        "kept_max": int(jnp.max(counts)),
        "implementation": call.backend.name,
    }


def kept_of_all(paths: Mapping[str, Path], chunk: int, problem) -> dict[int, dict]:
    """`kept` by K; their programs are compiled side by side."""
    every = sorted({path.slots for path in paths.values() if path.slots is not None})

    def one(slots):
        return attempt(f"kept, K={slots}", kept, chunk, slots, *problem) or {}

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(every, pool.map(one, every), strict=True))


@jax.jit
def _distance(got, want):
    got, want = (jnp.asarray(x).astype(jnp.float32) for x in (got, want))
    return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())


def noise(made, exact) -> dict[str, Any]:
    """Columns: whether the loss is the exact path's; distances of the gradients."""
    row: dict[str, Any] = {"loss_equal_bits": bool(made[0] == exact[0])}
    row["loss_error"] = float(f"{float(made[0] - exact[0]):.3g}")
    for name, got, want in zip(("dh", "dW"), made[1], exact[1], strict=False):
        row[f"{name}_deviation"] = float(f"{float(_distance(got, want)):.3g}")
    return row


def attempt(name: str, run: Callable, *operands) -> Any:
    """The result of run, or None after its traceback."""
    start = time.perf_counter()
    try:
        return jax.block_until_ready(run(*operands))
    except Exception:  # of one path: the others go on
        print(f"FAILED {name}", flush=True)
        traceback.print_exc()
        return None
    finally:
        print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)


def compiled(paths: Mapping[str, Path], chunk: int, operands) -> dict[str, Any]:
    """Programs by name, compiled side by side; those that failed are left out."""

    def one(path):
        lowered = jax.jit(functools.partial(path.run, chunk)).lower(*operands)
        return attempt(f"compile {path.name}", lowered.compile)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = dict(zip(paths, pool.map(one, paths.values()), strict=True))
    return {name: program for name, program in made.items() if program is not None}


def measure(shape, kind, asked, programs: dict[str, Any]) -> list[dict]:
    """One row a path; programs are those of the shape, of any kind of data."""
    n, d, v = shape
    facts = {"n": n, "d": d, "v": v, "dtype": asked.dtype, "data": kind}
    facts["chunk"] = asked.chunk
    dtype = jnp.dtype(asked.dtype)
    problem = attempt(f"{kind} data", sampled_data.problem, kind, shape, dtype)
    if problem is None:
        return [{**facts, "path": "failed"}]
    operands = *problem, jax.random.key(1)
    sweep = shape == MAIN and kind == "policy"
    paths = paths_of(shape, sweep, asked.forward)
    programs |= compiled(
        {k: x for k, x in paths.items() if k not in programs}, asked.chunk, operands
    )
    h, W, _ = problem
    gemm = jax.jit(lambda h, W: h @ W.T).lower(h, W).compile()
    found, runs = {}, {}
    for name in [name for name in paths if name in programs]:
        made = attempt(f"run {name}", programs[name], *operands)
        if made is not None:
            exact = Path(
                "logprobs", wanted=None if paths[name].wanted is None else (0, 1)
            )
            reference = found.setdefault(exact.name, made)
            found[name] = noise(made, reference) if name != exact.name else made
            runs[name] = functools.partial(programs[name], *operands)
    counts = kept_of_all(paths, asked.chunk, problem)
    if asked.forward == "int8":
        copy = jax.jit(functools.partial(rounded_weights, shape))
        programs[COPY] = copy.lower(*problem).compile()
        runs[COPY] = functools.partial(programs[COPY], *problem)
        paths, found = paths | {COPY: Path("logprobs")}, found | {COPY: {}}
    found = {k: x if isinstance(x, dict) else {} for k, x in found.items()}
    unit_ms, taken = timing.take_turns(
        stopwatch(), functools.partial(gemm, h, W), runs, asked.repetitions
    )
    return [
        facts | _row(paths[name], timed, taken, unit_ms, programs[name])
        | {"path": name} | counts.get(paths[name].slots, {}) | found[name]
        for name, timed in taken.items()
    ]  # fmt: skip


def _row(path, timed, taken, unit_ms, program):
    row = {"path": path.name, "slots": path.slots or ""}
    if timed is None:
        return row | {"ms": timing.OUT_OF_MEMORY, "gemm_ms": round(unit_ms, 3)}
    forward = taken.get(Path("logprobs", wanted=None).name)
    temp = program.memory_analysis().temp_size_in_bytes
    over_gemm = timed.over_unit / path.calls
    row |= {
        "ms": round(timed.ms / path.calls, 3), "over_gemm": round(over_gemm, 3),
        "over_forward": round(over_gemm / forward.over_unit, 3) if forward else "",
        "spread": round(timed.spread, 3), "gemm_ms": round(unit_ms, 3),
        "temp_mib": round(temp / 2**20, 1),
    }  # fmt: skip
    print(path.name, row, flush=True)
    return row


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--cpu", action="store_true", help="the shapes for a CPU")
    made.add_argument("--dtype", help="bfloat16; on a CPU float32")
    made.add_argument("--chunk", type=int, default=1024)
    made.add_argument("--forward", default="exact", help="int8: that beside K=128")
    made.add_argument("--shape", action="append", help="one of the shapes; default all")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--out", default="sampled.csv")
    return made


def main(arguments=None) -> None:
    asked = parser().parse_args(arguments)
    asked.dtype = asked.dtype or ("float32" if asked.cpu else "bfloat16")
    shapes = CPU_SHAPES if asked.cpu else SHAPES
    if asked.shape:
        chosen = [tuple(map(int, x.split(","))) for x in asked.shape]
        shapes = {shape: shapes.get(shape, ("policy",)) for shape in chosen}
    print(jax.devices()[0].device_kind, jax.__version__, np.__version__)
    for shape, kinds in shapes.items():
        programs: dict[str, Any] = {}
        for kind in kinds:
            run = functools.partial(measure, shape, kind, asked, programs)
            rows = attempt(f"{shape} {kind}", run) or []
            rows = [row | results.provenance() for row in rows]
            print("wrote", results.merge(asked.out, rows, KEYS), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
