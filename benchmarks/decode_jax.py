"""jaxmem's side of `run_decode`: the variants one after another in this process."""

import functools
import json
import statistics
import sys
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import on_jax, results, trace_summary, workers
from benchmarks.run_decode import SAMPLING, Variant
from jaxmem.generate.config import GenerateConfig
from jaxmem.models import sampling
from jaxmem.models.config import ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.train import configuration

GIB = 2**30


def random_decoder(sizes: ModelConfig) -> Decoder:
    """Weights drawn on the device, prepared for the sampler."""

    @jax.jit
    def weights():
        return nnx.split(Decoder(sizes, rngs=nnx.Rngs(0)))[1]

    definition = nnx.split(nnx.eval_shape(lambda: Decoder(sizes, rngs=nnx.Rngs(0))))[0]
    return sampling.prepared(nnx.merge(definition, weights()))


def gemm_rate(sizes: ModelConfig, tokens: int) -> float:
    """Operations per second of the product into the feed-forward layer."""
    shape = tokens, sizes.hidden, sizes.ff
    x = jnp.ones(shape[:2], sizes.dtype)
    W = jnp.ones(shape[1:], sizes.dtype)
    run = jax.jit(jnp.matmul)
    watch = on_jax.stopwatch()
    calls = watch.calls(lambda: run(x, W))
    assert calls is not None
    return 2 * float(np.prod(shape)) / watch.seconds(lambda: run(x, W), calls)


def matrices(decoder: Decoder, of_experts: float) -> tuple[float, int]:
    """Numbers in the matrices of all blocks, and in the head's.

    Those of experts count as if a layer had `of_experts` of them.
    """
    sizes = decoder.config
    assert sizes.vocab_size is not None
    total = 0.0
    for x in jax.tree.leaves(nnx.split(decoder.blocks)[1]):
        share = of_experts / x.shape[1] if x.ndim == 4 else x.ndim == 3
        total += share * x.size
    return total, sizes.hidden * sizes.vocab_size


def prefill_operations(decoder: Decoder, rows: int, width: int) -> float:
    """Operations of the products: blocks, causal attention, the head at last tokens."""
    sizes = decoder.config
    blocks, head = matrices(decoder, sizes.experts.per_token)
    attention = 2 * sizes.layers * sizes.heads * sizes.head_dim * rows * width**2
    return 2.0 * rows * (width * blocks + head) + attention


def read_bytes(decoder: Decoder, rows: int, tokens: int) -> float:
    """Bytes that a step must read: matrices, keys and values of `tokens` a row.

    Of experts, as many as independent, even choices of the rows are expected to have.
    """
    sizes, chosen = decoder.config, 0.0
    if sizes.experts.count is not None:
        left_out = (1 - sizes.experts.per_token / sizes.experts.count) ** rows
        chosen = sizes.experts.count * (1 - left_out)
    size = jnp.dtype(sizes.dtype).itemsize
    cache = 2 * sizes.layers * rows * tokens * sizes.kv_heads * sizes.head_dim
    return size * (sum(matrices(decoder, chosen)) + cache)


class Programs:
    """The compiled `start` and `advance` of a variant.

    All variants of one shape share the first `start`: their states are alike.
    """

    def __init__(self, job: dict, variant: Variant, decoder: Decoder, starts: dict):
        self.job, self.variant, self.decoder = job, variant, decoder
        sizes = decoder.config
        assert sizes.vocab_size is not None
        config = GenerateConfig(**SAMPLING[variant.sampling])
        config = config.sampling(variant.new, sizes.vocab_size)
        sampler = sampling.Sampler(
            config, (), 0, keep_support=False, unroll=False if job["loop"] else None
        )
        rng = np.random.default_rng(0)
        shape = job["rows"], variant.prompt
        prompts = rng.integers(0, sizes.vocab_size, shape, np.int32)
        lengths = np.full(shape[0], variant.prompt, np.int32)
        keys = sampling.row_keys(jax.random.key(0), np.arange(shape[0]))
        self.prompts = prompts, lengths, keys
        options = {k: workers.value_of(v) for k, v in job["options"].items()}
        if jax.default_backend() == "gpu":
            options = sampling.COMPILER_OPTIONS | options
        jitted = functools.partial(jax.jit, compiler_options=options or None)
        if variant[2:] not in starts:
            began = time.perf_counter()
            lowered = jitted(sampler.start).lower(decoder, *self.prompts)
            starts[variant[2:]] = lowered.compile(), time.perf_counter() - began
        self._start, self.start_s = starts[variant[2:]]
        state = jax.eval_shape(sampler.start, decoder, *self.prompts)
        began = time.perf_counter()
        lowered = jitted(sampler.advance, donate_argnums=1).lower(
            decoder, state, np.int32(0)
        )
        self.compiled = lowered.compile()
        self.advance_s = time.perf_counter() - began

    def start(self):
        return self._start(self.decoder, *self.prompts)

    def advance(self, state, steps):
        """The state after so many more steps, when it is there."""
        until = np.int32(int(state.step) + steps)
        return jax.block_until_ready(self.compiled(self.decoder, state, until))

    def step_ms(self) -> list[float]:
        """A part's milliseconds a step, one after another."""
        part, made = self.job["part"], []
        state = self.advance(self.start(), part)
        left = (self.variant.new - 1) // part - 1
        for _ in range(min(self.job["parts"], left)):
            start = time.perf_counter()
            state = self.advance(state, part)
            made.append((time.perf_counter() - start) * 1e3 / part)
        return made

    def kernels(self) -> list[dict]:
        """Rows of a trace of one part: by class, then the kernels that take most."""
        operations = trace_summary.operations(self.compiled.as_text() or "")
        part = self.job["part"]
        state = self.advance(self.start(), part)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.advance(state, part)
            events = trace_summary.device_events(folder, operations)
        classes = trace_summary.summary(events, part)
        return [*classes, *trace_summary.kernels(events, part)]


def measure(job: dict, programs: Programs, rate: float) -> dict:
    """Columns of a row."""
    variant, decoder = programs.variant, programs.decoder
    rows, width, part = job["rows"], variant.prompt, job["part"]
    jax.block_until_ready(programs.start())
    seconds = on_jax.stopwatch().seconds(programs.start, 3)
    operations = prefill_operations(decoder, rows, width)
    steps = programs.step_ms()
    middle = statistics.median(steps)
    halfway = width + part * (len(steps) + 2) // 2
    read = read_bytes(decoder, rows, halfway)
    account = programs.compiled.memory_analysis()
    made = {
        "step_ms": round(middle, 3),
        "step_spread": round((max(steps) - min(steps)) / middle, 3),
        "tokens_per_second": round(rows / middle * 1e3),
        "read_gb": round(read / 1e9, 2),
        "tb_per_s": round(read / middle / 1e9, 2),
        "prefill_ms": round(seconds * 1e3, 2),
        "prefill_tokens_per_second": round(rows * width / seconds),
        "gemm_tflops": round(rate / 1e12, 1),
        "prefill_over_gemm": round(operations / seconds / rate, 3),
        "start_compile_s": round(programs.start_s, 1),
        "advance_compile_s": round(programs.advance_s, 1),
        "advance_temporary_gib": round(account.temp_size_in_bytes / GIB, 3),
    }
    if variant.name in job["trace"]:
        made["kernels"] = programs.kernels()
    return made


def main(text: str) -> None:
    job = json.loads(text)
    config, _ = configuration.load(job["config"], job["overrides"])
    decoder = random_decoder(config.model)
    rate, starts = gemm_rate(config.model, 128 * job["rows"]), {}
    for variant in (Variant(*each) for each in job["variants"]):
        row = {"path": "jaxmem", **variant.columns(job["rows"])}
        if time.time() > job["until"]:
            print(f"no time is left for {variant.name}", flush=True)
            continue
        try:
            row |= measure(job, Programs(job, variant, decoder, starts), rate)
        except Exception as error:  # the other variants are measured all the same
            traceback.print_exc(file=sys.stdout)
            row["note"] = workers.said(error)
        workers.send({**row, **results.provenance()})


if __name__ == "__main__":
    main(sys.argv[1])
