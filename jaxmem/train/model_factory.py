"""Models of `model.factory`: loads a user's function, and checks its settings.

make(config, rngs) -> an nnx.Module with the methods of `jaxmem.models.own_model.Own`
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxmem.base import guests, messages, user_code
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.tensors import Tensors, whole, write_tensors
from jaxmem.models.config import ModelConfig
from jaxmem.models.own_model import OwnError, OwnModel, Probe, random_weights
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import split_module
from jaxmem.train.settings import JobConfig

TEXT = "text"  # in a run's directory: the model's tokenizer and chat template
_BODY = "body/"  # prefix of the names of weights in `OwnModel`, not in its module


def maker(
    config: ModelConfig, head: HeadConfig
) -> Callable[[nnx.Rngs], OwnModel] | None:
    """The function that makes a model with initial weights; None without a factory."""
    if config.factory is None:
        return None
    named = f"model.factory={config.factory!r}"
    factory = user_code.load(config.factory, "model.factory")
    try:
        inspect.signature(factory).bind(config, None)
    except TypeError as error:
        raise OwnError(f"{named} must take (config, rngs): {error}") from error

    def make(rngs: nnx.Rngs) -> OwnModel:
        try:
            # Flax would want a mesh for parameters whose metadata have a sharding.
            with guests.received(), nnx.use_eager_sharding(False):
                return OwnModel(factory(config, rngs), config, head)
        except OwnError as error:
            raise OwnError(f"{named}: {error}") from error
        except BaseException as error:
            guests.raise_if_of_the_user(error)
            said = user_code.described(error, factory)
            raise OwnError(f"{named} raised{said}") from error

    return make


def check_rows(program: Any, packed: bool) -> None:
    """Raise if a user's model mixes up the tokens of a row, by a small forward pass."""
    name, layout = program.config.model.factory, program.layout
    if name is None:
        return
    with layout.context():
        probe = Probe.of(program.model_config.vocab_size)
        shapes = program.state_shapes.params, program.frozen_shapes
        weights = layout.jit(lambda: random_weights(shapes), shapes)()

        def run(params: Any, frozen: dict) -> jax.Array:
            model = program.model(params, frozen)
            hidden = model(probe.tokens, probe.segment_ids, probe.positions)
            return hidden.astype(jnp.float32)

        replicated = layout.whole(program.hidden(*probe.tokens.shape))
        hidden = np.asarray(layout.jit(run, replicated)(*weights))
    if (problem := probe.problem(hidden, packed)) is not None:
        raise OwnError(f"model.factory={name!r}: hidden_states {problem}")


def with_text(model: ModelConfig) -> ModelConfig:
    """The config, with the directory of a run replaced by its text files."""
    if model.checkpoint is None:
        return model
    text = Path(model.checkpoint).expanduser() / TEXT
    if not (text / "config.json").exists():
        return model
    return dataclasses.replace(model, checkpoint=str(text))


def checkpoints_of(model: ModelConfig) -> Path | None:
    """The checkpoints of the run that a model starts from; None without one."""
    text = Path(model.checkpoint or "").expanduser()
    directory = text.parent / "checkpoints"
    return directory if text.name == TEXT and directory.is_dir() else None


def export_of(model: ModelConfig) -> Path | None:
    """The directory of `jaxmem export` that a model starts from; None without one."""
    text = Path(model.checkpoint or "").expanduser()
    has_weights = any(text.parent.glob("model.safetensors*"))
    return text.parent if has_weights and text.name == TEXT else None


def save_weights(target: Path, model: OwnModel, dtype: str | None) -> None:
    """Write all weights in safetensors files, by their paths in the user's module."""

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for path, weight in _flatten_by_path(split_module(model)[1]).items():
            array = whole(weight, None)
            kind = array.dtype if dtype is None else jnp.dtype(dtype)
            yield path.removeprefix(_BODY), array.astype(kind)

    write_tensors(target, arrays())


def read_weights(directory: Path, like: dict) -> dict:
    """The weights that `save_weights` has written, in the structure of `like`."""
    tensors, shapes = Tensors(directory), _flatten_by_path(like)
    known = {path.removeprefix(_BODY): path for path in shapes}
    read = {}
    for name in tensors:
        if name not in known:
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {messages.name(name)} is not part "
                "of the model that model.factory makes"
            )
    for name, path in known.items():
        shape, dtype = shapes[path].shape, shapes[path].dtype
        index = (slice(None),) * len(shape)
        read[path] = jnp.asarray(tensors.read(name, shape, index), dtype)
    return traverse_util.unflatten_dict(read, sep="/")


def _flatten_by_path(weights: dict) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(weights, sep="/"))


def check(config: JobConfig) -> None:
    """Raise for settings that only jaxmem's decoder follows."""
    remat, model = config.remat, config.model
    is_left = {
        "remat.policy": remat.policy in ("full", "none"),
        "remat.save": not remat.save,
        "remat.last": not remat.last,
        "remat.unroll": not remat.unroll,
        "model.adapter": model.adapter is None,
        "model.lora_rank": not model.lora_rank,
        "model.base": model.base is None,
        "optimizer.name": config.optimizer.name != "muon",
    }
    for key, left in is_left.items():
        if not left:
            section, _, field = key.partition(".")
            raise OwnError(
                f"{key}={getattr(getattr(config, section), field)!r} is for jaxmem's "
                f"decoder, but model.factory={model.factory!r} makes another model; "
                "leave it out"
            )
