"""torch's side of `run_step`: transformers' models, layers compiled or checkpointed.

SDPA, fused AdamW with moments and gradients in the weights' type, which is bfloat16 if
a mode does not say otherwise, and the head's product and cross-entropy under
`torch.compile` in every mode:

    compiled              each layer compiled, nothing recomputed
    compiled_float32      the same with weights in float32, which autocast rounds to
                          bfloat16 where they are read
    compiled_flex         the same with torch's flex attention, which skips what is
                          outside of a window
    checkpoint            each layer recomputed, not compiled
    checkpoint_compiled   each layer recomputed, its attention and its MLP compiled
"""

import functools
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
    """transformers' decoder without its head, in train mode."""
    import transformers

    sizes = on_torch.decoder_config(model, length, use_cache=False)
    attention = "flex_attention" if "flex" in mode else "sdpa"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        network = transformers.AutoModel.from_config(
            sizes, attn_implementation=attention
        )
    network = network.to(weights_type(mode)).train()
    if model.lora_rank:
        adapt(network, model)
    if mode.startswith("checkpoint"):
        network.gradient_checkpointing_enable({"use_reentrant": False})
    # A layer's number is an attribute of it, for which torch may compile it again.
    torch._dynamo.config.recompile_limit = 4 * model.layers
    for layer in network.layers if mode != "checkpoint" else []:
        whole = mode.startswith("compiled")
        parts = [layer] if whole else [layer.self_attn, layer.mlp]
        for part in parts:
            part.compile()
    return network


def weights_type(mode):
    return torch.float32 if mode.endswith("_float32") else torch.bfloat16


class Adapted(torch.nn.Module):
    """A linear layer that is not trained, with an adapter that is."""

    def __init__(self, linear, rank, scale):
        super().__init__()
        self.linear, self.scale = linear, scale
        wide = functools.partial(torch.nn.Linear, bias=False, device=DEVICE)
        self.lora_a = wide(linear.in_features, rank, dtype=torch.bfloat16)
        self.lora_b = wide(rank, linear.out_features, dtype=torch.bfloat16)
        torch.nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.linear(x) + self.lora_b(self.lora_a(x)) * self.scale


def adapt(body, model):
    """Adapters of attention's projections, and nothing else that is trained."""
    body.requires_grad_(False)
    for layer in body.layers:
        for name in (f"{target[0]}_proj" for target in model.lora_targets):
            linear = getattr(layer.self_attn, name)
            adapted = Adapted(
                linear, model.lora_rank, model.lora_alpha / model.lora_rank
            )
            setattr(layer.self_attn, name, adapted)


@torch.compile
def cross_entropy(hidden, W, labels):
    return F.cross_entropy((hidden @ W.T).float(), labels)


def measure(mode, config):
    """Columns: the allocator's peak, seconds, tokens/s."""
    shape = config.data.batch_size, config.data.sequence_length
    model = build(config.model, shape[1], mode)
    W = model.get_input_embeddings().weight
    is_mixed = weights_type(mode) is torch.float32
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=1e-5, fused=DEVICE == "cuda", weight_decay=0.1
    )
    draw = torch.Generator(DEVICE).manual_seed(0)
    ids = torch.randint(0, len(W), shape, generator=draw, device=DEVICE)
    labels = ids.roll(-1, dims=1).flatten()
    start, ends, losses, unread = time.perf_counter(), [], [], None
    for _ in range(config.run.steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_mixed):
            hidden = model(input_ids=ids).last_hidden_state.flatten(0, 1)
            loss = cross_entropy(hidden, W, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
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
    kind = str(trained[0].dtype).removeprefix("torch.")  # of gradients and moments, too
    row = {
        "compile_s": round(ends[0] - start, 1),
        **dict.fromkeys(("weights", "moments", "sums"), kind),
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
    sizes, length = config.model, config.data.sequence_length
    multiplied, trained = 0.0, 0.0
    for p in model.parameters():
        share = sizes.experts_per_token / sizes.experts if p.ndim == 3 else 1
        count = share * p.numel() * (p.ndim > 1)
        multiplied, trained = multiplied + count, trained + count * p.requires_grad
    attention = 12 * sizes.layers * sizes.heads * sizes.head_dim * length
    return round(rate * (4 * multiplied + 2 * trained + attention) / peak, 4)


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
