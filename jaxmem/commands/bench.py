"""Benchmarks the head on this machine: time relative to the bare GEMM, and memory.

Timing is that of `jaxmem/base/timing.py`: samples of many calls, each between two
samples of `hidden @ W.T`, so that ratios are meaningful on a chip whose clock depends
on its power.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.base import timing
from jaxmem.head.backends import hopper
from jaxmem.head.kernels import tuned

Shape = tuple[int, int, int]  # tokens, width of hidden states, vocabulary

SHAPE_ON_GPU, SHAPE_ON_CPU = (8192, 4096, 151936), (512, 256, 16384)
_SAMPLE_SECONDS = 0.15


class Row(NamedTuple):
    """One path; times as (ms, in GEMMs), and temporary bytes."""

    path: str
    backend: str
    forward: tuple[float, float] | None
    both: tuple[float, float] | None
    forward_bytes: int
    both_bytes: int


def measure(shape: Shape, dtype: str, chunk: Any, repetitions: int = 3) -> list[Row]:
    """Measure each path: the forward pass, and the forward pass with both gradients.

    A time is None if memory ran out. More repetitions make the medians more precise.
    """
    operands = _draw_operands(shape, jnp.dtype(dtype))
    compiled = {
        name: _compile_path(path, operands) for name, path in _loss_paths(chunk).items()
    }
    runs = {
        (name, kind): functools.partial(program, *operands)
        for name, (programs, _) in compiled.items()
        for kind, program in programs.items()
    }
    gemm = jax.jit(lambda h, W, y: h @ W.T).lower(*operands).compile()
    unit = functools.partial(gemm, *operands)
    _, taken = timing.take_turns(stopwatch(), unit, runs, repetitions)
    return [
        Row(
            name,
            backend,
            _read_timing(taken[name, "forward"]),
            _read_timing(taken[name, "both"]),
            _temporary_bytes(programs["forward"]),
            _temporary_bytes(programs["both"]),
        )
        for name, (programs, backend) in compiled.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text: times in ms and GEMMs, memory in MiB."""

    def time(taken):
        return "out of memory" if taken is None else f"{taken[0]:9.3f} ({taken[1]:.2f})"

    lines = [
        f"{'path':14} {'backend':8} {'forward':>18} {'with gradients':>18} "
        f"{'MiB':>9} {'MiB':>9}"
    ]
    lines += [
        f"{row.path:14} {row.backend:8} {time(row.forward):>18} {time(row.both):>18} "
        f"{row.forward_bytes / 2**20:9.1f} {row.both_bytes / 2**20:9.1f}"
        for row in rows
    ]
    lines.append(
        "times in ms (and as multiples of the bare matrix product hidden @ W.T)"
    )
    return "\n".join(lines)


def tune(
    shape: Shape, kernels: Sequence[str], repetitions: int, out: Path
) -> Iterator[str]:
    """Measure tile sizes of the "hopper" kernels, and write the best ones into a table.

    Without names of kernels it is all of them. The table is a JSON file, in which an
    entry of the same head is replaced. What is yielded are lines to print.

    Raises:
        ValueError: a shape or kernel is impossible, or there is no Hopper GPU.
    """
    refusal = hopper.refuses_machine()
    if refusal:
        raise ValueError(f"--tune measures the kernels of 'hopper': {refusal}")
    if shape[0] % 256 or shape[1] % 64 or shape[2] % 64:
        raise ValueError(
            f"--shape must be multiples of 256, 64 and 64 under --tune, got {shape}"
        )
    unknown = set(kernels) - set(get_args(tuned.Kernel))
    if unknown:
        known = ", ".join(get_args(tuned.Kernel))
        raise ValueError(f"--kernel must be one of {known}, got {', '.join(unknown)}")
    from jaxmem.head.backends import tuning

    names = kernels or get_args(tuned.Kernel)
    for results, entry in tuning.tune(shape, names, stopwatch(), repetitions):
        for result in sorted(results, key=lambda r: r.over_gemm or 9e9):
            cost = result.why or f"{result.over_gemm:.4f} GEMM {result.ms} ms"
            yield f"{result.kernel:11} {_describe_tiles(result.tiles)}: {cost}"
        entry |= {"tokens": shape[0], "jax": jax.__version__,
                  "date": datetime.date.today().isoformat()}  # fmt: skip
        _write_entry(out, entry)
        chosen = entry["tiles"] or "no tiles are better than the default"
        yield f"{entry['kernel']}: {chosen} written to {out}"


def _write_entry(path: Path, entry: dict) -> None:
    """Add the entry to the file, in place of an older one of its kernel and head."""
    entries = json.loads(path.read_text("utf-8")) if path.exists() else []
    keys = ["kernel", *(field.name for field in dataclasses.fields(tuned.TunedKey))]
    kept = [old for old in entries if any(old[k] != entry[k] for k in keys)]
    lines = ",\n".join(json.dumps(each) for each in [*kept, entry])
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


def _describe_tiles(tiles) -> str:
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(tiles).items())


def stopwatch() -> timing.Stopwatch:
    """A stopwatch for jax programs on the default device."""
    on_cpu = jax.default_backend() == "cpu"
    return timing.Stopwatch(
        jax.block_until_ready, is_out_of_memory, 0.0 if on_cpu else _SAMPLE_SECONDS
    )


def is_out_of_memory(error: Exception) -> bool:
    """True if an error means that the device or the host ran out of memory."""
    if isinstance(error, MemoryError):  # numpy raises a subclass
        return True
    message = str(error)  # XLA for CPUs has no status code for it
    is_xla = isinstance(error, jax.errors.JaxRuntimeError)
    return is_xla and ("RESOURCE_EXHAUSTED" in message or "Out of memory" in message)


def _draw_operands(shape: Shape, dtype):
    n, d, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (n, d), dtype)
    W = jax.random.normal(keys[1], (v, d), dtype) * jnp.asarray(d**-0.5, dtype)
    return h, W, jax.random.randint(keys[2], (n,), 0, v)


def _loss_paths(chunk) -> dict[str, Callable]:
    """The sum of log-probability and entropy, computed in several ways."""

    def token_loss(h, W, y):
        def both(stats):
            return stats.logprob + stats.entropy

        return jaxmem.token_loss(both, h, W, y, chunk=chunk)[0]

    def token_stats(h, W, y):
        stats = jaxmem.token_stats(h, W, y, chunk)
        return jnp.sum(stats.logprob + stats.entropy)

    def logprobs(h, W, y):
        return jnp.sum(jaxmem.logprobs(h, W, y, chunk))

    def materialised(h, W, y):
        z = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
        log_p = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(log_p, y[:, None], axis=1)[:, 0]
        return jnp.sum(logprob - jnp.sum(jnp.exp(log_p) * log_p, axis=1))

    paths = token_loss, token_stats, logprobs, materialised
    return {path.__name__: path for path in paths}


def _compile_path(path, operands) -> tuple[dict[str, jax.stages.Compiled], str]:
    """(programs by name, the backend that jaxmem chose)."""
    with jaxmem.report() as report:
        both = jax.jit(jax.value_and_grad(path, (0, 1))).lower(*operands).compile()
    forward = jax.jit(path).lower(*operands).compile()
    backend = report.calls[0].implementation if report.calls else "xla"
    return {"forward": forward, "both": both}, backend


def _read_timing(taken: timing.Timing | None) -> tuple[float, float] | None:
    return None if taken is None else (taken.ms, taken.over_unit)


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    account: Any = program.memory_analysis()
    return account.temp_size_in_bytes
