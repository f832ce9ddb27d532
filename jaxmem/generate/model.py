"""A saved model with its vocabulary, template and ends, ready to complete prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointConfig, Vocabulary
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.completion_ends import end_ids
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from jaxmem.data.vocabulary import has_start
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.fingerprint import files_of
from jaxmem.train import saved


class Model(NamedTuple):
    """A decoder, its vocabulary, and the reader of its prompts."""

    decoder: LanguageModel
    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]  # each ends a completion
    described: CheckpointConfig  # architecture, and how weights are named
    reader: RecordReader  # of prompts
    files: tuple[Path, ...]  # sources of the decoder's weights and config

    @property
    def max_positions(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self.described.max_positions

    def encode(self, record: RawRecord) -> list[int]:
        """Ids of a record's prompt: of a text, or of a conversation up to the answer.

        Raises:
            DataError: the record has no prompt, or one without a token or that the
                template cannot render.
        """
        asked, _ = self.reader.prompt(record)
        try:
            ids = self.vocabulary.encode([asked.text])[0]
        except Exception as error:  # the library raises no narrower type
            raise DataError(
                f"{record.where}: the tokenizer cannot encode the prompt: {error}"
            ) from error
        start: tuple[int, ...] = self.vocabulary.start
        if not asked.rendered and not has_start(ids, start):
            ids = [*start, *ids]
        if not ids:
            raise DataError(f"{record.where}: the prompt is empty")
        return ids


def load(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    factory: str | None = None,
    trust_code: bool = False,
    base: str | None = None,
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
        base: "nf4" or "int8": matrices of blocks are coded as they are read; None: they
            are as stored.

    Raises:
        CheckpointError: there is no model, or it cannot be read.
    """
    code = saved.Code(factory, trust_code)
    with saved.opened(path, adapter, dtype, code) as source:
        vocabulary = checkpoints.load_vocabulary(source.directory)
        described = checkpoints.read_config(source.directory)
        template, reader = _read_template(source, vocabulary, chat_template_kwargs)
        return Model(
            source.load(dtype, base),
            vocabulary,
            end_ids(source.directory, template),
            described,
            reader,
            files_of(source),
        )


def _read_template(
    source: saved.Saved, vocabulary: Vocabulary, options: Mapping[str, Any] | None
) -> tuple[ChatTemplate | None, RecordReader]:
    """The chat template, None if there is none, and a reader of records that uses it.

    It is read before the directory, which may be temporary, is closed.
    """
    added = vocabulary.tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    try:
        template = read_template(
            source.directory, source.chat_template, special, options
        )
    except DataError as error:
        if options:
            raise
        reason = str(error)

        def missing() -> ChatTemplate:
            raise DataError(reason)

        return None, RecordReader(missing, absent=vocabulary.absent, section=None)
    reader = RecordReader(lambda: template, absent=vocabulary.absent, section=None)
    return template, reader
