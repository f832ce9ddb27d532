"""The configurations shipped with jaxmem, and how a command or a file names one."""

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# The first exists in an installed package, the second in a checkout.
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def find(name: str) -> Path | None:
    """The shipped configuration of a name, with or without its suffix; None: no such.

    "x", "x.gin" and "configs/x.gin" name a shipped file, as do "recipes/x.gin" and
    "configs/recipes/x.gin"; "elsewhere/x.gin" does not.
    """
    within = Path(name.removeprefix("configs/"))
    if within.parent.as_posix() not in (".", "recipes"):
        return None
    if within.suffix != ".gin":
        within = within.with_name(f"{within.name}.gin")
    return next((d / within for d in FOLDERS if (d / within).is_file()), None)


def suggestion(name: str) -> str:
    """The end of an error about a missing file: the nearest shipped one, or nothing."""
    recipes = (path for d in FOLDERS for path in d.glob("recipes/*.gin"))
    by_stem = {path.stem: f"recipes/{path.name}" for path in recipes}
    by_stem |= {own.removesuffix(".gin"): own for own in names()}
    stem = Path(name).name.removesuffix(".gin")
    close = difflib.get_close_matches(stem[:100], by_stem, n=1)
    return f"; did you mean {by_stem[close[0]]}?" if close else ""


def names() -> list[str]:
    """The names of shipped configurations, without recipes, sorted."""
    return sorted({path.name for d in FOLDERS for path in d.glob("*.gin")})
