"""Traps set for every test: many fake devices, warnings as errors, honest GPU skips."""

import gc
import os
import signal
from pathlib import Path

import jax
import pytest

from tests.helpers import compilation

SHARED = pytest.StashKey[Path]()

# Tracing makes many objects that live long. With Python's default, of 700 new ones, the
# collections are 5% of the time of tests that trace, and 25% of imports.
gc.set_threshold(20_000, 20, 50)
jax.config.update("jax_num_cpu_devices", 8)
# Tests ask the stand-in of tests/helpers/hub.py, or the cache; never the Hub itself.
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell's background jobs, and what they start, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Programs that were compiled before are found again (`helpers.compilation`)."""
    shared = compilation.shared_folder()
    config.stash[SHARED] = shared
    if hasattr(config, "workerinput"):  # its environment names the first one's folder
        shared = Path(config.workerinput["compiled"])
    elif getattr(config.option, "tx", None):  # it compiles nothing, its workers do
        return
    folder = compilation.make_folder(shared)
    config.add_cleanup(lambda: compilation.merge(folder, shared))
    compilation.use(folder)


def pytest_configure_node(node):
    """Tells a worker the folder that all share."""
    node.workerinput["compiled"] = str(node.config.stash[SHARED])


def pytest_sessionfinish():
    """Free what is dead, and spare the collections with which pytest ends the rest."""
    gc.collect()
    gc.freeze()


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
def no_picture(monkeypatch):
    """The runs of a test draw nothing, which takes as long as some of their steps.

    Those of module-scoped fixtures do draw, and so does `train/test_metrics.py`.
    """
    monkeypatch.setattr("jaxmem.train.output.plots.save", lambda path, *_: path.touch())


@pytest.fixture
def on_one_device(monkeypatch):
    """Tokens are not divided among this suite's eight devices, as where there is one.

    For modules about what a device computes; `test_partition` and `test_sharding` are
    about what several do together.
    """
    monkeypatch.setattr("jaxmem.head.maths.partition.is_possible", lambda: False)


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, instead of skip, a gpu-marked test that finds no GPU",
    )
    parser.addoption(
        "--one-case-each",
        action="store_true",
        help="of each test's cases run the first: all functions of jax, on another "
        "jax; where a test is marked every_function, all cases",
    )


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    _skip_without_gpu(config, items)
    _skip_without_vllm(items)
    # Tests of a job share its runs. A worker takes its first tests itself, and others
    # take from its last ones: they would run the jobs again.
    items.sort(key=lambda item: item.path.parent.name != "jobs")
    if config.getoption("--one-case-each"):
        firsts = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        chosen = {*firsts.values()}
        chosen |= {x for x in items if x.get_closest_marker("every_function")}
        others = [x for x in items if x not in chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [x for x in items if x in chosen]


def _skip_without_gpu(config, items):
    if jax.default_backend() == "gpu" or config.getoption("--require-gpu"):
        return
    reason = f"needs an NVIDIA GPU, jax found {jax.default_backend()!r}"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _skip_without_vllm(items):
    if os.environ.get("JAXMEM_VLLM"):
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            reason = "needs $JAXMEM_VLLM, the path of vLLM's program; see .ci/engine"
            item.add_marker(pytest.mark.skip(reason=reason))
