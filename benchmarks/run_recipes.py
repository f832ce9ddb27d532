"""Plans of the recipes in configs/recipes, by shapes alone: bytes on their cards.

    python -m benchmarks.run_recipes

Nothing is compiled and nothing runs. A recipe's header names its card and repeats the
numbers, which `tests/planning/test_recipes.py` plans again.
"""

import argparse
import contextlib
import inspect
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import tokenizers

from benchmarks import results
from jaxmem import checkpoints, devices
from jaxmem.planning import analytic
from jaxmem.train import configuration
from jaxmem.train.jobs import job_of
from jaxmem.train.settings import JobConfig

FOLDER = pathlib.Path(__file__).parents[1] / "configs" / "recipes"
OUT = "recipes_plan.csv"
KEYS = ("recipe", "device")
GIB = 2**30
POSITIONS = 40_960  # the longest context that a recipe's model is said to have


def device_of(path: pathlib.Path) -> str:
    """The card that a recipe's header names."""
    (name,) = re.findall(r"^# Planned for (\S+):", path.read_text("utf-8"), re.M)
    return name


def dimensions_of(path: pathlib.Path) -> pathlib.Path:
    """The file with the sizes of a recipe's model, which has no checkpoint here."""
    files = FOLDER.parent.glob("model_*.gin")
    names = [f for f in files if f"model_{path.stem}".startswith(f"{f.stem}_")]
    return max(names, key=lambda file: len(file.stem))


@contextlib.contextmanager
def checkpoint_for(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory for a recipe's model.checkpoint: sizes and a tokenizer of no text."""
    sizes, _ = configuration.load(dimensions_of(path), [], configuration.DATA_KEYS)
    described = checkpoints.describe(sizes.model, POSITIONS)
    words = tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>")
    text = checkpoints.Text(tokenizers.Tokenizer(words), None, "</s>", None)
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        checkpoints.write_text_files(directory, described, text, "bfloat16")
        yield directory


def planned(path: pathlib.Path) -> tuple[JobConfig, analytic.ShapedPlan]:
    """A recipe's configuration, and its plan on its card, without a compiler."""
    with checkpoint_for(path) as directory:
        named = [f"model.checkpoint={directory}"]
        config, _ = configuration.load(path, named, configuration.DATA_KEYS)
        device, job = devices.find(device_of(path)), job_of(config)
        with devices.stand_in(device.name):
            return config, analytic.of_programs(job.plan(), device, 1)


def size_of(config: Any) -> tuple[int, int]:
    """Rows alive at once, and tokens of one: of a batch, or of a rollout."""
    if config.run.job == "grpo":
        longest = config.task.max_prompt_tokens + config.sampling.max_new_tokens
        return config.grpo.prompts * config.grpo.group_size, longest
    return config.data.batch_size, config.data.sequence_length


def rows(pattern: str) -> Iterator[dict]:
    """One row for each recipe."""
    for path in sorted(FOLDER.glob(pattern)):
        config, plan = planned(path)
        low, high = plan.range
        count, tokens = size_of(config)
        yield {
            "recipe": path.stem,
            "device": plan.device.name,
            "base": config.model.base or config.model.param_dtype,
            "policy": config.remat.policy,
            "rows": count,
            "tokens": tokens,
            "low_gib": round(low / GIB, 2),
            "expected_gib": round(plan.expected / GIB, 2),
            "high_gib": round(high / GIB, 2),
            "memory_gib": round(plan.device.memory / GIB, 2),
            "fits": {True: "yes", False: "no", None: "perhaps"}[plan.fits],
            "jax": jax.__version__,
            "date": results.today(),
        }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--recipes", default="*.gin", help="a pattern of file names")
    parser.add_argument("--out", default=OUT, help="in benchmarks/results")
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    for row in rows(args.recipes):
        print(row, flush=True)
        results.merge(args.out, [row], KEYS)


if __name__ == "__main__":
    main()
