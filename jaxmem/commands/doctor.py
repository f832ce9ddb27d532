"""The command `jaxmem doctor`: what jax finds on this machine, and known problems."""

import ctypes
import dataclasses
import functools
import glob
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem import devices
from jaxmem._version import __version__
from jaxmem.base import caches, imports

_FINE, _WRONG = 0, 1  # exit statuses
_GIB = 2**30
_EXTRAS = {
    "flax": "flax", "gin-config": "train", "grain": "train",
    "huggingface_hub": "train", "jinja2": "train",
    "matplotlib": "train", "optax": "train", "orbax-checkpoint": "train",
    "rich": "train", "safetensors": "train", "tensorboardX": "train",
    "tokenizers": "train",
    "pyarrow": "score", "wandb": "wandb", "jsonschema": "rewards",
}  # fmt: skip
# The first releases that this package is not made for, as in pyproject.toml.
_CEILINGS = {
    "jax": "0.13", "jaxlib": "0.13", "numpy": "3", "flax": "0.13", "grain": "0.3",
    "optax": "0.3", "orbax-checkpoint": "1", "huggingface_hub": "3",
    "jsonschema": "5", "lm-eval": "0.5", "math-verify": "0.10", "datasets": "6",
}  # fmt: skip
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "jax-rocm7-plugin")
_VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")
# From this jax on, nvJitLink of this version or newer assembles kernels, not ptxas.
_JAX_WITH_NVJITLINK, _NVJITLINK = (0, 12), (12, 5)
_OF_NVJITLINK = "nvidia-nvjitlink", "nvidia-nvjitlink-cu12"
# Shapes of a call that the faster backend supports wherever it runs.
_HEAD = (8192, 4096, 128256)


@dataclasses.dataclass(frozen=True)
class Checkup:
    """The findings."""

    versions: Mapping[str, str]  # versions of Python and of packages, by name
    plugins: Mapping[str, str]  # versions of installed jax plugins, by name
    driver: str  # version of the NVIDIA driver; empty if there is none
    devices: tuple[str, ...]  # one line per device
    head: str  # the backend that runs a large head here, and why
    assembler: str  # of kernels on this GPU, and its cost; empty if it has no kernels
    # device of `jaxmem plan` to what its compiler lacks; empty if nothing
    compilers: Mapping[str, str]
    caches: Mapping[str, str]  # where compiled programs and vocabularies are cached
    environment: Mapping[str, str]  # values of set environment variables that jax reads
    missing: Mapping[str, str]  # optional packages to the extra that installs them
    problems: tuple[str, ...]  # each problem, and what to do


def run(*, as_json: bool = False) -> int:
    """Print a checkup, and return 0 if there is no problem, 1 otherwise."""
    checkup = check()
    fields = dataclasses.asdict(checkup)
    print(json.dumps(fields, indent=1) if as_json else text(checkup))
    return _WRONG if checkup.problems else _FINE


def check() -> Checkup:
    """Examine this machine; it lists the devices, but runs nothing on them."""
    versions = {"python": platform.python_version(), "jaxmem": __version__}
    versions |= {name: _installed_version(name) for name in ("jax", "jaxlib", "numpy")}
    plugins = {name: v for name in _PLUGINS if (v := _installed_version(name))}
    installed = {name: _installed_version(name) for name in _EXTRAS}
    versions |= {name: v for name, v in installed.items() if v}
    return Checkup(
        versions,
        plugins,
        driver(),
        tuple(map(_describe_device, jax.local_devices())),
        _head_backend(),
        assembler(versions, plugins),
        {
            name: devices.compiler_missing(device)
            for name, device in devices.known().items()
            if device.described
        },
        _cache_sizes(),
        {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        {name: _EXTRAS[name] for name, v in installed.items() if not v},
        tuple(problems(versions, plugins, driver(), jax.default_backend())),
    )


@functools.cache
def driver() -> str:
    """Version of NVIDIA's driver; empty if there is no NVIDIA GPU."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        process = subprocess.run(asked, capture_output=True, text=True, check=False)
        if process.returncode == 0 and process.stdout.strip():
            return process.stdout.split()[0]
    if _DRIVER.exists():
        return _DRIVER.read_text("utf-8").splitlines()[0]
    return ""


def problems(
    versions: Mapping[str, str], plugins: Mapping[str, str], driver: str, backend: str
) -> list[str]:
    """Known bad combinations among the findings, with what to do about each."""
    return [
        *_of_versions(versions, plugins),
        *_of_devices(versions, plugins, driver, backend),
    ]


def _of_versions(versions, plugins) -> Iterator[str]:
    beyond = {
        name: ceiling
        for name, ceiling in _CEILINGS.items()
        if name in versions
        and _parse_release(versions[name]) >= _parse_release(ceiling)
    }
    if beyond:
        names = ", ".join(f"{name} {versions[name]}" for name in beyond)
        asked = " ".join(f"'{name}<{ceiling}'" for name, ceiling in beyond.items())
        yield (
            f"{names}: newer than the versions that jaxmem supports: pip install "
            f"{asked}"
        )
    jaxlib = versions["jaxlib"]
    of_jax = {name: v for name, v in plugins.items() if name.startswith("jax-")}
    unlike = next((name for name, v in of_jax.items() if v != jaxlib), None)
    if unlike is not None:
        yield (
            f"{unlike} {of_jax[unlike]} does not belong to jaxlib {jaxlib}: pip "
            f"install '{unlike}=={jaxlib}'"
        )
    both = [name for name in plugins if name.startswith("jax-cuda")]
    if len(both) > 1:
        yield f"{' and '.join(both)} are both installed: pip uninstall one of them"


def _parse_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _of_devices(versions, plugins, driver, backend) -> Iterator[str]:
    mine = [name for name in plugins if name.startswith("jax-cuda")]
    asked = os.environ.get("JAX_PLATFORMS")
    if mine and backend == "cpu" and not driver and not asked:
        yield (
            f"{mine[0]} is installed without a GPU, and jax prints a warning at each "
            "start: set JAX_PLATFORMS=cpu, which is enough for plans"
        )
    if driver and backend != "gpu":
        if asked:
            yield (
                f"this machine has a GPU, but JAX_PLATFORMS={asked} leaves it out: "
                "unset JAX_PLATFORMS"
            )
        else:
            yield (
                f"this machine has a GPU, but jax runs on {backend}: pip install "
                f"'jax[cuda13]=={versions['jax']}'"
            )
    if backend != "tpu" and glob.glob("/dev/accel*"):
        yield (
            f"this machine has a TPU, but jax runs on {backend}: pip install "
            f"'jax[tpu]=={versions['jax']}'"
        )
    if backend == "gpu" and versions["jaxlib"] in ("0.11.0", "0.11.1"):
        yield (
            f"jaxlib {versions['jaxlib']} gives wrong gradients where a scan offloads "
            "on a GPU (openxla/xla#46231), so jaxmem refuses to offload there: "
            "install 0.11.2 or newer"
        )
    if backend == "gpu" and not devices.has_mosaic():
        yield (
            f"jax {versions['jax']} has no kernels for this GPU: the head, "
            "divergences, experts and decoding run on XLA, slower; the kernels need a "
            "GPU of compute capability 9.0 or newer and "
            f"'jax>=0.11,<{_CEILINGS['jax']}'"
        )


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _describe_device(device) -> str:
    stats = device.memory_stats() or {}
    line = f"{device.id}: {device.device_kind} ({device.platform})"
    if "bytes_limit" in stats:
        used = stats["bytes_in_use"] / _GIB
        line += f", {used:.1f} of {stats['bytes_limit'] / _GIB:.1f} GiB for jax in use"
    return line


def _head_backend() -> str:
    n, d, v = _HEAD
    hidden, W = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, d), (v, d)))
    labels: Any = jax.ShapeDtypeStruct((n,), jnp.int32)
    jax.clear_caches()  # calls traced before would not be reported again
    with jaxmem.report() as report:
        jax.eval_shape(jaxmem.token_stats, hidden, W, labels)
    call = report.calls[0]
    return f"{call.implementation}: {call.why}"


def assembler(versions: Mapping[str, str], plugins: Mapping[str, str]) -> str:
    """The program that assembles kernels here, and its cost; empty without kernels."""
    if jax.default_backend() != "gpu" or not devices.has_mosaic():
        return ""
    version = _nvjitlink_version(plugins)
    is_older_jax = _parse_release(versions["jax"]) < _JAX_WITH_NVJITLINK
    if is_older_jax or version is None or version < _NVJITLINK:
        return "ptxas"
    return (
        f"nvJitLink {'.'.join(map(str, version))}: sampled gradients with logits in 8 "
        "bits take longer than with ptxas, other kernels do not; without the package "
        "nvidia-nvjitlink, ptxas assembles them (docs/kernels.md)"
    )


def _nvjitlink_version(plugins: Mapping[str, str]) -> tuple[int, int] | None:
    """Version of the library nvJitLink that jax's plugin can load; None without one."""
    for name in plugins:
        if (cuda := re.fullmatch(r"jax-cuda(\d+)-plugin", name)) is None:
            continue
        library = f"libnvJitLink.so.{cuda[1]}"
        for path in (library, *_installed_files(_OF_NVJITLINK, library)):
            try:
                of_library = ctypes.CDLL(path).nvJitLinkVersion
            except (OSError, AttributeError):
                continue
            major, minor = ctypes.c_uint(), ctypes.c_uint()
            if of_library(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return major.value, minor.value
    return None


def _installed_files(packages: Iterable[str], name: str) -> Iterator[str]:
    """Paths of the files of that name that installed packages contain."""
    for package in packages:
        try:
            files = importlib.metadata.files(package) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (str(file.locate()) for file in files if file.name == name)


def _cache_sizes() -> dict[str, str]:
    compiled = jax.config.jax_compilation_cache_dir
    kept = caches.candidates()
    return {
        "compiled programs": _describe_size(compiled)
        if compiled
        else "none: set JAX_COMPILATION_CACHE_DIR to keep compiled programs",
        "vocabularies": _describe_size(str(kept[0])) if kept else "no home directory",
    }


def _describe_size(folder: str) -> str:
    sizes = [p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()]
    return f"{folder}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"


def text(checkup: Checkup) -> str:
    """The findings as text of about one screen."""
    lines = [
        _join_lines(checkup.versions),
        f"plugins      {_join_lines(checkup.plugins) or 'none'}",
        f"driver       {checkup.driver or 'none of NVIDIA'}",
        *(f"device       {line}" for line in checkup.devices),
        f"head         {checkup.head}",
        *([f"assembler    {checkup.assembler}"] if checkup.assembler else []),
        *(f"{'cache':12s} {name}: {line}" for name, line in checkup.caches.items()),
        f"environment  {_join_variables(checkup.environment) or 'none set'}",
    ]
    ready = [name for name, lacking in checkup.compilers.items() if not lacking]
    lines.append(f"plans for    {', '.join(ready) or 'no device'}")
    lines += [f"  else       {line}" for line in _missing_packages(checkup.compilers)]
    for extra in dict.fromkeys(checkup.missing.values()):
        names = [name for name, other in checkup.missing.items() if other == extra]
        how = imports.how_to_install(extra)
        lines.append(f"not here     {', '.join(names)}: {how}")
    lines += [f"problem      {line}" for line in checkup.problems]
    return "\n".join([*lines, *(() if checkup.problems else ("nothing is wrong",))])


def _join_variables(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def _missing_packages(compilers) -> list[str]:
    """One line per platform: what its first device's compiler lacks."""
    by_platform: dict[str, str] = {}
    for name, lacking in compilers.items():
        if lacking:
            by_platform.setdefault(devices.find(name).platform, lacking)
    return list(by_platform.values())


def _join_lines(versions) -> str:
    return " ".join(f"{name} {version}" for name, version in versions.items())
