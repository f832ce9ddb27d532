"""Traps set for every test: many fake devices, warnings as errors, honest GPU skips."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def quick_compilation():
    """For tiny programs, all of whose time would go into optimizing them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, instead of skip, a gpu-marked test that finds no GPU",
    )


def pytest_collection_modifyitems(config, items):
    if jax.default_backend() == "gpu" or config.getoption("--require-gpu"):
        return
    reason = f"needs an NVIDIA GPU, jax found {jax.default_backend()!r}"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
