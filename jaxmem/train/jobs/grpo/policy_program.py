"""The programs of a policy's training, compiled before the first step.

    sample, log-probabilities of a micro-batch, gradients of one, the optimizer's update

Micro-batches have as many shapes as there are widths of rows; nothing else varies.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.data.documents import Batch
from jaxmem.head.maths import eight_bits
from jaxmem.head.maths.random_streams import Stream
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.models import balance, branches, route_records
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.training_head import HeadConfig
from jaxmem.packing import Supports
from jaxmem.train.jobs import loss_arguments
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.grpo.minibatches import probe_count
from jaxmem.train.jobs.policy_objective import (
    MOST_ERROR,
    HeadCheck,
    PolicyBatch,
    PolicyHeadOptions,
    policy_loss,
    within_supports,
)
from jaxmem.train.jobs.rollout.entries import entry_shapes
from jaxmem.train.jobs.rollout.prompt_tasks import ends_of
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram
from jaxmem.train.jobs.rollout.turns import SamplePrograms
from jaxmem.train.optimizer import learning_rate_schedule
from jaxmem.train.program import StreamedUpdate

Shape = tuple[int, int]  # of a micro-batch
# Among metrics of tokens: log-probabilities of those that are probed, and estimated
# errors without the weights of tokens that are kept at random.
_EXACT, _ESTIMATED = "exact", "estimated_error"


class PolicyPrograms(NamedTuple):
    """Every program of a run; by shape of a micro-batch where there are several."""

    sample: SamplePrograms | None  # None if nothing is sampled here
    # (params, frozen, Batch, support, routes, numbers) -> log-probabilities under the
    # distributions that were sampled from, those over the vocabulary, and entries that
    # are recorded; {} where updates measure log-probabilities
    logprobs: dict[Shape, jax.stages.Compiled]
    # the same with the first result alone; {} without a reference
    reference: dict[Shape, jax.stages.Compiled]
    zeros: jax.stages.Compiled  # () -> Sums
    # (params, frozen, Sums, PolicyBatch, normalizer[, numbers]) -> Sums, and (both
    # log-probabilities of the tokens, HeadCheck or None)
    gradients: dict[Shape, jax.stages.Compiled]
    # the same with an exact forward pass, for micro-batches that a check has rejected
    exact_gradients: dict[Shape, jax.stages.Compiled]
    # (TrainState, gradients) -> TrainState, norm
    update: jax.stages.Compiled | StreamedUpdate


class PolicyProgram(SamplingProgram):
    """A policy's functions and shapes."""

    config: GrpoJobConfig

    @property
    def updates(self) -> int:
        return self.config.grpo.minibatches * self.config.grpo.epochs

    def __init__(self, config: GrpoJobConfig):
        rollouts = learning_rate_schedule(config.optimizer, config.run.steps)

        def by_update(count: Any) -> Any:
            return rollouts(count // self.updates)

        self.config = config
        loss_arguments.check_section("grpo", config.grpo)
        config.check_forward_passes()
        ends = ends_of(config.task, config.model.checkpoint)
        super().__init__(config, ends.size, by_update)
        if config.grpo.share_prompts:
            branches.check(self.model_config, config.mesh.sequence)
        limit = self.model_config.rope.limit
        if config.grpo.prefix_cut is not None and limit and config.longest > limit:
            raise ValueError(
                f"grpo.prefix_cut={config.grpo.prefix_cut} must be None for sequences "
                f"of up to {config.longest} tokens with model.rope.limit={limit}: a "
                "sequence that is cut would be rotated like a short one"
            )
        if config.grpo.replay_routing:
            route_records.check(self.model_config)
        is_recorded = config.passes.entries == "sampler"
        entries = config.head.recorded if is_recorded else None
        named = "grpo.prompts x grpo.group_size"
        self.sample_from(
            config.grpo.samples, named, ends, config.grpo.replay_routing, entries
        )

    def lines(self) -> Iterator[str]:
        """See `SamplingProgram`; also who records the entries of tokens."""
        yield from super().lines()
        if (by := self.config.passes.entries) is not None:
            records = "the sampler records the entries of its tokens"
            if by == "old pass":
                records = (
                    "an old pass over each rollout records the entries, at the cost of "
                    "an exact forward pass"
                )
            yield f"head.gradient={self.config.head.gradient}: {records}"

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics of a token."""
        names = ["entropy", "sum_pi_squared", "clip_fraction"]
        names += ["kl"] if self.config.grpo.has_reference else []
        head = self.config.head
        in_8_bits = head.sample is not None and head.sample.forward == "int8"
        is_estimated = in_8_bits or head.recorded is not None
        return names + ([eight_bits.ERROR] if is_estimated else [])

    def shapes(self, max_tokens: int) -> list[Shape]:
        """Shapes of micro-batches with a budget, one for each width of row."""
        return [(max_tokens // width, width) for width in self.config.row_lengths]

    def trace_loss(self) -> None:
        for shape in self.shapes(self.config.grpo.max_tokens_train):
            self.trace_head(shape, self.config.head)

    def compile(self) -> PolicyPrograms:
        """Compile everything from shapes alone."""
        config, head = self.config.grpo, self.config.head
        forward = self.shapes(config.max_tokens_forward)
        logprobs, reference = {}, {}
        if self.config.passes.count:
            logprobs = {s: self.trace_logprobs(s).lower().compile() for s in forward}
        own = (
            self.config.sampling.truncates
            or config.replay_routing
            or self._old_pass_records
        )
        if config.has_reference and logprobs and not own:
            reference = logprobs
        elif config.has_reference:
            traced = {s: self.trace_logprobs(s, of_policy=False) for s in forward}
            reference = {s: x.lower().compile() for s, x in traced.items()}
        sample = None
        if self.config.samples_itself:
            sample = SamplePrograms.of(self)
        return PolicyPrograms(
            sample=sample,
            logprobs=logprobs,
            reference=reference,
            zeros=self.compile_zeros(),
            gradients={
                shape: self.compile_gradients(shape, head)
                for shape in self.shapes(config.max_tokens_train)
            },
            exact_gradients=CompiledAtUse(
                lambda shape: self.trace_gradients(shape, head.exact_forward)
            ),
            update=self.compile_update(),
        )

    def trace_logprobs(self, shape: Shape, of_policy: bool = True) -> jax.stages.Traced:
        """Trace log-probabilities of tokens: in their supports, and in the vocabulary.

        The second result is None for the reference, which needs none and replays no
        routes, and where the sampler does not truncate, so that both are equal. The
        third one are the entries that the policy's pass records, or None.
        """
        call = self._head_call(self.config.head)

        def run(params, frozen, batch, supports, replayed, numbers):
            model = self.model(params, frozen)
            hidden = self._hidden_states(model, batch, replayed)
            operands = model.head, hidden, batch.labels
            if numbers is not None:
                entries = self._record(*operands, numbers)
                return entries.label_logit - entries.logsumexp, None, entries
            if supports is None:
                return self._over_vocabulary(*operands), None, None
            drawn_from = within_supports(*operands, supports, call)
            whole = self._over_vocabulary(*operands) if of_policy else None
            return drawn_from, whole, None

        weights = self.state_shapes.params, self.frozen_shapes
        with self.layout.context():
            jitted = self.layout.jit(run, self.layout.whole(_int_shape(())))
            return jitted.trace(*weights, *self.forward(shape, of_policy))

    def _hidden_states(
        self, model: LanguageModel, batch: Batch, replayed: Any
    ) -> jax.Array:
        operands = batch.tokens, batch.segment_ids, batch.positions
        return model(*operands, self.config.branches, replayed)

    def _over_vocabulary(self, head, hidden, labels) -> jax.Array:
        temperature = self.config.sampling.temperature
        if self.config.head.logits == "fused":
            return head.logprobs(hidden, labels, temperature=temperature)
        return jaxmem.logprobs_from_logits(
            head(hidden), labels, None, temperature=temperature
        )

    @property
    def _old_pass_records(self) -> bool:
        """True if the policy's forward pass records entries."""
        return self.config.passes.entries == "old pass"

    def _record(self, head, hidden, labels, numbers: jax.Array) -> RecordedEntries:
        """Entries of tokens under the weights before the first update."""
        k = self.config.head.recorded
        assert k is not None
        return head.record_entries(
            hidden, labels, k,
            key=Stream.ENTRIES.key(self.config.run.seed, *numbers),
            temperature=self.config.sampling.temperature,
        )  # fmt: skip

    def forward(
        self, shape: Shape, of_policy: bool = True
    ) -> tuple[Batch, Any, Any, Any]:
        """Shapes of a forward pass's inputs: a micro-batch, its supports and routes.

        The last one are the numbers of the step and of the micro-batch, where the pass
        records entries. The reference replays no routes and records nothing.
        """
        replayed = self._route_shapes(shape) if of_policy else None
        numbers = None
        if of_policy and self._old_pass_records:
            numbers = self.layout.whole(jax.ShapeDtypeStruct((2,), jnp.uint32))
        return self.tokens(*shape), self._support_shapes(shape), replayed, numbers

    def _route_shapes(self, shape: Shape) -> Any:
        """Shapes of the routes that are replayed; None: routers choose."""
        if not self.config.grpo.replay_routing:
            return None
        return self.layout.of_hidden(route_records.struct(self.model_config, shape))

    def _support_shapes(self, shape: Shape) -> Any:
        """Shapes of the ids that tokens were drawn from; None: no truncation."""
        size = self.config.sampling.support_size
        if size is None:
            return None
        tokens = math.prod(shape)
        ids: Any = _int_shape((tokens * size,))
        offsets: Any = _int_shape((tokens + 1,))
        return self.layout.whole(Supports(ids, offsets))

    def compile_gradients(self, shape: Shape, head: HeadConfig) -> jax.stages.Compiled:
        """Compile the gradients of a micro-batch; see `trace_gradients`."""
        return self.compile_verified(self.trace_gradients(shape, head))

    def trace_gradients(self, shape: Shape, head: HeadConfig) -> jax.stages.Traced:
        """Trace the addition of a micro-batch to the sums, which are consumed.

        Log-probabilities of its tokens and a `HeadCheck` are a second result. With
        entries, the first of them is exact, of the tokens that are probed; a
        micro-batch that the check rejects adds nothing. If the head samples, the last
        argument identifies the micro-batch in the run by three numbers: of the step, of
        the minibatch, and its own.
        """
        reads_entries = head.recorded is not None

        def loss(params, frozen, rows: PolicyBatch, normalizer, *numbers):
            model, batch = self.model(params, frozen), rows.batch
            operands = batch.tokens, batch.segment_ids, batch.positions
            hidden, routed = model.routed(*operands, self.config.branches, rows.routes)
            value, metrics = self._loss_of_hidden(
                head, model.head, hidden, rows, normalizer, *numbers
            )
            of_checks = {}
            if reads_entries:
                exact = self._probe(model.head, hidden, rows)
                of_checks = {_EXACT: exact, _ESTIMATED: metrics[eight_bits.ERROR]}
            # Made here: outside, a plan's absent device would have to compute it.
            metrics = dict.fromkeys(self.metric_names, jnp.zeros(())) | metrics
            if rows.inverse is not None:  # sums that estimate those of all tokens
                names = self.metric_names
                metrics |= {name: rows.inverse * metrics[name] for name in names}
            cost = balance.with_loss(value, routed, self.model_config, rows.share)
            return cost, (value, metrics | of_checks, routed)

        arguments = self.micro_batch(shape, head), self.number()
        if not reads_entries:
            return self.trace_sums(loss, arguments, head, kept=("logprob", "whole"))
        kept = _EXACT, "whole", "logprob", _ESTIMATED
        return self.trace_sums(loss, arguments, head, kept, self._check)

    def _probe(self, head, hidden, rows: PolicyBatch) -> jax.Array:
        """Exact log-probabilities [B, T] of the tokens that are probed; 0 elsewhere."""
        labels = jnp.where(jnp.asarray(rows.probed), rows.batch.labels, -1)
        exact = head.logprobs(
            hidden,
            labels,
            temperature=self.config.sampling.temperature,
            chunk=probe_count(self.config),
        )
        return jax.lax.stop_gradient(exact)

    def _check(self, rows: PolicyBatch, metrics: dict[str, jax.Array]) -> HeadCheck:
        """Compare the errors of a micro-batch with `grpo.max_head_error`."""
        live, probed = jnp.asarray(rows.batch.labels) >= 0, jnp.asarray(rows.probed)
        bound, error = self.config.grpo.max_head_error, metrics[_ESTIMATED]
        estimated, tokens = _mean_error(error, live)
        measured, count = _mean_error(metrics["logprob"] - metrics[_EXACT], probed)
        lost = jnp.sum(live & jnp.isinf(error))
        accepted = (estimated <= bound) & (measured <= bound)  # False for NaN
        return HeadCheck(~accepted, estimated, measured, tokens, count, lost)

    def trace_backward(self) -> jax.stages.Traced:
        """See `DecoderProgram`: the gradients of the largest micro-batch."""
        shape = self.shapes(self.config.grpo.max_tokens_train)[-1]
        return self.trace_gradients(shape, self.config.head)

    def held_with_backward(self) -> list[Any]:
        """See `DecoderProgram`: moments and reference."""
        held = [] if self.streamed else [self.state_shapes.optimizer]
        return held + [self.state_shapes.params] * self.config.grpo.has_reference

    def _head_call(self, head: HeadConfig) -> PolicyHeadOptions:
        sampling = self.config.sampling
        return PolicyHeadOptions(
            sampling.temperature, head.logits, sampling.support_size
        )

    def _loss_of_hidden(
        self, head: HeadConfig, module, hidden, rows, normalizer, numbers=None
    ):
        call = self._head_call(head)
        if head.recorded is not None:
            call = dataclasses.replace(call, recorded=True)
        if numbers is not None:
            key = Stream.GRADIENTS.key(self.config.run.seed, *numbers)
            call = dataclasses.replace(call, sample=head.sample, key=key)
        return policy_loss(module, hidden, rows, normalizer, self.config.grpo, call)

    def trace_head(self, shape: Shape, head: HeadConfig) -> jax.stages.Traced:
        """Trace loss and gradients of only the head."""

        def loss(module, hidden, _, micro_batch, normalizer):
            drawn_by = self.micro_batch_numbers(head, 0, 0, 0)
            return self._loss_of_hidden(
                head, module, hidden, micro_batch, normalizer, *drawn_by
            )

        arguments = (
            self.micro_batch(shape, head),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
        differentiated = 1 if self.head_is_frozen else (0, 1)
        return self.trace_of_head(loss, shape, *arguments, argnums=differentiated)

    def micro_batch(self, shape: Shape, head: HeadConfig) -> PolicyBatch:
        """Shapes of a micro-batch that has a backward pass, by this head."""
        floats: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
        grpo = self.config.grpo
        reference = floats if grpo.has_reference else None
        shapes = PolicyBatch(self.tokens(*shape), floats, floats, floats, reference)
        if grpo.corrects_tokens:
            shapes = shapes._replace(rollout_logprob=floats)
        if grpo.has_sequence_ratio:
            shapes = shapes._replace(sequence_log_ratio=floats)
        if grpo.keeps_at_random:
            shapes = shapes._replace(inverse=floats)
        rows = self.layout.of_tokens(shapes)
        if (k := head.recorded) is not None:
            probed: Any = jax.ShapeDtypeStruct(shape, jnp.bool_)
            rows = rows._replace(
                entries=self.layout.of_hidden(entry_shapes(shape, k)),
                probed=self.layout.of_tokens(probed),
            )
        if self.model_config.router_aux_loss_coef:
            rows = rows._replace(share=self.number())
        of_tokens = dict(
            supports=self._support_shapes(shape), routes=self._route_shapes(shape)
        )
        return rows._replace(**of_tokens)


class CompiledAtUse(dict[Shape, jax.stages.Compiled]):
    """The programs of a function that traces them by shape."""

    def __init__(self, trace: Callable[[Shape], jax.stages.Traced]):
        super().__init__()
        self._trace = trace

    def __missing__(self, shape: Shape) -> jax.stages.Compiled:
        self[shape] = compiled = self._trace(shape).lower().compile()
        return compiled


def _mean_error(error: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of errors, each at most `MOST_ERROR`, and the number of tokens."""
    capped, count = jnp.minimum(abs(error), MOST_ERROR), jnp.sum(where)
    return jnp.sum(jnp.where(where, capped, 0)) / jnp.maximum(count, 1), count


def _int_shape(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
