"""Peak bytes that a traced program has alive, from its jaxpr alone.

The model of XLA's allocation: a result of a product, a loop, a kernel or a reduction is
an array from its equation to its last reader. Elementwise results are arrays only where
such an equation reads them, else they are fused into their readers. Reshapes,
transpositions and names are views. A loop has its stacked results from its start, its
carry once, and the peak of one iteration.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxmem.remat import cost

_VIEWS = frozenset(
    "reshape squeeze expand_dims transpose name optimization_barrier copy copy_p "
    "stop_gradient reduce_precision sharding_constraint mesh_cast pvary".split()
)
_CALLS = frozenset(
    "jit pjit closed_call core_call remat checkpoint remat2 custom_jvp_call "
    "custom_vjp_call custom_vjp_call_jaxpr run_state".split()
)
_LOOPS = frozenset("scan while cond shard_map".split())
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min argmax argmin gather concatenate "
    "dynamic_update_slice".split()
)
_IN_PLACE = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
# Equations whose operands must be arrays; results of all others are fused.
_READERS = _LOOPS | frozenset(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general pallas_call "
    "mpmd_map ffi_call sort top_k cumsum cumlogsumexp cummax scatter scatter-add "
    "scatter_add all_gather psum all_to_all reduce_scatter device_put "
    "custom_partitioning random_bits threefry2x32 "
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper".split()
)
_ARRAYS = _READERS | _REDUCTIONS


@dataclasses.dataclass(frozen=True)
class _FlatEquation:
    """An equation whose operands and results are numbers of buffers."""

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    carried: tuple[int, ...]  # operands that the results may replace in memory

    @property
    def is_elementwise(self) -> bool:
        return self.primitive not in _ARRAYS


@dataclasses.dataclass
class _FlatProgram:
    """A jaxpr without calls and views."""

    equations: list[_FlatEquation]
    sizes: list[int]  # bytes by buffer
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def new(self, aval: Any) -> int:
        """A further buffer; arrays on the host and tokens have no bytes."""
        there = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        counts = hasattr(aval, "dtype") and hasattr(aval, "size") and not there
        self.sizes.append(cost.nbytes(aval) if counts else 0)
        return len(self.sizes) - 1


def peak(traced: jax.stages.Traced) -> int:
    """Most bytes alive at once beside a program's arguments, on all devices.

    Results that can replace donated arguments have no bytes of their own.
    """
    jaxpr = traced.jaxpr.jaxpr
    leaves = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    donated = [bool(leaf.donated) for leaf in leaves]
    program = _flat(jaxpr)
    free = []
    if len(donated) == len(jaxpr.invars):
        pairs = zip(jaxpr.invars, donated, strict=True)
        free = [_kind(var.aval) for var, given in pairs if given]
    for var, buffer in zip(jaxpr.outvars, program.outputs, strict=True):
        if _kind(var.aval) in free:
            free.remove(_kind(var.aval))
            program.sizes[buffer] = 0
    return _peak(program)


def argument_bytes(traced: jax.stages.Traced) -> int:
    """Bytes of a program's arguments, on all devices."""
    program = _FlatProgram([], [])
    for var in traced.jaxpr.jaxpr.invars:
        program.new(var.aval)
    return sum(program.sizes)


def stacked(traced: jax.stages.Traced, length: int) -> int:
    """Bytes that the first loop of that length stacks for later ones; 0 without one."""
    for equation in _loops(_flat(traced.jaxpr.jaxpr)):
        body = equation.params["jaxpr"].jaxpr
        if equation.params["length"] == length:
            outs = [var.aval for var in body.outvars]
            carried = len(equation.carried)
            return length * sum(map(cost.nbytes, outs[carried:]))
    return 0


def _loops(program) -> Iterator[_FlatEquation]:
    for equation in program.equations:
        if equation.primitive == "scan":
            yield equation
            yield from _loops(_flat(equation.params["jaxpr"].jaxpr))


def _kind(aval) -> tuple:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def _flat(jaxpr) -> _FlatProgram:
    program = _FlatProgram([], [])
    buffers = {var: program.new(var.aval) for var in (*jaxpr.invars, *jaxpr.constvars)}
    program.inputs = tuple(buffers.values())
    _inline(program, jaxpr, buffers)
    program.outputs = tuple(_read(program, buffers, atom) for atom in jaxpr.outvars)
    return program


def _inline(program, jaxpr, buffers) -> None:
    """Append a jaxpr's equations, with those of the calls in it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [_read(program, buffers, atom) for atom in equation.invars]
        inner = _called(equation)
        if inner is not None and len(inner.invars) == len(operands):
            inside = dict(zip(inner.invars, operands, strict=True))
            inside |= {var: program.new(var.aval) for var in inner.constvars}
            _inline(program, inner, inside)
            results = [_read(program, inside, atom) for atom in inner.outvars]
        elif name in _VIEWS and len(operands) >= len(equation.outvars):
            results = operands[: len(equation.outvars)]
        else:
            results = [program.new(var.aval) for var in equation.outvars]
            program.equations.append(
                _FlatEquation(
                    name, equation.params, tuple(operands), tuple(results),
                    tuple(operands[i] for i in _carried(equation)),
                )
            )  # fmt: skip
        buffers.update(zip(equation.outvars, results, strict=True))


def _read(program, buffers, atom) -> int:
    return program.new(atom.aval) if hasattr(atom, "val") else buffers[atom]


def _called(equation):
    """The jaxpr of a call, or of a loop with one iteration, which XLA removes."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["jaxpr"].jaxpr if params["length"] == 1 else None
    keys = "jaxpr", "call_jaxpr", "fun_jaxpr"
    found = (params[key] for key in keys if name in _CALLS and key in params)
    inner = next(found, None)
    return getattr(inner, "jaxpr", inner)


def _carried(equation) -> Sequence[int]:
    """Positions of the operands that the equation's results replace."""
    name, params = equation.primitive.name, equation.params
    if name in _IN_PLACE:
        return (0,)
    if name == "while":
        start = params["cond_nconsts"] + params["body_nconsts"]
        return range(start, start + len(equation.outvars))
    if name != "scan":
        return ()
    body = params["jaxpr"].jaxpr
    sliced = _count_unlike(equation.invars, body.invars)
    count = len(equation.outvars) - _count_unlike(equation.outvars, body.outvars)
    end = len(equation.invars) - sliced
    return range(end - count, end)


def _count_unlike(outside, inside) -> int:
    """Operands or results that a scan slices or stacks: their shapes differ."""
    pairs = zip(outside, inside, strict=True)
    return sum(a.aval.shape != b.aval.shape for a, b in pairs)


def _peak(program: _FlatProgram) -> int:
    equations = _needed(program)
    fused = _fused(program, equations)
    last = _last_reads(program, equations, fused)
    ends: dict[int, list[int]] = {}
    for buffer, number in last.items():
        ends.setdefault(number, []).append(buffer)
    alive: dict[int, int] = {}
    now = most = 0
    for number, equation in enumerate(equations):
        results = {r: program.sizes[r] for r in equation.results if r not in fused}
        ending = [b for b in ends.get(number, ()) if b in alive]
        if equation.is_elementwise:  # writes over an operand of its size
            sizes = list(results.values())
            replaced = []
            for buffer in ending:
                if alive[buffer] in sizes:
                    sizes.remove(alive[buffer])
                    replaced.append(buffer)
        else:
            replaced = [b for b in ending if b in equation.carried]
        now -= sum(alive.pop(b) for b in replaced)
        alive |= results
        now += sum(results.values())
        most = max(most, now + _inside(equation))
        now -= sum(alive.pop(b, 0) for b in ends.get(number, ()))
    return most


def _needed(program) -> list[_FlatEquation]:
    """Equations that a result depends on."""
    needed, kept = set(program.outputs), []
    for equation in reversed(program.equations):
        if needed.intersection(equation.results):
            kept.append(equation)
            needed.update(equation.operands)
    return kept[::-1]


def _fused(program, equations) -> set[int]:
    """Elementwise results that only elementwise equations and reductions read."""
    arrays = set(program.outputs)
    for equation in equations:
        if equation.primitive in _READERS:
            arrays.update(equation.operands)
    elementwise = (e.results for e in equations if e.is_elementwise)
    constants = (e.results for e in equations if _is_constant(e, program))
    fused = {result for results in elementwise for result in results} - arrays
    return fused | {result for results in constants for result in results}


def _is_constant(equation, program) -> bool:
    """True for copies of one number, which XLA moves into the loop that reads them."""
    if equation.primitive not in ("broadcast_in_dim", "iota", "full"):
        return False
    small = all(program.sizes[operand] <= 8 for operand in equation.operands)
    return small and not set(equation.results) & set(program.outputs)


def _last_reads(program, equations, fused) -> dict[int, int]:
    """The equation after which a buffer is free, by buffer.

    Readers of a fused result read its operands.
    """
    last = dict.fromkeys(program.outputs, len(equations))
    for number, equation in reversed(list(enumerate(equations))):
        end = number
        for result in equation.results:
            last.setdefault(result, number)
            if result in fused:
                end = max(end, last[result])
        for operand in equation.operands:
            last[operand] = max(last.get(operand, 0), end)
    return last


def _inside(equation) -> int:
    """Peak of one iteration, of the largest branch, or of all devices' parts."""
    name, params = equation.primitive, equation.params
    if name == "cond":
        return max(_peak(_flat(branch.jaxpr)) for branch in params["branches"])
    if name not in _LOOPS:
        return 0
    inner = params["body_jaxpr" if name == "while" else "jaxpr"]
    program = _flat(getattr(inner, "jaxpr", inner))
    if name == "shard_map":
        shape = params["mesh"].shape
        count = 1
        for axis in params.get("newly_manual_axes", params.get("manual_axes", ())):
            count *= shape[axis]
        return count * _peak(program)
    if name == "while":  # results replace the carry
        for buffer in program.outputs:
            program.sizes[buffer] = 0
    return _peak(program)
