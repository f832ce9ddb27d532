"""The configurations shipped with jaxmem, and how a command or a file names one."""

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


def names() -> list[str]:
    """The names of shipped configurations, without recipes, sorted."""
    return sorted({path.name for d in FOLDERS for path in d.glob("*.gin")})
