"""Bytes of a program for devices that are not there, by its compiler."""

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from jaxmem import devices
from jaxmem.planning import collectives
from jaxmem.planning.collectives import Collective
from jaxmem.planning.phase import Phase, device_bytes

# No kernel can be timed: products get the tiles that XLA takes first. On a GPU it would
# try cuBLAS's as well, whose workspace is of at most 32 MiB.
_OPTIONS = {"cuda": {"xla_gpu_autotune_level": 0}, "tpu": {}}

# What the allocator's peak was above the programs' own count on an H200: constants,
# CUDA libraries, a batch (benchmarks/results/plan_h200.csv).
RUNTIME = {"cuda": 170 * 2**20, "tpu": 0}

_BACKWARD = re.compile(
    r" = \((?P<results>.*?)\) custom-call\(.*"
    r'custom_call_target="__cudnn\$fmha\w*Backward".*?'
    r"operand_layout_constraints=\{(?P<operands>.*?)\}\}"
)
_SHAPE = re.compile(r"\w+\[([\d,]+)\]")
# "(20.13G) exceeds available HBM (15.75G)", "Used 20.13G of 15.75G hbm"
_TOO_LARGE = re.compile(
    r"\((?P<a>[\d.]+)(?P<au>[KMG])\) exceeds available HBM"
    r"|Used (?P<b>[\d.]+)(?P<bu>[KMG]) of [\d.]+[KMG] hbm"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Account:
    """What a program takes of one device; bytes.

    Attributes:
        arguments, results, temporary: by the compiler.
        donated: results that are written over arguments.
        host: temporaries on the host.
        workspace: of cuDNN's attention, which the compiler asks a GPU for.
        collectives: what it sends, in its order.
        seconds: to compile.
        refused: the compiler's complaint where it found no room, on TPUs; temporary is
            then what it wanted, and nothing else is known.
    """

    arguments: int
    results: int
    temporary: int
    donated: int = 0
    host: int = 0
    workspace: int = 0
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0
    refused: str = ""

    @property
    def program(self) -> int:
        """All of the device's, workspaces included, as if they met at the peak."""
        own = self.arguments + self.results - self.donated
        return own + self.temporary + self.workspace


def compile_for(
    traced: jax.stages.Traced, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """The program, compiled as it can be where no device is."""
    around = devices.planned()
    own = _OPTIONS[around.device.platform] if around else {}
    return traced.lower().compile(compiler_options={**own, **(options or {})})


def of(phase: Phase) -> Account:
    """Compile a phase and count; it is compiled for the devices in force."""
    start = time.perf_counter()
    try:
        compiled = compile_for(phase.traced)
    except jax.errors.JaxRuntimeError as error:
        return _refused(phase, error, time.perf_counter() - start)
    return of_compiled(compiled, time.perf_counter() - start)


def of_compiled(compiled: jax.stages.Compiled, seconds: float = 0.0) -> Account:
    """Likewise, of a program."""
    account: Any = compiled.memory_analysis()
    return Account(
        arguments=account.argument_size_in_bytes,
        results=account.output_size_in_bytes,
        temporary=account.temp_size_in_bytes,
        donated=account.alias_size_in_bytes,
        host=account.host_temp_size_in_bytes,
        workspace=workspace(compiled.as_text() or ""),
        collectives=tuple(collectives.of(compiled)),
        seconds=seconds,
    )


def workspace(text: str) -> int:
    """Bytes that cuDNN's backward kernels of attention ask for; of the largest.

        4·B·H·T·d + 4·B·H·T:  the queries' gradient and a sum of each row, in float32

    As NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h, asks for; what its
    engines may ask for beside is not known. Where XLA has asked a GPU, the program's
    temporaries have the workspace already.
    """
    return max(map(_workspace, _BACKWARD.finditer(text)), default=0)


def _workspace(found):
    if "u8[0]" not in found["results"]:
        return 0
    operands = [
        tuple(map(int, dims.split(","))) for dims in _SHAPE.findall(found["operands"])
    ]
    batch, length, heads, width = operands[0]
    return 4 * batch * heads * length * (width + 1)


def _refused(phase, error, seconds):
    """Of a program that the compiler has found no room for; other errors are raised."""
    found = _TOO_LARGE.search(str(error))
    if found is None:
        raise error
    number, unit = found["a"] or found["b"], found["au"] or found["bu"]
    wanted = int(float(number) * _UNITS[unit])
    given = sum(map(device_bytes, phase.arguments.values()))
    return Account(
        given, 0, wanted, seconds=seconds, refused=str(error).splitlines()[0]
    )
