"""jax's side of the measurements: data, check, compilation, timing of one shape."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import exact, results, workers
from jaxmem.base import timing
from jaxmem.commands.bench import is_out_of_memory, stopwatch

# hidden [N, D], W [V, D], labels [N] -> outputs [N] by name
Call = Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]
COTANGENTS = ("logprob", "entropy")
PEAKED = 20.0  # standard deviation of logits that are far from flat


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def problem(shape, dtype, std=1.0):
    """Random normal states, W so that logits have this standard deviation; labels."""
    n, d, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    h = (jax.random.normal(keys[0], (n, d), dtype) * std).astype(dtype)
    W = (jax.random.normal(keys[1], (v, d), dtype) * d**-0.5).astype(dtype)
    return h, W, jax.random.randint(keys[2], (n,), 0, v)


def cotangents(n_tokens):
    """One a token for each output that is differentiated."""
    keys = jax.random.split(jax.random.key(1), len(COTANGENTS))
    return {
        name: jax.random.normal(key, (n_tokens,))
        for name, key in zip(COTANGENTS, keys, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class Program:
    """A path compiled: (h, W, y) -> outputs; (h, W, y, g) -> (outputs, (dh, dW))."""

    forward: jax.stages.Compiled
    both: jax.stages.Compiled
    compile_seconds: float  # of both
    implementation: str  # the backend that jaxmem chose, if it was asked


def total_of(call: Call, h, W, y, g):
    """(what is differentiated, outputs): a call's own `total`, or its weighted sum."""
    if hasattr(call, "total"):
        return call.total(h, W, y, g)  # pyright: ignore[reportFunctionMemberAccess]
    made = call(h, W, y)
    weighted = [jnp.vdot(g[k], made[k]) for k in COTANGENTS if k in made]
    return sum(weighted[1:], weighted[0]), made


def compile_program(call: Call, h, W, y, g) -> Program:
    """Both compiled; raises what jaxmem or the compiler raises."""

    def both(h, W, y, g):
        total = functools.partial(total_of, call)
        grads, made = jax.grad(total, (0, 1), has_aux=True)(h, W, y, g)
        return made, grads

    start = time.perf_counter()
    with jaxmem.report() as report:
        compiled = jax.jit(both).lower(h, W, y, g).compile()
    taken = time.perf_counter() - start
    forward = jax.jit(call).lower(h, W, y).compile()
    ran = report.calls[0].implementation if report.calls else ""
    return Program(forward, compiled, taken, ran)


def check(program: Program, h, W, y) -> dict[str, Any]:
    """Columns: errors against float64 of a few rows at this shape."""
    rows = exact.checked_rows(len(y))
    g = {
        name: jnp.zeros(len(y)).at[rows].set(value[rows])
        for name, value in cotangents(len(y)).items()
    }
    made, (dh, dW) = program.both(h, W, y, g)
    made = {name: made[name][rows] for name in COTANGENTS if name in made}
    g_rows = [g[name][rows] * (name in made) for name in COTANGENTS]
    hs, ys, dhs = h[rows], y[rows], dh[rows]
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (hs, W, *g_rows, dhs, dW)]
        hs, wide_W, *g_rows, dhs, wide_dW = wide
        columns = jnp.arange(len(W))
        g_logprob, g_entropy = g_rows
        want, grads = exact.head(jnp, hs, wide_W, ys, columns, g_logprob, g_entropy)
        return exact.errors(made, (dhs, wide_dW), want, grads)


def errors(program: Program, shape, dtype) -> dict[str, Any]:
    """Columns of `check` for ordinary logits, and for peaked ones with a suffix."""
    row = check(program, *problem(shape, dtype))
    peaked = check(program, *problem(shape, dtype, PEAKED))
    return {**row, **{f"{k}_std{PEAKED:.0f}": v for k, v in peaked.items()}}


def prepare(
    call: Call, shape, dtype, operands, g
) -> tuple[Program | None, dict[str, Any]]:
    """(the program, columns of memory and errors); a note where it is not timed."""
    program, row = None, {}
    try:
        program = compile_program(call, *operands, g=g)
        row = _memory(program)
        row |= errors(program, shape, dtype)
    except Exception as error:  # a path's own: said, and the others go on
        if is_out_of_memory(error):
            return program, {**row, "note": timing.OUT_OF_MEMORY}
        return None, {"note": f"failed: {workers.said(error)}"}
    return (None, {**row, "note": "wrong"}) if exact.is_wrong(row) else (program, row)


def measure(
    shape, dtype, calls: Mapping[str, Call], repetitions: int, masked=()
) -> list[dict[str, Any]]:
    """One row a path: errors, then ms and MiB, forward and with gradients.

    Args:
        masked: the paths that mask every other row.
    """
    operands, g = problem(shape, dtype), cotangents(shape[0])
    prepared = {k: prepare(f, shape, dtype, operands, g) for k, f in calls.items()}
    gemm = jax.jit(lambda h, W, y: h @ W.T).lower(*operands).compile()
    runs = {}
    for name, (program, _) in prepared.items():
        if program is not None:
            runs[name, "forward"] = functools.partial(program.forward, *operands)
            runs[name, "both"] = functools.partial(program.both, *operands, g)
    gemm_ms, taken = timing.take_turns(
        stopwatch(), functools.partial(gemm, *operands), runs, repetitions
    )
    return [
        {
            "n": shape[0], "d": shape[1], "v": shape[2], "dtype": jnp.dtype(dtype).name,
            "path": name,
            **timing.columns(
                shape, gemm_ms, taken.get((name, "forward")), taken.get((name, "both")),
                0.5 if name in masked else 1.0,
                columns.get("note", timing.OUT_OF_MEMORY).partition(":")[0],
            ),
            **columns, "repetitions": repetitions, **results.provenance(),
        }
        for name, (_, columns) in prepared.items()
    ]  # fmt: skip


def _memory(program: Program) -> dict[str, Any]:
    """The memory, compile time and backend of a program, as columns of a row."""
    compiled = {"forward": program.forward, "forward_backward": program.both}
    temps = {f"{k}_temp_mib": memory_bytes(run)[2] for k, run in compiled.items()}
    return {
        **{name: round(temp / 2**20, 1) for name, temp in temps.items()},
        "compile_s": round(program.compile_seconds, 1),
        "implementation": program.implementation,
    }


def memory_bytes(run: jax.stages.Compiled) -> tuple[int, int, int]:
    """Arguments, results and the rest, by the compiler's account."""
    account: Any = run.memory_analysis()
    return (
        account.argument_size_in_bytes,
        account.output_size_in_bytes,
        account.temp_size_in_bytes,
    )


def peak_mib(shape, dtype, call: Call) -> dict[str, Any]:
    """Columns: the allocator's peak over inputs and results; alone in its process.

    Inputs are ones, made without a temporary. Compilation must have come from the
    cache: trying out GEMMs would count.
    """
    n, d, v = shape
    operands = jnp.ones((n, d), dtype), jnp.ones((v, d), dtype), jnp.zeros(n, jnp.int32)
    device, row = jax.devices()[0], {}
    if device.memory_stats() is None:
        return row
    program = compile_program(call, *operands, g=cotangents(n))
    arguments = {"forward": (), "forward_backward": (cotangents(n),)}
    runs = {"forward": program.forward, "forward_backward": program.both}
    for name, run in runs.items():
        jax.block_until_ready((operands, arguments))
        held = device.memory_stats()["bytes_in_use"]
        before = device.memory_stats()["peak_bytes_in_use"]
        try:
            made = jax.block_until_ready(run(*operands, *arguments[name]))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        peak = device.memory_stats()["peak_bytes_in_use"]
        made = sum(x.nbytes for x in jax.tree.leaves(made))
        if peak > before:
            row[f"{name}_peak_mib"] = round((peak - held - made) / 2**20, 1)
    return row
