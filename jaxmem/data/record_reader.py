"""The reader of records, which finds each one's form by its columns.

columns -> form -> document, pair of answers or prompt; and lines that report the forms
"""

import contextlib
import datetime
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from jaxmem import checkpoints
from jaxmem.base import messages
from jaxmem.data import forms
from jaxmem.data.chat import ChatTemplate, Templates, read_template
from jaxmem.data.config import DataConfig
from jaxmem.data.forms import Document, Form, PromptText, RecordColumns
from jaxmem.data.records import DataError, RawRecord
from jaxmem.data.rendering import Notes, Renderer
from jaxmem.data.tasks import TaskConfig
from jaxmem.data.token_rows import TokensForm
from jaxmem.data.vocabulary import special_tokens

# Columns that describe a record for others than the model.
_HARMLESS = frozenset(
    "id idx index uuid source dataset split url lang language category metadata meta "
    "timestamp created model prompt_id conversation_id __index_level_0__".split()
)
# Columns that would change what is learned, if anything read them.
_REFUSED = frozenset(
    "label labels role roles system system_prompt prompt question query instruction "
    "input context history tools functions documents image images video videos audio "
    "audios text messages conversations completion response output chosen rejected "
    "input_ids chat_template_kwargs".split()
)
# Columns of other frameworks: masks and weights of the loss, and the layout of packed
# rows.
_COUNTS = re.compile("masks?$|weight", re.IGNORECASE)
_PACKED = frozenset(
    "position_ids segment_ids seq_idx sequence_ids document_ids doc_ids seq_lens "
    "seq_lengths seqlens cu_seqlens cu_seq_lens".split()
)
# Beside a prompt, other columns are for reward functions, which may read such names.
_OF_LOSS = re.compile(
    "masks?$|^weights?$|(loss|sample|token|example)_weights?$", re.IGNORECASE
)
DOCUMENTS = (
    TokensForm(), forms.ShareGpt(), forms.Messages(), forms.Alpaca(), forms.Answered(),
    forms.TextForm(),
)  # fmt: skip
PAIRS = (forms.Preference(),)
PROMPTS = (
    forms.ShareGpt(), forms.Messages(), forms.Instruction(), forms.PromptForm(),
)  # fmt: skip


def decides_loss(column: str) -> bool:
    """True if a column's name is of a mask or weight, or of a packed row's layout."""
    return _COUNTS.search(column) is not None or column.lower() in _PACKED


_MOST_UNUSED = 10  # columns of a record that are named


class _Choice(NamedTuple):
    """The form that a set of columns selects, and the columns that it leaves unused."""

    form: Form
    names: dict[str, str]  # the record's columns, by their names in the form
    refused: str | None  # an unused column that must not be ignored in silence
    notes: tuple[str, ...]  # on the other unused columns


class RecordReader:
    """Reads records of any form, and counts the forms that it has read.

    Args:
        template: returns the template that renders conversations; None: there is none.
        columns: names of the records' columns, by those of a form, such as "prompt".
        ignored: columns, and keys of messages, that are left out.
        absent: special tokens that the model has no embedding of.
        stripped: as in `Renderer`.
        section: as in `Renderer`.
    """

    def __init__(
        self,
        template: Templates | None = None,
        columns: Mapping[str, str] | None = None,
        ignored: Collection[str] = (),
        absent: Sequence[str] = (),
        stripped: str = "raise",
        section: str | None = "data",
    ):
        self._ignored, self._absent = frozenset(ignored), tuple(absent)
        self._columns = {theirs: ours for ours, theirs in (columns or {}).items()}
        self._choices: dict[Any, _Choice] = {}
        self.notes, self._kinds = Notes(), Counter[str]()
        self._section = section
        self.renderer = Renderer(template, self.notes, self._ignored, stripped, section)
        self._seen: set[str] = set()  # columns of records
        _check_names(self._columns.values())

    @classmethod
    def for_job(
        cls,
        config: DataConfig | TaskConfig,
        checkpoint: str | None,
        tokenizer: tokenizers.Tokenizer,
        today: datetime.datetime | None = None,
        stripped: str = "raise",
        section: str = "data",
    ) -> "RecordReader":
        """The reader of a job's records, with its checkpoint's chat template."""
        template, absent = None, ()
        if checkpoint is not None:
            special = special_tokens(tokenizer)
            template = functools.partial(
                read_template, checkpoint, config.chat_template, special,
                config.chat_template_kwargs, today,
            )  # fmt: skip
            template = functools.cache(template)
            absent = checkpoints.load_vocabulary(checkpoint).absent
        return cls(template, config.columns, config.ignored, absent, stripped, section)

    @contextlib.contextmanager
    def whole_pass(self) -> Iterator[None]:
        """A context in which all records are read once, and counted.

        Raises:
            DataError: `columns` names one that no record has.
        """
        self.notes.clear()
        self._kinds.clear()
        yield
        for theirs in self._columns:
            if theirs not in self._seen:
                raise DataError(
                    f"data.columns names {theirs!r}, but no record has this column"
                )

    # ------------------------------------------------------------------ records

    def document(self, record: RawRecord) -> Document:
        """The document of a record of supervised training.

        Raises:
            DataError: the record has no known form, or cannot be rendered.
        """
        form, columns = self._read(record, DOCUMENTS, exact=True)
        document = form.document(columns)
        self._check_tokens(record.where, document.text, document.prompt)
        return document

    def answers(self, record: RawRecord) -> list[Document]:
        """The documents of a chosen and of a rejected answer."""
        form, columns = self._read(record, PAIRS, exact=True)
        documents = form.answers(columns)
        for document in documents:
            self._check_tokens(record.where, document.text, document.prompt)
        return documents

    def prompt(self, record: RawRecord) -> tuple[PromptText, dict[str, Any]]:
        """The prompt of a record, and its other columns."""
        form, columns = self._read(record, PROMPTS, exact=False)
        prompt = form.prompt(columns)
        self._check_tokens(record.where, prompt.text)
        used = set(columns.names.values())
        renamed = self._renamed(record.fields)
        return prompt, {k: v for k, v in renamed.items() if k not in used}

    def _read(
        self, record: RawRecord, known: Sequence[Form], exact: bool
    ) -> tuple[Form, RecordColumns]:
        fields = self._renamed(record.fields)
        present = {k: v for k, v in fields.items() if v is not None}
        key = known, exact, frozenset(present)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(record, present, known, exact)
        if choice.refused is not None:
            ways = {
                "data": ", or assign it in data.columns",
                "task": ", or rename it for a reward function",
            }
            way = self.renderer.ignoring(joint=", ") + ways.get(self._section or "", "")
            raise DataError(
                f"{record.where}: read as {choice.form.name}, which do not use "
                f'"{messages.name(choice.refused)}"; remove it{way}'
            )
        self._kinds[choice.form.name] += 1
        # data.columns gives the name of this column to another one.
        lost = (k for k, v in record.fields.items() if v is not None
                and k not in self._columns and fields.get(k, v) is not v)  # fmt: skip
        for note in (*choice.notes, *_unused(lost)):
            self.notes.add(note, record.where)
        values = {name: present[key] for name, key in choice.names.items()}
        return choice.form, RecordColumns(
            record.where, values, choice.names, self.renderer
        )

    def _renamed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The columns under the names of forms, without those that are left out."""
        if not self._columns and not self._ignored:
            return dict(fields)
        self._seen.update(fields)
        new = {ours for theirs, ours in self._columns.items() if theirs in fields}
        return {
            self._columns.get(key, key): value
            for key, value in fields.items()
            if key not in self._ignored and (key in self._columns or key not in new)
        }

    def _choose(
        self,
        record: RawRecord,
        present: Collection[str],
        known: Sequence[Form],
        exact: bool,
    ) -> _Choice:
        for form in known:
            names = form.names(present)
            if names is None:
                continue
            left = [k for k in present if k not in names.values()]
            refused = (k for k in left if k in _REFUSED or decides_loss(k))
            notes = _unused(k for k in left if k not in _HARMLESS)
            if not exact:
                refused = (
                    k for k in left if k.lower() in _PACKED or _OF_LOSS.search(k)
                )
                notes = ()
            return _Choice(form, names, next(refused, None), notes)
        raise DataError(f"{record.where}: {_expected(known, present, self._columns)}")

    def _check_tokens(self, where: str, *texts: str) -> None:
        """Raise for a text with a special token that the model has no embedding of."""
        for token in self._absent:
            if any(token in text for text in texts):
                raise DataError(
                    f"{where}: the text has the token {messages.short(token)}, for "
                    "which the model has no embedding"
                )

    # -------------------------------------------------------------------- lines

    def template(self) -> ChatTemplate:
        """The template of conversations; raises a DataError where there is none."""
        return self.renderer.template

    def end_of_turn(self) -> str | None:
        """The token that ends an assistant's turn; None where none was rendered."""
        return self.renderer.end_of_turn() if self.renderer.has_rendered else None

    def lines(self) -> list[str]:
        """Lines that count the records of each form, and notes about records."""
        read = [f"read as {kind}, {n:,} records" for kind, n in self._kinds.items()]
        return [*read, *self.notes.lines()]


def _unused(columns: Iterable[str]) -> tuple[str, ...]:
    """Notes about columns that are not used: of the first ones, and of the others."""
    columns = list(columns)
    named = [
        f"the column {messages.short(column)} is not used"
        for column in columns[:_MOST_UNUSED]
    ]
    if more := len(columns) - len(named):
        named.append(f"{more:,} other columns are not used")
    return tuple(named)


def _check_names(names: Iterable[str]) -> None:
    every = (*DOCUMENTS, *PAIRS, *PROMPTS)
    known = {
        spelling
        for form in every
        for spellings in {**form.needs, **form.takes}.values()
        for spelling in spellings
    }
    for name in names:
        if name not in known:
            raise DataError(
                f"data.columns: {messages.short(name)} is not a name that jaxmem knows."
                " The key is jaxmem's name, the value yours, as in "
                '{"prompt": "my_question"}'
            )


_HINTS = {
    "chosen": "pairs of chosen and rejected answers are for run.job='dpo'",
    "messages": "conversations are for run.job='sft'",
}


def _expected(
    known: Sequence[Form], present: Collection[str], columns: Mapping[str, str]
) -> str:
    """The message that a record has no known form, with the columns of those forms."""
    columns_of_forms = " or ".join(
        " and ".join(f'"{spellings[0]}"' for spellings in form.needs.values())
        for form in known
    )
    hint = next((h for key, h in _HINTS.items() if key in present), None)
    named = "" if columns else "; name them in data.columns"
    return (
        f"expected {columns_of_forms}; got the keys "
        f"{messages.listing(sorted(present)) or '(none)'}{named}"
        f"{'; ' + hint if hint else ''}"
    )
