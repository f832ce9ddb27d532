"""Prints docs/families.md's tables: python -m tests.checkpoints.family_table."""

import collections
import json

import numpy as np

from benchmarks import results
from jaxmem.checkpoints.families import FAMILIES
from tests.helpers import seeded

# Recorded in tiny/, with weights of their own.
ELSEWHERE = {"qwen3": 1, "mistral": 1, "gemma2": 1, "gemma3_text": 2, "qwen2": 2}
ELSEWHERE["llama"] = 2


def rows():
    """One line a family: its names, and how many configurations are compared."""
    counts = collections.Counter(ELSEWHERE)
    for path in seeded.RECORDS.glob("*.npz"):
        config = json.loads(str(np.load(path)["config"]))
        counts[config["model_type"]] += 1
    for family in sorted(FAMILIES, key=lambda family: family.model_type):
        recorded = counts[family.model_type]
        cells = family.model_type, family.architecture, str(recorded)
        yield f"| {' | '.join(cells)} |"


def measured():
    """One line a family that benchmarks/run_families.py has run: what it does."""
    columns = "family", "load", "train", "sample", "shard", "plan", "export", "lora"
    found = results.read("families_cpu.csv")
    for row in sorted(found, key=lambda row: row["family"]):
        yield f"| {' | '.join(row[column] for column in columns)} |"


if __name__ == "__main__":
    print("\n".join(rows()))
    print("\n".join(measured()))
