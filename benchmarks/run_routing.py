"""How many tokens each of 128 experts has, before and after training, on a CPU.

    python -m benchmarks.run_routing

A decoder with 8 of 128 small experts in each of its layers learns Python's standard
library, once without and once with the loss that spreads tokens over experts. `rows`
are those of 8,192 tokens of sources that training does not see.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from benchmarks.run_sft import CONFIG
from jaxmem import checkpoints
from jaxmem.data import documents
from jaxmem.models.decoder import Decoder
from jaxmem.train import configuration, jobs

SIZES = [
    "model.layers=2", "model.feed_forwards=('experts',)", "model.experts=128",
    "model.experts_per_token=8", "model.expert_ff=32", "model.router_renormalised=True",
    "model.qk_norm=True", "data.vocab_size=4096", "data.batch_size=32",
    "run.compare_heads=False",
]  # fmt: skip
COEFFICIENTS = {"trained": 0.0, "balanced": 0.01}
ROWS, LENGTH = 64, 128


def text(config: documents.DataConfig) -> np.ndarray:
    """Held-out tokens [ROWS, LENGTH]."""
    _, held_out = documents.split_documents(
        documents.load_documents(config.source), config.held_out
    )
    tokenizer = documents.load_tokenizer(config)
    ids = [i for each in held_out for i in tokenizer.encode(each.text).ids]
    return np.array(ids[: ROWS * LENGTH], np.int32).reshape(ROWS, LENGTH)


def histogram(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Rows of each expert, [layers, experts]."""

    @jax.jit
    def routes(model):
        lengths = jnp.full(len(tokens), tokens.shape[1])
        return model.prefill(tokens, lengths, tokens.shape[1], records=True)[1].routes

    found = np.asarray(routes(model)).astype(int)
    layers = np.moveaxis(found, 2, 0).reshape(found.shape[2], -1)
    count = model.config.experts or 0
    return np.stack([np.bincount(layer, minlength=count) for layer in layers])


def trained(coefficient: float, steps: int):
    """(the model, what its last step's metrics say, its text)."""
    with tempfile.TemporaryDirectory() as folder:
        more = [
            f"run.out_dir={folder}", f"run.steps={steps}",
            f"model.router_aux_loss_coef={coefficient}",
        ]  # fmt: skip
        config, operative = configuration.load(CONFIG, [*SIZES, *more])
        made = jobs.train(config, operative)
        model = checkpoints.load(made.out_dir / "model", dtype="float32")
        return model, made.summary, text(config.data)


def measure(steps: int) -> list[dict]:
    """Rows of an expert each: of random weights, and of both models."""
    found = []
    for name, coefficient in COEFFICIENTS.items():
        model, summary, tokens = trained(coefficient, steps)
        if not found:
            random = Decoder(model.config, rngs=nnx.Rngs(0))
            found += rows("random", histogram(random, tokens), 0, "")
        loss = round(summary["held_out_loss"], 3)
        found += rows(name, histogram(model, tokens), steps, loss)
    return found


def rows(name: str, counts: np.ndarray, steps: int, loss: float | str) -> list[dict]:
    """A row an expert of each layer; `load` is the largest over the mean."""
    found = []
    for layer, of_each in enumerate(counts):
        same = {"routing": name, "steps": steps, "held_out_loss": loss, "layer": layer}
        same["load"] = round(float(of_each.max() / of_each.mean()), 2)
        same["median"] = float(np.median(of_each))
        print(same, flush=True)
        found += [{**same, "expert": i, "rows": int(n)} for i, n in enumerate(of_each)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="experts_routing_cpu.csv")
    args = parser.parse_args()
    print("wrote", results.write(args.out, measure(args.steps)))
