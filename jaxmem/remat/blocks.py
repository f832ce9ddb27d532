"""Blocks whose backward pass finds what a policy says; scans of them."""

import contextvars
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem import devices as _devices
from jaxmem.remat import cost as _traced
from jaxmem.remat.policies import NAMES, Policy, policy, preset

# Gradients of what a scan offloads are silently wrong there, openxla/xla#46231.
_BROKEN_JAXLIB = ("0.11.0", "0.11.1")


_Tree = TypeVar("_Tree")


def name(x: _Tree, label: str) -> _Tree:
    """x, known to policies by this label; a pytree's leaves share it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, label), x)


# What is around that which is traced: "loop", where XLA cannot merge what a part of a
# block recomputes with what the forward pass computed; "policy", which decides alone
# what is kept; or "", where only a barrier keeps XLA from merging both.
_around = contextvars.ContextVar("_around", default="")


def recompute(
    fn: Callable, save: Sequence[str] = (), known: Sequence[str] = tuple(NAMES)
) -> Callable:
    """fn whose backward pass keeps its arguments, and recomputes what lies between.

    For a part of a block whose recomputation costs less than what it would keep: a
    norm, say, and the products that read its result. Products whose results only leave
    the part are not recomputed, as no gradient needs them. Inside of a block with a
    policy it is fn itself: the policy decides.

    Args:
        fn: any function of arrays; what it closes over counts as its arguments.
        save: names inside of it that are kept as well.
        known: as in `policy`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import remat
    >>> jax.grad(remat.recompute(lambda x: jnp.sin(jnp.sin(x))))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    chosen = policy(save=save, known=known)
    if _around.get() == "policy":
        return fn
    return jax.checkpoint(fn, policy=chosen, prevent_cse=_around.get() != "loop")


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
    chosen = _chosen(policy)
    if chosen is not None and chosen.offload:
        _refuse_broken_jaxlib()
        if not scanned:
            raise ValueError(
                "policy offloads, which needs blocks in one jax.lax.scan: use "
                "remat.scan_blocks, or a policy that saves instead"
            )

    around = "policy" if chosen is not None else "loop" if scanned else ""

    def named(h, *rest):
        token = _around.set(around)
        try:
            return fn(name(h, "block_in"), *rest)
        finally:
            _around.reset(token)

    if chosen is None:
        return named
    return jax.checkpoint(named, policy=chosen, prevent_cse=not scanned)


def scan_blocks(
    fn: Callable,
    params: Any,
    h: Any,
    policy: Policy | str | None,
    *,
    group: int = 1,
    unroll: bool = False,
) -> Any:
    """h after all blocks: one scan over them, then those that `policy.last` counts.

        h_(i+1) = fn(h_i, params_i),   i = 0 … L-1

    The last blocks are the first to be gone back through. Nothing could hide the way of
    their inputs to the host and back, and what they keep is given back before the
    others' backward pass has made its gradients: the peak need not rise.

    Args:
        fn: (h, params of a block) -> h of the same shape and type.
        params: pytree with a leading axis of L blocks. It is not copied, whatever
            `policy.last` is.
        h: array or pytree.
        policy: as in `block`, for each group; and how many blocks are kept whole.
        group: blocks that are made again together, from the first one's input: fewer
            inputs to keep, more alive while a group is gone back through. Divides
            L - last.
        unroll: trace the blocks one after the other instead. The program is as many
            times as long, and so is its compilation; a loop's costs are gone, which
            initialises the stacks of what it saves, copies into them and out of them.

    **Memory** for the backward pass: (L - last)/group inputs, on the device or the
    host, what the policy saves of each block, and all of one group (two where copies
    from the host overlap, `compiler_options`); at its beginning, all of the last ones.

    Raises:
        ValueError: also a group that does not divide, `policy.last` of L or more, a
            policy that offloads without a loop.

    >>> import jax.numpy as jnp
    >>> from jaxmem import remat
    >>> h = jnp.ones(2)
    >>> remat.scan_blocks(lambda h, w: h * w, jnp.array([2.0, 3.0]), h, "full")
    Array([6., 6.], dtype=float32)
    """
    chosen = _chosen(policy)
    last = 0 if chosen is None else chosen.last
    length = _length(params)
    if not 0 <= last < length:
        raise ValueError(
            f"policy.last must be from 0 to below the {length} blocks, got {last}; to "
            "keep all of them whole, give policy='none'"
        )
    count = length - last
    if group < 1 or count % group:
        raise ValueError(f"group must divide the {count} blocks, got {group}")
    if chosen is not None:
        chosen = dataclasses.replace(chosen, last=0)
    turns, read = params, lambda some: [some]
    if last or group > 1:
        turns, read = _by_number(params, count, group)

    def run(h, turn):
        for some in read(turn):
            h = fn(h, some)
        return h

    body = block(run, chosen, scanned=not unroll)
    h, _ = jax.lax.scan(lambda h, turn: (body(h, turn), None), h, turns, unroll=unroll)
    whole = block(fn, None, scanned=False)
    for i in range(count, length):
        h = whole(h, jax.tree.map(lambda leaf, i=i: leaf[i], params))
    return h


def _length(params):
    lengths = {len(leaf) for leaf in jax.tree.leaves(params)}
    if len(lengths) != 1:
        raise ValueError(
            "params must have one leading axis of blocks in all leaves, got lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _by_number(params, count, group):
    """What to scan over for the first blocks of a stack, and a turn's list of them.

    Slices of the stack are not what is read: XLA would copy them before the loop, as
    large as they are. A turn takes its blocks from the whole stack, by number. But a
    gradient of the whole stack in every turn would cost more; it goes to the turn's
    part of the slices, which are an argument for that alone, and XLA drops them.
    """
    stack = jax.lax.stop_gradient(params)
    slices = jax.tree.map(
        lambda leaf: leaf[:count].reshape(count // group, group, *leaf.shape[1:]),
        params,
    )

    def read(turn):
        start, parts = turn

        def one(i):
            def take(leaf, part):
                value = jax.lax.dynamic_index_in_dim(leaf, start + i, keepdims=False)
                return _with_gradient_of(value, part[i])

            return jax.tree.map(take, stack, parts)

        return [one(i) for i in range(group)]

    return (jnp.arange(0, count, group), slices), read


@jax.custom_jvp
def _with_gradient_of(value, part):
    """value, as if it were part."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _chosen(policy):
    return preset(policy) if isinstance(policy, str) else policy


def compiler_options(
    policy: Policy | str | None, *, unroll: bool = False
) -> dict[str, Any]:
    """For `jax.jit(..., compiler_options=)` of a step on a GPU, by its policy.

    Where results of products are saved in a loop, XLA (jaxlib 0.10.2 to 0.12.0.1) lets
    a product write into the stack of all blocks, and computes it once more for whatever
    else reads it: the option keeps products and slices apart.

    Where something is offloaded, copies from the host start a block ahead, at the price
    of one more input on the device. No CUDA graphs are made, in which kernels and
    copies hold each other up: on one H200 they cost 5% of a step's time. Weights are
    sliced from their stack where they are used and not on streams beside, of which XLA
    has four: on one of them a slice would wait for a copy to the host, and a product
    for it, another 1%. And XLA's own rematerialisation, which takes host memory for the
    device's, is off.

    Args:
        policy: of `scan_blocks`.
        unroll: likewise.
    """
    chosen = _chosen(policy)
    made: dict[str, Any] = {}
    saves = chosen is None or chosen.dots or chosen.save
    if saves and not unroll:
        made["xla_gpu_enable_dynamic_slice_fusion"] = False
    if chosen is not None and chosen.offload:
        made |= {
            "xla_gpu_enable_pipelined_host_offloading": True,
            "xla_gpu_enable_command_buffer": "",
            "xla_disable_hlo_passes": ",".join(
                ["rematerialization", "dynamic-slice-copy-fusion-async-wrapper"]
            ),
        }
    return made


def verify(
    compiled: jax.stages.Compiled,
    promised: int,
    *,
    without: jax.stages.Compiled | None = None,
) -> None:
    """Raise unless a program for a GPU offloads what was promised.

    XLA drops offloading in silence where a program has not the one form that works, and
    computes on the host what is asked of an array there.

    Args:
        compiled: the step.
        promised: bytes, as `host_bytes` counts them.
        without: the same step with nothing offloaded; compiled must take less memory on
            the device.

    Raises:
        RuntimeError: fewer bytes on the host than 95% of what was promised, operations
            that XLA converted into host compute, no less memory on the device than
            without, jaxlib 0.11.0 or 0.11.1.
        ValueError: a program for a CPU, which has no host beside it.
    """
    text = compiled.as_text() or ""
    account: Any = compiled.memory_analysis()
    if _devices.backend() == "cpu":
        raise ValueError("compiled is for a CPU, where nothing can be offloaded")
    _refuse_broken_jaxlib()
    there = account.host_temp_size_in_bytes * _traced.devices(compiled)
    if there < 0.95 * promised or not re.search(r"S\(5\)", text):
        raise RuntimeError(
            f"the policy promises {promised:,} bytes on the host, the program has "
            f"{there:,}: is every block in one jax.lax.scan (not unrolled, not "
            "nested), and what is offloaded named inside it?"
        )
    slow = re.findall(r"%([\w.\-]+) = [^\n]*_xla_compute_type=\"host\"", text)
    if slow:
        raise RuntimeError(
            f"XLA converted into host compute: {', '.join(slow)}; move what they read "
            "to the device first, jax.device_put(x, jax.memory.Space.Device)"
        )
    if without is not None:
        here, before = (
            run.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
            for run in (compiled, without)
        )
        if here >= before:
            raise RuntimeError(
                f"offloading leaves {here:,} bytes of temporaries on the device, no "
                f"less than the {before:,} without it"
            )


def _refuse_broken_jaxlib():
    import importlib.metadata

    version = importlib.metadata.version("jaxlib")
    if version in _BROKEN_JAXLIB and _devices.backend() == "gpu":
        raise RuntimeError(
            f"jaxlib {version} gives wrong gradients where a scan offloads on a GPU "
            "(openxla/xla#46231); install jaxlib 0.11.2 or newer"
        )
