"""Which layers attend to a window: listed, or a pattern that the family knows."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem.checkpoints.reader import Reader
from jaxmem.core.ranges import integers
from jaxmem.models.config import RANGES, ModelConfig

KINDS = {"full_attention": "global", "sliding_attention": "local"}


def every_layer(reader: Reader) -> tuple[str, ...]:
    """All layers have the window."""
    del reader
    return ("local",)


def alternating(reader: Reader) -> tuple[str, ...]:
    """Every other layer, from the first on."""
    del reader
    return ("local", "global")


def up_to_every_sixth(reader: Reader) -> tuple[str, ...]:
    """All but each last of `sliding_window_pattern` layers."""
    within = RANGES["layers"]
    period = reader.take("_sliding_window_pattern", int, 6, within=within)
    period = reader.take("sliding_window_pattern", int, period, within=within)
    return ("local",) * (period - 1) + ("global",)


def after_the_first(reader: Reader) -> tuple[str, ...]:
    """Those after `max_window_layers`, if `use_sliding_window` says so."""
    layers = reader.raw["num_hidden_layers"]
    if not reader.take("use_sliding_window", bool, False):
        return ("global",)
    whole = integers(0)
    first = min(reader.take("max_window_layers", int, within=whole), layers)
    return ("global",) * first + ("local",) * (layers - first)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The pattern of layers, and the window of some of them.

    Attributes:
        pattern: which kinds layers have where `layer_types` does not list them.
        default: tokens of the window where `sliding_window` is left out.
        listed: whether `layer_types` is written; if not, all layers have the window.
        ignored: keys that only `pattern` reads.
        switch: whether `use_sliding_window` is written.
    """

    pattern: Callable[[Reader], tuple[str, ...]]
    default: int | None = None
    listed: bool = True
    ignored: tuple[str, ...] = ()
    switch: bool = False

    def read(self, reader: Reader) -> dict[str, Any]:
        """`pattern` and `window`."""
        optional, within = (int, type(None)), RANGES["window"]
        window = reader.take("sliding_window", optional, self.default, within=within)
        listed = reader.take("layer_types", (list, type(None)), None)
        if listed is not None:
            kinds = tuple(reader.choose("layer_types", kind, KINDS) for kind in listed)
            if len(kinds) != reader.raw["num_hidden_layers"]:
                raise reader.error(
                    "layer_types must have one entry a layer, "
                    f"{reader.raw['num_hidden_layers']}, got {len(kinds)}"
                )
        else:
            kinds = self.pattern(reader) if window is not None else ("global",)
        reader.read.update(("use_sliding_window", "max_window_layers", *self.ignored))
        if "local" not in kinds:
            return {"pattern": ("global",), "window": None}
        if window is None:
            raise reader.error("sliding_window is missing, and layer_types needs it")
        return {"pattern": kinds, "window": window}

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """The window, and the layers that have it."""
        if not self.listed:
            return {"sliding_window": model.window}
        names = {kind: name for name, kind in KINDS.items()}
        kinds = (model.pattern * model.layers)[: model.layers]
        raw: dict[str, Any] = {
            "layer_types": [names[kind] for kind in kinds],
            "sliding_window": model.window,
        }
        if self.default is not None and model.window is None:
            raw["sliding_window"] = max_positions  # of no layer, but it must be given
        if self.switch:
            raw |= {
                "use_sliding_window": model.window is not None,
                "max_window_layers": 0,
            }
        return raw
