"""The weights of the models that are served, and what replaces them."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem import checkpoints
from jaxmem.base import messages
from jaxmem.base.fields import values_of
from jaxmem.generate.model import Model
from jaxmem.models import sampling
from jaxmem.models.decoder import Decoder
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.weights import by_path, merge_module, split_module
from jaxmem.serve.request_error import RequestError

_FIRST_VERSION = "default"  # of weights that nobody has named, as in vLLM
_MOST_ADAPTERS = 8


@dataclasses.dataclass(frozen=True)
class WeightRoots:
    """Folders below which new weights may be read."""

    folders: tuple[Path, ...]

    def checked(self, path: str, param: str) -> Path:
        """The directory of a request, without links.

        Raises:
            RequestError: it is not below one of the folders.
        """
        if not self.folders:
            raise RequestError(
                f"{param}={messages.short(path)}: this server loads no weights; start "
                "it with --weights FOLDER",
                HTTPStatus.FORBIDDEN, param,
            )  # fmt: skip
        try:
            directory = Path(path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # such as a null byte
            raise RequestError(
                f"{param}={messages.short(path)}: {messages.reason(error)}", param=param
            ) from error
        if not Path(path).is_absolute() or not self._are_above(directory):
            raise self._refusal(param, path)
        with contextlib.suppress(OSError):  # reading it will say why
            for file in directory.iterdir():
                if file.is_symlink() and not self._are_above(file.resolve()):
                    raise self._refusal(param, str(file))
        return directory

    def _are_above(self, path: Path) -> bool:
        return any(root in path.parents for root in self.folders)

    def _refusal(self, param: str, path: str) -> RequestError:
        named = messages.listing(map(str, self.folders))
        return RequestError(
            f"{param}={messages.short(path)} is not below a folder of --weights "
            f"({named}); start the server with --weights of a folder above it",
            HTTPStatus.FORBIDDEN, param,
        )  # fmt: skip


class ServedWeights:
    """The model, and adapters of it, by the names of requests.

    Its methods change nothing unless they succeed, and belong to the thread of the
    `DecodingLoop`.

    Args:
        name: of the model in requests.
        model: with the decoder.

    Attributes:
        adapters: directory of each adapter, by its name.
    """

    def __init__(self, name: str, model: Model):
        decoder = model.decoder
        if not isinstance(decoder, Decoder):
            raise ValueError(
                f"{name}: jaxmem serve decodes the families of docs/families.md, and "
                "not a model of model.factory; jaxmem generate completes its prompts"
            )
        self.name = name
        self._versions = {name: _FIRST_VERSION}  # of the model and of adapters
        self._latest = name  # of them, the one that was loaded last
        self.adapters: dict[str, Path] = {}
        self._described, self._plain = model.described, decoder
        self._prepared: dict[str, LanguageModel] = {name: sampling.prepared(decoder)}

    @property
    def names(self) -> list[str]:
        """Names that requests may have: of the model, then of adapters."""
        return [self.name, *self.adapters]

    @property
    def version(self) -> str:
        """The version of the weights that were loaded last; "default" until a name."""
        return self._versions[self._latest]

    @version.setter
    def version(self, version: str) -> None:
        self._versions[self._latest] = version

    def version_of(self, name: str) -> str:
        """The version of the model or of an adapter."""
        return self._versions[name]

    def _note_load(self, name: str) -> None:
        self._latest, self._versions[name] = name, _FIRST_VERSION

    def decoder(self, name: str) -> LanguageModel:
        """The prepared decoder of that name."""
        return self._prepared[name]

    def reload(self, directory: Path) -> None:
        """Replace the model's weights by those of a checkpoint of equal shapes.

        Raises:
            RequestError: the directory has no such checkpoint, or adapters are loaded,
                which belong to the weights before.
        """
        if self.adapters:
            raise RequestError(
                f"weights_path={directory}: adapters "
                f"{messages.listing(self.adapters)} are loaded over the old weights; "
                "send either whole weights or adapters, and unload the adapters or "
                "start the server again in between"
            )
        config = self._plain.config
        options: dict[str, Any] = {} if config.base is None else {"base": config.base}
        with _refusals("weights_path"):
            read = checkpoints.load(
                directory,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                policy=self._plain.policy,
                **options,
            )
        new = self._like_old(read)
        self._prepared[self.name] = sampling.prepared(new)
        self._plain = new
        self._note_load(self.name)

    def _like_old(self, read: Decoder) -> Decoder:
        """The old decoder with new weights, for the programs that are compiled."""
        old, new = by_path(self._plain), by_path(read)
        for path in sorted(old.keys() | new.keys()):
            shapes = [_described(weights.get(path)) for weights in (old, new)]
            if shapes[0] != shapes[1]:
                raise _other_model(
                    f"{path} is {shapes[1]}, and the served model's is {shapes[0]}"
                )
        differing = _differing(self._plain, read)
        if differing:
            raise _other_model(f"config.json has {', '.join(differing)}")
        return merge_module(split_module(self._plain)[0], split_module(read)[1])

    def load_adapter(self, name: str, directory: Path, in_place: bool) -> None:
        """Add an adapter of the model under a name, or replace the one of that name.

        Raises:
            RequestError: the name is taken, or the directory has no such adapter.
        """
        if name == self.name:
            raise RequestError(
                f"lora_name={messages.short(name)} is the name of the model; choose "
                "another",
                param="lora_name",
            )
        if name in self.adapters and not in_place:
            raise RequestError(
                f"The lora adapter {messages.short(name)} has already been loaded; "
                "send load_inplace=true to replace it",
                param="lora_name",
            )
        if self._plain.config.lora_rank:
            raise RequestError(
                f"{self.name} has an adapter of its own, and cannot take lora_path="
                f"{messages.short(str(directory))}; start the server with its base",
                param="lora_path",
            )
        if len(self.adapters) >= _MOST_ADAPTERS and name not in self.adapters:
            raise RequestError(
                f"{_MOST_ADAPTERS} adapters are loaded, and no more may be; unload "
                f"or replace one of {messages.listing(self.adapters)}",
                param="lora_name",
            )
        with _refusals("lora_path"):
            adapted = checkpoints.with_adapter(self._plain, directory, self._described)
        self._prepared[name] = sampling.prepared(adapted)
        self.adapters[name] = directory
        self._note_load(name)

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter to no further request; `release` frees it.

        Raises:
            RequestError: no adapter has that name.
        """
        if name not in self.adapters:
            raise RequestError(
                f"The lora adapter {messages.short(name)} cannot be found.",
                HTTPStatus.NOT_FOUND,
                param="lora_name",
            )
        del self.adapters[name]
        if self._latest == name:
            self._latest = self.name

    def release(self, needed: Collection[str]) -> None:
        """Free the adapters that are unloaded, except the ones of some names."""
        for name in self._prepared.keys() - {*self.names, *needed}:
            del self._prepared[name], self._versions[name]

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor of the model, and of each adapter's as "NAME:PATH"."""
        sums = _checksums(by_path(self._plain))
        for name in self.adapters:
            flat = by_path(self._prepared[name])
            own = {path: x for path, x in flat.items() if "/lora_" in path}
            sums |= {f"{name}:{path}": x for path, x in _checksums(own).items()}
        return sums


def _checksums(weights: Mapping[str, Any]) -> dict[str, str]:
    def digest(array: Any) -> str:
        values = np.ascontiguousarray(jax.device_get(array)).reshape(-1)
        return hashlib.sha256(values.view(np.uint8).data).hexdigest()

    return {path: digest(array) for path, array in sorted(weights.items())}


def _described(array: Any) -> str:
    return "absent" if array is None else f"{array.dtype}{list(array.shape)}"


def _differing(old: Decoder, new: Decoder) -> list[str]:
    """Settings of the model in which a checkpoint differs."""
    served, sent = values_of(old.config), values_of(new.config)
    return [
        f"{key}={sent[key]!r}, not {value!r}"
        for key, value in served.items()
        if key != "checkpoint" and sent[key] != value
    ]


def _other_model(difference: str) -> RequestError:
    return RequestError(
        f"weights_path: {difference}; send weights of the served model's architecture "
        "(the old weights stay)",
        param="weights_path",
    )


@contextlib.contextmanager
def _refusals(param: str) -> Iterator[None]:
    """Convert errors of a directory that is read to a `RequestError`.

    Its status is 500, as of a failure that may pass: a file may arrive late.
    """
    try:
        yield
    except (checkpoints.CheckpointError, OSError) as error:
        raise RequestError(
            f"{param}: {messages.cut(str(error))} (the old weights stay)",
            HTTPStatus.INTERNAL_SERVER_ERROR, param,
        ) from error  # fmt: skip
