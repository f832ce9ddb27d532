"""The search of `jaxmem plan --fit` over policies, offloading and batch sizes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import devices, remat
from jaxmem.base import messages
from jaxmem.models import coded_weights
from jaxmem.planning import accounts, plans, roofline, table
from jaxmem.planning.plans import Plan
from jaxmem.planning.scoring import Scoring
from jaxmem.remat import cost
from jaxmem.train.jobs import Job, job_of
from jaxmem.train.phases import BACKWARD, Phase, device_bytes

_BEST = 3  # options that are printed
_COMPILED = 8  # options that are compiled at most
_SLACK = 1.1  # by how much an estimate may be too large, as in remat.fit
_FACTORS = (0.5, 1, 2)  # of a micro-batch's tokens
_CHUNKS = ("auto", 1024)  # besides the config's own
_POLICIES = (
    "none", "save_attention", "offload_attention", "offload_block", "full",
)  # fmt: skip


@dataclasses.dataclass
class Option:
    """Values of a config, and their expected cost."""

    values: dict[str, Any]  # by key, such as "head.chunk"
    seconds: float  # training time of a step, by the formula of `remat.fit`
    expected: int  # estimated device bytes, before compilation
    plan: Any = None  # plan of the training program alone, once it is compiled

    @property
    def overrides(self) -> tuple[str, ...]:
        """Each as `section.field=value`."""
        return tuple(f"{key}={value}" for key, value in self.values.items())

    def as_json(self) -> dict[str, Any]:
        """Overrides, estimated seconds and peak, for `json.dumps`."""
        return {
            "overrides": self.overrides,
            "seconds_estimate": self.seconds,
            "peak": self.plan.peak,
        }


@dataclasses.dataclass(frozen=True)
class _Policy:
    """A preset, and its cost at the config's own batch size."""

    values: dict[str, Any]
    phase: Phase
    kept: int  # bytes of one device
    sent: int  # bytes to the host, of one device


def options(job: Job | Scoring, base: Plan) -> list[Option]:
    """The three fastest options that fit, inside of `jaxmem.devices.target`.

        seconds = products + max(0, to the host - forward) + max(0, back - backward)
                  + gradients' and moments' bytes

    All policies are traced at the config's own batch size. Their memory at other batch
    sizes is extrapolated from the plan of the unchanged config. Options are compiled
    from the fastest on. If none fits, and the job trains adapters of a frozen base in
    16 bits, options with that base in 4 bits follow.

    Raises:
        ValueError: the job is of scoring.
    """
    found = _fitting_options(job, base)
    if found or isinstance(job, Scoring) or not _can_code(job.config.model):
        return found
    coded = {"model.base": "nf4"}
    smaller = job_of(job.config.replaced(coded))
    found = _fitting_options(smaller, plans.of_phases(smaller.plan().phases))
    return [dataclasses.replace(each, values=coded | each.values) for each in found]


def _can_code(model: Any) -> bool:
    """True if 4 bits are possible: adapters, and matrices of whole groups of inputs."""
    widths = model.hidden, model.ff, model.heads * model.value_width
    is_whole = all(width % coded_weights.BLOCKS["nf4"] == 0 for width in widths)
    return bool(model.lora_rank) and model.base is None and is_whole


def _fitting_options(job: Job | Scoring, base: Plan) -> list[Option]:
    batches = {factor: _scale_batch(job, factor) for factor in _FACTORS}
    known = list(_measure_policies(job))
    candidates = [
        option
        for policy in known
        for option in _list_options(job, policy, known, base, batches)
        if option.expected <= _SLACK * base.memory
    ]
    candidates.sort(key=lambda option: (option.seconds, option.expected))
    return list(itertools.islice(_compile_fitting(job, candidates[:_COMPILED]), _BEST))


def _compile_fitting(job: Any, candidates: Sequence[Option]) -> Iterator[Option]:
    for option in candidates:
        option.plan = plans.of_phases([_backward_phase(job, option.values)])
        if option.plan.fits:
            yield option


def _backward_phase(job: Any, values: dict[str, Any]) -> Phase:
    """The phase with the gradients, of the job with other values."""
    values = {"remat.last": 0, "remat.memory_limit": None, **values}
    return job_of(job.config.replaced(values)).plan().backward


def _measure_policies(job) -> Iterator[_Policy]:
    layers = job.config.model.layers
    chosen: list[dict[str, Any]] = [{"remat.policy": name} for name in _POLICIES]
    for part in (12, 6, 3):
        if last := layers // part:
            chosen.append({"remat.policy": "full", "remat.last": last})
    count = devices.count()
    for values in chosen:
        phase = _backward_phase(job, values)
        kept = phase.parts.get("activations kept")
        jaxpr = phase.traced.jaxpr.jaxpr
        if kept is None:  # count all named values, of all blocks or of the last ones
            kept = sum(cost.bytes_by_name(jaxpr).values()) // count
        yield _Policy(values, phase, kept, cost.bytes_to_host(jaxpr) // count)


def _list_options(job, policy, known, base, batches) -> Iterator[Option]:
    full = next(p for p in known if p.values == {"remat.policy": "full"})
    can_offload = bool(device_bytes(full.phase.held.get("moments", ()))) or bool(
        device_bytes(full.phase.arguments.get("moments", ()))
    )
    for factor, chunk, offload in itertools.product(
        _FACTORS,
        dict.fromkeys((job.config.head.chunk, *_CHUNKS)),
        (False, True) if can_offload else (False,),
    ):
        if batches[factor] is None:
            continue
        values = policy.values | batches[factor]
        if chunk != job.config.head.chunk:
            values["head.chunk"] = chunk
        if offload and not job.config.optimizer.offload:
            values["optimizer.offload"] = True
        own = _own_policy(job.config, known)
        yield Option(
            values,
            _estimate_seconds(policy, full, factor, offload),
            _expected_bytes(policy, own, factor, offload, base),
        )


def _scale_batch(job, factor: float) -> dict[str, Any] | None:
    """Values that scale the tokens of micro-batches; None if that cannot be."""
    scaled = job.scaled(factor)
    if factor == 1:
        return {}
    if scaled is None:
        return None
    rows, values = scaled
    divides = rows > 0 and rows % (job.mesh.data * job.mesh.fsdp) == 0
    return values if divides else None


def _estimate_seconds(policy, full, factor, offload) -> float:
    """Estimated seconds of all micro-batches of a step, and of its update."""
    target = devices.planned()
    assert target is not None
    rates = remat.planned_rates(target.device)
    peak = target.device.products
    products = _roofline_seconds(policy.phase) * peak / rates.products
    forward = _roofline_seconds(full.phase) * peak / rates.products / 4
    exposed = 0.0
    if policy.sent:
        exposed += max(0.0, policy.sent / rates.to_host - forward)
        exposed += max(0.0, policy.sent / rates.from_host - (products - forward))
    params = device_bytes(full.phase.arguments["trained weights"])
    sums = full.phase.parts.get("gradients") or device_bytes(
        full.phase.arguments.get("gradients", ())
    )
    micro_batches = full.phase.runs / factor
    adding = 3 * sums / target.device.bandwidth
    update = 4 * (params + sums) / target.device.bandwidth
    if offload:
        update += 4 * sums / target.device.host  # two moments, to the device and back
    return full.phase.runs * (products + exposed) + micro_batches * adding + update


def _roofline_seconds(phase) -> float:
    return roofline.of(phase, accounts.Account(0, 0, 0)).seconds


def _own_policy(config, known: Sequence[_Policy]) -> _Policy:
    """The config's own policy; "full" if it is none of the presets in `known`."""
    named = {p.values["remat.policy"]: p for p in reversed(known)}
    return named.get(config.remat.policy, named["full"])


def _expected_bytes(policy, before: _Policy, factor, offload, base: Plan) -> int:
    """Expected bytes, extrapolated from the unchanged config and its policy."""
    own = next(p for p in base.phases if p.name in BACKWARD)
    sums = own.parts.get("gradients", 0)
    rest = max(0, own.account.temporary - sums - before.kept)
    total = own.total - own.account.temporary + sums
    if offload:
        total -= own.resident.get("moments", 0)
    return int(total + (rest + policy.kept) * factor)


def text(options: Sequence[Option]) -> str:
    """A table of the options, each as overrides for the command line."""
    if not options:
        return (
            "--fit: no layout that was tried fits; use more devices, or a smaller "
            "model or batch"
        )
    rows = [["overrides, the fastest first", "GiB", "seconds of training, by formula"]]
    for option in options:
        seconds = f"{option.seconds:.3g}"
        overrides = " ".join(option.overrides)
        rows.append([overrides, table.gib(option.plan.peak), seconds])
    return messages.aligned(rows)
