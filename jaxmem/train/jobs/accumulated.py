"""A step whose gradients are summed by one program and applied by another."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models import balance
from jaxmem.models.partitioning import as_stored
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.phases import Phase
from jaxmem.train.program import (
    DecoderProgram,
    StreamedUpdate,
    TrainState,
    add_in_float32,
    gradient_shapes,
    update,
)


class AccumulatedSums(NamedTuple):
    """Sums over the micro-batches of one update."""

    loss: jax.Array
    metrics: dict[str, jax.Array]  # over tokens
    gradients: Any
    routed: balance.Routed | None = None  # None for a model without experts


class AccumulatedProgram(DecoderProgram):
    """A `DecoderProgram` whose update follows on sums over micro-batches."""

    @property
    @abc.abstractmethod
    def metric_names(self) -> list[str]:
        """Names of the metrics that are summed over tokens."""

    def micro_batch_numbers(self, head: HeadConfig, *numbers: int) -> tuple:
        """The numbers that seed a sampling head, as one array; () for other heads.

        They are of a step, a minibatch and a micro-batch; without `numbers`, the result
        is their shape.
        """
        if head.sample is None:
            return ()
        if numbers:
            return (np.array(numbers, np.uint32),)
        return (self.layout.whole(jax.ShapeDtypeStruct((3,), jnp.uint32)),)

    def sums(self) -> AccumulatedSums:
        """Shapes and shardings of `AccumulatedSums`."""
        sums = self.layout.whole(jax.eval_shape(self._make_zeros))
        return sums._replace(gradients=gradient_shapes(self.state_shapes.params))

    def trace_sums(
        self,
        loss: Callable,
        arguments: tuple,
        head: HeadConfig,
        kept: Sequence[str] = (),
        check: Callable[[Any, dict[str, jax.Array]], Any] | None = None,
    ) -> jax.stages.Traced:
        """Trace the addition of a micro-batch to the sums, which are consumed.

        It returns the sums, the metrics `kept` of tokens and the result of `check`.

        Args:
            loss: maps trained weights, frozen weights, `arguments` and the numbers of a
                sampling head to a scalar, which is differentiated, and (its value,
                metrics of tokens [B, T], routing).
            arguments: shapes of the micro-batch and of what else the loss reads.
            head: its options.
            kept: names of the metrics that are returned for each token as well.
            check: maps the micro-batch and the metrics of its tokens to a result whose
                `rejected` is a scalar; where that is True, nothing is added to the
                sums. None: all is added.
        """

        def run(
            params: Any, frozen: Any, sums: AccumulatedSums, *arguments: Any
        ) -> tuple[AccumulatedSums, Any]:
            gradients = jax.value_and_grad(loss, has_aux=True)
            (_, (value, metrics, routed)), slopes = gradients(
                params, frozen, *arguments
            )
            checked = None if check is None else check(arguments[0], metrics)
            of_tokens = tuple(metrics.pop(name, None) for name in kept)
            metrics = {name: jnp.sum(x) for name, x in metrics.items()}
            terms = AccumulatedSums(value, metrics, as_stored(slopes), routed)
            if checked is not None:  # not a product, because 0 · NaN would be NaN
                terms = jax.tree.map(lambda x: jnp.where(checked.rejected, 0, x), terms)
            return add_in_float32(sums, terms), (of_tokens, checked)

        sums, options = self.sums(), self.compiler_options
        jitted = self.layout.jit(
            run, (sums, self.number()), donate_argnums=2, compiler_options=options
        )
        weights = self.state_shapes.params, self.frozen_shapes
        with self.layout.context():
            numbers = self.micro_batch_numbers(head)
            return jitted.trace(*weights, sums, *arguments, *numbers)

    def compile_zeros(self) -> jax.stages.Compiled:
        """Compile a program without arguments that returns sums of 0."""
        return self.layout.jit(self._make_zeros, self.sums()).lower().compile()

    def _make_zeros(self) -> AccumulatedSums:
        gradients = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.float32), self.state_shapes.params
        )
        metrics = {name: jnp.zeros(()) for name in self.metric_names}
        routed = balance.nothing(self.model_config)
        return AccumulatedSums(jnp.zeros(()), metrics, gradients, routed)

    def compile_update(self) -> jax.stages.Compiled | StreamedUpdate:
        """Compile the optimizer's step, wherever the moments are."""
        if self.streamed is not None:
            gradients = self.sums().gradients
            return StreamedUpdate(self.config.optimizer, self.streamed, gradients)
        return self.trace_update().lower().compile()

    def trace_update(self) -> jax.stages.Traced:
        """Trace the optimizer's step, where the moments are on the device."""

        def run(state: TrainState, gradients: Any):
            return update(self.optimizer, state, gradients)

        results = self.state_shapes, self.number()
        donating = self.layout.jit(run, results, donate_argnums=0)
        with self.layout.context():
            return donating.trace(self.state_shapes, self.sums().gradients)

    def update_phase(self, held: Mapping[str, Any], runs: int) -> Phase:
        """The phase of the optimizer's update, for a plan; `runs` a step."""
        arguments = {
            "trained weights": self.state_shapes.params,
            "moments": self.state_shapes.optimizer,
            "gradients": gradient_shapes(self.state_shapes.params),
        }
        beside = {name: x for name, x in held.items() if name not in arguments}
        return Phase(
            "update",
            self.trace_update,
            arguments,
            {"frozen weights": self.frozen_shapes} | beside,
            runs=runs,
        )
