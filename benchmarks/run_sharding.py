"""The head over several devices of one host: time, memory, what is communicated.

    python -m benchmarks.run_sharding --shape 8192,4096,131072 --dtype bfloat16 \
        --peaks --out sharding_h200.csv
    python -m benchmarks.run_sharding --paper sharding_paper.csv

The first divides the vocabulary of one problem by 1, 2, 4, ... devices, and then gives
each of as many devices that many tokens, by `jaxmem.sharding.parallel` and by `jax.jit`
alone: a device's efficiency is 1 where k of them take 1/k of one device's time, or the
time of one for k times the tokens. One device may be faster while the others rest, so
both are also held against copies: as many devices, each at one device's problem, with
nothing to send. The second compiles for up to 512 devices that are not there and reads
what they would send.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from benchmarks import (
    exact,
    on_jax,
    results,
    sampled_data,
    sharding_on_paper,
    workers,
)
from jaxmem.base import timing
from jaxmem.planning import collectives

PATHS = ["token_stats implementation=hopper", "token_stats implementation=xla"]
PATHS += ["logprobs implementation=hopper samples=128"]
KEYS = (*results.KEYS, "split", "devices")
VERBS = {"token_stats": jaxmem.token_stats, "logprobs": jaxmem.logprobs}
COMPILERS = 6  # threads
SPLITS = "vocab", "tokens", "jit"
STARTERS = concurrent.futures.ThreadPoolExecutor(8)  # one a device of a host
FOR_PEAKS = "none", "vocab"  # of the same tokens on fewer and more devices
# A chip that another sample left at its power limit, or at rest, needs 50 ms and more
# to come to its own pace, and of several that wait for each other the slowest counts.
SAMPLE_SECONDS = 0.6


@dataclasses.dataclass(frozen=True)
class Case:
    """A path on some of the devices: which of them hold what."""

    path: str
    split: str  # "vocab", "tokens", "jit" (tokens, too); of one device, "none"
    devices: int
    shape: tuple[int, int, int]  # of all of them
    first: int = 0  # of the devices

    @property
    def alone(self):
        """The case of one device that this one is held against."""
        n, *rest = self.shape
        n //= 1 if self.split == "vocab" else self.devices
        return Case(self.path, "none", 1, (n, *rest))

    @functools.cached_property
    def mesh(self):
        sizes = (1, self.devices) if self.split == "vocab" else (self.devices, 1)
        devices = jax.devices()[self.first :][: self.devices]
        axes = ("data", "tensor")
        return jax.make_mesh(
            sizes, axes, devices=devices, axis_types=(AxisType.Auto,) * 2
        )

    @property
    def shardings(self):
        """Shardings of h, W and y."""
        specs = P("data"), P("tensor"), P("data")
        return tuple(NamedSharding(self.mesh, spec) for spec in specs)

    def call(self, h, W, y):
        """Outputs by name."""
        name, *words = self.path.split()
        pairs = (word.partition("=") for word in words)
        options = {key: workers.value_of(text) for key, _, text in pairs}
        if slots := options.pop("samples", None):
            options |= {"gradient": jaxmem.Sample(slots), "key": jax.random.key(0)}
        verb = VERBS[name]
        if self.split in ("vocab", "tokens"):
            axis = {"vocab": "tensor"} if self.split == "vocab" else {}
            verb = jaxmem.sharding.parallel(verb, self.mesh, tokens="data", **axis)
        made = verb(h, W, y, **options)
        return {"logprob": made} if name == "logprobs" else made._asdict()

    @property
    def sampled(self):
        """True if gradients are sampled: of data like a policy's, and with noise."""
        return "samples=" in self.path

    def operands(self, dtype):
        """h, W, y and cotangents where they belong."""
        if self.sampled:
            operands = sampled_data.problem("policy", self.shape, dtype)
        else:
            operands = on_jax.problem(self.shape, dtype)
        operands = jax.device_put(operands, self.shardings)
        g = on_jax.cotangents(self.shape[0])
        return operands, jax.device_put(g, dict.fromkeys(g, self.shardings[2]))


def copies(case, count=None):
    """One device's problem on each of as many devices, the case's own or `count`."""
    devices = range(count or case.devices)
    return [dataclasses.replace(case.alone, first=first) for first in devices]


def cases(shape, paths, counts, splits=SPLITS):
    n, *rest = shape
    for path in paths:
        yield Case(path, "none", 1, shape)
        for split in splits:
            for k in counts:
                tokens = n if split == "vocab" else k * n
                yield Case(path, split, k, (tokens, *rest))


# ------------------------------------------------------------------ one case


@functools.cache
def reference(shape, dtype, names):
    """In float64, of cotangents of a few rows of those outputs, on one device."""
    h, W, y = on_jax.problem(shape, dtype)
    rows = exact.checked_rows(len(y))
    g = on_jax.cotangents(len(y))
    gs = [g[name][rows] * (name in names) for name in on_jax.COTANGENTS]
    hs, ys = h[rows], y[rows]
    with jax.enable_x64(True):
        hs, W, *gs = (x.astype(jnp.float64) for x in (hs, W, *gs))
        return exact.head(jnp, hs, W, ys, jnp.arange(len(W)), *gs)


def errors(program, case, dtype, operands):
    """Columns of `exact.errors`."""
    rows = exact.checked_rows(case.shape[0])
    g = {
        name: jax.device_put(jnp.zeros(len(x)).at[rows].set(x[rows]), x.sharding)
        for name, x in operands[1].items()
    }
    made, (dh, dW) = program.both(*operands[0], g)
    names = tuple(name for name in on_jax.COTANGENTS if name in made)
    made, dh, dW = jax.device_put(
        ({name: made[name] for name in names}, dh, dW), jax.devices()[0]
    )
    want, grads = reference(case.shape, dtype, names)
    made, dh = {name: made[name][rows] for name in names}, dh[rows]
    with jax.enable_x64(True):
        got = dh.astype(jnp.float64), dW.astype(jnp.float64)
        return exact.errors(made, got, want, grads)


def prepare(dtype, case) -> tuple[on_jax.Program | None, dict[str, Any]]:
    """(the program, columns); a note where it does not run."""
    try:
        h_W_y, g = case.operands(dtype)
        program = on_jax.compile_program(case.call, *h_W_y, g=g)
    except NotImplementedError as refusal:
        return None, {"note": f"refused: {refusal}"}
    except Exception as error:  # the others go on
        return None, {"note": f"failed: {workers.said(error)}"}
    return program, {"implementation": program.implementation, **account(program.both)}


def account(compiled) -> dict[str, Any]:
    """Columns: the compiler's bytes of one device, and what it sends."""
    names = "arguments_mib", "results_mib", "temp_mib"
    sizes = zip(names, on_jax.memory_bytes(compiled), strict=True)
    row: dict[str, Any] = {name: round(size / 2**20, 1) for name, size in sizes}
    found = collectives.of(compiled)
    row["collectives"] = "; ".join(f"{c.kind} {c.array}" for c in found)
    row["beside_products"] = collectives.hidden(compiled.as_text() or "")[0]
    row["sent_mib"] = round(sum(c.moved * c.times for c in found) / 2**20, 3)
    return row


def measure(shape, dtype, paths, counts, repetitions, splits=SPLITS):
    """One row a case, once all have been timed."""
    asked = list(cases(shape, paths, counts, splits))
    most = max(counts, default=1)
    todo = asked + [x for c in asked if c.split == "none" for x in copies(c, most)[1:]]
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        found = dict(
            zip(todo, pool.map(functools.partial(prepare, dtype), todo), strict=True)
        )
    runs = {}
    for case, (program, columns) in found.items():
        if program is None:
            continue
        operands = case.operands(dtype)
        if not case.sampled:
            columns |= errors(program, case, dtype, operands)
        if exact.is_wrong(columns):
            columns["note"] = "wrong"
            continue
        runs[case, "forward"] = functools.partial(program.forward, *operands[0])
        runs[case, "both"] = functools.partial(program.both, *operands[0], operands[1])
    reference.cache_clear()
    runs = with_copies(runs, asked)
    on_each = gemms(shape, dtype, most)
    runs |= {("gemm", k): gemm for k, gemm in enumerate(on_each)}
    clock = on_jax.stopwatch()
    if clock.sample_seconds:  # a CPU's samples are calls
        clock = dataclasses.replace(clock, sample_seconds=SAMPLE_SECONDS)
    # The unit is on all at once: none comes to its turn from idling.
    unit_ms, taken = timing.take_turns(
        clock, functools.partial(at_once, on_each), runs, repetitions
    )
    for case in asked:
        columns = found[case][1]
        yield row_of(case, dtype, unit_ms, taken, columns, repetitions)


def with_copies(runs, asked):
    """runs with those of copies in the place of what they are made of."""
    made = {(case, name): runs[case, name] for case, name in runs if case in asked}
    for case, name in runs:
        each = [runs.get((x, name)) for x in copies(case)]
        if case.devices > 1 and all(each):
            at = "copies", case.path, case.devices, name
            made[at] = functools.partial(side_by_side, each)
    return made


def side_by_side(runs):
    """A thread starts each: one that waits for its device would hold the next up."""
    return list(STARTERS.map(lambda run: run(), runs))


def at_once(runs):
    return [run() for run in runs]


def gemms(shape, dtype, count):
    """`h @ W.T` of one device's problem on each of them, to call."""
    h_W = on_jax.problem(shape, dtype)[:2]
    return [
        functools.partial(jax.jit(lambda h, W: h @ W.T), *jax.device_put(h_W, device))
        for device in jax.devices()[:count]
    ]


def row_of(case, dtype, unit_ms, taken, columns, repetitions):
    n, d, v = case.shape
    row = {"n": n, "d": d, "v": v, "dtype": jnp.dtype(dtype).name, "path": case.path}
    row |= {"split": case.split, "devices": case.devices, "gemm_ms": round(unit_ms, 3)}
    row["slowest_device"] = slowest(case, taken)
    for name, column in (("forward", "forward"), ("both", "forward_backward")):
        found = taken.get((case, name))
        row |= {
            f"{column}_ms": round(found.ms, 3) if found else "",
            f"{column}_over_gemm": round(found.over_unit, 3) if found else "",
            f"{column}_spread": round(found.spread, 3) if found else "",
            f"{column}_efficiency": efficiency(case, name, taken),
            f"{column}_of_copies": of_copies(case, name, taken),
        }
    return {**row, **columns, "repetitions": repetitions, **results.provenance()}


def slowest(case, taken):
    """The time of a GEMM on the slowest of its devices, in that of the first's."""
    first, *others = (taken[("gemm", k)].over_unit for k in range(case.devices))
    return round(max([first, *others]) / first, 3)


def efficiency(case, name, taken):
    """Share of one device's time, by ms: the unit's clocks are those of all devices."""
    return share(case, taken.get((case.alone, name)), taken.get((case, name)))


def of_copies(case, name, taken):
    """Share of the time of one device while as many are as busy."""
    at = ("copies", case.path, case.devices, name)
    alone = taken.get(at if case.devices > 1 else (case, name))
    return share(case, alone, taken.get((case, name)))


def share(case, alone, found):
    if not found or not alone:
        return ""
    times = case.devices if case.split == "vocab" else 1
    return round(alone.ms / (times * found.ms), 4)


def peak(case, dtype) -> dict[str, Any]:
    """Columns: the allocator's peak of the fullest device, inputs and results in it.

    Inputs are ones, made where they belong. A peak counts where none was higher before:
    a path's cases come in the order of what they hold. Compilation must come from the
    cache.
    """
    n, d, v = case.shape
    devices = list(case.mesh.devices.flat)
    if devices[0].memory_stats() is None:
        return {}
    kinds = ((n, d), dtype), ((v, d), dtype), ((n,), jnp.int32)
    h, W, y = (
        jax.jit(functools.partial(jnp.ones, *kind), out_shardings=sharding)()
        for kind, sharding in zip(kinds, case.shardings, strict=True)
    )
    one = jax.jit(lambda: jnp.ones(n), out_shardings=case.shardings[2])
    g = {name: one() for name in on_jax.COTANGENTS}
    program = on_jax.compile_program(case.call, h, W, y, g=g)
    before = max(x.memory_stats()["peak_bytes_in_use"] for x in devices)
    jax.block_until_ready(program.both(h, W, y, g))
    after = max(x.memory_stats()["peak_bytes_in_use"] for x in devices)
    return {"device_peak_mib": round(after / 2**20, 1)} if after > before else {}


# ----------------------------------------------------------------------- run


def work(args):
    """A worker's part: rows to the driver."""
    dtype, (shape,) = getattr(jnp, args.dtype), args.shapes
    counts = args.devices or [k for k in (2, 4, 8) if k <= len(jax.devices())]
    if args.worker == "time":
        given = shape, dtype, args.path, counts, args.repetitions
        for row in measure(*given, args.split or SPLITS):
            workers.send(row)
        return
    few_first = sorted(
        (c for c in cases(shape, args.path, counts) if c.split in FOR_PEAKS),
        key=lambda case: -case.devices,
    )
    for case in few_first:
        try:
            columns = peak(case, dtype)
        except NotImplementedError:  # the timing said so
            continue
        workers.send({"path": case.path, "devices": case.devices, **columns})


def drive(args):
    """Timing in one process, each path's peaks in another that compiles nothing."""
    with workers.compilation_cache() as environment:
        start = functools.partial(workers.start, "benchmarks.run_sharding", environment)
        common = [f"--dtype={args.dtype}", f"--repetitions={args.repetitions}"]
        common += [f"--shape={','.join(map(str, shape))}" for shape in args.shapes]
        common += [f"--devices={k}" for k in args.devices]
        common += [f"--split={split}" for split in args.split]
        paths = [f"--path={path}" for path in args.path]
        rows = []
        for row in start(["--worker=time", *common, *paths]):
            rows.append(row)
            show(row)
            results.merge(args.out, [row], KEYS)
        for path in paths if args.peaks else []:
            for columns in start(["--worker=peak", *common, path]):
                add_peak(rows, columns, args.out)


def add_peak(rows, columns, out):
    """To the row that it is of."""
    for row in rows:
        same = all(row[name] == columns[name] for name in ("path", "devices"))
        if same and row["split"] in FOR_PEAKS:
            row.update(columns)
            results.merge(out, [row], KEYS)
            print(columns, flush=True)


def show(row):
    said = [f"{row['path']:36s} {row['split']:6s} k={row['devices']}"]
    for name in ("forward", "forward_backward"):
        if row[f"{name}_ms"] != "":
            ms, ideal, copied = (
                row[f"{name}_{column}"] for column in ("ms", "efficiency", "of_copies")
            )
            said.append(f"{name} {ms} ms, efficiency {ideal}, of copies {copied}")
    said += [f"sent {row.get('sent_mib')} MiB", row.get("note", "")]
    print(" | ".join(x for x in said if x), flush=True)


def parser():
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    made.add_argument(
        "--shape", action="append", default=[], help="N,D,V of one device"
    )
    made.add_argument("--path", action="append", help=f"of {', '.join(PATHS)}")
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    made.add_argument(
        "--devices", action="append", type=int, default=[], help="2, 4 and 8, if there"
    )
    made.add_argument("--split", action="append", default=[], choices=SPLITS)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--peaks", action="store_true", help="the allocator's too")
    made.add_argument("--out", default="sharding.csv", help="CSV in benchmarks/results")
    made.add_argument("--paper", metavar="CSV", help="compile for up to 512 devices")
    made.add_argument("--worker", choices=["time", "peak"], help=argparse.SUPPRESS)
    made.set_defaults(sweep=[])
    return made


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.path, args.shapes = args.path or PATHS, workers.shapes_of(args)
    if args.paper:
        results.save(args.paper, list(sharding_on_paper.rows(args.shapes[0][1:])))
    elif args.worker:
        work(args)
    else:
        drive(args)


if __name__ == "__main__":
    main()
