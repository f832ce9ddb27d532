"""Tile sizes and launches of each kernel: the fastest for its head, or the default.

The table `tuned.json` is written by `python -m jaxmem bench --tune` and only read here:
nothing is measured when a program runs. The key of an entry is a kernel, a device, and
a head's [D, V] and layout; an entry without tiles records that the default was fastest.
Kernels of sampled gradients have a `SampledLaunch` in the place of tiles.
The number of tokens is not part of the key, which keeps the kernels batch-invariant.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxmem.head.kernels.tiles import SampledLaunch, Tiles
from jaxmem.head.maths.spec import Layout

TileKernel = Literal["statistics", "exps", "derivative", "to_hidden", "to_W"]
SampledKernel = Literal["sampled_to_hidden", "sampled_to_W", "sampled_pieces"]
Kernel = Literal[TileKernel, SampledKernel]
FILE = "tuned.json"

# Measured on one H200 at its power limit, jax 0.11.2, N=8192 D=4096 V=151936, in units
# of the plain GEMM's time:
# - forward: 1.06 with pairs of blocks that share W (cluster=2), 1.07 without, 1.07 with
#   group=1 or 16; derivatives: 1.04 and 1.04.
# - dH of a block: 0.114 and 0.116, dW: 0.110 and 0.111. XLA's GEMMs take 0.111 and
#   0.109, but would copy each block of W and of its gradient.
# - forward that stores exponentials, in a later run: 1.06 with 64 columns per store
#   from one buffer, 1.08 with 32 from two, 1.05 to 1.08 with three stages and more
#   buffers.
# - tiles of 320 columns in two accumulators, 192 and 128, with three stages, N=8192
#   V=149760, against 256 columns: forward 15.13 ms and 15.13 at D=4096, 18.58 and 18.80
#   at D=5120 (range 0.02); derivatives of a ninth of V 1.74 and 1.73; dH of it 1.81 and
#   1.72, dW 2.15 and 2.14; 384 columns 1.85 and 2.15. Two accumulators do not pay.
# - dW at D=4096 V=151936 has no entry in the table: three stages in groups of 4 without
#   pairs took 0.0547 GEMMs and the default 0.0553, with samples 3% apart.
# - with a seventh less arithmetic per logit in the forward kernel, and a quarter less
#   in the derivative (base 2, folded per-row factors), before and after, on two cards:
#   forward 1.031 and 1.023, 1.039 and 1.035; with gradients 4.08 and 4.06, 4.13 and
#   4.13; with all exponentials stored 3.14 and 3.13, 3.19 and 3.19.
# Groups of 2, 3 and 4 tiles, timed alternately, forward, ms: N=8192 D=4096 V=151936
# 15.36, 15.41 and 15.45, V=128256 13.17, 13.09 and 13.22, V=50257 5.22, 5.21 and 5.30,
# V=32001 3.44, 3.46 and 3.53; N=4096 D=5120 V=151936 9.59, 9.56 and 9.69; N=2048
# V=128256 3.35, 3.39 and 3.35: with smaller units, clusters idle less at the end.
# Columns of a product's tile, and the time of one of them, relative to 256 columns: an
# H100, D=576, dH of a block of V took 0.160 ms with 256 columns, 0.131 with 192 and
# 0.144 with 128, which are three, three and five tiles.
_COLUMNS = {256: 1.0, 192: 1.1, 128: 1.09}
_PRODUCT = Tiles(group=1, cluster=2, panel=8, stored=32, slots=1, stored_bytes=4)
DEFAULTS: Mapping[TileKernel, Tiles] = {
    "statistics": Tiles(group=2, cluster=2, panel=8),
    "exps": Tiles(group=2, cluster=2, panel=8, stored=64, slots=1),
    "derivative": Tiles(group=1, cluster=2, panel=8, stored=64, slots=1),
    "to_hidden": _PRODUCT,
    "to_W": _PRODUCT,
}
# The fastest of those that were timed on an H100 with policy-like data
# (`benchmarks/sampled_data.py`), D=4096.
LAUNCHES: Mapping[SampledKernel, SampledLaunch] = {
    "sampled_to_hidden": SampledLaunch(at_once=8, unroll=4),
    "sampled_to_W": SampledLaunch(at_once=8, unroll=4, sums=8),
    "sampled_pieces": SampledLaunch(at_once=8, unroll=8),
}


@dataclasses.dataclass(frozen=True)
class TunedKey:
    """The key of a head in the table."""

    device: str  # `device_kind` of jax
    depth: int
    columns: int
    layout: Layout


def default(kernel: Kernel, head: TunedKey) -> Any:
    """The tiles, or the launch, of a head that was not measured."""
    tiles, depth = {**DEFAULTS, **LAUNCHES}[kernel], head.depth
    if kernel == "to_hidden" or (kernel == "to_W" and head.layout == "vd"):
        # The result has D columns: few tiles should not cover many more than it has.
        cost = {n: -(-depth // n) * n * _COLUMNS[n] for n in _COLUMNS}
        tiles = dataclasses.replace(tiles, columns=min(cost, key=lambda n: cost[n]))
    return tiles


def launch_for(kernel: SampledKernel, head: TunedKey) -> SampledLaunch:
    """The measured launch of exactly this head, or the default."""
    return table().get((kernel, head)) or default(kernel, head)


def tiles_for(kernel: TileKernel, head: TunedKey) -> Tiles:
    """The measured tiles of exactly this head, or the default."""
    tiles = table().get((kernel, head)) or default(kernel, head)
    if kernel == "exps":  # the reduction order of "statistics", so that bits are equal
        group = tiles_for("statistics", head).group
        return dataclasses.replace(tiles, group=group)
    return tiles


@functools.cache
def table() -> Mapping[tuple[Kernel, TunedKey], Any]:
    """The measured tiles and launches; a ValueError names a malformed entry."""
    text = (
        importlib.resources.files("jaxmem.head.kernels")
        .joinpath(FILE)
        .read_text("utf-8")
    )
    return dict(_read_entry(i, entry) for i, entry in enumerate(json.loads(text)))


def entry_of(
    kernel: Kernel, head: TunedKey, tiles: Tiles | SampledLaunch, measured: Mapping
) -> dict:
    """An entry of the table; `measured` has its times, date and versions."""
    unmeasured = dataclasses.asdict(default(kernel, head))
    chosen = dataclasses.asdict(tiles)
    chosen = {k: x for k, x in chosen.items() if x != unmeasured[k]}
    return {"kernel": kernel, **dataclasses.asdict(head), "tiles": chosen, **measured}


def _read_entry(i, entry: Mapping[str, Any]) -> tuple[tuple[Kernel, TunedKey], Any]:
    try:
        head = TunedKey(*(entry[field.name] for field in dataclasses.fields(TunedKey)))
        if entry["kernel"] not in get_args(Kernel):
            raise ValueError(f"no kernel {entry['kernel']!r}")
        unmeasured = default(entry["kernel"], head)
        tiles = dataclasses.replace(unmeasured, **entry["tiles"])
        return (entry["kernel"], head), tiles
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FILE}: entry {i} cannot be used: {error!r}") from error
