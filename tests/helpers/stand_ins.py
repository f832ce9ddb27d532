"""Replacements of packages that do not install beside every jax of jaxmem's.

A stand-in has the name, arguments and results of the one function that an integration
replaces, and the modules that it reads; it computes with logits, as the original does
in pieces. What calls it is not there.
"""

import importlib.metadata
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

B, T, D, V = 2, 5, 16, 37
# The modules of the tests hold originals that they define or import, and mean to.
holds_originals = pytest.mark.filterwarnings("ignore:jaxmem. tests.")


def states(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    labels = rng.integers(0, V, (B, T))
    labels[0, 1] = -1  # the last, to what gathers by it
    return hidden, jnp.asarray(labels)


def install(monkeypatch, version, **modules):
    """Put modules where imports find them, dots written as __.

    Args:
        monkeypatch: the fixture.
        version: of every distribution, or of those that are installed, by name.
        modules: contents by module.
    """
    for name, contents in modules.items():
        name = name.replace("__", ".")
        for end in range(1, name.count(".") + 1):
            outer = ".".join(name.split(".")[:end])
            if outer not in sys.modules:
                monkeypatch.setitem(sys.modules, outer, types.ModuleType(outer))
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    def installed(name):
        if isinstance(version, str):
            return version
        if name not in version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version[name]

    monkeypatch.setattr(importlib.metadata, "version", installed)


def agree(value, model, *args, gradients=None):
    """Assert equal values, and equal gradients by weights and states, of both ways."""
    definition, weights = nnx.split(model)

    def total(weights, hidden):
        results = value(nnx.merge(definition, weights), hidden, *args)
        leaves = [x for x in jax.tree.leaves(results) if x is not None]
        # Different weights for each number, so that none can hide another.
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape))
                   for x in leaves), results  # fmt: skip

    hidden, _ = states()
    both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(both)(weights, hidden)


def assert_same(ours, theirs):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        ours,
        theirs,
    )


def log_softmax(logits, labels):
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


class Config(types.SimpleNamespace):
    """A config's options; hashable, as nnx and Linen modules hold it."""

    def __hash__(self):
        return id(self)
