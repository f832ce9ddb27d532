"""The two parts of a layer: what mixes tokens, and what processes each of them alone.

`layers.MIXERS` and `layers.FEED_FORWARDS` have the classes by the names that
`ModelConfig.mixers` and `ModelConfig.feed_forwards` give to layers. Each is made as
`cls(config, rngs=rngs)` with the config of its layer.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxmem.models import kv_cache
from jaxmem.models.balance import Choice
from jaxmem.models.positions import Rotation, Sight


class Mixer(nnx.Module):
    """Mixes the tokens of a row: attention, or something with a state in its place.

    What one layer keeps of the tokens that it has read is its state, a pytree of arrays
    [B, ...]; the cache has those of a stack of layers on a leading axis.
    """

    @property
    def readers(self) -> Sequence[Any]:
        """Modules that read the normalised residual stream [B, T, hidden]."""
        raise NotImplementedError

    def mix(
        self, projected: Sequence[jax.Array], sight: Sight, rope: Rotation,
        before: Any = None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """[B, T, hidden] from the results of `readers`, and the operand of `state`.

        Documents do not see each other, and no token sees what follows it. `before` is
        the state of a layer that has read earlier tokens of the rows, or None; or of
        `layers.Reuse` the keys and values that it attends to.
        """
        raise NotImplementedError

    @staticmethod
    def state(parts: Any, max_length: int) -> Any:
        """The layer's state after prompts, from the second result of `mix`."""
        del max_length
        return parts

    @property
    def shared(self) -> Any:
        """Arrays of all layers of the stack that every layer's `decode` gets."""
        return ()

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, seen: jax.Array,
        shared: Any,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """[B, 1, hidden] from the next token's normalised x, and what `grow` adds."""
        raise NotImplementedError

    @staticmethod
    def grow(states: Any, added: Any, slot: jax.Array, live: jax.Array) -> Any:
        """The stack's states after tokens, from those before and all layers' parts.

        Those of rows [B] that are not live need not change: nothing was read.
        """
        raise NotImplementedError

    def join(self) -> None:
        """Join the matrices of `readers`, where that makes decoding faster."""


class FeedForward(nnx.Module):
    """Processes every token alone."""

    reads_stream = False  # whether `join` gets the residual stream, too, as the last

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, T, hidden] to [B, T, hidden]."""
        return self.join(*(read(x) for read in self.readers))[0]

    @property
    def readers(self) -> Sequence[Any]:
        """Modules that read the normalised residual stream [B, T, hidden]."""
        raise NotImplementedError

    def join(
        self, *projected: jax.Array, chosen: jax.Array | None = None
    ) -> tuple[jax.Array, Choice | None]:
        """[B, T, hidden] from the results of `readers`; the router's choice, if any.

        A router takes the experts that are `chosen`, if they are given.
        """
        raise NotImplementedError
