"""Reinforcement learning with rewards that are functions: roll out, then update.

prompts -> G completions each -> rewards -> advantages
-> old (and reference) log-probabilities, forward only -> packed updates
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem import checkpoints
from jaxmem.data import tasks, vocabulary
from jaxmem.data.rewards import RewardError, TrainerState
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import balance
from jaxmem.models.decoder import Decoder
from jaxmem.train import metrics
from jaxmem.train.evaluation import Evaluated, is_due
from jaxmem.train.jobs import advantages, rollout_metrics
from jaxmem.train.jobs.accumulated import AccumulatedSums
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.grpo import policy_report
from jaxmem.train.jobs.grpo.minibatches import Minibatch, cut_prefixes, packing_of
from jaxmem.train.jobs.grpo.policy_program import CompiledAtUse, PolicyProgram
from jaxmem.train.jobs.job import Job
from jaxmem.train.jobs.policy_objective import HeadCheck, correction
from jaxmem.train.jobs.rollout import shown_samples
from jaxmem.train.jobs.rollout.engine_source import (
    DialogueEngineSource,
    EngineParts,
    EngineSource,
)
from jaxmem.train.jobs.rollout.engines.pool import connect
from jaxmem.train.jobs.rollout.engines.protocol import EngineOptions
from jaxmem.train.jobs.rollout.engines.weight_folder import WeightFolder
from jaxmem.train.jobs.rollout.entries import RolloutEntries
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.jobs.rollout.packed import Completions, Logprobs, RolloutSupports
from jaxmem.train.jobs.rollout.prompt_tasks import (
    Dialogues,
    Groups,
    TaskPrompts,
    ends_of,
)
from jaxmem.train.jobs.rollout.prompts import Graded, PromptIds
from jaxmem.train.jobs.rollout.recorded import RecordedRollouts
from jaxmem.train.jobs.rollout.samples import Sampled, chosen_groups, select_groups
from jaxmem.train.jobs.rollout.saved_rollouts import RolloutFiles, records
from jaxmem.train.jobs.rollout.sources import (
    OwnSampler,
    RecordedSource,
    RolloutSource,
)
from jaxmem.train.jobs.rollout.transcripts import TranscriptNeeds
from jaxmem.train.jobs.rollout.turns import SamplePrograms, Turns
from jaxmem.train.jobs.rollout_metrics import Clock, Rollout, Update
from jaxmem.train.metrics import HeadCost, PolicyMetrics
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.phases import Phase
from jaxmem.train.program import TrainState, fixed_moments

_EVALUATION = 2**16  # the first number of draws beyond the attempts of `grpo.resample`


class _Measured(NamedTuple):
    """Results of a forward pass over samples."""

    logprobs: Logprobs
    entries: RolloutEntries | None  # None: nothing records any


class Grpo(Job, name="grpo"):
    """Rollouts, their rewards, and packed updates."""

    Config, Metrics = GrpoJobConfig, PolicyMetrics
    changeable = ("optimizer", "grpo", "sampling", "rollouts")
    has_rollouts = True
    _files: RolloutFiles | None = None  # of run.save_rollouts
    rollouts: RolloutSource  # set by `open`
    chart = ("reward", "reward")

    def reading(self) -> TaskPrompts:
        config, grpo = self.config, self.config.grpo
        routed = config.model if grpo.replay_routing else None
        groups = Groups(grpo.group_size, TranscriptNeeds(grpo.turn_rewards, routed))
        checkpoint = config.model.checkpoint
        return TaskPrompts(
            config.task, config.sampling, checkpoint, grpo.prompts, groups
        )

    def fixed(self) -> dict[str, Any]:
        config, fixed = self.config, super().fixed()
        trainable = {"trainable": config.optimizer.trainable}
        # The optimizer counts updates, whose number in a rollout must stay the same.
        names = "minibatches", "epochs"
        updates = {name: getattr(config.grpo, name) for name in names}
        return fixed | {
            "optimizer": fixed_moments(config.optimizer) | trainable,
            "grpo": updates,
        }

    def text(self, directory: Path) -> checkpoints.Text:
        """See `Job`: without a checkpoint, the words of sums."""
        pad, eos = tasks.VOCABULARY[:2]
        template = self.reads.template_text()
        return checkpoints.Text(vocabulary.of_words(), None, eos, pad, template)

    def vocabulary(self) -> int:
        """See `Job`: known without prompts."""
        return ends_of(self.config.task, self.config.model.checkpoint).size

    expected_vocabulary = vocabulary

    def saved_vocabulary(self, directory: Path) -> int:
        return self.vocabulary()

    def scaled(self, factor: float) -> tuple[int, dict[str, Any]] | None:
        slots = int(self.config.grpo.max_tokens_train * factor)
        rows, rest = divmod(slots, self.config.row_lengths[-1])
        return None if rest else (rows, {"grpo.max_tokens_train": slots})

    def make_program(self, vocab_size: int) -> PolicyProgram:
        return PolicyProgram(self.config)

    def phases(self) -> list[Phase]:
        return policy_report.phases_of(self.program)

    def open(self) -> None:
        self.task = self.reads.task
        self.task.agree()
        self.task.check()
        self.rollouts = self._make_source()
        self._has_told_of_cuts = self._has_told_of_rejections = False
        run = self.config.run
        self._files = RolloutFiles(run.out_dir) if run.save_rollouts else None
        self.last: Rollout | None = None  # its samples are shown by the report

    def _make_source(self) -> RolloutSource:
        if isinstance(self.task, RecordedRollouts):
            return RecordedSource(self.config, self.task)
        if self.config.rollouts.engine is not None:
            return self._make_engine_source()
        return OwnSampler(
            self.config, self.task, self.program, lambda: self._compiled.sample
        )

    def _make_engine_source(self) -> EngineSource:
        config, ends = self.config, self.program.ends
        rollouts, run = config.rollouts, Path(config.run.out_dir).resolve().name
        options = EngineOptions(
            sampling=config.sampling,
            eos_ids=ends.eos_ids,
            vocab_size=ends.size,
            run=run,
            timeout=rollouts.timeout,
            wants_routes=config.grpo.replay_routing,
            wants_spans=rollouts.max_staleness > 0,
            is_stopping=lambda: self._is_stopping(),
            say=lambda line: self._say(line),
        )
        addresses = rollouts.addresses

        def open_folder() -> WeightFolder:
            root = None
            if rollouts.weights is not None:
                root = Path(rollouts.weights).expanduser()
            return WeightFolder(root, run, addresses, self._say)

        source = EngineSource
        if isinstance(self.task, Dialogues):
            source = DialogueEngineSource
        return source(
            config,
            self.task,
            EngineParts(
                limits=self.reads.transcript_limits,
                open_folder=open_folder,
                size=self._bytes_for_engines(),
                write=self._write_weights,
                connect=lambda: connect(rollouts.engine, addresses, options),
                is_stopping=options.is_stopping,
            ),
        )

    def _write_weights(self, directory: Path, weights: tuple[Any, Any]) -> None:
        """Write weights as engines load them: a checkpoint, or an adapter for it."""
        model, config = self.program.model(*weights), self.config.model
        assert isinstance(model, Decoder) and config.checkpoint is not None
        if config.lora_rank:
            checkpoints.save_adapter(directory, model, base=config.checkpoint)
        else:
            checkpoints.save(
                directory, model, like=config.checkpoint, dtype=config.dtype
            )

    def _bytes_for_engines(self) -> int:
        """Bytes of the weights that `_write_weights` writes."""
        params, frozen = self.program.state_shapes.params, self.program.frozen_shapes
        is_adapter, dtype = self.config.model.lora_rank, self.config.model.dtype
        shapes = jax.tree.leaves(params if is_adapter else (params, frozen))
        return sum(x.size for x in shapes) * np.dtype(dtype).itemsize

    def begin(self, progress: ProgressReport, is_stopping: Callable[[], bool]) -> None:
        self._say, self._is_stopping = progress.say, is_stopping
        self.rollouts.begin()

    def close(self) -> None:
        if "rollouts" in vars(self):
            self.rollouts.close()

    def compile(self, progress: ProgressReport) -> None:
        self._compiled, self._say = self.program.compile(), progress.say
        self._reference = None
        if self.config.grpo.has_reference:
            self._reference = self.program.initial_params()
        self._advantages = advantages.load(self.config.grpo.advantage_name)
        self._correction = jax.jit(functools.partial(correction, self.config.grpo))

    def get_state(self) -> dict[str, Any]:
        return self.rollouts.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.rollouts.restore(state)

    def samples(self, count: int = 8) -> list[dict[str, Any]]:
        if (last := self.last) is None:
            return []
        rewards, logprobs = last.graded.rewards, np.asarray(last.samples.logprobs)
        return shown_samples.table(
            self.task, last.prompts, last.completions, rewards, logprobs, count
        )

    def step(self, number: int, state: TrainState) -> tuple[TrainState, PolicyMetrics]:
        clock, compiled, config = Clock(), self._compiled, self.config
        grpo = config.grpo
        rollout = self._roll_out(number, state.params)
        measure = functools.partial(self._measure_at, state.params, rollout)
        if (line := self.rollouts.verify(rollout, measure)) is not None:
            self._say(line)
        clock.lap("rollout")
        read, cut = cut_prefixes(self.config, number, rollout.completions)
        rest = rollout._replace(completions=read)
        old, entries = self._measure_old(number, state.params, rest)
        clock.lap("old")
        reference = None
        if self._reference is not None:
            # The reference chooses its own experts: its weights do not change, so that
            # its output does not either.
            unrouted = rest._replace(completions=read._replace(routes=None))
            reference = self._measure_logprobs(
                compiled.reference, self._reference, unrouted
            ).drawn_from
        clock.lap("reference")
        sampled = np.asarray(rollout.samples.logprobs)
        learned = Minibatch(
            read,
            rollout.advantages,
            sampled if config.passes.start_from_sampler else old.drawn_from,
            reference,
            rollout.supports,
            rollout=sampled,
            correction=self._correction_weights(old, rollout)
            if grpo.drops_sequences
            else None,
            learned=rollout.learned if grpo.mask_truncated else None,
            cut=cut,
            entries=entries,
        )
        state, updates = self._take_updates(number, state, learned, old)
        clock.lap("update")
        self.task.trainer_state = TrainerState(number, config.run.steps)
        self.rollouts.updated(number, (state.params, self.frozen))
        clock.lap("rollout")
        self.last = rollout
        return state, self._make_metrics(number, rollout, old, updates, clock.seconds)

    def _roll_out(self, number: int, params: Any) -> Rollout:
        """Sample until rewards differ in enough groups, as `grpo.resample` allows."""
        grpo, parts, weights = self.config.grpo, [], (params, self.frozen)
        self.task.trainer_state = TrainerState(number - 1, self.config.run.steps)
        for attempt in range(1 + grpo.resample):
            parts.append(self.rollouts.sampled(number, attempt, weights))
            differing = [part.rewards_differ(grpo.group_size) for part in parts]
            if np.concatenate(differing).sum() >= grpo.prompts:
                break
        self.rollouts.finish(number, len(parts))  # after the rewards, which may raise
        sampled = select_groups(parts, grpo.prompts, grpo.group_size)
        if self._files is not None:
            self._save_rollout(self._files, number, parts)
        observed = rollout_metrics.of_sampled(
            parts, sampled if grpo.resample else None, grpo.group_size
        )
        observed |= self.rollouts.metrics()
        compared = sampled.advantages(grpo.group_size, self._advantages)
        rows = np.flatnonzero(sampled.graded.rewarded)
        self._check_rewarded(number, len(rows))
        if len(rows) < grpo.samples:
            sampled, compared = take(sampled, rows), compared[rows]
        samples, supports, entries = sampled.samples, None, None
        if samples.support_ids is not None:
            supports = RolloutSupports.of(np.asarray(samples.support_ids))
            samples = samples._replace(support_ids=None)
        if samples.entries is not None:
            entries = RolloutEntries.of_samples(samples.entries)
            samples = samples._replace(entries=None)
        return Rollout(
            prompts=sampled.prompts,
            completions=sampled.completions,
            samples=samples,
            supports=supports,
            entries=entries,
            graded=sampled.graded,
            advantages=compared,
            truncated=sampled.truncated,
            sampled=observed,
        )

    def _save_rollout(
        self, files: RolloutFiles, number: int, parts: Sequence[Sampled]
    ) -> None:
        """Write all completions of a step, also of groups that are not kept."""
        grpo = self.config.grpo
        groups = sum(len(part.turns) for part in parts) // grpo.group_size
        chosen = chosen_groups(parts, grpo.prompts, grpo.group_size)
        kept = np.isin(np.arange(groups), chosen).repeat(grpo.group_size)
        files.write(number, records(self.task, parts, kept, version=number - 1))

    def _check_rewarded(self, number: int, count: int) -> None:
        """Raise unless each minibatch has a completion with a reward."""
        grpo = self.config.grpo
        if count < grpo.minibatches:
            raise RewardError(
                f"step {number}: {count} of {grpo.samples} completions have a reward, "
                f"fewer than grpo.minibatches={grpo.minibatches}, and completions "
                "without a reward teach nothing; correct task.reward or "
                "task.environment, or set grpo.resample to sample other prompts"
            )

    def holds_out(self) -> bool:
        return self.task.held_out() is not None

    def evaluate(
        self, state: TrainState, step_metrics: PolicyMetrics
    ) -> Evaluated | None:
        """Complete the held-out prompts at temperature 0, and `eval.samples` times."""
        prompts, config = self.task.held_out(), self.config.eval
        if prompts is None:
            return None
        prompts, step = prompts.first(config.prompts), step_metrics.step
        self.task.trainer_state = TrainerState(step, self.config.run.steps)
        graded = self._held_out_grades(state, prompts, self._greedy_samplers, step)
        values, more = rollout_metrics.of_held_out(graded), ""
        if config.samples is not None:
            repeated = prompts.repeated(config.samples)
            graded = self._held_out_grades(
                state, repeated, self._evaluation_samplers, step
            )
            at_k = rollout_metrics.of_held_out_samples(graded, config.samples)
            values["held_out_at_k"] = at_k
            more = _shown_at_k(at_k)
        reward = values["held_out_reward"]
        cost = math.nan if reward is None else -reward
        evaluated = step_metrics._replace(**values)
        return Evaluated(evaluated, cost, is_reward=True, more=more)

    def _held_out_grades(
        self, state: TrainState, prompts: PromptIds, programs: SamplePrograms, step: int
    ) -> list[Graded]:
        """Rewards of one completion of each prompt, which the step determines."""
        graded, weights = [], (state.params, self.frozen)
        parts = prompts.parts(self.config.grpo.samples)  # of the shape that is compiled
        for number, (part, live) in enumerate(parts):
            draw = step, _EVALUATION + number
            sample = Turns(self.program, programs, weights, draw)
            graded.append(self._grade_part(part, sample, live))
        return graded

    def _grade_part(self, prompts: PromptIds, sample: Turns, live: int) -> Graded:
        """The rewards of the first `live` prompts, which the others repeat."""
        if isinstance(self.task, Dialogues):
            return self.task.held_out_grades(prompts, sample, live)
        samples = sample(prompts.ids, prompts.lengths, 0)
        completions = take(Completions.of_samples(prompts, samples), np.arange(live))
        return self.task.grade(prompts.first(live), completions)

    @functools.cached_property
    def _greedy_samplers(self) -> SamplePrograms:
        return SamplePrograms.of(self.program, evaluated_at=0)

    @functools.cached_property
    def _evaluation_samplers(self) -> SamplePrograms:
        temperature = self.config.eval.temperature
        return SamplePrograms.of(self.program, evaluated_at=temperature)

    def _measure_old(self, number: int, params: Any, rollout: Rollout) -> "_Measured":
        """Old log-probabilities of samples that the first update does not measure.

        The entries are of all samples, recorded by the sampler or by this pass.
        """
        passes, shape = self.config.passes, rollout.completions.sampled.shape
        old = Logprobs.unknown(shape, rollout.supports is not None)
        if not passes.have_old_pass:
            return _Measured(old, rollout.entries)
        rows = np.arange(len(rollout.advantages))
        if passes.read_own_old:
            rows = np.setdiff1d(rows, next(self._minibatches(number, len(rows))))
        rest = take(rollout, rows)
        measured = self._run_forward(self._compiled.logprobs, params, rest, number)
        old.put(rows, measured.logprobs)
        return _Measured(old, measured.entries)

    def _measure_logprobs(
        self,
        programs: Mapping[Any, Any],
        params: Any,
        rollout: Rollout | Minibatch,
    ) -> Logprobs:
        """Log-probabilities of sampled tokens, by one of the forward passes."""
        return self._run_forward(programs, params, rollout).logprobs

    def _run_forward(
        self,
        programs: Mapping[Any, Any],
        params: Any,
        rollout: Rollout | Minibatch,
        number: int = 0,
    ) -> "_Measured":
        """Results of a forward pass; the number of the step decides its draws."""
        config, completions = self.config, rollout.completions
        packed = packing_of(config, completions, config.grpo.max_tokens_forward)
        supports = itertools.repeat(None)
        if rollout.supports is not None:
            supports = rollout.supports.micro_batches(completions, packed)
        outputs, routes = [], completions.routed(packed)
        of_policy = programs is not self._compiled.reference
        for i, batch in enumerate(completions.batches(packed)):
            shape = batch.tokens.shape
            structs = self.program.forward(shape, of_policy)
            numbers = None if structs[-1] is None else np.array([number, i], np.uint32)
            arrays = batch, next(supports), next(routes), numbers
            arrays = self.program.layout.place(arrays, structs)
            outputs.append(programs[shape](params, self.frozen, *arrays))
        outputs = jax.device_get(outputs)
        drawn_from, whole, recorded = zip(*outputs, strict=True)
        entries = None
        if recorded[0] is not None:
            entries = RolloutEntries.of_packed(completions, packed, recorded)
        pairs = list(zip(drawn_from, whole, strict=True))
        return _Measured(completions.measured(packed, pairs), entries)

    def _measure_at(
        self, params: Any, rollout: Rollout, rows: np.ndarray, temperature: float
    ) -> Logprobs:
        """Log-probabilities of some rows, as if sampled at a temperature."""
        programs: Mapping[Any, Any] = self._compiled.logprobs
        if not programs or temperature != self.config.sampling.temperature:
            values = {"sampling.temperature": temperature}
            program = PolicyProgram(self.config.replaced(values))
            programs = CompiledAtUse(program.trace_logprobs)
        return self._measure_logprobs(programs, params, take(rollout, rows))

    def _take_updates(
        self, number: int, state: TrainState, rollout: Minibatch, old: Logprobs
    ) -> tuple[TrainState, list[Update]]:
        """Take every update of the step.

        The first one measures the tokens that `old` lacks, and writes them into it.
        `rollout.old` is the same array, or else the sampler's.
        """
        updates, grpo, passes = [], self.config.grpo, self.config.passes
        minibatches = self._minibatches(number, len(rollout.advantages))
        for minibatch, chosen in enumerate(minibatches):
            part = take(rollout, chosen)
            if grpo.has_sequence_ratio:
                part = self._with_ratios(state.params, part, minibatch)
            part = part.drawn(self.config, number, minibatch)
            known = part.kept
            if part.entries is not None:  # the first pass measures a few tokens exactly
                known = part.probes(self.config, number, minibatch)
                part = part._replace(probed=known)
            sums, measured, checks = self._sum_gradients(number, minibatch, state, part)
            if minibatch == 0 and passes.read_own_old:
                labelled = part.completions.keeping(known)
                packed = part.packing(self.config)
                old.put(chosen, labelled.measured(packed, jax.device_get(measured)))
            state, norm = self._compiled.update(state, sums.gradients)
            updates.append(
                Update(
                    loss=sums.loss,
                    grad_norm=norm,
                    metrics=sums.metrics,
                    tokens=part.token_count,
                    routed=sums.routed,
                    draw=part.draw,
                    checks=checks,
                )
            )
        return state, jax.device_get(updates)

    def _with_ratios(self, params: Any, part: Minibatch, minibatch: int) -> Minibatch:
        """The part with log-ratios of its sequences, which are 0 for equal weights."""
        ratios = np.zeros(len(part.advantages), np.float32)
        if minibatch or self.config.passes.start_from_sampler:
            now = self._measure_logprobs(self._compiled.logprobs, params, part)
            delta = np.where(now.known, now.drawn_from - part.old, 0)
            ratios = delta.sum(1) / np.maximum(now.known.sum(1), 1)
        return part._replace(log_ratio=ratios.astype(np.float32))

    def _sum_gradients(
        self,
        number: int,
        minibatch: int,
        state: TrainState,
        part: Minibatch,
    ) -> tuple[AccumulatedSums, list[Any], list[HeadCheck]]:
        """Sums over the micro-batches, log-probabilities and a check of each.

        A micro-batch that its check rejects is computed again by an exact forward pass.
        """
        program, compiled, head = self.program, self._compiled, self.config.head
        sums, measured, checks = compiled.zeros(), [], []

        def add(programs, head, i, rows, normalizer):
            shape = rows.batch.tokens.shape
            rows = program.layout.place(rows, program.micro_batch(shape, head))
            drawn_by = program.micro_batch_numbers(head, number, minibatch, i)
            weights = state.params, self.frozen
            return programs[shape](*weights, sums, rows, normalizer, *drawn_by)

        batches = functools.partial(part.micro_batches, self.config)
        for i, micro_batch in enumerate(batches()):
            sums, (logprobs, check) = add(compiled.gradients, head, i, *micro_batch)
            measured.append(logprobs[:2])
            checks.append(check)
        if head.recorded is None:
            return sums, measured, []
        checks = jax.device_get(checks)
        if any(check.rejected for check in checks):
            for i, (rows, normalizer) in enumerate(batches()):
                if checks[i].rejected:
                    rows = rows._replace(entries=None, probed=None)
                    exact, by = head.exact_forward, compiled.exact_gradients
                    sums, _ = add(by, exact, i, rows, normalizer)
        return sums, measured, checks

    def _correction_weights(self, old: Logprobs, rollout: Rollout) -> np.ndarray:
        """Weights [N, R] of `grpo.correction` for the tokens of a rollout."""
        samples = rollout.samples
        return np.asarray(
            self._correction(old.drawn_from, samples.logprobs, samples.mask)
        )

    def _minibatches(self, number: int, count: int) -> Iterator[np.ndarray]:
        """Yield the indices of each minibatch of `count` samples, epoch after epoch."""
        grpo = self.config.grpo
        for epoch in range(grpo.epochs):
            rng = Stream.MINIBATCHES.generator(self.config.run.seed, number, epoch)
            yield from np.array_split(rng.permutation(count), grpo.minibatches)

    def _make_metrics(
        self,
        number: int,
        rollout: Rollout,
        old: Logprobs,
        updates: list[Update],
        seconds: dict[str, float],
    ) -> PolicyMetrics:
        config, vocab_size = self.config, self.program.model_config.vocab_size
        observed = rollout_metrics.of_rollout(rollout)
        weights = None
        if config.grpo.corrects_tokens or config.grpo.drops_sequences:
            weights = self._correction_weights(old, rollout)
        fields: dict[str, Any] = {
            **observed,
            **rollout_metrics.agreement(old, rollout.samples),
            **rollout_metrics.dropped(weights, old, rollout.samples),
            **rollout_metrics.of_supports(rollout.supports, config, vocab_size or 0),
            **rollout_metrics.of_updates(updates),
            **seconds,
        }
        self._tell_of_rejections(number, updates)
        routed = [u.routed for u in updates if u.routed is not None]
        if routed:
            total = jax.tree.map(lambda *x: sum(x), *routed)
            fields["routers"] = self.program.routers(total)
            if config.grpo.replay_routing:
                fields["rerouted"] = balance.rerouted(total)
        self._tell_of_cuts(number, fields.get("support_full"))
        return PolicyMetrics(
            step=number,
            learning_rate=float(self.learning_rates[number - 1]),
            tokens_per_second=observed["tokens"] / seconds["seconds"],
            peak_gib=metrics.peak_gib(),
            gradient_samples=config.head.samples,
            backend=self.program.backend,
            **fields,
        )

    def _tell_of_rejections(self, number: int, updates: Sequence[Update]) -> None:
        """Say that micro-batches of a step took an exact forward pass, and why.

        After the first such step, only steps that are logged say so.
        """
        checks = [check for update in updates for check in update.checks]
        rejected = [check for check in checks if check.rejected]
        run = self.config.run
        is_logged = is_due(run.log_every, number, run.steps)
        if rejected and (is_logged or not self._has_told_of_rejections):
            self._has_told_of_rejections = True
            estimated = max(float(check.estimated) for check in rejected)
            measured = max(float(check.measured) for check in rejected)
            self._say(
                f"step {number}: {len(rejected)} of {len(checks)} micro-batches took "
                "an exact forward pass, because their log-probabilities from recorded "
                f"entries had mean errors of up to {estimated:.2g} nats as estimated, "
                f"and {measured:.2g} as measured; the bound is "
                f"grpo.max_head_error={self.config.grpo.max_head_error:g}"
            )

    def _tell_of_cuts(self, number: int, share: float | None) -> None:
        """Say once that supports reach the limit, where the sampler cuts them."""
        if not share or self._has_told_of_cuts:
            return
        self._has_told_of_cuts = True
        limit = self.config.sampling.support
        self._say(
            f"step {number}: {share:.1%} of the tokens have supports of "
            f"sampling.support={limit} ids; larger supports are cut to their most "
            "probable ids, in the sampler and in the trainer; raise sampling.support "
            "to cover all of sampling.top_p or min_p"
        )

    def costs(self) -> dict[str, HeadCost]:
        return policy_report.head_costs(self.program, self._compiled)

    def summary(self, history: Sequence[PolicyMetrics]) -> Mapping[str, Any]:
        """See `Job`; seconds and bytes are by phase."""
        timed = policy_report.timed_phases(history, self._compiled)
        return {
            "first_reward": history[0].reward,
            "last_reward": history[-1].reward,
            "peak_gib": metrics.peak_gib(),
            "phases": {
                name: {"seconds": seconds, **memory._asdict()}
                for name, seconds, memory in timed
            },
            **policy_report.entries_summary(history),
        }

    def closing(self, history: Sequence[PolicyMetrics]) -> Iterator[Any]:
        yield metrics.phase_table(policy_report.timed_phases(history, self._compiled))
        if self.last is not None:
            yield from policy_report.examples(self.task, self.last)
        yield (
            f"reward {history[0].reward:.3f} -> {history[-1].reward:.3f} in "
            f"{len(history)} rollouts, {metrics.tokens_per_second(history):,.0f} "
            "tokens/s"
        )
        yield from policy_report.advice_on_entries(self.config, history)


def _shown_at_k(values: Mapping[str, float | None]) -> str:
    """Mean reward and the last pass@k of sampled completions, for a line."""
    names = list(values)
    return "".join(
        f"  {name.removeprefix('held_out_')} {value:.3f}"
        for name in (names[0], names[-1])
        if (value := values[name]) is not None
    )
