"""torch's side of the measurements: data, check, timing and memory of one shape."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks import exact, results, workers
from jaxmem.base import timing
from jaxmem.base.timing import OUT_OF_MEMORY

# hidden [N, D], W [V, D], labels [N] -> outputs [N] by name; or their sum, by "sum"
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
COTANGENTS = ("logprob", "entropy")
PEAKED = 20.0
IGNORED = -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stopwatch() -> timing.Stopwatch:
    return timing.Stopwatch(
        lambda made: torch.cuda.synchronize() if DEVICE == "cuda" else None,
        lambda error: isinstance(error, torch.OutOfMemoryError),
        0.15 if DEVICE == "cuda" else 0.0,
    )


def provenance() -> dict[str, str]:
    on_gpu = DEVICE == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else results.cpu_name()
    return {"device": device, "torch": torch.__version__, "date": results.today()}


def decoder_config(model, length, **more):
    """transformers' Llama, Qwen3, Gemma 3 or Qwen3-MoE, of a `ModelConfig`."""
    import transformers

    if model.self_attn.sinks:
        raise ValueError(
            "model.self_attn.sinks=True: this benchmark has no peer for gpt-oss"
        )
    sizes = dict(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden,
        intermediate_size=model.ff,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm.eps,
        max_position_embeddings=length,
        tie_word_embeddings=model.tied,
        **more,
    )
    if model.self_attn.window is not None:
        return transformers.Gemma3TextConfig(
            **sizes, sliding_window=model.self_attn.window
        )
    if model.experts.count is None and not model.qk_norm.enabled:
        return transformers.LlamaConfig(**sizes)
    if model.experts.count is None:
        return transformers.Qwen3Config(**sizes)
    config = transformers.Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=model.experts.ff,
        num_experts=model.experts.count,
        num_experts_per_tok=model.experts.per_token,
        norm_topk_prob=model.router.renormalised,
    )
    config._experts_implementation = "grouped_mm"
    return config


def problem(shape, dtype, std=1.0):
    """The recipe of `on_jax.problem`, with torch's own random numbers."""
    n, d, v = shape
    rng = torch.Generator(DEVICE).manual_seed(0)
    normal = functools.partial(torch.randn, generator=rng, device=DEVICE, dtype=dtype)
    h, W = normal(n, d) * std, normal(v, d) * d**-0.5
    y = torch.randint(0, v, (n,), generator=rng, device=DEVICE)
    return h.requires_grad_(), W.requires_grad_(), y


def cotangents(n_tokens):
    rng = torch.Generator(DEVICE).manual_seed(1)
    return {
        name: torch.randn(n_tokens, generator=rng, device=DEVICE)
        for name in COTANGENTS
    }  # fmt: skip


def forward(call: Call, h, W, y):
    """The result of a call where no gradient is asked for."""
    with torch.no_grad():
        return call(h.detach(), W.detach(), y)


def both(call: Call, h, W, y, g):
    """(outputs, (dh, dW)); a sum has no cotangents but 1."""
    made = call(h, W, y)
    scaled = [g[k].to(v.dtype) if k in g else None for k, v in made.items()]
    return made, torch.autograd.grad(list(made.values()), (h, W), scaled)


def check(call: Call, h, W, y) -> dict[str, Any]:
    """Columns: errors against float64 of a few rows at this shape."""
    rows = torch.as_tensor(exact.checked_rows(len(y)), device=DEVICE)
    on = torch.zeros(len(y), dtype=torch.bool, device=DEVICE)
    on[rows] = True
    g = {name: value * on for name, value in cotangents(len(y)).items()}
    is_sum = "sum" in forward(call, h, W, y)
    labels = torch.where(on, y, IGNORED) if is_sum else y  # of a sum: those rows alone
    made, (dh, dW) = both(call, h, W, labels, g)
    g_rows = [g[name][rows] * (name in made) for name in COTANGENTS]
    if is_sum:
        g_rows[0] = torch.ones_like(g_rows[0])
    with torch.no_grad():
        wide = [x.double() for x in (h[rows], W, *g_rows, dh[rows], dW)]
        hs, wide_W, *g_rows, dhs, dW = wide
        columns = torch.arange(len(W), device=DEVICE)
        want, grads = exact.head(torch, hs, wide_W, y[rows], columns, *g_rows)
        if is_sum:  # the error of the mean
            made = {"logprob": made["sum"].double() / len(rows)}
            want = {"logprob": want["logprob"].mean()}
        else:
            made = {k: v.detach()[rows] for k, v in made.items()}
        return exact.errors(made, (dhs, dW), want, grads)


def errors(call: Call, shape, dtype) -> dict[str, Any]:
    """Columns of `check` for ordinary logits, and for peaked ones with a suffix."""
    row = check(call, *problem(shape, dtype))
    peaked = check(call, *problem(shape, dtype, PEAKED))
    return {**row, **{f"{k}_std{PEAKED:.0f}": v for k, v in peaked.items()}}


def memory(call: Call, h, W, y, g) -> dict[str, Any]:
    """Columns: the allocator's peak over inputs, and over gradients where there are."""
    if DEVICE != "cuda":
        return {}
    row = {}
    for name, run in (
        ("forward", lambda: (forward(call, h, W, y), ())),
        ("forward_backward", lambda: both(call, h, W, y, g)),
    ):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        _, grads = run()
        peak = torch.cuda.max_memory_allocated() - held
        peak -= sum(x.nbytes for x in grads)
        row[f"{name}_peak_mib"] = round(peak / 2**20, 1)
    return row


def prepare(call: Call, shape, dtype, operands, g) -> dict[str, Any]:
    """Columns of errors and memory; a note where a path is not timed, and why."""
    try:
        row = errors(call, shape, dtype)
        if exact.is_wrong(row):
            return {**row, "note": "wrong"}
        return {**row, **memory(call, *operands, g=g)}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"note": OUT_OF_MEMORY}
    except Exception as error:  # a peer's own: said, and the others go on
        return {"note": f"failed: {workers.said(error)}"}


def measure(
    shape, dtype, calls: Mapping[str, Call], repetitions: int
) -> list[dict[str, Any]]:
    """One row a path: errors and memory, then ms, forward and with gradients."""
    operands, g = problem(shape, dtype), cotangents(shape[0])
    prepared = {k: prepare(f, shape, dtype, operands, g) for k, f in calls.items()}
    h, W, _ = operands
    runs = {}
    for name, call in calls.items():
        note = prepared[name].get("note")
        if note in (None, OUT_OF_MEMORY):
            runs[name, "forward"] = functools.partial(forward, call, *operands)
        if note is None:
            runs[name, "both"] = functools.partial(both, call, *operands, g)
    gemm_ms, taken = timing.take_turns(
        stopwatch(), lambda: h.detach() @ W.detach().T, runs, repetitions
    )
    return [
        {
            "n": shape[0], "d": shape[1], "v": shape[2],
            "dtype": str(dtype).removeprefix("torch."), "path": name,
            **timing.columns(
                shape, gemm_ms, taken.get((name, "forward")), taken.get((name, "both")),
                missing=columns.get("note", OUT_OF_MEMORY).partition(":")[0],
            ),
            **columns, "repetitions": repetitions, **provenance(),
        }
        for name, columns in prepared.items()
    ]  # fmt: skip
