"""`jaxmem export`: the model of a run, a checkpoint or an adapter, to take away."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxmem import checkpoints
from jaxmem.base import files, hub
from jaxmem.checkpoints import CheckpointError, model_card
from jaxmem.checkpoints.base_record import BaseName
from jaxmem.checkpoints.directories import new_directory
from jaxmem.models.decoder import Decoder
from jaxmem.models.own_model import LanguageModel, OwnModel
from jaxmem.train import cards, model_factory, results, saved

_ADAPTER = "adapter_config.json"
_ENDS = "generation_config.json"


def export(
    path: str,
    out: str,
    *,
    merge: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    code: saved.Code = saved.OF_USER,
    name: str | None = None,
) -> str:
    """Save the model in a directory as a checkpoint that transformers loads.

    README.md beside it is its card.

    Args:
        path: of a run, also one that has not ended, a checkpoint or an adapter.
        out: directory to create.
        merge: add adapters to the matrices that they adapt; without it they are saved
            alone, in PEFT's layout. Codes of a base are decoded in both cases but this
            last one.
        base: name of the base that the adapter is to record, a directory or, in the
            Hub, OWNER/NAME; None: as it is recorded, or the one that it was trained on.
        dtype: of the saved weights of a whole model; None: as they are stored.
        code: of the model of a run, which may be run.
        name: of the model in its card; None: the directory.

    Raises:
        CheckpointError: there is no model, `out` exists, or there is nothing to merge.
    """
    target = Path(out).expanduser()
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; name another --out")
    with saved.opened(path, code=code) as source:
        line = _save(path, target, source, merge=merge, base=base, dtype=dtype)
        _write_card(target, path, source, name or str(files.shown(target)))
    return line


def _save(
    path: str,
    target: Path,
    source: saved.Saved,
    merge: bool,
    base: str | None,
    dtype: str | None,
) -> str:
    """Save the model, as `export` says; return lines about it."""
    decoder, directory = source.load(dtype), source.directory
    rank = decoder.config.lora_rank
    is_merged = source.adapter is not None and not rank
    if merge and not (rank or is_merged):
        raise CheckpointError(f"{path} has no adapter to merge")
    if is_merged and not merge:
        raise CheckpointError(
            f"{path} is a DoRA adapter, which jaxmem merges when it reads it; add "
            "--merge"
        )
    if base is not None and (merge or not rank):
        raise CheckpointError(
            f"--base={base} is for an exported adapter, and this export is a whole "
            "model; leave --base out"
        )
    if isinstance(decoder, OwnModel):
        return _save_own_model(target, decoder, source, dtype)
    if source.unknown is not None:
        raise CheckpointError(
            f"{path}: {source.unknown}; jaxmem generate, score and eval read it"
        )
    if rank and not merge:
        if dtype is not None:
            raise CheckpointError(
                "--dtype is for an exported whole model; add --merge, or leave "
                "--dtype out"
            )
        if source.is_drawn:
            raise CheckpointError(
                f"{path}: the adapters belong to random weights "
                "(model.checkpoint=None), which a saved adapter does not contain; add "
                "--merge"
            )
        named = _save_adapter(target, decoder, source, base).name
        return f"saved in {target}: an adapter of {named}{_name_codes(decoder)}"
    merged, lines = _merge(decoder, source)
    checkpoints.save(
        target,
        merged,
        like=directory,
        dtype=dtype,
        chat_template=source.chat_template,
    )
    _add_ends(target, source)
    return "\n".join([f"saved in {target}, for transformers to load", *lines])


def _save_adapter(
    target: Path, decoder: Decoder, source: saved.Saved, name: str | None
) -> BaseName:
    """Save adapters alone; return the base that they record, `name` if it is given."""
    base = BaseName.of(str(source.directory))
    if name is not None:
        base = _checked_base(name)
    elif source.adapter is not None:
        base = BaseName.recorded(source.adapter)
    checkpoints.save_adapter(
        target,
        decoder,
        base=str(source.directory),
        named=base,
        chat_template=source.chat_template,
    )
    _add_ends(target, source, source.directory)
    return base


def _checked_base(name: str) -> BaseName:
    """The base that --base names: a checkpoint's directory, or OWNER/NAME[@REVISION].

    Raises:
        CheckpointError: it is neither.
    """
    if (Path(name).expanduser() / "config.json").exists():
        return BaseName.of(name)
    model = hub.parse(name)
    if model is None:
        raise CheckpointError(
            f"--base={name} must be the directory of a checkpoint (with config.json) "
            "or a model of the Hub, OWNER/NAME or OWNER/NAME@REVISION"
        )
    return BaseName(model.repository, model.revision)


def _add_ends(target: Path, source: saved.Saved, like: Path | None = None) -> None:
    """Name in a saved directory the tokens that ended the turns it learned from."""
    results.add_end(target, source.end_of_turn, like)
    if source.adapter is not None and (source.adapter / _ENDS).exists():
        shutil.copy(source.adapter / _ENDS, target)


def _name_codes(decoder: LanguageModel) -> str:
    """The end of a line about a base: the codes that it is in, if any."""
    base = decoder.config.base
    return "" if base is None else f", whose matrices are in {base}"


def _merge(decoder: Decoder, source: saved.Saved) -> tuple[Decoder, list[str]]:
    """The decoder without adapters and codes, and a line about lost precision."""
    config, base = decoder.config, source.directory
    if config.base is None:
        return checkpoints.merge(decoder) if config.lora_rank else decoder, []
    original = None
    if not source.is_drawn and checkpoints.read_config(base).coding is None:
        original = checkpoints.kernels_of(base, config.param_dtype)
    merged = checkpoints.merge_codes(decoder, original)
    model = "random weights" if source.is_drawn else str(base)
    line = (
        f"matrices are decoded from the {config.base} codes of {model}, and are not "
        "those of the 16-bit model before coding"
    )
    if merged.coding is not None:
        line = (
            f"matrices are decoded from {config.base} codes of {base}, and differ "
            f"from its own by {merged.coding:.2%}"
        )
    rounding = f"rounding to {config.param_dtype} changed them by {merged.rounding:.2%}"
    return merged.decoder, [f"{line}; {rounding} (root mean squares)"]


def _write_card(target: Path, path: str, source: saved.Saved, name: str) -> None:
    """Write an export's card, with the numbers of the run that it is of, if any."""
    if not (target / "config.json").exists() and not (target / _ADAPTER).exists():
        return  # a model of model.factory, which only its code loads
    run = cards.run_of(Path(path).expanduser())
    if source.adapter is not None:
        base = cards.base_of(source.adapter, None)
    elif run is not None:
        base = cards.checkpoint_of(run)
    else:
        base = hub.recorded(str(source.directory))
    cards.write(target, name, cards.base_of(target, base), run)


@contextlib.contextmanager
def directory(out: str | None) -> Iterator[str]:
    """The directory to export to: the one that is named, or one that is removed."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix=".jaxmem-export-", dir=".") as made:
        yield str(Path(made) / "model")


def push(path: str, out: str, repository: str, private: bool) -> str:
    """Upload an export to the Hub; return a line about it.

    Args:
        path: that was exported, for the advice of errors.
        out: directory that it was exported to.
        repository: OWNER/NAME.
        private: True if only its owner may see it.

    Raises:
        HubError: it cannot be uploaded; the message ends with what to type to retry.
    """
    try:
        address = hub.push(
            Path(out).expanduser(),
            repository,
            private=private,
            is_own=model_card.is_own,
        )
    except hub.HubError as error:
        flag = " --private" if private else ""
        again = f"jaxmem export {path} --push {repository}{flag}"
        raise hub.HubError(f"{error}; to try again, run: {again}") from error
    return f"pushed to {address}"


def _save_own_model(
    target: Path, model: OwnModel, source: saved.Saved, dtype: str | None
) -> str:
    """Save the weights of `model.factory`'s module, and how it reads text."""
    with new_directory(target) as unfinished:
        assert unfinished is not None  # there is one process
        model_factory.save_weights(unfinished, model, dtype)
        text = unfinished / model_factory.TEXT
        text.mkdir()
        checkpoints.copy_text_files(source.directory, text, source.chat_template)
        results.add_end(text, source.end_of_turn)
    return (
        f"saved in {target}: model.safetensors contains the weights, named by their "
        f"paths in the module of model.factory; {model_factory.TEXT} contains its "
        "tokenizer"
    )
