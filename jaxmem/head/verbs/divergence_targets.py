"""What a divergence is of: how much of the other distribution is known."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.backend_operands import Factors
from jaxmem.head.maths.explicit_axes import spec_of
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import CallOptions, Spec
from jaxmem.head.verbs.kinds import Kind


class Student(NamedTuple):
    """What a verb of divergences is given of the student."""

    hidden: Any
    W: Any
    labels: Any  # `arguments.NO_LABELS` where none are given
    options: CallOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The target of a divergence; a subclass says what is known of it.

    `shards` says whether the vocabulary may be sharded; if not, `heads_as` replaces
    heads by those of all columns. `leading` names an array whose first axes are the
    tokens'.
    """

    shards: ClassVar[bool] = True
    leading: ClassVar[str] = "ids"

    def divergence(self, kind: Kind, student: Student) -> jax.Array:
        """The divergence of each token."""
        raise NotImplementedError

    def loss(
        self, kind: Kind, student: Student, statistics_temperature: ArrayLike | None
    ) -> tuple[Callable, Spec, Factors, tuple, tuple[int, ...]]:
        """What makes a loss's rule, and its spec, head, `given` and tokens' shape."""
        raise NotImplementedError

    def placed(self, places: Any) -> "Target":
        """The target, checked, with its arrays in `sharding.operands.Places`."""
        raise NotImplementedError

    def heads_as(self, whole: Callable[[Head], Head]) -> "Target":
        """The target, with `whole` of its heads."""
        return self


def specs(given: Mapping[str, Any]) -> list[tuple]:
    """Shardings of the tokens, by arguments of a verb; the one that decides first.

    Given ids come before hidden, and a teacher's hidden states after it.
    """
    of = getattr(given["target"], "of", None)
    leading = getattr(of, getattr(of, "leading", ""), None)
    found = [spec_of(given["hidden"], 1), spec_of(leading, 1)]
    return found[::-1] if getattr(of, "shards", False) else found


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
