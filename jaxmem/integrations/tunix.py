"""Tunix: log-probabilities and entropies of PPO, GRPO, DPO and SFT, without logits.

Tunix's models run up to their head, and jaxmem computes the rest, whatever
`compute_logps_chunk_size` is (0.1.8). The replaced functions are

    tunix.rl.common.compute_per_token_logps   GRPO, PPO, reference and rollout
    tunix.rl.common.get_per_token_logps       DPO and ORPO
    tunix.sft.peft_trainer._default_loss_fn   SFT
    tunix.rl.common.compute_chunked_logps     other callers (0.1.8)
    BaseStrategy's losses and outputs of the teacher, for LogitStrategy

The trainers of `tunix.experimental`, which have their own loss, continue to compute
logits. Strategies that compare features are left alone. 0.1.8 is not released yet: its
sources of August 2026 are supported, and `apply` rejects others by their arguments.

Tied and untied heads of Tunix's own models are supported, and MaxText's through its
adapter. Tunix's own function is used, and a message printed once, for a head with LoRA,
a quantised head or the head of another model.

Ids have their meaning in Tunix, also where jaxmem's verbs differ, which mask negative
labels. In the functions of `tunix.rl.common`, a negative id counts from the end of the
vocabulary, as in indexing (an eos_id of -1 is token V - 1), and an id outside [-V, V)
gives NaN. In the SFT loss, a negative id counts as 0; an id of V or more gives NaN,
whereas Tunix counts that as 0 too.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.integrations._head import NotServed, Options, as_index, scores
from jaxmem.integrations._replace import (
    Integration,
    ReplacedCall,
    Replacement,
    Tally,
    or_original,
    replacing,
)
from jaxmem.integrations._tunix_distillation import DISTILLATION
from jaxmem.integrations._tunix_models import (
    head_of,
    hidden_states,
    takes_segment_ids,
)


class Entropies:
    """Entropies that replace logits requested only to compute entropies."""

    def __init__(self, entropy: jax.Array):
        self.entropy = entropy


def _per_token_logps(option: str, of_entropies: Callable[[jax.Array], Any] | None):
    """Make the replacement of `compute_per_token_logps`.

    The argument named `option` requests a second result, which `of_entropies` computes
    from entropies; None if that result is logits.
    """

    def make(original: Callable, options: Options, tally: Tally):
        common: Any = inspect.getmodule(original)
        signature = inspect.signature(original)

        @functools.partial(
            jax.jit,
            static_argnames=(
                "pad_id", "eos_id", "stop_gradient", "temperature", "chunk_size",
                "entropy",
            ),
        )  # fmt: skip
        def run(graphdef, state, stop_gradient, **arguments):
            model, call = nnx.merge(graphdef, state), types.SimpleNamespace(**arguments)
            pair = _scores_of_ids(common, model, options, call)
            return jax.lax.stop_gradient(pair) if stop_gradient else pair

        @or_original(original, tally)
        def compute_per_token_logps(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            head_of(
                nnx.merge(arguments["graphdef"], arguments["state"])
            )  # for `NotServed`
            if not arguments.pop(option):
                return run(**arguments, entropy=False)[0]
            if of_entropies is None:
                asked = f"compute_per_token_logps({option}=True)"
                raise NotServed(f"{asked} is asked for logits")
            logps, entropy = run(**arguments, entropy=True)
            return logps, of_entropies(entropy)

        return compute_per_token_logps

    return make


def _scores_of_ids(
    common: Any, model: Any, options: Options, call: types.SimpleNamespace
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities and entropies of completions, or of whole packed rows.

    `call` has Tunix's arguments of `compute_per_token_logps`, and `entropy`, whether
    entropies are computed.
    """
    head, packed = head_of(model), call.segment_ids is not None
    tokens, positions, mask, padding = common.process_ids(
        call.prompt_tokens, call.completion_tokens, call.pad_id, call.eos_id,
        call.segment_ids, call.segment_positions,
    )  # fmt: skip
    segments, more = call.segment_ids if packed else padding, {}
    if segments is not None and takes_segment_ids(model):
        more["segment_ids"] = segments
    hidden = hidden_states(
        model, tokens, positions=positions, cache=None, attention_mask=mask,
        images=call.images, **more,
    )  # fmt: skip
    kept = tokens.shape[1] - 1 if packed else call.completion_tokens.shape[1]
    logps, entropies, _ = scores(
        hidden[:, -kept - 1 : -1], head, as_index(tokens[:, -kept:], head), options,
        temperature=call.temperature, entropy=call.entropy,
    )  # fmt: skip
    if packed:  # shift, so that logps[i] belongs to token i
        front = ((0, 0), (1, 0))
        logps = jnp.pad(logps, front)
        if entropies is not None:
            # Tunix pads logits by 0, whose entropy is ln V; in chunks, entropies by 0.
            in_chunks = getattr(call, "chunk_size", 0)
            first = 0.0 if in_chunks else jnp.log(head.n_columns)
            entropies = jnp.pad(entropies, front, constant_values=first)
    return logps, entropies


_SHARED = (
    "graphdef", "state", "prompt_tokens", "completion_tokens", "pad_id", "eos_id",
    "images", "stop_gradient",
)  # fmt: skip
_MORE = "segment_ids", "segment_positions", "temperature"
_LOGPS = Replacement(
    "tunix.rl.common:compute_per_token_logps",
    _per_token_logps("return_entropy", lambda entropy: entropy),
    (*_SHARED, "return_entropy", *_MORE, "chunk_size"),
)
# In 0.1.7, algorithms request logits to compute entropies from them.
_LOGPS_OR_LOGITS = Replacement(
    "tunix.rl.common:compute_per_token_logps",
    _per_token_logps("return_logits", None),
    (*_SHARED, "return_logits", *_MORE),
)


class _Common:
    """`tunix.rl.common` for `algo_core`, which requests logits to compute entropies."""

    def __init__(self, module: Any, options: Options, tally: Tally):
        original = module.compute_per_token_logps
        original = getattr(original, "jaxmem_original", original)
        make = _per_token_logps("return_logits", Entropies)
        self._module = module
        self.compute_per_token_logps = make(original, options, tally)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_COMMON = Replacement("tunix.rl.algo_core:common", _Common, None)


@replacing("tunix.rl.algo_core:compute_entropy_from_logits")
def _ENTROPY(call: ReplacedCall, logits):
    if not isinstance(logits, Entropies):
        raise NotServed("compute_entropy_from_logits is given logits")
    return logits.entropy


@replacing("tunix.rl.common:get_per_token_logps")
def _PREFERENCES(
    call: ReplacedCall,
    model,
    input_tokens,
    positions,
    attn_mask,
    logits_to_keep,
    images=None,
):
    head = head_of(model)
    hidden = hidden_states(
        model, input_tokens, positions=positions, attention_mask=attn_mask,
        cache=None, images=images,
    )  # fmt: skip
    states = hidden[:, -logits_to_keep - 1 : -1]
    labels = as_index(input_tokens[:, -logits_to_keep:], head)
    return scores(states, head, labels, call.options, entropy=False)[0]


@replacing("tunix.sft.peft_trainer:_default_loss_fn")
def _LOSS(
    call: ReplacedCall,
    model,
    input_tokens,
    input_mask,
    positions,
    attention_mask,
    images=None,
):
    utils: Any = getattr(inspect.getmodule(call.original), "utils", None)
    head = head_of(model)
    hidden = hidden_states(
        model, input_tokens, positions, None, attention_mask, images=images
    )
    mask = input_mask[:, 1:]
    logps, _, _ = scores(
        hidden[:, :-1], head, input_tokens[:, 1:], call.options, entropy=False,
        where=mask != 0,
    )  # fmt: skip
    total, count = -jnp.sum(logps * mask), jnp.sum(mask)
    if not hasattr(utils, "LossOutput"):
        return total / (count + 1e-8)
    # Sums, which the trainer divides after accumulating micro-batches.
    loss = utils.WeightedMetric(total, count, eps=1e-8)
    return utils.LossOutput(primary_loss=loss, aux_metrics={})


@replacing("tunix.rl.common:compute_chunked_logps")
def _CHUNKED(
    call: ReplacedCall, model, hidden_states, target_ids, temperature, chunk_size,
    return_entropy,
):  # fmt: skip
    head = head_of(model)
    logps, entropy, _ = scores(
        hidden_states, head, as_index(target_ids, head), call.options,
        temperature=temperature, entropy=return_entropy,
    )  # fmt: skip
    return (logps, entropy) if return_entropy else logps


_TUNIX = Integration(
    "tunix",
    {
        "google-tunix": {
            "0.1.7": (
                _LOGPS_OR_LOGITS, _COMMON, _ENTROPY, _PREFERENCES, _LOSS, *DISTILLATION
            ),
            "0.1.8": (_LOGPS, _CHUNKED, _PREFERENCES, _LOSS, *DISTILLATION),
        }
    },
)  # fmt: skip
apply, undo, applied = _TUNIX.apply, _TUNIX.undo, _TUNIX.applied
status = _TUNIX.status
