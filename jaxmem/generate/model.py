"""What generation needs of a saved model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem import checkpoints
from jaxmem.checkpoints import Vocabulary
from jaxmem.data import ends
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from jaxmem.data.vocabulary import has_start
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.fingerprint import files_of
from jaxmem.train import saved


class Model(NamedTuple):
    """A decoder, its vocabulary, and how it reads a conversation."""

    decoder: LanguageModel
    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]  # each ends a completion
    max_positions: int  # prompt and completion together, in tokens
    reader: RecordReader  # of records that ask something
    files: tuple[Path, ...]  # that the decoder was read from

    def encode(self, record: RawRecord) -> list[int]:
        """Ids of what a record asks: of a text, or of a conversation up to the answer.

        Raises:
            DataError: it asks nothing, has no token, or cannot be rendered.
        """
        asked, _ = self.reader.prompt(record)
        try:
            ids = self.vocabulary.encode([asked.text])[0]
        except Exception as error:  # the library raises no narrower type
            raise DataError(f"{record.where}: the tokenizer says: {error}") from error
        start: tuple[int, ...] = self.vocabulary.start
        if not asked.rendered and not has_start(ids, start):
            ids = [*start, *ids]
        if not ids:
            raise DataError(f"{record.where}: the prompt has no token")
        return ids


def load(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    factory: str | None = None,
    trust_code: bool = False,
) -> Model:
    """Load the model in a directory.

    Args:
        path: of a checkpoint, an adapter or a run; see `jaxmem.train.saved`.
        adapter: directory of an adapter, for the directory of a checkpoint.
        dtype: of weights, activations and products; None: as they are stored.
        chat_template_kwargs: variables of the chat template, such as
            {"enable_thinking": False}.
        factory: of a run of `model.factory`, the code to run in place of what the run
            names.
        trust_code: True if the code that the run names may be run.

    Raises:
        CheckpointError: there is no model, or it cannot be read.
    """
    code = saved.Code(factory, trust_code)
    with saved.opened(path, adapter, dtype, code) as place:
        vocabulary = checkpoints.load_vocabulary(place.directory)
        described = checkpoints.read_config(place.directory)
        template, reader = _template(place, vocabulary, chat_template_kwargs)
        return Model(
            place.load(dtype),
            vocabulary,
            ends.end_ids(place.directory, template),
            described.max_positions,
            reader,
            files_of(place),
        )


def _template(
    place: saved.Saved, vocabulary: Vocabulary, options: Mapping[str, Any] | None
) -> tuple[ChatTemplate | None, RecordReader]:
    """The chat template, read now: the directory may be temporary; and its reader."""
    added = vocabulary.tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    try:
        template = read_template(place.directory, place.chat_template, special, options)
    except DataError as error:
        if options:
            raise
        reason = str(error)

        def missing() -> ChatTemplate:
            raise DataError(reason)

        return None, RecordReader(missing, absent=vocabulary.absent)
    return template, RecordReader(lambda: template, absent=vocabulary.absent)
