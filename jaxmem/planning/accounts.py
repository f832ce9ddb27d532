"""Device memory of programs for absent devices, as their compiler reports it."""

import dataclasses
import re
import time
from typing import Any

import jax

from jaxmem import devices
from jaxmem.planning import collectives
from jaxmem.planning.collectives import Collective
from jaxmem.train.phases import Phase, device_bytes

# No kernel can be timed, so autotuning is off and products use XLA's default tiles. On
# a GPU, autotuning would also try cuBLAS, whose workspace is at most 32 MiB. Some
# products in Triton have no default tiles with jaxlib 0.12, and do not compile.
_OPTIONS = {
    "cuda": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    "tpu": {},
}

# By how much the allocator's peak exceeded the programs' own count on an H200:
# constants, CUDA libraries, a batch (benchmarks/results/plan_h200.csv).
RUNTIME = {"cuda": 170 * 2**20, "tpu": 0}

_BACKWARD = re.compile(
    r" = \((?P<results>.*?)\) custom-call\(.*"
    r'custom_call_target="__cudnn\$fmha\w*Backward".*?'
    r"operand_layout_constraints=\{(?P<operands>.*?)\}\}(?P<config>.*)"
)
_PACKED = re.compile(r'"max_seg_per_batch": *"?(\d+)')
_SHAPE = re.compile(r"\w+\[([\d,]+)\]")
# "(20.13G) exceeds available HBM (15.75G)", "Used 20.13G of 15.75G hbm"
_TOO_LARGE = re.compile(
    r"\((?P<a>[\d.]+)(?P<au>[KMG])\) exceeds available HBM"
    r"|Used (?P<b>[\d.]+)(?P<bu>[KMG]) of [\d.]+[KMG] hbm"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Account:
    """Memory of a program on one device, in bytes."""

    arguments: int  # bytes of arguments, by the compiler
    results: int  # bytes of results, by the compiler
    temporary: int  # bytes of temporaries, by the compiler
    donated: int = 0  # bytes of results that alias donated arguments
    host: int = 0  # bytes of temporaries on the host
    # workspace of cuDNN's attention, which the compiler queries from a GPU
    workspace: int = 0
    collectives: tuple[Collective, ...] = ()  # collectives in program order
    seconds: float = 0.0  # compilation time
    # the error of a TPU compiler that found too little memory; temporary is then the
    # number in that error, and nothing else is known
    refused: str = ""

    @property
    def program(self) -> int:
        """Total bytes on the device, as if workspaces coincided with the peak."""
        own = self.arguments + self.results - self.donated
        return own + self.temporary + self.workspace


def compile_for(traced: jax.stages.Traced) -> jax.stages.Compiled:
    """Compile a program with options that suit an absent device."""
    target = devices.planned()
    options = _OPTIONS[target.device.platform] if target else {}
    return traced.lower().compile(compiler_options=dict(options))


def of(phase: Phase) -> Account:
    """Compile a phase for the current devices, and return its account."""
    start = time.perf_counter()
    try:
        compiled = compile_for(phase.traced)
    except jax.errors.JaxRuntimeError as error:
        return _refused_account(phase, error, time.perf_counter() - start)
    return of_compiled(compiled, time.perf_counter() - start)


def of_compiled(compiled: jax.stages.Compiled, seconds: float = 0.0) -> Account:
    """The account of a compiled program."""
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
    """Workspace bytes of cuDNN's backward attention kernels; the largest one.

        4·B·H·T·d + 4·B·H·T:  the queries' gradient and a sum of each row, in float32

    These are the sizes in NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h;
    of packed documents, that many for each of the documents of a row. Further
    workspaces of its engines are not known. If XLA has queried a GPU, the program's
    temporaries already include the workspace.
    """
    sizes = [0]
    for match in _BACKWARD.finditer(text):
        if "u8[0]" in match["results"]:
            queries = _SHAPE.findall(match["operands"])[0]
            batch, length, heads, width = map(int, queries.split(","))
            packed = _PACKED.search(match["config"])
            documents = int(packed[1]) if packed else 1
            sizes.append(4 * batch * heads * length * (width + 1) * documents)
    return max(sizes)


def _refused_account(phase, error, seconds):
    """The account of a program too large for the device; reraise other errors."""
    match = _TOO_LARGE.search(str(error))
    if match is None:
        raise error
    number, unit = match["a"] or match["b"], match["au"] or match["bu"]
    temporary = int(float(number) * _UNITS[unit])
    arguments = sum(map(device_bytes, phase.arguments.values()))
    return Account(
        arguments, 0, temporary, seconds=seconds, refused=str(error).splitlines()[0]
    )
