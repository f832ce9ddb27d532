"""Splits weights by name into trained and frozen ones."""

import re
from typing import Any

import jax.numpy as jnp
from flax import traverse_util


def split_weights(weights: dict, trainable: str | None) -> tuple[dict, dict]:
    """Return the trained and the frozen weights.

    Args:
        weights: nested dicts by name, as `nnx.to_pure_dict` returns them.
        trainable: the `trainable` of an `OptimizerConfig`, a regular expression for
            names; None trains all weights.

    Returns:
        Two dicts nested likewise, for `join_weights`. The trained weights are in
        float32 unless nothing is frozen.

    Raises:
        ValueError: no weight has a matching name.
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
    """Merge the two dicts that `split_weights` returned."""
    flat = [traverse_util.flatten_dict(d) for d in (trained, frozen)]
    return traverse_util.unflatten_dict(flat[0] | flat[1])
