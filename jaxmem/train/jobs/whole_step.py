"""A step that is one program, from the data to the next weights."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.models.partitioning import as_stored
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.program import (
    DecoderProgram,
    StreamedUpdate,
    TrainState,
    add_in_float32,
    gradient_shapes,
    update,
)


def step_of(gradients: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """The function of a step: gradients, and the optimizer's update.

    It maps (state, frozen weights, ...) to (next state, numbers with `grad_norm`), and
    `gradients` (trained weights, frozen weights, ...) to (gradients, numbers).
    """

    def step(state: TrainState, frozen: dict, *batch: Any):
        slopes, numbers = gradients(state.params, frozen, *batch)
        state, norm = update(optimizer, state, slopes)
        return state, numbers | {"grad_norm": norm}

    return step


def sum_gradients(
    loss: Callable[[Any, Any], tuple[jax.Array, Any]], params: Any, micro_batches: Any
) -> tuple[Any, Any]:
    """The auxiliary values of a loss over a whole step, and its gradients in float32.

    One micro-batch is alive at a time. The loss returns a scalar, which is
    differentiated, and a tree of arrays; both are summed over the micro-batches
    [K, ...].
    """

    def add(sums: Any, micro_batch: Any) -> tuple[Any, Any]:
        (_, aux), slopes = jax.value_and_grad(loss, has_aux=True)(params, micro_batch)
        return add_in_float32(sums, as_stored(slopes)), aux

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    gradients, aux = jax.lax.scan(add, as_stored(zeros), micro_batches)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), aux), gradients


class StreamedStep:
    """A step whose moments are on the host: its gradients, then a `StreamedUpdate`."""

    def __init__(self, gradients: jax.stages.Compiled, finish: StreamedUpdate):
        self._gradients, self._finish = gradients, finish
        self.memory_analysis = gradients.memory_analysis

    def __call__(self, state: TrainState, frozen: dict, *batch: Any):
        """Take a step, with the arguments and results of a compiled step."""
        slopes, numbers = self._gradients(state.params, frozen, *batch)
        state, norm = self._finish(state, slopes)
        return state, numbers | {"grad_norm": norm}


class StepProgram(DecoderProgram):
    """A `DecoderProgram` with the gradients of a step."""

    @abc.abstractmethod
    def gradients(self, head: HeadConfig) -> Callable:
        """The function that `step_of` takes.

        Where the head draws (`DecoderProgram.step_numbers`), its last argument is the
        step's number.
        """

    @abc.abstractmethod
    def micro_batches(self) -> Any:
        """Shapes of a step's micro-batches, with their shardings."""

    def trace_backward(self) -> jax.stages.Traced:
        return self.trace_step()

    def trace_step(self, head: HeadConfig | None = None) -> jax.stages.Traced:
        """Trace the train step; its gradients alone where the moments are streamed."""
        chosen: HeadConfig = head or self.config.head
        run, donated = self.gradients(chosen), ()
        state: Any = self.state_shapes.params
        results: Any = gradient_shapes(state), self.number()
        if self.streamed is None:
            run, donated = step_of(run, self.optimizer), 0
            state = self.state_shapes
            results = state, self.number()
        options, batches = self.compiler_options, self.micro_batches()
        jitted = self.layout.jit(
            run, results, donate_argnums=donated, compiler_options=options
        )
        with self.layout.context():
            numbers = self.step_numbers(chosen)
            return jitted.trace(state, self.frozen_shapes, batches, *numbers)

    def compile_step(
        self, head: HeadConfig | None = None
    ) -> jax.stages.Compiled | StreamedStep:
        """Compile the train step from shapes alone; it consumes the state."""
        return self.with_update(self.compile_verified(self.trace_step(head)))

    def with_update(
        self, compiled: jax.stages.Compiled
    ) -> jax.stages.Compiled | StreamedStep:
        """The whole step, from the compiled program of `trace_step`."""
        if self.streamed is None:
            return compiled
        slopes = gradient_shapes(self.state_shapes.params)
        finish = StreamedUpdate(self.config.optimizer, self.streamed, slopes)
        return StreamedStep(compiled, finish)
