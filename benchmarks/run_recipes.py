"""Plans of the recipes in configs/recipes, by shapes alone: bytes on their cards.

    python -m benchmarks.run_recipes

Nothing is compiled and nothing runs. A recipe's header names its card and repeats the
numbers, which `tests/planning/test_recipes.py` plans again.
"""

import argparse
import inspect
import pathlib
import re
import tempfile
from collections.abc import Iterator

import jax

from benchmarks import results
from jaxmem import devices
from jaxmem.planning import analytic
from jaxmem.train import configuration
from jaxmem.train.jobs import job_of
from jaxmem.train.jobs.config import Config

FOLDER = pathlib.Path(__file__).parents[1] / "configs" / "recipes"
OUT = "recipes_plan.csv"
KEYS = ("recipe", "device")
GIB = 2**30


def device_of(path: pathlib.Path) -> str:
    """The card that a recipe's header names."""
    (name,) = re.findall(r"^# Planned for (\S+):", path.read_text("utf-8"), re.M)
    return name


def dimensions_of(path: pathlib.Path) -> pathlib.Path:
    """The file with the sizes of a recipe's model, which has no checkpoint here."""
    files = FOLDER.parent.glob("model_*.gin")
    names = [f for f in files if f"model_{path.stem}".startswith(f"{f.stem}_")]
    return max(names, key=lambda file: len(file.stem))


def config_of(path: pathlib.Path) -> Config:
    """A recipe with its model's sizes in place of a checkpoint."""
    lines = [f'include "{file}"' for file in (path, dimensions_of(path))]
    with tempfile.TemporaryDirectory() as folder:
        planned = pathlib.Path(folder) / path.name
        planned.write_text("\n".join([*lines, "model.checkpoint = None\n"]), "utf-8")
        config, _ = configuration.load(planned, [], configuration.DATA_KEYS)
    assert isinstance(config, Config)
    return config


def plan_of(path: pathlib.Path) -> analytic.ShapedPlan:
    """The plan of a recipe on its card, without a compiler."""
    device, job = devices.find(device_of(path)), job_of(config_of(path))
    with devices.stand_in(device.name):
        return analytic.of_programs(job.plan(), device, 1)


def rows(pattern: str) -> Iterator[dict]:
    """One row for each recipe."""
    for path in sorted(FOLDER.glob(pattern)):
        plan, config = plan_of(path), config_of(path)
        low, high = plan.range
        yield {
            "recipe": path.stem,
            "device": plan.device.name,
            "base": config.model.base or config.model.param_dtype,
            "policy": config.remat.policy,
            "rows": config.data.batch_size,
            "tokens": config.data.sequence_length,
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
