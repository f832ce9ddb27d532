"""Chooses the fastest policy among those that fit the device memory."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmem import devices
from jaxmem.base import messages
from jaxmem.remat import cost, liveness
from jaxmem.remat.policies import PRESETS, Policy

_GIB = 2**30
_HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Shares of peak rates: large bfloat16 products reach 0.69 on an H200, copies to the
# host 0.85 (benchmarks/results/head_h200.csv, offload_h200.csv).
_SHARE = 0.7
_SLACK = 1.1  # candidates whose estimate exceeds the limit by more are not compiled


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a device per second.

    Attributes:
        products: operations of matrix products.
        to_host: bytes to the host; 0 if there is no separate host memory.
        from_host: bytes from the host.
    """

    products: float
    to_host: float
    from_host: float


def measure_rates(dtype: Any = jnp.bfloat16, size: int | None = None) -> Rates:
    """Measure the default device: one large product, and a buffer to the host and back.

    Args:
        dtype: of the product.
        size: of its square matrices; by default 8192, and 512 on a CPU.
    """
    on_cpu = jax.default_backend() == "cpu"
    n = size or (512 if on_cpu else 8192)
    x = jnp.ones((n, n), dtype)
    product = 2 * n**3 / _fastest_seconds(jax.jit(jnp.matmul), x, x)
    if on_cpu:
        return Rates(product, 0.0, 0.0)
    host = x.sharding.with_memory_kind("pinned_host")
    on_host = jax.device_put(x, host)
    return Rates(
        product,
        x.nbytes / _fastest_seconds(jax.device_put, x, host),
        x.nbytes / _fastest_seconds(jax.device_put, on_host, x.sharding),
    )


def planned_rates(device: devices.Device) -> Rates:
    """Estimated rates of an absent device: 0.7 of its peaks, as an H200 reaches."""
    host = _SHARE * device.host
    return Rates(_SHARE * device.products, host, host)


def _fastest_seconds(run, *args):
    """The fastest of five runs, after one warm-up run."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def device_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory of a program: arguments, results, temporaries.

    Results that alias donated arguments count once.
    """
    account: Any = compiled.memory_analysis()
    return (
        account.argument_size_in_bytes
        + account.output_size_in_bytes
        - account.alias_size_in_bytes
        + account.temp_size_in_bytes
    )


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of a step on one device, and the step's program if it was compiled."""

    total: int
    arguments: int
    count: int  # devices
    compiled: Any = None


def _measure_bytes(traced: jax.stages.Traced) -> StepBytes:
    """Bytes of a step by the compiler; by shapes where CPUs stand for other devices."""
    target = devices.planned()
    if target is None or not target.is_stand_in:
        compiled = traced.lower().compile()
        account: Any = compiled.memory_analysis()
        arguments, count = account.argument_size_in_bytes, cost.devices(compiled)
        return StepBytes(device_bytes(compiled), arguments, count, compiled)
    count = len(target.devices)
    arguments = liveness.argument_bytes(traced) // count
    return StepBytes(arguments + liveness.peak(traced) // count, arguments, count)


@dataclasses.dataclass
class Candidate:
    """A policy, its expected cost per device, and why it was not chosen."""

    policy: Policy | None
    traced: Any  # the step, traced with this policy
    products: float  # operations
    kept: int  # bytes of saved names on the device; of all names if policy is None
    whole: int  # bytes of the last blocks, freed before gradients are allocated
    sent: int  # bytes sent to the host
    host: int  # peak bytes on the host
    expected: int = 0  # estimated device bytes, before compilation
    seconds: float = 0.0
    exposed: float = 0.0  # seconds of copies that do not overlap
    compiled: Any = None  # the step, if it fits
    device: int | None = None  # device bytes, by the compiler
    measured: float | None = None  # seconds
    why_not: str = ""

    def is_of(self, names: Sequence[str]) -> bool:
        """True if it saves and offloads only these names."""
        if self.policy is None or self.policy.dots:
            return False
        return {*self.policy.save, *self.policy.offload} <= {*names}


def fit(
    step: Callable[[Policy | None], Any],
    memory_limit: int | Literal["auto"] = "auto",
    *,
    names: Sequence[str] | None = None,
    last: Sequence[int] = (),
    host_limit: int | None = None,
    rates: Rates | None = None,
    trials: int | None = None,
    show: Callable[[str], Any] | None = print,
) -> Policy | None:
    """The policy whose step takes the least time within a limit of device memory.

        seconds = products / rate + max(0, bytes to the host / rate - forward pass)
                                  + max(0, bytes back / rate - backward pass)

    Candidates save an increasing number of names, in the order of operations saved per
    byte, with the blocks' inputs on the device or on the host; or offload an increasing
    number of names; or keep all residuals of the last blocks. All candidates are
    traced. From the fastest on they are compiled until `trials` of them fit; these are
    run, and the fastest of them is returned. Inside of `jaxmem.devices.stand_in`
    nothing is compiled: the candidates' bytes are those of their shapes.

    Args:
        step: policy -> `jax.jit(...).trace(...)` of a training step that uses it, with
            `compiler_options` of the policy; None for no rematerialisation.
        memory_limit: device bytes for the program, or "auto" for the limit of the
            default device.
        names: names that may be saved or offloaded; by default all names in the step's
            blocks, or all residuals.
        last: numbers of last blocks that may keep all residuals (`Policy.last`), for a
            step that passes its policy to `scan_blocks`; by default none.
        host_limit: bytes on the host, for all devices of a process; by default those of
            XLA's pool, 64 GiB or the value of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
        rates: of the device; if None, they are measured, or inside of
            `jaxmem.devices.target`, where nothing runs, 0.7 of the device's peaks.
        trials: how many candidates to run, with zeros for arguments, for which the
            device must have memory; by default 3, and none on a CPU or for a planned
            device. With 0, the formula decides.
        show: called with the table of all candidates; None for no output.

    Returns:
        A policy, or None if all residuals can be kept. A policy with exposed copies is
        returned only if nothing else fits, and the table says so.

    Raises:
        ValueError: nothing fits, the step has no checkpoint names, "auto" is given for
            a device that does not report its limit, or one of several processes would
            measure.
    """
    _check_arguments(last, rates, trials)
    limit = device_limit() if memory_limit == "auto" else int(memory_limit)
    target = devices.planned()
    if rates is None:
        rates = planned_rates(target.device) if target else measure_rates()
    everything, nothing = step(None), step(Policy())
    smallest = _measure_bytes(nothing)
    count = smallest.count
    sizes = _bytes_by_name(everything.jaxpr, names)
    if trials is None:
        nothing_runs = target or devices.backend() == "cpu"
        trials = 0 if jax.process_count() > 1 or nothing_runs else 3
    traces = _trace_policies(step, everything, nothing, sizes, last, rates.to_host > 0)
    candidates = _make_candidates(traces, sizes, count)
    if names is not None:
        candidates = [x for x in candidates if x.is_of(names)]
    forward = cost.products(everything.jaxpr.jaxpr) / 3 / count / rates.products
    for candidate in candidates:
        _estimate_seconds(candidate, forward, rates)
        offloaded = min(sizes.get("block_in", 0) // count, candidate.host)
        upper_bound = smallest.total + candidate.kept - offloaded
        candidate.expected = max(upper_bound, smallest.arguments + candidate.whole)
    order = sorted(candidates, key=lambda c: (c.exposed > 0, c.seconds, c.host))
    if host_limit is None:
        host_limit = int(os.environ.get(_HOST_POOL, 64)) * _GIB
    host_bytes = host_limit * jax.process_count() // count
    for candidate in order:
        candidate.why_not = _reason_to_skip(candidate, limit, host_bytes, rates)
    chosen = _find_fastest(order, limit, trials)
    if show is not None:
        show(table(order, chosen))
    if chosen is None:
        raise ValueError(
            f"no policy fits memory_limit={limit:,} bytes: even full "
            f"rematerialisation takes {smallest.total:,}; make the batch "
            "smaller, or shard the weights"
        )
    return chosen.policy


def _check_arguments(last, rates, trials) -> None:
    if jax.process_count() > 1 and (rates is None or trials):
        raise ValueError(
            "remat.fit measures in each process, so that processes may choose "
            "different policies; choose one in a single process and name it, or give "
            "rates and trials=0"
        )
    if any(k < 1 for k in last):
        raise ValueError(f"last must be numbers of blocks above 0, got {list(last)}")


def _find_fastest(order, limit, trials) -> Candidate | None:
    """The fastest candidate that fits; also records the results on each candidate."""
    fitting: list[Candidate] = []
    for candidate in order:
        enough = len(fitting) >= max(1, trials) or (fitting and candidate.exposed)
        if candidate.why_not or enough:
            candidate.why_not = candidate.why_not or "slower"
            continue
        measured = _measure_bytes(candidate.traced)
        candidate.device = measured.total
        if candidate.device > limit:
            candidate.why_not = f"over the limit of {limit / _GIB:.3f} GiB"
        else:
            candidate.compiled, candidate.why_not = measured.compiled, "slower"
            fitting.append(candidate)
    for candidate in fitting if trials and len(fitting) > 1 else []:
        candidate.measured = _step_seconds(candidate.compiled)
    return min(fitting, key=lambda x: x.measured or x.seconds, default=None)


def _step_seconds(compiled: jax.stages.Compiled) -> float:
    """The faster of two steps, after one warm-up step."""

    def zeros(info, sharding):
        return jnp.zeros(info.shape, info.dtype, device=sharding)

    seconds = []
    for _ in range(3):
        arguments = jax.tree.map(zeros, compiled.args_info, compiled.input_shardings)
        args, kwargs = jax.block_until_ready(arguments)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args, **kwargs))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def device_limit() -> int:
    """Bytes that programs may use on the default device, or on a planned one.

    Raises:
        ValueError: the device does not report it.
    """
    around = devices.planned()
    if around is not None:
        return int(around.device.usable)
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            "memory_limit='auto' needs a device that reports its limit, which a "
            f"{jax.default_backend()} does not; give a number"
        )
    return stats["bytes_limit"]


def _bytes_by_name(jaxpr, names):
    """Bytes of each name in all blocks."""
    sizes = cost.bytes_by_name(jaxpr.jaxpr)
    # The head's residuals do not belong to a block.
    chosen = (
        [k for k in sizes if not k.startswith("jaxmem_")] if names is None else names
    )
    missing = [k for k in chosen if k not in sizes]
    if missing or not chosen:
        raise ValueError(
            f"the step names {', '.join(sizes) or 'nothing'}, but not "
            f"{', '.join(missing) or 'values of a block'}; name them in the blocks, by "
            "remat.name"
        )
    return {k: sizes[k] for k in chosen}


def _trace_policies(step, everything, nothing, sizes, last, has_host) -> dict[Any, Any]:
    """The traced step of each policy that `fit` considers.

    They are: all residuals kept, the presets, prefixes of the names ordered by
    operations saved per byte, and policies that keep all residuals of the last blocks.
    """
    work = cost.products(nothing.jaxpr.jaxpr)
    of_names = functools.partial(Policy, known=tuple(sizes))

    def gain(labels):
        saved = step(of_names(save=labels)).jaxpr.jaxpr
        return (work - cost.products(saved)) / sum(sizes[k] for k in labels)

    inputs = tuple(label for label in ("block_in",) if label in sizes)
    gains = {labels: gain(labels) for labels in _group_names(sizes) if labels != inputs}
    order = sorted((k for k in gains if gains[k] > 0), key=lambda k: -gains[k])
    policies = [p for p in PRESETS.values() if p is not None]
    for n in range(len(order) + 1):
        saved = tuple(label for labels in order[:n] for label in labels)
        policies.append(of_names(save=saved))
        if has_host:
            policies.append(of_names(save=saved, offload=inputs))
            policies.append(of_names(offload=(*inputs, *saved)))
    for k in last:
        policies.append(of_names(last=k))
        if has_host:
            policies.append(of_names(offload=inputs, last=k))
    traces = {None: everything, Policy(): nothing}
    for policy in policies:
        if policy not in traces:
            traces[policy] = step(policy)
    return traces


def _group_names(sizes):
    """Each name alone, but attention's results together: one alone saves little."""
    attention = tuple(label for label in ("attn_out", "attn_lse") if label in sizes)
    return [
        *((label,) for label in sizes if label not in attention),
        *([attention] if attention else []),
    ]


def _make_candidates(traces, sizes, count) -> list[Candidate]:
    """Each policy with its costs on each of `count` devices: even shares of totals.

    That underestimates values that are replicated; compilation gives the true number.
    """
    products = {p: cost.products(step.jaxpr.jaxpr) for p, step in traces.items()}
    most = products[Policy()]
    remade = most - products[None]  # of what nothing keeps
    candidates = []
    for policy, step in traces.items():
        jaxpr, work = step.jaxpr.jaxpr, products[policy]
        names = sizes if policy is None else policy.save
        kept = sum(sizes.get(label, 0) for label in names)
        whole = 0
        if policy is not None and policy.last and remade:
            whole = int(sum(sizes.values()) * (most - work) / remade)
        sent, host = cost.bytes_to_host(jaxpr), cost.bytes_on_host(jaxpr)
        bytes_by_field = (size // count for size in (kept, whole, sent, host))
        candidates.append(Candidate(policy, step, work / count, *bytes_by_field))
    return candidates


def _estimate_seconds(candidate, forward, rates):
    """Set seconds, and those of them that are exposed copies."""
    computed = candidate.products / rates.products
    if candidate.sent and rates.to_host:
        out = candidate.sent / rates.to_host - forward
        back = candidate.sent / rates.from_host - (computed - forward)
        candidate.exposed = max(0.0, out) + max(0.0, back)
    candidate.seconds = computed + candidate.exposed


def _reason_to_skip(candidate, limit, host_limit, rates) -> str:
    """Why a candidate need not be compiled; an empty string if it must be."""
    if candidate.host and not rates.to_host:
        return "a CPU has no separate memory"
    if candidate.host > host_limit:
        return f"over {host_limit / _GIB:.3f} GiB on the host"
    if candidate.expected > _SLACK * limit:
        return f"would take about {candidate.expected / _GIB:.3f} GiB"
    return ""


def table(candidates: Sequence[Candidate], chosen: Candidate | None) -> str:
    """The candidates as lines of text: expected costs, and why each was not chosen."""
    rows = [
        ("policy", "GiB device", "GiB host", "ms by formula", "measured", "why not")
    ]
    for candidate in candidates:
        device = "" if candidate.device is None else f"{candidate.device / _GIB:.3f}"
        note = candidate.why_not
        if candidate is chosen:
            note = "chosen"
            if candidate.exposed:
                note += (
                    f"; nothing hides {candidate.exposed * 1e3:.0f} ms of its copies"
                )
        measured = (
            "" if candidate.measured is None else f"{candidate.measured * 1e3:.1f}"
        )
        host, seconds = f"{candidate.host / _GIB:.3f}", f"{candidate.seconds * 1e3:.1f}"
        rows.append((describe(candidate.policy), device, host, seconds, measured, note))
    return messages.aligned(rows, left=(0, 5))


def describe(policy: Policy | None) -> str:
    """A preset's name, or the saved and offloaded names and the last blocks."""
    if policy is not None and policy.last:
        names = describe(dataclasses.replace(policy, last=0))
        return f"{names}; last {policy.last} whole"
    for name, known in PRESETS.items():
        if policy == known:
            return name
    assert policy is not None
    parts = [f"save {', '.join(policy.save)}"] if policy.save else []
    parts += [f"offload {', '.join(policy.offload)}"] if policy.offload else []
    return "; ".join([*parts, *(["dots"] if policy.dots else [])])
