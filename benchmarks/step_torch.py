"""torch's side of `run_step`: transformers' models, layers compiled or checkpointed.

AdamW (fused) or Adafactor, with moments and gradients in the trained weights' type, and
the head's product and cross-entropy under `torch.compile` in every mode. With a rank,
adapters are PEFT's, and all other weights are frozen in bfloat16. A mode is words that
"_" joins, the first of which says what is compiled:

    compiled              each layer, nothing recomputed
    checkpoint            nothing; each layer is recomputed
    checkpoint_compiled   each layer's attention and MLP; each layer is recomputed

and others may follow:

    float32               trained weights are float32, which autocast rounds to bfloat16
                          where they are read; otherwise they are bfloat16
    flex, varlen          torch's flex attention, which skips what is outside of a
                          window or a document, or its FlashAttention of documents of
                          several lengths, instead of SDPA
"""

import importlib.metadata
import inspect
import json
import sys
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import on_torch, step_rows, workers

GIB = 2**30
DEVICE = on_torch.DEVICE
ATTENTION = {"flex": "flex_attention", "varlen": "varlen"}
PROJECTIONS = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj",
    "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
}  # fmt: skip


class Model(torch.nn.Module):
    """transformers' decoder in train mode, and the head's matrix.

    Attributes:
        body: the decoder without its head.
        table: the input embedding, [V, D].
        W: the head's matrix, [V, D]; the table itself if the head is tied to it.
    """

    def __init__(self, model, length, mode):
        super().__init__()
        words = mode.split("_")
        kind = torch.float32 if "float32" in words else torch.bfloat16
        stored = torch.bfloat16 if model.lora_rank else kind
        self.body = new_body(model, length, words, stored).train()
        self.table = self.body.get_input_embeddings().weight
        W = torch.empty_like(self.table).normal_(std=0.02)  # as transformers draws it
        self.W = self.table if model.tied else torch.nn.Parameter(W)
        layers = self.body.layers
        if model.lora_rank:
            self.W.requires_grad_(False)
            self.body = adapted(self.body, model, kind is torch.float32)
        self._is_mixed = kind is torch.float32
        if words[0] == "checkpoint":
            self.body.gradient_checkpointing_enable({"use_reentrant": False})
        # A layer's number is an attribute of it, for which torch may compile it again.
        torch._dynamo.config.recompile_limit = 4 * model.layers
        for layer in layers if "compiled" in words else []:
            whole = words[0] == "compiled"
            for part in [layer] if whole else [layer.self_attn, layer.mlp]:
                part.compile()

    def forward(self, ids, labels, **more):
        """Mean loss of the tokens [B, T] whose labels are not -1."""
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self._is_mixed):
            states = self.body(input_ids=ids, **more).last_hidden_state
            return cross_entropy(states.flatten(0, 1), self.W, labels.flatten())


def new_body(model, length, words, dtype):
    """transformers' decoder without its head."""
    import transformers

    sizes = on_torch.decoder_config(model, length, use_cache=False)
    transformers.AttentionInterface.register("varlen", attention_of_documents)
    named = [ATTENTION[word] for word in words if word in ATTENTION]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModel.from_config(
            sizes, attn_implementation=named[0] if named else "sdpa", dtype=dtype
        )


def adapted(body, model, in_float32):
    """PEFT's model: adapters of the targets, and nothing else that is trained."""
    import peft

    config = peft.LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=[PROJECTIONS[name] for name in model.lora_targets],
    )
    return peft.get_peft_model(body, config, autocast_adapter_dtype=in_float32)


def attention_of_documents(
    module, query, key, value, attention_mask, scaling, cu_seqlens, longest, **_
):
    """FlashAttention within documents of [B, heads, T, D], for transformers."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict = {"scale": scaling}
    known = inspect.signature(varlen_attn).parameters
    options |= (
        {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    )
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    rows, _, length, _ = query.shape
    flat = [
        x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value)
    ]
    out = varlen_attn(*flat, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out.unflatten(0, (rows, length)), None


@torch.compile
def cross_entropy(hidden, W, labels):
    return F.cross_entropy((hidden @ W.T).float(), labels, ignore_index=-1)


def operands(batches, mode, lengths):
    """Arguments of `Model` for each batch [1, B, T]."""

    def on_device(x):
        return torch.as_tensor(np.array(x[0]), dtype=torch.long, device=DEVICE)

    made = [
        {"ids": on_device(b.tokens), "labels": on_device(b.labels)} for b in batches
    ]
    if lengths == "full":
        return made
    ends = [document_ends(batch.segment_ids[0]) for batch in batches]
    most = max(map(len, ends))
    for batch, more, own in zip(batches, made, ends, strict=True):
        more["position_ids"] = on_device(batch.positions)
        if "varlen" in mode.split("_"):
            # As many for every batch: documents without tokens follow the last.
            padded = np.pad(own, (1, most - len(own)), mode="edge")
            padded[0] = 0
            more["cu_seqlens"] = torch.as_tensor(padded, device=DEVICE)
            more["longest"] = batch.tokens.shape[-1]
    return made


def document_ends(segments):
    """Tokens before each end of a document, or of a row's padding; int32."""
    after = np.pad(segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return np.flatnonzero(segments != after).astype(np.int32) + 1


def optimizer_of(trained, name):
    """torch's optimizer of that name."""
    if name == "adafactor":
        # One weight after the other: updates of all at once would need their memory.
        return torch.optim.Adafactor(trained, lr=1e-5, weight_decay=0.1, foreach=False)
    assert name == "adamw"
    on_gpu = DEVICE == "cuda"
    return torch.optim.AdamW(trained, lr=1e-5, fused=on_gpu, weight_decay=0.1)


def end_of_step():
    """A function that waits for what has been dispatched until now, not for more."""
    if DEVICE != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def measure(job, config):
    """Columns: the allocator's peak, seconds, tokens/s."""
    mode, lengths = job["mode"], job["lengths"]
    model = Model(config.model, config.data.sequence_length, mode)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(trained, config.optimizer.name)
    batches = step_rows.batches(config, lengths)
    taken = operands(batches, mode, lengths)
    start, ends, losses, waits = time.perf_counter(), [], [], []
    for more in taken:
        loss = model(**more)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        waits.append(end_of_step())
        for wait in waits[-2:-1]:  # for the step before, while this one runs
            wait()
            ends.append(time.perf_counter())
    waits[-1]()
    ends.append(time.perf_counter())
    losses = [loss.item() for loss in losses]
    kind = str(trained[0].dtype).removeprefix("torch.")  # of gradients and moments, too
    row = {
        "compile_s": round(ends[0] - start, 1),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        **dict.fromkeys(("weights", "moments", "sums"), kind),
        **step_rows.columns(batches, ends),
    }
    row |= {
        "loss_read": "one step late",
        "mfu": utilisation(config, row["tokens_per_second"]),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }
    if DEVICE == "cuda":
        row["device_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    return row


def utilisation(config, rate):
    """By `jaxmem.train.mfu`, of the weights that our side trains and freezes."""
    from jaxmem.train import mfu
    from jaxmem.train.jobs import sft

    kind = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    peak = mfu.peak_of(kind, config.model.dtype)
    if peak is None:
        return ""
    ours = sft.SftProgram(config, config.model.vocab_size)
    weights = ours.state_shapes.params, ours.frozen_shapes
    length = config.data.sequence_length
    flops = mfu.flops_per_token(ours.model_config, *weights, length)
    return round(rate * flops / peak, 4)


def main(text: str) -> None:
    job = json.loads(text)
    try:
        import transformers

        from jaxmem.train import configuration

        config, _ = configuration.load(job["config"], job["overrides"])
        versions = {"transformers": transformers.__version__}
        if config.model.lora_rank:
            versions["peft"] = importlib.metadata.version("peft")
        sys.stdin.readline()  # whoever measures now has the device
        row = versions | measure(job, config)
    except Exception as error:  # the other variants are measured all the same
        traceback.print_exc(file=sys.stdout)
        row = {"note": workers.said(error)}
    workers.send({**row, "shares": [], **on_torch.provenance()})


if __name__ == "__main__":
    main(sys.argv[1])
