"""cuDNN's attention without a GPU: computed by XLA, or lowered for one."""

import jax
import pytest

from tests.helpers.interpreter import lowered_anywhere as lowered_anywhere


@pytest.fixture
def cudnn_on_xla(monkeypatch):
    """The arguments of cuDNN's kernel, on XLA's; test_decoder runs it on GPUs."""
    plain = jax.nn.dot_product_attention

    def on_xla(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_xla)
