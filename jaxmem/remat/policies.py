"""Rematerialisation policies by checkpoint name: save, offload or recompute."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

# Checkpoint names that jaxmem's own blocks and heads use.
NAMES: Mapping[str, str] = {
    "block_in": "input of a block",
    "block_mid": "input of its feed-forward layer, before the norm",
    "norm_rms": "reciprocal root mean square of each row of a norm's input",
    "q": "queries, before their norm if they have one, else after their rotation",
    "k": "keys, before their norm if they have one, else after their rotation",
    "v": "values",
    "attn_out": "attention's result, before its output matrix",
    "attn_lse": "logsumexp of attention's scores; for cuDNN, its kernel's two results",
    "gate": "gate of the feed-forward layer, before its activation",
    "up": "values that the gate is multiplied with",
    "jaxmem_max": "largest logit of each token, from the head",
    "jaxmem_log_sum": "logsumexp of each token's logits, minus the largest logit",
    "jaxmem_dhidden": "gradient of the hidden states, for a frozen head",
    "jaxmem_entries": "sampled entries of the logits' derivative",
}


# cuDNN's attention has no checkpoint names. Its backward pass needs its output and its
# logsumexp; without both saved, the forward kernel runs again.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy by checkpoint names, for `jax.checkpoint(policy=...)`.

    Attributes:
        save: names whose values stay in their memory.
        offload: names whose values move to `offload_dst` after the forward pass of
            their block, and back before its backward pass.
        offload_src: the memory that offloaded values are in, "device".
        offload_dst: the memory that they move to, "pinned_host".
        dots: True to save every product without a batch dimension too, named or not.
        last: number of blocks at the end of a stack whose residuals all stay on the
            device. Only `scan_blocks` can apply it, as a single block does not know its
            position.
        known: all names that blocks use; add names of your own blocks here.

    Raises:
        ValueError: a name is unknown or is both saved and offloaded, a memory does not
            exist, or a number of blocks is below 0.

    "attn_lse" in `save` saves both outputs of cuDNN's attention kernel. A block that
    calls it should not name the output "attn_out" as well, because it is then saved
    twice.

    >>> from jaxmem import remat
    >>> remat.Policy(save=["attn_out"], offload=["block_in"]).offload
    ('block_in',)
    """

    save: Sequence[str] = ()  # tuples, once it is made
    offload: Sequence[str] = ()
    offload_src: str = "device"
    offload_dst: str = "pinned_host"
    dots: bool = False
    last: int = 0
    known: Sequence[str] = dataclasses.field(
        default=tuple(NAMES), repr=False, compare=False, kw_only=True
    )

    def __post_init__(self):
        """Check the fields: an unknown name would otherwise silently have no effect."""
        for kind in ("save", "offload", "known"):
            names = getattr(self, kind)
            if isinstance(names, str):
                raise ValueError(f"{kind} must be a sequence of names, got {names!r}")
            object.__setattr__(self, kind, tuple(names))
        for kind in ("save", "offload"):
            unknown = [str(k) for k in getattr(self, kind) if k not in self.known]
            if unknown:
                raise ValueError(
                    f"{kind} has names that no block uses: {', '.join(unknown)}; known "
                    f"names are {', '.join(self.known)}; add names of your own blocks "
                    "to known="
                )
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise ValueError(
                f"save and offload must not share names, got {', '.join(both)} in both"
            )
        if {self.offload_src, self.offload_dst} != {"device", "pinned_host"}:
            raise ValueError(
                "offload_src and offload_dst must be 'device' and 'pinned_host', or "
                f"the other way round, got {self.offload_src!r} and "
                f"{self.offload_dst!r}"
            )
        if self.last < 0:
            raise ValueError(f"last must be a number of blocks, got {self.last}")

    def __call__(self, primitive, *avals, **params) -> Any:
        """Decide for one operation of a block, as jax requires of a policy."""
        if self.last:
            raise ValueError(
                f"policy keeps the last {self.last} blocks of a stack whole, and one "
                "block cannot tell whether it is among them: use remat.scan_blocks, or "
                "a policy with last=0"
            )
        policies = jax.checkpoint_policies
        if self.dots and policies.dots_with_no_batch_dims_saveable(
            primitive, *avals, **params
        ):
            return True
        if primitive.name == CUDNN_FORWARD and "attn_lse" in self.save:
            return True
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src=self.offload_src,
            offload_dst=self.offload_dst,
        )(primitive, *avals, **params)

    def __or__(self, other: "Policy") -> "Policy":
        """The union: it keeps what either keeps, on the device if either saves it."""
        save = tuple(dict.fromkeys([*self.save, *other.save]))
        offload = tuple(
            k for k in dict.fromkeys([*self.offload, *other.offload]) if k not in save
        )
        places = {(p.offload_src, p.offload_dst) for p in (self, other) if p.offload}
        if len(places) > 1:
            raise ValueError(
                f"both policies offload, between different memories: {places}"
            )
        src, dst = places.pop() if places else (self.offload_src, self.offload_dst)
        last = max(self.last, other.last)
        dots, known = self.dots or other.dots, (*self.known, *other.known)
        return Policy(
            save, offload, src, dst, dots, last, known=tuple(dict.fromkeys(known))
        )


_ATTENTION = ("q", "k", "v", "attn_out", "attn_lse")
# None means no rematerialisation: all residuals are kept.
PRESETS: Mapping[str, Policy | None] = {
    "none": None,
    "full": Policy(),
    "dots": Policy(dots=True),
    "dots_and_attention": Policy(("norm_rms", "attn_out", "attn_lse"), dots=True),
    "save_attention": Policy(save=_ATTENTION),
    "offload_block": Policy(offload=("block_in",)),
    "offload_attention": Policy(offload=("block_in", *_ATTENTION)),
}


def preset(name: str) -> Policy | None:
    """Return a policy by its name.

    none: all residuals of a block are kept. full: blocks are recomputed from their
    inputs. dots: results of matrix products are saved. dots_and_attention: so are
    attention's results and the statistics of norms; elementwise operations are
    recomputed. save_attention: attention's operands and results are saved.
    offload_block: as full, with the inputs on the host. offload_attention: inputs, and
    attention's operands and results, are on the host.

    Returns:
        The policy; None for "none".

    Raises:
        ValueError: there is no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(
            f"policy must be one of {', '.join(map(repr, PRESETS))}, got {name!r}"
        )
    return PRESETS[name]
