"""`jaxmem export`: the model of a run, a checkpoint or an adapter, to take away."""

import os
import shutil
from pathlib import Path

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.directories import new_directory
from jaxmem.models.own_model import OwnModel
from jaxmem.train import model_factory, results, saved

_ENDS = "generation_config.json"


def export(
    path: str,
    out: str,
    *,
    merge: bool = False,
    dtype: str | None = None,
    code: saved.Code = saved.OF_USER,
) -> str:
    """Save the model in a directory as a checkpoint that transformers loads.

    Args:
        path: of a run, also one that has not ended, a checkpoint or an adapter.
        out: directory to create.
        merge: add adapters to the matrices that they adapt; without it they are saved
            alone, in PEFT's layout.
        dtype: of the saved weights of a whole model; None: as they are stored.
        code: of the model of a run, which may be run.

    Raises:
        CheckpointError: there is no model, `out` exists, or there is nothing to merge.
    """
    target = Path(out).expanduser()
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists; name another --out")
    with saved.opened(path, code=code) as source:
        decoder, base = source.load(dtype), source.directory
        rank = decoder.config.lora_rank
        if merge and not rank:
            raise CheckpointError(f"{path}: has no adapter to merge")
        if isinstance(decoder, OwnModel):
            return _save_own_model(target, decoder, source, dtype)
        if rank and not merge:
            if dtype is not None:
                raise CheckpointError("--dtype is for a whole model, as with --merge")
            checkpoints.save_adapter(target, decoder, base=str(base))
            results.add_end(target, source.end_of_turn, base)
            return f"saved in {target}: an adapter of {base}"
        checkpoints.save(
            target,
            checkpoints.merge(decoder) if rank else decoder,
            like=base,
            dtype=dtype,
            chat_template=source.chat_template,
        )
        results.add_end(target, source.end_of_turn)
        if source.adapter is not None and (source.adapter / _ENDS).exists():
            shutil.copy(source.adapter / _ENDS, target)
    return f"saved in {target}, for transformers to load"


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
        f"saved in {target}: model.safetensors has the weights by their paths in the "
        f"module of model.factory, {model_factory.TEXT} its tokenizer"
    )
