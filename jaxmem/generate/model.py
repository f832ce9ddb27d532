"""A saved model with its vocabulary, template and ends, ready to complete prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.base.command_options import ModelOptions
from jaxmem.checkpoints import CheckpointConfig, Vocabulary
from jaxmem.data.chat import ChatTemplate
from jaxmem.data.completion_ends import end_ids
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from jaxmem.data.vocabulary import has_start
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.opened_model import OpenedModel, opened


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

    @classmethod
    def of(
        cls,
        options: ModelOptions,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Model":
        """Load the model that the options of a command name.

        Raises:
            CheckpointError: there is no model, or it cannot be read.
        """
        with opened(options, chat_template_kwargs) as model:
            template, reader = _read_template(model)
            return cls(
                model.load(),
                model.vocabulary,
                end_ids(model.source.directory, template),
                model.described,
                reader,
                model.files,
            )

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
    options: dict[str, Any] = {"dtype": dtype, "base": base}
    options["adapter"] = None if adapter is None else str(adapter)
    options |= {"factory": factory, "trust_code": trust_code}
    return Model.of(ModelOptions(str(path), **options), chat_template_kwargs)


def _read_template(model: OpenedModel) -> tuple[ChatTemplate | None, RecordReader]:
    """The chat template, None if there is none, and a reader of records that uses it.

    It is read before the directory, which may be temporary, is closed.
    """
    try:
        return model.template, model.reader()
    except DataError as error:
        if model.chat_template_kwargs:
            raise
        reason = str(error)

    def missing() -> ChatTemplate:
        raise DataError(reason)

    absent = model.vocabulary.absent
    return None, RecordReader(missing, absent=absent, section=None)
