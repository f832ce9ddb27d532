"""Weights by name: of a module, trained and frozen ones, in a type."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxmem.models import coded_weights


def split_weights(weights: dict, trainable: str | None) -> tuple[dict, dict]:
    """Return the trained and the frozen weights, nested by name, for `join_weights`.

    Trained weights are in float32 at least: in 16 bits, an update that is smaller than
    half the spacing at a weight's magnitude would be lost. Modules cast what they read.

    Args:
        weights: nested dicts, as `nnx.to_pure_dict` returns them.
        trainable: the `trainable` of an `OptimizerConfig`, a regular expression for
            names; None trains all weights.

    Raises:
        ValueError: no weight has a matching name, or a coded matrix has one.
    """
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
    named = {k: w for k, w in flat.items() if re.search(trainable or "", k)}
    _refuse_codes(named, trainable)
    trained = {k: _master_weight(w) for k, w in named.items()}
    if not trained:
        raise ValueError(
            f"optimizer.trainable={trainable!r} is in no weight's name: "
            f"{', '.join(flat)}"
        )
    frozen = {k: w for k, w in flat.items() if k not in trained}
    return (
        traverse_util.unflatten_dict(trained, sep="/"),
        traverse_util.unflatten_dict(frozen, sep="/"),
    )


def _refuse_codes(names: Iterable[str], trainable: str | None) -> None:
    coded = sorted(name for name in names if coded_weights.is_coded(name))
    if coded:
        raise ValueError(
            f"optimizer.trainable={trainable!r} names {coded[0]}, a matrix that "
            "model.base coded and that no update can change: train adapters "
            "(model.lora_rank), or leave the matrix out of model.base_targets"
        )


def _master_weight(weight: jax.Array) -> jax.Array:
    return weight.astype(jnp.promote_types(weight.dtype, jnp.float32))


def by_path(module: nnx.Module) -> dict[str, Any]:
    """The weights of a module by paths like "blocks/attention/query/kernel"."""
    nested = nnx.to_pure_dict(nnx.split(module)[1])
    return dict(traverse_util.flatten_dict(nested, sep="/"))


_WIDE = {
    "scale", "router", "router_scale", "correction", "expert_scale", "shared_gate",
    "delta_log_speed", "delta_shift",
}  # fmt: skip


def cast_weights(weights: Any, dtype: str) -> Any:
    """Weights in a decoder's compute type.

    Layers compute in that type anyway, so results do not change. Weights that layers
    read as stored are not cast: scales of norms, routers, the decay of a delta rule,
    and the codes and scales of coded matrices.
    """

    def cast(path, w):
        names = [str(getattr(key, "key", "")) for key in path]
        is_wide = any(name in _WIDE or coded_weights.is_coded(name) for name in names)
        return w if is_wide else w.astype(dtype)

    return jax.tree.map_with_path(cast, weights)


def split_module(module: nnx.Module) -> tuple[Any, dict[str, Any]]:
    """The definition of a module, and its weights nested by name.

    Numbers in lists of modules are names, too.
    """
    definition, state = nnx.split(module)
    return definition, _with_keys(nnx.to_pure_dict(state), str)


def merge_module(definition: Any, weights: dict[str, Any]) -> Any:
    """The module of a definition and weights from `split_module`."""
    return nnx.merge(
        definition, _with_keys(weights, lambda key: int(key) if key.isdigit() else key)
    )


def _with_keys(weights: Any, named: Callable[[Any], Any]) -> Any:
    if not isinstance(weights, dict):
        return weights
    return {named(key): _with_keys(part, named) for key, part in weights.items()}


def join_weights(trained: Any, frozen: dict) -> dict:
    """Merge the two dicts that `split_weights` returned."""
    flat = [traverse_util.flatten_dict(d) for d in (trained, frozen)]
    return traverse_util.unflatten_dict(flat[0] | flat[1])
