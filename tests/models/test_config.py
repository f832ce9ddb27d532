"""The model's configuration: groups of its architecture, and rules across them."""

import re

import pytest

from jaxmem.base import fields
from jaxmem.models.architecture import NormConfig, RopeConfig
from jaxmem.models.config import ModelConfig

EXPERTS = {"feed_forwards": ("experts",), "experts.count": 4, "experts.ff": 8}
LATENT = {"mixers": ("latent",), "latent.kv_rank": 8, "latent.rope_head_dim": 4}
WITHOUT = "left out without self_attn.global_head_dim"


def test_architecture_is_in_groups_and_choices_are_not():
    groups = fields.groups(ModelConfig).keys() - {""}
    flat = {path for path in fields.settings(ModelConfig) if "." not in path}
    assert groups == {
        "rope", "norm", "qk_norm", "self_attn", "mlp", "experts", "router", "delta",
        "latent", "embedding", "residual", "logits",
    }  # fmt: skip
    assert {"checkpoint", "factory", "dtype", "param_dtype", "attention"} <= flat
    for path in fields.settings(ModelConfig):
        group, _, name = path.rpartition(".")
        assert not group or not name.startswith(f"{group}_")


def test_replaced_keeps_every_other_setting():
    model = ModelConfig(layers=1, rope=RopeConfig(fraction=0.5))
    changed = model.replaced({"rope.theta": 5.0, "norm.eps": 1e-5, "hidden": 8})
    expected = dict(rope=RopeConfig(theta=5.0, fraction=0.5), norm=NormConfig(eps=1e-5))
    assert changed == ModelConfig(layers=1, hidden=8, **expected)
    assert model.replaced({}) == model


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("rope.thet", "not a setting"),
        ("ropes.theta", "not a setting"),
        ("rope_theta", "not a setting"),
        ("hidden.x", "not a setting"),
        ("norm", "a group of settings; name one of them, as in 'ModelConfig.norm."),
    ],
)
def test_replaced_refuses_unknown_settings(path, fault):
    message = re.escape(f"'ModelConfig.{path}' is {fault}")
    with pytest.raises(TypeError, match=f"^{message}"):
        ModelConfig().replaced({path: 1.0})


def test_group_checks_itself():
    with pytest.raises(ValueError, match=r"^RopeConfig.theta must be above 0, got"):
        RopeConfig(theta=0.0)
    with pytest.raises(ValueError, match=r"^NormConfig.bias=True needs norm.kind='lay"):
        NormConfig(bias=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.theta": 0.0}, "rope.theta must be above 0, got 0.0"),
        ({"rope.scaling": "su"}, "rope.scaling must be 'linear' or 'llama3' or "),
        (
            {"rope.high_factor": 0.5},
            "rope.high_factor must be at least rope.low_fact",
        ),
        ({"rope.limit": 4}, "rope.limit must be given with rope.scaling='listed' or "),
        (
            {"rope.short_factors": (1.0,)},
            "rope.short_factors must be 20 numbers with rope.scaling='listed', and e",
        ),
        ({"rope.proportion": 0.5}, f"rope.proportion must be {WITHOUT}, got 0.5"),
        (
            {"norm.offset": True, "norm.scale": False},
            "norm.offset=True needs norm.sc",
        ),
        (
            {"qk_norm.after_rope": True, "qk_norm.axis": "width"},
            "qk_norm.after_rope=True needs qk_norm.axis='head'",
        ),
        ({"mlp.activation": "xielu"}, "mlp.activation='xielu' needs mlp.gated=False"),
        (
            {"residual.parallel": "shared", "norm.post": True},
            "residual.parallel='shared' needs norm.post=False",
        ),
        (
            {"residual.parallel": "shared", "norm.pre": False},
            "residual.parallel='shared' needs norm.pre",
        ),
        ({"logits.bias": True}, "logits.bias=True needs tied=False"),
        ({"delta.heads": 2}, "delta.heads must be given where mixers has 'delta', an"),
        (
            {"mixers": ("delta",), "delta.heads": 3, "delta.key_heads": 2},
            "delta.key_heads must be a divisor of delta.heads, got 2",
        ),
        (
            LATENT | {"latent.rope_head_dim": 3},
            "latent.rope_head_dim must be even, an",
        ),
        (
            LATENT | {"lora_rank": 2},
            "lora_targets must be without 'query', 'key' and 'value' with latent atten",
        ),
        (
            {"self_attn.keys_are_values": True},
            f"self_attn.keys_are_values must be {WITHOUT}, got True",
        ),
        (
            {"self_attn.global_head_dim": 64, "self_attn.global_kv_heads": 3},
            "self_attn.global_kv_heads must be a divisor of heads, got 3",
        ),
        (
            {"attention": "cudnn", "self_attn.sinks": True},
            "attention must be None or 'xla' with self_attn.sinks, got 'cudnn'",
        ),
        (
            EXPERTS | {"router.groups": 3},
            "router.groups must be a divisor of experts",
        ),
        (
            EXPERTS | {"router.groups_kept": 2},
            "router.groups_kept must be at most 1, the router.groups, got 2",
        ),
        (
            EXPERTS | {"router.groups": 2, "experts.per_token": 3},
            "experts.per_token must be at most 2, the experts of router.groups_kept gr",
        ),
    ],
)
def test_impossible_architectures_are_refused_by_path(changes, message):
    with pytest.raises(ValueError) as raised:
        ModelConfig().replaced(changes)
    assert str(raised.value).startswith(f"ModelConfig.{message}")
