"""Targets of divergences, and the student that is compared with them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.explicit_axes import spec_of
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import CallOptions
from jaxmem.head.verbs.arguments import CheckedCall
from jaxmem.head.verbs.kinds import Kind


class Student(NamedTuple):
    """Arguments of a divergence that describe the student."""

    hidden: Any
    W: Any
    labels: Any  # `arguments.NO_LABELS` for a verb without labels
    options: CallOptions


class LossCall(NamedTuple):
    """A checked call of a loss of divergences, and its rule."""

    rule_of: Callable  # (spec, backend, traced loss) to the loss's rule
    call: CheckedCall  # its rows are the constants of the rule


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The target of a divergence; a subclass has the arrays that are known of it.

    `shards` is True if the vocabulary may be sharded; if not, `heads_as` replaces heads
    by those of all columns. `leading` names an array whose first axes are the tokens'.
    """

    shards: ClassVar[bool] = True
    leading: ClassVar[str] = "ids"

    def divergence(self, kind: Kind, student: Student) -> jax.Array:
        """The divergence of each token."""
        raise NotImplementedError

    def loss(
        self, kind: Kind, student: Student, statistics_temperature: ArrayLike | None
    ) -> LossCall:
        """The checked call of a loss of the divergence."""
        raise NotImplementedError

    def placed(self, places: Any) -> "Target":
        """The target, checked, with its arrays in `sharding.operands.Places`."""
        raise NotImplementedError

    def heads_as(self, whole: Callable[[Head], Head]) -> "Target":
        """The target, each of whose heads is replaced by `whole` of it."""
        return self


def specs(arguments: Mapping[str, Any]) -> list[tuple]:
    """Shardings of the tokens by a verb's arguments, in the order of precedence.

    Those of a target's ids come before those of hidden, and those of a teacher's hidden
    states after.
    """
    target = getattr(arguments["target"], "of", None)
    leading = getattr(target, getattr(target, "leading", ""), None)
    shardings = [spec_of(arguments["hidden"], 1), spec_of(leading, 1)]
    return shardings[::-1] if getattr(target, "shards", False) else shardings


def check(target: Any) -> Kind:
    """Require a kind of divergence with a target."""
    if isinstance(target, Kind) and isinstance(target.of, Target):
        return target
    got = checks.brief(target)
    if isinstance(target, Kind):
        got = f"{type(target).__name__} of {checks.brief(target.of)}"
    raise TypeError(
        "target must be jaxmem.ForwardKL(of), ReverseKL(of) or JSD(of, beta), of a "
        f"jaxmem.Teacher, Columns or Drawn, got {got}"
    )
