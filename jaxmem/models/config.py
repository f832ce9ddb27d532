"""The configuration of a decoder: sizes and architecture choices."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxmem.base import user_code
from jaxmem.base.fields import check_choices, check_field, check_numbers
from jaxmem.base.ranges import Range, integers, reals

KINDS = ("global", "local", "chunked", "unrotated")
MIXERS = ("attention", "reuse", "latent", "delta")
FEED_FORWARDS = ("dense", "experts", "dense_and_experts")
DTYPES = ("float32", "bfloat16", "float16")
TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
# Names of matrices in transformers, with those of TARGETS.
OTHER_NAMES = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
# Other matrices of blocks, which some mixers and inputs of layers have.
FURTHER_MATRICES = (
    "query_down", "query_up", "latent", "rotated", "delta_query", "delta_key",
    "delta_value", "delta_gate", "delta_rate", "delta_decay", "delta_output",
    "project", "inject_gate", "inject",
)  # fmt: skip
# Fields of a coded base, with their values where there is none.
PLAIN = {"base": None, "base_targets": None, "base_plain": (), "base_double": True}
BASE_FIELDS = tuple(PLAIN)
EMBEDDING = "embedding"  # in base_targets, the embedding table
BASE_TARGETS = (*TARGETS, *FURTHER_MATRICES)
SAVED = {"embed": "embed/embedding", "head": "head/kernel"}  # weights by name
UNTIED = "is for a head with its own matrix (tied=False)"

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


def translation(names: Iterable[object]) -> str:
    """The end of an error that gives the names in TARGETS of transformers' matrices."""
    said = [f"{name} is {OTHER_NAMES[name]}" for name in names
            if isinstance(name, str) and name in OTHER_NAMES]  # fmt: skip
    return f"; {', '.join(said)}" if said else ""


def _same_range(names: str, within: Range) -> dict[str, Range]:
    return dict.fromkeys(names.split(), within)


# Sizes have bounds, each far above that of any model, so that an impossible size is an
# error before anything is allocated. They also bound a weight to less than 2**63 bytes.
RANGES = {
    "layers": integers(above=0, limit=10_000),
    "hidden": integers(above=0, limit=2**20),
    "rope_fraction": reals(above=0, high=1),
    "rope_proportion": reals(0, high=1),
    "delta_taps": integers(above=1, limit=2**10),
    "router_aux_loss_coef": reals(0),
    "norm_eps": reals(above=0, below=1),
    "lora_rank": integers(0, limit=2**16),
    "pad_row": integers(0, limit=2**31 - 1),
    **_same_range(
        "heads kv_heads head_dim rotated_width value_dim global_head_dim "
        "global_kv_heads delta_heads delta_key_heads delta_key_dim delta_value_dim "
        "experts experts_per_token router_groups router_groups_kept router_group_best",
        integers(above=0, limit=2**16),
    ),
    **_same_range(
        "ff reuse_ff expert_ff shared_ff layer_input latent query_latent",
        integers(above=0, limit=2**22),
    ),
    **_same_range(  # int32
        "vocab_size layer_input_vocab rope_original rope_limit learned_positions "
        "unrotated_growth_length window",
        integers(above=0, limit=2**31 - 1),
    ),
    **_same_range(
        "rope_theta local_rope_theta rope_factor rope_low_factor rope_high_factor "
        "rope_magnitude rope_long_magnitude query_growth unrotated_growth "
        "router_scale router_nearness gate_limit embed_multiplier residual_multiplier "
        "logit_multiplier softcap attention_softcap attention_scale lora_alpha",
        reals(above=0),
    ),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and architecture choices of a `Decoder`."""

    # weights to start from: a directory with config.json and safetensors, or a model of
    # the Hub, OWNER/NAME or hf://OWNER/NAME@REVISION. Its config determines the sizes.
    # None: random weights
    checkpoint: str | None = None
    # LoRA adapter that is trained further, with its rank, alpha and matrices: a
    # directory in PEFT's layout for model.checkpoint, or the directory of a LoRA run.
    # model.checkpoint may also name the adapter instead of its base
    adapter: str | None = None
    # function of (config, rngs), "file.py:function" or "package.module:function", that
    # makes your own Flax NNX module (jaxmem.models.own_model); only the tokenizer of
    # model.checkpoint is then read. None: jaxmem's decoder
    factory: Annotated[str | None, user_code.Named()] = None
    layers: int = 4  # number of blocks
    hidden: int = 160  # width of the residual stream
    ff: int = 448  # width inside the feed-forward layer
    heads: int = 4  # number of query heads
    kv_heads: int = 2  # number of key and value heads; divides model.heads
    head_dim: int = 40  # width of one head; even, because RoPE rotates pairs
    # entries of the vocabulary. None: as many as the tokenizer has
    vocab_size: int | None = None
    # row of embedding tables whose look-ups have no gradient; a tied head still trains
    # it. None: no such row, or a checkpoint's pad_token_id if its family in
    # transformers has this rule
    pad_row: int | None = None
    rope_theta: float = 10_000.0  # base of the rotary wavelengths, in tokens
    # scaling of rotary wavelengths. "linear" scales all of them by model.rope_factor;
    # the others scale long wavelengths: "llama3" by their length, "yarn" by their
    # number (jaxmem.models.positions), "listed" by one factor each, "dynamic" by the
    # length of a long document. None: no scaling
    rope_scaling: Literal["linear", "llama3", "yarn", "listed", "dynamic"] | None = None
    rope_factor: float = 1.0  # factor of the scaled wavelengths
    rope_low_factor: float = 1.0  # wavelengths above rope_original / this are long
    rope_high_factor: float = 4.0  # wavelengths below rope_original / this are short
    rope_original: int = 8192  # context length before scaling, in tokens
    rope_truncate: bool = True  # yarn: round the limits between pairs to whole numbers
    # for "listed": factor of each pair's wavelength
    rope_factors: tuple[float, ...] | None = None
    # for "listed": rope_factors of long documents
    rope_long_factors: tuple[float, ...] | None = None
    rope_limit: int | None = None  # documents with more tokens than this are long
    # factor of cosines and sines in layers whose wavelengths are scaled
    rope_magnitude: float = 1.0
    # rope_magnitude of long documents. None: rope_magnitude
    rope_long_magnitude: float | None = None
    # fraction of each head that is rotated, from its first number on
    rope_fraction: float = 1.0
    # fraction of the pairs that are rotated in global layers, the ones with the
    # shortest wavelengths. None: all
    rope_proportion: float | None = None
    # for "latent" mixers: width of each head that is rotated; replaces rope_fraction
    rotated_width: int | None = None
    # rows of a table of position embeddings that is added to token embeddings. None: no
    # table
    learned_positions: int | None = None
    # queries at position p are multiplied by 1 + this ln(1 + p // rope_original). None:
    # no factor
    query_growth: float | None = None
    # queries of unrotated layers are multiplied by 1 + this ln(1 + (p + 1) //
    # unrotated_growth_length). None: no factor
    unrotated_growth: float | None = None
    # number of positions after which the factor of unrotated_growth increases
    unrotated_growth_length: int = 8192
    # kinds of layers, repeated as a cycle: "global" attends to its document, "local" to
    # a window, "chunked" to its chunk of the document; "unrotated" is global without
    # rotary embedding
    pattern: tuple[str, ...] = ("global",)
    # kinds of token mixers, repeated as a cycle: "attention", "latent" or "delta". The
    # last layers may be "reuse": they attend to keys and values of the last layer of
    # the same kind that computes its own
    mixers: tuple[str, ...] = ("attention",)
    # width of feed-forward layers after "reuse" mixers. None: model.ff
    reuse_ff: int | None = None
    # width of the vector from which "latent" mixers make keys and values; they cache
    # this vector
    latent: int | None = None
    # width of the vector from which "latent" mixers make queries. None: model.hidden
    query_latent: int | None = None
    # width of a head's values in "latent" mixers. None: model.head_dim
    value_dim: int | None = None
    # number of value heads in "delta" mixers; each head has a state
    delta_heads: int | None = None
    # number of query and key heads in "delta" mixers; divides model.delta_heads
    delta_key_heads: int = 1
    delta_key_dim: int = 128  # width of a head's keys in "delta" mixers
    delta_value_dim: int = 128  # width of a head's values in "delta" mixers
    # number of tokens that the convolution of "delta" mixers reads, including its own
    delta_taps: int = 4
    # width of a head in global layers. None: model.head_dim
    global_head_dim: int | None = None
    # number of key and value heads in global layers. None: model.kv_heads
    global_kv_heads: int | None = None
    keys_are_values: bool = False  # in global layers, use the keys as values too
    value_norm: bool = False  # normalise values, without a scale
    attention_gate: bool = False  # multiply the result of attention by a sigmoid gate
    # kinds of feed-forward layers, repeated as a cycle: "dense", "experts" or
    # "dense_and_experts"
    feed_forwards: tuple[str, ...] = ("dense",)
    # number of tokens to which a local layer attends, including the query's token; in
    # chunked layers, tokens per chunk
    window: int | None = None
    # rope_theta of local layers, whose wavelengths are then not scaled. None:
    # rope_theta
    local_rope_theta: float | None = None
    tied: bool = True  # True: the head uses the embedding table as its matrix
    # final logits become softcap * tanh(logits / softcap). None: unchanged
    softcap: float | None = None
    # attention scores become this * tanh(scores / this). None: unchanged
    attention_softcap: float | None = None
    # factor of attention scores. None: 1 / sqrt(head_dim)
    attention_scale: float | None = None
    # give each head a learned sink score, which only takes attention weight from tokens
    sinks: bool = False
    embed_scale: bool = False  # multiply embeddings by sqrt(hidden), as Gemma does
    embed_multiplier: float = 1.0  # factor of embeddings
    embed_norm: bool = False  # normalise embeddings
    # factor of a sublayer's result before it is added to the residual stream
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0  # factor of the final hidden states
    qk_norm: bool = False  # normalise queries and keys, as Qwen3 does
    # normalise each head ("head"), or all heads together ("width")
    qk_norm_axis: Literal["head", "width"] = "head"
    # normalise queries and keys after the rotation instead of before
    qk_norm_last: bool = False
    # give the norms of queries and keys a scale, if model.norm_scale is True
    qk_norm_scale: bool = True
    # normalise queries and keys only in layers with rotary embedding
    qk_norm_rotated: bool = False
    qkv_bias: bool = False  # give queries, keys and values biases, as in Qwen2
    output_bias: bool = False  # give the output matrix of attention a bias
    ff_bias: bool = False  # give the matrices of feed-forward layers biases
    head_bias: bool = False  # give the head a bias; it must not be tied
    # "rms": RMSNorm. "layer": LayerNorm, which also subtracts the mean
    norm: Literal["rms", "layer"] = "rms"
    norm_scale: bool = True  # give norms a scale
    norm_bias: bool = False  # give layer norms a bias
    norm_offset: bool = False  # norms multiply by 1 + scale, as in Gemma
    pre_norms: bool = True  # normalise each sublayer's input
    post_norms: bool = False  # normalise each sublayer's output, as in Gemma 2
    # both sublayers read the layer's input, through one norm ("shared") or two
    # ("separate"). None: one sublayer after the other
    parallel: Literal["shared", "separate"] | None = None
    # True: feed-forward layers compute act(gate) * up. False: act(up)
    gated: bool = True
    # activation of feed-forward layers; "xielu" has two weights
    activation: Literal[
        "silu", "gelu", "exact_gelu", "quick_gelu", "relu", "squared_relu", "xielu"
    ] = "silu"
    # width of a vector per token that each layer gets in addition to the residual
    # stream. None: no such vector
    layer_input: int | None = None
    # rows of the table of these vectors. None: vocab_size
    layer_input_vocab: int | None = None
    # multiply each layer's result by a constant of the checkpoint
    layer_scale: bool = False
    experts: int | None = None  # number of experts in a feed-forward layer with experts
    experts_per_token: int = 1  # number of experts that a router chooses for each token
    expert_ff: int | None = None  # width inside an expert
    expert_bias: bool = False  # give the matrices of experts biases
    # upper bound of an expert's gate; the values that the gate multiplies are bounded
    # by ± this. None: no bounds
    gate_limit: float | None = None
    up_plus_one: bool = False  # an expert's gate multiplies up + 1
    # scores of experts: "softmax" or "sigmoid" of the router's logits; "chosen":
    # softmax over the chosen experts; "near": softmax over each chosen expert and the
    # lower ones that are near it
    router_scores: Literal["softmax", "sigmoid", "chosen", "near"] = "softmax"
    # for "near": half of the relative distance within which logits are near
    router_nearness: float = 0.01
    # normalise the scores of the chosen experts so that they sum to 1
    router_renormalised: bool = False
    router_scale: float = 1.0  # factor of the chosen experts' scores
    # scores multiply the inputs of experts, not their results
    router_scales_inputs: bool = False
    router_bias: bool = False  # give the router's logits a bias
    # give scores a bias that only the choice of experts reads
    router_correction: bool = False
    # number of groups of experts; experts are chosen from the best groups
    router_groups: int = 1
    router_groups_kept: int = 1  # number of best groups from which experts are chosen
    # number of best scores of a group whose sum is the group's score
    router_group_best: int = 1
    # factor of the loss that spreads tokens evenly over experts. None: the checkpoint's
    # factor if its config sets output_router_logits, else 0
    router_aux_loss_coef: float | None = None
    # width of an expert that every token uses. None: no such expert
    shared_ff: int | None = None
    shared_gate: bool = False  # multiply the shared expert's result by a sigmoid gate
    norm_eps: float = 1e-6  # number that is added to the mean square in every norm
    dtype: str = "float32"  # dtype of activations and matrix products
    # dtype of frozen weights and of the weights that a run saves in model/. Trained
    # weights always have float32 masters
    param_dtype: str = "float32"
    # implementation of attention. None: "xla"
    attention: Literal["xla", "cudnn"] | None = None
    # rank of the adapters of frozen matrices. 0: no adapters. None: rank of the adapter
    # that training starts from, else 0
    lora_rank: int | None = None
    lora_alpha: float = 16.0  # adapters are multiplied by this / lora_rank
    # matrices of a block that get adapters, among "query", "key", "value", "output",
    # "gate", "up" and "down"
    lora_targets: tuple[str, ...] = ("query", "key", "value", "output")
    lora_head: bool = False  # give the head an adapter too
    # "embed" and "head": matrices that are trained whole and saved with the adapters
    lora_saved: tuple[str, ...] = ()
    # store frozen matrices as codes of 4 bits ("nf4") or 8 bits ("int8") per weight;
    # each layer is decoded when it is used. None: frozen matrices have param_dtype
    base: Literal["nf4", "int8"] | None = None
    # matrices of blocks that are stored as codes, by the names of lora_targets. None:
    # all. If the head is not tied, "embedding" is possible too, always with 8 bits
    base_targets: tuple[str, ...] | None = None
    # matrices of single layers that are not stored as codes, as "LAYER.MATRIX"
    base_plain: tuple[str, ...] = ()
    # nf4: store scales as codes of 8 bits too (double quantisation). False: float32
    # scales
    base_double: bool = True

    def __post_init__(self):
        """Raise a ValueError that names a field whose size cannot be built."""
        check_numbers(self, RANGES)
        check_choices(self)
        for name in ("dtype", "param_dtype"):
            known = getattr(self, name) in DTYPES
            check_field(self, name, known, f"one of {', '.join(map(repr, DTYPES))}")
        divides = self.heads % self.kv_heads == 0
        check_field(self, "kv_heads", divides, f"a divisor of heads={self.heads}")
        check_field(self, "head_dim", self.head_dim % 2 == 0, "even (RoPE)")
        self._check_kinds()
        self._check_rope()
        self._check_norms()
        self._check_attention()
        self._check_experts()
        self._check_mixers()
        self._check_global()
        self._check_reuse()
        self._check_lora()

    def _check_lora(self):
        rank, head, saved = self.lora_rank, self.lora_head, self.lora_saved
        for name, known in (
            ("lora_targets", TARGETS), ("lora_saved", tuple(SAVED)),
            ("base_targets", (*BASE_TARGETS, EMBEDDING)),
        ):  # fmt: skip
            unknown = [x for x in getattr(self, name) or () if x not in known]
            if unknown:
                raise ValueError(
                    f"ModelConfig.{name} must be among {', '.join(known)}, got "
                    f"{unknown[0]!r}{translation(unknown)}"
                )
        alone = self.adapter is not None and self.checkpoint is None
        expected = "left out without checkpoint, the model that it adapts"
        check_field(self, "adapter", not alone, expected)
        name = "lora_head" if head else "lora_saved"
        for problem, said in (
            (
                rank and not (self.lora_targets or head),
                "lora_targets must name a matrix, where lora_head is False",
            ),
            ((head or saved) and not rank, f"{name} needs a lora_rank above 0"),
            (saved and self.tied and self.checkpoint is None, f"lora_saved {UNTIED}"),
            (
                head and "head" in saved,
                "lora_saved has 'head', which cannot have an adapter (lora_head) too",
            ),
        ):
            if problem:
                raise ValueError(f"ModelConfig.{said}")
        self._check_base()
        gate = not self.lora_rank or self.gated or "gate" not in self.lora_targets
        check_field(self, "lora_targets", gate, "without 'gate' with gated=False")

    def _check_base(self):
        is_coded, nf4 = self.base is not None, self.base == "nf4"
        without = "left out without base"
        check_field(
            self, "base_targets", is_coded or self.base_targets is None, without
        )
        check_field(self, "base_plain", is_coded or not self.base_plain, without)
        check_field(
            self, "base_double", nf4 or self.base_double, "True without base='nf4'"
        )
        if self.codes_embedding:
            untied = not self.tied or self.checkpoint is not None
            expected = f"without {EMBEDDING!r} if it is tied to the head"
            check_field(self, "base_targets", untied, expected)
            expected = f"without {EMBEDDING!r} if lora_saved has 'embed'"
            check_field(self, "base_targets", "embed" not in self.lora_saved, expected)
        for entry in self.base_plain:
            layer, _, name = entry.partition(".")
            # A decoder checks the layer: `layers` is not the checkpoint's yet.
            if not re.fullmatch("0|[1-9][0-9]*", layer) or name not in BASE_TARGETS:
                expected = f"of LAYER.MATRIX, as '0.{TARGETS[-1]}'"
                check_field(self, "base_plain", False, expected)

    def _check_rope(self):
        pairs, is_listed = self.rope_width // 2, self.rope_scaling == "listed"
        for name in ("rope_factors", "rope_long_factors"):
            listed = getattr(self, name)
            good = listed is None if not is_listed else listed and len(listed) == pairs
            expected = f"{pairs} numbers with rope_scaling='listed', and else None"
            check_field(self, name, bool(good), expected)
        limited = is_listed or self.rope_scaling == "dynamic"
        expected = "given with rope_scaling='listed' or 'dynamic', and only there"
        check_field(
            self, "rope_limit", limited == (self.rope_limit is not None), expected
        )
        above = self.rope_high_factor >= self.rope_low_factor
        check_field(self, "rope_high_factor", above, "at least rope_low_factor")

    def _check_norms(self):
        for name, problem, why in (
            ("norm_bias", self.norm_bias and self.norm != "layer", "norm='layer'"),
            ("norm_bias", self.norm_bias and not self.norm_scale, "norm_scale"),
            ("norm_offset", self.norm_offset and not self.norm_scale, "norm_scale"),
            ("parallel", self.parallel and not self.pre_norms, "pre_norms"),
            ("parallel", self.parallel and self.post_norms, "post_norms=False"),
            ("head_bias", self.head_bias and self.tied, "tied=False"),
            ("activation", self.activation == "xielu" and self.gated, "gated=False"),
            (
                "qk_norm_last",
                self.qk_norm_last and self.qk_norm_axis == "width",
                "qk_norm_axis='head'",
            ),
        ):
            if problem:
                value = getattr(self, name)
                raise ValueError(f"ModelConfig.{name}={value!r} needs {why}")

    def _check_attention(self):
        if self.attention == "cudnn":
            why = self.reason_without_cudnn()
            check_field(self, "attention", why is None, f"None or 'xla' {why}")

    def reason_without_cudnn(self) -> str | None:
        """The setting that cuDNN's attention does not support; None if it runs."""
        for problem, why in (
            (self.attention_softcap is not None, "with attention_softcap"),
            (self.sinks, "with sinks"),
            (self.dtype == "float32", "with dtype='float32'"),
            (self.rotated_width is not None, "with latent attention"),
        ):
            if problem:
                return why
        return None

    def _check_experts(self):
        if self.experts is None:
            without = "left out where feed_forwards has no 'experts'"
            nothing = not self.router_aux_loss_coef or self.checkpoint is not None
            check_field(self, "router_aux_loss_coef", nothing, without)
            return
        check_field(self, "gated", self.gated, "True, as experts have a gate")
        groups = self.router_groups
        divides = self.experts % groups == 0
        check_field(self, "router_groups", divides, "a divisor of experts")
        for name, most, what in (
            ("experts_per_token", self.experts, "experts"),
            ("router_groups_kept", groups, "router_groups"),
            ("router_group_best", self.experts // groups, "experts of a group"),
        ):
            fits = getattr(self, name) <= most
            check_field(self, name, fits, f"at most {most}, the {what}")
        kept = self.router_groups_kept * self.experts // groups
        enough = groups == 1 or self.experts_per_token <= kept
        expected = f"at most {kept}, the experts of router_groups_kept groups"
        check_field(self, "experts_per_token", enough, expected)
        shared = not self.shared_gate or self.shared_ff is not None
        check_field(self, "shared_ff", shared, "given with shared_gate")

    def _check_mixers(self):
        divides = (self.delta_heads or 0) % self.delta_key_heads == 0
        check_field(self, "delta_key_heads", divides, "a divisor of delta_heads")
        if self.rotated_width is None:
            return
        fits = self.rotated_width <= self.head_dim and self.rotated_width % 2 == 0
        check_field(self, "rotated_width", fits, "even, and at most head_dim")
        without = {"query", "key", "value"} & {*self.lora_targets}
        fits = not (self.lora_rank and without)
        expected = "without 'query', 'key' and 'value' with latent attention"
        check_field(self, "lora_targets", fits, expected)

    def _check_global(self):
        own = self.global_head_dim is not None
        for name in ("global_kv_heads", "rope_proportion", "keys_are_values"):
            fits = own or getattr(self, name) in (None, False)
            check_field(self, name, fits, "left out without global_head_dim")
        fits = self.heads % (self.global_kv_heads or 1) == 0
        check_field(self, "global_kv_heads", fits, "a divisor of heads")
        fits = not own or not self.lora_rank or not self.keys_are_values
        fits = fits or "value" not in self.lora_targets
        expected = "without 'value' with keys_are_values"
        check_field(self, "lora_targets", fits, expected)

    def _check_reuse(self):
        mixers, kinds = self.by_layer("mixers"), self.by_layer("pattern")
        own = mixers.count("attention") if "reuse" in mixers else self.layers
        good = (
            own in (0, self.layers)
            or (  # 0: it is that of a layer
                mixers == ("attention",) * own + ("reuse",) * (self.layers - own)
                and set(kinds[own:]) <= set(kinds[:own])
            )
        )
        expected = (
            "of 'attention' before layers that 'reuse', one of each of their kinds"
        )
        check_field(self, "mixers", good, expected)
        fits = self.reuse_ff is None or own < self.layers
        check_field(self, "reuse_ff", fits, "left out where no layer is 'reuse'")

    def _check_kinds(self):
        kinds = set(self.pattern) <= set(KINDS) and len(self.pattern) > 0
        check_field(self, "pattern", kinds, f"of {', '.join(map(repr, KINDS))}")
        for name, known in (("mixers", MIXERS), ("feed_forwards", FEED_FORWARDS)):
            named = getattr(self, name)
            good = set(named) <= set(known) and len(named) > 0
            expected = f"of {', '.join(map(repr, known))}, at least one"
            check_field(self, name, good, expected)
        for name, field, kinds in (
            ("window", "pattern", ("local", "chunked")),
            ("experts", "feed_forwards", ("experts", "dense_and_experts")),
            ("expert_ff", "feed_forwards", ("experts", "dense_and_experts")),
            ("latent", "mixers", ("latent",)),
            ("rotated_width", "mixers", ("latent",)),
            ("delta_heads", "mixers", ("delta",)),
        ):
            needed = not {*kinds}.isdisjoint(getattr(self, field))
            good = needed == (getattr(self, name) is not None)
            has = f"{field} has {' or '.join(map(repr, kinds))}"
            check_field(self, name, good, f"given where {has}, and only there")

    def by_layer(self, cycle: str) -> tuple[str, ...]:
        """Each layer's entry of `pattern`, `mixers` or `feed_forwards`."""
        entries = getattr(self, cycle)
        return tuple(entries[i % len(entries)] for i in range(self.layers))

    @property
    def codes_embedding(self) -> bool:
        """True if the embedding table is coded."""
        return self.base is not None and EMBEDDING in (self.base_targets or ())

    def base_of(self, name: str) -> str | None:
        """The base in which a block's matrix of this name is coded; None: in none.

        Of all layers but those that `base_plain` names.
        """
        targets = self.base_targets
        return self.base if targets is None or name in targets else None

    def plain_matrices(self, layer: int) -> frozenset[str]:
        """Names of the matrices that `base_plain` has of a layer."""
        split = (entry.partition(".") for entry in self.base_plain)
        return frozenset(name for number, _, name in split if number == str(layer))

    @property
    def rope_width(self) -> int:
        """Numbers of a head that are rotated."""
        width = self.rotated_width
        return int(self.head_dim * self.rope_fraction) if width is None else width

    @property
    def value_width(self) -> int:
        """Numbers of a head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def score_scale(self) -> float:
        """The factor of products of queries and keys."""
        scale = self.attention_scale
        return self.head_dim**-0.5 if scale is None else scale
