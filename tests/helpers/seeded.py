"""Weights of tiny checkpoints from the names of tensors, and sums of gradients."""

import json
import pathlib
import zlib

import numpy as np

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "checkpoints"
RECORDS = CHECKPOINTS / "families"
ADAPTERS = CHECKPOINTS / "adapters"
VOCABULARY = 64


def _generator(name, purpose):
    return np.random.default_rng([zlib.crc32(name.encode()), purpose])


def tensor(name, shape, mean):
    """Values around a mean: matrices of gain 1, vectors that move their results."""
    shape = tuple(shape)
    std = 0.3 if len(shape) < 2 else 1.2 * shape[-1] ** -0.5
    noise = _generator(name, 0).normal(size=shape)
    return (mean + std * noise).astype(np.float32)


def summary(name, gradient):
    """The norm of an array, and its projection on a random direction."""
    flat = np.asarray(gradient, np.float64).reshape(-1)
    direction = _generator(name, 1).normal(size=flat.size)
    return float(np.linalg.norm(flat)), float(flat @ direction)


def write(record, directory):
    """Write the checkpoint of a record."""
    from safetensors.numpy import save_file

    tensors = {
        name: tensor(name, shape, mean)
        for name, (shape, mean) in json.loads(str(record["tensors"])).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(str(record["config"]))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_adapter(record, directory):
    """Write the adapter of a record."""
    from safetensors.numpy import save_file

    tensors = {
        name: 0.3 * tensor(name, shape, 0.0) * shape[-1] ** 0.5
        for name, shape in json.loads(str(record["tensors"])).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(str(record["config"]))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
