"""The configuration of a decoder: sizes and architecture choices."""

import dataclasses
import functools
from typing import Literal

import jax

from jaxmem.core.fields import check_field, check_numbers
from jaxmem.core.ranges import integers, reals
from jaxmem.models import lora

KINDS = ("global", "local")
MIXERS = ("attention",)
FEED_FORWARDS = ("dense",)


DTYPES = ("float32", "bfloat16", "float16")


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


# Sizes have bounds, each far above that of any model, so that an impossible size is an
# error before anything is allocated. They also bound a weight to less than 2**63 bytes.
_POSITIONS = integers(above=0, limit=2**31 - 1)  # int32
_POSITIVE, _HEADS = reals(above=0), integers(above=0, limit=2**16)
RANGES = {
    "layers": integers(above=0, limit=10_000),
    "hidden": integers(above=0, limit=2**20),
    "ff": integers(above=0, limit=2**22),
    "heads": _HEADS,
    "kv_heads": _HEADS,
    "head_dim": integers(above=0, limit=2**16),
    "vocab_size": integers(above=0, limit=2**31 - 1),  # ids are int32
    "rope_theta": _POSITIVE,
    "rope_factor": _POSITIVE,
    "rope_low_factor": _POSITIVE,
    "rope_high_factor": _POSITIVE,
    "rope_original": _POSITIONS,
    "window": _POSITIONS,
    "local_rope_theta": _POSITIVE,
    "softcap": _POSITIVE,
    "attention_softcap": _POSITIVE,
    "attention_scale": _POSITIVE,
    "norm_eps": reals(above=0, below=1),
    "lora_rank": integers(0, limit=2**16),
    "lora_alpha": _POSITIVE,
}


def _check_choice(config: object, name: str, known: tuple) -> None:
    wanted = f"one of {', '.join(map(repr, known))}"
    check_field(config, name, getattr(config, name) in known, wanted)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and architecture choices of a `Decoder`."""

    # None: random weights. Or a directory with config.json and safetensors to start
    # from; its config then determines the sizes.
    checkpoint: str | None = None
    layers: int = 4  # number of blocks
    hidden: int = 160  # width of the residual stream
    ff: int = 448  # width inside the gated feed-forward layer
    heads: int = 4  # query heads
    kv_heads: int = 2  # key and value heads; divides heads
    head_dim: int = 40  # width of one head; even, because RoPE rotates pairs
    vocab_size: int | None = None  # entries; None: as many as the tokenizer has
    rope_theta: float = 10_000.0  # base of the rotary wavelengths, in tokens
    # None; "linear": scale all wavelengths by rope_factor; "llama3": only the long ones
    rope_scaling: Literal["linear", "llama3"] | None = None
    rope_factor: float = 1.0  # factor of the scaled wavelengths
    rope_low_factor: float = 1.0  # llama3: long is above rope_original / this
    rope_high_factor: float = 4.0  # llama3: short is below rope_original / this
    rope_original: int = 8192  # context length in tokens before scaling
    # kinds of layers, cycled: "global" attends to its document, "local" to a window
    pattern: tuple[str, ...] = ("global",)
    mixers: tuple[str, ...] = ("attention",)  # what mixes tokens; cycled, as pattern
    feed_forwards: tuple[str, ...] = ("dense",)  # what follows in a layer; cycled
    window: int | None = None  # tokens a local layer attends to, including the query's
    local_rope_theta: float | None = None  # base in local layers, which are not scaled
    tied: bool = True  # the head reads the embedding table
    softcap: float | None = None  # final logits become softcap*tanh(logits/softcap)
    attention_softcap: float | None = None  # the same for attention scores
    attention_scale: float | None = None  # scale of scores; None: 1 / sqrt(head_dim)
    embed_scale: bool = False  # multiply embeddings by sqrt(hidden), as Gemma does
    qk_norm: bool = False  # RMS-normalise queries and keys, as Qwen3 does
    qkv_bias: bool = False  # queries, keys and values have biases, as in Qwen2
    post_norms: bool = False  # normalise each sublayer's output, as Gemma 2 does
    norm_offset: bool = False  # norms multiply by 1 + scale, as Gemma's do
    activation: Literal["silu", "gelu"] = "silu"  # gate of the feed-forward layer
    norm_eps: float = 1e-6  # added to the mean square in every norm
    dtype: str = "float32"  # activations and matrix products
    param_dtype: str = "float32"  # stored weights (the master copy)
    attention: Literal["xla", "cudnn"] | None = None  # None: "xla"
    lora_rank: int = 0  # rank of the adapters of frozen matrices; 0: none
    lora_alpha: float = 16.0  # adapters are scaled by this / lora_rank
    # matrices of a block with adapters; "gate", "up" and "down" are possible too
    lora_targets: tuple[str, ...] = ("query", "key", "value", "output")
    lora_head: bool = False  # whether the head has an adapter too

    def __post_init__(self):
        """Raise a ValueError that names a field whose size cannot be built."""
        check_numbers(self, RANGES)
        if self.heads % self.kv_heads:
            raise ValueError(
                "ModelConfig.kv_heads must divide heads, got "
                f"kv_heads={self.kv_heads} for heads={self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig.head_dim must be even (RoPE), got {self.head_dim}"
            )
        self._check_kinds()
        _check_choice(self, "rope_scaling", (None, "linear", "llama3"))
        above = self.rope_high_factor > self.rope_low_factor
        check_field(self, "rope_high_factor", above, "above rope_low_factor")
        _check_choice(self, "activation", tuple(ACTIVATIONS))
        _check_choice(self, "dtype", DTYPES)
        _check_choice(self, "param_dtype", DTYPES)
        self._check_attention()
        problem = lora.check(
            self.lora_rank, self.lora_alpha, self.lora_targets, self.lora_head
        )
        if problem is not None:
            raise ValueError(f"ModelConfig.{problem}")

    def _check_attention(self):
        _check_choice(self, "attention", ("xla", "cudnn", None))
        if self.attention != "cudnn":
            return
        if self.attention_softcap is not None:
            raise ValueError(
                "ModelConfig.attention='cudnn' cannot cap scores; leave it None, or "
                "'xla', with attention_softcap"
            )
        if self.dtype == "float32":
            raise ValueError(
                "ModelConfig.attention='cudnn' needs dtype='bfloat16' or 'float16', "
                "got 'float32'"
            )

    def _check_kinds(self):
        kinds = set(self.pattern) <= set(KINDS) and len(self.pattern) > 0
        check_field(self, "pattern", kinds, "of 'global' and 'local', at least one")
        for name, known in (("mixers", MIXERS), ("feed_forwards", FEED_FORWARDS)):
            named = getattr(self, name)
            good = set(named) <= set(known) and len(named) > 0
            wanted = f"of {', '.join(map(repr, known))}, at least one"
            check_field(self, name, good, wanted)
        local = "local" in self.pattern
        wanted = "given where pattern has 'local', and only there"
        check_field(self, "window", local == (self.window is not None), wanted)

    @property
    def score_scale(self) -> float:
        """The factor of products of queries and keys."""
        scale = self.attention_scale
        return self.head_dim**-0.5 if scale is None else scale
