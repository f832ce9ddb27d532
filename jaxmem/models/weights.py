"""Weights by name: those that are trained, and those that are frozen."""

import re
from typing import Any

import jax.numpy as jnp
from flax import traverse_util


def split_weights(weights: dict, trainable: str | None) -> tuple[dict, dict]:
    """Weights to train, and weights to leave alone.

    Args:
      weights: nested by name, as `nnx.to_pure_dict` returns them.
      trainable: of an `OptimizerConfig`.

    Returns:
      Two dicts nested likewise, the first of which is in float32 unless the second is
      empty; for `join_weights`.

    Raises:
      ValueError: no weight has such a name.
    """
    if trainable is None:
        return weights, {}
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
    trained = {k: w for k, w in flat.items() if re.search(trainable, k)}
    if not trained:
        raise ValueError(
            f"optimizer.trainable={trainable!r} is in no weight's name: "
            f"{', '.join(flat)}"
        )
    frozen = {k: w for k, w in flat.items() if k not in trained}
    if frozen:
        trained = {k: w.astype(jnp.float32) for k, w in trained.items()}
    return (
        traverse_util.unflatten_dict(trained, sep="/"),
        traverse_util.unflatten_dict(frozen, sep="/"),
    )


def join_weights(trained: Any, frozen: dict) -> dict:
    """Put together what `split_weights` took apart."""
    flat = [traverse_util.flatten_dict(d) for d in (trained, frozen)]
    return traverse_util.unflatten_dict(flat[0] | flat[1])
