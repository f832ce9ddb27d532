"""Does a decoder learn as well from sampled gradients of its head as from exact ones?

    python -m benchmarks.run_sampled_training --out sampled_training_h100.csv
    python -m benchmarks.run_sampled_training --cpu --out sampled_training_cpu.csv

The decoder and the optimizer are the trainer's own, with `sampled_training.gin`; on a
CPU sizes are smaller. Two stages, each with paired seeds, which give every variant the
same initial weights and the same rows in the same order:

    scratch   from random weights, on the Python sources of this interpreter and of the
              packages beside it; on a CPU, those of its standard library
    sft       from the seed's exact model, on C headers of those packages (on a CPU,
              Python's help topics): a prompt and a response, which the loss counts

A variant is "exact", "K=16", "K=128 int8" and so on, or "dropped": entries of the
derivative with p < 1/128 are left out, as filters do, which is biased and serves as a
control. Columns:
`held_out_loss`, and `loss_below_10` and so on by how often a token occurs among the
labels of training; `norm_below_10` and so on, mean norms of the head's columns of those
tokens; `gradient_norm`, the mean over the last tenth of the steps. `--curve` names a
second file, with the mean training loss of each fiftieth part of a run. Rows replace
those of the same stage, variant, seed and device in both files.

    python -m benchmarks.run_sampled_training --grpo --out sampled_grpo_cpu.csv

writes the rewards of `grpo_arithmetic.gin` by rollout instead, exact, with K=4 and with
K=8 of its 14 tokens, three seeds each.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import results, run_grpo
from jaxmem.data.documents import Batch, batches, load_tokenizer
from jaxmem.data.texts import load_documents
from jaxmem.models.head import HeadConfig
from jaxmem.train import configuration
from jaxmem.train.jobs import sft
from jaxmem.train.program import TrainState, update

CONFIG = pathlib.Path(__file__).parent / "sampled_training.gin"
KEYS = ("stage", "variant", "seed", "device")
CPU = (
    "data.vocab_size=4096", "data.sequence_length=128", "data.batch_size=8",
    "model.layers=2", "model.hidden=64", "model.ff=176", "model.heads=4",
    "model.kv_heads=4", "model.head_dim=16", "model.dtype='float32'",
    "optimizer.learning_rate=3e-3", "run.steps=300",
)  # fmt: skip
VARIANTS = ("exact", "K=16", "K=32", "K=128", "K=512", "dropped")
DROPPED_BELOW = 1 / 128  # a filter's threshold of the control
BUCKETS = (10, 100, 1000, 10000)  # occurrences among the labels of training
PARTS = 50  # points of a curve
FINE_TUNING = 5  # its steps are the fifth part, its learning rate too
KEYS = ("stage", "variant", "seed", "device")


class Rows(NamedTuple):
    """Packed rows [R, T] of a text; the counts [V] of training's labels; its origin."""

    train: Batch
    held_out: Batch
    counts: np.ndarray
    documents: int
    text: str  # first digits of a hash of the documents


# --------------------------------------------------------------------- text


def write_documents(path: pathlib.Path, suffix: str, megabytes: float) -> None:
    """Write files of the installed packages as records, up to a size.

    Args:
        path: of the .jsonl file.
        suffix: of the files; .py as "text", others as "prompt" and "response".
        megabytes: of text at most.
    """
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    left, seen = megabytes * 1e6, set()
    with path.open("w", encoding="utf-8") as out:
        for root in map(pathlib.Path, roots):
            for file in sorted(root.rglob(f"*{suffix}")):
                text = _text_of(file)
                mark = hashlib.sha256(text.encode()).digest()
                if len(text) < 400 or mark in seen:
                    continue
                seen.add(mark)
                cut = text.find("\n", len(text) // 3) + 1 or len(text) // 3
                record = {"text": text}
                if suffix != ".py":
                    record = {"prompt": text[:cut], "response": text[cut:]}
                out.write(json.dumps(record) + "\n")
                left -= len(text)
                if left < 0:
                    return


def _text_of(file: pathlib.Path) -> str:
    """At most 20,000 characters: no single file is much of the text."""
    try:
        return file.read_text("utf-8")[:20_000]
    except (OSError, UnicodeDecodeError):
        return ""


def read_rows(config, source: str, tokenizer, steps: int) -> Rows:
    """Rows for `steps` steps in the order of the data's own shuffle, and held out."""
    settings = dataclasses.replace(config.data, source=source)
    train = _joined(batches(settings, tokenizer), steps)
    held_out = _joined(batches(settings, tokenizer, split="evaluation", epochs=1), None)
    labels = train.labels[train.labels >= 0]
    every = load_documents(source)
    mark = hashlib.sha256("".join(d.prompt + d.text for d in every).encode())
    counts = np.bincount(labels, minlength=tokenizer.get_vocab_size())
    return Rows(train, held_out, counts, len(every), mark.hexdigest()[:12])


def _joined(batches: Iterator[Batch], count: int | None) -> Batch:
    taken = []
    for batch in batches:
        taken.append(batch)
        if len(taken) == count:
            break
    return Batch(*(np.concatenate(arrays) for arrays in zip(*taken, strict=True)))


# -------------------------------------------------------------------- steps


def dropping_step(program: sft.Program) -> Any:
    """The control's step: the derivative without its small entries, compiled."""

    def loss(params, frozen, batch):
        model = program.model(params, frozen)
        hidden = model(batch.tokens, batch.segment_ids, batch.positions)
        z = model.head(hidden).astype(jnp.float32)
        label = jnp.maximum(batch.labels, 0)
        kept = (jax.nn.softmax(z) >= DROPPED_BELOW) | (
            jnp.arange(z.shape[-1]) == label[..., None]
        )
        z = jnp.where(kept, z, jax.lax.stop_gradient(z))
        losses = optax.softmax_cross_entropy_with_integer_labels(z, label)
        counted = batch.labels >= 0
        return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)

    def step(state, frozen, micro_batches):
        batch = Batch(*(x[0] for x in micro_batches))
        value, slopes = jax.value_and_grad(loss)(state.params, frozen, batch)
        state, norm = update(program.optimizer, state, slopes)
        return state, {"loss": value, "grad_norm": norm}

    rows = program.config.data.batch_size, program.config.data.sequence_length
    ids = jax.ShapeDtypeStruct((1, *rows), jnp.int32)
    shapes = program.state_shapes, program.frozen_shapes, Batch(*[ids] * 4)
    return jax.jit(step, donate_argnums=0).lower(*shapes).compile()


def head_of(config, variant: str) -> HeadConfig:
    """The head's settings of a variant."""
    slots, *forward = variant.removeprefix("K=").split()
    gradient = ("sample", int(slots), *forward) if variant.startswith("K=") else None
    return dataclasses.replace(config.head, gradient=gradient)


def prepare(config, variant: str, seed: int) -> tuple[sft.Program, HeadConfig, Any]:
    """(program, head, compiled step) of a run."""
    run = dataclasses.replace(config.run, seed=seed)
    config = dataclasses.replace(config, run=run, head=head_of(config, variant))
    program = sft.Program(config, config.data.vocab_size)
    if variant == "dropped":
        return program, config.head, dropping_step(program)
    return program, config.head, program.trace_step(config.head).lower().compile()


def take_steps(prepared, state: TrainState, rows: Rows, seed: int):
    """(state, losses, gradient norms) after a run on the rows in the seed's order."""
    program, head, step = prepared
    config, frozen = program.config, program.frozen()
    order = np.random.default_rng(seed).permutation(len(rows.train.tokens))
    losses, norms = [], []
    for number in range(1, config.run.steps + 1):
        size = config.data.batch_size
        chosen = order[(number - 1) * size : number * size]
        batch = Batch(*(x[chosen][None] for x in rows.train))
        drawn_by = program.step_numbers(head, number)
        state, numbers = step(state, frozen, batch, *drawn_by)
        losses.append(numbers["loss"])
        norms.append(numbers["grad_norm"])
    return state, np.array(jax.device_get(losses)), np.array(jax.device_get(norms))


# --------------------------------------------------------------- evaluation


def bucket_of(counts: np.ndarray) -> np.ndarray:
    """For each token, how many of BUCKETS its count reaches."""
    return np.searchsorted(BUCKETS, counts, side="right").astype(np.int32)


class Evaluation:
    """Columns of a run: held-out loss and the head's norms, whole and by bucket.

    One program, compiled once, serves all variants: their models are the same.
    """

    def __init__(self, program: sft.Program, rows: Rows):
        self._program, self._held_out = program, rows.held_out
        self._buckets = bucket_of(rows.counts)
        self._sums = jax.jit(self._sums_of)

    def _sums_of(self, params, frozen, batch):
        """Sums of the losses and numbers of the tokens of a batch, by bucket."""
        model = self._program.model(params, frozen)
        hidden = model(batch.tokens, batch.segment_ids, batch.positions)
        losses = -model.head.logprobs(hidden, batch.labels).ravel()
        counted = (batch.labels >= 0).ravel()
        of = jnp.asarray(self._buckets)[jnp.maximum(batch.labels, 0)].ravel()
        sums = jnp.zeros((2, len(BUCKETS) + 1))
        return sums.at[:, of].add(jnp.stack([losses, counted]))

    def __call__(self, params) -> dict[str, float]:
        program, buckets = self._program, self._buckets
        frozen, size = program.frozen(), program.config.data.batch_size
        sums = np.zeros((2, len(BUCKETS) + 1))
        for start in range(0, len(self._held_out.tokens), size):
            batch = Batch(*(x[start : start + size] for x in self._held_out))
            sums += np.asarray(self._sums(params, frozen, batch), np.float64)
        head = nnx.split(program.model(params, frozen).head)[1]
        kernel = nnx.to_pure_dict(head)["kernel"].astype(jnp.float32)
        norms = np.asarray(jnp.linalg.norm(kernel, axis=0))
        losses, counts = sums
        row = {"held_out_loss": losses.sum() / counts.sum()}
        present = [(i, name) for i, name in enumerate(_names()) if counts[i]]
        row |= {f"loss_{name}": losses[i] / counts[i] for i, name in present}
        row |= {f"norm_{name}": norms[buckets == i].mean() for i, name in present}
        return {name: round(float(value), 4) for name, value in row.items()}


def _names() -> list[str]:
    return [*(f"below_{b}" for b in BUCKETS), f"from_{BUCKETS[-1]}"]


def curve_of(losses: np.ndarray) -> Iterator[tuple[int, float]]:
    """(last step, mean loss) of each of at most PARTS parts."""
    last = 0
    for part in np.array_split(losses, min(PARTS, len(losses))):
        last += len(part)
        yield last, round(float(part.mean()), 4)


# ----------------------------------------------------------------- the runs


def stage(name, config, rows, asked, starts) -> Iterator[tuple[dict, list[dict], Any]]:
    """(row, curve, weights) of each variant and seed; starts: the seeds' weights."""
    variants = asked.variants if starts is not None else asked.scratch or asked.variants
    runs = [(v, seed) for seed in asked.seeds for v in variants]
    with concurrent.futures.ThreadPoolExecutor(asked.compilers) as pool:
        # XLA compiles beside each other, and while the first runs train.
        pending = {r: pool.submit(prepare, config, *r) for r in runs}
        evaluate = None
        for variant, seed in runs:
            prepared = pending.pop((variant, seed)).result()
            start, program = time.perf_counter(), prepared[0]
            evaluate = evaluate or Evaluation(program, rows)
            state = program.initial_state()
            if starts is not None:
                state = state._replace(params=jax.tree.map(jnp.copy, starts[seed]))
            state, losses, norms = take_steps(prepared, state, rows, seed)
            facts = {"stage": name, "variant": variant, "seed": seed}
            row = facts | {
                "steps": config.run.steps,
                "tokens": config.run.steps * rows.train.tokens[0].size
                * config.data.batch_size,
                "vocab_size": config.data.vocab_size,
                "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
                "last_loss": round(float(losses[-len(losses) // 20 :].mean()), 4),
                **evaluate(state.params),
                "gradient_norm": round(float(norms[-len(norms) // 10 :].mean()), 4),
                "documents": rows.documents,
                "text": rows.text,
            }  # fmt: skip
            print(f"{time.perf_counter() - start:.1f} s", row, flush=True)
            curve = [facts | {"step": s, "loss": x} for s, x in curve_of(losses)]
            yield row, curve, state.params if variant == "exact" else None


def rewards(seeds: Sequence[int], overrides) -> list[dict]:
    """Rows of the curves of reinforcement learning."""
    rows = []
    for seed in seeds:
        for slots in (None, 4, 8):
            gradient = None if slots is None else ("sample", slots)
            given = [f"head.gradient={gradient}", f"run.seed={seed}", *overrides]
            curve, _ = run_grpo.curve("grpo_arithmetic.gin", given)
            variant = "exact" if slots is None else f"K={slots}"
            rows += [{"variant": variant, "seed": seed, **row} for row in curve]
            print(rows[-1], flush=True)
    return rows


def sources(folder: pathlib.Path, asked) -> tuple[str, str]:
    """Texts of the two stages."""
    if asked.cpu:
        from pydoc_data.topics import topics

        help_of = folder / "help.jsonl"
        with help_of.open("w") as out:
            for name in sorted(topics):
                prompt = f"help({name!r})\n"
                out.write(json.dumps({"prompt": prompt, "response": topics[name]}))
                out.write("\n")
        return "stdlib", str(help_of)
    python, headers = folder / "python.jsonl", folder / "headers.jsonl"
    write_documents(python, ".py", asked.megabytes)
    write_documents(headers, ".h", asked.megabytes / 4)
    return str(python), str(headers)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cpu", action="store_true", help="the sizes for a CPU")
    options.add_argument("--grpo", action="store_true", help="rewards instead")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--megabytes", type=float, default=70, help="of sources")
    options.add_argument("--compilers", type=int, default=8, help="programs at a time")
    options.add_argument("--variants", nargs="+", default=VARIANTS)
    options.add_argument("--scratch", nargs="+", help="of the first stage; --variants")
    options.add_argument("--out", default="sampled_training.csv")
    options.add_argument("--curve", default="sampled_training_curve.csv")
    options.add_argument("overrides", nargs="*", metavar="section.field=value")
    return options


def main(arguments=None) -> None:
    asked = parser().parse_args(arguments)
    if asked.grpo:
        print("wrote", results.write(asked.out, rewards(asked.seeds, asked.overrides)))
        return
    given = [*(CPU if asked.cpu else ()), *asked.overrides]  # the last one counts
    overrides = list({text.split("=")[0]: text for text in given}.values())
    with tempfile.TemporaryDirectory() as folder:
        first, second = sources(pathlib.Path(folder), asked)
        overrides += [f"data.cache_dir={folder!r}", f"data.source={first!r}"]
        config, _ = configuration.load(CONFIG, overrides)
        start = time.perf_counter()
        tokenizer = load_tokenizer(config.data)
        short = dataclasses.replace(
            config,
            run=dataclasses.replace(
                config.run, steps=max(config.run.steps // FINE_TUNING, 1)
            ),
            optimizer=dataclasses.replace(
                config.optimizer,
                learning_rate=config.optimizer.learning_rate / FINE_TUNING,
            ),
        )
        texts = [
            read_rows(c, source, tokenizer, c.run.steps)
            for c, source in ((config, first), (short, second))
        ]
        print(f"text: {time.perf_counter() - start:.0f} s", flush=True)
        exact: dict[int, Any] = {}
        stages = (("scratch", config, None), ("sft", short, exact))
        for (name, settings, starts), of in zip(stages, texts, strict=True):
            for row, curve, weights in stage(name, settings, of, asked, starts):
                if weights is not None and starts is None:
                    exact[row["seed"]] = weights
                made_by = results.provenance()
                curve = [point | made_by for point in curve]
                results.merge(asked.curve, curve, (*KEYS, "step"))
                path = results.merge(asked.out, [row | made_by], KEYS)
    print("wrote", path)


if __name__ == "__main__":
    main()
