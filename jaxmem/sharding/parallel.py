"""Runs the verbs over a mesh of devices: global arrays in, global arrays out."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxmem.head.maths import checks, vocab_shards
from jaxmem.head.maths.backend_operands import Ragged
from jaxmem.head.maths.spec import AxisName
from jaxmem.head.verbs import divergence_targets
from jaxmem.head.verbs.ragged import of_these_tokens
from jaxmem.sharding.mesh_axes import MeshAxes, read_plan
from jaxmem.sharding.operands import Operand, check_axes, pad, read, unpad

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def parallel(
    verb: Callable[_Args, _Result],
    mesh: Mesh | AbstractMesh,
    *,
    vocab: AxisName | None = None,
    tokens: AxisName | PartitionSpec | None = None,
    W_fsdp: AxisName | None = None,
) -> Callable[_Args, _Result]:
    """Return a verb whose vocabulary and tokens are sharded over the devices of a mesh.

        parallel(verb, mesh, ...)(hidden, W, labels, ...) = verb(hidden, W, labels, ...)

    The arrays are global and may have any sharding. Nothing is resharded if hidden,
    labels and all other per-token arrays are sharded along their first axes, and W and
    bias, or logits, along the vocabulary, as the arguments say. The results are sharded
    as tokens are. Along explicit axes, a token axis that is not divisible by the
    devices is replicated in the result, because a type cannot express uneven shards.

    Args:
        verb: any function of jaxmem's that takes axis_name, or a functools.partial of
            one, with arguments by name.
        mesh: devices, with named axes.
        vocab: mesh axes that shard the vocabulary; None: each device has all of it. For
            a divergence from a `Teacher`, which needs the whole W, both matrices are
            all-gathered along them, and they shard the tokens' first axis as well.
        tokens: mesh axes that shard the first axis of the tokens, or a PartitionSpec
            with one entry per axis: `P(("data", "fsdp"), "sequence")` for [B, T].
        W_fsdp: the mesh axes of the tokens along which the axis D of W is sharded. W
            is all-gathered for the call, and its gradient is reduce-scattered.

    Returns:
        The verb, with the same arguments except axis_name, and the same results.
        Without a normalizer, losses count the active tokens of all devices.
        With `Sample(k)`, the samples of a token do not depend on how tokens are
        sharded; each vocabulary shard draws its own, up to K of them.

    If the vocabulary or the tokens are not divisible by the devices, or the vocabulary
    by vocab_groups, W or hidden is padded in a copy; to avoid the copy of W, create W
    padded and pass `Head(W, vocab_size=…)`. Memory and communication are in
    docs/meshes.md.

    Raises:
        TypeError: the verb cannot be sharded, or an axis is not a name.
        ValueError: an axis does not exist in the mesh or is used twice; a W_fsdp does
            not shard tokens too, or does not divide D; axis_name is given; and whatever
            the verb raises.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
    >>> logprobs = jaxmem.sharding.parallel(
    ...     jaxmem.logprobs, mesh, vocab="tensor", tokens="data"
    ... )
    >>> h, W, y = jnp.zeros((2, 8)), jnp.zeros((4, 8)), jnp.array([0, 3])
    >>> print(jax.jit(logprobs)(h, W, y))
    [-1.3862944 -1.3862944]

    Reference: splitting the vocabulary is due to Shoeybi et al., "Megatron-LM", 2019,
    arXiv:1909.08053, section 3.
    """
    signature = _signature(verb)
    plan = read_plan(mesh, vocab, tokens, W_fsdp)

    @functools.wraps(verb)
    def run(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        values = call.arguments
        if values.get("axis_name") is not None:
            raise ValueError(
                "axis_name must not be given to what jaxmem.sharding.parallel made, "
                "which passes its own vocab"
            )
        if "target" in values:
            divergence_targets.check(values["target"])
        return _run(verb, plan, call)

    return run


def _run(verb, plan, call) -> Any:
    values = call.arguments
    name = "hidden" if "hidden" in values else "logits"
    data = checks.as_array(name, values[name])
    checks.check_hidden(data, name)
    shape, whole, of_results = data.shape[:-1], _needs_all_of_W(values), plan
    if whole:
        plan, of_results = _with_wide_tokens(plan, shape)
    split = check_axes(of_results, name, shape)
    operands = read(plan, values, split)
    if whole and "where" not in operands:  # mask the tokens that padding adds
        operands["where"] = Operand(jnp.ones(shape, bool), split, False)
    values |= {} if whole else {"axis_name": plan.vocab or None}
    is_loss = "normalizer" in values
    leaves, tree = jax.tree.flatten(operands)
    indices = [i for i, x in enumerate(leaves) if isinstance(x, Operand)]

    def on_device(arrays):
        local = dict(zip(indices, arrays, strict=True))
        passed = tree.unflatten([local.get(i, x) for i, x in enumerate(leaves)])
        passed = values | passed | _token_keys(call, passed) | _local_supports(passed)
        if whole:
            passed |= _with_whole_heads(of_results, passed)
        elif "W" in passed:
            passed["W"] = _gather_depth(plan, passed["W"])
        if is_loss and passed["normalizer"] is None:
            labels, where = passed["labels"], passed["where"]
            passed["normalizer"] = _count(of_results, labels, where)
        local_call = inspect.BoundArguments(call.signature, passed)
        results = verb(*local_call.args, **local_call.kwargs)
        return (
            (_sum_over_tokens(of_results, results[0]), results[1])
            if is_loss
            else results
        )

    of_tokens = Operand(None, of_results.tokens).spec
    results = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=([leaves[i].spec for i in indices],),
        out_specs=(PartitionSpec(), of_tokens) if is_loss else of_tokens,
    )([pad(plan, leaves[i]) for i in indices])
    if is_loss:
        return results[0], unpad(plan, results[1], shape)
    return unpad(plan, results, shape)


def _with_wide_tokens(plan, shape) -> tuple[MeshAxes, MeshAxes]:
    """Plans of a call that gathers W, and of its results.

    All mesh axes in use shard the tokens; one token [D] is replicated.
    """
    if not shape:
        plan = dataclasses.replace(plan, vocab=())
        return plan, plan
    first, *rest = plan.tokens or ((),)
    return plan, dataclasses.replace(plan, tokens=(first + plan.vocab, *rest))


def _needs_all_of_W(values) -> bool:
    """True if a verb, or its target, does not take a part of the vocabulary."""
    return "axis_name" not in values or not getattr(
        getattr(values.get("target"), "of", None), "shards", True
    )


def _token_keys(call, arrays):
    """The tokens' keys, from their data."""
    if "key" not in arrays:
        return {}
    impl = jax.random.key_impl(call.arguments["key"])
    return {"key": jax.random.wrap_key_data(arrays["key"], impl=impl)}


def _local_supports(arrays):
    """The ids and offsets of this device's tokens, if supports are ragged."""
    if "offsets" not in arrays:
        return {}
    starts, counts = arrays["offsets"]
    ids, offsets = of_these_tokens(Ragged(starts, counts, arrays["support_ids"]))
    return {"support_ids": ids, "offsets": offsets}


def _with_whole_heads(plan, values) -> dict[str, Any]:
    """W and the target, with all columns of their heads."""
    whole = functools.partial(_gather_head, plan)
    heads = {"W": whole(values["W"])}
    if "target" in values:
        target = values["target"]
        heads["target"] = dataclasses.replace(target, of=target.of.heads_as(whole))
    return heads


def _gather_head(plan, head):
    """The head with all of W and bias, typed as in `_gather_depth`."""
    W, bias = vocab_shards.vary((head.W, head.bias), frozenset(plan.token_axes))
    vocab, depth = (0, 1) if head.layout == "vd" else (1, 0)
    if plan.W_fsdp:
        W = lax.all_gather(W, plan.W_fsdp, axis=depth, tiled=True)
    if plan.vocab:
        W = lax.all_gather(W, plan.vocab, axis=vocab, tiled=True)
    if plan.vocab and bias is not None:
        bias = lax.all_gather(bias, plan.vocab, tiled=True)
    return dataclasses.replace(head, W=W, bias=bias)


def _gather_depth(plan, head):
    """The head with all of D, typed first: its gradients are reduce-scattered."""
    if not plan.W_fsdp:
        return head
    W = vocab_shards.vary(head.W, frozenset(plan.token_axes))
    depth = 1 if head.layout == "vd" else 0
    W = lax.all_gather(W, plan.W_fsdp, axis=depth, tiled=True)
    return dataclasses.replace(head, W=W)


def _count(plan, labels, where):
    """The number of active tokens on all devices."""
    active = labels >= 0 if where is None else (labels >= 0) & where
    return _sum_over_tokens(plan, jnp.sum(active, dtype=jnp.int32))


def _sum_over_tokens(plan, x):
    """The sum of x over all devices with tokens."""
    return lax.psum(x, plan.token_axes) if plan.token_axes else x


def _signature(verb):
    try:
        signature = inspect.signature(verb)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    names = signature.parameters
    has_data = {"hidden", "logits"} & names.keys()
    takes_shards = "axis_name" in names and has_data
    if not takes_shards and not {"hidden", "W", "where"} <= names.keys():
        raise TypeError(
            "verb must be a function of jaxmem's that takes axis_name, such as "
            "jaxmem.logprobs, or a functools.partial of one with arguments by name, "
            f"got {verb!r}"
        )
    return signature
