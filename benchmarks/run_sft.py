"""The default training job: loss, speed, and what either head costs, from one run.

python -m benchmarks.run_sft
"""

import argparse
import json
import pathlib
import shutil
import statistics
import tempfile
import time

from benchmarks import results
from jaxmem.train import configuration, jobs

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "sft_stdlib.gin"


def measure(folder):
    """One row: the run's losses and speed; MiB of its step with either head."""
    start = time.perf_counter()
    made = jobs.train(*configuration.load(CONFIG, [f"run.out_dir={folder}"]))
    seconds = time.perf_counter() - start
    summary = json.loads((made.out_dir / "summary.json").read_text())
    mib = {
        f"{part}_{name}_mib": round(getattr(cost, part).temporary / 2**20, 1)
        for name, cost in made.costs.items()
        for part in ("head", "step")
    }
    return {
        "steps": summary["steps"],
        "first_loss": round(summary["first_loss"], 2),
        "last_loss": round(summary["last_loss"], 2),
        "mean_loss_of_last_20": round(
            statistics.mean(step.loss for step in made.history[-20:]), 2
        ),
        "held_out_loss": round(summary["held_out_loss"], 2),
        "tokens_per_second": round(summary["tokens_per_second"]),
        "seconds": round(seconds),
        **mib,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes none
    with tempfile.TemporaryDirectory() as folder:
        row = measure(folder)
        path = results.write("sft_stdlib.csv", [row])
        shutil.copy(pathlib.Path(folder) / "report.png", path.with_suffix(".png"))
    print(row, "wrote", path)
