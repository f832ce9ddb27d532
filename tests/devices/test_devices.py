"""Devices that are not there: their table, their names, what is in force."""

import re
import types

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxmem import devices
from jaxmem.devices import targets
from jaxmem.head.backends import hopper
from jaxmem.head.maths import partition
from tests.helpers.interpreter import needs_pallas


@pytest.fixture
def fake(monkeypatch):
    """CPU devices stand for planned ones."""
    monkeypatch.setattr(
        targets, "of", lambda device, count, hosts: jax.devices()[:count]
    )


def test_targets_have_the_memory_of_the_table():
    for name, device in devices.known().items():
        if device.platform == "cuda" and device.described:
            (size,) = re.findall(r"device_memory_size: (\d+)", device.target)
            assert int(size) == device.memory, name
            assert "openxla/xla" in device.target, name


def test_peaks_are_of_one_direction_and_sane():
    for name, device in devices.known().items():
        assert device.products > 1e14, name
        assert device.bandwidth > device.link > device.network, name


def test_targets_of_described_gpus_are_all_there():
    """A file for each, and none besides."""
    files = {path.stem for path in (devices.table._FOLDER / "targets").iterdir()}
    described = [d for d in devices.known().values() if d.platform == "cuda"]
    assert files == {device.name for device in described if device.described}


@pytest.mark.parametrize(
    "kind, name, gib",
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090", 24),
        ("NVIDIA GeForce RTX 5090", "rtx5090", 32),
        ("NVIDIA A100-SXM4-40GB", "a100-40g", 40),
        ("NVIDIA L40S", "l40s", 48),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000-blackwell", 96),
    ],
)
def test_of_kind_finds_cards_by_jax_names(kind, name, gib):
    found = devices.of_kind(kind)
    assert found is not None and found.name == name
    assert 0.9 * gib < found.memory / 2**30 < gib  # a driver keeps some of it


def test_compiler_missing_names_cards_without_description():
    said = devices.compiler_missing(devices.find("rtx4090"))
    assert "rtx4090" in said and "from shapes only" in said and "pip" not in said


@pytest.mark.parametrize("name, hint", [("h20", "'h200'"), ("gpu", "one of rtx4090")])
def test_unknown_device_is_named(name, hint):
    with pytest.raises(ValueError, match=f"{hint}|{hint}") as error:
        devices.find(name)
    assert repr(name) in str(error.value)


def test_missing_compiler_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(targets, "_has_ptxas", lambda: False)
    said = devices.compiler_missing(devices.find("h200"))
    assert (
        f"pip install 'jax-cuda13-plugin=={jax.__version__}' nvidia-cuda-nvcc" in said
    )
    assert "jax[tpu]" in devices.compiler_missing(devices.find("v5e"))
    with pytest.raises(devices.CompilerMissing, match="pip install"):
        with devices.target("h200"):
            raise AssertionError("entered")


@pytest.mark.full
def test_programs_of_absent_devices_not_cached(fake, tmp_path):
    """Their compiler writes entries that it cannot read."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        with devices.target("h200"):
            jax.jit(lambda x: x * 3 + 7).lower(1.5).compile()
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x * 3 + 7).lower(1.5).compile()
        assert list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_target_is_in_force(fake):
    assert devices.planned() is None
    assert devices.backend() == jax.default_backend()
    with devices.target("h200", 2) as made:
        assert devices.current() == made == jax.devices()[:2]
        assert devices.count() == 2 and devices.backend() == "gpu"
        assert jax.numpy.zeros(()).device == made[0]
        with devices.target("v5e"):
            assert devices.backend() == "tpu"
        assert devices.backend() == "gpu"
    assert devices.planned() is None and devices.count() == jax.device_count()


def test_target_ends_with_an_error(fake):
    with pytest.raises(KeyError), devices.target("h200"):
        raise KeyError
    assert devices.planned() is None


def test_package_asks_for_the_target(fake):
    with devices.target("h200", 1):
        assert not partition.is_possible()
        refusal = hopper.refuses_machine() or ""
        assert "runs on" not in refusal  # a GPU's capability is asked, which CPUs lack
    assert partition.is_possible()


def test_traces_for_other_devices_are_forgotten(fake):
    seen = []

    @jax.jit
    def step(x):
        seen.append(devices.backend())
        return x

    shape = jax.ShapeDtypeStruct((2,), "float32")
    step.trace(shape)
    with devices.target("h200"):
        step.trace(shape)
    step.trace(shape)
    assert seen == ["cpu", "gpu", "cpu"]


@pytest.mark.parametrize("count, hosts", [(0, 1), (3, 2), (2, 0)])
def test_impossible_counts(count, hosts):
    with pytest.raises(ValueError, match="divide by hosts"):
        targets.of(devices.find("h200"), count, hosts)


@pytest.mark.parametrize(
    "chips, axes, sides",
    [(1, 2, (1, 1)), (8, 2, (2, 4)), (4, 3, (1, 2, 2)), (64, 3, (4, 4, 4))],
)
def test_slices_are_as_even_as_can_be(chips, axes, sides):
    assert targets._slice(chips, axes, "v5e") == sides


def test_slice_of_invalid_size_is_refused():
    with pytest.raises(ValueError, match="slices of 1, 2, 4, 8, … chips, which 6"):
        targets._slice(6, 2, "v5e")


@needs_pallas
@pytest.mark.parametrize(
    "capability, mosaic, wgmma",
    [
        ("9.0", True, True), ("12.0", True, False), ("8.0", False, False),
        ("gfx90a", False, False),
    ],
)  # fmt: skip
def test_kernels_need_a_recent_gpu_of_nvidia(capability, mosaic, wgmma, monkeypatch):
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert devices.has_mosaic() is mosaic
    assert devices.has_wgmma() is wgmma
