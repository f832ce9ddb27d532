"""The jitted functions, shapes and shardings of a decoder's training run."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from rich.console import Console

from jaxmem import devices, remat
from jaxmem.base.user_code import Hooked
from jaxmem.checkpoints import read_weights
from jaxmem.checkpoints.start_adapter import read_start
from jaxmem.data.documents import Batch
from jaxmem.head.backends import choose
from jaxmem.head.maths.call_report import report
from jaxmem.models import attention, balance
from jaxmem.models.decoder import Decoder, ModelConfig, abstract_decoder
from jaxmem.models.lora import adapters_of
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.partitioning import Layout
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import (
    join_weights,
    merge_module,
    split_module,
    split_weights,
)
from jaxmem.remat.offload import Streamed
from jaxmem.train import known_architecture, model_factory, precision, starts
from jaxmem.train.optimizer import (
    OptimizerConfig,
    clip,
    learning_rate_schedule,
    make_optimizer,
    update_rule,
)
from jaxmem.train.output.progress import say
from jaxmem.train.state.checkpoint import Checkpoints, newest, read_params


class TrainState(NamedTuple):
    """The state that a step updates.  Random keys derive from the step's number."""

    params: optax.Params  # the trained weights
    optimizer: optax.OptState  # float32 moments, and the number of updates


class ModelProgram:
    """A model's functions and shapes; nothing is allocated until `initial_state`.

    The model's vocabulary is that of the data, unless config has a larger one, whose
    remaining entries are padding. `schedule` maps the number of finished updates to the
    next learning rate; None: as config.optimizer says.

    Attributes:
        policy: rematerialisation policy of the blocks.
        abstract: the decoder, with shapes in the place of its weights.
        layout: shardings of arrays; the model must be traced in its context.
        definition: of the decoder, for `nnx.merge`.
        state_shapes: shapes and shardings of a `TrainState`.
        frozen_shapes: shapes and shardings of the frozen weights; {} if there are none.
    """

    def __init__(
        self,
        config: Any,
        vocab_size: int,
        schedule: optax.Schedule | None = None,
    ):
        if schedule is None:
            schedule = learning_rate_schedule(config.optimizer, config.run.steps)
        self.model_config = with_vocabulary(config.model, vocab_size)
        self._make_own = model_factory.maker(self.model_config, config.head)
        config.remat.check_layers(self.model_config.layers)
        self.config = config
        self.schedule, self.optimizer = schedule, self.make_optimizer(schedule)
        self.streamed: Streamed | None = None
        if config.optimizer.offload:
            self.streamed = Streamed(update_rule(config.optimizer, schedule))
        self.layout = Layout(config.mesh)
        self._use_policy(None if self._make_own else config.remat.start)
        self.model_config = self.abstract.config
        size = self.model_config.vocab_size or 0
        if config.head.samples is not None and config.head.samples >= size:
            raise ValueError(
                f"head.gradient={config.head.gradient} must have k from 1 to "
                f"{size - 1}, less than the {size} entries of the vocabulary"
            )
        with self.layout.context():
            weights = split_module(self.abstract)[1]
            params, frozen = jax.eval_shape(self._split_trained, weights)
            moments = jax.eval_shape(self._init_moments, params)
        moments = self.layout.of_moments(moments, params)
        self.state_shapes = TrainState(self.layout.of_weights(params), moments)
        self.frozen_shapes = self.layout.of_weights(frozen)
        if self.streamed is not None:
            params = self.state_shapes.params
            self.state_shapes = TrainState(params, self.streamed.shapes(params))

    @property
    def updates(self) -> int:
        """Updates of the weights in a step."""
        return 1

    def make_optimizer(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """The optimizer whose moments are on the device."""
        return make_optimizer(self.config.optimizer, schedule)

    def tokens(self, *shape: int) -> Batch:
        """Shapes and shardings of micro-batches: [..., B, T], or of `config.data`."""
        if not shape:
            data = self.config.data
            shape = data.batch_size, data.sequence_length
        ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        return self.layout.of_tokens(Batch(ids, ids, ids, ids))

    def hidden(self, *shape: int) -> Any:
        """Shapes of the hidden states of tokens [B, T], without shardings."""
        model = self.model_config
        return jax.ShapeDtypeStruct((*shape, model.hidden), model.dtype)

    def number(self) -> Any:
        """Shape of a float32 scalar on every device."""
        return self.layout.whole(jax.ShapeDtypeStruct((), jnp.float32))

    def step_numbers(self, head: HeadConfig, number: int | None = None) -> tuple:
        """The last argument of a step, its number, if the head samples; else ().

        Without a number it is the argument's shape.
        """
        shape = self.layout.whole(jax.ShapeDtypeStruct((), jnp.uint32))
        numbers = (shape if number is None else np.uint32(number),)
        return () if head.sample is None else numbers

    def new_model(self) -> LanguageModel:
        """The model with initial weights from the seed."""
        rngs = nnx.Rngs(jax.random.key(self.config.run.seed))
        if self._make_own is not None:
            return self._make_own(rngs)
        return Decoder(
            self.model_config,
            self.config.head,
            self.policy,
            unroll=self.config.remat.unroll,
            rngs=rngs,
        )

    def _new_abstract(self) -> LanguageModel:
        """The model of the present policy, with shapes in the place of its weights."""
        if self._make_own is not None:
            return nnx.eval_shape(self.new_model)
        unroll = self.config.remat.unroll
        model, head = self.model_config, self.config.head
        return abstract_decoder(model, head, self.policy, unroll=unroll)

    def _use_policy(self, policy: remat.Policy | None) -> None:
        self.policy = policy
        with self.layout.context():
            self.abstract = self._new_abstract()
        self.definition = nnx.split(self.abstract)[0]
        specs = None if self.layout.mesh is None else self.abstract.specs()
        self.layout = Layout(self.config.mesh, specs)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of a step for its policy and, unless that offloads, for its mesh."""
        unroll = self.config.remat.unroll
        options = remat.compiler_options(self.policy, unroll=unroll)
        offloads = self.policy is not None and self.policy.offload
        return options if offloads else self.layout.compiler_options() | options

    def trace(self, run: Callable, *shapes: Any) -> jax.stages.Traced:
        """Trace a function for arguments of these shapes, on the run's mesh.

        A result with the structure, shapes and types of an argument gets its shardings,
        so that a step's new state can be the next call's argument.
        """
        with self.layout.context():
            results = self.layout.carried(jax.eval_shape(run, *shapes), shapes)
            return jax.jit(run, out_shardings=results).trace(*shapes)

    def trace_of_head(
        self,
        loss: Callable,
        shape: tuple[int, int],
        *arguments: Any,
        argnums: Any = (0, 1),
    ) -> jax.stages.Traced:
        """Trace loss(head, hidden, labels, ...) and its gradients, and nothing else.

        `argnums` are those of `jax.grad`; `arguments` are shapes.
        """
        model = self.model(self.state_shapes.params, self.frozen_shapes)
        definition, weights = nnx.split(model.head)

        def run(weights: Any, *arguments: Any):
            return loss(nnx.merge(definition, weights), *arguments)

        labels = jax.ShapeDtypeStruct(shape, jnp.int32)
        shapes = self.layout.of_head(
            nnx.to_pure_dict(weights), self.hidden(*shape), labels
        )
        gradients = jax.jit(jax.value_and_grad(run, argnums, has_aux=True))
        with self.layout.context():
            return gradients.trace(*shapes, *arguments)

    def compile_verified(self, traced: jax.stages.Traced) -> jax.stages.Compiled:
        """Compile, and raise if XLA has dropped the policy's offloading."""
        compiled = traced.lower().compile()
        offloads = self.policy is not None and self.policy.offload
        if offloads and devices.backend() != "cpu":
            remat.verify(compiled, remat.host_bytes(traced))
        return compiled

    def _new_weights(self) -> tuple[dict, dict]:
        return self._split_trained(split_module(self.new_model())[1])

    def _split_trained(self, weights: dict) -> tuple[dict, dict]:
        return split_weights(weights, self.config.optimizer.trainable)

    def _new_state(self) -> TrainState:
        params, _ = self._new_weights()
        return TrainState(params, self._init_moments(params))

    def _init_moments(self, params: optax.Params) -> optax.OptState:
        # In float32 even if the parameters are not.
        return self.optimizer.init(optax.tree.cast(params, jnp.float32))

    def initial_state(self) -> TrainState:
        """The trained weights and their moments, with their shardings."""
        if self.streamed is not None:
            params = self.initial_params()
            return TrainState(params, self.streamed.init(params))
        if self._make_own is not None or self.model_config.checkpoint is not None:
            params = self.initial_params()
            with self.layout.context():
                begin = self.layout.jit(self._init_moments, self.state_shapes.optimizer)
                return TrainState(params, begin(params))
        return self._run_sharded(self._new_state, self.state_shapes)

    def restored_state(
        self, checkpoints: Checkpoints, step: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """A saved state with this run's shardings, and the state of its data."""
        if self.streamed is None:
            return checkpoints.restore(step, self.state_shapes)
        params = self.state_shapes.params
        saved = checkpoints.saved_shapes(step)["optimizer"]
        slices = jax.tree.map(lambda _, parts: len(parts), params, saved)
        like = TrainState(params, self.streamed.shapes(params, slices))
        (params, moments), data = checkpoints.restore(step, like)
        return TrainState(params, self.streamed.recut(params, moments)), data

    def initial_params(self) -> optax.Params:
        """The initial trained weights; the same in every process."""
        return self._initial_weights(0, self.state_shapes.params)

    def frozen(self) -> dict:
        """The frozen weights; the same in every process."""
        return (
            self._initial_weights(1, self.frozen_shapes) if self.frozen_shapes else {}
        )

    def _initial_weights(self, part: int, shapes: Any) -> Any:
        """Weights of the checkpoint, if there is one; else initialised by the seed."""
        if self._make_own is not None:
            return self._factory_weights(part, shapes)
        checkpoint = self.model_config.checkpoint
        if checkpoint is None:
            return self._run_sharded(lambda: self._new_weights()[part], shapes)
        read = read_weights(checkpoint, self.model_config, like=shapes)
        if (start := starts.directory(self.config)) is not None:
            return join_weights(read, self._start_weights(start, shapes))
        new = adapters_of(shapes)  # the checkpoint has none
        if not new:
            return read
        drawn = self._run_sharded(lambda: adapters_of(self._new_weights()[part]), new)
        return join_weights(read, drawn)

    def _start_weights(self, start: Path, shapes: Any) -> dict:
        """The weights among `shapes` that the adapter has that training starts from."""
        like: dict[Any, Any] = dict(traverse_util.flatten_dict(shapes))
        every = join_weights(self.state_shapes.params, self.frozen_shapes)
        read: Any = traverse_util.flatten_dict(
            read_start(start, self.model_config, every)
        )
        like = {path: leaf for path, leaf in like.items() if path in read}
        placed = self.layout.place({path: read[path] for path in like}, like)
        return traverse_util.unflatten_dict(placed)

    def _factory_weights(self, part: int, shapes: Any) -> Any:
        """Weights of a factory, which is called eagerly because it may read files."""
        if self.layout.mesh is None:
            # Copies: steps consume them, and the factory may still hold the arrays.
            return jax.tree.map(jnp.array, self._unsharded_weights()[part])
        with jax.default_device(jax.devices("cpu")[0]):  # not all of them on one
            weights = self._unsharded_weights()[part]
        return self.layout.place(weights, shapes)

    def _unsharded_weights(self) -> tuple[dict, dict]:
        """Weights of a factory, or of the run or export that the model starts from."""
        exported = model_factory.export_of(self.config.model)
        like = join_weights(
            *jax.eval_shape(self._split_trained, split_module(self.abstract)[1])
        )
        if exported is not None:
            return self._split_trained(model_factory.read_weights(exported, like))
        run = model_factory.checkpoints_of(self.config.model)
        step = None if run is None else newest(run)
        if run is None or step is None:
            return self._new_weights()
        return self._split_trained(read_params(run, step, like))

    def lines(self) -> Iterator[str]:
        """Lines about the model that a run or a plan prints before it starts."""
        params, frozen = self.state_shapes.params, self.frozen_shapes
        yield precision.described(params, frozen, str(self.model_config.dtype))
        is_alone = self._make_own is None and self.layout.mesh is None
        if is_alone and (line := attention.advice(self.model_config)) is not None:
            yield line
        model = self.config.model
        has_checkpoints = self.config.run.checkpoint_every is not None
        if line := known_architecture.warning(self.model_config, has_checkpoints):
            yield line
        if model.adapter is not None:
            matrices = [*model.lora_targets, *["head"] * model.lora_head]
            yield (
                f"training goes on with the adapter {model.adapter} (rank "
                f"{model.lora_rank}, alpha {model.lora_alpha:g}, of "
                f"{', '.join(matrices)}) on {model.checkpoint}"
            )
        if self._make_own is not None and self.config.remat.policy != "none":
            yield (
                f"remat.policy={self.config.remat.policy!r} has no effect, because "
                "the model of model.factory itself decides what it keeps for the "
                "backward pass"
            )

    def _run_sharded(self, draw: Callable, shapes: Any) -> Any:
        with self.layout.context():
            return self.layout.jit(draw, shapes)()

    def model(self, params: optax.Params, frozen: dict) -> LanguageModel:
        """The model with these weights."""
        return merge_module(self.definition, join_weights(params, frozen))

    def routers(self, routed: balance.Routed | None) -> dict[str, float] | None:
        """Metrics of a step's routers; None for a model without experts."""
        if routed is None:
            return None
        k = self.model_config.experts.per_token
        return balance.report(jax.device_get(routed), k)

    @property
    def head_is_frozen(self) -> bool:
        """True if the vocabulary matrix is not trained."""
        frozen = traverse_util.flatten_dict(self.frozen_shapes, sep="/")
        return self.abstract.head_path in frozen


class DecoderProgram(ModelProgram, Hooked):
    """A `ModelProgram` that trains: its own class traces what a step runs."""

    page = "docs/own_job.md"

    def choose_policy(self, console: Console) -> None:
        """Choose the policy that fits the config's memory limit, if it has one."""
        if self.config.remat.policy != "fit":
            return

        def step(policy: remat.Policy | None) -> Any:
            self._use_policy(policy)
            return self.trace_backward()

        layers, held = self.model_config.layers, self.held_with_backward()
        show = functools.partial(say, console)
        self._use_policy(self.config.remat.fit(step, layers, held, show))

    @abc.abstractmethod
    def trace_backward(self) -> jax.stages.Traced:
        """Trace the program of most memory: a step, or a micro-batch's gradients."""

    def held_with_backward(self) -> list[Any]:
        """Shapes of other arrays on the devices, besides that program's arguments."""
        return []

    def trace_loss(self) -> None:
        """Trace the calls of the head that compute the loss, for `backend`."""
        self.trace_backward()

    @functools.cached_property
    def backend(self) -> str:
        """The backend that computes the head's loss; "hopper+xla" where both do."""
        if self.config.head.logits == "materialised":
            return "xla"  # not by a verb
        able, named = choose.of_machine(), self.config.head.implementation
        if able == ("xla",) and named in (None, "xla"):
            return "xla"  # nothing else runs here, so that tracing tells no more
        try:
            with report() as traced:
                self.trace_loss()
        except NotImplementedError as error:
            if named is None:
                raise
            raise ValueError(f"head.implementation: {error}") from error
        names = {c.implementation for c in traced.calls if not c.is_sole_backend}
        if not names and named not in (None, "xla"):
            verbs = ", ".join(sorted({call.verb for call in traced.calls}))
            raise ValueError(
                f"head.implementation: implementation={named!r} cannot run this call: "
                f"the loss uses all of {verbs}, which only 'xla' implements; leave "
                "head.implementation out"
            )
        return "+".join(sorted(names)) or "xla"


def update(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Any
) -> tuple[TrainState, jax.Array]:
    """One step of the optimizer, and the gradients' global norm before clipping."""
    with jax.named_scope("optimizer"):  # as profiles show it
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(gradients)
    return TrainState(params, moments), norm


class StreamedUpdate:
    """`update` with moments on the host: (state, gradients) -> (state, norm).

    The gradients that are passed to a call are consumed.
    """

    def __init__(self, config: OptimizerConfig, optimizer: Streamed, gradients: Any):
        self._optimizer = optimizer
        first = jax.jit(functools.partial(clip, config), donate_argnums=0)
        self._clip = first.lower(gradients).compile()
        self.memory_analysis = self._clip.memory_analysis

    def __call__(
        self, state: TrainState, gradients: Any
    ) -> tuple[TrainState, jax.Array]:
        """Update; both arguments are consumed."""
        gradients, norm = self._clip(gradients)
        updated = self._optimizer.update(state.params, gradients, state.optimizer)
        return TrainState(*updated), norm


def gradient_shapes(params: Any) -> Any:
    """Shapes of gradient sums in float32, sharded like the parameters."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding),
        params,
    )


def add_in_float32(sums: Any, terms: Any) -> Any:
    """Add terms of any dtype to sums in float32, leaf by leaf."""
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, terms)


def fixed_moments(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Optimizer settings that a resumed run must share with the saved one."""
    # Moments on the host are saved in slices.
    offload = {"offload": True} if optimizer.offload else {}
    return offload | ({"name": optimizer.name} if optimizer.name != "adamw" else {})


def fixed_weights(optimizer: OptimizerConfig, seed: int) -> dict[str, dict[str, Any]]:
    """Other settings that a resumed run must share with the saved one."""
    moments = fixed_moments(optimizer)
    if optimizer.trainable is None:
        return {"optimizer": moments} if moments else {}
    # Frozen weights are not saved, but initialised again.
    named = moments | {"trainable": optimizer.trainable}
    return {"optimizer": named, "run": {"seed": seed}}


def with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    """The config with a vocabulary of at least that many entries."""
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=size)
    if model.vocab_size < size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is below the data's {size} entries; "
            "raise it, leave it out, or choose data with a smaller vocabulary"
        )
    return model
