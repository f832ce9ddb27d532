"""Supervised training: the step, the loop, and what both heads cost at the end."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jaxmem.train import data, metrics
from jaxmem.train._checks import check_field
from jaxmem.train.checkpoint import Checkpoints, check_same_config
from jaxmem.train.data import Batch
from jaxmem.train.metrics import HeadCost, StepMetrics
from jaxmem.train.model import Decoder, HeadConfig, ModelConfig, head_loss
from jaxmem.train.optimizer import OptimizerConfig as OptimizerConfig
from jaxmem.train.optimizer import learning_rate_schedule, make_optimizer

if TYPE_CHECKING:  # config.py reads the dataclasses of this file
    from jaxmem.train.config import Config


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long to train, and what to leave behind."""

    steps: int = 60  # optimizer steps in all
    accumulate: int = 1  # micro-batches (data.batch_size rows each) in a step
    seed: int = 0  # initial weights
    out_dir: str = "runs/sft"  # directory of the run; one that holds a run resumes it
    checkpoint_every: int = 20  # steps between checkpoints; the last is always saved
    keep: int = 2  # newest checkpoints to keep
    log_every: int = 10  # steps between plain progress lines (not on a terminal)
    compare_heads: bool = True  # at the end, compile both heads and show their memory

    def __post_init__(self):
        """Refuse impossible values, by name."""
        for name in ("steps", "accumulate", "checkpoint_every", "keep", "log_every"):
            check_field(self, name, getattr(self, name) >= 1, "at least 1")
        check_field(self, "seed", 0 <= self.seed < 2**31, "in [0, 2**31)")


class TrainState(NamedTuple):
    """What a step changes.  A step draws no random numbers, so there is no key."""

    params: optax.Params  # the model's parameters, in param_dtype
    optimizer: optax.OptState  # float32 moments, and the count of steps


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[StepMetrics]  # every step of the run, of earlier processes too
    costs: dict[str, HeadCost]  # by implementation; empty without compare_heads
    held_out_loss: float | None  # nats per token; None unless data.held_out is set


# -------------------------------------------------------------------- step


def sum_gradients(
    loss: Callable[[Any, Batch, jax.Array], jax.Array],
    params: Any,
    micro_batches: Batch,
    normalizer: jax.Array,
) -> tuple[jax.Array, Any]:
    """Loss and gradient of a whole step, one micro-batch alive at a time.

    Args:
      loss: (params, micro-batch, normalizer) to its share of the step's loss.
      params: what is differentiated.
      micro_batches: arrays [K, B, T].
      normalizer: tokens of the whole step, known before the first micro-batch, so
        that each token weighs the same wherever it lies.

    Returns:
      The sum of the losses, and of the gradients, in float32.
    """

    def add(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
        terms = jax.value_and_grad(loss)(params, micro_batch, normalizer)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, terms), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(add, (jnp.zeros(()), zeros), micro_batches)[0]


def make_step(
    definition: nnx.GraphDef[Decoder],
    head: HeadConfig,
    optimizer: optax.GradientTransformation,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Build the function that one optimizer step is.

    Args:
      definition: of the decoder, from `nnx.split`.
      head: which way to the loss.
      optimizer: from `make_optimizer`.

    Returns:
      (state, micro-batches [K, B, T]) to the next state and the step's `loss` (0 where
      no token counts), `tokens` and `grad_norm`.
    """

    def loss(params: Any, batch: Batch, normalizer: jax.Array) -> jax.Array:
        model = nnx.merge(definition, params)
        hidden = model(batch.tokens, batch.segment_ids, batch.positions)
        return head_loss(
            model.head, hidden, batch.labels, normalizer, head.implementation
        )

    def step(state: TrainState, micro_batches: Batch):
        tokens = jnp.sum(micro_batches.labels >= 0)
        total, gradients = sum_gradients(loss, state.params, micro_batches, tokens)
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.params
        )
        params = optax.apply_updates(state.params, updates)
        numbers = {
            "loss": total,
            "tokens": tokens,
            "grad_norm": optax.tree.norm(gradients),
        }
        return TrainState(params, optimizer_state), numbers

    return step


class Program:
    """A run's functions and shapes; nothing is allocated until `initial_state`.

    Args:
      config: of the run.
      vocab_size: entries of the tokenizer; the model's vocabulary unless config has a
        larger one, whose rest is padding.
    """

    def __init__(self, config: "Config", vocab_size: int):
        self.config = config
        self._model = _with_vocabulary(config.model, vocab_size)
        self.schedule = learning_rate_schedule(config.optimizer, config.run.steps)
        self._optimizer = make_optimizer(config.optimizer, self.schedule)
        self._definition = nnx.split(nnx.eval_shape(self._new_model))[0]
        self.state_shapes = jax.eval_shape(self._new_state)

    def _new_model(self) -> Decoder:
        rngs = nnx.Rngs(jax.random.key(self.config.run.seed))
        return Decoder(self._model, self.config.head, rngs=rngs)

    def _new_state(self) -> TrainState:
        params = nnx.to_pure_dict(nnx.split(self._new_model())[1])
        # Moments in float32 even where the parameters are not.
        return TrainState(
            params, self._optimizer.init(optax.tree.cast(params, jnp.float32))
        )

    def initial_state(self) -> TrainState:
        """Draw the parameters from `run.seed`, on the device."""
        return jax.jit(self._new_state)()

    def compile_step(self, head: HeadConfig) -> jax.stages.Compiled:
        """Compile the train step from shapes alone; the state given is consumed."""
        rows = self.config.data.batch_size, self.config.data.sequence_length
        ids = jax.ShapeDtypeStruct((self.config.run.accumulate, *rows), jnp.int32)
        step = make_step(self._definition, head, self._optimizer)
        donating = jax.jit(step, donate_argnums=0)
        return donating.lower(self.state_shapes, Batch._make([ids] * 4)).compile()

    def evaluate(self, params: optax.Params, batches: Iterator[Batch]) -> float:
        """Mean loss of every token in the batches, in nats; forward only."""

        @jax.jit
        def sums(params: optax.Params, batch: Batch):
            model = nnx.merge(self._definition, params)
            hidden = model(batch.tokens, batch.segment_ids, batch.positions)
            total = head_loss(
                model.head,
                hidden,
                batch.labels,
                jnp.ones(()),
                self.config.head.implementation,
            )
            return total, jnp.sum(batch.labels >= 0)

        totals = np.array([sums(params, batch) for batch in batches], np.float64)
        total, tokens = totals.sum(axis=0)
        return float(total / max(tokens, 1))

    def compile_head(self, head: HeadConfig) -> jax.stages.Compiled:
        """Compile loss and gradients of the head alone, for one micro-batch."""
        model = nnx.eval_shape(self._new_model)
        definition, weights = nnx.split(model.head)
        rows = self.config.data.batch_size, self.config.data.sequence_length
        hidden = jax.ShapeDtypeStruct(
            (*rows, self.config.model.hidden), self.config.model.dtype
        )

        def loss(weights: Any, hidden: jax.Array, labels: jax.Array) -> jax.Array:
            tokens = jnp.sum(labels >= 0)
            module = nnx.merge(definition, weights)
            return head_loss(module, hidden, labels, tokens, head.implementation)

        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        labels = jax.ShapeDtypeStruct(rows, jnp.int32)
        return gradients.lower(nnx.to_pure_dict(weights), hidden, labels).compile()


# -------------------------------------------------------------------- loop


def train(
    config: "Config", operative_text: str = "", console: Console | None = None
) -> Result:
    """Train, or resume training, and report what the head cost.

    A run lives in `config.run.out_dir`.  If checkpoints are there, training continues
    from the newest: killed at any step and called again, it takes bitwise the same
    steps on the CPU as if it had never stopped.

    Args:
      config: everything about the run.
      operative_text: the gin text that says the same; saved beside the run.
      console: where progress goes; a new rich console by default.

    Returns:
      The run's directory, its history and the memory of both heads.

    Raises:
      ValueError: the directory holds a run of another model or other data.
      FloatingPointError: the loss is not finite.
    """
    console = console or Console()
    out_dir = Path(config.run.out_dir).expanduser()
    with Checkpoints(out_dir / "checkpoints", config.run.keep) as checkpoints:
        done = checkpoints.latest() or 0
        if done:
            saved = checkpoints.saved_config(done)
            check_same_config(saved, _fixed_config(config), out_dir)
            console.print(f"resuming {out_dir} after step {done}", highlight=False)
        tokenizer = data.load_tokenizer(config.data)
        (out_dir / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
        if operative_text:
            (out_dir / "operative.gin").write_text(operative_text, "utf-8")
        program = Program(config, tokenizer.get_vocab_size())
        batches = data.batches(config.data, tokenizer)
        compiled = program.compile_step(config.head)
        with metrics.MetricsWriter(out_dir, done) as writer:
            state = _loop(
                program, compiled, batches, checkpoints, done, writer, console
            )
    held_out_loss = None
    if config.data.held_out:
        held_out = data.batches(config.data, tokenizer, split="evaluation", epochs=1)
        held_out_loss = program.evaluate(state.params, held_out)
    history = metrics.read_history(writer.path)
    costs = _head_costs(program, compiled) if config.run.compare_heads else {}
    result = Result(out_dir, history, costs, held_out_loss)
    _report(result, console)
    return result


def _loop(
    program: Program,
    compiled: jax.stages.Compiled,
    batches: data.BatchIterator,
    checkpoints: Checkpoints,
    done: int,
    writer: metrics.MetricsWriter,
    console: Console,
) -> TrainState:
    run = program.config.run
    if done:
        state, data_state = checkpoints.restore(done, program.state_shapes)
        batches.set_state(data_state)
    else:
        state = program.initial_state()
    with metrics.ProgressReport(console, run.steps, done, run.log_every) as report:
        for step in range(done + 1, run.steps + 1):
            start = time.perf_counter()
            state, numbers = compiled(state, _micro_batches(batches, run.accumulate))
            numbers = jax.device_get(numbers)
            seconds = time.perf_counter() - start
            taken = _step_metrics(step, numbers, program.schedule(step - 1), seconds)
            if not math.isfinite(taken.loss):
                raise FloatingPointError(
                    f"the loss of step {step} is {taken.loss}; the run can resume from "
                    "its last checkpoint, with a lower optimizer.learning_rate"
                )
            # Before the checkpoint: a restored step has always been written.
            writer.write(taken)
            report.update(taken)
            if step % run.checkpoint_every == 0 or step == run.steps:
                checkpoints.save(
                    step, state, batches.get_state(), _fixed_config(program.config)
                )
    return state


def _micro_batches(batches: Iterator[Batch], count: int) -> Batch:
    taken = [next(batches) for _ in range(count)]
    return Batch(*(np.stack(arrays) for arrays in zip(*taken, strict=True)))


def _step_metrics(
    step: int, numbers: dict[str, np.ndarray], learning_rate: Any, seconds: float
) -> StepMetrics:
    tokens = int(numbers["tokens"])
    return StepMetrics(
        step=step,
        loss=float(numbers["loss"]),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        grad_norm=float(numbers["grad_norm"]),
        learning_rate=float(learning_rate),
        seconds=seconds,
    )


def _with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=size)
    if model.vocab_size < size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is below the tokenizer's {size} "
            "entries; raise it, leave it None, or lower data.vocab_size"
        )
    return model


def _fixed_config(config: "Config") -> dict[str, dict[str, Any]]:
    """What a resumed run must share with the saved one."""
    fixed = {
        "data": dataclasses.asdict(config.data),
        "model": dataclasses.asdict(config.model),
    }
    del fixed["data"]["cache_dir"]  # where vocabularies lie, not what they are
    return fixed


# ------------------------------------------------------------------ report


def _head_costs(program: Program, compiled: jax.stages.Compiled) -> dict[str, HeadCost]:
    """Memory of the step with either head; the one that trained is not recompiled."""
    trained = program.config.head
    costs = {}
    for implementation in ("fused", "materialised"):
        head = dataclasses.replace(trained, implementation=implementation)
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
    metrics.save_plot(out_dir / "report.png", history, costs)
    console.print(f"saved in {out_dir}: summary.json, report.png", highlight=False)
