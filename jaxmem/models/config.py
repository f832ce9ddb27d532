"""The configuration of a decoder: sizes, adapters, and its architecture by subject."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxmem.base import fields, user_code
from jaxmem.base.fields import Must, check, check_field
from jaxmem.base.ranges import Range, integers, reals
from jaxmem.base.rules import SettingsRule, must, needs
from jaxmem.models.architecture import (
    COUNT,
    INT32,
    POSITIVE,
    WIDTH,
    DeltaConfig,
    EmbeddingConfig,
    ExpertsConfig,
    LatentConfig,
    LogitsConfig,
    MLPConfig,
    NormConfig,
    QKNormConfig,
    ResidualConfig,
    RopeConfig,
    RouterConfig,
    SelfAttentionConfig,
)

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


def _quoted(words: Iterable[str], by: str = ", ") -> str:
    return by.join(map(repr, words))


_DTYPE = Must(f"one of {_quoted(DTYPES)}", DTYPES.__contains__)


def _given(setting: str, cycle: str, *kinds: str) -> SettingsRule:
    """KEY must be given where a cycle of layers has one of these kinds, else not."""
    return must(
        setting,
        f"given where {cycle} has {_quoted(kinds, ' or ')}, and only there",
        lambda model: (
            {*kinds}.isdisjoint(getattr(model, cycle))
            == (fields.value_of(model, setting) is None)
        ),
    )


def _of_global_heads(setting: str) -> SettingsRule:
    """KEY must be left out unless heads of global layers have a width of their own."""
    return must(
        setting,
        "left out without self_attn.global_head_dim",
        lambda model: model.has_global_heads or not fields.value_of(model, setting),
    )


def _without(model: Any, *names: str) -> bool:
    """True unless one of these matrices gets an adapter."""
    return not model.lora_rank or {*names}.isdisjoint(model.lora_targets)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes, types and adapters of a `Decoder`, and its architecture by subject."""

    checkpoint: Annotated[
        str | None,
        "weights to start from: a directory with config.json and safetensors, or a "
        "model of the Hub, OWNER/NAME or hf://OWNER/NAME@REVISION. Its config "
        "determines the sizes. None: random weights",
    ] = None
    adapter: Annotated[
        str | None,
        "LoRA adapter that is trained further, with its rank, alpha and matrices: a "
        "directory in PEFT's layout for model.checkpoint, or the directory of a LoRA "
        "run. model.checkpoint may also name the adapter instead of its base",
    ] = None
    factory: Annotated[
        str | None,
        user_code.Named(),
        'function of (config, rngs), "file.py:function" or "package.module:function", '
        "that makes your own Flax NNX module (jaxmem.models.own_model); only the "
        "tokenizer of model.checkpoint is then read. None: jaxmem's decoder",
    ] = None
    layers: Annotated[int, integers(above=0, limit=10_000), "number of blocks"] = 4
    hidden: Annotated[
        int, integers(above=0, limit=2**20), "width of the residual stream"
    ] = 160
    ff: Annotated[int, WIDTH, "width inside the feed-forward layer"] = 448
    heads: Annotated[int, COUNT, "number of query heads"] = 4
    kv_heads: Annotated[
        int, COUNT, "number of key and value heads; divides model.heads"
    ] = 2
    head_dim: Annotated[
        int, COUNT, "width of one head; even, because RoPE rotates pairs"
    ] = 40
    vocab_size: Annotated[
        int | None,
        INT32,
        "entries of the vocabulary. None: as many as the tokenizer has",
    ] = None
    pad_row: Annotated[
        int | None,
        integers(0, limit=2**31 - 1),
        "row of embedding tables whose look-ups have no gradient; a tied head still "
        "trains it. None: no such row, or a checkpoint's pad_token_id if its family in "
        "transformers has this rule",
    ] = None
    pattern: Annotated[
        tuple[str, ...],
        'kinds of layers, repeated as a cycle: "global" attends to its document, '
        '"local" to a window, "chunked" to its chunk of the document; "unrotated" is '
        "global without rotary embedding",
    ] = ("global",)
    mixers: Annotated[
        tuple[str, ...],
        'kinds of token mixers, repeated as a cycle: "attention", "latent" or "delta". '
        'The last layers may be "reuse": they attend to keys and values of the last '
        "layer of the same kind that computes its own",
    ] = ("attention",)
    feed_forwards: Annotated[
        tuple[str, ...],
        'kinds of feed-forward layers, repeated as a cycle: "dense", "experts" or '
        '"dense_and_experts"',
    ] = ("dense",)
    tied: Annotated[
        bool,
        "True: the head uses the embedding table as its matrix",
    ] = True
    dtype: Annotated[
        str,
        _DTYPE,
        "dtype of activations and matrix products",
    ] = "float32"
    param_dtype: Annotated[
        str,
        _DTYPE,
        "dtype of frozen weights and of the weights that a run saves in model/. "
        "Trained weights always have float32 masters",
    ] = "float32"
    attention: Annotated[
        Literal["xla", "cudnn"] | None, 'implementation of attention. None: "xla"'
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        reals(0),
        "factor of the loss that spreads tokens evenly over experts. None: the "
        "checkpoint's factor if its config sets output_router_logits, else 0",
    ] = None
    lora_rank: Annotated[
        int | None,
        integers(0, limit=2**16),
        "rank of the adapters of frozen matrices. 0: no adapters. None: rank of the "
        "adapter that training starts from, else 0",
    ] = None
    lora_alpha: Annotated[
        float, POSITIVE, "adapters are multiplied by this / lora_rank"
    ] = 16.0
    lora_targets: Annotated[
        tuple[str, ...],
        'matrices of a block that get adapters, among "query", "key", "value", '
        '"output", "gate", "up" and "down"',
    ] = ("query", "key", "value", "output")
    lora_head: Annotated[bool, "give the head an adapter too"] = False
    lora_saved: Annotated[
        tuple[str, ...],
        '"embed" and "head": matrices that are trained whole and saved with the '
        "adapters",
    ] = ()
    base: Annotated[
        Literal["nf4", "int8"] | None,
        'store frozen matrices as codes of 4 bits ("nf4") or 8 bits ("int8") per '
        "weight; each layer is decoded when it is used. None: frozen matrices have "
        "param_dtype",
    ] = None
    base_targets: Annotated[
        tuple[str, ...] | None,
        "matrices of blocks that are stored as codes, by the names of lora_targets. "
        'None: all. If the head is not tied, "embedding" is possible too, always with '
        "8 bits",
    ] = None
    base_plain: Annotated[
        tuple[str, ...],
        'matrices of single layers that are not stored as codes, as "LAYER.MATRIX"',
    ] = ()
    base_double: Annotated[
        bool,
        "nf4: store scales as codes of 8 bits too (double quantisation). False: "
        "float32 scales",
    ] = True
    rope: RopeConfig = RopeConfig()
    norm: NormConfig = NormConfig()
    qk_norm: QKNormConfig = QKNormConfig()
    self_attn: SelfAttentionConfig = SelfAttentionConfig()
    mlp: MLPConfig = MLPConfig()
    experts: ExpertsConfig = ExpertsConfig()
    router: RouterConfig = RouterConfig()
    delta: DeltaConfig = DeltaConfig()
    latent: LatentConfig = LatentConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    residual: ResidualConfig = ResidualConfig()
    logits: LogitsConfig = LogitsConfig()

    RULES = (
        must(
            "kv_heads",
            "a divisor of heads={heads}",
            lambda model: model.heads % model.kv_heads == 0,
        ),
        must("head_dim", "even (RoPE)", lambda model: model.head_dim % 2 == 0),
        _given("self_attn.window", "pattern", "local", "chunked"),
        _given("experts.count", "feed_forwards", "experts", "dense_and_experts"),
        _given("experts.ff", "feed_forwards", "experts", "dense_and_experts"),
        _given("latent.kv_rank", "mixers", "latent"),
        _given("latent.rope_head_dim", "mixers", "latent"),
        _given("delta.heads", "mixers", "delta"),
        needs("residual.parallel", "norm.pre", lambda model: model.norm.pre),
        needs(
            "residual.parallel", "norm.post=False", lambda model: not model.norm.post
        ),
        needs("logits.bias", "tied=False", lambda model: not model.tied),
        _of_global_heads("self_attn.global_kv_heads"),
        _of_global_heads("rope.proportion"),
        _of_global_heads("self_attn.keys_are_values"),
        must(
            "self_attn.global_kv_heads",
            "a divisor of heads",
            lambda model: model.heads % (model.self_attn.global_kv_heads or 1) == 0,
        ),
        must(
            "lora_targets",
            "without 'value' with self_attn.keys_are_values",
            lambda model: (
                not model.self_attn.keys_are_values or _without(model, "value")
            ),
        ),
        must(
            "lora_targets",
            "without 'query', 'key' and 'value' with latent attention",
            lambda model: (
                not model.is_latent or _without(model, "query", "key", "value")
            ),
        ),
        must(
            "lora_targets",
            "without 'gate' with mlp.gated=False",
            lambda model: model.mlp.gated or _without(model, "gate"),
        ),
        must(
            "adapter",
            "left out without checkpoint, the model that it adapts",
            lambda model: model.adapter is None or model.checkpoint is not None,
        ),
        must(
            "base_targets",
            "left out without base",
            lambda model: model.base is not None or model.base_targets is None,
        ),
        must(
            "base_plain",
            "left out without base",
            lambda model: model.base is not None or not model.base_plain,
        ),
        must(
            "base_double",
            "True without base='nf4'",
            lambda model: model.base == "nf4" or model.base_double,
        ),
        must(
            "base_targets",
            f"without {EMBEDDING!r} if it is tied to the head",
            lambda model: (
                not model.codes_embedding
                or not model.tied
                or model.checkpoint is not None
            ),
        ),
        must(
            "base_targets",
            f"without {EMBEDDING!r} if lora_saved has 'embed'",
            lambda model: not model.codes_embedding or "embed" not in model.lora_saved,
        ),
    )

    def __post_init__(self):
        """Raise a ValueError that names a setting that cannot be built."""
        check(self)
        self._check_cycles()
        self._check_rope()
        self._check_attention()
        self._check_experts()
        self._check_reuse()
        self._check_adapters()
        self._check_plain()

    def _check_cycles(self):
        for name, known, end in (
            ("pattern", KINDS, ""),
            ("mixers", MIXERS, ", at least one"),
            ("feed_forwards", FEED_FORWARDS, ", at least one"),
        ):
            kinds = getattr(self, name)
            good = set(kinds) <= set(known) and len(kinds) > 0
            check_field(self, name, good, f"of {_quoted(known)}{end}")

    def _check_adapters(self):
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

    def _check_plain(self):
        for entry in self.base_plain:
            layer, _, name = entry.partition(".")
            # A decoder checks the layer: `layers` is not the checkpoint's yet.
            if not re.fullmatch("0|[1-9][0-9]*", layer) or name not in BASE_TARGETS:
                expected = f"of LAYER.MATRIX, as '0.{TARGETS[-1]}'"
                check_field(self, "base_plain", False, expected)

    def _check_rope(self):
        width = self.latent.rope_head_dim
        if width is not None:
            fits = width <= self.head_dim and width % 2 == 0
            expected = "even, and at most head_dim"
            check_field(self, "latent.rope_head_dim", fits, expected)
        pairs, is_listed = self.rope_width // 2, self.rope.scaling == "listed"
        for name in ("rope.short_factors", "rope.long_factors"):
            listed = fields.value_of(self, name)
            good = listed is None if not is_listed else listed and len(listed) == pairs
            expected = f"{pairs} numbers with rope.scaling='listed', and else None"
            check_field(self, name, bool(good), expected)

    def _check_attention(self):
        if self.attention == "cudnn":
            why = self.reason_without_cudnn()
            check_field(self, "attention", why is None, f"None or 'xla' {why}")

    def reason_without_cudnn(self) -> str | None:
        """The setting that cuDNN's attention does not support; None if it runs."""
        for problem, why in (
            (self.self_attn.softcap is not None, "with self_attn.softcap"),
            (self.self_attn.sinks, "with self_attn.sinks"),
            (self.dtype == "float32", "with dtype='float32'"),
            (self.is_latent, "with latent attention"),
        ):
            if problem:
                return why
        return None

    def _check_experts(self):
        experts, router = self.experts, self.router
        if experts.count is None:
            without = "left out where feed_forwards has no 'experts'"
            nothing = not self.router_aux_loss_coef or self.checkpoint is not None
            check_field(self, "router_aux_loss_coef", nothing, without)
            return
        expected = "True, as experts have a gate"
        check_field(self, "mlp.gated", self.mlp.gated, expected)
        divides = experts.count % router.groups == 0
        check_field(self, "router.groups", divides, "a divisor of experts.count")
        of_group = experts.count // router.groups
        for name, most, what in (
            ("experts.per_token", experts.count, "experts"),
            ("router.groups_kept", router.groups, "router.groups"),
            ("router.group_best", of_group, "experts of a group"),
        ):
            fits = fields.value_of(self, name) <= most
            check_field(self, name, fits, f"at most {most}, the {what}")
        kept = router.groups_kept * of_group
        enough = router.groups == 1 or experts.per_token <= kept
        expected = f"at most {kept}, the experts of router.groups_kept groups"
        check_field(self, "experts.per_token", enough, expected)
        shared = not experts.shared_gate or experts.shared_ff is not None
        expected = "given with experts.shared_gate"
        check_field(self, "experts.shared_ff", shared, expected)

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
        fits = self.mlp.reuse_ff is None or own < self.layers
        check_field(self, "mlp.reuse_ff", fits, "left out where no layer is 'reuse'")

    def replaced(self, values: Mapping[str, Any]) -> "ModelConfig":
        """The config with other values, by key: {"layers": 2, "rope.theta": 1e6}."""
        return fields.build(ModelConfig, values, self)

    def by_layer(self, cycle: str) -> tuple[str, ...]:
        """Each layer's entry of `pattern`, `mixers` or `feed_forwards`."""
        entries = getattr(self, cycle)
        return tuple(entries[i % len(entries)] for i in range(self.layers))

    @property
    def codes_embedding(self) -> bool:
        """True if the embedding table is coded."""
        return self.base is not None and EMBEDDING in (self.base_targets or ())

    @property
    def has_global_heads(self) -> bool:
        """True if heads of global layers have a width of their own."""
        return self.self_attn.global_head_dim is not None

    @property
    def is_latent(self) -> bool:
        """True if a layer has latent attention."""
        return self.latent.rope_head_dim is not None

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
        width = self.latent.rope_head_dim
        return int(self.head_dim * self.rope.fraction) if width is None else width

    @property
    def value_width(self) -> int:
        """Numbers of a head's values."""
        width = self.latent.value_head_dim
        return self.head_dim if width is None else width

    @property
    def score_scale(self) -> float:
        """The factor of products of queries and keys."""
        scale = self.self_attn.scale
        return self.head_dim**-0.5 if scale is None else scale


def range_of(path: str) -> Range | None:
    """The range of a number of `ModelConfig`, by its path; None for other settings."""
    return fields.settings(ModelConfig)[path].fact(Range)
