"""Compiled programs kept from one test run to the next, for every process of a run.

jax may read an entry that another process has half written. So each process has a
folder of its own, which starts with links to all entries of the shared one, and leaves
links to its new entries there at the end: a link to a complete file is made at once.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

import jax

SETTING = "JAX_COMPILATION_CACHE_DIR"
_LIMIT = 2 * 2**30  # bytes of the shared folder; above, it starts anew
# XLA divides each program's code for CPUs into up to 32 parts, which are linked one by
# one whenever it is loaded.
_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"


def shared_folder() -> Path:
    """The folder of compiled programs, by jax's version and a CPU's instructions."""
    given = os.environ.get(SETTING)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"jax-{jax.__version__}-{platform.machine()}-{_instructions()}"
    return Path(given) if given else caches / "jaxmem-tests" / name


def _instructions():
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "unknown"
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def make_folder(shared: Path) -> Path:
    """A folder of this process with all that the shared one has."""
    shared.mkdir(parents=True, exist_ok=True)
    entries = _entries(shared)
    if sum(entry.stat().st_size for entry in entries) > _LIMIT:
        for entry in entries:
            Path(entry).unlink(missing_ok=True)
        entries = []
    made = Path(tempfile.mkdtemp(prefix="process-", dir=shared))
    _link(entries, made)
    return made


def _entries(folder):
    with os.scandir(folder) as found:
        return [entry for entry in found if entry.is_file()]


def merge(folder: Path, shared: Path) -> None:
    """Leaves the folder's new entries in the shared one, and removes the folder."""
    known = {entry.name for entry in _entries(shared)}
    _link((entry for entry in _entries(folder) if entry.name not in known), shared)
    shutil.rmtree(folder, ignore_errors=True)


def _link(entries, folder):
    for entry in entries:
        try:
            os.link(entry, os.path.join(folder, entry.name))
        except FileExistsError:
            pass
        except FileNotFoundError:  # another run has emptied the shared folder
            return


def use(folder: Path) -> None:
    """Has jax, here and in the programs that tests start, keep all that it compiles."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # XLA's own caches are for GPUs. With them jax before 0.11 counts the folder's
        # name, which is another one in each process, among what a program depends on.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    flags = os.environ.get("XLA_FLAGS", "").split()
    if _ONE_PART not in flags:  # a later flag counts, and XLA reads them with a backend
        os.environ["XLA_FLAGS"] = " ".join([_ONE_PART, *flags])
