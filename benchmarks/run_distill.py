"""A small student of a larger teacher against the same student from text alone.

python -m benchmarks.run_distill

On Python's own sources: a teacher of six layers, then for each of three seeds a student
of two layers that learns from the text alone, and one of the same initial weights that
learns the teacher's distribution of the same rows. Steps are counted, not seconds: how
many until the held-out loss is within a margin of the teacher's.
"""

import argparse
import contextlib
import json
import pathlib
import sysconfig
import tempfile

from benchmarks import results
from jaxmem.train import configuration, jobs

SEEDS, MARGINS = (0, 1, 2), (1.25, 1.0, 0.5)
TEACHER_STEPS, STEPS, EVERY = 400, 200, 20
SETTINGS = """
data.source = "text.jsonl"
data.vocab_size = 512
data.sequence_length = 64
data.batch_size = 8
data.held_out = 0.02
model.tied = False
model.embed_scale = True
model.heads = 2
model.kv_heads = 1
model.head_dim = 32
remat.policy = "none"
head.chunk = None
optimizer.learning_rate = 5e-3
optimizer.warmup_fraction = 0.1
optimizer.b2 = 0.98
optimizer.weight_decay = 0.1
run.compare_heads = False
run.checkpoint_every = 1000
eval.keep_best = False
"""
TEACHER = "model.layers=6", "model.hidden=64", "model.ff=176"
STUDENT = "model.layers=2", "model.hidden=32", "model.ff=88"


def write_text(folder, files=150, characters=8000):
    """The starts of some modules of the standard library, a document each."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    lines = [
        json.dumps({"text": path.read_text("utf-8")[:characters]}) + "\n"
        for path in paths
    ]
    (folder / "text.jsonl").write_text("".join(lines))
    (folder / "run.gin").write_text(SETTINGS)


def load(folder, name, *overrides):
    """A run's config in a folder of its own."""
    given = [f"data.source={folder}/text.jsonl", f"run.out_dir={folder}/{name}"]
    given.append(f"data.cache_dir={folder}")
    return configuration.load(folder / "run.gin", [*given, *overrides])


def run(folder, name, *overrides):
    """The folder of a run that has ended, which it may have before."""
    out = folder / name
    if not (out / "summary.json").exists():
        jobs.train(*load(folder, name, *overrides))
    return out


def curve(out, field):
    """Step to held-out loss, where it was evaluated."""
    steps = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x[field] for x in steps if x[field] is not None}


def students(folder, seed):
    """Held-out losses of both students of a seed, by step."""
    given = [*STUDENT, f"run.steps={STEPS}", f"eval.every={EVERY}"]
    given += [f"run.seed={seed}", f"data.seed={seed}"]
    taught = [*given, "run.job=distill", f"distill.teacher={folder}/teacher"]
    return {
        "text": curve(run(folder, f"text-{seed}", *given), "held_out_loss"),
        "distill": curve(run(folder, f"distill-{seed}", *taught), "held_out_ce"),
    }


def reached(losses, target):
    """The first evaluated step whose loss is at most the target; None for none."""
    return next((step for step, loss in losses.items() if loss <= target), None)


def rows(folder):
    """A row for each student and margin, and its loss at some steps."""
    given = [*TEACHER, f"run.steps={TEACHER_STEPS}", "run.seed=100"]
    out = run(folder, "teacher", *given)
    teacher = json.loads((out / "summary.json").read_text())["held_out_loss"]
    for seed in SEEDS:
        by_source = students(folder, seed)
        for source, losses in by_source.items():
            for margin in MARGINS:
                yield {
                    "seed": seed,
                    "source": source,
                    "margin": margin,
                    "teacher_loss": round(teacher, 4),
                    "steps_to_margin": reached(losses, teacher + margin),
                    "steps": STEPS,
                    "tokens_per_step": 8 * 64,
                    **{f"loss_at_{n}": round(losses[n], 4) for n in (60, 120, 180)},
                    "last_loss": round(losses[STEPS], 4),
                }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="keep the runs there; those that ended stay")
    kept = parser.parse_args().folder
    with contextlib.ExitStack() as stack:
        name = kept or stack.enter_context(tempfile.TemporaryDirectory())
        directory = pathlib.Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory)
        print("wrote", results.write("distill_cpu.csv", list(rows(directory))))
