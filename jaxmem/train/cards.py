"""The text of a saved model's card: base, data, numbers of its run, and how to load it.

Everything is read from files: those of the saved model, and those of the run that it is
of. Paths of this machine are shortened to their last part.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxmem._version import __version__
from jaxmem.base import hub
from jaxmem.checkpoints import base_record, model_card
from jaxmem.train.state import ownership

_SITE = "https://github.com/jaxmem/jaxmem"
_HUB = "https://huggingface.co"
_ADAPTER = "adapter_config.json"
_BEST = "best"  # directory of a run
_SOURCES = "data.source", "task.source"
# Settings that have a row of their own, or say nothing about the model.
_UNSHOWN = (
    "model.checkpoint", "run.job", "run.out_dir", "run.push", "run.push_private",
    "run.wandb", "run.log_every", "run.keep", "run.checkpoint_every",
    "run.compare_heads", "data.cache_dir", *_SOURCES,
)  # fmt: skip
# Settings of a model that are no part of its checkpoint.
_CHOSEN = re.compile(r"model\.(lora_|base|dtype|param_dtype|attention)")
_MEASURES = (
    "loss", "reward", "margin", "divergence", "held_out_loss", "held_out_ce",
    "held_out_reward", "held_out_margin", "held_out_accuracy", "held_out_divergence",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings and numbers that a run's directory records."""

    settings: Mapping[str, Any]  # those that differ from the defaults, by key
    steps: int
    tokens: int
    measures: Mapping[str, tuple[float, float]]  # first and last value of each


def write(target: Path, name: str, base: str | None, run: Path | None) -> None:
    """Write the card of a saved model.

    Args:
        target: directory of the model, which has no card but one of ours.
        name: name in the examples: OWNER/NAME, or a path.
        base: the model that it was made of, as `hub.recorded`; None: random weights.
        run: directory of the run that made it; None: there is none.
    """
    record = None if run is None else _read_run(run)
    is_best = run is not None and run / _BEST in target.parents
    model_card.write(target, _text(target, name, base, record, is_best))


def run_of(path: Path) -> Path | None:
    """The run that a directory is, or whose result is in it; None if there is none."""
    nearest = (path, *path.absolute().parents[:2])
    return next(filter(ownership.is_run, nearest), None)


def checkpoint_of(run: Path) -> str | None:
    """The model that a run has started from, as it records it; None: random weights."""
    return _read_settings(run / "settings.gin").get("model.checkpoint")


def _read_run(directory: Path) -> RunRecord:
    return RunRecord(
        _read_settings(directory / "settings.gin"), *_read_steps(directory)
    )


def _read_settings(path: Path) -> dict[str, Any]:
    """The values of settings.gin, each of which is a Python literal in one line."""
    settings = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        key, equals, value = line.partition(" = ")
        if equals:
            try:
                settings[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                continue  # written by hand
    return settings


def _read_steps(directory: Path) -> tuple[int, int, dict[str, tuple[float, float]]]:
    """The number of steps, their tokens, and the first and last value of measures."""
    path, steps, tokens = directory / "metrics.jsonl", 0, 0
    measures: dict[str, tuple[float, float]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            step = json.loads(line)
        except ValueError:
            continue  # torn by a full disk
        steps, tokens = step.get("step", steps), tokens + step.get("tokens", 0)
        for name in _MEASURES:
            if (value := step.get(name)) is not None:
                measures[name] = measures.get(name, (value, value))[0], value
    return steps, tokens, measures


def _text(
    target: Path, name: str, base: str | None, run: RunRecord | None, is_best: bool
) -> str:
    is_adapter = (target / _ADAPTER).exists()
    parts = [
        _front_matter(base, run, is_adapter),
        f"# {name.rpartition('/')[2]}",
        f"Saved by [jaxmem]({_SITE}) {__version__}.",
        "\n".join(
            ["| | |", "|---|---|"]
            + [
                f"| {key} | {value} |"
                for key, value in _rows(target, base, run, is_best)
            ]
        ),
    ]
    if run is not None and (lines := [*_settings(run)]):
        parts += ["## Settings", "\n".join(["```python", *lines, "```"])]
    return "\n\n".join([*parts, _examples(target, name, is_adapter)]) + "\n"


def _front_matter(base: str | None, run: RunRecord | None, is_adapter: bool) -> str:
    """The metadata that the Hub reads, between two lines of dashes."""
    model = None if base is None else hub.parse(base)
    job = None if run is None else run.settings.get("run.job", "sft")
    fields: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxmem", *([job] if job else []), *(["lora"] if is_adapter else [])],
    }
    if model is not None:
        fields["base_model"] = model.repository
    if run is not None and (sets := [*_data_sets(run)]):
        fields["datasets"] = sets
    return hub.front_matter(fields)


def _rows(
    target: Path, base: str | None, run: RunRecord | None, is_best: bool
) -> Iterator[tuple[str, str]]:
    """Names and values of the card's table."""
    if base is not None:
        yield "base model", _shown_base(base)
    elif run is None or run.settings:  # a run without settings may have had one
        yield "base model", "random weights"
    if (target / _ADAPTER).exists():
        described = json.loads((target / _ADAPTER).read_text("utf-8"))
        yield "trained", f"LoRA adapters of rank {described['r']}"
    coded = target / "base.json"
    if coded.exists():
        yield "base's matrices", f"in {json.loads(coded.read_text('utf-8'))['base']}"
    if run is not None:
        if (rank := run.settings.get("model.lora_rank")) and base is not None:
            if not (target / _ADAPTER).exists():
                yield "trained", f"LoRA adapters of rank {rank}, merged"
        yield "job", f"`{run.settings.get('run.job', 'sft')}`"
        for key in _SOURCES:
            if key in run.settings:
                yield "data", _shown_source(run.settings[key])
        yield "steps", f"{run.steps:,}"
        yield "tokens", f"{run.tokens:,}"
        for name, (first, last) in run.measures.items():
            yield name.replace("_", " "), f"{first:.4f} at first, {last:.4f} at last"
        if is_best:
            yield "weights", "from the best evaluation"
    yield "jax", metadata.version("jax")


def _shown_base(base: str) -> str:
    model = hub.parse(base)
    if model is None:
        return f"`{Path(base).name}`, a directory"
    page = f"{_HUB}/{model.repository}"
    if model.revision is None:
        return f"[{model.repository}]({page})"
    return f"[{model.repository}]({page}/tree/{model.revision}), {model.revision[:12]}"


def _shown_source(source: Any) -> str:
    sources = source if isinstance(source, tuple) else (source,)
    return ", ".join(f"`{_shortened(entry)}`" for entry in sources)


def _shortened(value: Any) -> Any:
    """The value; of the path of a file here, the last part."""
    is_path = isinstance(value, str) and "/" in value and "://" not in value
    return Path(value).name if is_path else value


def _data_sets(run: RunRecord) -> Iterator[str]:
    """Names of the data sets of the Hub that a run has read."""
    for key in _SOURCES:
        source = run.settings.get(key, ())
        for entry in source if isinstance(source, tuple) else (source,):
            if entry.startswith("hf://"):
                named = entry.removeprefix("hf://").removeprefix("datasets/")
                owner, name = named.split("/")[:2]
                yield f"{owner}/{name.partition('@')[0].partition(':')[0]}"


def _settings(run: RunRecord) -> Iterator[str]:
    """Lines of the settings that differ from the defaults, but sizes of the base."""
    has_base = "model.checkpoint" in run.settings
    for key, value in run.settings.items():
        is_size = has_base and key.startswith("model.") and not _CHOSEN.match(key)
        if key not in _UNSHOWN and not is_size:
            yield f"{key} = {_shortened(value)!r}"


def _examples(target: Path, name: str, is_adapter: bool) -> str:
    """The section that shows how PEFT or transformers, and jaxmem, load the model."""
    kind = "AutoModelForCausalLM"
    imports = f"from transformers import {kind}, AutoTokenizer"
    if is_adapter:
        kind = "AutoPeftModelForCausalLM"
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    chats = (target / "chat_template.jinja").exists()
    prompt = "--chat" if chats else '"Once upon a time"'
    return f"""## Use

```python
{imports}

model = {kind}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

```bash
jaxmem generate {name} {prompt}
```"""


def base_of(target: Path, fallback: str | None) -> str | None:
    """The base that an adapter's directory records; of other models, the fallback."""
    if not (target / _ADAPTER).exists():
        return fallback
    base = base_record.BaseName.recorded(target)
    if not base.name:
        return None
    return str(hub.HubModel(base.name, base.revision)) if base.revision else base.name
