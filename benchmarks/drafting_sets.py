"""Public records of completions, several of each prompt; see `run_drafting`.

Nothing of them is in this repository: a set is read from clones, at a commit.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import drafting

Texts = list[tuple[str, list[str]]]  # prompts, each with its completions
Encode = Callable[[str], np.ndarray]


class Set(NamedTuple):
    """Files of a repository, and how a prompt's completions were drawn."""

    repository: str
    commit: str
    licence: str
    model: str
    sampling: str
    files: tuple[str, ...]
    texts: Callable[[list[bytes]], Texts]
    earlier: tuple[str, ...] = ()  # files of an earlier epoch, of the same prompts


def _lines(files: list[bytes]) -> Iterator[Any]:
    for file in files:
        yield from map(json.loads, file.splitlines())


def _rollouts(files: list[bytes]) -> Texts:
    return [
        (row["question"], [each["text"] for each in row["rollouts"]])
        for row in _lines(files)
    ]


def _lists(prompt: str, completions: str) -> Callable[[list[bytes]], Texts]:
    """Lines of a prompt with the list of its completions."""
    return lambda files: [(row[prompt], row[completions]) for row in _lines(files)]


def _samples(files: list[bytes]) -> Texts:
    """Lines of one sample each."""
    by_prompt: dict[str, list[str]] = {}
    for row in _lines(files):
        by_prompt.setdefault(row["prompt"], []).append(row["raw_response"])
    return list(by_prompt.items())


def _passages(files: list[bytes]) -> Texts:
    (rows,) = map(json.loads, files)
    return [("", row["ys"]) for row in rows]


def _rl_math(step: int, earlier: int | None) -> Set:
    files = tuple(
        f"trajectory/step-{n}/rl_raw.jsonl" for n in (step, earlier) if n is not None
    )
    return Set(
        "UnitedSnakes/rlvr_behavior_probe_runpod",
        "b7c65a35759589f1898b2dcbc5bc7c3299a4779b", "not stated",
        "Qwen2.5-1.5B, PPO with verified rewards", "temperature 1.0, top-p 0.95",
        files[:1], _rollouts, files[1:],
    )  # fmt: skip


_THOUGHTS = Set(
    "tobypullan/logit_cot_overthinking", "f02cd56b2b8c22008cbf6ed18cdb6759e6ed3964",
    "not stated", "gemma-4-12B-it, thinking", "temperature 1.0, top-p 0.95, top-k 64",
    tuple(
        f"outputs/matched_controls_gemma4_12b_extended/mmlu_pro/seed_{i}/traces.jsonl"
        for i in range(10)
    ), _samples,
)  # fmt: skip
SETS = {
    "math": Set(
        "QwenLM/Qwen2.5-Math", "a45202bd16f1ec06f433442dc1152d0074773465", "not stated",
        "Qwen2.5-Math or Qwen2-Math, instruct",
        "temperature 0.7, top-p 0.8 or temperature 1.0, top-p 0.9",
        ("evaluation/data/eval_rm_maj_example/math_cot_100.jsonl",),
        _lists("question", "code"),
    ),
    "rl_math": _rl_math(500, None),
    "rl_math, 200 updates later": _rl_math(500, 300),
    "rl_math, 500 updates later": _rl_math(1000, 500),
    "sft_math": Set(
        "UnitedSnakes/rlvr_behavior_probe_runpod",
        "b7c65a35759589f1898b2dcbc5bc7c3299a4779b", "not stated",
        "Qwen2.5-1.5B, supervised reasoning", "temperature 1.0, top-p 0.95",
        ("trajectory/step-500/sft_raw.jsonl",), _rollouts,
    ),
    "thoughts": _THOUGHTS,
    "passages": Set(
        "princeton-nlp/tree-of-thought-llm",
        "ab400345c5ea39d28ea6d7d3be0e417b11113c87", "MIT", "gpt-4", "temperature 1.0",
        ("logs/text/gpt-4_1.0_naive_cot_sample_10_start0_end100.json",), _passages,
    ),
}  # fmt: skip


def read(
    name: str, clones: pathlib.Path | None, encode: Encode
) -> tuple[list[drafting.Group], dict[str, Any]]:
    """Groups of a set or of a JSONL file, and the columns that say whence."""
    if name not in SETS:
        return _of_file(pathlib.Path(name), encode)
    if clones is None:
        raise SystemExit(f"{name!r} is read from a clone of {SETS[name].repository}: "
                         "name the folder of OWNER/NAME with --clones")  # fmt: skip
    chosen, digest = SETS[name], hashlib.sha256()
    both = []
    for paths in (chosen.files, chosen.earlier):
        files = [
            _show(clones / chosen.repository, chosen.commit, path) for path in paths
        ]
        for file in files:
            digest.update(file)
        both.append(chosen.texts(files) if files else None)
    texts, before = both
    assert texts is not None
    before = dict(before or ())
    groups = [
        _group(prompt, rows, before.get(prompt), encode) for prompt, rows in texts
    ]
    paths = *chosen.files, *chosen.earlier
    return groups, {
        "set": name,
        "repository": chosen.repository,
        "commit": chosen.commit,
        "licence": chosen.licence,
        "paths": " ".join(paths),
        "sha256": digest.hexdigest(),
        "model": chosen.model,
        "sampling": chosen.sampling,
    }


def _show(clone: pathlib.Path, commit: str, path: str) -> bytes:
    command = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _of_file(path: pathlib.Path, encode: Encode):
    content = path.read_bytes()
    groups = [
        _group(row["prompt"], row["completions"], row.get("earlier"), encode)
        for row in _lines([content])
    ]
    digest = hashlib.sha256(content).hexdigest()
    return groups, {"set": path.name, "sha256": digest}


END = -2  # after each completion; no token has this number


def _group(prompt: Any, rows: Any, earlier: Any, encode: Encode) -> drafting.Group:
    def tokens(text: Any) -> np.ndarray:
        ids = encode(text) if isinstance(text, str) else text
        return np.append(np.asarray(ids, np.int32), np.int32(END))

    before = None if earlier is None else [tokens(row) for row in earlier]
    return drafting.Group(tokens(prompt), [tokens(row) for row in rows], before)


def encoder(path: pathlib.Path | None) -> tuple[Encode, str]:
    """A function from texts to ids, and its name; without a file, of words."""
    if path is None:
        numbers: dict[str, int] = {}

        def words(text: str) -> np.ndarray:
            parts = re.findall(r"\w+|\s+|[^\w\s]", text)
            return np.array([numbers.setdefault(x, len(numbers)) for x in parts])

        return words, "words"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: np.array(tokenizer.encode(text).ids), path.stem


def limited(
    groups: list[drafting.Group], most: int | None, least: int | None, count: int | None
) -> list[drafting.Group]:
    """The first `count` groups with `least` tokens on average, rows cut to `most`."""
    kept = []
    for group in groups:
        if least is None or np.mean([len(row) for row in group.rows]) >= least:
            before = group.earlier and [row[:most] for row in group.earlier]
            rows = [row[:most] for row in group.rows]
            kept.append(dataclasses.replace(group, rows=rows, earlier=before))
    return kept[:count]


def measure(
    groups: list[drafting.Group], ks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Columns of each k, of all pools."""
    lengths = [len(row) for group in groups for row in group.rows]
    drafts = {
        pool: [
            [
                drafting.drafts(drafting.pool(group, i, pool), max(ks))
                for i in range(len(group.rows))
            ]
            for group in groups
        ]
        for pool in drafting.POOLS
    }
    tokens = sum(lengths), sum(max(len(row) for row in each.rows) for each in groups)
    for k in ks:
        columns = {
            "prompts": len(groups),
            "completions": len(lengths),
            "completion_tokens": round(float(np.mean(lengths)), 1),
            "k": k,
        }
        for pool, by_group in drafts.items():
            taken = [[drafting.steps(row, k) for row in rows] for rows in by_group]
            every = [each for rows in taken for each in rows]
            steps = sum(each.steps for each in every)
            drafted = sum(each.drafted for each in every)
            accepted = sum(each.accepted for each in every)
            longest = sum(max(each.steps for each in rows) for rows in taken)
            columns |= {
                pool: round(tokens[0] / steps, 3),
                f"{pool}_longest": round(tokens[1] / longest, 3),
                f"{pool}_drafted": round(drafted / steps, 3),
                f"{pool}_accepted": round(accepted / max(drafted, 1), 3),
            }
        yield columns
