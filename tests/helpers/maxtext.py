"""Stand-ins of MaxText's models and losses."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.helpers.stand_ins import Config, D, V, log_softmax


def maxtext_config(**changes):
    options = dict(
        dtype=jnp.float32, logits_dot_in_fp32=False, logits_via_embedding=False,
        normalize_embedding_logits=True, final_logits_soft_cap=0.0,
        parameter_memory_host_offload=False, z_loss_multiplier=0.0, num_vocab_tiling=2,
        enable_dropout=True, dropout_rate=0.0,
    )  # fmt: skip
    return Config(**options | changes)


class MaxDecoder(nnx.Module):
    def __init__(self, config, rngs):
        self.decoder_norm = nnx.RMSNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.0)
        self.config = config
        if not config.logits_via_embedding:
            self.logits_dense = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def apply_output_head(self, shared_embedding, y, deterministic, model_mode):
        y = self.dropout(self.decoder_norm(y), deterministic=deterministic)
        config = self.config
        if not config.logits_via_embedding:
            return self.logits_dense(y)
        table = jnp.asarray(shared_embedding.embedding[...], jnp.bfloat16)
        logits = jnp.dot(y, table.T)
        if config.normalize_embedding_logits:
            logits = logits / jnp.sqrt(D)
        if config.final_logits_soft_cap:
            cap = config.final_logits_soft_cap
            logits = jnp.tanh(logits / cap) * cap
        return logits


class MaxModel(nnx.Module):
    def __init__(self, config):
        rngs = nnx.Rngs(0)
        self.token_embedder = nnx.Embed(V, D, rngs=rngs)
        self.decoder, self.config = MaxDecoder(config, rngs), config

    def __call__(self, decoder_input_tokens, **_):
        hidden = self.token_embedder(decoder_input_tokens)
        return self.decoder.apply_output_head(
            self.token_embedder, hidden, deterministic=True, model_mode="train"
        )


def tiled_loss(logits, data, config):
    picked, _ = log_softmax(logits, data["targets"])
    z_loss = config.z_loss_multiplier * jax.nn.logsumexp(logits, axis=-1) ** 2
    mask = data["targets_segmentation"] != 0
    return jnp.sum((z_loss - picked) * mask), jnp.sum(z_loss * mask)


def vocab_tiling_nnx_loss(model, hidden_states, data, config, is_train):
    logits = model.decoder.apply_output_head(
        model.token_embedder, hidden_states, deterministic=True, model_mode="train"
    )
    return tiled_loss(logits, data, config)


def vocab_tiling_linen_loss(hidden_states, data, config, model, params, is_train):
    logits = model.apply(
        params,
        hidden_states,
        deterministic=True,
        method="logits_from_hidden_states_for_vocab_tiling",
    )
    return tiled_loss(logits, data, config)


class Adapter:
    """A stand-in of TunixMaxTextAdapter."""

    def __init__(self, base):
        self.base = base

    def __call__(self, input_tokens, positions, cache, attention_mask):
        return self.base(input_tokens), None
