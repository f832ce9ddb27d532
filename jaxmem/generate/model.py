"""What generation needs of a saved model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem import checkpoints
from jaxmem.checkpoints import Vocabulary
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.records import DataError
from jaxmem.models.decoder import Decoder
from jaxmem.score.fingerprint import checkpoint_files
from jaxmem.train import saved


class Model(NamedTuple):
    """A decoder, its vocabulary, and how it reads a conversation."""

    decoder: Decoder
    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]  # each ends a completion
    max_positions: int  # prompt and completion together, in tokens
    template: Callable[[], ChatTemplate]  # raises a DataError where there is none
    files: tuple[Path, ...]  # that the decoder was read from

    def encode(self, prompt: str | list[dict[str, Any]], where: str) -> list[int]:
        """Ids of a text, or of a conversation up to the answer.

        Args:
            prompt: a text, or messages for the chat template.
            where: what an error calls the prompt.

        Raises:
            DataError: it has no token, or the template cannot render it.
        """
        start: tuple[int, ...] = self.vocabulary.start
        if not isinstance(prompt, str):
            prompt, start = self._rendered(prompt, where), ()
        try:
            ids = [*start, *self.vocabulary.encode([prompt])[0]]
        except Exception as error:  # the library raises no narrower type
            raise DataError(f"{where}: the tokenizer says: {error}") from error
        if not ids:
            raise DataError(f"{where}: the prompt has no token")
        return ids

    def _rendered(self, turns: list[dict[str, Any]], where: str) -> str:
        try:
            return self.template().render(turns, add_generation_prompt=True)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def load(
    path: str | Path, *, adapter: str | Path | None = None, dtype: str | None = None
) -> Model:
    """Load the model in a directory.

    Args:
        path: of a checkpoint, an adapter or a run; see `jaxmem.train.saved`.
        adapter: directory of an adapter, for the directory of a checkpoint.
        dtype: of weights, activations and products; None: as they are stored.

    Raises:
        CheckpointError: there is no model, or it cannot be read.
    """
    with saved.opened(path, adapter, dtype) as place:
        vocabulary = checkpoints.load_vocabulary(place.directory)
        described = checkpoints.read_config(place.directory)
        files = place.files or _files(place)
        return Model(
            place.load(dtype),
            vocabulary,
            checkpoints.end_ids(place.directory),
            described.max_positions,
            _template(place, vocabulary),
            files,
        )


def _files(place: saved.Saved) -> tuple[Path, ...]:
    directories = [place.directory] + ([place.adapter] if place.adapter else [])
    return tuple(path for each in directories for path in checkpoint_files(each))


def _template(place: saved.Saved, vocabulary: Vocabulary) -> Callable[[], ChatTemplate]:
    """The chat template, read now: the directory may be temporary."""
    added = vocabulary.tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    try:
        template = read_template(place.directory, place.chat_template, special)
    except DataError as error:
        reason = str(error)

        def missing() -> ChatTemplate:
            raise DataError(reason)

        return missing
    return lambda: template
