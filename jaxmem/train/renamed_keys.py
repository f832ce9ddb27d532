"""Old names of configuration keys, which are read for one minor version.

A row of `RENAMED` is read by the version that it names and by those before it. The run
prints the new key. From the next minor version on, the old key is an error that names
the new one.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmem._version import __version__

_MOST_KEYS = 5  # that a message lists


@dataclasses.dataclass(frozen=True)
class Renamed:
    """The new name of a key."""

    key: str
    version: str  # minor version that renames it, and is the last one to read both

    @property
    def is_read(self) -> bool:
        """True if this version of jaxmem reads the old key."""
        return _minor(__version__) <= _minor(self.version)


# Of the section `model`, whose architecture is in groups since version 0.3.
_MODEL = {
    "rope_theta": "rope.theta",
    "local_rope_theta": "rope.local_theta",
    "rope_scaling": "rope.scaling",
    "rope_factor": "rope.factor",
    "rope_low_factor": "rope.low_factor",
    "rope_high_factor": "rope.high_factor",
    "rope_original": "rope.original_length",
    "rope_truncate": "rope.truncate",
    "rope_factors": "rope.short_factors",
    "rope_long_factors": "rope.long_factors",
    "rope_limit": "rope.limit",
    "rope_magnitude": "rope.attention_factor",
    "rope_long_magnitude": "rope.long_attention_factor",
    "rope_fraction": "rope.fraction",
    "rope_proportion": "rope.proportion",
    "norm": "norm.kind",
    "norm_scale": "norm.scale",
    "norm_bias": "norm.bias",
    "norm_offset": "norm.offset",
    "norm_eps": "norm.eps",
    "pre_norms": "norm.pre",
    "post_norms": "norm.post",
    "qk_norm": "qk_norm.enabled",
    "qk_norm_axis": "qk_norm.axis",
    "qk_norm_last": "qk_norm.after_rope",
    "qk_norm_scale": "qk_norm.scale",
    "qk_norm_rotated": "qk_norm.rotated_only",
    "window": "self_attn.window",
    "attention_softcap": "self_attn.softcap",
    "attention_scale": "self_attn.scale",
    "sinks": "self_attn.sinks",
    "attention_gate": "self_attn.gate",
    "qkv_bias": "self_attn.qkv_bias",
    "output_bias": "self_attn.output_bias",
    "value_norm": "self_attn.value_norm",
    "keys_are_values": "self_attn.keys_are_values",
    "global_head_dim": "self_attn.global_head_dim",
    "global_kv_heads": "self_attn.global_kv_heads",
    "query_growth": "self_attn.query_growth",
    "unrotated_growth": "self_attn.unrotated_growth",
    "unrotated_growth_length": "self_attn.unrotated_growth_length",
    "gated": "mlp.gated",
    "activation": "mlp.activation",
    "ff_bias": "mlp.bias",
    "reuse_ff": "mlp.reuse_ff",
    "experts": "experts.count",
    "experts_per_token": "experts.per_token",
    "expert_ff": "experts.ff",
    "expert_bias": "experts.bias",
    "gate_limit": "experts.gate_limit",
    "up_plus_one": "experts.up_plus_one",
    "shared_ff": "experts.shared_ff",
    "shared_gate": "experts.shared_gate",
    "router_scores": "router.scores",
    "router_nearness": "router.nearness",
    "router_renormalised": "router.renormalised",
    "router_scale": "router.scale",
    "router_scales_inputs": "router.scales_inputs",
    "router_bias": "router.bias",
    "router_correction": "router.correction",
    "router_groups": "router.groups",
    "router_groups_kept": "router.groups_kept",
    "router_group_best": "router.group_best",
    "delta_heads": "delta.heads",
    "delta_key_heads": "delta.key_heads",
    "delta_key_dim": "delta.key_dim",
    "delta_value_dim": "delta.value_dim",
    "delta_taps": "delta.conv_kernel_dim",
    "latent": "latent.kv_rank",
    "query_latent": "latent.query_rank",
    "value_dim": "latent.value_head_dim",
    "rotated_width": "latent.rope_head_dim",
    "learned_positions": "embedding.positions",
    "embed_scale": "embedding.scaled",
    "embed_multiplier": "embedding.multiplier",
    "embed_norm": "embedding.norm",
    "layer_input": "embedding.per_layer_width",
    "layer_input_vocab": "embedding.per_layer_vocab",
    "parallel": "residual.parallel",
    "residual_multiplier": "residual.multiplier",
    "layer_scale": "residual.layer_scale",
    "softcap": "logits.softcap",
    "logit_multiplier": "logits.multiplier",
    "head_bias": "logits.bias",
}
RENAMED: dict[str, Renamed] = {  # by the old key
    f"model.{old}": Renamed(f"model.{new}", "0.3") for old, new in _MODEL.items()
}


def current(key: str) -> str:
    """The new name of an old key that is still read; other keys are unchanged."""
    renamed = RENAMED.get(key)
    return renamed.key if renamed is not None and renamed.is_read else key


def answer(key: str) -> str | None:
    """The answer to a key that is no longer read; None for other keys."""
    renamed = RENAMED.get(key)
    if renamed is None:
        return None
    return f"since version {renamed.version} it is {renamed.key}"


def note(source: str, old: Iterable[str]) -> str:
    """A line about old keys in a file, an override or a call; "" without any."""
    keys = [*dict.fromkeys(old)]
    if not keys:
        return ""
    pairs = [f"{key} is now {RENAMED[key].key}" for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        pairs.append(f"{len(keys) - _MOST_KEYS} more keys have new names")
    last = max((RENAMED[key].version for key in keys), key=_minor)
    return f"{source}: {', '.join(pairs)}; old names are read up to version {last}"


def settings(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Saved settings, by section and path, with the new names of their keys."""
    renamed: dict[str, dict[str, Any]] = {section: {} for section in saved}
    for section, values in saved.items():
        for path, value in values.items():
            key = current(f"{section}.{path}")
            new_section, _, new_path = key.partition(".")
            renamed.setdefault(new_section, {})[new_path] = value
    return renamed


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
