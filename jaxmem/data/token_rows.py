"""Records that are tokens already."""

from jaxmem.base import messages
from jaxmem.data.forms import Columns, Document, Form
from jaxmem.data.records import DataError


class Tokens(Form):
    """Ids of tokens, and labels as transformers has them: -100 where none counts."""

    name = "tokens"
    needs = {"ids": ("input_ids",)}
    takes = {
        "labels": ("labels",),
        "attention": ("attention_mask",),
        "mask": ("completion_mask", "assistant_masks", "assistant_mask"),
    }

    def document(self, columns: Columns) -> Document:
        ids = self._integers(columns, "ids")
        count = len(ids)
        live = [True] * count
        for name in ("attention", "mask"):
            if name in columns:
                values = self._integers(columns, name, count)
                if not {0, 1}.issuperset(values):
                    place = f'{columns.where}: "{columns.names[name]}"'
                    raise DataError(messages.must_be(place, "0 or 1 a token", values))
                if name == "attention" and 0 in values:
                    raise DataError(
                        f"{columns.where}: attention_mask must be 1 everywhere: "
                        "records hold no padding"
                    )
                live = [a and b == 1 for a, b in zip(live, values, strict=True)]
        if "labels" in columns:
            labels = self._integers(columns, "labels", count)
            for i, (id_, label) in enumerate(zip(ids, labels, strict=True)):
                if label not in (id_, -100):
                    raise DataError(
                        f"{columns.where}: labels[{i}] must be input_ids[{i}]={id_}, "
                        f"or -100 where the loss counts nothing, got {label}"
                    )
            live = [a and b != -100 for a, b in zip(live, labels, strict=True)]
        own = [id_ if counts else -1 for id_, counts in zip(ids, live, strict=True)]
        return Document(
            columns.where, "", counted=(), ids=tuple(ids), labels=(*own[1:], -1)
        )

    def _integers(
        self, columns: Columns, name: str, count: int | None = None
    ) -> list[int]:
        values = columns[name]
        good = isinstance(values, list) and all(
            type(x) is int and abs(x) < 2**31 for x in values
        )
        if not good or not values or (count is not None and len(values) != count):
            wanted = "integers" if count is None else f"{count} integers, one a token"
            place = f'{columns.where}: "{columns.names[name]}"'
            raise DataError(messages.must_be(place, f"a list of {wanted}", values))
        return values
