"""Divergences of two heads in torch: what jaxmem's are beside `run_distill_verbs`.

    python -m benchmarks.run_distill_peers --out distill_peers_h200.csv
    python -m benchmarks.run_distill_peers --shape 64,16,320 --dtype float32

One row a path: milliseconds of the value and both gradients of the student, of the mean
over tokens of the Jensen-Shannon divergence (β = 1/2); the ratio to the four products
that no implementation avoids, in the same run; the allocator's peak over inputs and
gradients; and the value's error against float64. The paths are materialised logits, the
same compiled, chunks of tokens whose logits are recomputed, as trainers write it, and
Liger's two: Triton kernels that make gradients in the forward pass, and chunks that are
compiled. A path that fails, or whose package is missing, is recorded so.
"""

import argparse
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import on_torch, results, workers
from jaxmem import timing

SHAPE = (8192, 4096, 151936)
KEYS = ("n", "d", "teacher_d", "v", "dtype", "path", "device")
CHUNK = 1024  # tokens, of the paths in chunks
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[..., torch.Tensor]  # of hidden, W, and the teacher's, to a scalar


def jsd_sum(h, W, teacher, teacher_W):
    """Sum over tokens, from logits in float32."""
    wide = torch.promote_types(h.dtype, torch.float32)
    ln_p = torch.log_softmax((h @ W.T).to(wide), 1)
    ln_q = torch.log_softmax((teacher @ teacher_W.T).to(wide), 1)
    p, q = ln_p.exp(), ln_q.exp()
    ln_m = ((p + q) / 2).log()
    return (p * (ln_p - ln_m) + q * (ln_q - ln_m)).sum() / 2


def materialised(h, W, teacher, teacher_W):
    return jsd_sum(h, W, teacher, teacher_W) / len(h)


def in_chunks(of_chunk: Loss = jsd_sum) -> Loss:
    """A mean by chunks of tokens; each one's logits are recomputed backward."""

    def loss(h, W, teacher, teacher_W):
        sums = [
            torch.utils.checkpoint.checkpoint(
                of_chunk, some, W, others, teacher_W, use_reentrant=False
            )
            for some, others in zip(h.split(CHUNK), teacher.split(CHUNK), strict=True)
        ]
        return torch.stack(sums).sum() / len(h)

    return loss


def compiled(loss: Loss) -> Loss:
    return torch.compile(loss, dynamic=False)


def liger() -> Loss:
    module = importlib.import_module("liger_kernel.ops.fused_linear_jsd")
    return lambda *heads: module.LigerFusedLinearJSDFunction.apply(*heads, None, 0.5)


def liger_chunked() -> Loss:
    """Its loss of labels has weight 0."""
    module = importlib.import_module("liger_kernel.chunked_loss.jsd_loss")
    loss = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)

    def call(h, *others):
        labels = torch.zeros(len(h), dtype=torch.long, device=h.device)
        return loss(h, *others, labels, None, None)

    return call


PATHS: dict[str, Callable[[], Loss]] = {
    "jsd with gradients, torch": lambda: materialised,
    "jsd with gradients, torch.compile": lambda: compiled(materialised),
    "jsd with gradients, torch in chunks": lambda: in_chunks(compiled(jsd_sum)),
    "jsd with gradients, Liger": liger,
    "jsd with gradients, Liger in chunks": liger_chunked,
}


def operands_of(shape, dtype, teacher_d) -> Heads:
    """Student and teacher as `run_distill_verbs` has them, by torch's numbers."""
    n, _, v = shape
    h, W, _ = on_torch.problem(shape, dtype)
    teacher, teacher_W, _ = on_torch.problem((n, teacher_d, v), dtype)
    return h, W, -teacher.detach(), teacher_W.detach()


def with_gradients(loss: Loss, heads: Heads):
    value = loss(*heads)
    return value, torch.autograd.grad(value, heads[:2])


def four_products(h, W, teacher, teacher_W):
    """What any divergence of two heads computes."""
    with torch.no_grad():
        z, y = h @ W.T, teacher @ teacher_W.T
        return z @ W, y.T @ h


def exact_value(heads: Heads) -> float:
    """The mean in float64, some rows at a time."""
    h, W, teacher, teacher_W = (x.detach().double() for x in heads)
    parts = zip(h.split(256), teacher.split(256), strict=True)
    return sum(jsd_sum(a, W, b, teacher_W).item() for a, b in parts) / len(h)


def prepare(load: Callable[[], Loss], heads: Heads, exact: float):
    """(the loss or None, columns: error, MiB, or what went wrong)."""
    try:
        loss = load()
        value, _ = with_gradients(loss, heads)  # compiles
        row: dict[str, Any] = {"value_error": f"{abs(value.item() - exact):.1e}"}
        if on_torch.DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            _, gradients = with_gradients(loss, heads)
            peak = torch.cuda.max_memory_allocated() - held
            peak -= sum(x.nbytes for x in gradients)
            row["peak_mib"] = round(peak / 2**20, 1)
        return loss, row
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, {"note": timing.OUT_OF_MEMORY}
    except Exception as error:  # a path's own: said, and the others go on
        return None, {"note": f"failed: {workers.said(error)}"}


def measure(shape, dtype, teacher_d, repetitions) -> list[dict[str, Any]]:
    """One row a path."""
    heads = operands_of(shape, dtype, teacher_d)
    exact = exact_value(heads)
    ready = {name: prepare(load, heads, exact) for name, load in PATHS.items()}
    runs = {
        name: functools.partial(with_gradients, loss, heads)
        for name, (loss, _) in ready.items()
        if loss is not None
    }
    unit = functools.partial(four_products, *heads)
    unit_ms, taken = timing.take_turns(on_torch.stopwatch(), unit, runs, repetitions)
    rows = []
    for name, (_, columns) in ready.items():
        row = {
            "n": shape[0], "d": shape[1], "teacher_d": teacher_d, "v": shape[2],
            "dtype": str(dtype).removeprefix("torch."), "path": name,
            "four_products_ms": round(unit_ms, 3),
        }  # fmt: skip
        found = taken.get(name)
        if found is not None:
            row |= {"ms": round(found.ms, 3), "over_unit": round(found.over_unit, 3)}
            row["spread"] = round(found.spread, 3)
        facts = {"repetitions": repetitions, **on_torch.provenance()}
        rows.append(row | columns | facts)
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    workers.add_shapes(made)
    made.add_argument("--teacher-depth", type=int, action="append", help="D and 2 D")
    made.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument(
        "--out", default="distill_peers.csv", help="in benchmarks/results"
    )
    return made


def main(arguments=None) -> None:
    args = parser().parse_args(arguments)
    for shape in workers.shapes_of(args) if args.shape else [SHAPE]:
        for depth in args.teacher_depth or (shape[1], 2 * shape[1]):
            rows = measure(shape, getattr(torch, args.dtype), depth, args.repetitions)
            for row in rows:
                print(row, flush=True)
            print("wrote", results.merge(args.out, rows, KEYS))


if __name__ == "__main__":
    main()
