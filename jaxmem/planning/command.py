"""The command `jaxmem plan`: a plan for a configuration and a device."""

import ast
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem import devices
from jaxmem.base import hub
from jaxmem.planning import analytic, picture, plans, search
from jaxmem.planning.analytic import ShapedPlan
from jaxmem.planning.config import PlanRequest
from jaxmem.planning.plans import Plan
from jaxmem.planning.scoring import PLANNED, Scoring
from jaxmem.score.config import ScoreConfig
from jaxmem.train import configuration, model_names
from jaxmem.train.jobs import Job, job_of

_FITS, _DOES_NOT, _UNKNOWN = 0, 1, 2  # exit statuses
_CUDNN = "pip install nvidia-cudnn-cu13 (0.9 GB installed; no GPU)"


def run(request: PlanRequest) -> int:
    """Print a plan; 0 if the job fits, 1 if not, 2 if shapes leave it open."""
    if request.picture is not None and os.path.lexists(request.picture):
        raise ValueError(f"--picture {request.picture} exists; name another file")
    device = devices.find(request.device)
    job = load(Path(request.file), request.overrides)
    count = _count_devices(job, request.devices)
    missing = devices.compiler_missing(device)
    if missing:
        if count > 1:  # the mesh needs as many devices, of any kind
            jax.config.update("jax_num_cpu_devices", count)
        with devices.stand_in(device.name, count):
            estimate = shaped_plan_of(job, device, count)
        _show_estimate(request, estimate, missing)
        return {True: _FITS, False: _DOES_NOT, None: _UNKNOWN}[estimate.fits]
    with devices.target(device.name, count, hosts=request.hosts):
        plan = plan_of(job, device.name)
        options = search.options(job, plan) if request.fit else []
    _show_plan(request, plan, options)
    return _FITS if plan.fits else _DOES_NOT


def load(path: Path, overrides: Sequence[str]) -> Job | Scoring:
    """The job of a gin file, or the scoring run of a checkpoint's directory."""
    if not path.is_dir():
        unread = configuration.DATA_KEYS
        config, _ = configuration.load(path, overrides, unread)
        return job_of(model_names.with_directories(config, hub.TEXT))
    options: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in PLANNED:
            raise ValueError(
                f"override {override!r}: a plan of scoring reads only "
                f"{', '.join(PLANNED)}"
            )
        options[key] = _parse_value(value)
    return Scoring(ScoreConfig(str(path), "planned.jsonl", **options))


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _count_devices(job: Job | Scoring, asked: int | None) -> int:
    """The number of devices in the mesh, which must equal a requested number."""
    mesh = job.mesh
    sizes = () if mesh is None else mesh.sizes
    meshed = math.prod(sizes)
    if asked is None or asked == meshed:
        return meshed
    if mesh is None:
        raise ValueError(
            f"--devices={asked}: scoring runs on one device; leave --devices out"
        )
    product = " x ".join(
        f"mesh.{field.name}={size}"
        for field, size in zip(dataclasses.fields(mesh), sizes, strict=False)
    )
    raise ValueError(
        f"--devices={asked} must be the size of the mesh, but {product} makes "
        f"{meshed}; add an override such as mesh.fsdp={asked}"
    )


def plan_of(job: Job | Scoring, device: str) -> Plan:
    """The plan of a job, inside of `jaxmem.devices.target`."""
    try:
        programs = job.plan()
        return plans.of_phases(
            programs.phases, programs.restored, programs.on_host, programs.notes
        )
    except (NotImplementedError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "cuDNN" in first:
            first = f"model.attention='cudnn' needs cuDNN: {_CUDNN}"
        raise ValueError(f"cannot compile for {device}: {first}") from error


def shaped_plan_of(
    job: Job | Scoring, device: devices.Device, count: int
) -> ShapedPlan:
    """The estimate of a job by shapes, inside of `jaxmem.devices.stand_in`."""
    try:
        return analytic.of_programs(job.plan(), device, count)
    except (NotImplementedError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot plan for {device.name}: {first}") from error


def _show_estimate(request: PlanRequest, estimate: ShapedPlan, missing: str) -> None:
    """Print what shapes alone say, and why it is not more."""
    if request.as_json:
        print(json.dumps(estimate.as_json() | {"missing": missing}, indent=1))
    else:
        print(estimate)
        print(f"\n{missing[0].upper()}{missing[1:]}")
    if request.fit or request.picture is not None:
        print("Without it, --fit and --picture show nothing.", file=sys.stderr)


def _show_plan(request: PlanRequest, plan: Plan, options) -> None:
    if request.as_json:
        fields = plan.as_json() | {"options": [o.as_json() for o in options]}
        print(json.dumps(fields, indent=1))
    else:
        print(plan)
        if request.fit:
            print(f"\n{search.text(options)}")
    if request.picture is not None:
        picture.save(request.picture, plan, options)
        if not request.as_json:
            print(f"\nsaved in {request.picture}")
