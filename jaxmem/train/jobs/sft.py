"""Supervised training: the step, its program, and the job."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmem.data import documents, streams
from jaxmem.data.documents import Batch, DataError
from jaxmem.head.maths import eight_bits
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import balance
from jaxmem.models.training_head import HeadConfig, head_loss
from jaxmem.models.weights import join_weights, merge_module
from jaxmem.train import metrics, phases
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.jobs.job import Job
from jaxmem.train.jobs.reading import NOTHING_COUNTED, loss_counts
from jaxmem.train.jobs.whole_step import StepProgram, sum_gradients
from jaxmem.train.metrics import HeadCost, StepMetrics
from jaxmem.train.mfu import flops_per_token, peak_of
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.phases import Phase
from jaxmem.train.program import TrainState, fixed_weights


class _MicroBatch(NamedTuple):
    """A micro-batch of a step, or all of them, stacked [K, ...]."""

    batch: Batch
    index: Any  # uint32 scalar, its number within the step
    read: Any  # scalar, number of its tokens that are not padding


def make_gradients(
    definition: nnx.GraphDef[Any], head: HeadConfig, seed: int = 0
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Build the function of a step's gradients.

    It maps trained weights, frozen weights and micro-batches [K, B, T] to the gradients
    and numbers of the step: `loss` (0 where no token counts; without the routers'
    loss), `tokens`, means of the head's metrics and, for a model with experts, `routed`
    (`balance.Routed`). With `Sample` in head.gradient there is a fourth argument, the
    step's number.
    """

    def gradients(params: Any, frozen: dict, micro_batches: Batch, number: Any = None):
        read = balance.counted(micro_batches.tokens, micro_batches.segment_ids)
        all_read = jnp.maximum(jnp.sum(read), 1)

        def loss(params: Any, micro_batch: _MicroBatch):
            batch, key = micro_batch.batch, None
            if number is not None:
                key = Stream.GRADIENTS.key(seed, number, micro_batch.index)
            model = merge_module(definition, join_weights(params, frozen))
            operands = batch.tokens, batch.segment_ids, batch.positions
            hidden, routed = model.routed(*operands)
            value, metrics = head_loss(
                model.head, hidden, batch.labels, tokens, head.logits,
                head.sample, key,
            )  # fmt: skip
            share = micro_batch.read / all_read
            cost = balance.with_loss(value, routed, model.config, share)
            return cost, (value, routed, metrics)

        tokens = jnp.sum(micro_batches.labels >= 0)
        indices = jnp.arange(len(micro_batches.labels), dtype=jnp.uint32)
        stacked = _MicroBatch(micro_batches, indices, jnp.sum(read, axis=(1, 2)))
        (total, routed, sums), slopes = sum_gradients(loss, params, stacked)
        numbers = {} if routed is None else {"routed": routed}
        numbers |= {name: x / jnp.maximum(tokens, 1) for name, x in sums.items()}
        return slopes, {"loss": total, "tokens": tokens, **numbers}

    return gradients


class SftProgram(StepProgram):
    """A supervised run's functions and shapes.

    Args:
        config: configuration of the run.
        vocab_size: entries of the tokenizer.
        packed: True if rows hold several documents; else segment_ids must be None.
    """

    config: SftJobConfig

    def __init__(self, config: SftJobConfig, vocab_size: int, packed: bool = True):
        super().__init__(config, vocab_size)
        self._packed = packed
        self._rows = config.data.batch_size, config.data.sequence_length

    def gradients(self, head: HeadConfig) -> Callable:
        return make_gradients(self.definition, head, self.config.run.seed)

    def micro_batches(self) -> Batch:
        batch: Any = self.tokens(self.config.run.accumulate, *self._rows)
        return batch if self._packed else batch._replace(segment_ids=None)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation (`jaxmem.train.mfu`); None on an unknown device."""
        mesh = self.layout.mesh
        devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
        peak = peak_of(devices[0].device_kind, self.model_config.dtype)
        if peak is None or self.model_config.factory is not None:
            return None
        flops = flops_per_token(
            self.model_config,
            self.state_shapes.params,
            self.frozen_shapes,
            self._rows[1],
        )
        return tokens_per_second * flops / (peak * len(devices))

    def evaluate(
        self, params: optax.Params, frozen: dict, batches: Iterator[Batch]
    ) -> float:
        """Mean loss of every token in the batches, in nats; forward only."""
        with self.layout.context():
            sums = self._loss_sums
            results = [sums(params, frozen, self.layout.place(x)) for x in batches]
        total, tokens = np.array(results, np.float64).sum(axis=0)
        return float(total / tokens)  # `Sft.open` has checked that tokens > 0

    @functools.cached_property
    def _loss_sums(self) -> Callable:
        """Sum of a micro-batch's losses, and its tokens; compiled once."""

        @jax.jit
        def sums(params: optax.Params, frozen: dict, batch: Batch):
            model = self.model(params, frozen)
            hidden = model(batch.tokens, batch.segment_ids, batch.positions)
            logits, unit = self.config.head.logits, jnp.ones(())
            total, _ = head_loss(model.head, hidden, batch.labels, unit, logits)
            return total, jnp.sum(batch.labels >= 0)

        return sums

    def trace_loss(self) -> None:
        self.trace_head(self.config.head)

    def trace_head(self, head: HeadConfig) -> jax.stages.Traced:
        """Trace loss and gradients of only the head."""

        def loss(module: Any, hidden: jax.Array, labels: jax.Array):
            tokens = jnp.sum(labels >= 0)
            key = Stream.GRADIENTS.key(0) if head.sample else None
            return head_loss(
                module, hidden, labels, tokens, head.logits, head.sample, key
            )

        return self.trace_of_head(loss, self._rows)


class Sft(Job, name="sft"):
    """Supervised training on documents in packed rows."""

    Config = SftJobConfig

    def make_program(self, vocab_size: int) -> SftProgram:
        return SftProgram(self.config, vocab_size, self.packed)

    def fixed(self) -> dict[str, Any]:
        """See `Job`; without the job and the template, which older runs lack."""
        config, fixed = self.config, super().fixed()
        if self.name == Sft.name:  # no subclass
            del fixed["run"]
            fixed |= fixed_weights(config.optimizer, config.run.seed)
        if config.data.chat_template is None:
            del fixed["data"]["chat_template"]
        return fixed

    def phases(self) -> list[Phase]:
        program, data, head = self.program, self.config.data, self.config.head
        return [
            phases.of_step(
                program,
                program.trace_backward,
                data.batch_size * data.sequence_length,
                self.config.run.accumulate,
                functools.partial(program.trace_head, head),
            )
        ]

    def open(self) -> None:
        super().open()
        self._counted = False  # True once the loss has counted a token of a batch
        self._held_out = self.reads.held_out()
        self._held_out_loss: float | None = None  # of the last evaluation

    def compile(self, progress: ProgressReport) -> None:
        self._compiled = self.program.compile_step(self.config.head)

    def step(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, Callable[[], StepMetrics]]:
        start = time.perf_counter()
        config, program = self.config, self.program
        micro_batches = streams.stacked(self.batches, config.run.accumulate)
        self._counted = (
            self._counted or loss_counts(micro_batches) or self._later_batch_counts()
        )
        micro_batches = program.layout.place(micro_batches)
        size = micro_batches.tokens.size
        drawn_by = program.step_numbers(config.head, number)
        state, numbers = self._compiled(state, self.frozen, micro_batches, *drawn_by)
        return state, lambda: self._read_metrics(number, numbers, size, start)

    def _later_batch_counts(self) -> bool:
        """True if the loss counts a token of any batch.

        The first batch may have none because it holds parts of long prompts.

        Raises:
            DataError: the loss counts no token of the data.
        """
        epoch = documents.batches(
            self.config.data, self.reads.tokenizer, epochs=1, reader=self.reads.reader
        )
        if not any(map(loss_counts, epoch)):
            raise DataError(
                f"data.source={self.config.data.source!r} has {NOTHING_COUNTED}"
            )
        return True

    def _read_metrics(
        self, number: int, numbers: dict, size: int, start: float
    ) -> StepMetrics:
        loss, norm, tokens = (numbers[k] for k in ("loss", "grad_norm", "tokens"))
        step_metrics = self.step_metrics(number, loss, norm, tokens, start)
        routers = self.program.routers(numbers.get("routed"))
        mfu = self.program.mfu(size / step_metrics.seconds)
        error = numbers.get(eight_bits.ERROR)
        error = None if error is None else float(error)
        return step_metrics._replace(mfu=mfu, routers=routers, forward_error=error)

    def holds_out(self) -> bool:
        return self._held_out is not None

    def evaluate(
        self, state: TrainState, step_metrics: StepMetrics
    ) -> Evaluated | None:
        if self._held_out is None:
            return None
        loss = self.program.evaluate(state.params, self.frozen, self._held_out())
        self._held_out_loss = loss
        perplexity = math.exp(min(loss, 700.0))
        values = {"held_out_loss": loss, "held_out_perplexity": perplexity}
        return Evaluated(step_metrics._replace(**values), loss)

    def finish(self, state: TrainState) -> dict[str, Any]:
        """See `Job`; the last step is evaluated if none was."""
        if self._held_out is not None and self._held_out_loss is None:
            self._held_out_loss = self.program.evaluate(
                state.params, self.frozen, self._held_out()
            )
        return {"held_out_loss": self._held_out_loss}

    def costs(self) -> dict[str, HeadCost]:
        program, trained = self.program, self._compiled
        return metrics.head_costs(
            self.config.head, trained, program.compile_step, program.trace_head
        )

    def summary(self, history: Sequence[StepMetrics]) -> Mapping[str, Any]:
        held_out = {"held_out_loss": history[-1].held_out_loss}
        return {**super().summary(history), **held_out}

    def closing(self, history: Sequence[StepMetrics]) -> Iterator[str]:
        first, last = history[0], history[-1]
        yield (
            f"loss {first.loss:.4f} -> {last.loss:.4f} nats per token in "
            f"{len(history)} steps, {metrics.tokens_per_second(history):,.0f} tokens/s"
        )
        if last.held_out_loss is not None:
            yield f"held-out loss {last.held_out_loss:.4f} nats per token"
