"""Traps set for every test: many fake devices, warnings as errors, honest GPU skips."""

import os
import tempfile

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config):
    """What one process compiles, it finds again, as do the programs that it starts.

    A folder for each: jax may read an entry that another process has half written, and
    its warning of that would be an error here.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        made = tempfile.TemporaryDirectory()
        config.add_cleanup(made.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = made.name
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    folder = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], worker)
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start


@pytest.fixture(scope="module")
def quick_compilation():
    """For tiny programs, all of whose time would go into optimizing them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimized():
    """For what is said of bits and bytes, among tests that compile quickly."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def on_one_device(monkeypatch):
    """Tokens are not shared out over this suite's eight devices, as where there is one.

    For modules about what a device computes; `test_partition` and `test_sharding` are
    about what several do together.
    """
    monkeypatch.setattr("jaxmem.core.partition.is_possible", lambda: False)


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
