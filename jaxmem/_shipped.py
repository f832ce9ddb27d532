"""Where the configurations that come with jaxmem lie."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
# In an installed package, then in a checkout.
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
