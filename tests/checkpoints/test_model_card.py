"""Cards that jaxmem wrote, and those that a user has changed."""

import pytest

from jaxmem.checkpoints import model_card
from jaxmem.checkpoints.directories import foreign_in


@pytest.mark.parametrize("change", ["", "more\n", None])
def test_foreign_in_names_a_changed_card(change, tmp_path):
    card = tmp_path / "README.md"
    model_card.write(tmp_path, "# é\n\ntext\n")
    assert model_card.is_own(card) and foreign_in(tmp_path) is None
    text = card.read_text()
    card.write_text("# own" if change is None else text.replace("text", change, 1))
    assert not model_card.is_own(card) and foreign_in(tmp_path) == card


def test_is_own_of_files_that_are_no_cards(tmp_path):
    assert not model_card.is_own(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff")
    assert not model_card.is_own(tmp_path / "binary")
