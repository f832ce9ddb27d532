"""torch's side of `run_experts`: transformers' experts of Qwen3-MoE, by `grouped_mm`.

Their rate is of torch's own dense product in this process.
"""

import functools
import json
import sys

import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from benchmarks import on_torch, workers
from benchmarks.run_experts import Sizes, row
from jaxmem.base import timing

DEVICE, DTYPE = on_torch.DEVICE, torch.bfloat16


def experts(sizes: Sizes, implementation: str = "grouped_mm"):
    """transformers' module, with random weights."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.ff,
        num_experts=sizes.experts, num_experts_per_tok=sizes.chosen,
    )  # fmt: skip
    config._experts_implementation = implementation
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = modeling_qwen3_moe.Qwen3MoeExperts(config).to(DTYPE)
    for weights in module.parameters():
        torch.nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
    return module


def problem(sizes: Sizes):
    """(x, choices, scale, slope)."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    shape = sizes.tokens, sizes.hidden
    x, slope = (
        torch.randn(shape, generator=rng, device=DEVICE, dtype=DTYPE) for _ in range(2)
    )
    scale = torch.rand((sizes.tokens, sizes.chosen), generator=rng, device=DEVICE)
    choices = torch.from_numpy(sizes.choices()).to(DEVICE, torch.long)
    return x.requires_grad_(), choices, scale.to(DTYPE).requires_grad_(), slope


def paths(sizes: Sizes, name: str, run, module, given) -> dict:
    """The layer, and both kinds of gradients."""
    x, choices, scale, slope = given

    def forward():
        with torch.no_grad():
            return run(x, choices, scale)

    def gradients(of):
        return torch.autograd.grad(run(x, choices, scale), of, slope)

    every = [x, scale, *module.parameters()]
    return {
        f"layer, {name}": (forward, 3),
        f"layer's gradients of x, {name}": (lambda: gradients([x, scale]), 6),
        f"layer's gradients, {name}": (lambda: gradients(every), 9),
    }


def main(text: str) -> None:
    *sizes, repetitions = json.loads(text)
    sizes = Sizes(*sizes)
    module, given = experts(sizes), problem(sizes)
    found = paths(sizes, "transformers", module, module, given)
    if DEVICE == "cuda":
        found |= paths(
            sizes, "transformers, compiled", torch.compile(module), module, given
        )
    wide = torch.randn((sizes.rows, sizes.hidden), device=DEVICE, dtype=DTYPE)
    w = torch.randn((sizes.hidden, sizes.ff), device=DEVICE, dtype=DTYPE)
    runs = {}
    for name, (run, _) in found.items():
        try:
            run()
            runs[name] = run
        except Exception as error:  # the other paths are measured all the same
            print(f"{name}: {workers.said(error)}", flush=True)
    unit = functools.partial(torch.mm, wide, w)
    unit_ms, taken = timing.take_turns(on_torch.stopwatch(), unit, runs, repetitions)
    here = on_torch.provenance() | {"transformers": transformers.__version__}
    workers.send(row(sizes, "torch dense", timing.Timing(unit_ms, 1.0, 0.0), 1) | here)
    for name, timed in taken.items():
        if timed is not None:
            workers.send(row(sizes, name, timed, found[name][1]) | here)


if __name__ == "__main__":
    main(sys.argv[1])
