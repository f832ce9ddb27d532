"""The Jensen-Shannon divergence of two heads in torch, as peers of `jaxmem.JSD`.

Each path computes the mean over tokens of the divergence (β = 1/2), and its gradients
by the student's hidden states and W. A row has milliseconds; the ratio to the four
matrix products that no implementation avoids, measured in the same run; the allocator's
peak beyond inputs and gradients; and the value's absolute error against float64. The
paths are: materialised logits; the same under torch.compile; chunks of tokens, whose
logits the backward pass recomputes; Liger's Triton kernels, which compute gradients in
the forward pass; and Liger's compiled chunks. A path that fails, or whose package is
missing, has a note instead of a time.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from benchmarks import on_torch, workers
from jaxmem.base import timing

KEYS = ("n", "d", "teacher_d", "v", "dtype", "path", "device")
CHUNK = 1024  # tokens
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[..., torch.Tensor]  # (hidden, W, teacher, teacher_W) -> scalar


def jsd_sum(h, W, teacher, teacher_W):
    """Sum over tokens, from float32 logits, or float64 ones."""
    wide = torch.promote_types(h.dtype, torch.float32)
    ln_p = torch.log_softmax((h @ W.T).to(wide), 1)
    ln_q = torch.log_softmax((teacher @ teacher_W.T).to(wide), 1)
    p, q = ln_p.exp(), ln_q.exp()
    ln_m = ((p + q) / 2).log()
    return (p * (ln_p - ln_m) + q * (ln_q - ln_m)).sum() / 2


def materialised(h, W, teacher, teacher_W):
    return jsd_sum(h, W, teacher, teacher_W) / len(h)


def in_chunks(of_chunk: Loss) -> Loss:
    """The mean, with the logits of a chunk recomputed in the backward pass."""

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


def liger_in_chunks() -> Loss:
    """Its cross-entropy with the labels, which it always computes, has weight 0."""
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
    "jsd with gradients, Liger in chunks": liger_in_chunks,
}


def operands_of(shape, dtype, teacher_d) -> Heads:
    """The recipe of `distill_verbs.Operands`, with torch's own random numbers."""
    n, _, v = shape
    h, W, _ = on_torch.problem(shape, dtype)
    teacher, teacher_W, _ = on_torch.problem((n, teacher_d, v), dtype)
    return h, W, -teacher.detach(), teacher_W.detach()


def with_gradients(loss: Loss, heads: Heads):
    value = loss(*heads)
    return value, torch.autograd.grad(value, heads[:2])


def four_products(h, W, teacher, teacher_W):
    """The products of both heads' logits and of the student's gradients."""
    with torch.no_grad():
        z, y = h @ W.T, teacher @ teacher_W.T
        return z @ W, y.T @ h


def exact_value(heads: Heads) -> float:
    """The mean in float64, in chunks of rows."""
    h, W, teacher, teacher_W = (x.detach().double() for x in heads)
    parts = zip(h.split(256), teacher.split(256), strict=True)
    return sum(jsd_sum(a, W, b, teacher_W).item() for a, b in parts) / len(h)


def prepare(load: Callable[[], Loss], heads: Heads, exact: float):
    """(the loss, or None if it fails; columns: error and MiB, or a note)."""
    try:
        loss = load()
        value, _ = with_gradients(loss, heads)  # compiles
        return loss, {
            "value_error": f"{abs(value.item() - exact):.1e}",
            **peak_columns(loss, heads),
        }
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, {"note": timing.OUT_OF_MEMORY}
    except Exception as error:  # one path's failure must not end the others
        return None, {"note": f"failed: {workers.said(error)}"}


def peak_columns(loss, heads) -> dict[str, float]:
    """The allocator's peak beyond operands and gradients; nothing on a CPU."""
    if on_torch.DEVICE != "cuda":
        return {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    _, gradients = with_gradients(loss, heads)
    peak = torch.cuda.max_memory_allocated() - held - sum(x.nbytes for x in gradients)
    return {"peak_mib": round(peak / 2**20, 1)}


def run(shape, dtype, teacher_d, repetitions) -> Iterator[dict[str, Any]]:
    """One row per path."""
    heads = operands_of(shape, getattr(torch, dtype), teacher_d)
    exact = exact_value(heads)
    ready = {name: prepare(load, heads, exact) for name, load in PATHS.items()}
    runs = {
        name: functools.partial(with_gradients, loss, heads)
        for name, (loss, _) in ready.items()
        if loss is not None
    }
    unit = functools.partial(four_products, *heads)
    unit_ms, taken = timing.take_turns(on_torch.stopwatch(), unit, runs, repetitions)
    for name, (_, columns) in ready.items():
        row = {
            "n": shape[0], "d": shape[1], "teacher_d": teacher_d, "v": shape[2],
            "dtype": dtype, "path": name, "four_products_ms": round(unit_ms, 3),
        }  # fmt: skip
        result = taken.get(name)
        if result is not None:
            row |= {"ms": round(result.ms, 3), "over_unit": round(result.over_unit, 3)}
            row["spread"] = round(result.spread, 3)
        yield row | columns | {"repetitions": repetitions} | on_torch.provenance()
