"""MaxText: the loss of vocabulary tiling without logits, and hidden states for Tunix.

The loss is computed in tiles of `chunk` tokens, for any num_vocab_tiling (it must
stay above 1, because MaxText then provides hidden states). The replaced functions and
class are

    maxtext.utils.vocabulary_tiling.vocab_tiling_nnx_loss
    maxtext.utils.vocabulary_tiling.vocab_tiling_linen_loss   (if it exists)
    maxtext.integration.tunix.tunix_adapter.TunixMaxTextAdapter   gets hidden states
    CombinedDistillationStrategy's forward functions, labels and losses

In distillation, which needs Tunix, soft and hard losses come from hidden states, also
where a teacher's top K logits were saved; multi-token prediction is left alone. Heads
may be tied or not, of Linen models and of NNX ones. MaxText's own function is used, and
a message printed once, for a quantised head, one with LoRA, parameters offloaded to the
host, and a Linen decoder inside an NNX model (pure_nnx_decoder=False).
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxmem.integrations._head import ModelHead, NotServed, Options, scores
from jaxmem.integrations._maxtext_distillation import DISTILLATION
from jaxmem.integrations._maxtext_models import (
    final_states,
    head_of,
    stopped_before_head,
)
from jaxmem.integrations._replace import (
    Integration,
    ReplacedCall,
    Replacement,
    Tally,
    replacing,
)
from jaxmem.integrations._substitutes import holding


def _loss(
    states: jax.Array, data: Any, config: Any, head: ModelHead, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Sums over tokens of cross-entropy with z-loss, and of the z-loss alone."""
    counts = data["targets_segmentation"] != 0
    logps, _, normalizer = scores(
        states, head, data["targets"], options, entropy=bool(config.z_loss_multiplier),
        where=counts,
    )  # fmt: skip
    if normalizer is None:
        return -jnp.sum(logps), jnp.zeros((), jnp.float32)
    z_loss = jnp.sum(config.z_loss_multiplier * normalizer**2)
    return z_loss - jnp.sum(logps), z_loss


@replacing("maxtext.utils.vocabulary_tiling:vocab_tiling_nnx_loss")
def _NNX(call: ReplacedCall, model, hidden_states, data, config, is_train):
    head = head_of(model)
    deterministic = not config.enable_dropout if is_train else True
    states = final_states(model, hidden_states, deterministic)
    return _loss(states, data, config, head, call.options)


@replacing("maxtext.utils.vocabulary_tiling:vocab_tiling_linen_loss")
def _LINEN(call: ReplacedCall, hidden_states, data, config, model, params, is_train):
    seen = _Linen(model, params)
    head = head_of(seen)
    if is_train and config.enable_dropout and config.dropout_rate > 0:
        raise NotServed("a Linen model with dropout before its head")
    return _loss(seen.states(hidden_states), data, config, head, call.options)


class _Linen:
    """A Linen transformer and its parameters, with the attributes of an NNX one."""

    def __init__(self, model: Any, params: Any):
        self.config, self._model, self._params = model.config, model, params
        self.decoder = self

    @property
    def token_embedder(self) -> Any:
        return _LayerParameters(self._params["params"]["token_embedder"])

    @property
    def logits_dense(self) -> Any:
        params = self._params["params"]["decoder"]["logits_dense"]
        beside = sorted(set(params) - {"kernel", "bias"})
        if beside:  # LoRA or scales, which Linen has as other parameters
            raise NotServed(
                f"logits_dense has {', '.join(beside)} in addition to its kernel"
            )
        return _LayerParameters(params)

    def states(self, hidden: jax.Array) -> jax.Array:
        """The operand of the head's product, recorded by intercepting that product."""
        layers: Any = importlib.import_module("maxtext.layers.decoders")
        states: list[jax.Array] = []

        def keep(y: jax.Array) -> jax.Array:
            states.append(y)
            return jnp.zeros((*y.shape[:-1], 1), y.dtype)

        def intercept(method, args, kwargs, context):
            is_head = context.module.name == "logits_dense"
            if is_head and context.method_name == "__call__":
                return keep(args[0])
            return method(*args, **kwargs)

        attend = holding(
            layers, "attend_on_embedding", lambda _, y, *__, **___: keep(y)
        )
        with attend, nn.intercept_methods(intercept):
            self._model.apply(
                {"params": self._params["params"]},
                hidden,
                deterministic=True,
                method="logits_from_hidden_states_for_vocab_tiling",
            )
        return states[0]


class _LayerParameters:
    """Parameters of one Linen layer, as attributes."""

    def __init__(self, params: Any):
        vars(self).update(nn.meta.unbox(dict(params)))


def _adapter(original: type, options: Options, tally: Tally) -> type:
    """The adapter class with the methods that `jaxmem.integrations.tunix` calls."""

    class TunixMaxTextAdapter(original):
        def jaxmem_head(self) -> ModelHead:
            return head_of(self.base)

        def jaxmem_hidden_states(self, *args: Any, **kwargs: Any) -> jax.Array:
            with stopped_before_head(self.base.decoder) as calls:
                self(*args, **kwargs)
            (call,) = calls
            tally.serve()
            return final_states(self.base, call.states, deterministic=True)

    TunixMaxTextAdapter.__qualname__ = original.__qualname__
    TunixMaxTextAdapter.__module__ = original.__module__
    return TunixMaxTextAdapter


_ADAPTER = Replacement(
    "maxtext.integration.tunix.tunix_adapter:TunixMaxTextAdapter", _adapter, None
)
_MAXTEXT = Integration(
    "maxtext",
    {
        "maxtext": {
            "0.2.5": (_NNX, _ADAPTER, *DISTILLATION),
            "0.2.4": (_NNX, _LINEN, _ADAPTER, *DISTILLATION),
        }
    },
)
apply, undo, applied = _MAXTEXT.apply, _MAXTEXT.undo, _MAXTEXT.applied
status = _MAXTEXT.status
