"""The `remat` section of a config: which residuals a block keeps."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxmem import remat
from jaxmem.base.fields import check_field

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """Values of the forward pass that are kept for the backward pass."""

    # preset of jaxmem.remat, or "fit": the fastest policy that remat.memory_limit
    # allows
    policy: str = "full"
    # further names (jaxmem.remat.NAMES) whose values are kept
    save: tuple[str, ...] = ()
    last: int = 0  # number of last blocks that keep all residuals; "fit" chooses it too
    # compile the blocks one after the other instead of as a loop: steps are faster if
    # much is kept, and compilation takes longer
    unroll: bool = False
    # for policy "fit": GiB of device memory that training may use, or "auto": all of it
    memory_limit: Literal["auto"] | float | None = None

    def __post_init__(self):
        """Raise for unknown policies, and for a limit that has no effect."""
        known = (*remat.PRESETS, "fit")
        expected = f"one of {', '.join(map(repr, known))}"
        check_field(self, "policy", self.policy in known, expected)
        check_field(self, "last", self.last >= 0, "0 or more")
        remat.Policy(save=self.save)  # raises for unknown names
        for name in ("last", "save"):
            value = getattr(self, name)
            if value and self.policy in ("none", "fit"):
                does = (
                    "chooses it" if self.policy == "fit" else "keeps all blocks whole"
                )
                raise ValueError(
                    f"RematConfig.{name}={value} cannot be combined with "
                    f"policy={self.policy!r}, which {does}: leave it {type(value)()}"
                )
        self._check_unroll()
        limit, fits = self.memory_limit, self.policy == "fit"
        if fits == (limit is None):
            raise ValueError(
                f"RematConfig.memory_limit={limit!r} cannot be combined with "
                f"policy={self.policy!r}: 'fit' needs 'auto' or GiB, the other "
                "policies take no limit"
            )
        if isinstance(limit, int | float):
            check_field(self, "memory_limit", limit > 0, "above 0")

    def _check_unroll(self):
        preset = None if self.policy == "fit" else remat.preset(self.policy)
        if self.unroll and (self.policy == "fit" or (preset and preset.offload)):
            does = "may offload" if self.policy == "fit" else "offloads"
            raise ValueError(
                "RematConfig.unroll=True cannot be combined with "
                f"policy={self.policy!r}, which {does}: offloading needs the blocks "
                "in a loop"
            )

    def check_layers(self, layers: int) -> None:
        """Raise a ValueError if all blocks would keep all residuals."""
        if self.last >= layers:
            raise ValueError(
                f"remat.last={self.last} must be below the {layers} layers of the "
                "model; to keep all of them whole, set remat.policy = 'none'"
            )

    @property
    def start(self) -> remat.Policy | None:
        """The initial policy; with "fit", `fit` replaces it."""
        preset = remat.preset("full" if self.policy == "fit" else self.policy)
        more = remat.Policy(save=self.save, last=self.last)
        return preset if preset is None else preset | more

    def fit(
        self,
        step: Callable[[remat.Policy | None], Any],
        layers: int,
        held: Any,
        show: Callable[[str], Any],
    ) -> remat.Policy | None:
        """Call `remat.fit` on the traced step.

        Up to a third of the blocks may keep all residuals. `held` are shapes of other
        arrays on the device.
        """
        limit = self.memory_limit
        assert limit is not None, "checked above"
        limit = remat.device_limit() if limit == "auto" else int(limit * _GIB)
        last = [2**i for i in range(layers.bit_length()) if 3 * 2**i <= layers]
        limit -= sum(map(shard_bytes, jax.tree.leaves(held)))
        return remat.fit(step, limit, last=last, show=show)


def shard_bytes(leaf: Any) -> int:
    """Bytes of an array, or of a shape, on one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
