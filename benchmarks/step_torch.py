"""torch's side of `run_step`: transformers' Qwen3, its layers compiled or checkpointed.

SDPA, fused AdamW with moments in the weights' type, and the head's product and
cross-entropy under `torch.compile` in every mode:

    compiled              each layer compiled, nothing recomputed
    checkpoint            each layer recomputed, not compiled
    checkpoint_compiled   each layer recomputed, its attention and its MLP compiled
"""

import json
import sys
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import on_torch, workers

GIB = 2**30
DEVICE = on_torch.DEVICE


def build(model, length, mode):
    """transformers' decoder without its head, in bfloat16, in train mode."""
    import transformers

    sizes = transformers.Qwen3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden,
        intermediate_size=model.ff,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = transformers.AutoModel.from_config(sizes, attn_implementation="sdpa")
    made = made.to(torch.bfloat16).train()
    if mode.startswith("checkpoint"):
        made.gradient_checkpointing_enable({"use_reentrant": False})
    # A layer's number is an attribute of it, for which torch may compile it again.
    torch._dynamo.config.recompile_limit = 4 * model.layers
    for layer in made.layers if mode != "checkpoint" else []:
        parts = [layer] if mode == "compiled" else [layer.self_attn, layer.mlp]
        for part in parts:
            part.compile()
    return made


@torch.compile
def cross_entropy(hidden, W, labels):
    return F.cross_entropy((hidden @ W.T).float(), labels)


def measure(mode, config):
    """Columns: the allocator's peak, seconds, tokens/s."""
    shape = config.data.batch_size, config.data.sequence_length
    model = build(config.model, shape[1], mode)
    W = model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, fused=DEVICE == "cuda", weight_decay=0.1
    )
    draw = torch.Generator(DEVICE).manual_seed(0)
    ids = torch.randint(0, len(W), shape, generator=draw, device=DEVICE)
    labels = ids.roll(-1, dims=1).flatten()
    start, ends, losses, unread = time.perf_counter(), [], [], None
    for _ in range(config.run.steps):
        hidden = model(input_ids=ids).last_hidden_state.flatten(0, 1)
        loss = cross_entropy(hidden, W, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        unread, read = loss.detach(), unread  # while the next step runs
        if read is not None:
            losses.append(read.item())
            ends.append(time.perf_counter())
    assert unread is not None
    losses.append(unread.item())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ends.append(time.perf_counter())
    rate = ids.numel() / float(np.median(np.diff(ends)[1:]))
    row = {
        "compile_s": round(ends[0] - start, 1),
        "seconds": round(ids.numel() / rate, 4),
        "tokens_per_second": round(rate),
        "loss_read": "one step late",
        "mfu": utilisation(config, model, rate),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }
    if DEVICE == "cuda":
        row["device_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return row


def utilisation(config, model, rate):
    """By the formula of `jaxmem.train.mfu`; the table is the head's matrix, too."""
    from jaxmem.train import mfu

    kind = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    peak = mfu.peak_of(kind, config.model.dtype)
    if peak is None:
        return ""
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    sizes, length = config.model, config.data.sequence_length
    attention = 12 * sizes.layers * sizes.heads * sizes.head_dim * length
    return round(rate * (6 * matrices + attention) / peak, 4)


def main(text: str) -> None:
    job = json.loads(text)
    try:
        import transformers

        from jaxmem.train import configuration

        config, _ = configuration.load(job["config"], job["overrides"])
        versions = {"transformers": transformers.__version__}
        sys.stdin.readline()  # whoever measures now has the device
        row = versions | measure(job["mode"], config)
    except Exception as error:  # the other variants are measured all the same
        traceback.print_exc(file=sys.stdout)
        row = {"note": workers.said(error)}
    workers.send({**row, "shares": [], **on_torch.provenance()})


if __name__ == "__main__":
    main(sys.argv[1])
