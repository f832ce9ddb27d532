"""`jaxmem doctor`: what it finds here, and what it would say elsewhere."""

import json
import pathlib
import re
import tomllib
import types

import jax
import pytest

from jaxmem.commands import cli, doctor

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FINE = {"jax": "0.11.2", "jaxlib": "0.11.2"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def problems(versions=FINE, plugins=None, driver="", backend="cpu"):
    return doctor.problems(versions, plugins or {}, driver, backend)


@pytest.fixture
def gpu_with_kernels(monkeypatch):
    """Whatever jax this is, the GPU that a test describes has all kernels."""
    monkeypatch.setattr("jaxmem.devices.has_mosaic", lambda: True)


def test_doctor_fits_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status = cli.main(["doctor"])
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 24
    assert f"jax {jax.__version__}" in said
    assert "xla: runs on every device; 'hopper' does not" in said
    assert status == (1 if "problem" in said else 0)


def test_doctor_says_that_no_variable_is_set(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_VARIABLES", ())
    cli.main(["doctor"])
    assert "\nenvironment  none set\n" in capsys.readouterr().out


def test_json(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status = cli.main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["versions"]["jax"] == jax.__version__
    assert len(said["devices"]) == jax.local_device_count()
    assert set(said["compilers"]) >= {"h200", "v5e"}
    assert status == bool(said["problems"])


def test_every_optional_package_is_looked_for():
    """By the extra that installs it, as pyproject.toml has them."""
    text = (pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    wanted = {
        re.match(r"[\w-]+", package)[0]: extra
        for extra in ("flax", "train", "score", "wandb", "rewards")
        for package in extras[extra]
        if not package.startswith("jaxmem")
    }
    assert doctor._EXTRAS == wanted


def _requirements():
    """Each package of pyproject.toml for users, to what it asks of its version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_users = (extras[name] for name in extras.keys() - {"test", "docs", "dev"})
    lists = project["dependencies"], *of_users
    found = [re.fullmatch(r"([\w-]+)(\W.*)", text) for of in lists for text in of]
    return {match[1]: match[2] for match in found if match and match[1] != "jaxmem"}


def test_ceilings_are_those_of_the_project():
    below = {
        name: asked.split("<")[1]
        for name, asked in _requirements().items()
        if "<" in asked
    }
    assert doctor._CEILINGS == below
    assert {"jax", "jaxlib", "orbax-checkpoint"} <= set(below)
    range_of_jax = re.search(r"jax ≥ ([\d.]+) and < ([\d.]+);", README)
    assert f">={range_of_jax[1]},<{range_of_jax[2]}" == _requirements()["jax"]
    assert f"'jax[cuda13]<{below['jax']}'" in README
    assert f"'jax[cuda13]<{below['jax']}'" in (ROOT / "docs/start.md").read_text()


def test_installed_packages_are_not_too_new():
    installed = {name: doctor._installed_version(name) for name in doctor._CEILINGS}
    assert not [p for p in problems(FINE | installed) if "newer than" in p]


def test_problems_of_gpu_without_kernels(monkeypatch):
    gpu = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    (problem,) = problems(driver="580.1", backend="gpu")
    assert "no kernels for this GPU: the head, divergences, experts and" in problem


@pytest.mark.usefixtures("gpu_with_kernels")
def test_problems_of_healthy_machine():
    assert problems() == []
    assert problems(plugins={"jax-cuda13-plugin": "0.11.2"}, driver="580.1",
                    backend="gpu") == []  # fmt: skip


@pytest.mark.parametrize(
    "found, said",
    [
        ({"plugins": {"jax-cuda13-plugin": "0.11.1"}, "backend": "gpu"},
         "pip install 'jax-cuda13-plugin==0.11.2'"),
        ({"plugins": {"jax-cuda12-plugin": "0.11.2", "jax-cuda13-plugin": "0.11.2"},
          "backend": "gpu"}, "both installed"),
        ({"driver": "580.1"}, "pip install 'jax[cuda13]==0.11.2'"),
        ({"plugins": {"jax-cuda13-plugin": "0.11.2"}}, "JAX_PLATFORMS=cpu"),
        ({"versions": {"jax": "0.11.1", "jaxlib": "0.11.1"}, "backend": "gpu"},
         "openxla/xla#46231"),
        ({"versions": {"jax": "0.13.0", "jaxlib": "0.13.0"}},
         "pip install 'jax<0.13' 'jaxlib<0.13'"),
        ({"versions": FINE | {"orbax-checkpoint": "1.0.0rc1"}},
         "orbax-checkpoint 1.0.0rc1: newer than the versions that jaxmem supports"),
        ({"versions": FINE | {"orbax-checkpoint": "0.12.8"}, "driver": "580.1"},
         "pip install 'jax[cuda13]==0.11.2'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpu_with_kernels")
def test_bad_combinations(found, said):
    (problem,) = problems(**found)
    assert said in problem


def test_problems_of_gpu_left_out(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (problem,) = problems(driver="580.1")
    assert "JAX_PLATFORMS=cpu leaves it out" in problem


# ------------------------------------------------------------- who assembles kernels


class _Library:
    """A stand-in of nvJitLink, which writes its version to two pointers."""

    def __init__(self, version, status=0):
        def read(*pointers):
            for pointer, number in zip(pointers, version, strict=True):
                pointer._obj.value = number
            return status

        self.nvJitLinkVersion = read


@pytest.fixture
def a_gpu(monkeypatch, gpu_with_kernels):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def assembler(monkeypatch, libraries, jax="0.12.0.1", plugin="jax-cuda13-plugin"):
    def load(path):
        if path not in libraries:
            raise OSError(path)
        return libraries[path]

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    return doctor.assembler({"jax": jax}, {plugin: jax})


def test_assembler_is_nvjitlink_where_jax_loads_it(monkeypatch, a_gpu):
    cuda13 = {"libnvJitLink.so.13": _Library((13, 4))}
    said = assembler(monkeypatch, cuda13)
    assert said.startswith("nvJitLink 13.4: ") and "nvidia-nvjitlink, ptxas" in said
    assert assembler(monkeypatch, cuda13, plugin="jax-cuda12-plugin") == "ptxas"
    assert assembler(monkeypatch, cuda13, jax="0.11.2") == "ptxas"
    assert assembler(monkeypatch, {}) == "ptxas"
    for library in (_Library((12, 4)), _Library((13, 4), status=1), object()):
        assert assembler(monkeypatch, {"libnvJitLink.so.13": library}) == "ptxas"


def test_assembler_is_found_in_an_installed_package(monkeypatch, a_gpu, tmp_path):
    package = tmp_path / "nvidia_nvjitlink-13.4.92.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: nvidia-nvjitlink\nVersion: 13.4.92\n")
    (package / "RECORD").write_text("nvidia/cu13/lib/libnvJitLink.so.13,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "nvidia/cu13/lib/libnvJitLink.so.13"
    path.parent.mkdir(parents=True)
    path.touch()
    said = assembler(monkeypatch, {str(path): _Library((12, 5))})
    assert said.startswith("nvJitLink 12.5: ")


def test_assembler_is_not_printed_without_kernels(capsys, monkeypatch):
    assert assembler(monkeypatch, {"libnvJitLink.so.13": _Library((13, 4))}) == ""
    checkup = doctor.check()
    assert "assembler" not in doctor.text(checkup)
    told = doctor.dataclasses.replace(checkup, assembler="ptxas")
    assert "\nassembler    ptxas\n" in doctor.text(told)
