"""Opens the saved model of a command: texts at once, weights when they are needed."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem import checkpoints
from jaxmem.base.command_options import ModelOptions
from jaxmem.checkpoints import CheckpointConfig, Vocabulary
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.vocabulary import special_tokens
from jaxmem.models.own_model import LanguageModel
from jaxmem.score import fingerprint
from jaxmem.train import saved


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A saved model whose weights are not loaded yet; valid while `opened` is."""

    options: ModelOptions
    source: saved.Saved
    vocabulary: Vocabulary
    described: CheckpointConfig  # architecture, and how weights are named
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the template

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template; raises a DataError where there is none."""
        return read_template(
            self.source.directory,
            self.source.chat_template,
            special_tokens(self.vocabulary.tokenizer),
            self.chat_template_kwargs,
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the model's weights and config."""
        return fingerprint.files_of(self.source)

    def reader(self, stripped: str = "raise") -> RecordReader:
        """The reader of records for this model; `stripped` is as in `RecordReader`."""
        return RecordReader(
            lambda: self.template,
            absent=self.vocabulary.absent,
            stripped=stripped,
            section=None,
        )

    def load(self) -> LanguageModel:
        """The decoder with its weights.

        Raises:
            CheckpointError: the weights cannot be loaded with these options.
        """
        return self.source.load(self.options.dtype, self.options.base)


@contextlib.contextmanager
def opened(
    options: ModelOptions, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Iterator[OpenedModel]:
    """Open the model that the options of a command name.

    Raises:
        CheckpointError: there is no model, or it cannot be read.
        HubError: the Hub cannot serve a model that is named.
    """
    code = saved.Code(options.factory, options.trust_code)
    with saved.opened(options.model, options.adapter, options.dtype, code) as source:
        yield OpenedModel(
            options,
            source,
            checkpoints.load_vocabulary(source.directory),
            checkpoints.read_config(source.directory),
            chat_template_kwargs,
        )
