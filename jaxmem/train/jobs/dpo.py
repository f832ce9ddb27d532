"""Preference optimization: a reference, if any, is scored once; then pairs are learned.

pairs -> ln p of both answers -> loss of each pair -> one update a step
"""

import dataclasses
import functools
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem.base import files, processes
from jaxmem.data.pairs import Pair, PairBatch, PairBatches, batch_of, fingerprint
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import balance
from jaxmem.models.training_head import HeadConfig
from jaxmem.train import metrics, phases, renamed_keys, starts
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs import loss_arguments
from jaxmem.train.jobs.config import DpoJobConfig
from jaxmem.train.jobs.job import Job
from jaxmem.train.jobs.pair_objective import pair_losses
from jaxmem.train.jobs.reading import AnswerPairs
from jaxmem.train.jobs.whole_step import StepProgram, sum_gradients
from jaxmem.train.metrics import PreferenceMetrics
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.phases import Phase, Programs
from jaxmem.train.program import TrainState
from jaxmem.train.settings import Settings


class DpoProgram(StepProgram):
    """Functions and shapes of a run on pairs of answers."""

    config: DpoJobConfig

    def __init__(self, config: DpoJobConfig, vocab_size: int):
        loss_arguments.check_section("dpo", config.dpo)
        super().__init__(config, vocab_size)

    def batch(self, *leading: int) -> PairBatch:
        """Shapes and shardings of micro-batches."""
        config = self.config.data
        shape = *leading, 2 * config.batch_size, config.sequence_length
        ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        floats = jax.ShapeDtypeStruct(shape, jnp.float32)
        return self.layout.of_tokens(PairBatch(ids, ids, ids, ids, floats))

    def logprobs(self, params: Any, frozen: Any, batch: PairBatch) -> jax.Array:
        """Ln p of both answers of each pair [B, 2], sums or means over their tokens."""
        return self._answer_logprobs(params, frozen, batch)[0]

    def _answer_logprobs(
        self, params: Any, frozen: Any, batch: PairBatch, key: Any = None
    ):
        """Ln p of answers [B, 2], and routing; with `key`, gradients are sampled."""
        model = self.model(params, frozen)
        hidden, routed = model.routed(batch.tokens, batch.segment_ids, batch.positions)
        if self.config.head.logits == "fused":
            gradient = None if key is None else self.config.head.sample
            per_token = model.head.logprobs(
                hidden, batch.labels, gradient=gradient, key=key
            )
        else:
            per_token = jaxmem.logprobs_from_logits(
                model.head(hidden), batch.labels, None
            )
        sums = per_token.sum(-1)
        if self.config.dpo.pair_loss.averages:
            sums /= jnp.maximum(jnp.sum(batch.labels >= 0, -1), 1)
        return sums.reshape(-1, 2), routed

    def trace_logprobs(self) -> jax.stages.Traced:
        """Trace the forward pass of a micro-batch."""
        jitted = self.layout.jit(self.logprobs, self.number())
        with self.layout.context():
            return jitted.trace(
                self.state_shapes.params, self.frozen_shapes, self.batch()
            )

    def trace_loss(self) -> None:
        self.trace_logprobs()

    def _step_gradients(
        self, params: Any, frozen: Any, batches: PairBatch, number: Any = None
    ):
        """Gradients of a step, and its numbers, one micro-batch alive at a time."""
        count = self.config.run.accumulate * self.config.data.batch_size
        all_read = jnp.maximum(jnp.sum(batches.segment_ids > 0), 1)

        def loss(params: Any, micro_batch: tuple[PairBatch, jax.Array]):
            batch, index = micro_batch
            key = None
            if number is not None:
                key = Stream.GRADIENTS.key(self.config.run.seed, number, index)
            logprobs, routed = self._answer_logprobs(params, frozen, batch, key)
            reference = batch.reference.sum(-1).reshape(-1, 2)
            losses, statistics = pair_losses(self.config.dpo, logprobs, reference)
            sums = {name: jnp.sum(x) / count for name, x in statistics.items()}
            sums["tokens"] = jnp.sum(batch.labels >= 0).astype(jnp.float32)
            sums["loss"] = jnp.sum(losses) / count
            share = jnp.sum(batch.segment_ids > 0) / all_read
            cost = balance.with_loss(sums["loss"], routed, self.model_config, share)
            return cost, (sums, routed)

        indices = jnp.arange(len(batches.labels), dtype=jnp.uint32)
        (numbers, routed), slopes = sum_gradients(loss, params, (batches, indices))
        return slopes, numbers if routed is None else numbers | {"routed": routed}

    def gradients(self, head: HeadConfig) -> Callable:
        return self._step_gradients

    def micro_batches(self) -> PairBatch:
        return self.batch(self.config.run.accumulate)


class Dpo(Job, name="dpo"):
    """Pairs of answers, whose reference is scored once."""

    Config, Metrics = DpoJobConfig, PreferenceMetrics
    changeable = ("optimizer", "dpo")
    packed = False
    chart = ("margin", "reward margin")

    def reading(self) -> AnswerPairs:
        config = self.config
        return AnswerPairs(config.data, config.model, config.dpo.drop_long)

    def make_program(self, vocab_size: int) -> DpoProgram:
        return DpoProgram(self.config, vocab_size)

    def plan(self) -> Programs:
        programs = super().plan()
        if not self._has_reference:
            return programs
        note = "the reference is scored once, before the first step"
        return dataclasses.replace(programs, notes=(*programs.notes, note))

    @property
    def _has_reference(self) -> bool:
        return self.config.dpo.pair_loss.has_reference

    def settings(self) -> Settings:
        """See `Job`; numbers that are not set are recorded as the loss's defaults."""
        settings = super().settings()
        section = settings.changeable["dpo"] | self.config.dpo.numbers
        return settings._replace(changeable={**settings.changeable, "dpo": section})

    def phases(self) -> list[Phase]:
        """See `Job`; one program scores the reference and held-out pairs."""
        program, config = self.program, self.config
        tokens = 2 * config.data.batch_size * config.data.sequence_length
        evaluates, moments = bool(self.reads.holds_out and config.eval.every), {}
        if evaluates and program.streamed is None:
            moments = {"moments": program.state_shapes.optimizer}
        step = phases.of_step(
            program, program.trace_step, tokens, config.run.accumulate
        )
        if not (self._has_reference or evaluates):
            return [step]
        scores = Phase(
            "reference" if self._has_reference else "held out",
            program.trace_logprobs,
            phases.weights_of(program),
            held=moments,
            tokens=tokens,
            runs=0,
        )
        return [scores, step]

    def open(self) -> None:
        self._pairs, self._held_out = self.reads.pairs

    def compile(self, progress: ProgressReport) -> None:
        """See `Job`; also scores the reference, where the loss reads it."""
        program, pairs, held_out = self.program, self._pairs, self._held_out
        reference = np.zeros((len(pairs) + len(held_out), 2), np.float32)
        if self._has_reference or held_out:
            self._logprobs = program.trace_logprobs().lower().compile()
        if self._has_reference:
            progress.waiting("scoring the reference")
            reference = self._score_reference([*pairs, *held_out])
        self._reference = reference[len(pairs) :]
        self.batches = PairBatches(pairs, reference[: len(pairs)], self.config.data)
        self._compiled = program.compile_step()

    def _score_pairs(self, params: Any, pairs: Sequence[Pair]) -> np.ndarray:
        """Ln p [N, 2] of pairs under the weights `params`."""
        config, logprobs = self.config.data, []
        for start in range(0, len(pairs), config.batch_size):
            # The last micro-batch repeats pairs, to have the shape that is compiled.
            stop = start + config.batch_size
            chosen = [pairs[i % len(pairs)] for i in range(start, stop)]
            nothing = np.zeros((len(chosen), 2), np.float32)
            batch = self.program.layout.place(batch_of(chosen, nothing, config))
            logprobs.append(jax.device_get(self._logprobs(params, self.frozen, batch)))
        return np.concatenate(logprobs)[: len(pairs)]

    def _score_reference(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Ln p [N, 2] under the initial weights: read, or computed and saved."""
        config = self.config
        path = Path(config.run.out_dir).expanduser() / "reference.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = [fingerprint(pairs), self.model_fields(), config.run.seed]
        facts += ["means"] if config.dpo.pair_loss.averages else []
        if (start := starts.digest(config)) is not None:
            facts.append(start)
        # They identify the pairs and weights that the file is of.
        identity = json.dumps(facts)
        if jax.process_count() == 1 and path.exists():
            with np.load(path) as saved:
                if _is_same(str(saved["of"]), identity):
                    return saved["logprobs"]
        logprobs = self._score_pairs(self.program.initial_params(), pairs)
        if processes.is_first():
            content = io.BytesIO()
            np.savez(content, of=identity, logprobs=logprobs)
            files.write_whole(path, content.getvalue())
        return logprobs

    def step(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, Callable[[], PreferenceMetrics]]:
        start, config = time.perf_counter(), self.config
        micro_batches = [next(self.batches) for _ in range(config.run.accumulate)]
        batches = PairBatch(*(np.stack(x) for x in zip(*micro_batches, strict=True)))
        batches = self.program.layout.place(batches)
        drawn_by = self.program.step_numbers(config.head, number)
        state, numbers = self._compiled(state, self.frozen, batches, *drawn_by)
        return state, lambda: self._read_metrics(number, numbers, start)

    def _read_metrics(
        self, number: int, numbers: dict, start: float
    ) -> PreferenceMetrics:
        numbers = jax.device_get(numbers)
        routers = self.program.routers(numbers.pop("routed", None))
        numbers = {name: float(x) for name, x in numbers.items()}
        seconds, tokens = self.seconds_since(start), int(numbers.pop("tokens"))
        config = self.config
        return PreferenceMetrics(
            step=number,
            pairs=config.run.accumulate * config.data.batch_size,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            learning_rate=float(self.learning_rates[number - 1]),
            seconds=seconds,
            backend=self.program.backend,
            routers=routers,
            **numbers,
        )

    def holds_out(self) -> bool:
        return bool(self._held_out)

    def evaluate(
        self, state: TrainState, step_metrics: PreferenceMetrics
    ) -> Evaluated | None:
        if not self._held_out:
            return None
        logprobs = self._score_pairs(state.params, self._held_out)
        means = jax.device_get(self._held_out_means(logprobs, self._reference))
        values = {f"held_out_{name}": float(mean) for name, mean in means.items()}
        return Evaluated(step_metrics._replace(**values), values["held_out_loss"])

    @functools.cached_property
    def _held_out_means(self) -> Callable:
        """The compiled function of log-probabilities to means of loss and metrics."""

        @jax.jit
        def means(logprobs: jax.Array, reference: jax.Array):
            losses, statistics = pair_losses(self.config.dpo, logprobs, reference)
            named = {name: statistics[name] for name in ("margin", "accuracy")}
            return jax.tree.map(jnp.mean, {"loss": losses, **named})

        return means

    def summary(self, history: Sequence[PreferenceMetrics]) -> Mapping[str, Any]:
        last = history[-1]
        return {
            **super().summary(history),
            "last_margin": last.margin,
            "last_accuracy": last.accuracy,
            **metrics.last_of(history, "held_out_loss", "held_out_accuracy"),
        }

    def closing(self, history: Sequence[PreferenceMetrics]) -> Iterator[str]:
        first, last = history[0], history[-1]
        yield (
            f"loss {first.loss:.4f} -> {last.loss:.4f}, margin {first.margin:.3f} -> "
            f"{last.margin:.3f}, accuracy {first.accuracy:.2f} -> {last.accuracy:.2f} "
            f"in {len(history)} steps, {metrics.tokens_per_second(history):,.0f} "
            "tokens/s"
        )


def _is_same(saved: str, identity: str) -> bool:
    """True for equal facts of a reference, maybe with older names of keys."""
    pairs, model, *others = json.loads(saved)
    renamed = renamed_keys.settings({"model": model})
    return [pairs, renamed["model"], *others] == json.loads(identity)
