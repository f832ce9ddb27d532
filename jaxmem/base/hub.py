"""Models of the Hugging Face Hub: their names, and local copies of their files.

A model is named OWNER/NAME, OWNER/NAME@REVISION or hf://OWNER/NAME@REVISION. Commands
and jobs turn such a name into a directory once, by `local_directory`; all others
read directories. The copies are in the Hub's own cache, which other libraries share.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxmem._version import __version__
from jaxmem.base import files, imports, messages

# Patterns of files. The weights of other formats, and copies of them that the reader of
# safetensors does not read ("consolidated", "original/"), match none.
CONFIG = ("config.json", "adapter_config.json", "base.json")
TEXT = (
    *CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
WHOLE = (
    *TEXT, "model*.safetensors", "adapter_model*.safetensors",
    "model.safetensors.index.json", "adapter_model.safetensors.index.json",
)  # fmt: skip

_PART = r"[\w-][\w.-]*"  # of a repository's name
_NAME = re.compile(rf"(hf://)?({_PART}/{_PART})(?:@(\w[\w./-]*))?")
_COPY = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")
_LOG_IN = "`hf auth login` or the variable HF_TOKEN"
_README = "README.md"
_FULL = errno.ENOSPC, errno.EDQUOT


class HubError(ValueError):
    """The Hub cannot serve, or take, a model; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of the Hub, in one revision."""

    repository: str  # OWNER/NAME
    revision: str | None = None  # a branch, a tag or a commit; None: the newest commit

    def __str__(self) -> str:
        """The name that `parse` reads, wherever it is used."""
        return f"hf://{self.repository}" + (
            f"@{self.revision}" if self.revision else ""
        )


def parse(text: str) -> HubModel | None:
    """The model of the Hub that a text names; None if it is a path.

    A directory of that name has precedence. So has the parent directory of a bare
    OWNER/NAME, and "runs/", where runs are: hf:// names a model of the Hub in spite of
    them.

    Raises:
        HubError: the text begins with hf:// and names no model.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        if text.startswith("hf://"):
            raise HubError(
                f"{messages.name(text)}: write a model of the Hub as hf://OWNER/NAME "
                "or hf://OWNER/NAME@REVISION"
            )
        return None
    scheme, repository, revision = match.groups()
    if scheme is None:
        owner = Path(text).parent
        is_path = revision is None and (os.path.exists(owner) or owner.name == "runs")
        if is_path or os.path.exists(text):
            return None
    return HubModel(repository, revision)


def hint(text: str, kind: str = "model") -> str:
    """The end of an error about a path that may be meant as a Hub name, or ""."""
    match = _NAME.fullmatch(text)
    is_run = Path(text).parent.name == "runs"
    if match is None or match[1] or is_run or os.path.exists(text):
        return ""
    return f"; a {kind} of the Hub is hf://{text}"


def local_directory(
    name: str | Path, patterns: tuple[str, ...] = WHOLE, *, tells_cached: bool = True
) -> str:
    """The directory that a name stands for: itself, or the local copy of a model.

    Files that are not in the Hub's cache are downloaded, by one process of a host at a
    time, after a line on stderr that says which, how much and where.

    Args:
        name: a directory, or a model of the Hub as `parse` reads it.
        patterns: of the files that are needed: `CONFIG`, `TEXT` or `WHOLE`.
        tells_cached: False to print no line about a copy that is complete.

    Raises:
        HubError: the model cannot be downloaded, and is not in the cache.
    """
    model = parse(str(name))
    if model is None:
        return str(name)
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise _not_installed(str(model), error) from error
    fetch = functools.partial(
        huggingface_hub.snapshot_download, model.repository, revision=model.revision,
        allow_patterns=list(patterns), library_name="jaxmem",
        library_version=__version__,
    )  # fmt: skip
    with _errors(model):
        copy = _find_copy(model, fetch)
        if copy is None:
            with _lock(model):  # another process may have downloaded it
                copy = _find_copy(model, fetch) or _download(model, fetch, patterns)
        elif tells_cached:
            _tell(f"{_with_commit(model, copy)} is in the cache, {copy}")
    return str(copy)


def push(
    directory: Path,
    repository: str,
    *,
    private: bool = False,
    is_own: Callable[[Path], bool] = lambda readme: True,
) -> str:
    """Upload the files of a saved model, after a line on stderr; return their address.

    Args:
        directory: of the model.
        repository: OWNER/NAME, which is made if the Hub has no model of that name.
        private: True if only its owner may see it.
        is_own: True of a README.md, of those that the repository has, that may be
            replaced. Others stay.

    Raises:
        HubError: the Hub does not take it, or the repository has another model.
    """
    check_push(repository)
    import huggingface_hub

    with _push_errors(repository):
        api = huggingface_hub.HfApi(library_name="jaxmem", library_version=__version__)
        api.create_repo(repository, private=private or None, exist_ok=True)
        info = api.model_info(repository)
        if private and not info.private:
            raise HubError(
                f"{repository} is public on the Hub; make it private there, or name "
                "another repository"
            )
        paths = [path for path in directory.rglob("*") if path.is_file()]
        names = {path.relative_to(directory).as_posix() for path in paths}
        there = {sibling.rfilename for sibling in info.siblings or ()}
        _check_replaces(repository, names, there)
        kept = []
        if {_README} <= names & there:
            readme = api.hf_hub_download(repository, _README)
            if not is_own(Path(readme)):
                kept.append(_README)
                _tell(f"{repository} keeps its {_README}, which jaxmem did not write")
        size = sum(path.stat().st_size for path in paths)
        address = f"{api.endpoint}/{repository}"
        _tell(f"uploading {directory} ({_bytes(size)}) to {address}")
        api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=f"Upload by jaxmem {__version__}",
            ignore_patterns=kept,
        )
    return address


def check_push(repository: str) -> None:
    """Raise a HubError unless `push` may be tried: it needs a name and a token."""
    if re.fullmatch(rf"{_PART}/{_PART}", repository) is None:
        raise HubError(
            f"a model is pushed to OWNER/NAME, got {messages.short(repository)}"
        )
    try:
        from huggingface_hub import get_token
    except ModuleNotFoundError as error:
        raise _not_installed(repository, error) from error
    if _is_offline():
        raise HubError(f"{repository}: nothing is uploaded with HF_HUB_OFFLINE=1")
    if get_token() is None:
        raise HubError(f"{repository}: uploading needs a token: log in with {_LOG_IN}")


def front_matter(fields: dict[str, Any]) -> str:
    """Metadata of a model's card, as the Hub reads them at the start of README.md."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**fields).to_yaml()}\n---"


def _check_replaces(repository: str, names: set[str], there: set[str]) -> None:
    """Raise a HubError if files of another model would stay beside a new one's."""
    described = {"config.json", "adapter_config.json"}
    others = sorted(
        name
        for name in there - names
        if name in described or name.endswith((".safetensors", ".bin", ".gguf"))
    )
    if others:
        raise HubError(
            f"{repository} contains files of another model on the Hub, which this "
            f"model does not replace ({messages.cut(', '.join(others), 100)}); delete "
            "them there, or name another repository"
        )


@contextlib.contextmanager
def _push_errors(repository: str) -> Iterator[None]:
    """A context in which every error is a HubError about a push, of one line."""
    from huggingface_hub import errors

    try:
        yield
    except HubError:
        raise
    except Exception as error:
        status = None
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
        if status in (401, 403):
            raise HubError(
                f"{repository}: the Hub refuses the upload ({status}): log in with a "
                f"token that may write there: {_LOG_IN}"
            ) from error
        what = "cannot be reached" if _is_outage(error) else "refuses the upload"
        raise HubError(f"{repository}: the Hub {what} ({_reason_of(error)})") from error


def model_of(path: str | Path) -> HubModel | None:
    """The model that a directory of the Hub's cache is a copy of; None for others."""
    match = _COPY.fullmatch("/".join(Path(path).parts[-3:]))
    return match and HubModel(f"{match[1]}/{match[2]}", match[3])


def recorded(path: str) -> str:
    """The name under which any machine finds what a directory holds.

    It is hf://OWNER/NAME@COMMIT for a copy of a model of the Hub, and otherwise `path`.
    """
    return str(model_of(path) or path)


def _not_installed(name: str, error: ModuleNotFoundError) -> HubError:
    return HubError(
        f"{name} needs {error.name!r}, which is not installed; run: "
        f"{imports.how_to_install('train')}"
    )


def _find_copy(model: HubModel, fetch: Callable[..., Any]) -> Path | None:
    """The copy that has all files, or that has to suffice while there is no Hub."""
    try:
        listed = _list(fetch)
    except Exception as error:
        if not _is_outage(error):
            raise
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            copy = Path(fetch(local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from error.__cause__
        if not _is_offline():
            why = _reason_of(error)
            _tell(f"the Hub cannot be reached ({why}); {model} is read from its cache")
        return copy
    if not listed or any(file.will_download for file in listed):
        return None
    return Path(fetch(revision=listed[0].commit_hash))  # links what other commits have


def _list(fetch: Callable[..., Any]) -> list[Any]:
    """The files that the patterns match, with sizes and whether the cache has them."""
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **{**options, "disable": True})

    with _quiet_library():
        return fetch(dry_run=True, tqdm_class=Hidden)


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """A context in which the Hub's library logs errors only: we print the rest."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _download(
    model: HubModel, fetch: Callable[..., Any], patterns: tuple[str, ...]
) -> Path:
    """Download the files that the cache lacks, and print it before."""
    listed = _list(fetch)
    _check_files(model, [file.filename for file in listed], patterns)
    missing = [file for file in listed if file.will_download]
    size, cache = sum(file.file_size for file in missing), _cache()
    if (free := files.free_bytes(cache)) < size:
        raise OSError(errno.ENOSPC, f"{_bytes(size)} are needed, {_bytes(free)} free")
    named = HubModel(model.repository, listed[0].commit_hash[:12])
    count = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
    _tell(f"downloading {named} ({count}, {_bytes(size)}) to {cache}")
    return Path(fetch())


def _check_files(model: HubModel, names: list[str], patterns: tuple[str, ...]) -> None:
    """Raise a HubError unless the files are of a model that is read."""
    if not {"config.json", "adapter_config.json"} & {*names}:
        raise HubError(
            f"{model} has neither config.json nor adapter_config.json, so it is "
            "neither a model in the format of transformers nor an adapter of PEFT"
        )
    if patterns == WHOLE and not any(name.endswith(".safetensors") for name in names):
        raise HubError(
            f"{model} has no model.safetensors; jaxmem does not read other formats "
            "(.bin, .pth, .gguf)"
        )


def _with_commit(model: HubModel, copy: Path) -> HubModel:
    return HubModel(model.repository, copy.name[:12])


def _tell(line: str) -> None:
    print(f"jaxmem: {line}", file=sys.stderr, flush=True)


def _bytes(size: int) -> str:
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.1f} {name}"


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


@contextlib.contextmanager
def _lock(model: HubModel) -> Iterator[None]:
    """A context in which no other process of this host downloads the model."""
    from huggingface_hub.utils import WeakFileLock

    locks = _cache() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = model.repository.replace("/", "--")
    with WeakFileLock(locks / f"jaxmem--{name}.lock"):
        yield


def _is_outage(error: BaseException) -> bool:
    """True if the Hub has not answered, or not as it should."""
    from huggingface_hub import errors

    cause = _cause_of(error)
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        return status >= 500 or status in (408, 429)
    if isinstance(cause, OSError) and cause.errno is not None:
        return isinstance(cause, ConnectionError)
    return not isinstance(cause, (HubError, errors.HFValidationError))


def _cause_of(error: BaseException) -> BaseException:
    """The error of the Hub, or of the network, behind those of its library."""
    from huggingface_hub import errors

    wrapped = errors.DryRunError, errors.LocalEntryNotFoundError
    while isinstance(error, wrapped) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason_of(error: BaseException) -> str:
    cause = _cause_of(error)
    return messages.cut(str(cause).strip() or type(cause).__name__, 120)


@contextlib.contextmanager
def _errors(model: HubModel) -> Iterator[None]:
    """A context in which every error is a HubError of one line."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        raise HubError(_describe(model, error)) from error


def _describe(model: HubModel, error: Exception) -> str:
    """The message of an error of the Hub, the model or the disk, with what to do."""
    from huggingface_hub import constants, errors

    cause, page = _cause_of(error), f"{constants.ENDPOINT}/{model.repository}"
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return (
            f"{model}: the disk of {_cache()} is full ({cause.strerror}); free some "
            "space, or set HF_HOME to a directory of another disk"
        )
    if isinstance(cause, errors.GatedRepoError):
        return (
            f"{model} is gated; accept its terms at {page}, and log in with {_LOG_IN}"
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f"{model} is neither a directory nor a public model of the Hub; check the "
            f"name, or log in with {_LOG_IN} if the model is private"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return (
            f"{model}: the Hub has no revision {model.revision!r} of this model; "
            f"{page}/commits/main lists the revisions"
        )
    if not _is_outage(error):
        return f"{model}: {_reason_of(error)}"
    revision = f" --revision {model.revision}" if model.revision else ""
    there = f"hf download {model.repository}{revision}"
    if _is_offline():
        return (
            f"{model}: HF_HUB_OFFLINE=1 is set, and {_cache()} lacks files of the "
            f"model; unset the variable, or run `{there}` on a machine with a network "
            "and copy its cache here"
        )
    return (
        f"{model}: the Hub cannot be reached ({_reason_of(error)}), and {_cache()} "
        f"lacks files of the model; run `{there}` on a machine with a network, copy "
        "its cache here, and set HF_HUB_OFFLINE=1"
    )
