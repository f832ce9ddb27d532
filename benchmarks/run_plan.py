"""Plans of H200s beside recorded runs: bytes and seconds.

    python -m benchmarks.run_plan --source mesh --source grpo

Compiles the programs of earlier measurements again, for H200s that are not there, and
holds them against results/{mesh,long_step,fit,grpo_qwen3_8b,head}_h200.csv. Needs XLA's
compiler for NVIDIA GPUs and cuDNN (nvidia-cudnn-cu13), but no GPU. A row is a number
that was recorded: an allocator's peak, or a program's bytes by the compiler there.

    python -m benchmarks.run_plan --source shapes --out plan_shapes.csv

holds plans by shapes alone, which need no compiler, against results/cards_h200.csv and
those of GRPO.
"""

import argparse
import functools
import inspect
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks import on_jax, results, run_cards, run_head, stack
from jaxmem import devices
from jaxmem.planning import accounts, analytic, plans, roofline
from jaxmem.train import configuration
from jaxmem.train.jobs import job_of
from jaxmem.train.jobs.sft import Sft
from jaxmem.train.phases import Phase

FOLDER = pathlib.Path(__file__).parent
CONFIGS = FOLDER.parent / "configs"
KEYS = ("source", "case", "number")
GIB, MIB = 2**30, 2**20
BOUND = 0.05  # what a prediction may be off
STEPS = {"mesh": "mesh_step.gin", "long_step": "long_step.gin"}
# Programs of the head whose allocator's peak was recorded, or whose size is unlike.
HEADS = (
    ((8192, 4096, 151936), "token_stats"),
    ((8192, 4096, 151936), "token_loss"),
    ((8192, 4096, 151936), "logprobs"),
    ((8192, 4096, 151936), "token_stats implementation=xla"),
    ((8192, 4096, 151936), "materialised_stats"),
    ((32768, 4096, 128256), "token_stats"),
    ((8192, 2304, 256000), "token_loss"),
    ((8192, 4096, 50257), "token_stats"),
)


# Records of whole runs of reinforcement learning, and the names of their plans.
GRPO = {
    "grpo_qwen3_8b_h200.csv": "qwen3-8b grpo",
    "grpo_recipe_h200.csv": "qwen3-8b grpo with adapters, 256 completions",
}


def row_of(source, case, number, recorded, predicted, **others) -> dict:
    """One number, in GiB; `miss` where it is off by more than the bound."""
    error = predicted / recorded - 1
    return {
        "source": source,
        "case": case,
        "number": number,
        "recorded_gib": round(recorded, 4),
        "predicted_gib": round(predicted, 4),
        "error": round(error, 4),
        "miss": "yes" if abs(error) > BOUND else "",
        **others,
    }


def speed(estimate, seconds, idle=1) -> dict:
    """The products' bound beside what a run took."""
    bound = estimate.seconds * idle  # it is shared by devices that had no part
    return {
        "recorded_seconds": seconds,
        "bound_seconds": round(bound, 4),
        "efficiency": round(bound / seconds, 3),
        "sending_seconds": round(estimate.sending, 4),
    }


def of_steps(source) -> Iterator[dict]:
    """Training steps, by `run_long_step`: the largest peak of any device."""
    for row in results.read(f"{source}_h200.csv"):
        overrides = row["overrides"].split()
        # How many devices a host has decides what is traced on one of them.
        there = 4 if "four" in row.get("note", "") else max(2, int(row["devices"]))
        config, _ = configuration.load(FOLDER / STEPS[source], overrides)
        with devices.target("h200", there):
            job = Sft(config)
            job.packed = False
            plan = plans.of_phases([job.plan().backward])
            case = " ".join([*overrides, row.get("note", "")]).strip() or "defaults"
            yield row_of(
                source, case, "peak", float(row["device_peak_gib"]), plan.peak / GIB,
                **speed(
                    plan.phases[0].estimate, float(row["seconds"]),
                    there // int(row["devices"]),
                ),
                **columns_of(plan.phases[0]),
            )  # fmt: skip


def columns_of(phase) -> dict:
    """The compiler's seconds, as a column."""
    return {"compile_s": round(phase.account.seconds, 1)}


def of_fit() -> Iterator[dict]:
    """A stack of blocks under every policy, by `run_fit`."""
    sizes = stack.SIZES["small"]
    rows = [row for row in results.read("fit_h200.csv") if not row["limit_gib"]]
    for row in rows:
        recorded = {"program": row["program_gib"], "peak": row["peak_gib"]}
        with devices.target("h200"):
            policy = stack.read(row["candidate"])
            phase = Phase("step", functools.partial(stack.trace, sizes, policy))
            plan = plans.of_phases([phase]).phases[0]
        took = speed(plan.estimate, float(row["ms"]) / 1e3)
        predicted = {"program": plan.account.program, "peak": plan.total}
        for number, value in recorded.items():
            if value:
                yield row_of(
                    "fit", row["candidate"], number, float(value),
                    predicted[number] / GIB, **(took if number == "program" else {}),
                    **columns_of(plan),
                )  # fmt: skip


def of_grpo() -> Iterator[dict]:
    """The phases of Qwen3-8B's job, by the compiler there, and its peak."""
    rows = {row["phase"]: row for row in results.read("grpo_qwen3_8b_h200.csv")}
    name, overrides = rows["update"]["config"], rows["update"]["overrides"].split()
    config, _ = configuration.load(CONFIGS / name, overrides)
    with devices.target("h200"):
        plan = plans.of_phases(job_of(config).plan().phases)
    phases = {phase.name: phase for phase in plan.phases}
    # Seconds of a phase are of all its programs, as often as a step runs them.
    for recorded, ours, share in (
        ("rollout", "rollout", 1.0),
        ("old", "log-probs", 0.5),
        ("update", "gradients", 1.0),
    ):
        row, phase = rows[recorded], phases[ours]
        bound = phase.estimate.seconds * phase.runs * share
        took = float(row["seconds"])
        yield row_of(
            "grpo", recorded, "program", float(row["program_gib"]),
            phase.account.program / GIB, recorded_seconds=took,
            bound_seconds=round(bound, 4), efficiency=round(bound / took, 3),
            **columns_of(phase),
        )  # fmt: skip
    peak = float(rows["update"]["device_peak_gib"])
    yield row_of("grpo", "all phases", "peak", peak, plan.peak / GIB)


def of_head() -> Iterator[dict]:
    """Temporaries of the head with its gradients."""
    known = {
        (*(int(row[k]) for k in "ndv"), row["path"]): row
        for row in results.read("head_h200.csv")
    }
    for shape, path in HEADS:
        row = known[(*shape, path)]
        account, seconds = head_account(shape, path)
        recorded = float(row["forward_backward_temp_mib"]) * MIB
        took = float(row["forward_backward_ms"]) / 1e3
        yield row_of(
            "head", f"{shape} {path}", "temporary", recorded / GIB,
            account.temporary / GIB, recorded_seconds=took,
            bound_seconds=round(seconds, 4), efficiency=round(seconds / took, 3),
            compile_s=round(account.seconds, 1),
        )  # fmt: skip


def head_account(shape, path):
    """(bytes, the products' bound) of forward and backward."""
    n, d, v = shape
    call = run_head.call_of(path)

    def both(h, W, y, g):
        def total(h, W):
            return on_jax.total_of(call, h, W, y, g)

        return jax.grad(total, (0, 1), has_aux=True)(h, W)

    h, W = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, d), (v, d)))
    y = jax.ShapeDtypeStruct((n,), jnp.int32)
    g = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name in on_jax.COTANGENTS}
    with devices.target("h200"):
        phase = Phase("head", lambda: jax.jit(both).trace(h, W, y, g))
        account = accounts.of(phase)
        return account, roofline.of(phase, account).seconds


def of_shapes() -> Iterator[dict]:
    """Peaks of whole steps next to the ranges of plans without a compiler."""
    device = devices.find("h200")
    with tempfile.TemporaryDirectory() as folder, devices.stand_in(device.name):
        for row in results.read("cards_h200.csv"):
            if row["side"] == "jax" and row["device_peak_gib"]:
                job = card_job(row, pathlib.Path(folder))
                case = " ".join(row[k] for k in ("model", "training", "lengths"))
                yield shaped_row(f"{case}: {row['variant']}", row, job, device)
        for name, case in GRPO.items():
            (row, *_) = results.read(name)
            config, _ = configuration.load(
                CONFIGS / row["config"], row["overrides"].split()
            )
            yield shaped_row(case, row, job_of(config), device)


def card_job(row, folder: pathlib.Path) -> Sft:
    """The job of a row of results/cards_h200.csv."""
    case = run_cards.Case(
        row["model"], row["training"], row["lengths"], row["variant"], "jax",
        tuple(row["words"].split()),
    )  # fmt: skip
    described = case.variant(folder).job("", row["overrides"].split(), [])
    config, _ = configuration.load(described["config"], described["overrides"])
    job = Sft(config)
    job.packed = row["lengths"] == "chat"
    return job


def shaped_row(case, row, job, device) -> dict:
    """One plan by shapes, in GiB; `within` says if its range has the peak."""
    recorded = float(row["device_peak_gib"])
    plan = analytic.of_programs(job.plan(), device, 1)
    (low, high), expected = plan.range, plan.expected
    return {
        "source": "shapes",
        "case": case,
        "number": "peak",
        "recorded_gib": recorded,
        "low_gib": round(low / GIB, 2),
        "expected_gib": round(expected / GIB, 2),
        "high_gib": round(high / GIB, 2),
        "error": round(expected / GIB / recorded - 1, 4),
        "within": "yes" if low <= recorded * GIB <= high else "no",
        "device": row["device"],
    }


SOURCES: dict[str, Callable[[], Iterator[dict]]] = {
    "mesh": lambda: of_steps("mesh"),
    "long_step": lambda: of_steps("long_step"),
    "fit": of_fit,
    "grpo": of_grpo,
    "head": of_head,
    "shapes": of_shapes,
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--source", action="append", choices=list(SOURCES), default=[])
    parser.add_argument("--out", default="plan_h200.csv", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    for source in args.source or [name for name in SOURCES if name != "shapes"]:
        for row in SOURCES[source]():
            print(row, flush=True)
            measured = row | {"jax": jax.__version__, "date": results.today()}
            results.merge(args.out, [measured], KEYS)


if __name__ == "__main__":
    main()
