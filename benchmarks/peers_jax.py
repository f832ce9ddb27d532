"""jax's peers, as one kind of call; a missing package takes away its own peers only."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.on_jax import Call


class Peer(NamedTuple):
    """A loader of its call, and the distribution that it comes from."""

    load: Callable[[], Call]
    distribution: str


def tokamax(implementation: str) -> Callable[[], Call]:
    def load() -> Call:
        import tokamax

        def call(h, W, y):
            loss = tokamax.linear_softmax_cross_entropy_loss(
                h, y, W.T, reduction="none", implementation=implementation
            )
            return {"logprob": -loss.astype(jnp.float32)}

        return call

    return load


def checkpointed_map(chunk: int) -> Callable[[], Call]:
    """The usual chunks of tokens, made again in the backward pass by jax.checkpoint."""

    def load() -> Call:
        @jax.checkpoint
        def of_chunk(W, part):
            h, y = part
            logits = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
            ln_p = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(ln_p, y[:, None], 1)[:, 0]

        def call(h, W, y):
            parts = jax.tree.map(
                lambda x: x.reshape(-1, min(chunk, len(y)), *x.shape[1:]), (h, y)
            )
            made = jax.lax.map(functools.partial(of_chunk, W), parts)
            return {"logprob": made.reshape(-1)}

        return call

    return load


PEERS = {
    "tokamax chunked_xla": Peer(tokamax("chunked_xla"), "tokamax"),
    "tokamax xla": Peer(tokamax("xla"), "tokamax"),
    "lax.map + checkpoint, 1024": Peer(checkpointed_map(1024), "jax"),
    "lax.map + checkpoint, 4096": Peer(checkpointed_map(4096), "jax"),
}
