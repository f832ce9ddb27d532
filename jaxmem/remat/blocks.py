"""Blocks and scans of blocks under a rematerialisation policy."""

import contextvars
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem import devices
from jaxmem.remat import cost
from jaxmem.remat.policies import NAMES, Policy, preset

# Gradients of values that a scan offloads are silently wrong, openxla/xla#46231.
_BROKEN_JAXLIB = ("0.11.0", "0.11.1")


_Tree = TypeVar("_Tree")


def name(x: _Tree, label: str) -> _Tree:
    """Return x with a checkpoint name; the leaves of a pytree share it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, label), x)


# The context in which a function is traced. "loop": XLA cannot merge recomputations of
# a part of a block with the forward pass. "policy": only the policy decides on
# residuals. "": only an optimization barrier prevents such merging.
_around = contextvars.ContextVar("_around", default="")


def recompute(
    fn: Callable, save: Sequence[str] = (), known: Sequence[str] = tuple(NAMES)
) -> Callable:
    """Wrap fn so that its residuals are its arguments, and the rest is recomputed.

    It suits parts of a block whose recomputation costs less than their residuals would:
    for example a norm, and the products that read its result. Products whose results
    are only outputs of fn are not recomputed, because no gradient needs them. Inside a
    block with a policy it returns fn itself: the policy decides.

    Outside of a loop, a barrier before the arguments prevents that XLA merges the
    recomputation with the forward pass. None is before what fn closes over, such as
    weights, so what depends on that alone may be merged.

    Args:
        fn: any function of arrays; what it closes over counts as its arguments.
        save: checkpoint names inside of it that are saved as well.
        known: as in `Policy`.

    Returns:
        A function of the positional arguments of fn.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import remat
    >>> jax.grad(remat.recompute(lambda x: jnp.sin(jnp.sin(x))))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    chosen = Policy(save, known=known)
    if _around.get() == "policy":
        return fn
    is_apart = _around.get() != "loop"

    def run(*args):
        # No barrier before what fn closes over: XLA would copy slices of weights.
        barriers = is_apart and (True,) * len(args)
        return jax.checkpoint(fn, policy=chosen, prevent_cse=barriers)(*args)

    return run


def block(
    fn: Callable, policy: Policy | str | None, *, scanned: bool = True
) -> Callable:
    """Wrap fn so that its residuals follow a policy.

    Args:
        fn: (h, *rest) -> anything; h receives the checkpoint name "block_in".
        policy: a `Policy`, a preset's name, or None for no rematerialisation.
        scanned: True if it runs inside `jax.lax.scan`, where XLA cannot merge the
            recomputation with the forward pass; elsewhere a barrier prevents that.

    Returns:
        A function with the signature of fn.

    Raises:
        ValueError: the preset does not exist, or the policy offloads outside of a scan,
            which XLA for GPUs undoes (it delays the copies to the host until they
            return).
        RuntimeError: the policy offloads on a GPU with jaxlib 0.11.0 or 0.11.1.
    """
    chosen = _as_policy(policy)
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
    """Apply all blocks to h: one scan, then the blocks that `policy.last` counts.

        h_(i+1) = fn(h_i, params_i),   i = 0 … L-1

    The backward pass visits the last blocks first. Copies of their inputs to the host
    and back would be exposed, and their residuals are freed before the backward pass of
    the other blocks has allocated its gradients: so the peak need not rise.

    Args:
        fn: (h, params of a block) -> h of the same shape and dtype.
        params: pytree with a leading axis of L blocks. It is not copied, for any
            `policy.last`.
        h: array or pytree.
        policy: as in `block`, applied to each group; its `last` is the number of blocks
            that keep all residuals.
        group: number of blocks that are recomputed together, from the first one's
            input: fewer inputs are stored, and more is alive in the backward pass of a
            group. It must divide L - last.
        unroll: True to trace the blocks one after the other instead. The program and
            its compilation time then grow with L. It saves the costs of a loop, which
            initialises the stacks of its residuals and copies into and out of them.

    Returns:
        h after the last block.

    **Memory** of residuals: (L - last)/group inputs, on the device or the host, what
    the policy saves of each block, and all residuals of one group (of two if copies
    from the host overlap, see `compiler_options`); at the start of the backward pass,
    also all residuals of the last blocks.

    Raises:
        ValueError: as in `block`; also if group does not divide the blocks,
            `policy.last` is L or more, or a policy offloads without a loop.

    >>> import jax.numpy as jnp
    >>> from jaxmem import remat
    >>> h = jnp.ones(2)
    >>> remat.scan_blocks(lambda h, w: h * w, jnp.array([2.0, 3.0]), h, "full")
    Array([6., 6.], dtype=float32)
    """
    chosen = _as_policy(policy)
    last = 0 if chosen is None else chosen.last
    length = _count_blocks(params)
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
    turns, read = params, lambda block_params: [block_params]
    if last or group > 1:
        turns, read = _index_blocks(params, count, group)

    def run(h, turn):
        for block_params in read(turn):
            h = fn(h, block_params)
        return h

    body = block(run, chosen, scanned=not unroll)
    h, _ = jax.lax.scan(lambda h, turn: (body(h, turn), None), h, turns, unroll=unroll)
    whole = block(fn, None, scanned=False)
    for i in range(count, length):
        h = whole(h, jax.tree.map(lambda leaf, i=i: leaf[i], params))
    return h


def _count_blocks(params):
    lengths = {len(leaf) for leaf in jax.tree.leaves(params)}
    if len(lengths) != 1:
        raise ValueError(
            "params must have one leading axis of blocks in all leaves, got lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _index_blocks(params, count, group):
    """The scanned input for the first blocks, and a function that reads an iteration's.

    Scanning over slices of the stack would make XLA copy the slices before the loop. An
    iteration therefore indexes its blocks in the whole stack. The gradient by the whole
    stack in every iteration would cost more, so the gradient goes to the iteration's
    part of the slices. They are an argument for that purpose only, and XLA drops them.
    """
    stack = jax.lax.stop_gradient(params)
    slices = jax.tree.map(
        lambda leaf: leaf[:count].reshape(count // group, group, *leaf.shape[1:]),
        params,
    )

    def read(turn):
        start, parts = turn

        def read_block(i):
            def take(leaf, part):
                value = jax.lax.dynamic_index_in_dim(leaf, start + i, keepdims=False)
                if not jnp.issubdtype(leaf.dtype, jnp.inexact):  # without a gradient
                    return value
                return _with_gradient_of(value, part[i])

            return jax.tree.map(take, stack, parts)

        return [read_block(i) for i in range(group)]

    return (jnp.arange(0, count, group), slices), read


@jax.custom_jvp
def _with_gradient_of(value, part):
    """Return value, with the derivative of `part`."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _as_policy(policy):
    return preset(policy) if isinstance(policy, str) else policy


def compiler_options(
    policy: Policy | str | None, *, unroll: bool = False
) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=)` of a step on a GPU with a policy.

    Where a loop saves results of products, XLA (jaxlib 0.10.2 to 0.12.0.1) lets a
    product write into the stack of all blocks, and computes it once more for every
    other reader. The option disables the fusion of products with slices.

    Where the policy offloads, copies from the host start one block ahead, which takes
    one more input on the device. CUDA graphs are disabled, because kernels and copies
    in them block each other: on one H200 they cost 5% of a step's time. Weights are
    sliced from their stack where they are used and not on separate streams, of which
    XLA has four: a slice could wait on one of them for a copy to the host, and a
    product for the slice, another 1%. XLA's own rematerialisation is disabled too,
    because it counts host memory as device memory.

    Args:
        policy: as in `scan_blocks`.
        unroll: as in `scan_blocks`.
    """
    chosen = _as_policy(policy)
    options: dict[str, Any] = {}
    saves = chosen is None or chosen.dots or chosen.save
    if saves and not unroll:
        options["xla_gpu_enable_dynamic_slice_fusion"] = False
    if chosen is not None and chosen.offload:
        options |= {
            "xla_gpu_enable_pipelined_host_offloading": True,
            "xla_gpu_enable_command_buffer": "",
            "xla_disable_hlo_passes": ",".join(
                ["rematerialization", "dynamic-slice-copy-fusion-async-wrapper"]
            ),
        }
    return options


def verify(
    compiled: jax.stages.Compiled,
    promised: int,
    *,
    without: jax.stages.Compiled | None = None,
) -> None:
    """Raise unless a program for a GPU offloads the promised number of bytes.

    XLA silently drops offloading in programs that do not have the one supported form,
    and computes on the host what an operation reads from an array there.

    Args:
        compiled: the step.
        promised: bytes, as `host_bytes` counts them.
        without: the same step without offloading; compiled must take less memory on the
            device.

    Raises:
        RuntimeError: the host has less than 95% of the promised bytes, XLA converted
            operations into host compute, the device memory is no less than without, or
            jaxlib is 0.11.0 or 0.11.1.
        ValueError: the program is for a CPU, which has no separate host memory.
    """
    text = compiled.as_text() or ""
    account: Any = compiled.memory_analysis()
    if devices.backend() == "cpu":
        raise ValueError("compiled is for a CPU, where nothing can be offloaded")
    _refuse_broken_jaxlib()
    host_bytes = account.host_temp_size_in_bytes * cost.devices(compiled)
    if host_bytes < 0.95 * promised or not re.search(r"S\(5\)", text):
        raise RuntimeError(
            f"the policy promises {promised:,} bytes on the host, but the program has "
            f"{host_bytes:,}; put all blocks into one jax.lax.scan (not unrolled, not "
            "nested), and name the offloaded values inside it"
        )
    slow = re.findall(r"%([\w.\-]+) = [^\n]*_xla_compute_type=\"host\"", text)
    if slow:
        raise RuntimeError(
            f"XLA computes on the host: {', '.join(slow)}; move the arrays that they "
            "read to the device first, by jax.device_put(x, jax.memory.Space.Device)"
        )
    if without is not None:
        remaining, original = (
            run.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
            for run in (compiled, without)
        )
        if remaining >= original:
            raise RuntimeError(
                f"offloading leaves {remaining:,} bytes of temporaries on the device, "
                f"no fewer than the {original:,} without offloading"
            )


def _refuse_broken_jaxlib():
    import importlib.metadata

    version = importlib.metadata.version("jaxlib")
    if version in _BROKEN_JAXLIB and devices.backend() == "gpu":
        raise RuntimeError(
            f"jaxlib {version} gives wrong gradients where a scan offloads on a GPU "
            "(openxla/xla#46231); install jaxlib 0.11.2 or newer"
        )
