"""Direct preference optimization: the reference is scored once, then pairs are learned.

pairs -> ln p of both answers -> loss of each pair -> one update a step
"""

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxmem
from jaxmem.core import processes
from jaxmem.data import pairs as data
from jaxmem.data.pairs import Pair, PairBatch, PairBatches
from jaxmem.models.partitioning import as_stored
from jaxmem.train import files, metrics, plots, report, starting
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs.config import DpoJobConfig
from jaxmem.train.jobs.ending import train_and_leave
from jaxmem.train.jobs.epochs import with_steps
from jaxmem.train.jobs.preferences import pair_losses
from jaxmem.train.loop import Settings, changeable_settings, open_run
from jaxmem.train.metrics import PreferenceMetrics
from jaxmem.train.optimizer import learning_rate_schedule
from jaxmem.train.program import (
    DecoderProgram,
    StreamedStep,
    StreamedUpdate,
    TrainState,
    add_in_float32,
    fixed_weights,
    gradient_shapes,
    update,
)


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[PreferenceMetrics]  # every step, of earlier processes too


class Program(DecoderProgram):
    """A run's functions and shapes.

    Args:
        config: of the run.
        vocab_size: entries of the tokenizer.
    """

    def __init__(self, config: DpoJobConfig, vocab_size: int):
        schedule = learning_rate_schedule(config.optimizer, config.run.steps)
        super().__init__(config, vocab_size, config.run.seed, schedule)
        self.config = config

    def batch(self, *leading: int) -> PairBatch:
        """Shapes of micro-batches, with their places."""
        config = self.config.data
        shape = *leading, 2 * config.batch_size, config.sequence_length
        ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        floats = jax.ShapeDtypeStruct(shape, jnp.float32)
        return self.layout.of_tokens(PairBatch(ids, ids, ids, ids, floats))

    def logprobs(self, params: Any, frozen: Any, batch: PairBatch) -> jax.Array:
        """Return ln p of both answers of each pair [B, 2], sums over their tokens."""
        model = self.model(params, frozen)
        hidden = model(batch.tokens, batch.segment_ids, batch.positions)
        if self.config.head.implementation == "fused":
            each = model.head.logprobs(hidden, batch.labels)
        else:
            each = jaxmem.logprobs_from_logits(model.head(hidden), batch.labels, None)
        return each.sum(-1).reshape(-1, 2)

    def trace_logprobs(self) -> jax.stages.Traced:
        """Trace the forward pass of a micro-batch."""
        number = self.layout.whole(jax.ShapeDtypeStruct((), jnp.float32))
        jitted = self.layout.jit(self.logprobs, number)
        with self.layout.context():
            return jitted.trace(
                self.state_shapes.params, self.frozen_shapes, self.batch()
            )

    def trace_loss(self) -> None:
        """See `DecoderProgram`."""
        self.trace_logprobs()

    def _gradients(self, params: Any, frozen: Any, batches: PairBatch):
        """Gradients of a step, and its numbers, one micro-batch alive at a time."""
        count = self.config.run.accumulate * self.config.data.batch_size

        def loss(params: Any, batch: PairBatch):
            losses, statistics = pair_losses(
                self.config.dpo,
                self.logprobs(params, frozen, batch),
                batch.reference.sum(-1).reshape(-1, 2),
            )
            sums = {name: jnp.sum(x) / count for name, x in statistics.items()}
            sums["tokens"] = jnp.sum(batch.labels >= 0).astype(jnp.float32)
            return jnp.sum(losses) / count, sums

        def add(sums: Any, batch: PairBatch):
            (value, statistics), slopes = jax.value_and_grad(loss, has_aux=True)(
                params, batch
            )
            statistics["loss"] = value
            return add_in_float32(sums, (statistics, as_stored(slopes))), None

        names = [*NUMBERS, "tokens", "loss"]
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        start = dict.fromkeys(names, jnp.zeros(())), as_stored(zeros)
        (statistics, slopes), _ = jax.lax.scan(add, start, batches)
        return slopes, statistics

    def _step(self, state: TrainState, frozen: Any, batches: PairBatch):
        slopes, statistics = self._gradients(state.params, frozen, batches)
        state, norm = update(self.optimizer, state, slopes)
        return state, statistics | {"grad_norm": norm}

    def trace_step(self) -> jax.stages.Traced:
        """Trace the train step; its gradients alone where the moments are streamed."""
        number = self.layout.whole(jax.ShapeDtypeStruct((), jnp.float32))
        run, given, donated = self._step, self.state_shapes, 0
        arguments: Any = given, number
        if self.streamed is not None:
            run, given, donated = self._gradients, given.params, ()
            arguments = gradient_shapes(given), number
        options = self.compiler_options
        jitted = self.layout.jit(
            run, arguments, donate_argnums=donated, compiler_options=options
        )
        batches = self.batch(self.config.run.accumulate)
        with self.layout.context():
            return jitted.trace(given, self.frozen_shapes, batches)

    def compile_step(self) -> jax.stages.Compiled | StreamedStep:
        """Compile the train step from shapes alone; the state given is consumed."""
        compiled = self.compile_verified(self.trace_step())
        if self.streamed is None:
            return compiled
        slopes = gradient_shapes(self.state_shapes.params)
        finish = StreamedUpdate(self.config.optimizer, self.streamed, slopes)
        return StreamedStep(compiled, finish)


NUMBERS = ("chosen_reward", "rejected_reward", "margin", "accuracy")


class _Scorer:
    """ln p of many pairs under some weights, [N, 2]."""

    def __init__(self, program: Program, frozen: Any):
        self._program, self._frozen = program, frozen
        self._run = program.trace_logprobs().lower().compile()

    def __call__(self, params: Any, pairs: Sequence[Pair]) -> np.ndarray:
        config, logprobs = self._program.config.data, []
        for start in range(0, len(pairs), config.batch_size):
            # The last micro-batch repeats some, to be of the shape that is compiled.
            stop = start + config.batch_size
            chosen = [pairs[i % len(pairs)] for i in range(start, stop)]
            nothing = np.zeros((len(chosen), 2), np.float32)
            batch = data.batch_of(chosen, nothing, config)
            placed = self._program.layout.place(batch)
            logprobs.append(jax.device_get(self._run(params, self._frozen, placed)))
        return np.concatenate(logprobs)[: len(pairs)]


def _reference(
    path: Path, program: Program, score: _Scorer, pairs: Sequence[Pair]
) -> np.ndarray:
    """Return ln p [N, 2] under the initial weights: read, or computed and saved."""
    config = program.config
    of = json.dumps(
        [data.fingerprint(pairs), dataclasses.asdict(config.model), config.run.seed]
    )
    if jax.process_count() == 1 and path.exists():
        with np.load(path) as saved:
            if str(saved["of"]) == of:
                return saved["logprobs"]
    logprobs = score(program.initial_params(), pairs)
    if processes.is_first():
        content = io.BytesIO()
        np.savez(content, of=of, logprobs=logprobs)
        files.write_whole(path, content.getvalue())
    return logprobs


class _Job:
    """The steps of a run, for `Run.take_steps`."""

    def __init__(
        self,
        program: Program,
        frozen: Any,
        batches: PairBatches,
        evaluate: Callable[[Any], dict[str, float]] | None,
    ):
        self._program, self._frozen, self._batches = program, frozen, batches
        self._compiled, self._evaluate = program.compile_step(), evaluate
        self._end = -math.inf  # of the last step
        self.initial_state = program.initial_state
        self.restored_state = program.restored_state
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def dispatch(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, Callable[[], PreferenceMetrics]]:
        start, config = time.perf_counter(), self._program.config
        taken = [next(self._batches) for _ in range(config.run.accumulate)]
        batches = PairBatch(*(np.stack(x) for x in zip(*taken, strict=True)))
        batches = self._program.layout.place(batches)
        state, numbers = self._compiled(state, self._frozen, batches)
        return state, lambda: self._read(number, numbers, start)

    def _read(self, number: int, numbers: dict, start: float) -> PreferenceMetrics:
        numbers = {name: float(x) for name, x in jax.device_get(numbers).items()}
        end, tokens = time.perf_counter(), int(numbers.pop("tokens"))
        seconds, self._end = end - max(start, self._end), end  # steps overlap
        config = self._program.config
        return PreferenceMetrics(
            step=number,
            pairs=config.run.accumulate * config.data.batch_size,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            learning_rate=float(np.asarray(self._program.schedule(number - 1))),
            seconds=seconds,
            backend=self._program.backend,
            **numbers,
        )

    def evaluate(self, state: TrainState, taken: PreferenceMetrics) -> Evaluated | None:
        if self._evaluate is None:
            return None
        numbers = self._evaluate(state.params)
        return Evaluated(taken._replace(**numbers), numbers["held_out_loss"])


def _held_out(
    program: Program, score: _Scorer, pairs: Sequence[Pair], reference: np.ndarray
) -> Callable[[Any], dict[str, float]]:
    def evaluate(params: Any) -> dict[str, float]:
        losses, statistics = pair_losses(
            program.config.dpo,
            jnp.asarray(score(params, pairs)),
            jnp.asarray(reference),
        )
        return {
            "held_out_loss": float(losses.mean()),
            "held_out_margin": float(statistics["margin"].mean()),
            "held_out_accuracy": float(statistics["accuracy"].mean()),
        }

    return evaluate


def train(
    config: DpoJobConfig, operative_text: str = "", console: Console | None = None
) -> Result:
    """Train on pairs of answers, or resume.

    Args:
        config: everything about the run, which lives in `config.run.out_dir`; a run
            that is there already continues from its newest checkpoint.
        operative_text: the gin text that says the same; saved beside the run.
        console: where progress goes; a new rich console by default.

    Returns:
        The run's directory and its history.

    Raises:
        ValueError: the data cannot be used; the directory holds a run of another
            model, data or backend of the head, or another process uses it.
        CheckpointError: a checkpoint cannot be written, or all are damaged.
        FloatingPointError: the loss is not finite.
        KeyboardInterrupt: after SIGINT; the current step is finished and saved.
        SystemExit: likewise after SIGTERM.
    """
    config = with_steps(starting.resolved(config))
    console = console or Console(quiet=not processes.is_first())
    with open_run(config.run, _settings(config), console, config.eval) as run:
        tokenizer = starting.load_tokenizer(config.data, config.model)
        template = starting.load_template(config.data, config.model, tokenizer)
        pairs, held_out = data.load_pairs(
            config.data, tokenizer, template, config.dpo.drop_long
        )
        program = Program(config, tokenizer.get_vocab_size())
        run.use_backend(program.backend, config.head.backend)
        run.progress.waiting("compiling")
        program.choose_policy(program.trace_step, console)
        frozen = program.frozen()
        score = _Scorer(program, frozen)
        run.out_dir.mkdir(parents=True, exist_ok=True)
        path = run.out_dir / "reference.npz"
        run.progress.waiting("scoring the reference")
        reference = _reference(path, program, score, [*pairs, *held_out])
        evaluate = None
        if held_out:
            evaluate = _held_out(program, score, held_out, reference[len(pairs) :])
        batches = PairBatches(pairs, reference[: len(pairs)], config.data)
        texts = starting.texts(config, operative_text, tokenizer)
        job = _Job(program, frozen, batches, evaluate)
        train_and_leave(run, job, program, frozen, texts, console, config)
        if not processes.is_first():
            return Result(run.out_dir, [])
        result = Result(run.out_dir, run.history(PreferenceMetrics))
        _report(result, console)
        return result


def _settings(config: DpoJobConfig) -> Settings:
    """Return the settings that are compared when a run is resumed."""
    fixed = {
        "data": config.data.fixed(),
        "model": dataclasses.asdict(config.model),
    }
    weights = fixed_weights(config.optimizer, config.run.seed)
    # The reference is the initial weights, which are drawn anew.
    weights["run"] = {"job": config.run.job, "seed": config.run.seed}
    fixed |= weights
    return Settings(fixed, changeable_settings(config, ["optimizer", "dpo"], fixed))


def _report(result: Result, console: Console) -> None:
    out_dir, history = result
    first, last = history[0], history[-1]
    console.print(
        f"loss {first.loss:.4f} -> {last.loss:.4f}, margin {first.margin:.3f} -> "
        f"{last.margin:.3f}, accuracy {first.accuracy:.2f} -> {last.accuracy:.2f} in "
        f"{len(history)} steps, {metrics.tokens_per_second(history):,.0f} tokens/s",
        highlight=False,
    )
    metrics.save_preference_summary(out_dir / "summary.json", history)
    plots.save(out_dir / "report.png", history, {}, "margin", "reward margin")
    report.finish(out_dir, console)
