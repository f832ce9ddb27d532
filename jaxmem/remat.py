"""What a block's backward pass finds: kept on the device, on the host, or made again.

A block names what it makes (`name`); a `Policy` says what happens to each name. What no
policy names is made again from the block's input. One form works with the host: blocks
in one `jax.lax.scan`, not unrolled, whose input is named first; `scan_blocks` makes it.

    import jax.numpy as jnp
    from jaxmem import remat

    def block(h, weights):
        gate = remat.name(h @ weights["gate"], "gate")
        return h + jnp.tanh(gate) @ weights["down"]

    h = remat.scan_blocks(block, weights, h, "offload_block")

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174; for the host, Rhu et al., "vDNN", 2016, arXiv:1602.08124.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Names that jaxmem's own blocks and heads give.
NAMES: Mapping[str, str] = {
    "block_in": "what a block gets",
    "q": "queries, after their rotation",
    "k": "keys, likewise",
    "v": "values",
    "attn_out": "what attention makes of them, before its output matrix",
    "attn_lse": "logsumexp of attention's scores, where its kernel gives it",
    "gate": "gate of the feed-forward layer, before its activation",
    "up": "what the gate is multiplied with",
    "jaxmem_max": "largest logit of each token, from the head",
    "jaxmem_log_sum": "the rest of its logsumexp",
    "jaxmem_dhidden": "gradient by hidden of a frozen head",
    "jaxmem_exps": "exponentials of the head's logits, under residual_bytes",
}
# Gradients of what a scan offloads are silently wrong there, openxla/xla#46231.
_BROKEN_JAXLIB = ("0.11.0", "0.11.1")
_HOST = jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class Policy:
    """What becomes of names; to be given to `jax.checkpoint(policy=...)`.

    Attributes:
        save: names that stay where they are.
        offload: names that go to `offload_dst` after the forward pass of their block,
            and come back for its backward pass.
        offload_src: memory they are in, "device".
        offload_dst: memory they go to, "pinned_host".
        dots: keep every product without a batch dimension too, under any name or none.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offload_src: str = "device"
    offload_dst: str = "pinned_host"
    dots: bool = False

    def __call__(self, primitive, *avals, **params) -> Any:
        """As jax asks it, for each operation of a block."""
        policies = jax.checkpoint_policies
        if self.dots and policies.dots_with_no_batch_dims_saveable(
            primitive, *avals, **params
        ):
            return True
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src=self.offload_src,
            offload_dst=self.offload_dst,
        )(primitive, *avals, **params)

    def __or__(self, other: "Policy") -> "Policy":
        """Both: what either keeps is kept, on the device where either says so."""
        save = tuple(dict.fromkeys(self.save + other.save))
        offload = tuple(
            k for k in dict.fromkeys(self.offload + other.offload) if k not in save
        )
        places = {(p.offload_src, p.offload_dst) for p in (self, other) if p.offload}
        if len(places) > 1:
            raise ValueError(
                f"both policies offload, between different memories: {places}"
            )
        src, dst = places.pop() if places else (self.offload_src, self.offload_dst)
        return Policy(save, offload, src, dst, self.dots or other.dots)


def policy(
    save: Sequence[str] = (),
    offload: Sequence[str] = (),
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
    *,
    dots: bool = False,
    known: Sequence[str] = tuple(NAMES),
) -> Policy:
    """A `Policy` by names, checked.

    Args:
        save, offload, offload_src, offload_dst, dots: as in `Policy`.
        known: names that blocks give; for blocks of your own, what you call them.

    Raises:
        ValueError: a name that is not known or is both saved and offloaded, a memory
            that is none.

    >>> from jaxmem import remat
    >>> remat.policy(save=["attn_out"], offload=["block_in"]).offload
    ('block_in',)
    """
    for kind, names in (("save", save), ("offload", offload)):
        if isinstance(names, str):
            raise ValueError(f"{kind} must be a sequence of names, got {names!r}")
        unknown = [k for k in names if k not in known]
        if unknown:
            raise ValueError(
                f"{kind} has names that no block gives: {', '.join(unknown)}; known "
                f"are {', '.join(known)}"
            )
    both = sorted(set(save) & set(offload))
    if both:
        raise ValueError(f"save and offload both have {', '.join(both)}")
    memories = {"device", "pinned_host"}
    if {offload_src, offload_dst} != memories:
        raise ValueError(
            "offload_src and offload_dst must be 'device' and 'pinned_host', or the "
            f"other way round, got {offload_src!r} and {offload_dst!r}"
        )
    return Policy(tuple(save), tuple(offload), offload_src, offload_dst, dots)


_ATTENTION = ("q", "k", "v", "attn_out", "attn_lse")
# None: no rematerialisation at all, everything is kept.
PRESETS: Mapping[str, Policy | None] = {
    "none": None,
    "full": Policy(),
    "dots": Policy(dots=True),
    "save_attention": Policy(save=_ATTENTION),
    "offload_block": Policy(offload=("block_in",)),
    "offload_attention": Policy(offload=("block_in", *_ATTENTION)),
}


def preset(name: str) -> Policy | None:
    """A policy by its name.

    none: everything is kept. full: blocks are made again from their inputs. dots: their
    products are kept. save_attention: what attention needs and makes is kept.
    offload_block: as full, with the inputs on the host. offload_attention: both on the
    host.

    Raises:
        ValueError: another name; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(
            f"policy must be one of {', '.join(map(repr, PRESETS))}, got {name!r}"
        )
    return PRESETS[name]


def name(x: Any, label: str) -> Any:
    """x, known to policies by this label; a pytree's leaves share it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, label), x)


def block(
    fn: Callable, policy: Policy | str | None, *, scanned: bool = True
) -> Callable:
    """fn whose backward pass finds what the policy says.

    Args:
        fn: (h, *rest) -> anything; h is named "block_in" for it.
        policy: a `Policy`, a preset's name, or None for no rematerialisation.
        scanned: whether it runs inside `jax.lax.scan`, where XLA cannot merge what is
            made again with what was made; outside, a barrier keeps them apart.

    Raises:
        ValueError: a preset that does not exist, or offloading outside of a scan, which
            XLA for GPUs undoes (the copies to the host are delayed until they come
            back).
        RuntimeError: offloading on a GPU with jaxlib 0.11.0 or 0.11.1.
    """
    chosen = preset(policy) if isinstance(policy, str) else policy
    if chosen is None:
        return fn
    if chosen.offload:
        _refuse_broken_jaxlib()
        if not scanned:
            raise ValueError(
                "policy offloads, which needs blocks in one jax.lax.scan: use "
                "remat.scan_blocks, or a policy that saves instead"
            )

    def named(h, *rest):
        return fn(name(h, "block_in"), *rest)

    return jax.checkpoint(named, policy=chosen, prevent_cse=not scanned)


def scan_blocks(
    fn: Callable,
    params: Any,
    h: Any,
    policy: Policy | str | None,
    *,
    group: int = 1,
    last: Any = None,
) -> Any:
    """h after all blocks, one scan over them.

        h_(i+1) = fn(h_i, params_i),   i = 0 … L-1

    Args:
        fn: (h, params of a block) -> h of the same shape and type.
        params: pytree with a leading axis of L blocks.
        h: array or pytree.
        policy: as in `block`, for each group.
        group: blocks that are made again together, from the first one's input: fewer
            inputs to keep, more alive while a group is gone back through. Divides L.
        last: parameters of one more group of blocks, [group, ...], that runs after the
            scan with its input on the device: nothing could hide its way to the host
            and back. Its own tree, because slicing a stacked one copies it.

    **Memory** for the backward pass: L/group inputs, on the device or the host, what
    the policy saves of each block, and all of one group (two where copies from the host
    overlap, `compiler_options`).

    Raises:
        ValueError: also a group that does not divide L.

    >>> import jax.numpy as jnp
    >>> from jaxmem import remat
    >>> h = jnp.ones(2)
    >>> remat.scan_blocks(lambda h, w: h * w, jnp.array([2.0, 3.0]), h, "full")
    Array([6., 6.], dtype=float32)
    """
    lengths = {len(leaf) for leaf in jax.tree.leaves(params)}
    if len(lengths) != 1:
        raise ValueError(
            "params must have one leading axis of blocks in all leaves, got lengths "
            f"{sorted(lengths)}"
        )
    (length,) = lengths
    if group < 1 or length % group:
        raise ValueError(f"group must divide the {length} blocks, got {group}")

    def run(h, some):
        for i in range(group):
            h = fn(h, jax.tree.map(lambda leaf, i=i: leaf[i], some))
        return h

    grouped = jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (length // group, group, *leaf.shape[1:])),
        params,
    )
    body = block(run, policy)
    h, _ = jax.lax.scan(lambda h, some: (body(h, some), None), h, grouped)
    if last is None:
        return h
    chosen = preset(policy) if isinstance(policy, str) else policy
    if chosen is not None:  # what went to the host can stay, of the last group
        chosen = Policy(chosen.save, dots=chosen.dots)
    return block(run, chosen, scanned=False)(h, last)


def compiler_options(policy: Policy | str | None) -> dict[str, Any]:
    """For `jax.jit(..., compiler_options=)` of a step on a GPU that offloads.

    Copies from the host start a block ahead, at the price of one more on the device;
    and XLA's own rematerialisation, which takes host memory for the device's, is off.
    """
    chosen = preset(policy) if isinstance(policy, str) else policy
    if chosen is None or not chosen.offload:
        return {}
    return {
        "xla_gpu_enable_pipelined_host_offloading": True,
        "xla_disable_hlo_passes": "rematerialization",
    }


def host_bytes(fn: Callable, *args) -> int:
    """Bytes that one call sends to the host, by its jaxpr: nothing is compiled or run.

    Loops count as often as they run; of a loop without a known end, one turn.
    """
    return _host_bytes(jax.make_jaxpr(fn)(*args).jaxpr)


def verify(
    compiled: jax.stages.Compiled,
    promised: int,
    *,
    without: jax.stages.Compiled | None = None,
) -> None:
    """Raise unless a program for a GPU offloads what was promised.

    XLA drops offloading in silence where a program has not the one form that works.

    Args:
        compiled: the step.
        promised: bytes, as `host_bytes` counts them.
        without: the same step with nothing offloaded; compiled must take less memory on
            the device.

    Raises:
        RuntimeError: fewer bytes on the host than 95% of what was promised, no less
            memory on the device than without, jaxlib 0.11.0 or 0.11.1.
        ValueError: a program for a CPU, which has no host beside it.
    """
    text = compiled.as_text() or ""
    account: Any = compiled.memory_analysis()
    if jax.default_backend() == "cpu":
        raise ValueError("compiled is for a CPU, where nothing can be offloaded")
    _refuse_broken_jaxlib()
    there = account.host_temp_size_in_bytes
    if there < 0.95 * promised or not re.search(r"S\(5\)", text):
        raise RuntimeError(
            f"the policy promises {promised:,} bytes on the host, the program has "
            f"{there:,}: is every block in one jax.lax.scan (not unrolled, not "
            "nested), and what is offloaded named inside it?"
        )
    if without is not None:
        other: Any = without.memory_analysis()
        here, before = account.temp_size_in_bytes, other.temp_size_in_bytes
        if here >= before:
            raise RuntimeError(
                f"offloading leaves {here:,} bytes of temporaries on the device, no "
                f"less than the {before:,} without it"
            )


def _refuse_broken_jaxlib():
    import importlib.metadata

    version = importlib.metadata.version("jaxlib")
    if version in _BROKEN_JAXLIB and jax.default_backend() == "gpu":
        raise RuntimeError(
            f"jaxlib {version} gives wrong gradients where a scan offloads on a GPU "
            "(openxla/xla#46231); install jaxlib 0.11.2 or newer"
        )


def _host_bytes(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            avals = [x.aval for x in equation.outvars]
            total += sum(
                x.size * x.dtype.itemsize for x in avals if x.memory_space == _HOST
            )
        times = equation.params.get("length", 1)
        times = times if equation.primitive.name == "scan" else 1
        total += times * sum(map(_host_bytes, _inner(equation.params.values())))
    return total


def _inner(params):
    """The jaxprs among an equation's parameters."""
    for value in params:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item
