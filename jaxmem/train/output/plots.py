"""report.png: a metric by step, and the memory of both heads."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import files
from jaxmem.train.metrics import AnyMetrics, HeadCost

_MIB = 2**20


def save(
    path: Path,
    history: Sequence[AnyMetrics],
    costs: Mapping[str, HeadCost],
    field: str = "loss",
    label: str = "loss (nats per token)",
) -> None:
    """Draw a field by step and the memory by `head.logits`, as PNG."""
    # Not at the top: the import is slow, and most processes need no plot.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 if costs else 5.5, 3.5), layout="constrained")
    panels = figure.subplots(1, 2 if costs else 1, squeeze=False)[0]
    steps, values = zip(*((s.step, getattr(s, field)) for s in history), strict=True)
    # A line through one point is invisible.
    style = "-" if len(steps) > 1 else "o"
    panels[0].plot(steps, values, style, label="training, one batch")
    held_out = f"held_out_{field}"
    scored = [s for s in history if getattr(s, held_out, None) is not None]
    if scored:
        values = [getattr(s, held_out) for s in scored]
        panels[0].plot([s.step for s in scored], values, "o-", label="held out")
        panels[0].legend()
    panels[0].set(xlabel="step", ylabel=label)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[0].grid(alpha=0.3)
    if costs:
        _draw_memory(panels[1], costs)
    png = io.BytesIO()
    figure.savefig(png, dpi=150)
    files.write_whole(path, png.getvalue())


_HEADS = {
    "fused": "fused: a chunk of the logits at a time",
    "materialised": "materialised: all logits at once",
}
_PARTS = {"head": "head alone:\nloss and gradients", "step": "whole train step"}


def _draw_memory(panel: Any, costs: Mapping[str, HeadCost]) -> None:
    """Draw bars of temporary memory: a group for each part, a colour for each head."""
    width = 0.8 / len(costs)
    for i, (name, cost) in enumerate(costs.items()):
        heights = [getattr(cost, part).temporary / _MIB for part in _PARTS]
        offset = (i - (len(costs) - 1) / 2) * width
        centers = [x + offset for x in range(len(_PARTS))]
        bars = panel.bar(centers, heights, width, label=_HEADS.get(name, name))
        panel.bar_label(bars, fmt="{:,.0f}")
    panel.set_xticks(range(len(_PARTS)), list(_PARTS.values()))
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), frameon=False)
    panel.margins(y=0.1)  # room for the numbers
    panel.set(ylabel="temporary memory (MiB)")
