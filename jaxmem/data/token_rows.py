"""Records that are tokens already."""

from collections.abc import Callable, Mapping

from jaxmem.base import messages
from jaxmem.data.forms import Document, Form, RecordColumns
from jaxmem.data.records import DataError

# Columns of 0 or 1 a token; the loss counts a token that none of them leaves out.
_MASKS = "completion_mask", "assistant_masks", "assistant_mask"
# Columns that lay out packed rows in other frameworks; a function is True for values
# that describe n tokens of one document.
_PACKED: Mapping[str, Callable[[int, list[int]], bool]] = {
    "position_ids": lambda n, values: values == [*range(n)],
    "segment_ids": lambda n, values: len({*values}) == 1 and len(values) == n,
    "seq_idx": lambda n, values: len({*values}) == 1 and len(values) == n,
    "seq_lens": lambda n, values: values == [n],
    "cu_seqlens": lambda n, values: values == [0, n],
}


class TokensForm(Form):
    """Ids of tokens, and labels as transformers has them: -100 where none counts."""

    name = "tokens"
    needs = {"ids": ("input_ids",)}
    takes = {
        "labels": ("labels",),
        "attention": ("attention_mask",),
        **{name: (name,) for name in (*_MASKS, *_PACKED)},
    }

    def document(self, columns: RecordColumns) -> Document:
        ids = self._integers(columns, "ids")
        count = len(ids)
        live = [True] * count
        for name in ("attention", *_MASKS):
            if name in columns:
                values = self._integers(columns, name, count)
                if not {0, 1}.issuperset(values):
                    field = f'{columns.where}: "{columns.names[name]}"'
                    raise DataError(
                        messages.must_be(field, "0 or 1 for each token", values)
                    )
                if name == "attention" and 0 in values:
                    raise DataError(
                        f"{columns.where}: attention_mask must be 1 everywhere, "
                        "because records have no padding"
                    )
                live = [a and b == 1 for a, b in zip(live, values, strict=True)]
        self._check_packing(columns, count)  # after padding, which changes positions
        if "labels" in columns:
            labels = self._integers(columns, "labels", count)
            for i, (id_, label) in enumerate(zip(ids, labels, strict=True)):
                if label not in (id_, -100):
                    raise DataError(
                        f"{columns.where}: labels[{i}] must be input_ids[{i}]={id_}, "
                        f"or -100 if the loss does not count it, got {label}"
                    )
            live = [a and b != -100 for a, b in zip(live, labels, strict=True)]
        counted_ids = [
            id_ if counts else -1 for id_, counts in zip(ids, live, strict=True)
        ]
        return Document(
            columns.where, "", counted=(), ids=tuple(ids), labels=(*counted_ids[1:], -1)
        )

    def _check_packing(self, columns: RecordColumns, count: int) -> None:
        """Raise for a row of several documents."""
        for name, is_one in _PACKED.items():
            if name in columns and not is_one(count, self._integers(columns, name)):
                raise DataError(
                    f"{columns.where}: {columns.names[name]} must describe one "
                    f"document of {count} tokens, got "
                    f"{messages.short(columns[name])}; give each document its own "
                    "record: jaxmem packs them"
                )

    def _integers(
        self, columns: RecordColumns, name: str, count: int | None = None
    ) -> list[int]:
        values = columns[name]
        is_valid = isinstance(values, list) and all(
            type(x) is int and abs(x) < 2**31 for x in values
        )
        if not is_valid or not values or (count is not None and len(values) != count):
            expected = (
                "integers" if count is None else f"{count} integers, one per token"
            )
            field = f'{columns.where}: "{columns.names[name]}"'
            raise DataError(messages.must_be(field, f"a list of {expected}", values))
        return values
