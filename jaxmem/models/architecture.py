"""The architecture of a decoder by subject: groups of settings of `ModelConfig`.

Each group is a frozen dataclass that checks itself; conditions on several groups are in
`models.config`. A checkpoint's `config.json` sets these settings, and they determine
the function that its weights compute.
"""

import dataclasses
from typing import Annotated, Literal

from jaxmem.base.fields import check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import SettingsRule, must, needs, unread

# Sizes have bounds, each far above that of any model, so that an impossible size is an
# error before anything is allocated. They also bound a weight to less than 2**63 bytes.
COUNT = integers(above=0, limit=2**16)  # heads, experts, and numbers of a head
WIDTH = integers(above=0, limit=2**22)  # of a layer
INT32 = integers(above=0, limit=2**31 - 1)  # tokens and rows
POSITIVE = reals(above=0)


def _unscaled(settings: str, *scalings: str) -> SettingsRule:
    """The rule that settings have an effect only on some scalings of wavelengths."""
    *first, last = map(repr, scalings)
    named = f"{', '.join(first)} or {last}" if first else last
    return unread(
        settings,
        f"without rope.scaling={named}",
        lambda rope: rope.scaling not in scalings,
    )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: Annotated[
        float,
        POSITIVE,
        "base of the rotary wavelengths, in tokens",
    ] = 10_000.0
    local_theta: Annotated[
        float | None,
        POSITIVE,
        "base of local layers, whose wavelengths are then not scaled. None: theta",
    ] = None
    scaling: Annotated[
        Literal["linear", "llama3", "yarn", "listed", "dynamic"] | None,
        'scaling of rotary wavelengths. "linear" scales all of them by factor; the '
        'others scale long wavelengths: "llama3" by their length, "yarn" by their '
        'number (jaxmem.models.positions), "listed" by one factor each, "dynamic" by '
        "the length of a long document. None: no scaling",
    ] = None
    factor: Annotated[float, POSITIVE, "factor of the scaled wavelengths"] = 1.0
    low_factor: Annotated[
        float, POSITIVE, "wavelengths above original_length / this are long"
    ] = 1.0
    high_factor: Annotated[
        float, POSITIVE, "wavelengths below original_length / this are short"
    ] = 4.0
    original_length: Annotated[
        int, INT32, "context length before scaling, in tokens"
    ] = 8192
    truncate: Annotated[
        bool, "yarn: round the limits between pairs to whole numbers"
    ] = True
    short_factors: Annotated[
        tuple[float, ...] | None, 'for "listed": factor of each pair\'s wavelength'
    ] = None
    long_factors: Annotated[
        tuple[float, ...] | None, 'for "listed": short_factors of long documents'
    ] = None
    limit: Annotated[
        int | None, INT32, "documents with more tokens than this are long"
    ] = None
    attention_factor: Annotated[
        float,
        POSITIVE,
        "factor of cosines and sines in layers whose wavelengths are scaled",
    ] = 1.0
    long_attention_factor: Annotated[
        float | None,
        POSITIVE,
        "attention_factor of long documents. None: attention_factor",
    ] = None
    fraction: Annotated[
        float,
        reals(above=0, high=1),
        "fraction of each head that is rotated, from its first number on",
    ] = 1.0
    proportion: Annotated[
        float | None,
        reals(0, high=1),
        "fraction of the pairs that are rotated in global layers, the ones with the "
        "shortest wavelengths. None: all",
    ] = None

    RULES = (
        must(
            "limit",
            "given with rope.scaling='listed' or 'dynamic', and only there",
            lambda rope: (
                (rope.scaling in ("listed", "dynamic")) == (rope.limit is not None)
            ),
        ),
        must(
            "high_factor",
            "at least rope.low_factor",
            lambda rope: rope.high_factor >= rope.low_factor,
        ),
        _unscaled("factor", "linear", "llama3", "yarn", "dynamic"),
        _unscaled("low_factor high_factor original_length", "llama3", "yarn"),
        _unscaled("truncate", "yarn"),
        unread(
            "attention_factor",
            "without rope.scaling",
            lambda rope: rope.scaling is None,
        ),
        _unscaled("long_attention_factor", "listed", "dynamic"),
    )

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Norms of the residual stream."""

    kind: Annotated[
        Literal["rms", "layer"],
        '"rms": RMSNorm. "layer": LayerNorm, which also subtracts the mean',
    ] = "rms"
    scale: Annotated[bool, "give norms a scale"] = True
    bias: Annotated[bool, "give layer norms a bias"] = False
    offset: Annotated[bool, "norms multiply by 1 + scale, as in Gemma"] = False
    eps: Annotated[
        float,
        reals(above=0, below=1),
        "number that is added to the mean square in every norm",
    ] = 1e-6
    pre: Annotated[bool, "normalise each sublayer's input"] = True
    post: Annotated[bool, "normalise each sublayer's output, as in Gemma 2"] = False

    RULES = (
        needs("bias", "norm.kind='layer'", lambda norm: norm.kind == "layer"),
        needs("bias", "norm.scale", lambda norm: norm.scale),
        needs("offset", "norm.scale", lambda norm: norm.scale),
    )

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class QKNormConfig:
    """Norms of queries and keys."""

    enabled: Annotated[bool, "normalise queries and keys, as Qwen3 does"] = False
    axis: Annotated[
        Literal["head", "width"],
        'normalise each head ("head"), or all heads together ("width")',
    ] = "head"
    after_rope: Annotated[
        bool, "normalise queries and keys after the rotation instead of before"
    ] = False
    scale: Annotated[
        bool, "give the norms of queries and keys a scale, if norm.scale is True"
    ] = True
    rotated_only: Annotated[
        bool, "normalise queries and keys only in layers with rotary embedding"
    ] = False

    RULES = (needs("after_rope", "qk_norm.axis='head'", lambda qk: qk.axis == "head"),)

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class SelfAttentionConfig:
    """Scores, heads and windows of attention."""

    window: Annotated[
        int | None,
        INT32,
        "number of tokens to which a local layer attends, including the query's token; "
        "in chunked layers, tokens per chunk",
    ] = None
    scale: Annotated[
        float | None,
        POSITIVE,
        "factor of attention scores. None: 1 / sqrt(head_dim)",
    ] = None
    softcap: Annotated[
        float | None,
        POSITIVE,
        "attention scores become this * tanh(scores / this). None: unchanged",
    ] = None
    sinks: Annotated[
        bool,
        "give each head a learned sink score, which only takes attention weight from "
        "tokens",
    ] = False
    gate: Annotated[bool, "multiply the result of attention by a sigmoid gate"] = False
    qkv_bias: Annotated[
        bool,
        "give queries, keys and values biases, as in Qwen2",
    ] = False
    output_bias: Annotated[bool, "give the output matrix of attention a bias"] = False
    value_norm: Annotated[bool, "normalise values, without a scale"] = False
    global_head_dim: Annotated[
        int | None, COUNT, "width of a head in global layers. None: head_dim"
    ] = None
    global_kv_heads: Annotated[
        int | None,
        COUNT,
        "number of key and value heads in global layers. None: kv_heads",
    ] = None
    keys_are_values: Annotated[
        bool,
        "in global layers, use the keys as values too",
    ] = False
    query_growth: Annotated[
        float | None,
        POSITIVE,
        "queries at position p are multiplied by 1 + this ln(1 + p // "
        "rope.original_length). None: no factor",
    ] = None
    unrotated_growth: Annotated[
        float | None,
        POSITIVE,
        "queries of unrotated layers are multiplied by 1 + this ln(1 + (p + 1) // "
        "unrotated_growth_length). None: no factor",
    ] = None
    unrotated_growth_length: Annotated[
        int,
        INT32,
        "number of positions after which the factor of unrotated_growth increases",
    ] = 8192

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Feed-forward layers."""

    gated: Annotated[
        bool, "True: feed-forward layers compute act(gate) * up. False: act(up)"
    ] = True
    activation: Annotated[
        Literal[
            "silu", "gelu", "exact_gelu", "quick_gelu", "relu", "squared_relu", "xielu"
        ],
        'activation of feed-forward layers; "xielu" has two weights',
    ] = "silu"
    bias: Annotated[bool, "give the matrices of feed-forward layers biases"] = False
    reuse_ff: Annotated[
        int | None,
        WIDTH,
        'width of feed-forward layers after "reuse" mixers. None: ff',
    ] = None

    RULES = (
        needs(
            "activation",
            "mlp.gated=False",
            lambda mlp: mlp.activation != "xielu" or not mlp.gated,
        ),
    )

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Experts of feed-forward layers."""

    count: Annotated[
        int | None, COUNT, "number of experts in a feed-forward layer with experts"
    ] = None
    per_token: Annotated[
        int, COUNT, "number of experts that a router chooses for each token"
    ] = 1
    ff: Annotated[int | None, WIDTH, "width inside an expert"] = None
    bias: Annotated[bool, "give the matrices of experts biases"] = False
    gate_limit: Annotated[
        float | None,
        POSITIVE,
        "upper bound of an expert's gate; the values that the gate multiplies are "
        "bounded by ± this. None: no bounds",
    ] = None
    up_plus_one: Annotated[bool, "an expert's gate multiplies up + 1"] = False
    shared_ff: Annotated[
        int | None,
        WIDTH,
        "width of an expert that every token uses. None: no such expert",
    ] = None
    shared_gate: Annotated[
        bool, "multiply the shared expert's result by a sigmoid gate"
    ] = False

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """The choice of experts, and the weights of their results."""

    scores: Annotated[
        Literal["softmax", "sigmoid", "chosen", "near"],
        'scores of experts: "softmax" or "sigmoid" of the router\'s logits; "chosen": '
        'softmax over the chosen experts; "near": softmax over each chosen expert and '
        "the lower ones that are near it",
    ] = "softmax"
    nearness: Annotated[
        float,
        POSITIVE,
        'for "near": half of the relative distance within which logits are near',
    ] = 0.01
    renormalised: Annotated[
        bool, "normalise the scores of the chosen experts so that they sum to 1"
    ] = False
    scale: Annotated[float, POSITIVE, "factor of the chosen experts' scores"] = 1.0
    scales_inputs: Annotated[
        bool, "scores multiply the inputs of experts, not their results"
    ] = False
    bias: Annotated[bool, "give the router's logits a bias"] = False
    correction: Annotated[
        bool, "give scores a bias that only the choice of experts reads"
    ] = False
    groups: Annotated[
        int,
        COUNT,
        "number of groups of experts; experts are chosen from the best groups",
    ] = 1
    groups_kept: Annotated[
        int, COUNT, "number of best groups from which experts are chosen"
    ] = 1
    group_best: Annotated[
        int,
        COUNT,
        "number of best scores of a group whose sum is the group's score",
    ] = 1

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Sizes of "delta" mixers, the gated delta rule."""

    heads: Annotated[
        int | None, COUNT, "number of value heads; each head has a state"
    ] = None
    key_heads: Annotated[
        int, COUNT, "number of query and key heads; divides delta.heads"
    ] = 1
    key_dim: Annotated[int, COUNT, "width of a head's keys"] = 128
    value_dim: Annotated[int, COUNT, "width of a head's values"] = 128
    conv_kernel_dim: Annotated[
        int,
        integers(above=1, limit=2**10),
        "number of tokens that the convolution reads, including its own",
    ] = 4

    RULES = (
        must(
            "key_heads",
            "a divisor of delta.heads",
            lambda delta: (delta.heads or 0) % delta.key_heads == 0,
        ),
    )

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Sizes of "latent" mixers, multi-head latent attention."""

    kv_rank: Annotated[
        int | None,
        WIDTH,
        "width of the vector from which keys and values are made; it is cached",
    ] = None
    query_rank: Annotated[
        int | None,
        WIDTH,
        "width of the vector from which queries are made. None: hidden",
    ] = None
    rope_head_dim: Annotated[
        int | None,
        COUNT,
        "width of each head that is rotated; replaces rope.fraction",
    ] = None
    value_head_dim: Annotated[
        int | None, COUNT, "width of a head's values. None: head_dim"
    ] = None

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Embeddings of tokens, and what is added to them."""

    scaled: Annotated[
        bool,
        "multiply embeddings by sqrt(hidden), as Gemma does",
    ] = False
    multiplier: Annotated[float, POSITIVE, "factor of embeddings"] = 1.0
    norm: Annotated[bool, "normalise embeddings"] = False
    positions: Annotated[
        int | None,
        INT32,
        "rows of a table of position embeddings that is added to token embeddings. "
        "None: no table",
    ] = None
    per_layer_width: Annotated[
        int | None,
        WIDTH,
        "width of a vector per token that each layer gets in addition to the residual "
        "stream. None: no such vector",
    ] = None
    per_layer_vocab: Annotated[
        int | None, INT32, "rows of the table of these vectors. None: vocab_size"
    ] = None

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """Sublayers' inputs from the residual stream, and their results' way into it."""

    parallel: Annotated[
        Literal["shared", "separate"] | None,
        'both sublayers read the layer\'s input, through one norm ("shared") or two '
        '("separate"). None: one sublayer after the other',
    ] = None
    multiplier: Annotated[
        float,
        POSITIVE,
        "factor of a sublayer's result before it is added to the residual stream",
    ] = 1.0
    layer_scale: Annotated[
        bool, "multiply each layer's result by a constant of the checkpoint"
    ] = False

    def __post_init__(self):
        check(self)


@dataclasses.dataclass(frozen=True)
class LogitsConfig:
    """Final logits."""

    softcap: Annotated[
        float | None,
        POSITIVE,
        "final logits become softcap * tanh(logits / softcap). None: unchanged",
    ] = None
    multiplier: Annotated[float, POSITIVE, "factor of the final hidden states"] = 1.0
    bias: Annotated[bool, "give the head a bias; it must not be tied"] = False

    def __post_init__(self):
        check(self)
