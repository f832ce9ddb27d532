"""Shares of a step's time by class of kernel, from a profile of jax's."""

import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# By the name of a kernel or of the operation that it is of, the first that matches.
CLASSES = {
    "attention": "fmha|flash|sdpa|cudnn|dot_product_attention",
    "head": "mosaic|jaxmem_call",
    "products": "gemm|cublas|cutlass|nvjet|xmma|split_?k|wgmma|dot_general",
    "copies of the loop": "memcpy|memset|copy|dynamic.?update.?slice|broadcast_fusion"
    "|dynamic.?slice_fusion",
}
OPTIMIZER = "/optimizer/"  # the scope of `jaxmem.train.program.update`


def operations(text: str) -> dict[str, str]:
    """Operation of the source by instruction, as kernels are called, of a program."""
    found = re.findall(r"%([\w.\-]+) = [^\n]*?op_name=\"([^\"]*)\"", text)
    return {_as_kernel(name): operation for name, operation in found}


def _as_kernel(name):
    return re.sub(r"\W", "_", name)


def class_of(kernel: str, operation: str) -> str:
    """A class of `CLASSES`, "optimizer" or "elementwise"."""
    for name, pattern in CLASSES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    if re.search(CLASSES["head"], operation):
        return "head"
    if OPTIMIZER in operation:
        return "optimizer"
    return "elementwise"


def summary(
    events: Iterable[tuple[str, str, float, float]], steps: int
) -> list[dict[str, Any]]:
    """Rows of class, ms per step, share of the time, kernels per step.

    Args:
        events: kernel, its operation, start and duration in ns, of one device.
        steps: how many were profiled, one after the other.
    """
    events = sorted(events, key=lambda event: event[2])
    if not events:
        return []
    time, count = Counter[str](), Counter[str]()
    busy, end = 0.0, events[0][2]
    for kernel, operation, start, duration in events:
        name = class_of(kernel, operation)
        time[name] += duration
        count[name] += 1
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    whole = end - events[0][2]
    time["idle"] = whole - busy
    return [
        {
            "class": name,
            "ms": round(ns / steps / 1e6, 3),
            "share": round(ns / whole, 4),
            "kernels": round(count[name] / steps),
        }
        for name, ns in time.most_common()
    ]


def kernels(
    events: Iterable[tuple[str, str, float, float]], steps: int, most: int = 24
) -> list[dict[str, Any]]:
    """Rows of class, ms per step, share of the time, kernels per step, kernel.

    Of the kernels that take most; as many as `most`. The arguments are as in `summary`.
    """
    events = list(events)
    time, count, classes = Counter[str](), Counter[str](), {}
    for kernel, operation, _, duration in events:
        name = f"{kernel[:80].strip()} | {operation[-60:]}"
        time[name] += duration
        count[name] += 1
        classes[name] = class_of(kernel, operation)
    whole = sum(time.values())
    return [
        {
            "class": classes[name],
            "ms": round(ns / steps / 1e6, 4),
            "share": round(ns / whole, 4),
            "kernels": round(count[name] / steps, 1),
            "kernel": name,
        }
        for name, ns in time.most_common(most)
    ]


def device_events(
    folder: str | pathlib.Path, operation_of: Mapping[str, str]
) -> list[tuple[str, str, float, float]]:
    """Events of the first GPU's streams in a folder that `jax.profiler.trace` wrote."""
    import jax  # the process that starts others has none

    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    made = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not (line.name or "").startswith("Stream"):
                continue  # others say the same again, by operation or by module
            for event in line.events:
                stats = {k: v for k, v in event.stats if k}
                name = _as_kernel(str(stats.get("hlo_op") or event.name))
                operation = operation_of.get(name) or str(stats.get("tf_op") or "")
                kernel = f"{event.name} {stats.get('hlo_op') or ''}"
                made.append((kernel, operation, event.start_ns, event.duration_ns))
    return made
