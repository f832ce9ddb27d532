"""The search of `jaxmem plan --fit` over policies, offloading and batch sizes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import devices, remat
from jaxmem.planning import account as accounts, jobs, plans, roofline, table
from jaxmem.planning.phase import Phase, device_bytes
from jaxmem.planning.plans import Plan
from jaxmem.remat import cost
from jaxmem.score.run import ScoreConfig
from jaxmem.train.jobs.config import DistillJobConfig, GrpoJobConfig

_BEST = 3  # options that are printed
_COMPILED = 8  # options that are compiled at most
_SLACK = 1.1  # by how much an estimate may be too large, as in remat.fit
_FACTORS = (0.5, 1, 2)  # of a micro-batch's tokens
_CHUNKS = (1024, 4096)
_POLICIES = (
    "none", "save_attention", "offload_attention", "offload_block", "full",
)  # fmt: skip


@dataclasses.dataclass
class Option:
    """Overrides of a config, and their expected cost.

    Attributes:
        config: the config with the overrides.
        overrides: each as `section.field=value`.
        seconds: training time of a step, by the formula of `remat.fit`.
        expected: estimated device bytes, before compilation.
        plan: plan of the training program alone, once it is compiled.
    """

    config: Any
    overrides: tuple[str, ...]
    seconds: float
    expected: int
    plan: Any = None

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

    overrides: tuple[str, ...]
    phase: Phase
    kept: int  # bytes of one device
    sent: int  # bytes to the host, of one device


def options(config: Any, base: Plan) -> list[Option]:
    """The three fastest options that fit, inside of `jaxmem.devices.target`.

        seconds = products + max(0, to the host - forward) + max(0, back - backward)
                  + gradients' and moments' bytes

    All policies are traced at the config's own batch size. Their memory at other batch
    sizes is extrapolated from the plan of the unchanged config. Options are compiled
    from the fastest on.

    Args:
        config: of training.
        base: its plan.

    Returns:
        At most three options; fewer if fewer fit.

    Raises:
        ValueError: the config is of scoring.
    """
    if isinstance(config, ScoreConfig):
        raise ValueError("--fit is for training: scoring keeps nothing to choose")
    known = list(_policies(config))
    candidates = [
        option
        for policy in known
        for option in _variants(config, policy, known, base)
        if option.expected <= _SLACK * base.memory
    ]
    candidates.sort(key=lambda option: (option.seconds, option.expected))
    return list(itertools.islice(_fitting(candidates[:_COMPILED]), _BEST))


def _fitting(candidates: Sequence[Option]) -> Iterator[Option]:
    for option in candidates:
        phase = jobs.backward(option.config)
        option.plan = plans.of_phases([phase])
        if option.plan.fits:
            yield option


def _policies(config) -> Iterator[_Policy]:
    layers = config.model.layers
    chosen = [(name, 0) for name in _POLICIES]
    chosen += [("full", layers // part) for part in (12, 6, 3) if layers // part]
    count = devices.count()
    for name, last in chosen:
        section = dataclasses.replace(
            config.remat, policy=name, last=last, memory_limit=None
        )
        phase = jobs.backward(dataclasses.replace(config, remat=section))
        overrides = [f"remat.policy={name}"] + ([f"remat.last={last}"] if last else [])
        kept = phase.parts.get("activations kept")
        jaxpr = phase.traced.jaxpr.jaxpr
        if kept is None:  # count all named values, of all blocks or of the last ones
            kept = sum(cost.bytes_by_name(jaxpr).values()) // count
        yield _Policy(tuple(overrides), phase, kept, cost.bytes_to_host(jaxpr) // count)


def _variants(config, policy, known, base) -> Iterator[Option]:
    full = next(p for p in known if p.overrides == ("remat.policy=full",))
    can_offload = bool(device_bytes(full.phase.held.get("moments", ()))) or bool(
        device_bytes(full.phase.arguments.get("moments", ()))
    )
    for factor, chunk, offload in itertools.product(
        _FACTORS, _CHUNKS, (False, True) if can_offload else (False,)
    ):
        changed = _changed(config, policy, factor, chunk, offload)
        if changed is None:
            continue
        variant, overrides = changed
        yield Option(
            variant, overrides, _seconds(policy, full, factor, offload),
            _expected(policy, _own(config, known), factor, offload, base),
        )  # fmt: skip


def _changed(config, policy, factor, chunk, offload):
    """(config, overrides), or None if the batch cannot be changed by that factor."""
    overrides = list(policy.overrides)
    parts = dict(item.removeprefix("remat.").split("=") for item in overrides)
    section = dataclasses.replace(
        config.remat, policy=parts["policy"], last=int(parts.get("last", 0)),
        memory_limit=None,
    )  # fmt: skip
    changes: dict[str, Any] = {"remat": section}
    if factor != 1:
        cut = _batch(config, factor)
        if cut is None:
            return None
        changes |= cut[0]
        overrides += cut[1]
    if chunk != config.head.chunk:
        changes["head"] = dataclasses.replace(config.head, chunk=chunk)
        overrides.append(f"head.chunk={chunk}")
    if offload and not config.optimizer.offload:
        changes["optimizer"] = dataclasses.replace(config.optimizer, offload=True)
        overrides.append("optimizer.offload=True")
    return dataclasses.replace(config, **changes), tuple(overrides)


def _batch(config: jobs.TrainConfig, factor):
    """Sections and overrides that scale the tokens of micro-batches by the factor."""
    if isinstance(config, GrpoJobConfig):
        return _slots(config, "grpo", "max_tokens_train", factor)
    if isinstance(config, DistillJobConfig) and config.is_on_policy:
        return _slots(config, "distill", "max_tokens", factor)
    rows, turns = config.data.batch_size * factor, config.run.accumulate / factor
    if rows % 1 or turns % 1 or not _divides(config, int(rows)):
        return None
    rows, turns = int(rows), int(turns)
    sections = {
        "data": dataclasses.replace(config.data, batch_size=rows),
        "run": dataclasses.replace(config.run, accumulate=turns),
    }
    return sections, [f"data.batch_size={rows}", f"run.accumulate={turns}"]


def _slots(config, section: str, field: str, factor):
    """`_batch` where a field says how many slots a micro-batch has."""
    old = getattr(config, section)
    slots = int(getattr(old, field) * factor)
    rows = slots // config.row_lengths[-1]
    if rows * config.row_lengths[-1] != slots or not _divides(config, rows):
        return None
    new = dataclasses.replace(old, **{field: slots})
    return {section: new}, [f"{section}.{field}={slots}"]


def _divides(config, rows):
    return rows > 0 and rows % (config.mesh.data * config.mesh.fsdp) == 0


def _seconds(policy, full, factor, offload) -> float:
    """Estimated seconds of all micro-batches of a step, and of its update."""
    around = devices.planned()
    assert around is not None
    rates = remat.planned_rates(around.device)
    peak = around.device.products
    products = _bound(policy.phase) * peak / rates.products
    forward = _bound(full.phase) * peak / rates.products / 4
    exposed = 0.0
    if policy.sent:
        exposed += max(0.0, policy.sent / rates.to_host - forward)
        exposed += max(0.0, policy.sent / rates.from_host - (products - forward))
    params = device_bytes(full.phase.arguments["trained weights"])
    sums = full.phase.parts.get("gradients") or device_bytes(
        full.phase.arguments.get("gradients", ())
    )
    micro_batches = full.phase.runs / factor
    adding = 3 * sums / around.device.bandwidth
    update = 4 * (params + sums) / around.device.bandwidth
    if offload:
        update += 4 * sums / around.device.host  # two moments, to the device and back
    return full.phase.runs * (products + exposed) + micro_batches * adding + update


def _bound(phase) -> float:
    nothing = accounts.Account(0, 0, 0)
    return roofline.of(phase, nothing).seconds


def _own(config, known: Sequence[_Policy]) -> _Policy:
    """The config's own policy; "full" if it is none of the presets here."""
    named = {p.overrides[0]: p for p in reversed(known)}
    full = named["remat.policy=full"]
    return named.get(f"remat.policy={config.remat.policy}", full)


def _expected(policy, before: _Policy, factor, offload, base: Plan) -> int:
    """Expected bytes, extrapolated from the unchanged config and its policy."""
    own = next(p for p in base.phases if p.name in ("train step", "gradients"))
    sums = own.parts.get("gradients", 0)
    rest = max(0, own.account.temporary - sums - before.kept)
    total = own.total - own.account.temporary + sums
    if offload:
        total -= own.resident.get("moments", 0)
    return int(total + (rest + policy.kept) * factor)


def text(options: Sequence[Option]) -> str:
    """A table of the options, each as overrides for the command line."""
    if not options:
        return "--fit: nothing tried fits; more devices, or a smaller model or batch"
    rows = [["overrides, the fastest first", "GiB", "seconds of training, by formula"]]
    for option in options:
        rows.append(
            [
                " ".join(option.overrides),
                table.gib(option.plan.peak),
                f"{option.seconds:.3g}",
            ]
        )
    return table.aligned(rows)
