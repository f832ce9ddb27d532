"""Distillation: whether it helps, what its verbs cost, and what torch's take.

    python -m benchmarks.run_distill training
    python -m benchmarks.run_distill verbs --out distill_verbs_h100.csv
    python -m benchmarks.run_distill verbs --shape 1024,512,32768 --dtype float32 \
        --chunk 256 --verb topk_kl --verb topk_kl_loss --out distill_verbs_cpu.csv
    python -m benchmarks.run_distill peers --out distill_peers_h100.csv

training: on Python's own sources, a teacher of six layers, then for each seed a student
of two layers that learns from the text alone, and one of the same initial weights that
learns the teacher's distribution of the same rows. Steps are counted, not seconds: how
many until the held-out loss is within a margin of the teacher's. `distill_verbs` and
`distill_torch` describe the rows of verbs and peers.
"""

import argparse
import contextlib
import inspect
import json
import pathlib
import sysconfig
import tempfile

from benchmarks import results, workers

MARGINS = (1.25, 1.0, 0.5)  # nats
SHAPE = (8192, 4096, 151936)
SETTINGS = """
data.source = "text.jsonl"
data.vocab_size = 512
data.sequence_length = 64
data.batch_size = 8
data.held_out = 0.02
model.tied = False
model.embedding.scaled = True
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
TOKENS = 8 * 64  # of a step
TEACHER = "model.layers=6", "model.hidden=64", "model.ff=176"
STUDENT = "model.layers=2", "model.hidden=32", "model.ff=88"


# ---------------------------------------------------------------------- training


def write_text(folder, files=150, characters=8000):
    """Write the starts of some modules of the standard library, a document each."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    lines = [
        json.dumps({"text": path.read_text("utf-8")[:characters]}) + "\n"
        for path in paths
    ]
    (folder / "text.jsonl").write_text("".join(lines))
    (folder / "run.gin").write_text(SETTINGS)


def train(folder, name, *overrides):
    """The folder of a finished run, which is trained unless it is there already."""
    from jaxmem.train import configuration, jobs  # not where verbs are measured

    out = folder / name
    if not (out / "summary.json").exists():
        given = [f"data.source={folder}/text.jsonl", f"run.out_dir={out}"]
        given += [f"data.cache_dir={folder}", *overrides]
        jobs.train(*configuration.load(folder / "run.gin", given))
    return out


def curve(out, field):
    """Held-out loss by step, where it was evaluated."""
    steps = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x[field] for x in steps if x[field] is not None}


def students(folder, seed, steps, every):
    """Held-out losses by step of both students of a seed."""
    given = [*STUDENT, f"run.steps={steps}", f"eval.every={every}"]
    given += [f"run.seed={seed}", f"data.seed={seed}"]
    taught = [*given, "run.job=distill", f"distill.teacher={folder}/teacher"]
    return {
        "text": curve(train(folder, f"text-{seed}", *given), "held_out_loss"),
        "distill": curve(train(folder, f"distill-{seed}", *taught), "held_out_ce"),
    }


def first_step(losses, target):
    """The first evaluated step whose loss is at most the target; None without one."""
    return next((step for step, loss in losses.items() if loss <= target), None)


def training_rows(folder, args):
    """A row for each student and margin, with its loss at some steps."""
    write_text(folder)
    given = [*TEACHER, f"run.steps={args.teacher_steps}", "run.seed=100"]
    summary = train(folder, "teacher", *given) / "summary.json"
    teacher = json.loads(summary.read_text())["held_out_loss"]
    for seed in range(args.seeds):
        by_source = students(folder, seed, args.steps, args.every)
        for source, losses in by_source.items():
            at = {f"loss_at_{n}": losses[n] for n in (60, 120, 180) if n in losses}
            at["last_loss"] = losses[args.steps]
            for margin in MARGINS:
                yield {
                    "seed": seed,
                    "source": source,
                    "margin": margin,
                    "teacher_loss": round(teacher, 4),
                    "steps_to_margin": first_step(losses, teacher + margin),
                    "steps": args.steps,
                    "tokens_per_step": TOKENS,
                    **{name: round(loss, 4) for name, loss in at.items()},
                }


def training(args):
    with contextlib.ExitStack() as stack:
        name = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        folder = pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        rows = list(training_rows(folder, args))
        print("wrote", results.write(args.out or "distill_cpu.csv", rows))


# --------------------------------------------------------------- verbs and peers


def verbs(args):
    from benchmarks import distill_verbs

    for shape in shapes_of(args):
        for chunk in args.chunk or [1024]:
            rows = distill_verbs.run(
                shape, args.dtype, chunk, depths_of(args, shape), args.verb,
                args.repetitions,
            )  # fmt: skip
            for row in rows:
                results.merge(
                    args.out or "distill_verbs.csv", [row], distill_verbs.KEYS
                )
                print(row, flush=True)


def peers(args):
    from benchmarks import distill_torch  # where torch is

    for shape in shapes_of(args):
        for teacher_d in depths_of(args, shape):
            rows = distill_torch.run(shape, args.dtype, teacher_d, args.repetitions)
            for row in rows:
                results.merge(
                    args.out or "distill_peers.csv", [row], distill_torch.KEYS
                )
                print(row, flush=True)


def shapes_of(args):
    return workers.shapes_of(args) if args.shape else [SHAPE]


def depths_of(args, shape):
    """The teacher's widths: those that are named, or the student's and its double."""
    return args.teacher_depth or (shape[1], 2 * shape[1])


# ------------------------------------------------------------------------ driver


def make_parser():
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    questions = parser.add_subparsers(required=True)
    question = questions.add_parser("training")
    question.set_defaults(run=training)
    question.add_argument("--folder", help="keep the runs there; finished ones stay")
    question.add_argument("--seeds", type=int, default=3)
    question.add_argument("--steps", type=int, default=200, help="of a student")
    question.add_argument("--every", type=int, default=20, help="steps; evaluation")
    question.add_argument("--teacher-steps", type=int, default=400)
    question.add_argument("--out", help="in benchmarks/results")
    for name, run in (("verbs", verbs), ("peers", peers)):
        question = questions.add_parser(name)
        question.set_defaults(run=run)
        workers.add_shapes(question)
        question.add_argument(
            "--teacher-depth", type=int, action="append",
            help="the teacher's width; repeat; default: D, then 2 D",
        )  # fmt: skip
        question.add_argument(
            "--dtype", default="bfloat16", choices=["float32", "bfloat16"]
        )
        question.add_argument("--repetitions", type=int, default=3)
        question.add_argument("--out", help="in benchmarks/results")
        if name == "verbs":
            question.add_argument("--chunk", type=int, action="append", help="1024")
            question.add_argument(
                "--verb", action="append", default=[], help="first word of paths; all"
            )
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
