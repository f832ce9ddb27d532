"""Reinforcement learning with rewards that are functions: roll out, then update.

prompts -> G completions each -> rewards -> advantages
-> old (and reference) log-probabilities, forward only -> packed updates
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxmem import losses
from jaxmem.core import processes
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.sampling import Samples
from jaxmem.train import metrics, starting
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs import policy_report, rollout_metrics, samples
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.ending import train_and_leave
from jaxmem.train.jobs.epochs import with_steps
from jaxmem.train.jobs.minibatches import (
    Minibatch,
    kept_tokens,
    packing_of,
)
from jaxmem.train.jobs.policy_program import Compiled, PolicyProgram
from jaxmem.train.jobs.questions import (
    Asked,
    Task,
    place_of,
    state_of,
    task_of,
)
from jaxmem.train.jobs.rollout_metrics import Clock, Logprobs, Rollout, Update
from jaxmem.train.jobs.rollouts import Completions, Supports
from jaxmem.train.loop import Settings, changeable_settings, open_run
from jaxmem.train.metrics import HeadCost, PolicyMetrics
from jaxmem.train.program import TrainState, fixed_moments


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[PolicyMetrics]  # every step of the run, of earlier processes too
    costs: dict[str, HeadCost]  # by implementation; empty without compare_heads


# ------------------------------------------------------------------- steps


class _Job:
    """The steps of a run, for `Run.take_steps`."""

    def __init__(
        self,
        program: PolicyProgram,
        compiled: Compiled,
        task: Task | None = None,
        say: Callable[[str], None] = print,
    ):
        self._program, self._compiled = program, compiled
        self._config = program.config
        self.task = task or task_of(program.config)
        self._say, self._told = say, False
        self.frozen = program.frozen()
        self._reference = None
        if self._config.grpo.kl_coefficient:
            self._reference = program.initial_params()
        self._next = 0  # number of the next problem
        self._advantages = jax.jit(
            lambda rewards: losses.grpo_advantages(
                rewards, normalize_std=self._config.grpo.loss != "dr_grpo"
            )
        )
        self.last: Rollout | None = None  # what the report shows samples of
        self.initial_state = program.initial_state
        self.restored_state = program.restored_state

    def get_state(self) -> dict[str, Any]:
        return state_of(self.task, self._next)

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = place_of(self.task, state)

    def samples(self) -> list[dict[str, Any]]:
        """See `steps.ShowsSamples`."""
        if (last := self.last) is None:
            return []
        rewards, logprobs = last.graded.rewards, np.asarray(last.samples.logprobs)
        return samples.table(self.task, last.asked, last.completions, rewards, logprobs)

    def step(self, number: int, state: TrainState) -> tuple[TrainState, PolicyMetrics]:
        clock, compiled = Clock(), self._compiled
        rollout = self._roll_out(number, state.params)
        clock.lap("rollout")
        old = self._logprobs(compiled.logprobs, state.params, rollout)
        clock.lap("old")
        reference = None
        if self._reference is not None:
            made = self._logprobs(compiled.reference, self._reference, rollout)
            reference = made.drawn_from
        clock.lap("reference")
        learned = Minibatch(
            rollout.completions,
            rollout.advantages,
            old.drawn_from,
            reference,
            rollout.supports,
        )
        state, updates = self._learn(number, state, learned)
        clock.lap("update")
        self.last = rollout
        return state, self._metrics(number, rollout, old, updates, clock.seconds)

    def _roll_out(self, number: int, params: Any) -> Rollout:
        grpo = self._config.grpo
        asked = self.task.ask(self._next, grpo.prompts).repeated(grpo.group_size)
        completions, samples = self._complete(
            self._compiled.sample, params, asked, number
        )
        graded = self.task.grade(asked, completions)
        self._next += grpo.prompts  # after the rewards, which may raise
        groups = graded.rewards.reshape(grpo.prompts, grpo.group_size)
        advantages = np.asarray(self._advantages(groups)).ravel()
        supports = None
        if samples.support_ids is not None:
            supports = Supports.of(np.asarray(samples.support_ids))
            samples = samples._replace(support_ids=None)
        return Rollout(asked, completions, samples, supports, graded, advantages)

    def evaluate(self, state: TrainState, taken: PolicyMetrics) -> Evaluated | None:
        """Complete the held-out prompts at temperature 0."""
        asked, rows = self.task.held_out(), self._config.grpo.samples
        if asked is None:
            return None
        asked = asked.first(self._config.eval.prompts)
        graded = []
        for part, live in asked.parts(rows):  # of the shape that is compiled
            completions, _ = self._complete(
                self._greedy, state.params, part, taken.step
            )
            kept = completions.select(np.arange(live))
            graded.append(self.task.grade(part.first(live), kept))
        values = rollout_metrics.of_held_out(graded)
        return Evaluated(taken._replace(**values), -values["held_out_reward"])

    @functools.cached_property
    def _greedy(self) -> jax.stages.Compiled:
        return self._program.trace_sample(greedy=True).lower().compile()

    def _complete(
        self, sample: jax.stages.Compiled, params: Any, asked: Asked, number: int
    ) -> tuple[Completions, Samples]:
        placed = self._program.sampling_layout.place(asked[:2], self._program.prompts)
        samples: Samples = jax.device_get(
            sample(params, self.frozen, *placed, np.int32(number))
        )
        tokens, lengths = np.asarray(samples.tokens), np.asarray(samples.lengths)
        return Completions.of(*asked[:2], tokens, lengths), samples

    def _logprobs(
        self, programs: Mapping[Any, Any], params: Any, rollout: Rollout
    ) -> Logprobs:
        """Of the sampled tokens, from one of `Compiled`'s forward passes."""
        config, completions = self._config, rollout.completions
        packed = packing_of(config, completions, config.grpo.max_tokens_forward)
        supports = itertools.repeat(None)
        if rollout.supports is not None:
            supports = rollout.supports.micro_batches(completions, packed)
        outputs = []
        for batch in completions.batches(packed):
            shape, given = batch.tokens.shape, (batch, next(supports))
            placed = self._placed(given, self._program.forward(shape))
            outputs.append(programs[shape](params, self.frozen, *placed))
        drawn_from, whole = zip(*jax.device_get(outputs), strict=True)
        collected = completions.collect(packed.unpack(drawn_from))
        if whole[0] is None:
            return Logprobs(collected, None)
        return Logprobs(collected, completions.collect(packed.unpack(whole)))

    def _placed(self, arrays: Any, structs: Any) -> Any:
        return self._program.layout.place(arrays, structs)

    def _learn(
        self, number: int, state: TrainState, rollout: Minibatch
    ) -> tuple[TrainState, list[Update]]:
        """Take every update of the step."""
        updates, program = [], self._program
        for minibatch, chosen in enumerate(self._minibatches(number)):
            part, sums = rollout.select(chosen), self._compiled.zeros()
            lengths = part.completions.lengths
            kept = kept_tokens(self._config, number, minibatch, lengths)
            micro_batches = part.micro_batches(self._config, kept)
            for i, (rows, normalizer) in enumerate(micro_batches):
                shape = rows.batch.tokens.shape
                rows = self._placed(rows, program.micro_batch(shape))
                drawn_by = program.micro_batch_numbers(
                    self._config.head, number, minibatch, i
                )
                sums = self._compiled.gradients[shape](
                    state.params, self.frozen, sums, rows, normalizer, *drawn_by
                )
            state, norm = self._compiled.update(state, sums.gradients)
            tokens = int(lengths.sum() if kept is None else kept.sum())
            updates.append(Update(sums.loss, norm, sums.metrics, tokens))
        return state, jax.device_get(updates)

    def _minibatches(self, number: int) -> Iterator[np.ndarray]:
        """Indices of samples; each sample once an epoch."""
        grpo = self._config.grpo
        for epoch in range(grpo.epochs):
            rng = np.random.default_rng([self._config.run.seed, number, epoch])
            yield from np.split(rng.permutation(grpo.samples), grpo.minibatches)

    def _metrics(
        self,
        number: int,
        rollout: Rollout,
        old: Logprobs,
        updates: list[Update],
        seconds: dict[str, float],
    ) -> PolicyMetrics:
        config, vocab_size = self._config, self._program.model_config.vocab_size
        observed = rollout_metrics.of_rollout(rollout, config)
        fields: dict[str, Any] = {
            **observed,
            **rollout_metrics.agreement(old, rollout.samples),
            **rollout_metrics.of_supports(rollout.supports, config, vocab_size or 0),
            **rollout_metrics.of_updates(updates),
            **seconds,
        }
        self._tell_of_cuts(number, fields.get("support_full"))
        return PolicyMetrics(
            step=number,
            learning_rate=float(np.asarray(self._program.learning_rate(number - 1))),
            tokens_per_second=observed["tokens"] / seconds["seconds"],
            peak_gib=metrics.peak_gib(),
            gradient_samples=config.head.gradient_samples,
            backend=self._program.backend,
            **fields,
        )

    def _tell_of_cuts(self, number: int, share: float | None) -> None:
        """Say once that supports reach the limit, where the sampler cuts them."""
        if not share or self._told:
            return
        self._told = True
        limit = self._config.sampling.support
        self._say(
            f"step {number}: {share:.1%} of the tokens have supports of "
            f"sampling.support={limit} ids; larger ones are cut to their most probable "
            "ids, in the sampler and the trainer alike; raise it for all of "
            "sampling.top_p or min_p"
        )


# -------------------------------------------------------------------- loop


def train(
    config: GrpoJobConfig, operative_text: str = "", console: Console | None = None
) -> Result:
    """Train a policy, or resume, and report what each phase and the head cost.

    Args:
      config: everything about the run, which lives in `config.run.out_dir`; a run that
        is there already continues from its newest checkpoint (see `loop.open_run`).
      operative_text: the gin text that says the same; saved beside the run.
      console: where progress goes; a new rich console by default.

    Returns:
      The run's directory, its history and the memory of both heads.

    Raises:
      ValueError: the directory holds a run of another model, task, seed or backend of
        the head, or another process uses it.
      CheckpointError: a checkpoint cannot be written, or all are damaged.
      FloatingPointError: the loss is not finite.
      KeyboardInterrupt: after SIGINT; the current step is finished and saved.
      SystemExit: likewise after SIGTERM.
    """
    config = with_steps(starting.resolved(config))
    console = console or Console(quiet=not processes.is_first())
    with open_run(config.run, _settings(config), console, config.eval) as run:
        task = task_of(config)
        program = PolicyProgram(config)
        run.use_backend(program.backend, config.head.backend)
        run.progress.waiting("compiling")
        program.choose_policy_by_gradients(console)
        compiled = program.compile()
        job = _Job(program, compiled, task, functools.partial(_say, console))
        texts = starting.texts(config, operative_text)
        train_and_leave(run, job, program, job.frozen, texts, console, config)
        compares = config.run.compare_heads
        costs = policy_report.head_costs(program, compiled) if compares else {}
        if not processes.is_first():
            return Result(run.out_dir, [], costs)
        history = run.history(PolicyMetrics)
        phases = policy_report.phases_of(history, compiled)
        shown = policy_report.examples(task, job.last) if job.last else ()
        policy_report.write(run.out_dir, history, costs, phases, shown, console)
        return Result(run.out_dir, history, costs)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _settings(config: GrpoJobConfig) -> Settings:
    """Return the settings that are compared when a run is resumed."""
    fixed = {
        "task": _fixed_task(config.task),
        "model": dataclasses.asdict(config.model),
        "optimizer": fixed_moments(config.optimizer)
        | {"trainable": config.optimizer.trainable},
        # Frozen and reference weights are drawn anew, not saved.
        "run": {"job": config.run.job, "seed": config.run.seed},
        # The optimizer counts updates, of which a rollout has so many.
        "grpo": {
            "minibatches": config.grpo.minibatches,
            "epochs": config.grpo.epochs,
        },
    }
    sections = ["optimizer", "grpo", "sampling"]
    return Settings(fixed, changeable_settings(config, sections, fixed))


def _fixed_task(task: TaskConfig) -> dict[str, Any]:
    """What decides prompts and rewards; sums are as in runs from before files."""
    fields = dataclasses.asdict(task)
    del fields["timeout"]
    if task.is_arithmetic:
        return {name: fields[name] for name in ("digits", "answer", "reward", "seed")}
    return fields
