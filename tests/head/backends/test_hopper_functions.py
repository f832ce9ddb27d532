"""The functions by kernels for Hopper, in Pallas's interpreter, against float64."""

import dataclasses
import functools

import pytest

import jaxmem
from jaxmem import devices
from jaxmem.head.backends import hopper_rows
from jaxmem.head.kernels import row_pairs, row_sums
from tests.helpers import crossing
from tests.helpers.cases import full, slow
from tests.helpers.crossing import SAMPLE, Setting, check
from tests.helpers.functions import FUNCTIONS, Named
from tests.helpers.interpreter import needs_pallas

pytestmark = [needs_pallas, pytest.mark.usefixtures("on_one_device")]


@dataclasses.dataclass(frozen=True)
class ByHopper:
    """The functions of `jaxmem` by the kernels that make no logits."""

    def __getattr__(self, name):
        return functools.partial(getattr(jaxmem, name), implementation="hopper")


# 300 rows are two launches; 300 and 600 columns are blocks of which the last is short.
KERNELS = {
    "dtypes": (
        ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32"),
    ),
    "layout": ("vd", "dv"),
    "mask": ("where", "none"),
    "tokens": ((40,), (300,)),
    "std": (1.0, 15.0),
    "bias": (True, False),
    "softcap": (True, False),
    "padded": (True, False),
    "temperature": ("token", "none"),
    "chunk": (16, None),
    "gradient": (None, "frozen", jaxmem.Recompute(), jaxmem.Recompute(2), SAMPLE),
    "depth": (33, 64),
    "columns": (300, 600),
}  # fmt: skip
OF_KERNELS = ("logprobs", "token_stats", "entropy", "token_loss", "record_entries")
FIRST = Setting(**{k: levels[0] for k, levels in KERNELS.items()} | {"tokens": (20,)})


@pytest.mark.parametrize("name, setting", [
    full("logprobs", FIRST),
    full("token_stats", dataclasses.replace(FIRST, gradient=jaxmem.Recompute(2))),
    full("entropy", dataclasses.replace(FIRST, gradient="frozen")),
    full("token_loss", dataclasses.replace(FIRST, layout="dv")),
    full("record_entries", dataclasses.replace(FIRST, padded=False)),
    *(slow(*case) for case in crossing.cover(OF_KERNELS, levels=KERNELS)),
], ids=str)  # fmt: skip
def test_function_by_kernels(name, setting, interpreted):
    with jaxmem.report() as calls:
        check(name, setting, ByHopper())
    assert {call.implementation for call in calls.calls} == {"hopper"}


@pytest.mark.parametrize("name, layout", [
    full("token_loss", "vd"), slow("token_stats", "dv"), slow("entropy", "vd"),
])  # fmt: skip
def test_sample_of_all_entries_gives_the_gradient(name, layout, interpreted):
    setting = dataclasses.replace(FIRST, layout=layout, columns=70)
    setting, p = crossing.sampled_whole(setting)
    check(name, setting, ByHopper(), p=p)


# Logits in memory: several blocks of columns, of which the last is cut.
ROWS = crossing.LEVELS | {
    "gradient": (None, "frozen", jaxmem.Recompute(), SAMPLE),
    "columns": (5 * row_pairs.WIDTH + 6, 8 * row_pairs.WIDTH),
}
OF_ROWS = [x for x in FUNCTIONS if "teacher" in x or x in ("topk", "sample_ids")]
LAUNCHES = ("block_sums", "top_k", "pair_sums", "sums", "select")


@pytest.fixture
def launches(rows_interpreted, monkeypatch):
    """Names of the reductions that kernels computed."""
    seen = set()
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    monkeypatch.setattr(row_sums, "SHARES", 2)
    for name in LAUNCHES:
        monkeypatch.setattr(hopper_rows, name, _listening(name, seen))
    return seen


def _listening(name, seen):
    launch = getattr(hopper_rows, name)
    return lambda *args: seen.add(name) or launch(*args)


def of_rows(name, **changes):
    columns = ROWS["columns"][0]
    return name, dataclasses.replace(Setting(columns=columns), **changes)


@pytest.mark.parametrize("name, setting", [
    full(*of_rows("topk")),
    full(*of_rows("sample_ids", temperature="token")),
    full(*of_rows("divergence ReverseKL teacher", gradient="frozen", std=15.0)),
    full(*of_rows("divergence_loss JSD teacher", gradient=SAMPLE)),
    full(*of_rows("divergence_loss ForwardKL teacher")),
    *(slow(*case) for case in crossing.cover(OF_ROWS, levels=ROWS)),
], ids=str)  # fmt: skip
def test_function_by_kernels_of_rows(name, setting, launches):
    check(name, setting, Named("rows"))
    pairs = "block_sums" if "JSD" in name else "pair_sums"
    expected = {"topk": {"block_sums", "top_k"}, "sample_ids": {"block_sums"}}
    assert launches >= expected.get(name, {pairs})
    assert ("select" in launches) == (setting.gradient == SAMPLE and name != "topk")
