"""Numbers that a config cannot have, whoever makes it: each refused by its name."""

import dataclasses
import math
from typing import Annotated, Any, Literal

import pytest

from jaxmem.base import fields
from jaxmem.base.fields import Must, accepts, check
from jaxmem.base.ranges import Range, integers, reals
from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.decoder import ModelConfig
from jaxmem.train.optimizer import OptimizerConfig

CONFIGS = (ModelConfig, OptimizerConfig, DataConfig, TaskConfig)
NUMBERS = [
    (kind, setting)
    for kind in CONFIGS
    for setting in fields.settings(kind).values()
    if accepts(setting.annotation, 1) and setting.annotation is not bool
]


@pytest.mark.parametrize(
    ("kind", "setting"), NUMBERS, ids=[f"{k.__name__}.{s.path}" for k, s in NUMBERS]
)
@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, True, "1", 10**400, 1j, [1]], ids=str
)
def test_fields_refuse_non_finite_and_non_numbers(kind, setting, value, monkeypatch):
    with pytest.raises(ValueError) as raised:
        fields.build(kind, {setting.path: value})
    message = str(raised.value)
    assert message.startswith(f"{kind.__name__}.{setting.path} must be ")
    assert len(message) < 200 and "\n" not in message


OF_MODEL = [s for s in fields.settings(ModelConfig).values() if s.fact(Range)]


@pytest.mark.parametrize("setting", OF_MODEL, ids=lambda s: s.path)
def test_none_only_where_the_type_says_so(setting):
    path = setting.path
    if setting.is_optional:
        built = fields.build(ModelConfig, {path: None})
        assert fields.value_of(built, path) is None
    else:
        with pytest.raises(ValueError, match=f"ModelConfig.{path} must be a"):
            fields.build(ModelConfig, {path: None})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            ModelConfig,
            dict(layers=10**7),
            "layers must be at most 10,000, got 10000000",
        ),
        (ModelConfig, dict(hidden=2**40), r"hidden must be at most 2\*\*20, got 10995"),
        (ModelConfig, dict(layers=2.0), "layers must be an integer, got 2.0"),
        (ModelConfig, {"norm.eps": 1.0}, r"norm.eps must be in \(0, 1\), got 1.0"),
        (
            ModelConfig,
            {"logits.softcap": 1e-300},
            "softcap must be 0 or at least 1.18e-38 in",
        ),
        (
            ModelConfig,
            dict(lora_rank=-1),
            "lora_rank must be at least 0, or None, got -1",
        ),
        (OptimizerConfig, dict(b1=1.0), r"b1 must be in \[0, 1\), got 1.0"),
        (
            OptimizerConfig,
            dict(clip_norm=0.0),
            "clip_norm must be above 0, or None, go",
        ),
        (
            DataConfig,
            dict(batch_size=2**28),
            r"batch_size must be below 2\*\*31 / sequ",
        ),
    ],
)
def test_ranges(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        fields.build(kind, changes)


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: Annotated[float, reals(above=0), "base of the wavelengths"] = 10_000.0
    kind: Annotated[Literal["none", "yarn"] | None, "scaling"] = None


@dataclasses.dataclass(frozen=True)
class Attention:
    heads: Annotated[int, integers(1), "number of heads"] = 4
    rope: Annotated[Rope, "rotation"] = Rope(theta=500.0)

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class Model:
    name: Annotated[str, Must("a word", str.isalpha), "its name"] = "a"
    size: Annotated[int | None, integers(1)] = None
    attention: Annotated[Attention, "token mixer"] = Attention()

    def __post_init__(self):
        check(self)


def test_settings_lists_groups_by_path_with_their_defaults():
    known = fields.settings(Model)
    assert list(known) == [
        "name", "size", "attention.heads", "attention.rope.theta", "attention.rope.kind"
    ]  # fmt: skip
    theta = known["attention.rope.theta"]
    assert (theta.annotation, theta.default) == (float, 500.0)
    assert theta.help == "base of the wavelengths" and not theta.is_optional
    assert known["name"].help == "its name" and known["size"].help == ""
    assert list(fields.groups(Model)) == ["", "attention", "attention.rope"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"name": "1"}, "Model.name must be a word, got '1'"),
        ({"size": 0}, "Model.size must be at least 1, or None, got 0"),
        ({"attention.heads": 0}, "Model.attention.heads must be at least 1, got 0"),
        (
            {"attention.rope.theta": 0.0},
            "Model.attention.rope.theta must be above 0, got 0.0",
        ),
        (
            {"attention.rope.kind": "x"},
            "Model.attention.rope.kind must be 'none' or 'yarn' or None, got 'x'",
        ),
    ],
)
def test_build_names_a_bad_value_by_its_whole_path(values, error):
    with pytest.raises(ValueError) as raised:
        fields.build(Model, values)
    assert str(raised.value) == error


def test_build_keeps_what_is_not_given():
    made = fields.build(Model, {"attention.rope.kind": "yarn", "size": 3})
    assert made == Model(size=3, attention=Attention(rope=Rope(500.0, "yarn")))
    again = fields.build(Model, {"attention.heads": 2}, made)
    assert fields.values_of(again) == fields.values_of(made) | {"attention.heads": 2}


def test_check_walks_groups_that_do_not_check_themselves():
    class Unchecked(Model):
        def __post_init__(self):
            pass

    made: Any = Unchecked(attention=Attention())
    object.__setattr__(made.attention, "rope", Rope(theta=-1.0))
    with pytest.raises(ValueError, match="^Unchecked.attention.rope.theta must be "):
        check(made)
