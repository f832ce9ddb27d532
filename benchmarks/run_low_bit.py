"""Learning curves of adapters on a base in 16, 8 and 4 bits: three seeds on a CPU.

    python -m benchmarks.run_low_bit

A decoder learns the standard library's sources and is saved in bfloat16. For each seed,
adapters of all its matrices then learn other text, Python's reference in prose
(`pydoc_data.topics`), beside that base as it is, coded as int8, and coded as nf4.

A row has held-out losses of one run by step; 0 is before the first, and `sources_loss`
is that of the base alone on text like its own. `over_16_bits` is the last loss less
that of the same seed on the base as it is; `spread` is the range of a base's seeds.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sysconfig
import tempfile
from pydoc_data import topics

from benchmarks import results

SOURCES, REFERENCE = "sources.jsonl", "reference.jsonl"
# Inputs of all matrices are multiples of 64, the block of nf4.
SIZES = ("layers=4", "hidden=128", "ff=384", "heads=4", "kv_heads=2", "head_dim=32")
TINY = ("layers=1", "hidden=64", "ff=64", "heads=2", "kv_heads=2", "head_dim=32")
SETTINGS = """
data.vocab_size = 1024
data.sequence_length = 128
data.batch_size = 8
model.dtype = "float32"
model.param_dtype = "bfloat16"
remat.policy = "none"
head.chunk = None
optimizer.warmup_fraction = 0.1
optimizer.b2 = 0.98
run.compare_heads = False
run.checkpoint_every = 1000
eval.keep_best = False
"""
DECODER = (
    "model.tied=False", "model.embedding.scaled=True", "run.seed=100",
    "optimizer.learning_rate=5e-3", "optimizer.weight_decay=0.1",
)  # fmt: skip
TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
ADAPTERS = (
    "model.lora_rank=16", "model.lora_alpha=32.0", f"model.lora_targets={TARGETS}",
    "optimizer.weight_decay=0.0",
)  # fmt: skip
HELD_OUT, HELD_OUT_SOURCES = "data.held_out=0.1", "data.held_out=0.02"
RATE = 2e-3
NO_RATE = 1e-12  # leaves adapters as they are drawn, with B = 0
PLAIN = "bfloat16"
BASES = PLAIN, "int8", "nf4"


def write_texts(folder, files=150, characters=8000):
    """Write the starts of modules and of topics of the reference, a document each."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    documents = {
        SOURCES: [path.read_text("utf-8") for path in paths],
        REFERENCE: [topics.topics[name] for name in sorted(topics.topics)][:files],
    }
    for name, texts in documents.items():
        lines = [json.dumps({"text": text[:characters]}) + "\n" for text in texts]
        (folder / name).write_text("".join(lines))
    (folder / "run.gin").write_text(SETTINGS)


def train(folder, name, source, *overrides):
    """The folder of a finished run, which is trained unless it is there already."""
    from jaxmem.train import configuration, jobs

    out = folder / name
    if not (out / "summary.json").exists():
        own = [f"data.source={folder / source}", f"run.out_dir={out}"]
        own += [f"data.cache_dir={folder}", *overrides]
        jobs.train(*configuration.load(folder / "run.gin", own))
    return out


def held_out_losses(out):
    """Held-out loss by step, where it was evaluated."""
    steps = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = [step for step in steps if step["held_out_loss"] is not None]
    return {step["step"]: step["held_out_loss"] for step in evaluated}


def adapter_losses(folder, base, seed, args):
    """Held-out losses by step of adapters on a base; at 0, before the first step."""
    own = [*overrides_of(folder, base), f"run.seed={seed}", f"data.seed={seed}"]
    own += [HELD_OUT, f"optimizer.learning_rate={RATE}", f"run.steps={args.steps}"]
    out = train(folder, f"{base}-{seed}", REFERENCE, *own, f"eval.every={args.every}")
    return {0: base_loss(folder, base, REFERENCE, HELD_OUT), **held_out_losses(out)}


def base_loss(folder, base, source, held_out):
    """Held-out loss of a base with adapters that change nothing."""
    still = [f"optimizer.learning_rate={NO_RATE}", "run.steps=1", "eval.every=1"]
    name = f"{base}-{pathlib.Path(source).stem}"
    own = overrides_of(folder, base)
    return held_out_losses(train(folder, name, source, *own, held_out, *still))[1]


def overrides_of(folder, base):
    """Settings of adapters on a base of the decoder."""
    coded = [] if base == PLAIN else [f"model.base={base}"]
    return [*ADAPTERS, f"model.checkpoint={folder}/decoder/model", *coded]


def rows_of(curves, sources):
    """A row for each base and seed, and one for each base with the means of its seeds.

    `curves` has held-out losses by base, then by seed and step; `sources` has by base
    those of the text that the decoder has learned.
    """
    plain = curves[PLAIN]
    for base, by_seed in curves.items():
        rows = [
            {"sources_loss": sources[base]}
            | {f"loss_at_{step}": loss for step, loss in losses.items()}
            | {"over_16_bits": last_of(losses) - last_of(plain[seed])}
            for seed, losses in by_seed.items()
        ]
        mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
        last = list(map(last_of, by_seed.values()))
        mean["spread"] = max(last) - min(last)
        for seed, row in zip([*by_seed, "mean"], [*rows, mean], strict=True):
            numbers = {name: round(value, 4) + 0.0 for name, value in row.items()}
            yield {"base": base, "seed": seed, **numbers}


def last_of(losses):
    return losses[max(losses)]


def measure(folder, args):
    """The rows of all runs."""
    write_texts(folder, args.files)
    decoder = [f"model.{size}" for size in (TINY if args.tiny else SIZES)]
    decoder += [f"run.steps={args.decoder_steps}", "eval.every=None"]
    train(folder, "decoder", SOURCES, *DECODER, HELD_OUT_SOURCES, *decoder)
    seeds = range(args.seeds)
    curves = {
        base: {seed: adapter_losses(folder, base, seed, args) for seed in seeds}
        for base in BASES
    }
    sources = {
        base: base_loss(folder, base, SOURCES, HELD_OUT_SOURCES) for base in curves
    }
    return list(rows_of(curves, sources))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="keep the runs there; finished ones stay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of adapters")
    parser.add_argument("--every", type=int, default=30, help="steps; evaluation")
    parser.add_argument("--decoder-steps", type=int, default=400)
    parser.add_argument("--files", type=int, default=150, help="documents of a text")
    parser.add_argument("--tiny", action="store_true", help="one layer of width 64")
    parser.add_argument(
        "--out", default="low_bit_cpu.csv", help="in benchmarks/results"
    )
    args = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        name = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        folder = pathlib.Path(name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(folder, args)
    print("wrote", results.write(args.out or "low_bit_cpu.csv", rows))


if __name__ == "__main__":
    main()
