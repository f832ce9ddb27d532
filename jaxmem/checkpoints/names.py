"""Names and layouts of the decoder's weights in a checkpoint.

The decoder stacks the weights of all layers and has kernels [in, out]; a checkpoint has
one tensor per layer, and matrices [out, in]. A family has the names, and says where
matrices are joined or their outputs have another order; a multimodal model adds
prefixes to the names, and has tensors that text does not need.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.base import messages
from jaxmem.checkpoints.config_reader import CheckpointError
from jaxmem.checkpoints.families.family import Family, WithImages
from jaxmem.checkpoints.tensors import Tensors, whole
from jaxmem.models import structure
from jaxmem.models.config import ModelConfig

_ROWS = 4096  # of a head and an embedding that are compared at a time


class Stored(NamedTuple):
    """Names and layout of a checkpoint's tensors of one weight of the decoder."""

    names: tuple[str, ...]  # of its tensors: a single one, or in the order of `leading`
    leading: tuple[int, ...]  # axes of the decoder's weight that the tensors lack
    transposed: bool  # True: the tensors have the last two axes swapped
    joined: tuple[str, ...] = ()  # paths of the weights that share them, in order
    rows: tuple[int, ...] = ()  # outputs of each of them
    heads: int | None = None  # they alternate by so many heads; None: one by one
    order: tuple[int, ...] | None = None  # outputs of the tensor, as the decoder's


class Naming:
    """The names and layouts of the weights of a decoder with a config.

    Args:
        family: of the checkpoint.
        config: of the decoder.
        prefixes: what replaces the family's prefix, and what precedes the other names;
            None: the family's prefix is there.
        present: names of the checkpoint's tensors, with other names for some.
    """

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        prefixes: tuple[str, str] | None = None,
        present: Iterable[str] = (),
    ):
        self.family, self.config = family, config
        self.prefixes = prefixes or (family.prefix, "")
        self.stacks = structure.stacks(config)
        there = set(present)
        fused = tuple(name.rpartition("}")[2] for name in family.fused.values())
        is_fused = any(name.endswith(fused) for name in there)
        self.names = {**family.names, **(family.fused if is_fused else {})}
        known = family.other_names.items()
        self.others = {name: other for name, other in known if other in there}

    def __call__(self, path: str) -> Stored:
        """The tensors of the weight of a path like "blocks/attention/query/kernel"."""
        stack = self.stacks.get(path.partition("/")[0])
        plain, family = self.plain(path), self.family
        module, _, kind = plain.rpartition("/")
        name = self.names.get(plain)
        if name is None:
            name = self.names[module] + (".bias" if kind == "bias" else ".weight")
        layers = (0,) if stack is None else stack.layers
        leading = () if stack is None else (len(layers),)
        experts = range(1)
        if name.count("{}") == 2:  # a tensor of each expert
            experts = range(self.config.experts.count or 0)
            leading = *leading, len(experts)
        full = self.full(name)
        tensors = tuple(full.format(i, j) for i in layers for j in experts)
        as_is = plain.startswith(family.stored_as_in_out)
        transposed = kind == "kernel" and not as_is
        stored = Stored(tensors, leading, transposed)
        if kind in ("kernel", "bias"):
            key = plain if plain in self.names else module
            stored = self._add_joined(stored, path, plain, key)
        return stored._replace(order=self._output_order(module))

    def has(self, path: str) -> bool:
        """True if checkpoints of the family have the weight of a path."""
        plain = self.plain(path)
        return plain in self.names or plain.rpartition("/")[0] in self.names

    def unread(self) -> Iterator[str]:
        """Names of tensors of keys and values of layers that reuse those of others."""
        kinds = enumerate(self.config.by_layer("mixers"))
        layers = [layer for layer, kind in kinds if kind == "reuse"]
        parts, ends = ("key", "value", "key_norm"), (".weight", ".bias")
        for layer, part, end in itertools.product(layers, parts, ends):
            name = self.names[f"blocks/attention/{part}"] + end
            yield self.full(name).format(layer)

    def plain(self, path: str) -> str:
        """The path as that of a decoder of one stack."""
        stack = self.stacks.get(path.partition("/")[0])
        return path if stack is None else "blocks" + path.removeprefix(stack.name)

    def full(self, name: str) -> str:
        """The name of a tensor with this checkpoint's prefix."""
        name = self.others.get(name, name)
        inside, outside = self.prefixes
        if name.startswith(self.family.prefix):
            return inside + name.removeprefix(self.family.prefix)
        return outside + name

    def _add_joined(self, stored: Stored, path: str, plain: str, key: str) -> Stored:
        """`stored` with the weights that share its tensors, which `key` names."""
        names = self.names
        parts = [other for other, name in names.items() if name == names.get(key)]
        if len(parts) < 2:
            return stored
        start, end = path.removesuffix(plain.removeprefix("blocks")), plain[len(key) :]
        joined = tuple(f"{start}{part.removeprefix('blocks')}{end}" for part in parts)
        modules = [(part + end).rpartition("/")[0] for part in parts]
        rows = tuple(map(self._count_outputs, modules))
        config, unit = self.config, self.family.joined_by.get(parts[0])
        counts = {"head": config.heads, "key_head": config.delta.key_heads}
        heads = (counts | {"number": rows[0], None: None})[unit]
        return stored._replace(joined=joined, rows=rows, heads=heads)

    def _count_outputs(self, module: str) -> int:
        config, (part, name) = self.config, module.rpartition("/")[::2]
        if part.endswith("/experts"):
            return config.experts.ff or 0
        latent = config.is_latent
        rotated = config.latent.rope_head_dim or 0
        queries, states = config.heads * config.head_dim, config.delta.heads or 0
        keys = config.delta.key_heads * config.delta.key_dim
        values = states * config.delta.value_dim
        sizes = {
            "query": queries,
            "query_up": queries,
            "key": config.kv_heads * (config.head_dim - rotated * latent),
            "value": config.kv_heads * config.value_width,
            "latent": config.latent.kv_rank or 0,
            "rotated": rotated,
            **dict.fromkeys(("delta_query", "delta_key"), keys),
            **dict.fromkeys(("delta_value", "delta_gate"), values),
            **dict.fromkeys(("delta_rate", "delta_decay"), states),
        }
        if part == "blocks/attention" and name == "gate":
            name = "query"
        return sizes.get(name, config.ff)

    def _output_order(self, module: str) -> tuple[int, ...] | None:
        """Outputs of a tensor in the decoder's order; None: they are the same."""
        pairs, config = self.family.pairs, self.config
        part, name = module.rpartition("/")[::2]
        kinds = ("query", "key", "query_norm", "key_norm")
        if config.is_latent:
            kinds = ("query", "query_up", "rotated")
        if pairs == "halves" or part != "blocks/attention" or name not in kinds:
            return None
        width = config.rope_width
        if pairs == "swapped":
            head = [*range(width // 2, width), *range(width // 2)]
        else:
            head = [*range(0, width, 2), *range(1, width, 2)]
        if name == "rotated":
            return tuple(head)
        rest = config.head_dim - width
        if pairs == "last":
            head = [rest + i for i in head] + list(range(rest))
        else:
            head += range(width, config.head_dim)
        outputs = self._count_outputs(name.removesuffix("_norm"))
        count = outputs // config.head_dim
        if name.endswith("_norm") and config.qk_norm.axis == "head":
            count = 1
        return tuple(i * config.head_dim + j for i in range(count) for j in head)


def prefixes_of(
    tensors: Iterable[str], family: Family, images: WithImages | None
) -> tuple[str, str]:
    """The prefixes of a checkpoint, maybe of a text part, as `Naming` takes them."""
    present = list(tensors)
    known = ((family.prefix, ""), ("", "")) if images is None else images.prefixes
    for prefixes in known:
        if any(name.startswith(prefixes[0]) for name in present):
            return prefixes
    return known[0]


def refuse_others(
    tensors: Tensors,
    paths: Iterable[str],
    images: tuple[str, ...],
    naming: Naming,
) -> None:
    """Raise for a tensor that neither a weight of `paths` nor the image part has."""
    known = {name for path in paths for name in naming(path).names}
    family, tied = naming.family, naming.config.tied
    if tied:  # the head may be stored too, as a copy of the embedding
        known.update(naming("head/kernel").names)
    constants = {
        naming.full(name).format(layer): value
        for name, value in family.constants.items()
        for layer in range(naming.config.layers)
    }
    known.update(further(tensors, naming))
    known.update(naming.unread())
    for name in tensors:
        # computed from config.json
        derived = name.endswith(("rotary_emb.inv_freq", *family.derived))
        if name in constants:
            value = tensors.read(name, (), ())
            if abs(float(value) - constants[name]) > 0.01 * abs(constants[name]):
                raise CheckpointError(
                    f"{tensors.file_of(name)}: tensor {name} is {float(value):g}; only "
                    f"{constants[name]:g} is implemented"
                )
            continue
        if name in known or derived or name.startswith(images):
            continue
        raise CheckpointError(
            f"{tensors.file_of(name)}: tensor {messages.name(name)} is not part of "
            "the model that config.json describes"
        )
    if tied:
        _check_copy(tensors, naming)


def _check_copy(tensors: Tensors, naming: Naming) -> None:
    """Raise where a tied head is stored and is no copy of the embedding."""
    (head,), (table,) = naming("head/kernel").names, naming("embed/embedding").names
    shape = naming.config.vocab_size or 0, naming.config.hidden
    if head not in tensors or table not in tensors:
        return
    for start in range(0, shape[0], _ROWS):  # not both whole in memory
        rows = slice(start, min(start + _ROWS, shape[0])), slice(None)
        first, second = (tensors.read(name, shape, rows) for name in (head, table))
        if not np.array_equal(first, second):
            raise CheckpointError(
                f"{tensors.file_of(head)}: tie_word_embeddings is true, but tensor "
                f"{head} is not a copy of {table}; set tie_word_embeddings to false "
                "in config.json"
            )


def further(tensors: Tensors, naming: Naming) -> list[str]:
    """Names of tensors that predict tokens beyond the next one."""
    family, layers = naming.family, naming.config.layers
    start = naming.full("model.layers.")

    def is_further(name: str) -> bool:
        number = name.removeprefix(start).partition(".")[0]
        numbered = family.more_layers_key is not None and name.startswith(start)
        after = numbered and number.isdecimal() and int(number) >= layers
        return after or name.startswith(family.further)

    return list(filter(is_further, tensors))


def say_what_is_left_out(
    tensors: Tensors, images: tuple[str, ...], naming: Naming
) -> None:
    """Warn that some tensors are not read; Python shows such a warning once."""
    of_images = sum(name.startswith(images) for name in tensors)
    later, own = further(tensors, naming), set(naming.unread()).intersection(tensors)
    for is_there, said in (
        (
            images,
            "jaxmem reads only the text part of a model that reads images; it leaves "
            f"out {of_images} tensors of images",
        ),
        (
            later,
            "jaxmem does not read layers that predict tokens beyond the next one; it "
            f"leaves out their {len(later)} tensors",
        ),
        (
            own,
            "layers that reuse the keys and values of other layers do not need their "
            f"own; jaxmem leaves out {len(own)} such tensors",
        ),
    ):
        if is_there:
            warnings.warn(f"{tensors.directory}: {said}", stacklevel=1)


def reader(
    tensors: Tensors, stored: Stored, path: str, like: jax.ShapeDtypeStruct
) -> Callable[[Any], np.ndarray]:
    """A function that reads the part of a weight at an index, from its tensors."""
    axes = len(stored.leading)
    shape = like.shape[axes:]
    numbers = np.arange(len(stored.names)).reshape(stored.leading)
    mixed = stored.joined or stored.order is not None

    def read_tensor(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if mixed:
            part = _read_mixed(tensors, stored, name, path, shape)[index]
        elif stored.transposed:
            part = tensors.read(name, _swap_last(shape), _swap_last(index))
            part = part.swapaxes(-1, -2)
        else:
            part = tensors.read(name, shape, index)
        return part.astype(like.dtype)

    def read(index: Any) -> np.ndarray:
        chosen = numbers[index[:axes]]
        names = [stored.names[i] for i in chosen.reshape(-1)]
        parts = [read_tensor(name, index[axes:]) for name in names]
        return np.stack(parts).reshape(*chosen.shape, *parts[0].shape)

    return read


def _swap_last(sizes: tuple) -> tuple:
    """Sizes of an array whose last two axes are swapped."""
    return *sizes[:-2], sizes[-1], sizes[-2]


def _read_mixed(
    tensors: Tensors, stored: Stored, name: str, path: str, shape: tuple[int, ...]
) -> np.ndarray:
    """One layer of a weight with outputs beside others', or in another order."""
    outputs = sum(stored.rows) if stored.joined else shape[-1]
    whole_shape = (*shape[:-1], outputs)
    if stored.transposed:
        whole_shape = _swap_last(whole_shape)
    tensor = tensors.read(name, whole_shape, (slice(None),) * len(shape))
    array = tensor.swapaxes(-1, -2) if stored.transposed else tensor
    if stored.joined:
        array = apart(array, stored, stored.joined.index(path))
    return array if stored.order is None else array[..., np.array(stored.order)]


def apart(array: np.ndarray, stored: Stored, index: int) -> np.ndarray:
    """The outputs of one of the joined weights, from those of all on the last axis."""
    if stored.heads is None:
        return _slice_part(array, stored.rows, index)
    by_head = array.reshape(*array.shape[:-1], stored.heads, -1)
    widths = [outputs // stored.heads for outputs in stored.rows]
    return _slice_part(by_head, widths, index).reshape(*array.shape[:-1], -1)


def own_outputs(stored: Stored, path: str, outputs: int) -> np.ndarray | None:
    """Rows of a tensor in the order of a weight's outputs; None: all as they are."""
    if not stored.joined and stored.order is None:
        return None
    rows = np.arange(sum(stored.rows) if stored.joined else outputs)
    if stored.joined:
        rows = apart(rows, stored, stored.joined.index(path))
    return rows if stored.order is None else rows[np.array(stored.order)]


def _slice_part(array: np.ndarray, widths: Sequence[int], index: int) -> np.ndarray:
    """Part `index` of the last axis, which is divided into parts of `widths`."""
    first = sum(widths[:index])
    return array[..., first : first + widths[index]]


def tensors_of(
    weights: Mapping[str, jax.Array], naming: Naming, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays in the checkpoint's layout, one at a time."""
    for path in weights:
        stored = naming(path)
        if stored.joined and stored.joined[0] != path:
            continue  # it is written with the first
        of_layer = stored.names
        if stored.leading:
            of_layer = np.reshape(stored.names, (stored.leading[0], -1))
        for layer, tensors in enumerate(of_layer):
            index = layer if stored.leading else None
            parts = [
                _in_order(whole(weights[part], index), naming(part).order)
                for part in stored.joined or (path,)
            ]
            array = together(parts, stored.heads) if stored.joined else parts[0]
            arrays = array if len(stored.leading) == 2 else [array]
            for name, array in zip(np.atleast_1d(tensors), arrays, strict=True):
                array = array.swapaxes(-1, -2) if stored.transposed else array
                kept = naming.plain(path) in naming.family.in_float32
                kind = jnp.dtype("float32" if kept else dtype)
                yield str(name), array.astype(kind)
    for name, value in naming.family.constants.items():
        for layer in range(naming.config.layers):
            yield naming.full(name).format(layer), np.asarray(value, jnp.dtype(dtype))


def _in_order(array: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    return array if order is None else array[..., np.argsort(order)]


def together(parts: Sequence[np.ndarray], heads: int | None) -> np.ndarray:
    """The inverse of `apart`, from the outputs of all weights in order."""
    if heads is None:
        return np.concatenate(parts, axis=-1)
    shape = parts[0].shape[:-1]
    by_head = [x.reshape(*shape, heads, -1) for x in parts]
    return np.concatenate(by_head, axis=-1).reshape(*shape, -1)
