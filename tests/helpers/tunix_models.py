"""Tunix, and its Qwen3 of one layer, where google-tunix is installed."""

import functools
import importlib
import inspect
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

EAGER = getattr(flax.config, "flax_always_shard_variable", None)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Tunix's own, at import
    common = pytest.importorskip("tunix.rl.common", reason="needs google-tunix")
    algo_core = importlib.import_module("tunix.rl.algo_core")
    peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
    qwen3 = importlib.import_module("tunix.models.qwen3.model")
    gemma = importlib.import_module("tunix.models.gemma.model")


def _set_eager(value):
    if EAGER is not None:
        flax.config.update("flax_always_shard_variable", value)


_set_eager(EAGER)  # Tunix turns it off for the whole process
V = 512
LOGITS = "return_logits" in inspect.signature(common.compute_per_token_logps).parameters


@pytest.fixture(scope="module")
def as_tunix_sets_flax():
    _set_eager(False)
    yield
    _set_eager(EAGER)


def qwen(*args, **kwargs):
    """A model of its own, with the weights of all others of its sizes."""
    return nnx.clone(_qwen(*args, **kwargs))


@functools.cache
def _qwen(tied=True, dtype=jnp.float32, vocab_size=V):
    config = qwen3.ModelConfig(
        num_layers=1, vocab_size=vocab_size, embed_dim=16, hidden_dim=24, num_heads=2,
        head_dim=8, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6,
        use_tied_embedding=tied, dtype=dtype, param_dtype=dtype,
    )  # fmt: skip
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(3, V, shape))


def batch(rows=2):
    prompts, completions = tokens((rows, 4)), tokens((rows, 6), 1)
    return prompts.at[0, :2].set(0), completions.at[1, 4:].set(0)


def logps(model, prompts, completions, module=common, **options):
    options = dict(pad_id=0, eos_id=2, stop_gradient=False) | options
    return module.compute_per_token_logps(
        *nnx.split(model), prompts, completions, **options
    )


def sft_losses(vocab_size=V, steps=3, model=None):
    """Losses of Tunix's own supervised trainer."""
    model = model or qwen(vocab_size=vocab_size)
    losses = []
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=steps)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.5), config)

    def inputs(example):
        ids = example.input_tokens
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        mask = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))
        return dict(
            input_tokens=ids, input_mask=example.input_mask, positions=places,
            attention_mask=jnp.broadcast_to(mask, (len(ids), *mask.shape)),
        )  # fmt: skip

    trainer = trainer.with_gen_model_input_fn(inputs)
    kept = trainer.loss_fn

    @functools.wraps(kept)  # its parameters' names are read
    def loss_fn(*args, **kwargs):
        value = kept(*args, **kwargs)
        loss = value if LOGITS else value.primary_loss.compute()
        jax.debug.callback(lambda x: losses.append(float(x)), loss)
        return value

    trainer.loss_fn = loss_fn
    examples = [
        peft_trainer.TrainingInput(
            input_tokens=np.asarray(tokens((2, 8), seed)),
            input_mask=np.array([[1] * 8, [1] * 5 + [0] * 3]),
        )
        for seed in range(steps)
    ]
    trainer.train(examples)
    jax.effects_barrier()
    return losses
