"""Seconds of a step that verifies drafts, by its width; see `run_drafting`.

A step reads `width` tokens of every row behind its cache, by the decoder's own layers,
computes logits at all of them, and draws a token at each. Of these, `KEPT` at most are
kept: the others' slots are taken again, or masked.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks import decode_jax, results, trace_summary
from jaxmem.generate.config import GenerateConfig
from jaxmem.models import kv_cache, sampling
from jaxmem.models.decoder import Decoder
from jaxmem.train import configuration

KEPT = 2  # tokens of a row and step
GIB = 2**30


class Variant(NamedTuple):
    """A case: the width of a step, where rows write, and the length of the prompts."""

    width: int
    slots: str  # "shared" by all rows, or of each "row"
    prompt: int


def variants(prompts: list[int], widths: list[int]) -> list[Variant]:
    """The step of today's sampler, and then each width, by the length of prompts."""
    return [
        variant
        for prompt in prompts
        for variant in (
            Variant(1, "shared", prompt),
            *(Variant(width, "row", prompt) for width in widths),
            *(Variant(width, "shared", prompt) for width in widths if width == 5),
        )
    ]


class VerifierState(NamedTuple):
    """The operands of a step."""

    tokens: jax.Array  # [B, width]
    cache: kv_cache.Cache
    step: jax.Array


class Verifier:
    """The compiled steps of a variant, `part` at a time."""

    def __init__(
        self, variant: Variant, decoder: Decoder, rows: int, part: int, parts: int
    ):
        self.variant, self.decoder, self.part, self.parts = (
            variant,
            decoder,
            part,
            parts,
        )
        sizes = decoder.config
        assert sizes.vocab_size is not None
        config = GenerateConfig().sampling(1, sizes.vocab_size)
        self.sampler = sampling.Sampler(config, (), 0, keep_support=False)
        self.keys = sampling.row_keys(jax.random.key(0), np.arange(rows))
        rng = np.random.default_rng(0)
        shape = rows, variant.prompt
        self.prompts = rng.integers(0, sizes.vocab_size, shape, np.int32)
        # Each step of rows that share slots takes `width` of them.
        taken = variant.width if variant.slots == "shared" else KEPT
        steps = part * (parts + 1)
        self.room = -(-(variant.prompt + steps * taken + variant.width) // 8) * 8
        options = None
        if jax.default_backend() == "gpu":
            options = sampling.COMPILER_OPTIONS
        jitted = functools.partial(jax.jit, compiler_options=options)
        self._start = jitted(self.start)
        state = jax.eval_shape(self.start, decoder)
        began = time.perf_counter()
        self.compiled = (
            jitted(self.advance, donate_argnums=1)
            .lower(decoder, state, np.int32(0))
            .compile()
        )
        self.compile_s = time.perf_counter() - began

    def start(self, decoder: Decoder) -> VerifierState:
        """The state after the prompts."""
        rows, prompt = self.prompts.shape
        lengths = np.full(rows, prompt, np.int32)
        _, cache = decoder.prefill(self.prompts, lengths, self.room)
        if self.variant.slots == "row":
            cache = kv_cache.by_row(cache)
        tokens = jnp.zeros((rows, self.variant.width), jnp.int32)
        return VerifierState(tokens, cache, jnp.asarray(0))

    def advance(
        self, decoder: Decoder, state: VerifierState, until: Any
    ) -> VerifierState:
        """The state after some more steps."""
        definition, weights = decoder.in_compute_type()
        width, unroll = self.variant.width, self.sampler.is_unrolled
        keys = jnp.repeat(self.keys, width)

        def step(state: VerifierState) -> VerifierState:
            model = nnx.merge(definition, weights)
            before = state.cache.lengths
            if width == 1:
                hidden, cache = model.decode(
                    state.tokens[:, 0], state.cache, unroll=unroll
                )
            else:
                hidden, cache = model.decode_several(
                    state.tokens, state.cache, unroll=unroll
                )
                cache = kv_cache.shortened(cache, before + min(width, KEPT))
            logits = model.logits(hidden).reshape(len(keys), -1)
            numbers = (before[:, None] + jnp.arange(width)).reshape(-1)
            ended = jnp.zeros(len(keys), bool)
            drawn, _ = self.sampler.draw_tokens(keys, numbers, logits, ended)
            tokens = drawn.tokens.reshape(state.tokens.shape)
            return VerifierState(tokens, cache, state.step + 1)

        return lax.while_loop(lambda state: state.step < until, step, state)

    def run(self, state: VerifierState) -> VerifierState:
        """One more part, when it is there."""
        until = np.int32(int(state.step) + self.part)
        return jax.block_until_ready(self.compiled(self.decoder, state, until))

    def step_ms(self) -> list[float]:
        """A part's milliseconds a step, one after another."""
        state, made = self.run(jax.block_until_ready(self._start(self.decoder))), []
        for _ in range(self.parts):
            began = time.perf_counter()
            state = self.run(state)
            made.append((time.perf_counter() - began) * 1e3 / self.part)
        return made

    def kernels(self) -> list[dict]:
        """Rows of a trace of one part, by class of kernel, then the longest kernels."""
        operations = trace_summary.operations(self.compiled.as_text() or "")
        state = self.run(self._start(self.decoder))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(state)
            events = trace_summary.device_events(folder, operations)
        classes = trace_summary.summary(events, self.part)
        return [*classes, *trace_summary.kernels(events, self.part)]


def measure(made: Verifier, rows: int) -> dict[str, Any]:
    """The columns of a row."""
    variant, decoder = made.variant, made.decoder
    steps = made.step_ms()
    middle = statistics.median(steps)
    kept = min(KEPT, variant.width)
    halfway = variant.prompt + kept * made.part * (made.parts + 2) // 2
    read = decode_jax.read_bytes(decoder, rows, halfway)
    sizes = decoder.config
    operations = (
        2
        * rows
        * variant.width
        * sum(decode_jax.matrices(decoder, sizes.experts.per_token))
    )
    account = made.compiled.memory_analysis()
    assert account is not None
    return {
        "width": variant.width,
        "slots_of": variant.slots,
        "rows": rows,
        "prompt": variant.prompt,
        "slots": made.room,
        "step_ms": round(middle, 3),
        "step_spread": round((max(steps) - min(steps)) / middle, 3),
        "read_gb": round(read / 1e9, 2),
        "tb_per_s": round(read / middle / 1e9, 2),
        "product_tflop": round(operations / 1e12, 2),
        "product_tflops": round(operations / middle / 1e9, 1),
        "compile_s": round(made.compile_s, 1),
        "temporary_gib": round(account.temp_size_in_bytes / GIB, 3),
    }


def run(args: Any) -> Iterator[tuple[dict, list[dict]]]:
    """Rows of the variants, with the step over today's, each with rows of a trace."""
    config, _ = configuration.load(str(args.config), args.overrides)
    decoder = decode_jax.random_decoder(config.model)
    until, ones = time.monotonic() + args.seconds, {}
    for variant in variants(args.prompt, args.width):
        if time.monotonic() > until:
            print(f"no time is left for {variant}", flush=True)
            continue
        made = Verifier(variant, decoder, args.rows, args.part, args.parts)
        row = measure(made, args.rows)
        ones.setdefault(variant.prompt, row["step_ms"])
        row["over_one"] = round(row["step_ms"] / ones[variant.prompt], 3)
        traced = variant.prompt == args.prompt[0] and variant.width in args.trace
        kernels = made.kernels() if traced else []
        yield {**row, **results.provenance()}, kernels
