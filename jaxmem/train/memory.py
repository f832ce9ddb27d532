"""The `remat` section of a config: which residuals a block keeps."""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax

from jaxmem import remat
from jaxmem.base.fields import Must, check
from jaxmem.base.rules import excludes, must, refused

_GIB = 2**30


_POLICIES = (*remat.PRESETS, "fit")
_POLICY = Must(f"one of {', '.join(map(repr, _POLICIES))}", _POLICIES.__contains__)


def _offloads(policy: str) -> bool:
    preset = remat.preset(policy)
    return preset is not None and bool(preset.offload)


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """Values of the forward pass that are kept for the backward pass."""

    policy: Annotated[
        str,
        _POLICY,
        'preset of jaxmem.remat, or "fit": the fastest policy that remat.memory_limit '
        "allows",
    ] = "full"
    save: Annotated[
        tuple[str, ...], "further names (jaxmem.remat.NAMES) whose values are kept"
    ] = ()
    last: Annotated[
        int,
        Must("0 or more", lambda count: count >= 0),
        'number of last blocks that keep all residuals; "fit" chooses it too',
    ] = 0
    unroll: Annotated[
        bool,
        "compile the blocks one after the other instead of as a loop: steps are "
        "faster if much is kept, and compilation takes longer",
    ] = False
    memory_limit: Annotated[
        Literal["auto"] | float | None,
        'for policy "fit": GiB of device memory that training may use, or "auto": all '
        "of it",
    ] = None

    RULES = (
        excludes(
            "last save",
            "policy={policy!r}, which chooses it: leave it {default}",
            lambda config: config.policy == "fit",
        ),
        excludes(
            "last save",
            "policy={policy!r}, which keeps all blocks whole: leave it {default}",
            lambda config: config.policy == "none",
        ),
        excludes(
            "unroll",
            "policy={policy!r}, which may offload: offloading needs the blocks in a "
            "loop",
            lambda config: config.policy == "fit",
        ),
        excludes(
            "unroll",
            "policy={policy!r}, which offloads: offloading needs the blocks in a loop",
            lambda config: config.policy != "fit" and _offloads(config.policy),
        ),
        refused(
            "memory_limit",
            "cannot be combined with policy={policy!r}: 'fit' needs 'auto' or GiB, the "
            "other policies take no limit",
            lambda config: (config.policy == "fit") == (config.memory_limit is None),
        ),
        must(
            "memory_limit",
            "above 0",
            lambda config: (
                config.memory_limit in (None, "auto") or config.memory_limit > 0
            ),
        ),
    )

    def __post_init__(self):
        remat.Policy(save=self.save)  # raises for unknown names
        check(self)

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
