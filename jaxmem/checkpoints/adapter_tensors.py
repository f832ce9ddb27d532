"""PEFT's tensors of adapters: of a matrix, of joined matrices, and of all experts.

    W' = W + alpha / r B A,   A [r, in],   B [out, r]

The adapters of n matrices that a checkpoint has as one are one of rank n r: its A are
theirs, one below the other, and its B are theirs on a diagonal. The adapters of E
experts are A [E r, in], expert by expert, and B [out, r E], rank by rank.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.checkpoints import names
from jaxmem.checkpoints.config_reader import CheckpointError
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.tensors import Tensors, whole
from jaxmem.models.config import ModelConfig

PREFIX = "base_model.model."
_EXPERTS = "blocks/feed_forward/experts/"
_ALL = slice(None), slice(None)


@dataclasses.dataclass(frozen=True)
class Site:
    """Modules of the decoder whose adapters PEFT stores as one."""

    parts: tuple[str, ...]  # paths of the modules, in order
    modules: tuple[str, ...]  # PEFT's name of the matrix in each layer, without prefix
    parameter: str | None  # its name in a module of experts; None: a matrix
    stored: names.Stored  # how the outputs of the parts are joined
    leading: bool  # True: the decoder's arrays have an axis of layers

    @property
    def targets(self) -> tuple[str, ...]:
        """PEFT's names of the adapted modules or parameters of each layer."""
        if self.parameter is None:
            return self.modules
        return tuple(f"{module}.{self.parameter}" for module in self.modules)

    def tensors(self, config: ModelConfig) -> list[str]:
        """Starts of the names of the tensors of each layer."""
        inner = ""
        # PEFT wraps a module of experts once for each parameter, the last one outside.
        if self.parameter == "gate_up_proj" and "down" in config.lora_targets:
            inner = ".base_layer"
        return [f"{PREFIX}{module}{inner}" for module in self.modules]


def target_of(module: str) -> str:
    """The entry of `lora_targets` that a module's adapter belongs to."""
    return "query" if module.endswith("attention/gate") else module.rpartition("/")[2]


def site_of(module: str, naming: names.Naming) -> Site:
    """The site that a module, such as "blocks/attention/query", is part of."""
    plain = naming.plain(f"{module}/kernel")
    stack = naming.stacks.get(module.partition("/")[0])
    layers = (0,) if stack is None else stack.layers
    if plain.startswith(_EXPERTS):
        return _expert_site(module, naming, layers)
    stored = naming(f"{module}/kernel")
    parts = tuple(p.removesuffix("/kernel") for p in stored.joined) or (module,)
    modules = tuple(name.removesuffix(".weight") for name in stored.names)
    return Site(parts, modules, None, stored, stack is not None)


def _expert_site(module: str, naming: names.Naming, layers: tuple[int, ...]) -> Site:
    start, _, name = module.rpartition("/")
    parameter = "down_proj" if name == "down" else "gate_up_proj"
    matrices = ("down",) if name == "down" else ("gate", "up")
    parts = tuple(f"{start}/{matrix}" for matrix in matrices)
    full = naming.full(experts_module(naming.family) + ".")[:-1]
    stored = names.Stored((), (), True)
    if len(parts) > 1:
        width = naming.config.expert_ff or 0
        interleaved = naming.family.joined_by.get(f"{_EXPERTS}gate/kernel")
        heads = width if interleaved == "number" else None
        rows = (width,) * len(parts)
        stored = stored._replace(joined=parts, rows=rows, heads=heads)
    modules = tuple(full.format(layer) for layer in layers)
    return Site(parts, modules, parameter, stored, True)


def experts_module(family: Family) -> str:
    """The name that transformers gives to the module of a layer's experts."""
    path = f"{_EXPERTS}down"
    name = family.names.get(path) or family.names[f"{path}/kernel"]
    of_each = name.count("{}") == 2  # of files; in memory they are one parameter
    return "model.layers.{}.mlp.experts" if of_each else name.rpartition(".")[0]


def read(
    tensors: Tensors, path: str, like: Any, naming: names.Naming
) -> tuple[jnp.ndarray, list[str]]:
    """A weight of the decoder's adapters, and the names of the tensors it is of."""
    module, _, kind = path.rpartition("/")
    site, config = site_of(module, naming), naming.config
    experts = (config.experts or 1) if site.parameter else 1
    read_layer = _read_a if kind == "lora_a" else _read_b
    starts = site.tensors(config)
    layers = [read_layer(tensors, x, site, module, like.shape, experts) for x in starts]
    layers = [layer if site.parameter else layer[0] for layer in layers]
    stacked = np.stack(layers) if site.leading else layers[0]
    used = [f"{start}.lora_{x}.weight" for start in starts for x in "AB"]
    return jnp.asarray(stacked, like.dtype), used


def _read_a(tensors, start, site, module, shape, experts) -> np.ndarray:
    """[experts, in, r] of one layer."""
    inputs, rank = shape[-2:]
    name, times = (
        f"{start}.lora_A.weight",
        _rank_factor(tensors, start, site, rank, experts),
    )
    array = tensors.read(name, (experts * times * rank, inputs), _ALL)
    array = array.reshape(experts, -1, inputs).swapaxes(1, 2)
    first = site.parts.index(module) * rank if times > 1 else 0
    return array[..., first : first + rank]


def _read_b(tensors, start, site, module, shape, experts) -> np.ndarray:
    """[experts, r, out] of one layer."""
    rank, outputs = shape[-2:]
    name, times = (
        f"{start}.lora_B.weight",
        _rank_factor(tensors, start, site, rank, experts),
    )
    outputs = sum(site.stored.rows) if site.stored.joined else outputs
    array = tensors.read(name, (outputs, experts * times * rank), _ALL)
    array = array.reshape(outputs, -1, experts).transpose(2, 1, 0)
    parts = [array]
    if site.stored.joined:
        count = range(len(site.parts))
        parts = [names.apart(array, site.stored, i) for i in count]
    index = site.parts.index(module)
    own = parts[index]
    if times > 1:
        own = own[:, index * rank : (index + 1) * rank]
        if np.count_nonzero(parts[index]) != np.count_nonzero(own):
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {name} is of rank {times * rank} for "
                f"{len(parts)} joined matrices and not {rank} for each of them; this "
                "is not implemented"
            )
    order = site.stored.order
    return own if order is None else own[..., np.array(order)]


def _rank_factor(tensors, start, site, rank, experts) -> int:
    """Factor of the stored rank: 1, or the number of the site's parts."""
    rows, parts = tensors.rows(f"{start}.lora_A.weight"), len(site.parts)
    return parts if rows == experts * parts * rank else 1


def written(
    flat: Mapping[str, Any], naming: names.Naming
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield PEFT's names and matrices of a decoder's adapters, one at a time."""
    for site in sites(flat, naming):
        for layer, start in enumerate(site.tensors(naming.config)):
            index = layer if site.leading else None
            A, B = _join_parts(flat, site, index, naming)
            if not site.parameter:
                A, B = A[None], B[None]
            yield f"{start}.lora_A.weight", A.swapaxes(1, 2).reshape(-1, A.shape[1])
            yield f"{start}.lora_B.weight", B.transpose(2, 1, 0).reshape(B.shape[2], -1)


def sites(flat: Mapping[str, Any], naming: names.Naming) -> list[Site]:
    """Each site of a decoder's adapters once."""
    paths = [path.removesuffix("/lora_a") for path in flat if path.endswith("/lora_a")]
    by_parts = {site.parts: site for site in (site_of(x, naming) for x in paths)}
    return list(by_parts.values())


def _join_parts(flat, site: Site, layer: int | None, naming: names.Naming):
    """A [..., in, n r] and B [..., n r, out] of the parts of a site."""
    pairs = [
        tuple(whole(flat[f"{part}/lora_{x}"], layer) for x in "ab")
        if f"{part}/lora_a" in flat
        else None
        for part in site.parts
    ]
    known = next(pair for pair in pairs if pair is not None)
    A0, B0 = known
    rank, columns, blocks = A0.shape[-1], [], []
    rows = site.stored.rows or (B0.shape[-1],)
    for i, pair in enumerate(pairs):
        block = np.zeros((*B0.shape[:-2], len(pairs) * rank, rows[i]), B0.dtype)
        A = np.zeros_like(A0)
        if pair is not None:
            A, B = pair
            order = naming(f"{site.parts[i]}/kernel").order
            B = B if order is None else B[..., np.argsort(order)]
            block[..., i * rank : (i + 1) * rank, :] = B
        columns.append(A)
        blocks.append(block)
    B = names.together(blocks, site.stored.heads)
    return np.concatenate(columns, axis=-1), B
