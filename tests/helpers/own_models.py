"""Models of one's own for the tests: ours behind the protocol, and wrong ones."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxmem
from jaxmem.models.decoder import Decoder
from tests.helpers.own_model import Model

FOLDER = pathlib.Path(__file__).parent
PATH = f"{FOLDER / 'own_model.py'}:Model"


class Ours(nnx.Module):
    """A `Decoder`, which the protocol hides."""

    def __init__(self, config, rngs):
        sizes = dataclasses.replace(config, factory=None)
        self.decoder = Decoder(sizes, policy=None, rngs=rngs)

    def hidden_states(self, tokens, positions, segment_ids):
        return self.decoder(tokens, segment_ids, positions)

    def head_weight(self):
        return self.decoder.embed.embedding


class OursCached(Ours):
    def prefill(self, prompts, lengths, max_length):
        return self.decoder.prefill(prompts, lengths, max_length)

    def decode(self, tokens, cache):
        return self.decoder.decode(tokens, cache)


class OursExtended(OursCached):
    def extend(self, tokens, lengths, cache):
        return self.decoder.extend(tokens, lengths, cache)


class Recurrent(nnx.Module):
    """h_t = a h_(t-1) + x_t within a document; its cache is h."""

    def __init__(self, config, rngs):
        self.table = nnx.Embed(config.vocab_size, config.hidden, rngs=rngs)
        self.decay = nnx.Param(jnp.zeros(config.hidden))
        self.mix = nnx.Linear(config.hidden, config.hidden, rngs=rngs)
        self.out = nnx.Linear(config.hidden, config.vocab_size, rngs=rngs)

    def states(self, tokens, positions, start):
        def step(state, given):
            token, position = given
            kept = jnp.where(position[:, None] == 0, 0, state)
            state = nnx.sigmoid(self.decay[...]) * kept + self.table(token)
            return state, state

        return lax.scan(step, start, (tokens.T, positions.T))[1].swapaxes(0, 1)

    def hidden_states(self, tokens, positions, segment_ids):
        start = jnp.zeros((len(tokens), self.mix.in_features))
        return jnp.tanh(self.mix(self.states(tokens, positions, start)))

    def head_weight(self):
        return jaxmem.Head(self.out.kernel, self.out.bias, softcap=20.0)


class RecurrentCached(Recurrent):
    def prefill(self, prompts, lengths, max_length):
        places = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
        start = jnp.zeros((len(prompts), self.mix.in_features))
        states = self.states(prompts, places, start)
        state = states[jnp.arange(len(prompts)), lengths - 1]
        return jnp.tanh(self.mix(state)), state

    def decode(self, tokens, cache):
        ones = jnp.ones_like(tokens)[:, None]
        state = self.states(tokens[:, None], ones, cache)[:, 0]
        return jnp.tanh(self.mix(state)), state


class Sharded(Model):
    """With partition specs of its matrices."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        table = nnx.initializers.normal(0.1)(rngs(), self.embed.embedding.shape)
        spec = ("tensor", ("fsdp", "sequence"))
        self.embed.embedding = nnx.Param(table, out_sharding=spec)
        for block in self.blocks:
            up, down = block.up.kernel[...], block.down.kernel[...]
            block.up.kernel = nnx.Param(up, out_sharding=(None, "tensor"))
            block.down.kernel = nnx.Param(down, out_sharding=("tensor", None))


class InBfloat16(nnx.Module):
    """Parameters of 16 bits, whose type is what it computes in."""

    def __init__(self, config, rngs):
        kind = {"param_dtype": jnp.bfloat16, "rngs": rngs}
        self.table = nnx.Embed(config.vocab_size, config.hidden, **kind)
        self.mix = nnx.Linear(config.hidden, config.hidden, **kind)

    def hidden_states(self, tokens, positions, segment_ids):
        return jnp.tanh(self.mix(self.table(tokens)))

    def head_weight(self):
        return self.table.embedding


# ------------------------------------------------------------------- wrong


class ShardedUnknown(Sharded):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        table = self.places.embedding[...]
        self.places.embedding = nnx.Param(table, out_sharding=("tp", None))


class SeesOthers(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        return super().hidden_states(tokens, positions, jnp.ones_like(segment_ids))


class SeesPadding(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        filled = (segment_ids > 0).astype(jnp.int32)
        return super().hidden_states(tokens, positions, filled)


class SeesWhatFollows(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        x = self.embed(tokens) + self.places(positions)
        return self.blocks[0](x, mask)


class Flat(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        return super().hidden_states(tokens, positions, segment_ids)[:, 0]


class Narrow(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        return super().hidden_states(tokens, positions, segment_ids)[..., :4]


class Foreign(Model):
    def head_weight(self):
        return nnx.Param(self.embed.embedding[...])


class NoParam(Model):
    def head_weight(self):
        return self.embed.embedding[...]


class NoHead(nnx.Module):
    def __init__(self, config, rngs):
        self.weight = nnx.Param(jnp.ones(3))

    def hidden_states(self, tokens, positions, segment_ids):
        return jnp.ones((*tokens.shape, 3))


class Fails(Model):
    def hidden_states(self, tokens, positions, segment_ids):
        raise RuntimeError("no kernel for this")


class Drops(Model):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Numbered(Model):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.blocks = nnx.Dict({"0": self.blocks[0]})


class Small(Model):
    def __init__(self, config, rngs):
        super().__init__(dataclasses.replace(config, vocab_size=3), rngs)


class Half(Model):
    def prefill(self, prompts, lengths, max_length):
        return jax.numpy.zeros(()), None


def takes_nothing():
    return None


def returns_nothing(config, rngs):
    return None


def raises(config, rngs):
    raise KeyError("width")


NUMBER = 3
SIZES = """
model.layers = 1
model.hidden = 16
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
model.ff = 16
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
run.steps = 4
run.checkpoint_every = 2
run.compare_heads = False
run.out_dir = "run"
"""
DATA = """
data.source = "texts.jsonl"
data.sequence_length = 16
data.batch_size = 4
data.held_out = 0.2
data.cache_dir = "."
eval.every = 2
"""
JOBS = {
    "sft": DATA + "data.vocab_size = 280\n",
    "dpo": DATA.replace("texts", "pairs") + 'model.checkpoint = "llama"\n',
    "distill": DATA + 'distill.teacher = "llama"\n',
    "grpo": """
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 4
model.checkpoint = "llama"
sampling.max_new_tokens = 4
grpo.prompts = 8
grpo.group_size = 4
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.row_lengths = (16,)
""",
}
