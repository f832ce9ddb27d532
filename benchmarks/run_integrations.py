"""Tunix's own losses, as they are and with jaxmem's head: ms and GiB of a step.

    python -m benchmarks.run_integrations --out integrations_h200.csv

One row a loss, model and head: the gradient of Tunix's GRPO loss (with the entropy that
it always logs), its supervised loss, or its distillation loss (after the forward pass
of a teacher of the same size; over all columns, or the teacher's 64 most likely ones),
by all weights, random ones, of a Qwen3 with the published widths and vocabulary, and
`--layers` of its layers. Temporary GiB are the compiler's account of that program; peak
GiB the allocator's, of a process that ran nothing else. Needs google-tunix 0.1.7.
"""

import argparse
import functools
import importlib.metadata
import inspect
import itertools
import statistics
import time
import types

from benchmarks import results, workers

KEYS = ("loss", "model", "head", "tunix", "layers", "tokens", "device")
LOSSES = "grpo", "sft", "distill", "distill_top_64"
HEADS = "tunix", "jaxmem", "tunix_chunked"
DISTILLED = {"distill": 0, "distill_top_64": 64}  # Tunix's `distill_top_k`; 0 for all
# The published widths; one for a CPU; one that only shows that this runs.
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


def model_of(name, layers):
    """Random bfloat16 weights, made on the device."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=layers, rope_theta=1_000_000, norm_eps=1e-6, dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16, **MODELS[name],
    )  # fmt: skip
    make = jax.jit(lambda: nnx.state(qwen3.Qwen3(config, rngs=nnx.Rngs(0))))
    definition = nnx.split(
        nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    )[0]
    return definition, make()


def tokens_of(rows, length, vocab_size):
    import jax

    shape = rows, length
    return jax.random.randint(jax.random.key(1), shape, 3, vocab_size)


def grpo(rows, prompt, completion, vocab_size, **chunked):
    """model -> Tunix's loss of one micro-batch."""
    import jax.numpy as jnp
    from tunix.rl import algo_core

    ids = tokens_of(rows, prompt + completion, vocab_size)
    zeros = jnp.zeros((rows, completion), jnp.float32)
    example = types.SimpleNamespace(
        prompt_ids=ids[:, :prompt], completion_ids=ids[:, prompt:],
        completion_mask=zeros + 1, advantages=jnp.linspace(-1.0, 1.0, rows),
        old_per_token_logps=zeros - 12, ref_per_token_logps=zeros - 12,
        segment_ids=None, segment_positions=None,
    )  # fmt: skip
    config = types.SimpleNamespace(
        beta=0.04, epsilon=0.2, loss_algo="grpo", epsilon_high=0.2, epsilon_c=3.0,
        loss_agg_mode="token-mean", temperature=1.0, kl_loss_mode="kl",
        kl_clamp_value=None,
    )  # fmt: skip

    def value(model):
        made = algo_core.grpo_loss_fn(
            model, example, config, pad_id=0, eos_id=2, **chunked
        )
        return made[0] if isinstance(made, tuple) else made.primary_loss.compute()

    return value


def sft(rows, prompt, completion, vocab_size):
    """Likewise; prompts are not counted."""
    import jax.numpy as jnp
    from tunix.sft import peft_trainer, utils

    length = prompt + completion
    ids = tokens_of(rows, length, vocab_size)
    mask = jnp.broadcast_to(jnp.arange(length) >= prompt, ids.shape)
    places = jnp.broadcast_to(jnp.arange(length), ids.shape)
    attention = utils.make_causal_attn_mask(jnp.ones(ids.shape, bool))
    return lambda model: peft_trainer._default_loss_fn(
        model, ids, mask.astype(jnp.int32), places, attention
    )


def distill(top_k, rows, prompt, completion, vocab_size):
    """Tunix's strategy, at its T = 2, over the completions' tokens; and its inputs."""
    import jax
    import jax.numpy as jnp
    from tunix.distillation import strategies
    from tunix.sft import utils

    length = prompt + completion
    ids = tokens_of(rows, length, vocab_size)
    inputs = {
        "ids": ids, "places": jnp.broadcast_to(jnp.arange(length), ids.shape),
        "attention": utils.make_causal_attn_mask(jnp.ones(ids.shape, bool)),
    }  # fmt: skip

    def forward(model, ids, places, attention):
        return model(ids, places, None, attention)[0][:, prompt - 1 : -1]

    def labels(ids, **_):
        return jax.nn.one_hot(ids[:, prompt:], vocab_size)

    strategy = strategies.LogitStrategy(forward, forward, labels, distill_top_k=top_k)
    return strategy, inputs


def step_of(loss, sizes, definition, **chunked):
    """Weights, and for distillation the teacher's weights, to loss and gradient."""
    import jax
    from flax import nnx

    if loss not in DISTILLED:
        value = {"grpo": grpo, "sft": sft}[loss](*sizes, **chunked)
        return jax.value_and_grad(lambda w: value(nnx.merge(definition, w)))
    strategy, inputs = distill(DISTILLED[loss], *sizes)

    def step(weights, of_teacher):
        teacher = nnx.merge(definition, of_teacher)
        output = strategy.get_teacher_outputs(teacher, inputs)

        def total(weights):
            student = nnx.merge(definition, weights)
            return strategy.get_train_loss(student, output, inputs)[0]

        return jax.value_and_grad(total)(weights)

    return step


def measure(args, loss, model):
    """Columns: milliseconds, GiB, and the loss itself."""
    import jax

    definition, *weights = model_of(model, args.layers)
    if loss in DISTILLED:  # the same numbers, in another order
        weights.append(jax.tree.map(lambda x: x[::-1], weights[0]))
    sizes = args.rows, args.prompt, args.completion, MODELS[model]["vocab_size"]
    chunked = {}
    if args.head == ["tunix_chunked"]:  # Tunix counts the tokens of one row
        chunked["compute_logps_chunk_size"] = args.chunk // args.rows
    step = step_of(loss, sizes, definition, **chunked)
    compiled = jax.jit(step).lower(*weights).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    row = {"temporary_gib": round(temporary / 2**30, 3)}
    run = functools.partial(compiled, *weights)
    row["loss_value"] = round(float(jax.block_until_ready(run())[0]), 5)
    seconds = []
    for _ in range(args.repetitions):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return row | {
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "peak_gib": round(peak / 2**30, 2) if peak else "",
    }


def work(args):
    """A worker's part: one row."""
    from jaxmem.integrations import tunix
    from jaxmem.timing import OUT_OF_MEMORY

    (loss,), (model,), (head,) = args.loss, args.model, args.head
    version = importlib.metadata.version("google-tunix")
    row = {"loss": loss, "model": model, "head": head, "tunix": version}
    row |= {"layers": args.layers, "rows": args.rows}
    row |= {"tokens": args.rows * args.completion}
    if head == "jaxmem":
        tunix.apply(chunk=args.chunk)
    try:
        row |= measure(args, loss, model)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row |= dict.fromkeys(("ms", "peak_gib", "temporary_gib"), OUT_OF_MEMORY)
    workers.send(row | results.provenance())


def drive(args):
    with workers.compilation_cache() as environment:
        for loss, model, head in itertools.product(args.loss, args.model, args.head):
            asked = ["--worker", f"--loss={loss}", f"--model={model}", f"--head={head}"]
            asked += [
                f"--{name}={getattr(args, name)}"
                for name in ("layers", "rows", "prompt", "completion", "chunk",
                             "repetitions")
            ]  # fmt: skip
            module = "benchmarks.run_integrations"
            for row in workers.start(module, environment, asked):
                results.merge(args.out, [row], KEYS)
                print({k: v for k, v in row.items() if k != "date"}, flush=True)


def parser():
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    made.add_argument("--loss", action="append", choices=LOSSES)
    made.add_argument("--model", action="append", choices=list(MODELS))
    made.add_argument("--head", action="append", choices=HEADS)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--rows", type=int, default=8)
    made.add_argument("--prompt", type=int, default=256)
    made.add_argument("--completion", type=int, default=1024)
    made.add_argument("--chunk", type=int, default=1024)
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--out", default="integrations.csv", help="in benchmarks/results")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.loss = args.loss or list(LOSSES)
    args.model = args.model or ["0.6b", "8b"]
    args.head = args.head or ["tunix", "jaxmem"]
    work(args) if args.worker else drive(args)


if __name__ == "__main__":
    main()
