"""Estimates a program's operations, bytes and minimum time; nothing is measured.

    seconds >= Σ over products max(operations / peak, bytes / bandwidth)
    seconds >= (bytes of arguments + bytes of results) / bandwidth

on one device. The second bound is that of programs without products, such as the
optimizer's update. Everything except matrix products (norms, communication) is excluded
from the sum, but covered by the range: `EFFICIENCY` is the ratio of the larger bound to
the time of steps on H200s.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem import devices
from jaxmem.planning.accounts import Account
from jaxmem.remat import cost
from jaxmem.train.phases import Phase

# Minimum and maximum in benchmarks/results/plan_h200.csv, rounded outwards.
EFFICIENCY = (0.4, 0.9)


@dataclasses.dataclass(frozen=True)
class MatmulShapes:
    """Matrix products with the same shapes; one device's share."""

    name: str  # operands and result, as jax prints them
    times: int  # executions in one run of the program
    # total operations; those of attention kernels count 1/0.6, as in `jaxmem.remat`,
    # because they run at 0.6 of the rate of large products
    operations: float
    bytes: float  # total bytes of operands and results
    seconds: float  # time at the device's peak rates


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of one run of a program on one device."""

    products: tuple[MatmulShapes, ...]  # the costliest first
    moved: float  # bytes of arguments and results
    # sum of the products' seconds, or of `moved` bytes if those take longer
    seconds: float
    sent: float  # bytes of collectives
    sending: float  # seconds to send them at the links' peak, overlapped or not
    # lower end of the range: the higher `EFFICIENCY`, all communication overlaps
    low: float
    # upper end of the range: the lower `EFFICIENCY`, all communication is exposed
    high: float

    @property
    def operations(self) -> float:
        """Operations of all products."""
        return sum(product.operations for product in self.products)

    @property
    def bytes(self) -> float:
        """Bytes of all products, or of arguments and results if those are more."""
        return max(self.moved, sum(product.bytes for product in self.products))


def of(phase: Phase, account: Account, hosts: int = 1) -> Estimate:
    """Estimate a phase on the devices of the enclosing `jaxmem.devices.target`."""
    target = devices.planned()
    assert target is not None, "inside devices.target"
    device, count = target.device, len(target.devices)
    products = _sum_products(phase, device, count)
    moved = float(account.arguments + account.results)
    seconds = max(sum(p.seconds for p in products), moved / device.bandwidth)
    sent = sum(c.moved * max(c.times, 1) for c in account.collectives)
    link = device.link if hosts == 1 else device.network
    sending = sent / link
    least, most = EFFICIENCY
    return Estimate(
        tuple(products), moved, seconds, sent, sending, seconds / most,
        seconds / least + sending,
    )  # fmt: skip


def _sum_products(phase, device, count) -> Sequence[MatmulShapes]:
    sums_of: dict[str, list] = collections.defaultdict(lambda: [0, 0.0, 0.0])

    def turns(loop):
        return _count_chunks(loop) or phase.turns

    for equation, times in cost.equations(phase.traced.jaxpr.jaxpr, turns):
        work, moved = _count_work(equation)
        if work:
            entry = sums_of[_label(equation)]
            entry[0] += times
            entry[1] += times * work / count
            entry[2] += times * moved / count
    products = [
        MatmulShapes(
            name, times, work, moved,
            max(work / device.products, moved / device.bandwidth),
        )
        for name, (times, work, moved) in sums_of.items()
    ]  # fmt: skip
    return sorted(products, key=lambda product: -product.seconds)


def _count_chunks(loop) -> int:
    """Iterations of a loop over chunks if all rows are active; 0 for other loops.

    Such a loop slices its chunk out of an array with the indices of all rows.
    """
    body = loop.params["body_jaxpr"].jaxpr
    for equation in body.eqns:
        if equation.primitive.name == "dynamic_slice":
            rows, chunk = equation.invars[0].aval, equation.outvars[0].aval
            if rows.ndim == 1 and rows.dtype == "int32" and rows.size and chunk.size:
                return -(-rows.size // chunk.size)
    return 0


def _count_work(equation) -> tuple[float, float]:
    """Operations and bytes of an equation that runs once; (0, 0) if it has none."""
    if equation.primitive.name == "mpmd_map":  # a Pallas kernel
        return _kernel_work(equation)
    work = cost.operations(equation)
    if not work:
        return 0.0, 0.0
    arrays = [x.aval for x in (*equation.invars, *equation.outvars)]
    return work, float(sum(map(cost.nbytes, arrays)))


def _kernel_work(equation):
    """Operations and bytes of a kernel, from the shapes of its matrices.

    A kernel of the head computes statistics or derivatives from hidden and W, or the
    gradient of either from derivatives. One of experts has matrices of all groups
    among its operands or results, and is counted as if all tiles of rows were full. One
    of attention to a cache reads one layer of the stack, and counts as if its rows saw
    all slots.
    """
    avals = [x.aval for x in equation.invars]
    if cached := _cached_attention(equation):
        query, keys = cached
        rows, group, width = query.shape
        slots = rows * keys.shape[1] * width  # of keys, or of values
        moved = 2 * slots * keys.dtype.itemsize + 2 * cost.nbytes(query)
        return 4.0 * slots * group, float(moved)
    if groups := _group_matrices(equation):
        rows, each = avals[1].shape[0], sum(a.size // a.shape[0] for a in groups)
        every = (*avals, *(x.aval for x in equation.outvars))
        return 2.0 * rows * each, float(sum(map(cost.nbytes, every)))
    flat = [a for a in avals if getattr(a, "ndim", 0) == 2]
    matrices = [a for a in flat if a.dtype.itemsize == 2]
    sums = [a for a in flat if "Ref" in type(a).__name__]
    results = [x.aval for x in equation.outvars if x.aval.ndim == 2]
    if len(matrices) < 2:
        return 0.0, 0.0
    first, second = matrices[:2]
    columns = second.size // first.shape[1]
    if sums:
        columns = sums[-1].shape[1]
    elif results:
        columns = results[0].shape[1]
    moved = float(sum(map(cost.nbytes, (*matrices, *results))))
    return 2.0 * first.size * columns, moved


def _cached_attention(equation):
    """Queries and stacked keys of attention to a cache; none of other kernels.

    They are [rows, queries, width] and [layers · rows, slots, width], and beside the
    keys are values of the same shape.
    """
    boxes = [x.aval for x in equation.invars if getattr(x.aval, "ndim", 0) == 3]
    if len(boxes) == 3 and boxes[1].shape == boxes[2].shape:
        return boxes[:2]
    return []


def _group_matrices(equation):
    """Matrices of all groups of a kernel; none of a kernel of the head."""
    return [
        x.aval for x in (*equation.invars, *equation.outvars)
        if getattr(x.aval, "ndim", 0) == 3
    ]  # fmt: skip


def _label(equation):
    name, operands = equation.primitive.name, [x.aval for x in equation.invars]
    if name == "mpmd_map":
        name = "head kernel"
        if cached := _cached_attention(equation):
            name, operands = "attention kernel", cached
        elif _group_matrices(equation):
            name, operands = (
                "experts kernel",
                operands[1:],
            )  # the first has offsets of rows
    elif name == "dot_general":
        name = ""
    operands = " x ".join(map(_describe_array, operands[:2]))
    return f"{name} {operands}".strip()


def _describe_array(aval: Any) -> str:
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
    dtype = short.get(str(aval.dtype), str(aval.dtype))
    return f"{dtype}[{','.join(map(str, aval.shape))}]"
