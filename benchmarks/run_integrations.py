"""Tunix's own losses with its head and with jaxmem's: ms and GiB of a step.

    python -m benchmarks.run_integrations --out integrations_h100.csv
    python -m benchmarks.run_integrations --model small --rows 4 --prompt 64 \
        --completion 448 --chunk 256 --out integrations_cpu.csv

One row per loss, model and head: the gradient by all weights of Tunix's GRPO loss (with
the entropy that it always logs), of its supervised loss, or of its distillation loss
(after the forward pass of a teacher of the same size; over all columns, or over the
teacher's 64 most likely ones). Weights are random, of a Qwen3 with the published widths
and vocabulary and `--layers` layers. Head "tunix_chunked" is Tunix's own chunked GRPO,
from its version 0.1.8 on. Temporary GiB are the compiler's account of that program;
peak GiB are the allocator's, of a process that ran nothing else.
"""

import argparse
import functools
import importlib.metadata
import inspect
import itertools
import statistics
import time
import types

import jax
import jax.numpy as jnp

from benchmarks import on_jax, results, workers
from jaxmem.base import timing
from jaxmem.integrations import tunix

KEYS = ("loss", "model", "head", "tunix", "layers", "tokens", "device")
HEADS = "tunix", "jaxmem", "tunix_chunked"
# Published widths; `small` for a CPU, and `tiny` for tests.
MODELS = {
    "0.6b": dict(embed_dim=1024, hidden_dim=3072, num_heads=16, num_kv_heads=8,
                 head_dim=128, vocab_size=151936, use_tied_embedding=True),
    "8b": dict(embed_dim=4096, hidden_dim=12288, num_heads=32, num_kv_heads=8,
               head_dim=128, vocab_size=151936, use_tied_embedding=False),
    "small": dict(embed_dim=128, hidden_dim=256, num_heads=2, num_kv_heads=1,
                  head_dim=64, vocab_size=32768, use_tied_embedding=True),
    "tiny": dict(embed_dim=32, hidden_dim=48, num_heads=2, num_kv_heads=1, head_dim=16,
                 vocab_size=512, use_tied_embedding=True),
}  # fmt: skip


class Batch:
    """Random tokens of rows of a prompt and a completion, as a decoder reads them."""

    def __init__(self, args, vocab_size):
        shape = args.rows, args.prompt + args.completion
        self.prompt, self.vocab_size = args.prompt, vocab_size
        self.ids = jax.random.randint(jax.random.key(1), shape, 3, vocab_size)
        self.positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)

    def attention(self):
        from tunix.sft import utils

        return utils.make_causal_attn_mask(jnp.ones(self.ids.shape, bool))


def grpo(batch, **options):
    """model -> Tunix's loss of one micro-batch."""
    from tunix.rl import algo_core

    completion_ids = batch.ids[:, batch.prompt :]
    ones = jnp.ones(completion_ids.shape, jnp.float32)
    example = types.SimpleNamespace(
        prompt_ids=batch.ids[:, : batch.prompt], completion_ids=completion_ids,
        completion_mask=ones, advantages=jnp.linspace(-1.0, 1.0, len(batch.ids)),
        old_per_token_logps=-12 * ones, ref_per_token_logps=-12 * ones,
        segment_ids=None, segment_positions=None,
    )  # fmt: skip
    config = types.SimpleNamespace(
        beta=0.04, epsilon=0.2, loss_algo="grpo", epsilon_high=0.2, epsilon_c=3.0,
        loss_agg_mode="token-mean", temperature=1.0, kl_loss_mode="kl",
        kl_clamp_value=None,
    )  # fmt: skip

    def value(model):
        loss = algo_core.grpo_loss_fn(
            model, example, config, pad_id=0, eos_id=2, **options
        )
        return loss[0] if isinstance(loss, tuple) else loss.primary_loss.compute()

    return value


def sft(batch):
    """model -> Tunix's supervised loss of the completions."""
    from tunix.sft import peft_trainer

    mask, attention = batch.positions >= batch.prompt, batch.attention()
    return lambda model: peft_trainer._default_loss_fn(
        model, batch.ids, mask.astype(jnp.int32), batch.positions, attention
    )


def distill(batch, teacher, top_k):
    """model -> Tunix's loss of the completions, at its temperature of 2."""
    from tunix.distillation import strategies

    def forward(model, ids, positions, attention):
        return model(ids, positions, None, attention)[0][:, batch.prompt - 1 : -1]

    def labels(ids, **_):
        return jax.nn.one_hot(ids[:, batch.prompt :], batch.vocab_size)

    inputs = {
        "ids": batch.ids, "positions": batch.positions, "attention": batch.attention()
    }  # fmt: skip
    strategy = strategies.LogitStrategy(forward, forward, labels, distill_top_k=top_k)
    output = strategy.get_teacher_outputs(teacher, inputs)
    return lambda model: strategy.get_train_loss(model, output, inputs)[0]


LOSSES = {
    "grpo": grpo,
    "sft": sft,
    "distill": functools.partial(distill, top_k=0),
    "distill_top_64": functools.partial(distill, top_k=64),
}


def model_of(name, layers):
    """Definition and random bfloat16 weights of a Qwen3, made on the device."""
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=layers, rope_theta=1_000_000, norm_eps=1e-6, dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16, **MODELS[name],
    )  # fmt: skip

    def build():
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    return nnx.split(nnx.eval_shape(build))[0], jax.jit(lambda: nnx.state(build()))()


def step_of(args, definition):
    """(weights, the teacher's weights if any) -> loss and its gradient by weights."""
    from flax import nnx

    options = {}
    if args.head == ["tunix_chunked"]:  # Tunix counts the tokens of one row
        options["compute_logps_chunk_size"] = args.chunk // args.rows
    batch = Batch(args, MODELS[args.model[0]]["vocab_size"])

    def step(weights, *of_teacher):
        teacher = [nnx.merge(definition, x) for x in of_teacher]
        loss = LOSSES[args.loss[0]](batch, *teacher, **options)
        return jax.value_and_grad(lambda w: loss(nnx.merge(definition, w)))(weights)

    return step


def measure(args):
    """Columns: milliseconds, GiB, and the loss itself."""
    definition, *weights = model_of(args.model[0], args.layers)
    if args.loss[0].startswith("distill"):  # a teacher with the weights in reverse
        weights.append(jax.tree.map(lambda x: x[::-1], weights[0]))
    compiled = jax.jit(step_of(args, definition)).lower(*weights).compile()
    temporary = on_jax.memory_bytes(compiled)[2]
    run = functools.partial(compiled, *weights)
    loss, seconds = float(jax.block_until_ready(run())[0]), []
    for _ in range(args.repetitions):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "temporary_gib": round(temporary / 2**30, 3),
        "loss_value": round(loss, 5),
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "peak_gib": round(peak / 2**30, 2) if peak else "",
    }


def work(args):
    """Send the row of one loss, model and head."""
    row = {
        "loss": args.loss[0], "model": args.model[0], "head": args.head[0],
        "tunix": importlib.metadata.version("google-tunix"), "layers": args.layers,
        "rows": args.rows, "tokens": args.rows * args.completion,
    }  # fmt: skip
    if args.head == ["jaxmem"]:
        tunix.apply(chunk=args.chunk)
    try:
        row |= measure(args)
    except Exception as error:
        if not on_jax.is_out_of_memory(error):
            raise
        row |= dict.fromkeys(("temporary_gib", "ms", "peak_gib"), timing.OUT_OF_MEMORY)
    workers.send(row | results.provenance())


def drive(args):
    """Measure each loss, model and head in a process of its own."""
    sizes = ("layers", "rows", "prompt", "completion", "chunk", "repetitions")
    common = ["--worker", *(f"--{name}={getattr(args, name)}" for name in sizes)]
    with workers.compilation_cache() as environment:
        for loss, model, head in itertools.product(args.loss, args.model, args.head):
            given = [f"--loss={loss}", f"--model={model}", f"--head={head}"]
            module = "benchmarks.run_integrations"
            for row in workers.start(module, environment, common + given):
                results.merge(args.out, [row], KEYS)
                print(row, flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--loss", action="append", choices=list(LOSSES))
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--head", action="append", choices=HEADS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--completion", type=int, default=1024, help="tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens at a time")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default="integrations.csv", help="in results/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.loss = args.loss or list(LOSSES)
    args.model = args.model or ["0.6b", "8b"]
    args.head = args.head or ["tunix", "jaxmem"]
    (work if args.worker else drive)(args)


if __name__ == "__main__":
    main()
