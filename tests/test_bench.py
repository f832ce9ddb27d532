"""`jaxmem bench`: the table, and the tuner's bookkeeping."""

import collections
import dataclasses
import functools
import json
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from jaxmem.base import timing
from jaxmem.commands import bench
from jaxmem.commands.cli import main
from jaxmem.head.backends import hopper
from jaxmem.head.kernels import tuned
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_pallas = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"needs jax 0.11, this is {jax.__version__}"
)


@pytest.mark.full
def test_it_prints_times_and_memory_of_every_path(capsys):
    assert main(["bench", "--shape", "64,32,512", "--repetitions=1"]) == 0
    header, columns, *rows, unit = capsys.readouterr().out.splitlines()
    assert "(64, 32, 512), float32" in header and "matrix product" in unit
    names = [row.split()[0] for row in rows]
    assert names == ["token_loss", "token_stats", "logprobs", "materialised"]
    for row in rows:
        numbers = [float(x.strip("()")) for x in row.split()[2:]]
        assert len(numbers) == 6 and min(numbers) > 0


def test_bench_refuses_bad_shapes(capsys):
    for shape in ("1,2", "0,1,2", "a,b,c"):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "--shape", shape])
        assert "--shape" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without")
def test_tuning_needs_the_chip(capsys):
    assert main(["bench", "--tune"]) == 2
    assert "--tune measures the kernels of 'hopper'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape, kernels, message",
    [
        ((100, 64, 128), [], "--shape must be multiples of 256, 64 and 64"),
        ((256, 64, 128), ["sort"], "--kernel must be one of statistics,.* got sort"),
    ],
)
def test_tune_refuses_bad_requests(shape, kernels, message, monkeypatch, tmp_path):
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)
    with pytest.raises(ValueError, match=message):
        next(bench.tune(shape, kernels, 1, tmp_path / "tuned.json"))


class Clock:
    """Seconds that pass as programs say, and a little each time it is read."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.1
        return self.now


@needs_pallas
def test_tune_takes_fastest_right_tiles(monkeypatch, tmp_path):
    """Kernels of plain jax, whose time is their panel, on a clock of our own."""
    from jaxmem.head.backends import tuning

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)

    def compile_all(program, candidates, operands):
        def run(tiles, *operands):
            clock.now += {4: 0.5, 8: 2.0, 16: 1.0, 32: 3.0}[tiles.panel]
            clock.now += 10 * (tiles.slots == 4)
            return program(tiles)(*operands)

        return {tiles: functools.partial(run, tiles) for tiles in candidates}

    def program(kernel, shape, h, W, y):
        # Of panel 4 the result is wrong, and of two slots it cannot be made.
        return lambda t: lambda h: h * (2 if t.panel == 4 else 1), (h,)

    monkeypatch.setattr(tuning, "_compile_all", compile_all)
    monkeypatch.setattr(tuning, "program_of", program)
    out = tmp_path / "tuned.json"
    older = {"kernel": "to_W", "device": "cpu", "depth": 64, "columns": 128,
             "layout": "vd", "tiles": {"panel": 32}}  # fmt: skip
    other = older | {"depth": 192}
    out.write_text(json.dumps([older, other]))
    printed = list(bench.tune((256, 64, 128), ["to_W"], 1, out))
    assert any("panel=4" in line and "wrong result" in line for line in printed)
    kept, made = json.loads(out.read_text())
    assert kept == other and made["tiles"] == {"panel": 16}
    assert made["over_gemm"] < made["default_over_gemm"]
    assert made["jax"] == jax.__version__ and made["tokens"] == 256
    assert tuned._read_entry(0, made)[1].panel == 16


@needs_pallas
@pytest.mark.parametrize("kernel", get_args(tuned.Kernel))
def test_every_kernel_to_be_measured_can_be_traced(kernel):
    name = "sampled_sum" if kernel in tuned.LAUNCHES else "wgmma"
    assert name in str(traced(kernel).jaxpr)


@needs_pallas
@pytest.mark.parametrize(
    "kernel",
    # `test_hopper` lowers them with other tiles.
    [
        slow(k) if k in ("statistics", "exps", "derivative") else k
        for k in get_args(tuned.Kernel)
    ],
)
def test_every_kernel_to_be_measured_lowers_for_cuda(kernel):
    text = traced(kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@needs_pallas
@pytest.mark.parametrize("kernel", tuned.LAUNCHES)
def test_tuned_fields_of_sampled_kernels_fit_launch(kernel):
    from jaxmem.head.backends import tuning

    names = {field.name for field in dataclasses.fields(tuned.LAUNCHES[kernel])}
    fields = set(tuning._FIELDS[kernel])
    assert fields == (names if kernel == "sampled_to_W" else names - {"sums"})
    for field in fields:
        candidates, refused = tuning._vary_field(tuned.LAUNCHES[kernel], field)
        assert len(candidates) == len(tuning.TRIED[field]) and not refused


def traced(kernel):
    from jaxmem.head.backends import tuning

    h, W = jnp.ones((256, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16)
    y = jnp.zeros(256, jnp.int32)
    program, operands = tuning.program_of(kernel, (256, 64, 512), h, W, y)
    if kernel in tuned.LAUNCHES:
        tiles = dataclasses.replace(tuned.LAUNCHES[kernel], unroll=2)
    else:
        tiles = dataclasses.replace(tuned.DEFAULTS[kernel], panel=4)
    return jax.jit(program(tiles)).trace(*operands)


@needs_pallas
def test_tiles_that_were_lucky_once_are_not_chosen(monkeypatch, tmp_path):
    """Panel 16 is fast in its field's round, and slow when it is timed again."""
    from jaxmem.head.backends import tuning

    clock, calls = Clock(), collections.Counter()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)

    def compile_all(program, candidates, operands):
        def run(tiles, h):
            calls[tiles] += 1
            lucky = tiles.panel == 16 and calls[tiles] < 12
            clock.now += 1.0 if lucky else 2.0
            return h

        return {tiles: functools.partial(run, tiles) for tiles in candidates}

    def program(kernel, shape, h, W, y):
        return lambda tiles: lambda h: h, (h,)

    monkeypatch.setattr(tuning, "_compile_all", compile_all)
    monkeypatch.setattr(tuning, "program_of", program)
    out = tmp_path / "tuned.json"
    printed = list(bench.tune((256, 64, 128), ["to_W"], 1, out))
    assert printed[-1].startswith("to_W: no tiles are better than the default")
    (made,) = json.loads(out.read_text())
    assert made["tiles"] == {} and made["over_gemm"] == made["default_over_gemm"]
    assert max(calls.values()) > 12


@needs_pallas
def test_tune_writes_launches_of_sampled_kernels(monkeypatch, tmp_path):
    """Plain jax in the place of the kernel, whose time is its number of sums."""
    from jaxmem.head.backends import tuning

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)

    def compile_all(program, candidates, operands):
        def run(launch, h):
            clock.now += {2: 5.0, 4: 1.0, 8: 2.0, 16: 4.0, 32: 6.0}[launch.sums]
            return h

        return {launch: functools.partial(run, launch) for launch in candidates}

    def program(kernel, shape, h, W, y):
        return lambda launch: lambda h: h, (h,)

    monkeypatch.setattr(tuning, "_compile_all", compile_all)
    monkeypatch.setattr(tuning, "program_of", program)
    out = tmp_path / "tuned.json"
    *_, last = bench.tune((256, 64, 128), ["sampled_to_W"], 1, out)
    assert last.startswith("sampled_to_W: {'sums': 4} written to")
    (entry,) = json.loads(out.read_text())
    (kernel, _), launch = tuned._read_entry(0, entry)
    assert kernel == "sampled_to_W" and (launch.sums, launch.unroll) == (4, 4)
