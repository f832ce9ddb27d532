"""PEFT's tensors of adapters: of a matrix, of joined matrices, and of all experts.

    W' = W + alpha / r B A,   A [r, in],   B [out, r]

The adapters of n matrices that a checkpoint has as one are one of rank n r: its A are
theirs, one below the other, and its B are theirs on a diagonal. The adapters of E
experts are A [E r, in], expert by expert, and B [out, r E], rank by rank.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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


class ModuleAdapter(NamedTuple):
    """The adapter of one of PEFT's modules."""

    rank: int  # of each of the joined matrices
    factor: float = 1.0  # its scale, relative to that of the decoder's adapters


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
        width = naming.config.experts.ff or 0
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


class AdapterReader:
    """Reads PEFT's tensors of adapters as weights of the decoder.

    Args:
        tensors: of the adapter.
        naming: of the decoder with adapters.
        modules: rank and factor of adapted modules, by PEFT's names; weights of others
            are 0, as are the rows above a module's rank.

    Attributes:
        used: names of tensors that were read.
    """

    def __init__(
        self,
        tensors: Tensors,
        naming: names.Naming,
        modules: Mapping[str, ModuleAdapter],
    ):
        self._tensors, self._naming, self._modules = tensors, naming, modules
        self.used: set[str] = set()

    def weight(self, path: str, like: Any) -> jnp.ndarray:
        """A weight of the decoder's adapters: A [..., in, r] or B [..., r, out]."""
        module, _, kind = path.rpartition("/")
        site = site_of(module, self._naming)
        index = site.parts.index(module)

        def read_layer(start: str, adapter: ModuleAdapter) -> np.ndarray:
            stored = _StoredAdapter(self._tensors, start, site, self._experts(site))
            if kind == "lora_a":
                array, axis = stored.A(adapter.rank, like.shape[-2], index), -1
            else:
                array, axis = stored.B(adapter.rank, like.shape[-1], index), -2
                if adapter.factor != 1:
                    array = array.astype(np.float32) * np.float32(adapter.factor)
            self.used.update(f"{start}.lora_{x}.weight" for x in "AB")
            array = array if site.parameter else array[0]
            missing = [(0, 0)] * array.ndim
            missing[axis] = (0, like.shape[axis] - adapter.rank)
            return np.pad(array, missing).astype(like.dtype)

        axes = bool(site.leading)
        absent = np.zeros(like.shape[axes:], like.dtype)
        layers = self._by_layer(site, read_layer, absent)
        return jnp.asarray(np.stack(layers) if axes else layers[0])

    def norms(self, path: str, like: Any) -> jnp.ndarray:
        """The norms [..., out] of DoRA for an adapter's B; NaN where there are none."""
        module, _, _ = path.rpartition("/")
        site, outputs = site_of(module, self._naming), like.shape[-1]
        index, rows = site.parts.index(module), sum(site.stored.rows) or outputs

        def read_layer(start: str, _: ModuleAdapter) -> np.ndarray:
            name = f"{start}.lora_magnitude_vector"
            self.used.add(name)
            array = self._tensors.read(name, (rows,), (slice(None),))
            own = names.own_outputs(site.stored, site.parts[index] + "/kernel", outputs)
            return (array if own is None else array[own]).astype(np.float32)

        layers = self._by_layer(site, read_layer, np.full(outputs, np.nan, np.float32))
        return jnp.asarray(np.stack(layers) if site.leading else layers[0])

    def _experts(self, site: Site) -> int:
        return (self._naming.config.experts.count or 1) if site.parameter else 1

    def _by_layer(
        self,
        site: Site,
        read: Callable[[str, ModuleAdapter], np.ndarray],
        absent: np.ndarray,
    ) -> list[np.ndarray]:
        """An array of each layer: from its tensors, or the absent module's."""
        starts = zip(site.targets, site.tensors(self._naming.config), strict=True)
        return [
            read(start, self._modules[name]) if name in self._modules else absent
            for name, start in starts
        ]


@dataclasses.dataclass(frozen=True)
class _StoredAdapter:
    """The tensors of an adapter of one site in one layer."""

    tensors: Tensors
    start: str  # of their names
    site: Site
    experts: int

    def A(self, rank: int, inputs: int, index: int) -> np.ndarray:
        """A [experts, in, r] of a part of the site."""
        name, times = f"{self.start}.lora_A.weight", self._times(rank)
        array = self.tensors.read(name, (self.experts * times * rank, inputs), _ALL)
        array = array.reshape(self.experts, -1, inputs).swapaxes(1, 2)
        first = index * rank if times > 1 else 0
        return array[..., first : first + rank]

    def B(self, rank: int, outputs: int, index: int) -> np.ndarray:
        """B [experts, r, out] of a part of the site."""
        name, times = f"{self.start}.lora_B.weight", self._times(rank)
        stored, parts = self.site.stored, len(self.site.parts)
        outputs = sum(stored.rows) if stored.joined else outputs
        array = self.tensors.read(name, (outputs, self.experts * times * rank), _ALL)
        array = array.reshape(outputs, -1, self.experts).transpose(2, 1, 0)
        part = names.apart(array, stored, index) if stored.joined else array
        own = part
        if times > 1:
            own = part[:, index * rank : (index + 1) * rank]
            if np.count_nonzero(part) != np.count_nonzero(own):
                raise CheckpointError(
                    f"{self.tensors.file_of(name)}: tensor {name} has rank "
                    f"{times * rank} for {parts} joined matrices, and not {rank} for "
                    "each of them; this is not implemented"
                )
        order = stored.order
        return own if order is None else own[..., np.array(order)]

    def _times(self, rank: int) -> int:
        """Factor of the stored rank: 1, or the number of the site's parts."""
        rows, parts = self.tensors.rows(f"{self.start}.lora_A.weight"), self.site.parts
        return len(parts) if rows == self.experts * len(parts) * rank else 1


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
