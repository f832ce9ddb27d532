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
    """A teacher's hidden states of a micro-batch, and its head."""

    hidden: Any  # [B, T, D'], final hidden states
    head: Any  # `TeacherProgram.head_weights`


class FileColumns(NamedTuple):
    """Shape of a teacher's columns in a file."""

    count: int  # columns a token
    logprobs: bool  # True if the columns have log-probabilities


class TeacherProgram(ModelProgram):
    """The teacher's functions and shapes; it is never trained."""

    def __init__(self, config: DistillJobConfig):
        model = teachers.model_of(config)
        assert model.vocab_size is not None, "of a checkpoint"
        untrained = dataclasses.replace(
            config, model=model, optimizer=OptimizerConfig(), remat=RematConfig()
        )
        super().__init__(untrained, model.vocab_size, lambda _: 0.0)
        self.vocab_size = model.vocab_size
        self._head, weights = nnx.split(self.abstract.head)
        shapes = {"head": nnx.to_pure_dict(weights)}
        self.head_shapes = self.layout.of_weights(shapes)["head"]

    def _split_trained(self, weights: dict) -> tuple[dict, dict]:
        return weights, {}  # in their own type, as no update can be lost to rounding

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
        """The teacher's weights that the divergence reads."""
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

    learned: Any  # f32 scalar, tokens that count in the loss
    read: Any  # f32 scalar, tokens that are no padding


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
        """Trace the addition of a micro-batch to a step's sums, which are consumed."""
        arguments = (
            self.tokens(*shape),
            self.target(shape),
            self.counted(),
            self.advantages(shape),
        )
        return self.trace_sums(self._batch_loss, arguments, self.config.head)

    def counted(self) -> Counted:
        """Shapes and shardings of `Counted`."""
        return Counted(self.number(), self.number())

    def advantages(self, shape: Shape) -> Any:
        """Shape of advantages; None unless rewards are learned from."""
        if not self.config.distill.reward_weight:
            return None
        return self.layout.of_tokens(jax.ShapeDtypeStruct(shape, jnp.float32))

    @property
    def teacher(self) -> TeacherProgram:
        """The teacher, of a run that has one."""
        assert self._teacher is not None, "a file is read instead"
        return self._teacher

    def target(self, shape: Shape) -> TeacherStates | Columns | Drawn:
        """Shapes of a micro-batch's target: a teacher's states, or a file's columns."""
        if (columns := self._columns) is not None:
            ids: Any = jax.ShapeDtypeStruct((*shape, columns.count), jnp.int32)
            floats = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
            logprobs = floats if columns.logprobs else None
            return self.layout.of_hidden(of_file(self.config.distill, ids, logprobs))
        return TeacherStates(self.teacher.states(shape), self.teacher.head_shapes)

    def trace_loss(self) -> None:
        def loss(head, hidden, labels, target, normalizer, advantages):
            targets = Targets(labels, advantages)
            drawn_by = self.micro_batch_numbers(self.config.head, 0, 0, 0)
            return self._loss_of_hidden(
                head, hidden, targets, target, normalizer, *drawn_by
            )

        for shape in self.shapes:
            arguments = self.target(shape), self.number(), self.advantages(shape)
            self.trace_of_head(loss, shape, *arguments)

    def _batch_loss(
        self, params, frozen, batch: Batch, target, counted, advantages=None, *numbers
    ):
        """The scalar to differentiate; and the loss, metrics of tokens, and routing."""
        model = self.model(params, frozen)
        hidden, routed = model.routed(batch.tokens, batch.segment_ids, batch.positions)
        targets, own = Targets(batch.labels, advantages), _count_tokens(batch)
        value, observed = self._loss_of_hidden(
            model.head, hidden, targets, target, counted.learned, *numbers
        )
        share = own.read / jnp.maximum(counted.read, 1)
        cost = balance.with_loss(value, routed, self.model_config, share)
        return cost, (value, observed, routed)

    def _loss_of_hidden(
        self, head, hidden, targets: Targets, target, normalizer, numbers=None
    ):
        call = PolicyHeadOptions(self.config.sampling.temperature, "fused")
        if numbers is not None:
            key = Stream.GRADIENTS.key(self.config.run.seed, *numbers)
            call = dataclasses.replace(call, sample=self.config.head.sample, key=key)
        if self._teacher is not None:
            teacher_head = self.teacher.head(target.head)
            # One of two vocabularies may be padded further.
            size = min(self.model_config.vocab_size or 0, self.teacher.vocab_size)
            head.vocab_size = teacher_head.vocab_size = size
            target = teacher_head.teacher(target.hidden)
        return distill_loss(
            self.config.distill, head, hidden, targets, target, normalizer, call
        )

    def _trace_sums(self, shape: Shape) -> jax.stages.Traced:
        def run(params, frozen, batch: Batch, target):
            unit = jnp.ones(())  # metrics do not depend on the counts
            counted = Counted(unit, unit)
            _, (_, observed, _) = self._batch_loss(
                params, frozen, batch, target, counted
            )
            return {name: jnp.sum(x) for name, x in observed.items()}

        weights = self.state_shapes.params, self.frozen_shapes
        batch = self.tokens(*shape)
        numbers = dict.fromkeys(METRICS, self.number())
        with self.layout.context():
            jitted = self.layout.jit(run, numbers)
            return jitted.trace(*weights, batch, self.target(shape))

    def _trace_count(self, shape: Shape) -> jax.stages.Traced:
        with self.layout.context():
            count = self.layout.jit(_count_tokens, self.counted())
            return count.trace(self.tokens(*shape))

    def phases(self) -> list[Phase]:
        """The programs of a step, for a plan; a teacher is on the device in each."""
        config, teacher, shape = self.config, self.teacher, self.shapes[-1]
        tokens, runs = shape[0] * shape[1], float(config.run.accumulate)
        if config.is_on_policy:
            runs = config.distill.samples * config.longest / tokens
        teacher_weights, weights = teacher.state_shapes.params, weights_of(self)
        held, sums = moments_beside(self), gradient_shapes(self.state_shapes.params)
        phases = [
            Phase(
                "teacher",
                functools.partial(teacher.trace_states, shape),
                {"teacher": teacher_weights},
                weights | held,
                tokens=tokens,
                runs=runs,
            ),
            Phase(
                "gradients",
                self.trace_backward,
                weights | {"gradients": sums, "teacher's head": teacher.head_shapes},
                held
                | {"teacher's other weights": teacher.without_head(teacher_weights)},
                activations(self, tokens),
                tokens,
                runs=runs,
            ),
        ]
        if config.is_on_policy:
            phases[:0] = self.rollout_phases(held | {"teacher": teacher_weights})
        if self.streamed is None:
            phases.append(self.update_phase({"teacher": teacher_weights}, 1))
        return phases


def _count_tokens(batch: Batch) -> Counted:
    read = balance.counted(batch.tokens, batch.segment_ids)
    return Counted(*(jnp.sum(x, dtype=jnp.float32) for x in (batch.labels >= 0, read)))
