"""The folders that hold the configurations shipped with jaxmem."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# The first exists in an installed package, the second in a checkout.
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
