"""The programs of a student's training, compiled before the first step.

    teacher's hidden states of a micro-batch, gradients of one, the optimizer's update

The teacher's states of all micro-batches of a step wait in the host's memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.data.documents import Batch
from jaxmem.head.maths.random_streams import Stream
from jaxmem.head.verbs.column_targets import Columns, Drawn
from jaxmem.models import balance
from jaxmem.train.jobs.config import DistillJobConfig
from jaxmem.train.jobs.distill import teachers
from jaxmem.train.jobs.distill_objective import Targets, distill_loss, of_file
from jaxmem.train.jobs.policy_objective import PolicyHeadOptions
from jaxmem.train.jobs.rollout.prompt_tasks import ends_of
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.phases import Phase, activations, moments_beside, weights_of
from jaxmem.train.program import (
    ModelProgram,
    StreamedUpdate,
    gradient_shapes,
)

Shape = tuple[int, int]  # of a micro-batch
METRICS = ("divergence", "ce", "entropy")


class DistillPrograms(NamedTuple):
    """Every program of a run; by shape of a micro-batch where there are several."""

    # (teacher's weights, Batch) -> hidden; {} where a file is read instead
    states: dict[Shape, jax.stages.Compiled]
    count: dict[Shape, jax.stages.Compiled]  # (Batch) -> Counted
    zeros: jax.stages.Compiled  # () -> Sums
    # (params, frozen, Sums, Batch, target, Counted, advantages[, numbers]) -> Sums, ()
    gradients: dict[Shape, jax.stages.Compiled]
    sums: dict[Shape, jax.stages.Compiled]  # (params, frozen, Batch, target)
    #                                          -> METRICS, summed over tokens
    update: jax.stages.Compiled | StreamedUpdate  # (TrainState, gradients) ->
    #                                               TrainState, norm


class TeacherStates(NamedTuple):
    """A teacher of a micro-batch, as it computes its tokens."""

    hidden: Any  # [B, T, D'], final hidden states
    head: Any  # `TeacherProgram.head_weights`


class FileColumns(NamedTuple):
    """What a file has of a teacher."""

    count: int  # columns a token
    logprobs: bool  # whether they have log-probabilities


class TeacherProgram(ModelProgram):
    """The teacher's functions and shapes; it is never trained."""

    def __init__(self, config: DistillJobConfig):
        model = teachers.model_of(config)
        assert model.vocab_size is not None, "of a checkpoint"
        given = dataclasses.replace(
            config, model=model, optimizer=OptimizerConfig(), remat=RematConfig()
        )
        super().__init__(given, model.vocab_size, lambda _: 0.0)
        self.vocab_size = model.vocab_size
        head = nnx.split(self.abstract.head)
        self._head, shapes = head[0], nnx.to_pure_dict(head[1])
        self.head_shapes = self.layout.of_weights({"head": shapes})["head"]

    def _split(self, weights: dict) -> tuple[dict, dict]:
        return weights, {}  # as they are: no update could be lost

    def trace_states(self, shape: Shape) -> jax.stages.Traced:
        """Trace the hidden states of a micro-batch."""

        def run(params: Any, batch: Batch) -> jax.Array:
            model = self.model(params, {})
            return model(batch.tokens, batch.segment_ids, batch.positions)

        with self.layout.context():
            jitted = self.layout.jit(run, self.states(shape))
            batch = self.tokens(*shape)
            return jitted.trace(self.state_shapes.params, batch)

    def states(self, shape: Shape) -> Any:
        """Shapes of the hidden states of a micro-batch."""
        return self.layout.of_hidden(self.hidden(*shape))

    def head_weights(self, params: Any) -> dict:
        """What the divergence reads of the teacher's weights."""
        return nnx.to_pure_dict(nnx.split(self.model(params, {}).head)[1])

    def without_head(self, params: Any) -> dict:
        """The weights, or their shapes, that are not in `head_weights`."""
        name = "embed" if self.model_config.tied else "head"
        return {key: value for key, value in params.items() if key != name}

    def head(self, weights: dict) -> Any:
        """The teacher's head with these weights."""
        return nnx.merge(self._head, weights)


class Counted(NamedTuple):
    """Tokens of a micro-batch, or of a step."""

    learned: Any  # f32 scalar, those that count in the loss
    read: Any  # f32 scalar, those that are no padding


class DistillProgram(SamplingProgram):
    """A student's functions and shapes; a file's columns may replace the teacher."""

    config: DistillJobConfig

    def __init__(
        self,
        config: DistillJobConfig,
        vocab_size: int,
        columns: FileColumns | None = None,
    ):
        super().__init__(config, vocab_size)
        distill = config.distill
        self._columns = columns
        self._teacher = None if columns else TeacherProgram(config)
        if config.is_on_policy:
            named = "distill.prompts x distill.completions"
            ends = ends_of(config.task, teachers.reading(config).checkpoint)
            self.sample_from(distill.samples, named, ends)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics of a token."""
        return list(METRICS)

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of micro-batches, one for each width of row."""
        data, distill = self.config.data, self.config.distill
        if self.config.is_on_policy:
            widths = self.config.row_lengths
            return [(distill.max_tokens // width, width) for width in widths]
        return [(data.batch_size, data.sequence_length)]

    def compile(self) -> DistillPrograms:
        """Compile everything from shapes alone."""
        shapes, states = self.shapes, {}
        if self._teacher is not None:
            trace = self._teacher.trace_states
            states = {s: trace(s).lower().compile() for s in shapes}
        return DistillPrograms(
            states=states,
            count={s: self._trace_count(s).lower().compile() for s in shapes},
            zeros=self.compile_zeros(),
            gradients={
                s: self.compile_verified(self.trace_gradients(s)) for s in shapes
            },
            sums={s: self._trace_sums(s).lower().compile() for s in shapes},
            update=self.compile_update(),
        )

    def trace_backward(self) -> jax.stages.Traced:
        """See `DecoderProgram`: the gradients of the largest micro-batch."""
        return self.trace_gradients(self.shapes[-1])

    def held_with_backward(self) -> list[Any]:
        """See `DecoderProgram`: teacher and moments."""
        held = [self._teacher.state_shapes.params] if self._teacher else []
        return held + ([] if self.streamed else [self.state_shapes.optimizer])

    def trace_gradients(self, shape: Shape) -> jax.stages.Traced:
        """Trace what adds a micro-batch to a step's sums; these are consumed."""
        given = self.tokens(*shape), self.target(shape), self.counted()
        given += (self.advantages(shape),)
        return self.trace_sums(self._loss, given, self.config.head)

    def counted(self) -> Counted:
        """Shapes of `Counted`, with their places."""
        return Counted(self.number(), self.number())

    def advantages(self, shape: Shape) -> Any:
        """Shape of advantages; None where no rewards are learned from."""
        if not self.config.distill.reward_weight:
            return None
        return self.layout.of_tokens(jax.ShapeDtypeStruct(shape, jnp.float32))

    @property
    def teacher(self) -> TeacherProgram:
        """The teacher, of a run that has one."""
        assert self._teacher is not None, "a file is read instead"
        return self._teacher

    def target(self, shape: Shape) -> TeacherStates | Columns | Drawn:
        """Shapes of what a micro-batch learns from."""
        if self._columns is not None:
            count, logprobs = self._columns
            ids: Any = jax.ShapeDtypeStruct((*shape, count), jnp.int32)
            floats = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
            columns = of_file(self.config.distill, ids, floats if logprobs else None)
            return self.layout.of_hidden(columns)
        return TeacherStates(self.teacher.states(shape), self.teacher.head_shapes)

    def trace_loss(self) -> None:
        def loss(head, hidden, labels, target, normalizer, advantages):
            targets = Targets(labels, advantages)
            drawn_by = self.micro_batch_numbers(self.config.head, 0, 0, 0)
            return self._of_hidden(head, hidden, targets, target, normalizer, *drawn_by)

        for shape in self.shapes:
            given = self.target(shape), self.number(), self.advantages(shape)
            self.trace_of_head(loss, shape, *given)

    def _loss(
        self, params, frozen, batch: Batch, target, counted, advantages=None, *numbers
    ):
        """What is differentiated, and the loss, sums over tokens, and of routers."""
        model = self.model(params, frozen)
        given = batch.tokens, batch.segment_ids, batch.positions
        hidden, routed = model.routed(*given)
        targets, own = Targets(batch.labels, advantages), _count(batch)
        value, observed = self._of_hidden(
            model.head, hidden, targets, target, counted.learned, *numbers
        )
        share = own.read / jnp.maximum(counted.read, 1)
        cost = balance.with_loss(value, routed, self.model_config, share)
        return cost, (value, observed, routed)

    def _of_hidden(
        self, head, hidden, targets: Targets, target, normalizer, numbers=None
    ):
        call = PolicyHeadOptions(self.config.sampling.temperature, "fused")
        if numbers is not None:
            key = Stream.GRADIENTS.key(self.config.run.seed, *numbers)
            call = dataclasses.replace(call, sample=self.config.head.sample, key=key)
        if self._teacher is not None:
            theirs = self.teacher.head(target.head)
            # One of two vocabularies may be padded further.
            size = min(self.model_config.vocab_size or 0, self.teacher.vocab_size)
            head.vocab_size = theirs.vocab_size = size
            target = theirs.teacher(target.hidden)
        return distill_loss(
            self.config.distill, head, hidden, targets, target, normalizer, call
        )

    def _trace_sums(self, shape: Shape) -> jax.stages.Traced:
        def run(params, frozen, batch: Batch, target):
            one = jnp.ones(())
            seen = self._loss(params, frozen, batch, target, Counted(one, one))
            _, observed, _ = seen[1]
            return {name: jnp.sum(x) for name, x in observed.items()}

        weights = self.state_shapes.params, self.frozen_shapes
        batch = self.tokens(*shape)
        numbers = dict.fromkeys(METRICS, self.number())
        with self.layout.context():
            jitted = self.layout.jit(run, numbers)
            return jitted.trace(*weights, batch, self.target(shape))

    def _trace_count(self, shape: Shape) -> jax.stages.Traced:
        with self.layout.context():
            count = self.layout.jit(_count, self.counted())
            return count.trace(self.tokens(*shape))

    def phases(self) -> list[Phase]:
        """The programs of a step, for a plan; a teacher is on the device in each."""
        config, teacher, shape = self.config, self.teacher, self.shapes[-1]
        tokens, runs = shape[0] * shape[1], float(config.run.accumulate)
        if config.is_on_policy:
            runs = config.distill.samples * config.longest / tokens
        taught, weights = teacher.state_shapes.params, weights_of(self)
        held, sums = moments_beside(self), gradient_shapes(self.state_shapes.params)
        made = [
            Phase(
                "teacher",
                functools.partial(teacher.trace_states, shape),
                {"teacher": taught},
                weights | held,
                tokens=tokens,
                runs=runs,
            ),
            Phase(
                "gradients",
                self.trace_backward,
                weights | {"gradients": sums, "teacher's head": teacher.head_shapes},
                held | {"teacher's other weights": teacher.without_head(taught)},
                activations(self, tokens),
                tokens,
                runs=runs,
            ),
        ]
        if config.is_on_policy:
            made[:0] = self.rollout_phases(held | {"teacher": taught})
        if self.streamed is None:
            made.append(self.update_phase({"teacher": taught}, 1))
        return made


def _count(batch: Batch) -> Counted:
    read = balance.counted(batch.tokens, batch.segment_ids)
    return Counted(*(jnp.sum(x, dtype=jnp.float32) for x in (batch.labels >= 0, read)))
