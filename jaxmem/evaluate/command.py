"""`jaxmem eval`: runs the harness, prints its table, and writes eval.json."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from jaxmem.base import hub, json_files
from jaxmem.base.command_options import by_flag
from jaxmem.evaluate.config import EvaluateRequest
from jaxmem.evaluate.model import HarnessModel
from jaxmem.evaluate.recorded_answers import RecordedAnswers
from jaxmem.generate.model import Model
from jaxmem.score.fingerprint import Fingerprint, fingerprint_of
from jaxmem.score.journal import ResumableOutput
from jaxmem.train.output import report
from jaxmem.train.state import ownership


def run(request: EvaluateRequest) -> dict[str, Any]:
    """Evaluate, print the table, and write the results.

    Returns:
        The results by task and metric, as lm_eval names them.

    Raises:
        ValueError: a task is unknown or asks for what jaxmem does not have, or there
            is nowhere to write.
        CheckpointError: there is no model in the directory.
    """
    directory = Path(hub.local_directory(request.model)).expanduser()
    is_run = ownership.is_run(directory)
    if request.out is None and not is_run:
        raise ValueError(
            f"{directory} is not a run, whose directory would get eval.json; name a "
            "file with --out"
        )
    out = Path(request.out).expanduser() if request.out else directory / "eval.json"
    _check_request(request, out)
    manager = TaskManager(include_path=request.include)
    names = _known_tasks(request.tasks, manager)
    output = ResumableOutput(out, "group of requests")
    with output.locked():
        model = Model.of(request, request.chat_template_kwargs)
        with output.journal(_fingerprint(request, model)) as journal:
            harness = HarnessModel(
                model,
                str(directory),
                request.max_tokens,
                request.batch_size,
                RecordedAnswers(journal),
            )
            results = _evaluate(request, harness, names, manager)
            print(make_table(results))
            content = _content(request, directory, results)
            journal.finish(lambda file, _: file.write(content))
    print(f"saved in {out}")
    if is_run and request.out is None:
        report.write(directory)
    return results["results"]


def _evaluate(
    request: EvaluateRequest,
    harness: HarnessModel,
    tasks: list[str],
    manager: TaskManager,
) -> dict[str, Any]:
    evaluate: Any = lm_eval.simple_evaluate  # its decorator loses its type
    return evaluate(
        harness,
        tasks=tasks,
        num_fewshot=request.shots,
        limit=request.limit,
        apply_chat_template=request.chat,
        task_manager=manager,
        log_samples=False,
    )


def _content(
    request: EvaluateRequest, directory: Path, results: dict[str, Any]
) -> bytes:
    """The content of the file of results."""
    kept = {
        name: results[name] for name in ("results", "n-shot", "n-samples", "versions")
    }
    options = dataclasses.asdict(request) | {"lm_eval": lm_eval.__version__}
    if (model_of_hub := hub.model_of(directory)) is not None:
        options["model"] = str(model_of_hub)
    return f"{json.dumps({**kept, 'options': options}, indent=1)}\n".encode()


def _fingerprint(request: EvaluateRequest, model: Model) -> Fingerprint:
    """Hash everything that answers and their order depend on, but the tasks' files."""
    options = dataclasses.asdict(request) | {"lm_eval": lm_eval.__version__}
    for name in ("model", "out", "trust_code"):
        del options[name]
    flags = by_flag(request, ("out", "trust_code"))
    return fingerprint_of(json.dumps(options), model.files, (), flags)


def _check_request(request: EvaluateRequest, out: Path) -> None:
    """Refuse, before anything is evaluated, what would fail or be left out after."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the directory {out.parent} does not exist")
    if request.out is not None and os.path.lexists(out):
        raise ValueError(f"--out {out} exists already; delete it, or name another file")
    if os.path.lexists(out) and not _has_results(out):
        raise ValueError(
            f"{out} was not written by jaxmem eval, which would replace it; move it, "
            "or name another file with --out"
        )
    if request.include is not None and not Path(request.include).is_dir():
        raise ValueError(f"--include {request.include}: the folder does not exist")


def _has_results(path: Path) -> bool:
    """True if a file is what `run` writes."""
    with contextlib.suppress(ValueError):
        return {"results", "options"} <= json_files.read_object(path).keys()
    return False


def _known_tasks(tasks: str, manager: TaskManager) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        problem = f"lm_eval has no task {', '.join(unknown)}" if names else "no task"
        raise ValueError(
            f"--tasks {tasks!r}: {problem}; `lm_eval ls tasks` lists all tasks, and "
            "--include names a folder with further ones"
        )
    return names
