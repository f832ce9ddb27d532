"""Reinforcement learning with rewards that are functions: roll out, then update.

prompts -> G completions each -> rewards -> advantages
-> old (and reference) log-probabilities, forward only -> packed updates
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import jaxmem
from jaxmem import losses
from jaxmem.core import processes
from jaxmem.data.documents import Batch
from jaxmem.data.tasks import TaskConfig
from jaxmem.losses.mismatch import MismatchReport
from jaxmem.models.sampling import Samples
from jaxmem.train import metrics, report, starting
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs import samples
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.epochs import with_steps
from jaxmem.train.jobs.policy import PolicyBatch, average
from jaxmem.train.jobs.policy_program import Compiled, PolicyProgram
from jaxmem.train.jobs.questions import (
    Asked,
    Graded,
    Task,
    place_of,
    state_of,
    task_of,
)
from jaxmem.train.jobs.rollouts import Completions
from jaxmem.train.loop import Settings, changeable_settings, open_run
from jaxmem.train.metrics import HeadCost, Phase, PolicyMetrics
from jaxmem.train.program import TrainState, fixed_moments


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[PolicyMetrics]  # every step of the run, of earlier processes too
    costs: dict[str, HeadCost]  # by implementation; empty without compare_heads


# ------------------------------------------------------------------- steps


class _Rollout(NamedTuple):
    """Completions and what they are worth; numpy arrays of N samples."""

    asked: Asked
    completions: Completions
    samples: Samples
    graded: Graded
    advantages: np.ndarray  # [N]


class _Clock:
    """Seconds of phases that follow one another."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End the phase of that name, which began where the last one ended."""
        now = time.perf_counter()
        self.seconds[f"{phase}_seconds"] = now - self._last
        self._last = now
        self.seconds["seconds"] = now - self._start


class _Job:
    """The steps of a run, for `Run.take_steps`."""

    def __init__(
        self, program: PolicyProgram, compiled: Compiled, task: Task | None = None
    ):
        self._program, self._compiled = program, compiled
        self._config = program.config
        self.task = task or task_of(program.config)
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
        self._mismatch = jax.jit(jaxmem.mismatch_report)
        self.last: _Rollout | None = None  # what the report shows samples of
        self.initial_state = program.initial_state
        self.restored_state = program.restored_state

    def get_state(self) -> dict[str, Any]:
        return state_of(self.task, self._next)

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = place_of(self.task, state)

    def samples(self) -> list[dict[str, Any]]:
        """See `loop.ShowsSamples`."""
        if (last := self.last) is None:
            return []
        rewards, logprobs = last.graded.rewards, np.asarray(last.samples.logprobs)
        return samples.table(self.task, last.asked, last.completions, rewards, logprobs)

    def step(self, number: int, state: TrainState) -> tuple[TrainState, PolicyMetrics]:
        clock = _Clock()
        rollout = self._roll_out(number, state.params)
        clock.lap("rollout")
        old, replayed = self._logprobs(state.params, rollout)
        clock.lap("old")
        reference = None
        if self._reference is not None:
            reference, _ = self._logprobs(self._reference, rollout)
        clock.lap("reference")
        state, updates = self._learn(number, state, rollout, old, reference)
        clock.lap("update")
        mismatch = jax.device_get(
            self._mismatch(replayed, rollout.samples.logprobs, rollout.samples.mask)
        )
        self.last = rollout
        return state, self._metrics(number, rollout, updates, mismatch, clock.seconds)

    def _roll_out(self, number: int, params: Any) -> _Rollout:
        grpo = self._config.grpo
        asked = self.task.ask(self._next, grpo.prompts).repeated(grpo.group_size)
        completions, samples = self._complete(
            self._compiled.sample, params, asked, number
        )
        graded = self.task.grade(asked, completions)
        self._next += grpo.prompts  # after the rewards, which may raise
        groups = graded.rewards.reshape(grpo.prompts, grpo.group_size)
        advantages = np.asarray(self._advantages(groups)).ravel()
        return _Rollout(asked, completions, samples, graded, advantages)

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
        reward, right = (
            float(np.concatenate([getattr(grades, name) for grades in graded]).mean())
            for name in ("rewards", "right")
        )
        values = {"held_out_reward": reward, "held_out_accuracy": right}
        return Evaluated(taken._replace(**values), -reward)

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

    def _logprobs(self, params: Any, rollout: _Rollout) -> tuple[np.ndarray, ...]:
        """Of the sampled tokens [N, R], and the same in what they were drawn from."""
        completions, support_ids = rollout.completions, rollout.samples.support_ids
        packed = self._pack(completions, self._config.grpo.max_tokens_forward)
        supports = [None] * len(packed.micro_batches)
        if support_ids is not None:
            supports = packed.place(completions.spread(np.asarray(support_ids), -1), -1)
        outputs = [
            self._compiled.logprobs[batch.tokens.shape](
                params, self.frozen, *self._placed(batch, support)
            )
            for batch, support in zip(
                completions.batches(packed), supports, strict=True
            )
        ]
        whole, replayed = zip(*jax.device_get(outputs), strict=True)
        whole = completions.collect(packed.unpack(whole))
        if support_ids is None:
            return whole, whole
        return whole, completions.collect(packed.unpack(replayed))

    def _placed(self, batch: Batch, support: np.ndarray | None) -> tuple[Any, Any]:
        """A micro-batch where it is read, and the supports [B, T, K] of its tokens."""
        layout = self._program.layout
        if support is None:
            return layout.place(batch), None
        return layout.place(batch), layout.place(support, layout.of_hidden(support))

    def _learn(
        self,
        number: int,
        state: TrainState,
        rollout: _Rollout,
        old: np.ndarray,
        reference: np.ndarray | None,
    ) -> tuple[TrainState, list[dict[str, Any]]]:
        """Take every update of the step; returns the metrics of each."""
        updates, numbers_of = [], self._program.micro_batch_numbers
        for minibatch, chosen in enumerate(self._minibatches(number)):
            part = rollout.completions.select(chosen)
            values = rollout.advantages[chosen], old[chosen]
            ref = None if reference is None else reference[chosen]
            sums = self._compiled.zeros()
            micro_batches = self._micro_batches(part, *values, ref)
            for i, (shape, batch, normalizer) in enumerate(micro_batches):
                batch = self._program.layout.place(batch)
                drawn_by = numbers_of(self._config.head, number, minibatch, i)
                sums = self._compiled.gradients[shape](
                    state.params, self.frozen, sums, batch, normalizer, *drawn_by
                )
            state, norm = self._compiled.update(state, sums.gradients)
            updates.append({"loss": sums.loss, "grad_norm": norm, **sums.metrics})
        return state, jax.device_get(updates)

    def _minibatches(self, number: int) -> Iterator[np.ndarray]:
        """Indices of samples; each sample once an epoch."""
        grpo = self._config.grpo
        for epoch in range(grpo.epochs):
            rng = np.random.default_rng([self._config.run.seed, number, epoch])
            yield from np.split(rng.permutation(grpo.samples), grpo.minibatches)

    def _micro_batches(
        self,
        part: Completions,
        advantages: np.ndarray,
        old: np.ndarray,
        reference: np.ndarray | None,
    ) -> Iterator[tuple[tuple[int, int], PolicyBatch, np.float32]]:
        config = self._config
        weights, normalizer = average(
            config.grpo, part.lengths, config.sampling.max_new_tokens
        )
        packed = self._pack(part, config.grpo.max_tokens_train)
        old_rows = packed.place(part.spread(old))
        ref_rows = [None] * len(old_rows)
        if reference is not None:
            ref_rows = packed.place(part.spread(reference))
        for i, batch in enumerate(part.batches(packed)):
            sequence = packed.micro_batches[i].sequence
            yield (
                batch.tokens.shape,
                PolicyBatch(
                    batch,
                    old_rows[i],
                    advantages[sequence],
                    weights[sequence],
                    ref_rows[i],
                ),
                normalizer,
            )

    def _pack(self, completions: Completions, max_tokens: int):
        quadratic = 1 / (6 * self._config.model.hidden)
        return completions.pack(max_tokens, self._config.row_lengths, quadratic)

    def _metrics(
        self,
        number: int,
        rollout: _Rollout,
        updates: list[dict[str, Any]],
        mismatch: MismatchReport,
        seconds: dict[str, float],
    ) -> PolicyMetrics:
        grpo, lengths = self._config.grpo, rollout.completions.lengths
        groups = rollout.graded.rewards.reshape(grpo.prompts, grpo.group_size)
        seen = int(lengths.sum()) * grpo.epochs
        per_token = {
            name: float(sum(update[name] for update in updates)) / seen
            for name in updates[0].keys() - {"loss", "grad_norm"}
        }
        tokens = int(rollout.asked.lengths.sum() + lengths.sum())
        return PolicyMetrics(
            step=number,
            reward=float(rollout.graded.rewards.mean()),
            accuracy=float(rollout.graded.right.mean()),
            degenerate=float((groups == groups[:, :1]).all(axis=1).mean()),
            loss=float(np.mean([update["loss"] for update in updates])),
            grad_norm=float(np.mean([update["grad_norm"] for update in updates])),
            learning_rate=float(np.asarray(self._program.learning_rate(number - 1))),
            response_length=float(lengths.mean()),
            mismatch_mean=float(mismatch.mean),
            mismatch_max=float(mismatch.max),
            tokens=tokens,
            tokens_per_second=tokens / seconds["seconds"],
            peak_gib=metrics.peak_gib(),
            gradient_samples=self._config.head.gradient_samples,
            rewards=rollout.graded.parts,
            **({"kl": None} | per_token),
            **seconds,
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
      ValueError: the directory holds a run of another model, task or seed, or another
        process uses it.
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
        run.progress.waiting("compiling")
        program.choose_policy_by_gradients(console)
        compiled = program.compile()
        job = _Job(program, compiled, task)
        state = run.take_steps(job, starting.texts(config, operative_text))
        model = program.model(state.params, job.frozen)
        starting.leave(run.out_dir, model, console, config)
        if (best := run.best_state(job)) is not None:
            model = program.model(best.params, job.frozen)
            starting.leave_best(run.out_dir, model, console, config)
        costs = _head_costs(program, compiled) if config.run.compare_heads else {}
        if not processes.is_first():
            return Result(run.out_dir, [], costs)
        history = run.history(PolicyMetrics)
        result = Result(run.out_dir, history, costs)
        _report(result, _phases(history, compiled), job, console)
        return result


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


def _head_costs(program: PolicyProgram, compiled: Compiled) -> dict[str, HeadCost]:
    """Memory of a micro-batch with either head; the one that trained is not redone."""
    trained = program.config.head
    shape = program.shapes(program.config.grpo.max_tokens_train)[-1]
    costs = {}
    for implementation in ("fused", "materialised"):
        head = trained.using(implementation)
        step = compiled.gradients[shape]
        if head != trained:
            step = program.compile_gradients(shape, head)
        costs[implementation] = HeadCost(
            head=metrics.memory_of(program.compile_head(shape, head)),
            step=metrics.memory_of(step),
        )
    return costs


def _phases(history: list[PolicyMetrics], compiled: Compiled) -> list[Phase]:
    """What each phase took: median seconds, and the largest of its programs."""
    forward, backward = compiled.logprobs.values(), compiled.gradients.values()
    programs = {
        "rollout": [compiled.sample],
        "old": forward,
        "reference": forward,
        "update": [*backward, compiled.update],
    }
    return [
        metrics.phase_of(name, history, programs[name])
        for name in programs
        if name != "reference" or history[-1].kl is not None
    ]


def _report(result: Result, phases: list[Phase], job: _Job, console: Console) -> None:
    (out_dir, history, costs), last = result, job.last
    if costs:
        console.print(metrics.cost_table(costs))
    console.print(metrics.phase_table(phases))
    if last is not None:
        for line in _examples(job.task, last):
            console.print(line, highlight=False, markup=False)
    console.print(
        f"reward {history[0].reward:.3f} -> {history[-1].reward:.3f} in "
        f"{len(history)} rollouts, {metrics.tokens_per_second(history):,.0f} tokens/s",
        highlight=False,
    )
    metrics.save_policy_summary(out_dir / "summary.json", history, costs, phases)
    metrics.save_plot(out_dir / "report.png", history, costs, "reward", "reward")
    report.finish(out_dir, console)


def _examples(task: Task, rollout: _Rollout, count: int = 3) -> Iterator[str]:
    """Some completions of the last rollout, as they read."""
    count = min(count, len(rollout.advantages))
    each = len(rollout.advantages) // count
    for i in range(0, count * each, each):
        prompt, answer = task.shown(rollout.asked, rollout.completions, i)
        verdict = "right" if rollout.graded.right[i] else "wrong"
        yield f"{prompt} {answer[:60]}  ({verdict})"
