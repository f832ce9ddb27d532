"""The config's `remat` section: what the backward pass of a block finds."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxmem import remat
from jaxmem.train._checks import check_field

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """What is kept of the forward pass, and where."""

    # a preset of jaxmem.remat; or "fit": the fastest policy that memory_limit allows
    policy: str = "full"
    # of policy "fit": GiB of the device that training may take, or "auto": all it has
    memory_limit: Literal["auto"] | float | None = None

    def __post_init__(self):
        """Refuse unknown policies, and a limit that nothing would read."""
        known = (*remat.PRESETS, "fit")
        wanted = f"one of {', '.join(map(repr, known))}"
        check_field(self, "policy", self.policy in known, wanted)
        limit, fits = self.memory_limit, self.policy == "fit"
        if fits == (limit is None):
            raise ValueError(
                f"RematConfig.memory_limit={limit!r} does not go with policy="
                f"{self.policy!r}: 'fit' needs 'auto' or GiB, the others have none"
            )
        if isinstance(limit, int | float):
            check_field(self, "memory_limit", limit > 0, "above 0")

    @property
    def preset(self) -> remat.Policy | None:
        """The policy to begin with; `fit` replaces it where it is to be chosen."""
        return remat.preset("full" if self.policy == "fit" else self.policy)

    def fit(
        self,
        step: Callable[[remat.Policy | None], Any],
        held: int,
        show: Callable[[str], Any],
    ) -> remat.Policy | None:
        """`remat.fit` of the traced step; held bytes are on the device besides."""
        limit = self.memory_limit
        assert limit is not None, "checked above"
        limit = remat.device_limit() if limit == "auto" else int(limit * _GIB)
        return remat.fit(step, limit - held, show=show)
