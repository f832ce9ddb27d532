"""What the assembler says of the head's kernels: registers that they store in memory.

    python -m benchmarks.run_assembled --out assembled.csv

Compiles for an absent H200, without a GPU: it needs the CUDA plugin of jax, and ptxas.
jax 0.12 prefers nvJitLink where LD_LIBRARY_PATH finds it, and that ignores setmaxnreg.
"""

import argparse
import functools
import importlib.metadata
import os
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp

from benchmarks import results
from jaxmem import devices
from jaxmem.backends import tuning
from jaxmem.kernels import forward, tuned
from jaxmem.kernels.logits import Env

KERNELS = ("statistics", "exps", "derivative", "to_hidden", "to_W")


def program(kernel: str, shape):
    """A function of (h, W, y) that launches one kernel with its default tiles."""
    n, d, v = shape
    tiles = tuned.DEFAULTS[kernel]

    def run(h, W, y):
        if kernel == "exps":  # with tiles' sums, as sampled gradients have it
            env = Env(tiles, n, d, v, v, "vd", h.dtype, None, 132)
            exps = functools.partial(forward.statistics_and_exps, env, tile_sums=True)
            return exps(h, W, y, jnp.full(1, n, jnp.int32))
        with_tiles, operands = tuning.program_of(kernel, shape, h, W, y)
        return with_tiles(tiles)(*operands)

    return run


def assembled(kernel: str, shape, folder: pathlib.Path) -> dict:
    """One row, from the log that the assembler writes into the folder."""
    n, d, v = shape
    before = set(folder.glob("*.ptxas"))
    shapes = (
        jax.ShapeDtypeStruct((n, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((v, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    with devices.target("h200"):
        jax.jit(program(kernel, shape)).lower(*shapes).compile()
    (log,) = set(folder.glob("*.ptxas")) - before
    text = log.read_bytes().decode("utf-8", "replace")
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert found, f"{log} has no line about spills"
    return {
        "kernel": kernel, "n": n, "d": d, "v": v,
        "assembler": "nvJitLink" if "C7504" in text else "ptxas",
        "stored_bytes": int(found[1]), "loaded_bytes": int(found[2]),
    }  # fmt: skip


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1024,4096,151936")
    parser.add_argument("--code", default="now", help="which code this is, for the CSV")
    parser.add_argument("--out", default="assembled.csv")
    asked = parser.parse_args(arguments)
    shape = tuple(map(int, asked.shape.split(",")))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    facts = {"device": "H200, absent", **versions, "date": results.today()}
    folder, rows = tempfile.mkdtemp(), []
    os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
    for kernel in KERNELS:
        found = assembled(kernel, shape, pathlib.Path(folder))
        rows.append({"code": asked.code, **found, **facts})
        print(rows[-1], flush=True)
    keys = ("code", "kernel", "d", "v", "assembler", "jax")
    print("wrote", results.merge(asked.out, rows, keys))


if __name__ == "__main__":
    main()
