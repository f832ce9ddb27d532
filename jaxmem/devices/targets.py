"""Descriptions of absent devices for XLA's compilers."""

import importlib.metadata
import importlib.util
import math
import os
import shutil
from typing import Any

import jax

from jaxmem.devices.table import Device

_DRIVER = "/dev/nvidiactl"  # exists if there is an NVIDIA GPU
# libtpu queries the cloud for the machine's type, and waits long if nothing answers.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so several processes may load it
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class CompilerMissing(RuntimeError):
    """XLA's compiler for a device is missing; the message says how to install it."""


def of(device: Device, count: int, hosts: int) -> list[Any]:
    """Absent devices on the given number of hosts, for compilation.

    Raises:
        CompilerMissing: the compiler for them is not installed.
        ValueError: hosts does not divide count, or no TPU slice has that count.
    """
    if count < 1 or hosts < 1 or count % hosts:
        raise ValueError(
            f"devices={count} must be at least 1 and divide by hosts={hosts}"
        )
    missing = compiler_missing(device)
    if missing:
        raise CompilerMissing(missing)
    make = _gpus if device.platform == "cuda" else _tpus
    return make(device, count, hosts)


def compiler_missing(device: Device) -> str:
    """The reason that nothing can be compiled for a device; an empty string if none.

    Either packages are missing, which it names, or the device has no target config.
    """
    version = jax.__version__
    if not device.described:
        return (
            f"compiling for {device.name} needs a target config for XLA, and none is "
            "published: jaxmem plans it from shapes only"
        )
    if device.platform == "tpu":
        if importlib.util.find_spec("libtpu") is not None:
            return ""
        return (
            f"compiling for {device.name} needs libtpu (1.3 GB installed, Python 3.11 "
            f"or newer of those it is built for): pip install 'jax[tpu]=={version}'"
        )
    lacking = []
    plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
    if not any(map(importlib.util.find_spec, plugins)):
        lacking.append(f"'jax-cuda13-plugin=={version}'")
    if not _has_ptxas():
        lacking.append("nvidia-cuda-nvcc")
    if not lacking:
        return ""
    return (
        f"compiling for {device.name} needs XLA's compiler for NVIDIA GPUs (0.9 GB "
        f"installed; no GPU, no driver): pip install {' '.join(lacking)}"
    )


def _has_ptxas():
    names = {"nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13"}
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return bool(names & installed) or shutil.which("ptxas") is not None


def _gpus(device, count, hosts):
    from jax.experimental import topologies

    if not os.path.exists(_DRIVER):
        # The CUDA libraries that run programs need not be installed.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()  # loads the plugins
    try:
        topology = topologies.get_topology_desc(
            device.name, platform="cuda", target_config=device.target,
            topology=f"1x{hosts}x{count // hosts}",
        )  # fmt: skip
    except NotImplementedError as error:
        raise CompilerMissing(
            "jax could not load its plugin for NVIDIA GPUs, which compiles for "
            f"{device.name}: set JAX_PLATFORMS=cpu before jax is first used"
        ) from error
    return list(topology.devices)


def _tpus(device, count, hosts):
    from jax.experimental import topologies

    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    chips, there = -(-count // device.cores), -(-count // hosts // device.cores)
    shape = _slice(chips, device.axes, device.name)
    host = shape if hosts == 1 else _slice(there, device.axes, device.name)
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{device.topology}:{'x'.join(map(str, shape))}",
        chips_per_host_bounds=(*host, 1, 1)[:3],
    )
    return list(topology.devices)[:count]


def _slice(chips, axes, name):
    """Sides of a slice with that many chips, as equal as powers of two allow."""
    power = chips.bit_length() - 1
    if chips != 2**power:
        raise ValueError(
            f"{name} comes in slices of 1, 2, 4, 8, … chips, which {chips} is not"
        )
    sides = [2 ** (power // axes + (i < power % axes)) for i in range(axes)]
    assert math.prod(sides) == chips
    return tuple(sorted(sides))
