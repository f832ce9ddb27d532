"""torch's peers: what each published package gives, as one kind of call.

A loader imports what its peer needs when it is asked for, so that a missing package
takes away one peer and not the others.
"""

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.on_torch import IGNORED, Call


class Peer(NamedTuple):
    """A loader of its call, and the distribution that it comes from."""

    load: Callable[[], Call]
    distribution: str


def eager() -> Call:
    """Materialised float32 logits."""

    def call(h, W, y):
        logits = (h @ W.T).float()
        nll = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return {"logprob": -nll}

    return call


def eager_stats() -> Call:
    """Log-probabilities as in `eager`, and the entropy."""

    def call(h, W, y):
        ln_p = torch.log_softmax((h @ W.T).float(), 1)
        logprob = ln_p.gather(1, y[:, None])[:, 0]
        return {"logprob": logprob, "entropy": -(ln_p.exp() * ln_p).sum(1)}

    return call


def compiled(load: Callable[[], Call]) -> Callable[[], Call]:
    return lambda: torch.compile(load(), dynamic=False)


def liger_sm90() -> Call:
    """The CuTe kernels for Hopper: per-token losses and entropy (in bfloat16)."""
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # it waits for the device
    module = importlib.import_module(
        "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    )
    function = module.LigerFusedScaledCrossEntropySM90Function

    def call(h, W, y):
        nll, entropy = function.apply(h, W, y, 1.0, IGNORED, 1, True)
        return {"logprob": -nll, "entropy": entropy}

    return call


def liger_native() -> Call:
    """The kernels of liger-cute-kernels, on a group of one device."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction as tp
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, configure

    group = f"file://{tempfile.mkdtemp()}/group"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=group, rank=0, world_size=1
    )
    prepared: list[tuple[int, ...]] = []

    def call(h, W, y):
        if not prepared:  # room for the first problem, of one shape in this process
            sizes = FusedLinearCrossEntropyConfig(*h.shape, len(W))
            configured = configure(device=torch.device("cuda", 0), flsce=sizes)
            assert configured, "its frontend would fall back to Triton"
            prepared.append(h.shape)
        return {"logprob": -tp.apply(h, W, y, torch.distributed.group.WORLD)}

    return call


def liger_flce() -> Call:
    """The loss that makes its gradients in the forward pass: a sum, nothing a token."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction

    def call(h, W, y):
        plain = (None, None, IGNORED, 0.0, 0.0, "sum")
        return {"sum": -function.apply(h, W, y, *plain)[0]}

    return call


def cut_cross_entropy(filter_eps) -> Callable[[], Call]:
    def load() -> Call:
        from cut_cross_entropy import linear_cross_entropy

        def call(h, W, y):
            options = {"reduction": "none", "filter_eps": filter_eps}
            return {"logprob": -linear_cross_entropy(h, W, y, **options)}

        return call

    return load


def verl() -> Call:
    """Its Triton kernel, without the trainer that the package's __init__ imports."""
    for package in ("verl", "verl.utils"):
        _import_bare(package)
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")

    def call(h, W, y):
        logprob, entropy = module.linear_cross_entropy(h, W, y, 1.0, "none")
        return {"logprob": logprob, "entropy": entropy}

    return call


def _import_bare(package):
    """A package's modules become importable without running its __init__."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    sys.modules[package] = importlib.util.module_from_spec(spec)


PEERS = {
    "torch eager": Peer(eager, "torch"),
    "torch eager stats": Peer(eager_stats, "torch"),
    "torch.compile": Peer(compiled(eager), "torch"),
    "torch.compile stats": Peer(compiled(eager_stats), "torch"),
    "Liger SM90 scaled CE": Peer(liger_sm90, "liger-kernel"),
    "Liger native": Peer(liger_native, "liger-cute-kernels"),
    "Liger FLCE": Peer(liger_flce, "liger-kernel"),
    "CCE exact": Peer(cut_cross_entropy(None), "cut-cross-entropy"),
    "CCE filtered": Peer(cut_cross_entropy("high"), "cut-cross-entropy"),
    "verl": Peer(verl, "verl"),
}
