"""Numbers that a config cannot have, whoever makes it: each refused by its name."""

import dataclasses
import math

import pytest

from jaxmem.base.fields import accepts
from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.config import RANGES
from jaxmem.models.decoder import ModelConfig
from jaxmem.train.optimizer import OptimizerConfig

CONFIGS = (ModelConfig, OptimizerConfig, DataConfig, TaskConfig)
NUMBERS = [
    (kind, field)
    for kind in CONFIGS
    for field in dataclasses.fields(kind)
    if accepts(field.type, 1) and field.type is not bool
]


@pytest.mark.parametrize(
    ("kind", "field"), NUMBERS, ids=[f"{k.__name__}.{f.name}" for k, f in NUMBERS]
)
@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, True, "1", 10**400, 1j, [1]], ids=str
)
def test_fields_refuse_non_finite_and_non_numbers(kind, field, value, monkeypatch):
    with pytest.raises(ValueError) as raised:
        kind(**{field.name: value})
    message = str(raised.value)
    assert message.startswith(f"{kind.__name__}.{field.name} must be ")
    assert len(message) < 200 and "\n" not in message


@pytest.mark.parametrize("field", dataclasses.fields(ModelConfig), ids=lambda f: f.name)
def test_none_only_where_the_type_says_so(field):
    if field.name not in RANGES:
        return
    if accepts(field.type, None):
        assert getattr(ModelConfig(**{field.name: None}), field.name) is None
    else:
        with pytest.raises(ValueError, match=f"ModelConfig.{field.name} must be a"):
            ModelConfig(**{field.name: None})


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
        (ModelConfig, dict(norm_eps=1.0), r"norm_eps must be in \(0, 1\), got 1.0"),
        (
            ModelConfig,
            dict(softcap=1e-300),
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
        kind(**changes)
