"""A stack of decoder blocks without embedding or head: what policies are measured on.

Weights are stacked on a leading axis of blocks; blocks that come after the scan have
trees of their own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workers
from jaxmem import remat


@dataclasses.dataclass(frozen=True)
class Sizes:
    """By default 24 blocks, 4.9 billion weights in all, and 4 rows of 4,096 tokens."""

    layers: int = 24
    width: int = 4096
    ff: int = 11008
    heads: int = 32
    rows: int = 4
    length: int = 4096
    attention: str = "cudnn"

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one block's."""
        d, ff = self.width, self.ff
        square = dict.fromkeys(("query", "key", "value", "output"), (d, d))
        norms = {"attention_norm": (d,), "feed_forward_norm": (d,)}
        return norms | square | {"gate": (d, ff), "up": (d, ff), "down": (ff, d)}


SIZES = {
    "deep": Sizes(),
    "middle": Sizes(6, rows=2),
    "small": Sizes(8, 2048, 5504, 16, 2, 4096),
    "tiny": Sizes(4, 64, 160, 4, 2, 32, "xla"),  # for a CPU
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A policy, and how its stack is compiled; `read` makes one from its text."""

    policy: remat.Policy | None
    group: int = 1
    last: int = 0  # blocks after the scan, with weights of their own
    last_policy: remat.Policy | None = None
    rows: int = 1  # times as many rows
    options: tuple[tuple[str, Any], ...] = ()  # of the compiler, over jaxmem's

    @property
    def is_large(self) -> bool:
        """True if nothing else may be on the device while it runs."""
        return self.rows > 1 or (self.policy is None and not self.last)


def read(text: str) -> Variant:
    """ "offload_block last=2:none save=q,k xla_gpu_flag=True" and the like.

    The first word is a preset. save= and offload= add names, last=N keeps the last N
    blocks whole; last=N:PRESET puts N blocks after the scan, their weights apart.
    group= and rows= are numbers; xla_… are compiler options.
    """
    preset, *words = text.split()
    policy, taken = remat.preset(preset), {}
    options = []
    for word in words:
        key, _, value = word.partition("=")
        if key in ("save", "offload"):
            more = remat.Policy(**{key: value.split(",")})
            policy = more if policy is None else policy | more
        elif key == "last" and ":" in value:
            n, _, kept = value.partition(":")
            taken |= {"last": int(n), "last_policy": remat.preset(kept)}
        elif key == "last":
            if policy is None:
                raise ValueError(f"{text!r}: 'none' keeps all blocks whole")
            policy |= remat.Policy(last=int(value))
        elif key in ("group", "rows"):
            taken[key] = int(value)
        elif key.startswith("xla_"):
            options.append((key, workers.value_of(value)))
        else:
            raise ValueError(f"{text!r}: {word!r} is no option of a variant")
    return Variant(policy, **taken, options=tuple(options))


def text_of(policy: remat.Policy | None) -> str:
    """The text from which `read` makes a variant of this policy."""
    last = [] if policy is None or not policy.last else [f"last={policy.last}"]
    if policy is not None:
        policy = dataclasses.replace(policy, last=0)
    for name, known in remat.PRESETS.items():
        if policy == known:
            return " ".join([name, *last])
    assert policy is not None
    words = ["dots" if policy.dots else "full"]
    for key in ("save", "offload"):
        names = getattr(policy, key)
        words += [f"{key}={','.join(names)}"] if names else []
    return " ".join([*words, *last])


def compiler_options(variant: Variant) -> dict[str, Any]:
    """jaxmem's for the policy, and the variant's own: xla_…=default removes one."""
    made = {"xla_disable_hlo_passes": "rematerialization"}
    made |= remat.compiler_options(variant.policy) | dict(variant.options)
    return {k: value for k, value in made.items() if value != "default"}


def initial(sizes: Sizes, last: int = 0):
    """(weights of the scan, of the blocks after it), the same for any `last`."""
    names = sizes.weights.items()

    def of_block(i):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i), len(names))
        return {k: _draw(key, s) for key, (k, s) in zip(keys, names, strict=True)}

    n = sizes.layers - last
    draw = jax.jit(jax.vmap(of_block))
    after = draw(jnp.arange(n, sizes.layers)) if last else {}
    apart = [{k: x[i] for k, x in after.items()} for i in range(last)]
    return draw(jnp.arange(n)), apart


def _draw(key, shape):
    if len(shape) == 1:
        return jnp.ones(shape, jnp.bfloat16)
    scale = 0.5 * shape[0] ** -0.5
    return (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(jnp.bfloat16)


def hidden(sizes: Sizes, times: int = 1):
    """Input of the first block, [rows, length, width]."""
    shape = sizes.rows * times, sizes.length, sizes.width
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def block(sizes: Sizes, h, w):
    """One pre-norm block, its values named."""
    rows, length, width = h.shape
    x = _norm(h, w["attention_norm"])
    query, key, value = (
        remat.name((x @ w[name]).reshape(rows, length, sizes.heads, -1), name[0])
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=sizes.attention
    )
    mixed = mixed.reshape(rows, length, width)
    if sizes.attention != "cudnn":  # policies know its kernel: "attn_lse"
        mixed = remat.name(mixed, "attn_out")
    h = h + mixed @ w["output"]
    x = _norm(h, w["feed_forward_norm"])
    gate, up = remat.name(x @ w["gate"], "gate"), remat.name(x @ w["up"], "up")
    return h + (jax.nn.silu(gate) * up) @ w["down"]


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def step(sizes: Sizes, variant: Variant):
    """(weights, h) -> (weights after a step of SGD, loss, norms of each gradient)."""
    layer = functools.partial(block, sizes)

    def loss(weights, h):
        stacked, apart = weights
        h = remat.scan_blocks(layer, stacked, h, variant.policy, group=variant.group)
        after = remat.block(layer, variant.last_policy, scanned=False)
        for w in apart:
            h = after(h, w)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    def run(weights, h):
        value, slopes = jax.value_and_grad(loss)(weights, h)
        moved = jax.tree.map(
            lambda w, g: (w - 1e-6 * g).astype(w.dtype), weights, slopes
        )
        return moved, value, _norms(slopes)

    return run


def _norms(slopes):
    """Euclidean norms [layers] of every kind of weight."""

    def norm(g, axes):
        return jnp.sqrt(jnp.sum(jnp.square(g.astype(jnp.float32)), axes))

    stacked, last = slopes
    first = jax.tree.map(lambda g: norm(g, tuple(range(1, g.ndim))), stacked)
    rest = [jax.tree.map(lambda g: norm(g, None)[None], tree) for tree in last]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), first, *rest)


def trace(sizes: Sizes, variant: Variant) -> jax.stages.Traced:
    """The step, traced; the weights given are consumed."""
    n = sizes.layers - variant.last

    def shapes(*leading):
        return {
            name: jax.ShapeDtypeStruct((*leading, *shape), jnp.bfloat16)
            for name, shape in sizes.weights.items()
        }

    rows = sizes.rows * variant.rows
    h = jax.ShapeDtypeStruct((rows, sizes.length, sizes.width), jnp.bfloat16)
    weights = shapes(n), [shapes() for _ in range(variant.last)]
    jitted = jax.jit(
        step(sizes, variant), donate_argnums=0,
        compiler_options=compiler_options(variant),
    )  # fmt: skip
    return jitted.trace(weights, h)
