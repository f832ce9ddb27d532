"""The files and the tables that a run leaves."""

import functools
import io
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxmem.train import jobs, metrics
from jaxmem.train.jobs import running
from jaxmem.train.metrics import HeadCost, Memory
from jaxmem.train.output import plots
from tests.helpers.adding import step_metrics

COSTS = {
    "fused": HeadCost(Memory(3 * 2**20, 0), Memory(10 * 2**20, 20 * 2**20)),
    "materialised": HeadCost(Memory(300 * 2**20, 0), Memory(2**30, 1034 * 2**20)),
}


def printed(thing, **options):
    stream = io.StringIO()
    Console(file=stream, width=100, **options).print(thing)
    return stream.getvalue()


def test_line_shows_utilisation_of_known_peak():
    assert "MFU" not in step_metrics(1).line
    assert step_metrics(1)._replace(mfu=0.456).line.endswith("tokens/s  MFU 45.6%")


def test_speed_is_the_median_over_steps():
    rates = [step_metrics(i, rate=rate) for i, rate in enumerate((1.0, 90.0, 110.0))]
    assert metrics.tokens_per_second(rates) == 90.0
    assert metrics.tokens_per_second([]) == 0.0


def test_memory_is_the_compiler_s():
    def program(x):
        return jnp.tanh(x @ x.T) @ x

    shape = jax.ShapeDtypeStruct((256, 16), jnp.float32)
    memory = metrics.memory_of(
        jax.jit(program, donate_argnums=0).lower(shape).compile()
    )
    assert memory.temporary >= 256 * 256 * 4  # the product
    assert memory.peak == memory.temporary + 256 * 16 * 4  # x, then the result


def test_table_lays_the_heads_side_by_side_in_mib():
    rows = [
        line.split("│")[1:4] for line in printed(metrics.cost_table(COSTS)).splitlines()
    ]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    assert cells == [
        ["head only, temporary", "3.0", "300.0"],
        ["train step, temporary", "10.0", "1,024.0"],
        ["train step, peak", "20.0", "1,034.0"],
    ]


def test_summary_is_json_in_bytes():
    history = [step_metrics(1, 9.0), step_metrics(2, 7.0)]
    job: Any = types.SimpleNamespace(summary=functools.partial(jobs.Job.summary, None))
    written = json.dumps(running.summary_of(job, history, COSTS, "run.steps"))
    summary = json.loads(written)
    assert (summary["first_loss"], summary["last_loss"]) == (9.0, 7.0)
    assert summary["steps"] == 2 and summary["tokens_per_second"] == 100.0
    assert summary["memory"]["fused"]["step"] == {
        "temporary": 10 * 2**20,
        "peak": 20 * 2**20,
    }


@pytest.mark.parametrize("costs", [COSTS, {}])
def test_plot_shows_held_out_loss_and_bars(tmp_path, costs, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda self, path, dpi: figures.append(self) or path.write(b"drawn"),
    )
    history = [step_metrics(i, 9.0 / i) for i in range(1, 20)]
    history[9] = history[9]._replace(held_out_loss=1.5)
    plots.save(tmp_path / "report.png", history, costs)
    assert (tmp_path / "report.png").read_bytes() == b"drawn"
    curves, *bars = figures[0].axes
    steps, values = curves.get_legend_handles_labels()[0][1].get_data()
    assert [*steps] == [10] and [*values] == [1.5]
    assert curves.get_legend_handles_labels()[1] == ["training, one batch", "held out"]
    assert len(bars) == len(costs) // 2
    for panel in bars:
        labels = panel.get_legend_handles_labels()[1]
        assert [label.partition(":")[0] for label in labels] == list(costs)
        heights = [[bar.get_height() for bar in group] for group in panel.containers]
        assert heights == [[3, 10], [300, 1024]]
        ticks = [label.get_text() for label in panel.get_xticklabels()]
        assert ticks == ["head alone:\nloss and gradients", "whole train step"]


def test_plot_is_a_png(tmp_path):
    plots.save(tmp_path / "report.png", [step_metrics(1)], COSTS)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
