"""Supervised training: the step, the loop, and what both heads cost at the end."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from rich.console import Console

from jaxmem.core import processes
from jaxmem.data import documents as data, streams
from jaxmem.data.chat import Templates
from jaxmem.data.documents import Batch
from jaxmem.models.decoder import Decoder, HeadConfig, head_loss
from jaxmem.models.partitioning import as_stored
from jaxmem.models.weights import join_weights
from jaxmem.train import metrics, plots, report, starting
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs.config import Config
from jaxmem.train.jobs.ending import train_and_leave
from jaxmem.train.jobs.epochs import with_steps
from jaxmem.train.loop import (
    RunConfig as RunConfig,
    Settings,
    changeable_settings,
    open_run,
)
from jaxmem.train.metrics import HeadCost, StepMetrics
from jaxmem.train.mfu import flops_per_token, peak_of
from jaxmem.train.optimizer import (
    OptimizerConfig as OptimizerConfig,
    learning_rate_schedule,
)
from jaxmem.train.program import (
    DecoderProgram,
    StreamedStep,
    StreamedUpdate,
    TrainState as TrainState,
    add_in_float32,
    fixed_weights,
    gradient_shapes,
    head_key,
    update,
)


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[StepMetrics]  # every step of the run, of earlier processes too
    costs: dict[str, HeadCost]  # by implementation; empty without compare_heads
    held_out_loss: float | None  # nats per token; None unless data.held_out is set


# -------------------------------------------------------------------- step


def sum_gradients(
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    params: Any,
    micro_batches: Any,
    normalizer: jax.Array,
) -> tuple[jax.Array, Any]:
    """Loss and gradient of a whole step, one micro-batch alive at a time.

    Args:
      loss: (params, micro-batch, normalizer) to its share of the step's loss.
      params: what is differentiated.
      micro_batches: a tree of arrays [K, ...].
      normalizer: tokens of the whole step, known before the first micro-batch, so
        that each token weighs the same wherever it lies.

    Returns:
      The sum of the losses, and of the gradients, in float32.
    """

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        value, gradients = jax.value_and_grad(loss)(params, micro_batch, normalizer)
        return add_in_float32(sums, (value, as_stored(gradients))), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zeros = as_stored(zeros)
    return jax.lax.scan(add, (jnp.zeros(()), zeros), micro_batches)[0]


def make_gradients(
    definition: nnx.GraphDef[Decoder], head: HeadConfig, seed: int = 0
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Build the function that gives a step's gradients.

    Args:
      definition: of the decoder, from `nnx.split`.
      head: which way to the loss.
      seed: of the head's draws.

    Returns:
      (trained weights, frozen weights, micro-batches [K, B, T]) to the gradients and
      the step's `loss` (0 where no token counts) and `tokens`. With
      `head.gradient_samples` there is a fourth argument, the step's number.
    """

    def gradients(params: Any, frozen: dict, micro_batches: Batch, number: Any = None):
        def loss(params: Any, given: Any, normalizer: jax.Array) -> jax.Array:
            batch, index = given
            key = None if number is None else head_key(seed, number, index)
            model = nnx.merge(definition, join_weights(params, frozen))
            hidden = model(batch.tokens, batch.segment_ids, batch.positions)
            return head_loss(
                model.head, hidden, batch.labels, normalizer, head.implementation,
                head.gradient_samples, key,
            )  # fmt: skip

        tokens = jnp.sum(micro_batches.labels >= 0)
        indices = jnp.arange(len(micro_batches.labels), dtype=jnp.uint32)
        total, slopes = sum_gradients(loss, params, (micro_batches, indices), tokens)
        return slopes, {"loss": total, "tokens": tokens}

    return gradients


def make_step(
    definition: nnx.GraphDef[Decoder],
    head: HeadConfig,
    optimizer: optax.GradientTransformation,
    seed: int = 0,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Build the function that one optimizer step is.

    Args:
      definition: of the decoder, from `nnx.split`.
      head: which way to the loss.
      optimizer: from `make_optimizer`.
      seed: of the head's draws.

    Returns:
      (state, frozen weights, micro-batches [K, B, T]) to the next state and what
      `make_gradients` tells, with `grad_norm`; a fourth argument as there.
    """
    gradients = make_gradients(definition, head, seed)

    def step(state: TrainState, frozen: dict, *given: Any):
        slopes, numbers = gradients(state.params, frozen, *given)
        state, norm = update(optimizer, state, slopes)
        return state, numbers | {"grad_norm": norm}

    return step


class Program(DecoderProgram):
    """A supervised run's functions and shapes.

    Args:
      config: of the run.
      vocab_size: entries of the tokenizer.
    """

    def __init__(self, config: Config, vocab_size: int):
        schedule = learning_rate_schedule(config.optimizer, config.run.steps)
        super().__init__(config, vocab_size, config.run.seed, schedule)
        self.config = config
        self._rows = config.data.batch_size, config.data.sequence_length

    def compile_step(
        self, head: HeadConfig, packed: bool = True
    ) -> jax.stages.Compiled | StreamedStep:
        """Compile the train step from shapes alone; the state given is consumed.

        Without `packed`, rows hold one document each, and segment_ids must be None.
        """
        compiled = self.compile_verified(self.trace_step(head, packed))
        if self.streamed is None:
            return compiled
        slopes = gradient_shapes(self.state_shapes.params)
        finish = StreamedUpdate(self.config.optimizer, self.streamed, slopes)
        return StreamedStep(compiled, finish)

    def trace_step(self, head: HeadConfig, packed: bool = True) -> jax.stages.Traced:
        """Trace the train step; its gradients alone where the moments are streamed."""
        ids = jax.ShapeDtypeStruct((self.config.run.accumulate, *self._rows), jnp.int32)
        options = self.compiler_options
        segments: Any = ids if packed else None
        batch: Any = Batch(ids, ids, segments, ids)  # pyright: ignore
        batch = self.layout.of_tokens(batch)
        number = self.layout.whole(jax.ShapeDtypeStruct((), jnp.float32))
        given: Any = self.state_shapes
        seed = self.config.run.seed
        if self.streamed is None:
            step = make_step(self.definition, head, self.optimizer, seed)
            jitted = self.layout.jit(
                step, (given, number), donate_argnums=0, compiler_options=options
            )
        else:
            step, given = make_gradients(self.definition, head, seed), given.params
            arguments = gradient_shapes(given), number
            jitted = self.layout.jit(step, arguments, compiler_options=options)
        with self.layout.context():
            numbers = self.step_numbers(head)
            return jitted.trace(given, self.frozen_shapes, batch, *numbers)

    def step_numbers(self, head: HeadConfig, number: int | None = None) -> tuple:
        """What follows on a step's batch: its number, or its shape, if it draws."""
        shape = self.layout.whole(jax.ShapeDtypeStruct((), jnp.uint32))
        drawn_by = (shape if number is None else np.uint32(number),)
        return () if head.gradient_samples is None else drawn_by

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation (`jaxmem.train.mfu`); None on an unknown device."""
        mesh = self.layout.mesh
        devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
        peak = peak_of(devices[0].device_kind, self.model_config.dtype)
        if peak is None:
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
        return float(total / max(tokens, 1))

    @functools.cached_property
    def _loss_sums(self) -> Callable:
        """Sum of a micro-batch's losses, and its tokens; compiled once."""

        @jax.jit
        def sums(params: optax.Params, frozen: dict, batch: Batch):
            model = self.model(params, frozen)
            hidden = model(batch.tokens, batch.segment_ids, batch.positions)
            way, one = self.config.head.implementation, jnp.ones(())
            total = head_loss(model.head, hidden, batch.labels, one, way)
            return total, jnp.sum(batch.labels >= 0)

        return sums

    def compile_head(self, head: HeadConfig) -> jax.stages.Compiled:
        """Compile loss and gradients of the head alone, for one micro-batch."""
        return self.trace_head(head).lower().compile()

    def trace_loss(self) -> None:
        """See `DecoderProgram`."""
        self.trace_head(self.config.head)

    def trace_head(self, head: HeadConfig) -> jax.stages.Traced:
        """Trace the same."""
        definition, weights = nnx.split(self.abstract.head)
        hidden = jax.ShapeDtypeStruct(
            (*self._rows, self.config.model.hidden), self.config.model.dtype
        )

        def loss(weights: Any, hidden: jax.Array, labels: jax.Array) -> jax.Array:
            tokens = jnp.sum(labels >= 0)
            module = nnx.merge(definition, weights)
            key = head_key(0) if head.gradient_samples else None
            return head_loss(
                module, hidden, labels, tokens, head.implementation,
                head.gradient_samples, key,
            )  # fmt: skip

        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        labels = jax.ShapeDtypeStruct(self._rows, jnp.int32)
        shapes = self.layout.of_head(nnx.to_pure_dict(weights), hidden, labels)
        with self.layout.context():
            return gradients.trace(*shapes)


# -------------------------------------------------------------------- loop


class _Job:
    """The steps of a supervised run, for `Run.take_steps`."""

    def __init__(
        self,
        program: Program,
        compiled: jax.stages.Compiled | StreamedStep,
        frozen: dict,
        batches: data.BatchIterator | streams.StreamIterator,
        held_out: Callable[[], data.BatchIterator] | None = None,
    ):
        self._held_out, self._end = held_out, -math.inf  # of the last step
        self.held_out_loss: float | None = None  # of the last evaluation
        self._program, self._compiled = program, compiled
        self._frozen, self._batches = frozen, batches
        self.initial_state = program.initial_state
        self.restored_state = program.restored_state
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def dispatch(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, Callable[[], StepMetrics]]:
        start = time.perf_counter()
        config, program = self._program.config, self._program
        taken = streams.stacked(self._batches, config.run.accumulate)
        taken = program.layout.place(taken)
        drawn_by, size = program.step_numbers(config.head, number), taken.tokens.size
        state, numbers = self._compiled(state, self._frozen, taken, *drawn_by)
        return state, lambda: self._read(number, numbers, size, start)

    def _read(self, number: int, numbers: dict, size: int, start: float) -> StepMetrics:
        numbers, end = jax.device_get(numbers), time.perf_counter()
        program = self._program
        seconds, self._end = end - max(start, self._end), end  # steps overlap
        rate, mfu = program.schedule(number - 1), program.mfu(size / seconds)
        step = metrics.of_step(number, numbers, rate, seconds, mfu)
        samples = program.config.head.gradient_samples
        return step._replace(gradient_samples=samples, backend=program.backend)

    def evaluate(self, state: TrainState, taken: StepMetrics) -> Evaluated | None:
        if self._held_out is None:
            return None
        loss = self._program.evaluate(state.params, self._frozen, self._held_out())
        self.held_out_loss = loss
        perplexity = math.exp(min(loss, 700.0))
        values = {"held_out_loss": loss, "held_out_perplexity": perplexity}
        return Evaluated(taken._replace(**values), loss)


def train(
    config: Config, operative_text: str = "", console: Console | None = None
) -> Result:
    """Train, or resume training, and report what the head cost.

    Args:
      config: everything about the run, which lives in `config.run.out_dir`; a run that
        is there already continues from its newest checkpoint (see `loop.open_run`).
      operative_text: the gin text that says the same; saved beside the run.
      console: where progress goes; a new rich console by default.

    Returns:
      The run's directory, its history and the memory of both heads.

    Raises:
      ValueError: the directory holds a run of another model, data or backend of the
        head, or another process uses it.
      CheckpointError: a checkpoint cannot be written, or all are damaged.
      FloatingPointError: the loss is not finite.
      KeyboardInterrupt: after SIGINT; the current step is finished and saved.
      SystemExit: likewise after SIGTERM.
    """
    config = with_steps(starting.resolved(config))
    console = console or Console(quiet=not processes.is_first())
    with open_run(config.run, _settings(config), console, config.eval) as run:
        tokenizer = starting.load_tokenizer(config.data, config.model)
        program = Program(config, tokenizer.get_vocab_size())
        run.use_backend(program.backend, config.head.backend)
        rows = program.layout.own_rows(config.data.batch_size)
        template = starting.load_template(config.data, config.model, tokenizer)
        batches = streams.batches(config.data, tokenizer, rows, template)
        held_out = _held_out(config.data, tokenizer, template)
        run.progress.waiting("compiling")
        program.choose_policy(lambda: program.trace_step(config.head), console)
        compiled, frozen = program.compile_step(config.head), program.frozen()
        texts = starting.texts(config, operative_text, tokenizer)
        job = _Job(program, compiled, frozen, batches, held_out)
        state = train_and_leave(run, job, program, frozen, texts, console, config)
        held_out_loss = job.held_out_loss  # the last step is evaluated, if any is
        if held_out is not None and held_out_loss is None:
            held_out_loss = program.evaluate(state.params, frozen, held_out())
        costs = _head_costs(program, compiled) if config.run.compare_heads else {}
        if not processes.is_first():
            return Result(run.out_dir, [], costs, held_out_loss)
        result = Result(run.out_dir, run.history(StepMetrics), costs, held_out_loss)
        _report(result, console)
        return result


def _held_out(
    config: data.DataConfig,
    tokenizer: tokenizers.Tokenizer,
    template: Templates | None,
) -> Callable[[], data.BatchIterator] | None:
    """What is scored; read at the start, for what may be wrong."""
    if not config.held_out:
        return None
    first = data.batches(
        config, tokenizer, split="evaluation", epochs=1, template=template
    )
    start = first.get_state()

    def again() -> data.BatchIterator:
        first.set_state(start)
        return first

    return again


def _settings(config: Config) -> Settings:
    """Return the settings that are compared when a run is resumed."""
    fixed = {"data": config.data.fixed(), "model": dataclasses.asdict(config.model)}
    if config.data.chat_template is None:  # as in runs from before there was one
        del fixed["data"]["chat_template"]
    fixed |= fixed_weights(config.optimizer, config.run.seed)
    return Settings(fixed, changeable_settings(config, ["optimizer"], fixed))


def _head_costs(
    program: Program, compiled: jax.stages.Compiled | StreamedStep
) -> dict[str, HeadCost]:
    """Memory of the step with either head; the one that trained is not recompiled."""
    trained = program.config.head
    costs = {}
    for implementation in ("fused", "materialised"):
        head = trained.using(implementation)
        step = compiled if head == trained else program.compile_step(head)
        costs[implementation] = HeadCost(
            head=metrics.memory_of(program.compile_head(head)),
            step=metrics.memory_of(step),
        )
    return costs


def _report(result: Result, console: Console) -> None:
    out_dir, history, costs, held_out_loss = result
    if costs:
        console.print(metrics.cost_table(costs))
    console.print(
        f"loss {history[0].loss:.4f} -> {history[-1].loss:.4f} nats per token in "
        f"{len(history)} steps, {metrics.tokens_per_second(history):,.0f} tokens/s",
        highlight=False,
    )
    if held_out_loss is not None:
        console.print(
            f"held-out loss {held_out_loss:.4f} nats per token", highlight=False
        )
    metrics.save_summary(out_dir / "summary.json", history, costs, held_out_loss)
    last = history[-1]._replace(held_out_loss=held_out_loss)  # without eval.every, too
    plots.save(out_dir / "report.png", [*history[:-1], last], costs)
    report.finish(out_dir, console)
