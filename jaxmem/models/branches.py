"""Rows of one prompt and several continuations of it, which are read at once.

A row has slots of the prompt, then blocks of as many slots each. Tokens of a block see
the prompt and, causally, what precedes them in their document of the block, as if the
prompt stood before each. Everything but attention processes each token alone, so that
the prompt is computed once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem.models.config import ModelConfig
from jaxmem.models.positions import Sight


def check(config: ModelConfig, sequence: int = 1) -> None:
    """Raise a ValueError where a layer does not attend to all tokens before it."""
    problem = None
    if config.factory is not None:
        problem = f"model.factory={config.factory!r} is another decoder"
    elif config.self_attn.window is not None:
        problem = f"model.pattern={config.pattern} has windows"
    elif set(config.mixers) != {"attention"}:
        problem = f"model.mixers={config.mixers} are not all 'attention'"
    elif config.rope.limit is not None:
        problem = f"model.rope.limit={config.rope.limit}: rotation depends on lengths"
    elif sequence > 1:
        problem = f"mesh.sequence={sequence} is above 1"
    if problem is not None:
        raise ValueError(
            f"prompts cannot be shared (grpo.share_prompts): {problem}; leave it False"
        )


def attend(
    attention: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: Sight,
) -> jax.Array:
    """Attention of a row's prompt to itself, and of its blocks to both.

    Arrays are [B, prompt + k·width, heads, head_dim], in the layout of
    `sight.branches`; `attention` is a function of queries, of keys and values that may
    have others before them, and of a `Sight`. Keys and values of the prompt are stored
    once for each block.
    """
    assert sight.branches is not None
    start, width = sight.branches
    ids, count = jnp.asarray(sight.segment_ids), (query.shape[1] - start) // width

    def blocks(x: jax.Array) -> jax.Array:
        return x[:, start:].reshape(-1, width, *x.shape[2:])

    def before(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[:, :start], count, axis=0)

    def all_keys(x: jax.Array) -> jax.Array:
        return jnp.concatenate([before(x), blocks(x)], axis=1)

    first = [x[:, :start] for x in (query, key, value)]
    prompt = attention(*first, Sight(ids[:, :start]))
    seen = Sight(blocks(ids), prefix=before(ids)[:, None] > 0)
    rest = attention(blocks(query), all_keys(key), all_keys(value), seen)
    rest = rest.reshape(len(query), -1, *query.shape[2:])
    return jnp.concatenate([prompt, rest], axis=1)
