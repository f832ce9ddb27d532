"""Tunix: log-probabilities and entropies of PPO, GRPO, DPO and SFT, without logits.

Tunix 0.1.7 makes the logits [B, T, V] in float32, keeps them for the backward pass and
makes a softmax of them twice more for the entropy; 0.1.8 makes them a chunk of T at a
time. Here, its models run up to their head, and jaxmem does the rest:

    tunix.rl.common.compute_per_token_logps   GRPO, PPO and the reference (0.1.7)
    tunix.rl.common.compute_chunked_logps     the same (0.1.8)
    tunix.rl.common.get_per_token_logps       DPO and ORPO (0.1.7)
    tunix.sft.peft_trainer._default_loss_fn   SFT (0.1.7)

Tied and untied heads of Tunix's own models are known, and MaxText's through its
adapter; a head with LoRA, a quantised one or another model's is left as it is, and said
so.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.core.options import Chunk
from jaxmem.integrations._head import Head, Options, scores
from jaxmem.integrations._replace import Integration, Replacement


class Entropies:
    """What stands where logits were asked for only to make entropies of them."""

    def __init__(self, entropy: jax.Array):
        self.entropy = entropy


def apply(*, chunk: Chunk = 1024, implementation: str | None = None) -> None:
    """Replace Tunix's functions, until `undo`; prints which.

    Args:
        chunk: tokens whose logits may be alive at once, over all rows.
        implementation: as in `jaxmem.logprobs`.

    Raises:
        IntegrationError: Tunix is missing, or of a version that is not known.
    """
    _TUNIX.apply(Options(chunk, implementation))


def undo() -> None:
    """Put Tunix's functions back."""
    _TUNIX.undo()


def applied(
    *, chunk: Chunk = 1024, implementation: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """`apply` for the time of a `with` block."""
    return _TUNIX.applied(Options(chunk, implementation))


# -------------------------------------------------------------------- the head


def head_of(model: Any) -> Head | str:
    """A model's head; or why it cannot be served."""
    if hasattr(model, "jaxmem_head"):  # another integration knows it
        return model.jaxmem_head()
    names = [kind.__module__ for kind in type(model).__mro__]
    if not any(name.startswith("tunix.models.") for name in names):
        return f"{type(model).__name__} is none of Tunix's own models"
    owner, _ = _projection(model)
    if any("lora" in name or "quant" in name for name in vars(owner)):
        return f"the head of {type(model).__name__} has LoRA, or is quantised"
    untied = owner is not model.embedder
    if untied and owner.einsum_str != "BTD,DV->BTV":
        return f"the head of {type(model).__name__} computes {owner.einsum_str}"
    W = owner.w[...] if untied else owner.input_embedding[...]
    if not isinstance(W, jax.Array):
        return f"the head of {type(model).__name__} is no plain array"
    softcap = getattr(model, "final_logits_softcap", None)
    softcap = softcap or getattr(model.config, "final_logit_softcap", None)
    dtype = getattr(owner, "dtype", None)
    dtype = dtype or getattr(model.config, "dtype", None) or W.dtype
    return Head(W, "dv" if untied else "vd", dtype, softcap=softcap)


def _projection(model: Any) -> tuple[Any, str]:
    """The module that makes logits, and its method."""
    if hasattr(model, "lm_head"):
        return model.lm_head, "__call__"
    return model.embedder, "decode"


def hidden_states(model: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Call a model up to its head: what it would make logits of, [B, T, D]."""
    if hasattr(model, "jaxmem_hidden_states"):
        return model.jaxmem_hidden_states(*args, **kwargs)
    with _stopped_at(*_projection(model)) as found:
        model(*args, **kwargs)
    (hidden,) = found
    return hidden


@contextlib.contextmanager
def _stopped_at(owner: Any, method: str) -> Iterator[list[jax.Array]]:
    """Let one module's method keep its argument, and make a logit of no meaning."""
    kind = type(owner)
    original = getattr(kind, method)
    found: list[jax.Array] = []

    @functools.wraps(original)
    def keep(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if self is not owner:  # a class may serve layers, too
            return original(self, x, *args, **kwargs)
        found.append(x)
        return jnp.zeros((*x.shape[:-1], 1), x.dtype)

    setattr(kind, method, keep)
    try:
        yield found
    finally:
        setattr(kind, method, original)


# ----------------------------------------------------------- what is replaced


def _per_token_logps(
    original: Callable, options: Options, say: Callable[[str], None], entropies: bool
) -> Callable:
    """`compute_per_token_logps`; with entropies instead of logits, or with neither."""
    common: Any = inspect.getmodule(original)

    @functools.partial(
        jax.jit,
        static_argnames=(
            "pad_id", "eos_id", "stop_gradient", "return_logits", "temperature"
        ),
    )  # fmt: skip
    def run(graphdef, state, prompt_tokens, completion_tokens, pad_id, eos_id,
            images, stop_gradient, return_logits, segment_ids, segment_positions,
            temperature):  # fmt: skip
        made = _scores_of_ids(
            common, nnx.merge(graphdef, state), prompt_tokens, completion_tokens,
            pad_id, eos_id, images, segment_ids, segment_positions, options,
            temperature=temperature, entropy=return_logits,
        )  # fmt: skip
        made = made if return_logits else made[0]
        return jax.lax.stop_gradient(made) if stop_gradient else made

    @functools.wraps(original)
    def compute_per_token_logps(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        head = head_of(nnx.merge(given["graphdef"], given["state"]))
        if isinstance(head, str):
            say(head)
            return original(*args, **kwargs)
        if given["return_logits"] and not entropies:
            say("compute_per_token_logps(return_logits=True) is asked for logits")
            return original(*args, **kwargs)
        # Dynamic arguments by position, what is static by name.
        made = run(**given)
        return (made[0], Entropies(made[1])) if given["return_logits"] else made

    return compute_per_token_logps


def _scores_of_ids(
    common, model, prompt_tokens, completion_tokens, pad_id, eos_id, images,
    segment_ids, segment_positions, options, *, temperature, entropy,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Log-probabilities and entropies of the completions, or of packed rows whole."""
    head, packed = head_of(model), segment_ids is not None
    assert isinstance(head, Head)
    tokens, positions, mask, padding = common.process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    hidden = hidden_states(
        model,
        tokens,
        positions=positions,
        cache=None,
        attention_mask=mask,
        **_segments(model, segment_ids if packed else padding),
        **({} if images is None else {"images": images}),
    )
    kept = tokens.shape[1] - 1 if packed else completion_tokens.shape[1]
    logps, entropies, _ = scores(
        hidden[:, -kept - 1 : -1], head, tokens[:, -kept:], options,
        temperature=temperature, entropy=entropy,
    )  # fmt: skip
    if packed:  # so that logps[i] is of token i; logits 0 have an entropy of ln V
        front = ((0, 0), (1, 0))
        logps = jnp.pad(logps, front)
        if entropies is not None:
            columns = head.W.shape[0 if head.layout == "vd" else 1]
            even = jnp.log(columns).astype(entropies.dtype)
            entropies = jnp.pad(entropies, front, constant_values=even)
    return logps, entropies


class _Common:
    """`tunix.rl.common` as `algo_core` sees it, which asks for logits for entropies."""

    def __init__(self, module: Any, compute_per_token_logps: Callable):
        self._module = module
        self.compute_per_token_logps = compute_per_token_logps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _common_of_algorithms(
    module: Any, options: Options, say: Callable[[str], None]
) -> _Common:
    original = module.compute_per_token_logps
    original = getattr(original, "jaxmem_original", original)
    return _Common(module, _per_token_logps(original, options, say, entropies=True))


def _without_entropies(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    made = _per_token_logps(original, options, say, entropies=False)
    vars(made)["jaxmem_original"] = original
    return made


def _entropy_from_logits(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    @functools.wraps(original)
    def compute_entropy_from_logits(logits: Any) -> jax.Array:
        if isinstance(logits, Entropies):
            return logits.entropy
        return original(logits)

    return compute_entropy_from_logits


def _preference_logps(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    @functools.wraps(original)
    def get_per_token_logps(
        model, input_tokens, positions, attn_mask, logits_to_keep, images=None
    ):
        head = head_of(model)
        if isinstance(head, str):
            say(head)
            return original(
                model, input_tokens, positions, attn_mask, logits_to_keep, images
            )
        hidden = hidden_states(
            model,
            input_tokens,
            positions=positions,
            attention_mask=attn_mask,
            cache=None,
            **({} if images is None else {"images": images}),
        )
        states, labels = hidden[:, -logits_to_keep - 1 : -1], input_tokens
        labels = labels[:, -logits_to_keep:]
        return scores(states, head, labels, options, entropy=False)[0]

    return get_per_token_logps


def _default_loss(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    @functools.wraps(original)
    def _default_loss_fn(
        model, input_tokens, input_mask, positions, attention_mask, images=None
    ):
        head = head_of(model)
        if isinstance(head, str):
            say(head)
            return original(
                model, input_tokens, input_mask, positions, attention_mask, images
            )
        more = {} if images is None else {"images": images}
        hidden = hidden_states(
            model, input_tokens, positions, None, attention_mask, **more
        )
        mask = input_mask[:, 1:]
        logps, _, _ = scores(
            hidden[:, :-1], head, input_tokens[:, 1:], options, entropy=False,
            where=mask != 0,
        )  # fmt: skip
        return -jnp.sum(logps * mask) / (jnp.sum(mask) + 1e-8)

    return _default_loss_fn


def _chunked_logps(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    @functools.wraps(original)
    def compute_chunked_logps(
        model, hidden_states, target_ids, temperature, chunk_size, return_entropy
    ):
        head = head_of(model)
        if isinstance(head, str):
            say(head)
            return original(
                model, hidden_states, target_ids, temperature, chunk_size,
                return_entropy,
            )  # fmt: skip
        logps, entropy, _ = scores(
            hidden_states, head, target_ids, options, temperature=temperature,
            entropy=return_entropy,
        )  # fmt: skip
        return (logps, entropy) if return_entropy else logps

    return compute_chunked_logps


def _segments(model: Any, ids: jax.Array | None) -> dict[str, jax.Array]:
    """`segment_ids`, for models whose call takes them."""
    parameters = inspect.signature(model.__call__).parameters.values()
    takes = any(p.name == "segment_ids" or p.kind == p.VAR_KEYWORD for p in parameters)
    return {"segment_ids": ids} if takes and ids is not None else {}


_TUNIX = Integration(
    "tunix",
    ("google-tunix",),
    {
        "0.1.7": (
            Replacement(
                "tunix.rl.common:compute_per_token_logps",
                _without_entropies,
                (
                    "graphdef", "state", "prompt_tokens", "completion_tokens",
                    "pad_id", "eos_id", "images", "stop_gradient", "return_logits",
                    "segment_ids", "segment_positions", "temperature",
                ),
            ),
            Replacement("tunix.rl.algo_core:common", _common_of_algorithms, None),
            Replacement(
                "tunix.rl.algo_core:compute_entropy_from_logits",
                _entropy_from_logits,
                ("logits",),
            ),
            Replacement(
                "tunix.rl.common:get_per_token_logps",
                _preference_logps,
                (
                    "model", "input_tokens", "positions", "attn_mask",
                    "logits_to_keep", "images",
                ),
            ),
            Replacement(
                "tunix.sft.peft_trainer:_default_loss_fn",
                _default_loss,
                (
                    "model", "input_tokens", "input_mask", "positions",
                    "attention_mask", "images",
                ),
            ),
        ),
        "0.1.8": (
            Replacement(
                "tunix.rl.common:compute_chunked_logps",
                _chunked_logps,
                (
                    "model", "hidden_states", "target_ids", "temperature",
                    "chunk_size", "return_entropy",
                ),
            ),
        ),
    },
)  # fmt: skip
