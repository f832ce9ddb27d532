"""A check that a caller's loss of each token depends on that token's values alone.

A chunk holds any of the active tokens, as many as fit, and under `sharding.parallel`
those of one device. A loss function that closes over a per-token array reads entries of
other tokens, and one that combines tokens gets those that share a chunk.

The check traces the function again, for a number of tokens that is a prime and divides
the size of no other axis. An axis whose size is a multiple of it is then one of tokens,
so that the shapes of an operation tell whether the operation combines tokens.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jax.core import Tracer

from jaxmem.base import messages
from jaxmem.head.verbs import jaxprs

# A batch's size is no multiple of the number of tokens that the check takes.
_BATCHES = (
    " jax.lax.map over tokens with a batch_size looks the same to this check: leave "
    "batch_size out, or use jax.vmap;"
)


@dataclasses.dataclass(frozen=True)
class LossWords:
    """The words of an error about a loss."""

    function: str = "loss_fn"
    unit: str = "token"
    whole: str = "chunk"  # the units that the function gets together
    results: str = "loss and metrics"
    advice: str = (
        "pass a per-token array as an argument, as in token_loss(loss_fn, hidden, W, "
        "labels, array)"
    )


# Operations along an axis that the result keeps, and the parameter that names it.
_ALONG = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis",
    "cumlogsumexp": "axis", "sort": "dimension", "rev": "dimensions",
}  # fmt: skip
# The first of the operands that are the start of a slice along each axis.
_STARTS = {"dynamic_slice": 1, "dynamic_update_slice": 2}


class Use(enum.IntEnum):
    """The use that a loss makes of a value."""

    NONE = 0
    INDEX = 1  # to select tokens, as in array[arange(C), ids]
    VALUE = 2


class _Dependence(enum.IntEnum):
    """Dependences of a token's results on more than the token; the clearest first."""

    TOKENS = 0
    POSITION = 1
    NUMBER = 2


_SENTENCES = {
    _Dependence.TOKENS: "combines the {0.unit}s of a {0.whole}",
    _Dependence.POSITION: "depends on a {0.unit}'s position in its {0.whole}",
    _Dependence.NUMBER: "depends on the number of {0.unit}s in a {0.whole}",
}


def check(
    traced: Callable[[int], Any], loss: Any, n_rows: int, words: LossWords = LossWords()
) -> None:
    """Raise a ValueError unless each token's results depend on its values alone.

    The check does not see what callbacks, kernels, rules of derivatives and the
    conditions of loops compute.

    Args:
        traced: the closed jaxpr of the loss, by the number of tokens.
        loss: that for n_rows tokens.
        n_rows: the number of tokens in a chunk.
        words: of the error.
    """
    prime = _prime_beside(set(_axis_sizes(loss)))
    try:
        for_prime = traced(prime)
    except Exception as error:
        raise _error_of_one_number(loss, n_rows, error, words) from error
    walk = _Walk(prime, _changed_numbers(loss.jaxpr, for_prime.jaxpr))
    walk.uses(for_prime, [Use.VALUE] * len(for_prime.jaxpr.outvars))
    if walk.findings:
        dependence, operation = min(walk.findings)
        batches = _BATCHES if operation.startswith("slice of") else ""
        unit = words.unit
        raise ValueError(
            f"{words.function} must compute a {unit}'s {words.results} from that "
            f"{unit}'s values only, but it {_SENTENCES[dependence].format(words)}, by "
            f"{operation};{batches} compute this before, and {words.advice}"
        )


def _error_of_one_number(loss, n_rows, error, words) -> ValueError:
    """The error for a loss that cannot be traced for another number of tokens."""
    arrays = (*loss.consts, *jaxprs.inner_consts(loss.jaxpr))
    kinds = [f"{x.dtype}{list(x.shape)}" for x in arrays if n_rows in x.shape]
    if kinds:
        why = (
            f"it closes over an array, {' and '.join(dict.fromkeys(kinds))}, whose "
            f"entries do not belong to the {words.unit}s in a {words.whole}"
        )
    else:
        why = f"for another number it raises {messages.cut(repr(error), 120)}"
    return ValueError(
        f"{words.function} must take any number of {words.unit}s, but takes {n_rows} "
        f"only: {why}; {words.advice}"
    )


def _prime_beside(sizes: set[int]) -> int:
    """A prime that divides none of the sizes but 0."""
    odd = itertools.count(17, 2)
    primes = (n for n in odd if all(n % factor for factor in range(3, n, 2)))
    return next(n for n in primes if all(size % n or not size for size in sizes))


def _axis_sizes(closed) -> Iterator[int]:
    """Sizes of the axes of a jaxpr's values, within its operations too."""
    jaxpr = closed.jaxpr
    results = (equation.outvars for equation in jaxprs.equations(jaxpr))
    for value in itertools.chain(jaxpr.constvars, jaxpr.invars, *results):
        yield from getattr(value.aval, "shape", ())


def _changed_numbers(jaxpr, other) -> frozenset[int]:
    """Ids of the literals in `other` that are different numbers in `jaxpr`.

    Empty where the number of tokens decides which operations there are.
    """
    pairs = list(zip(jaxprs.equations(jaxpr), jaxprs.equations(other), strict=False))
    if any(a.primitive is not b.primitive for a, b in pairs):
        return frozenset()
    operands = (zip(a.invars, b.invars, strict=False) for a, b in pairs)
    return frozenset(
        id(b)
        for a, b in itertools.chain(*operands)
        if _is_number(a) and _is_number(b) and _value_bytes(a) != _value_bytes(b)
    )


def _is_number(operand) -> bool:
    return hasattr(operand, "val") and np.ndim(operand.val) == 0


def _value_bytes(literal) -> bytes:
    return np.asarray(literal.val).tobytes()  # equal for two NaN


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The way through a jaxpr from the uses of its results to those of its arguments.

    Attributes:
        prime: the number of tokens.
        changed: ids of the literals that depend on it.
        findings: each dependence, and the operation that makes it.
    """

    prime: int
    changed: frozenset[int]
    findings: list[tuple[_Dependence, str]] = dataclasses.field(default_factory=list)

    def uses(self, jaxpr: Any, of_results: Iterable[Use]) -> list[Use]:
        """The use of each argument; adds to `findings`."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Use] = {}
        self._add_uses(known, jaxpr.outvars, of_results)
        for equation in reversed(jaxpr.eqns):
            results = [known.get(x, Use.NONE) for x in equation.outvars]
            if any(results):
                self._add_uses(
                    known, equation.invars, self._operand_uses(equation, results)
                )
        for variable, value in zip(jaxpr.constvars, consts, strict=False):
            if known.get(variable) == Use.VALUE and self._has_positions(value):
                array = "an array that it makes with the chunk's length"
                self.findings.append((_Dependence.POSITION, array))
        return [known.get(x, Use.NONE) for x in jaxpr.invars]

    def _add_uses(self, known, variables, uses) -> None:
        """Add uses of variables; of literals, findings."""
        for variable, use in zip(variables, uses, strict=True):
            if not hasattr(variable, "val"):
                known[variable] = max(use, known.get(variable, Use.NONE))
            elif use == Use.VALUE and id(variable) in self.changed:
                number = f"a number that is {variable.val} for {self.prime} tokens"
                self.findings.append((_Dependence.NUMBER, number))

    def _operand_uses(self, equation, results: list[Use]) -> list[Use]:
        """The use of each operand of an operation that is not without use."""
        called, use = list(jaxprs.inner(equation)), max(results)
        name, n_operands = equation.primitive.name, len(equation.invars)
        if name in ("scan", "while", "cond"):
            self._check_loop(equation)
            for jaxpr in called:
                # That of a loop under vmap asks for all tokens whether one goes on.
                if jaxpr is not equation.params.get("cond_jaxpr"):
                    n_results = len(getattr(jaxpr, "jaxpr", jaxpr).outvars)
                    self.uses(jaxpr, [use] * n_results)
            return [use] * n_operands
        if len(called) == 1 and _is_call(equation, called[0]):
            return self.uses(called[0], results)
        if self._combines_tokens(equation):
            self.findings.append((_Dependence.TOKENS, self._describe(equation)))
        elif use == Use.VALUE and self._makes_tokens(equation):
            self.findings.append((_Dependence.POSITION, self._describe(equation)))
        uses = [use] * n_operands
        for operand, size in _index_operands(equation):
            if self._is_of_tokens(size):
                uses[operand] = Use.INDEX
        return uses

    def _check_loop(self, equation) -> None:
        """Find a loop over tokens that carries a value from one to the next."""
        if not self._is_of_tokens(equation.params.get("length", 1)):
            return
        (body,) = jaxprs.inner(equation)
        pairs = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
        if any(whole.aval.shape == part.aval.shape for whole, part in pairs):
            self.findings.append((_Dependence.TOKENS, "a scan over them"))

    def _combines_tokens(self, equation) -> bool:
        """True if an entry of a result depends on several tokens."""
        name, operands = equation.primitive.name, equation.invars
        if name in _ALONG:
            axes = np.atleast_1d(equation.params[_ALONG[name]])
            return any(self._is_of_tokens(operands[0].aval.shape[i]) for i in axes)
        indices = _index_operands(equation)
        if len(indices) == 1 and self._is_of_tokens(indices[0][1]):
            return True  # selects tokens, and nothing of each
        tokens = [self._n_axes(x) for x in operands]
        if name.startswith("scatter"):
            return tokens[2] < tokens[0]
        if name == "dynamic_update_slice":
            return tokens[1] < tokens[0]
        return name != "reshape" and max(tokens, default=0) > self._n_result_axes(
            equation
        )

    def _makes_tokens(self, equation) -> bool:
        """True if a result differs by token, and no operand does."""
        name, params = equation.primitive.name, equation.params
        if name == "iota":
            return self._is_of_tokens(params["shape"][params["dimension"]])
        if name == "tile":  # one entry for all tokens is no position
            (operand,), (result,) = equation.invars, equation.outvars
            pairs = zip(operand.aval.shape, result.aval.shape, strict=True)
            return any(a != 1 and self._is_of_tokens(b) for a, b in pairs if a != b)
        if name in ("broadcast_in_dim", "empty"):
            return False
        tokens = max(map(self._n_axes, equation.invars), default=0)
        return self._n_result_axes(equation) > tokens

    def _has_positions(self, value) -> bool:
        """True for a constant whose entries differ by token."""
        if not any(map(self._is_of_tokens, np.shape(value))):
            return False
        return isinstance(value, Tracer) or np.unique(np.asarray(value)).size > 1

    def _n_result_axes(self, equation) -> int:
        return max(map(self._n_axes, equation.outvars), default=0)

    def _n_axes(self, value) -> int:
        """The number of axes that are of tokens."""
        return sum(map(self._is_of_tokens, getattr(value.aval, "shape", ())))

    def _is_of_tokens(self, size: int) -> bool:
        return size > 0 and size % self.prime == 0

    def _describe(self, equation) -> str:
        """The operation and the type of its first operand, with C for the chunk."""
        name = equation.primitive.name
        if not equation.invars:
            return name
        aval = equation.invars[0].aval
        sizes = map(self._describe_size, aval.shape)
        return f"{name} of {aval.dtype}[{', '.join(sizes)}]"

    def _describe_size(self, size: int) -> str:
        if not self._is_of_tokens(size):
            return str(size)
        return "C" if size == self.prime else f"{size // self.prime}C"


def _is_call(equation, jaxpr) -> bool:
    """True if the operation's operands and results are those of the jaxpr."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    counts = len(jaxpr.invars), len(jaxpr.outvars)
    return counts == (len(equation.invars), len(equation.outvars))


def _index_operands(equation) -> list[tuple[int, int]]:
    """Pairs (operand, size of an axis of the first operand that it is an index to)."""
    name, params = equation.primitive.name, equation.params
    first: Any = equation.invars[0].aval if equation.invars else None
    sizes: Any = getattr(first, "shape", ())
    if name in _STARTS:
        return list(enumerate(sizes, _STARTS[name]))
    if name == "gather":
        axes = params["dimension_numbers"].start_index_map
    elif name.startswith("scatter"):
        axes = params["dimension_numbers"].scatter_dims_to_operand_dims
    else:
        return []
    return [(1, sizes[axis]) for axis in axes]
