"""Makes families/: configurations of every family, and what transformers makes of them.

Run with torch and transformers (2.13 and 5.24 wrote those that are committed), from the
root of the repository:

    python -m tests.checkpoints.make_families [NAME...]
    python -m tests.checkpoints.make_families --exports DIRECTORY

Each NAME.npz has `config` and `tensors` (JSON: config.json, and each tensor's shape and
mean), from which seeded.py draws the weights again; `tokens` [B, T]; `logits` of the
float64 model at `places` [B, P, V]; `gradients`, norm and projection of the gradient of
the mean cross-entropy by each tensor, in the order of `tensors`; and `greedy`, the
tokens that follow the first `PROMPT` ones. Where a family has a loss of its routers,
`balance` is that of rows of which the last has `PADDING` tokens less, and
`balance_gradients` is of it alone. --exports compares checkpoints that jaxmem
saved (tests/checkpoints/test_families.py --exports) with the same records.
"""

import argparse
import contextlib
import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers as tf
from transformers.core_model_loading import revert_weight_conversion

from tests.checkpoints.configurations import CONFIGURATIONS
from tests.helpers import seeded

PLACES = np.array([0, 1, 2, 5, 11, 16, 20, 23])
PROMPT, NEW, PADDING = 7, 8, 6


def made(model_type, settings):
    """A model that has read seeded weights, and what is said of its files."""
    config = tf.AutoConfig.for_model(model_type, **settings)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    config = config.to_dict() | {"architectures": [type(model).__name__]}
    config = json.loads(json.dumps(config))
    tensors = {}
    for name, weight in in_files(model, lambda weight: weight).items():
        mean = float(weight.detach().float().mean()) if weight.ndim == 1 else 0.0
        mean = 1.0 if abs(mean - 1) < 1e-3 else 0.0
        tensors[name] = [list(weight.shape), mean]
    said = {"config": json.dumps(config), "tensors": json.dumps(tensors)}
    with tempfile.TemporaryDirectory() as directory:
        path = seeded.write(said, pathlib.Path(directory))
        model = loaded(path)
    return model.double().eval(), said


def loaded(path):
    """The model of a checkpoint that has all its tensors, and no others."""
    model, said = tf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager", output_loading_info=True,
    )  # fmt: skip
    assert not said["missing_keys"] and not said["unexpected_keys"], (path, said)
    return model


def in_files(model, of):
    """Something of each weight, by the names and in the layouts of files."""
    held = model.state_dict(keep_vars=True)  # also what has no gradient
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    held = {k: of(v) for k, v in held.items() if not (tied and k == "lm_head.weight")}
    return revert_weight_conversion(model, held)


@contextlib.contextmanager
def in_float64():
    """Replace float32 by float64 where models compute in it whatever their type."""
    float32, torch.float32 = torch.float32, torch.float64
    try:
        yield
    finally:
        torch.float32 = float32


def recorded(model, tensors):
    generator = np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(3, seeded.VOCABULARY, (2, 24)))
    logits = model(tokens).logits
    flat = logits[:, :-1].reshape(-1, seeded.VOCABULARY)
    torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1)).backward()
    slopes = in_files(
        model, lambda x: torch.zeros_like(x) if x.grad is None else x.grad
    )
    gradients = [seeded.summary(name, slopes[name].numpy()) for name in tensors]
    # A cache of Llama's has keys that short factors have rotated, when a row is long.
    scaling = model.config.rope_parameters or {}
    keeps = scaling.get("rope_type") == "longrope" and model.config.model_type != "phi3"
    with torch.no_grad():
        whole = model.generate(
            tokens[:, :PROMPT], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW,
            eos_token_id=None, pad_token_id=0, use_cache=not keeps,
        )  # fmt: skip
    return {
        "tokens": tokens.numpy().astype(np.int16),
        "places": PLACES.astype(np.int16),
        "logits": logits.detach().numpy()[:, PLACES].astype(np.float32),
        "gradients": np.array(gradients, np.float32),
        "greedy": whole[:, PROMPT:].numpy().astype(np.int16),
    }


def balanced(model, tokens, tensors):
    """The loss of routers, and what its gradient is; nothing without one."""
    if not hasattr(model, "router_aux_loss_coef"):
        return {}
    model.zero_grad()
    tokens, mask = torch.from_numpy(tokens.astype(int)), torch.ones(tokens.shape)
    mask[-1, -PADDING:] = 0
    loss = model(tokens, attention_mask=mask, output_router_logits=True).aux_loss
    loss.backward()
    slopes = in_files(
        model, lambda x: torch.zeros_like(x) if x.grad is None else x.grad
    )
    gradients = [seeded.summary(name, slopes[name].numpy()) for name in tensors]
    gradients = np.array(gradients, np.float32)
    return {"balance": np.float32(loss.item()), "balance_gradients": gradients}


def write(names):
    for name in names or CONFIGURATIONS:
        model, said = made(*CONFIGURATIONS[name])
        path = seeded.RECORDS / f"{name}.npz"
        tensors = json.loads(said["tensors"])
        with in_float64():
            made_of = recorded(model, tensors)
            made_of |= balanced(model, made_of["tokens"], tensors)
        np.savez_compressed(path, **said, **made_of)
        print(name, path.stat().st_size, flush=True)


def compare(directory):
    """Load what jaxmem saved, and compare its logits with the records."""
    for path in sorted(pathlib.Path(directory).iterdir()):
        record = np.load(seeded.RECORDS / f"{path.name}.npz")
        model = loaded(path)
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(record["tokens"].astype(int))).logits
        expected = record["logits"]
        error = np.abs(logits.numpy()[:, record["places"]] - expected).max()
        print(f"{path.name}: {error / np.abs(expected).max():.1e}", flush=True)
        assert error <= 1e-5 * np.abs(expected).max(), path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exports")
    given = parser.parse_args()
    if given.exports:
        compare(given.exports)
    else:
        write(given.names)


if __name__ == "__main__":
    main()
