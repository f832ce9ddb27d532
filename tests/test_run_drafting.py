"""Replayed drafts against a plain search, and both commands on small files."""

import json

import numpy as np
import pytest

from benchmarks import drafting, drafting_sets, results, run_drafting


def random_group(seed, earlier=False):
    """Rows of few different tokens, with phrases in common."""
    rng, ids = np.random.default_rng(seed), 2 + seed
    phrases = [rng.integers(0, ids, rng.integers(2, 6)) for _ in range(4)]

    def text(parts):
        chosen = [phrases[i] for i in rng.integers(0, 4, parts)]
        return np.concatenate([*chosen, rng.integers(0, ids, 3)]).astype(np.int32)

    rows = [text(parts) for parts in (6, 3, 5)]
    before = [text(4), text(2)] if earlier else None
    return drafting.Group(rng.integers(0, ids, 4).astype(np.int32), rows, before)


def texts_of(group, index, kind, t):
    """Texts that a row with t tokens may copy, as far as they are known."""
    row, begin = group.rows[index], group.prompt[-drafting.LEAST :]
    others = [i for i in range(len(group.rows)) if i != index]
    shorter = [
        i for i in others if (len(group.rows[i]), i) < (len(group.rows[index]), index)
    ]
    of_kind = {
        "own": [],
        "beside": [group.rows[i][:t] for i in others],
        "group": [
            group.rows[i]
            for i in sorted(shorter, key=lambda i: (len(group.rows[i]), i))
        ],
        "epoch": group.earlier or [group.rows[i] for i in others],
    }[kind]
    own = [*group.prompt, *row[:t]]
    return [[*begin, *text] for text in of_kind], own


def plain_draft(texts, own, most):
    """The draft behind the last of the longest matches, by comparing everything."""
    longest, draft = drafting.LEAST - 1, []
    for text in [*texts, own]:
        for end in range(1, len(text)):
            common = 0
            while (
                common < min(end, len(own))
                and text[end - 1 - common] == own[-1 - common]
            ):
                common += 1
            if common >= max(longest, drafting.LEAST):
                longest = common
                source = list(text)
                while text is own and len(source) < end + most:
                    source.append(source[len(source) - (len(own) - end)])
                draft = source[end : end + most]
    return draft


@pytest.mark.parametrize("kind", drafting.POOLS)
def test_drafts_against_a_plain_search(kind):
    accepted = 0
    for seed in range(4):
        group = random_group(seed, earlier=seed % 2 == 1)
        for index, row in enumerate(group.rows):
            made = drafting.drafts(drafting.pool(group, index, kind), most=4)
            for t in range(len(row)):
                draft = plain_draft(*texts_of(group, index, kind, t), 4)
                draft = draft[: len(row) - t]
                assert made.lengths[t] == len(draft)
                same = [a == b for a, b in zip(draft, row[t:], strict=False)]
                assert made.accepted[t] == [*same, False].index(False)
            accepted += made.accepted.sum()
    assert accepted > 20


def test_steps_of_a_repetition():
    # Nothing matches before the second pair; then all of each draft is accepted.
    row = np.tile([7, 8], 10)
    group = drafting.Group(np.array([1, 2]), [row])
    made = drafting.drafts(drafting.pool(group, 0, "own"), 8)
    assert made.lengths[:4].tolist() == [0, 0, 0, 0] and made.accepted[4] == 8
    assert drafting.steps(made, 4) == drafting.Steps(8, 13, 13)
    assert drafting.steps(made, 1).steps == 4 + 8


def test_replay_of_a_file(tmp_path, capsys):
    rows = [
        {"prompt": "what is it?", "completions": ["it is two, so two", "it is two"]},
        {
            "prompt": [1, 2],
            "completions": [[5, 6, 7], [5, 6, 7, 8]],
            "earlier": [[5, 6]],
        },
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.csv"
    file.write_text("\n".join(map(json.dumps, rows)))
    run_drafting.main(["replay", str(file), "--out", str(out), "--limit", "7"])
    made = {int(row["k"]): row for row in results.read(out)}
    assert tuple(made) == run_drafting.KS
    assert (made[1]["completions"], made[1]["tokenizer"]) == ("4", "words")
    assert float(made[4]["group"]) > 1.2 > float(made[1]["own"])
    assert float(made[8]["epoch"]) > float(made[1]["epoch_longest"])
    with pytest.raises(
        SystemExit, match="clone of QwenLM/Qwen2.5-Math: name the folder"
    ):
        run_drafting.main(["replay", "math", "--out", str(out)])


def test_sets_have_names_and_files():
    for name, chosen in drafting_sets.SETS.items():
        assert "/" in chosen.repository and len(chosen.commit) == 40 and chosen.files, (
            name
        )


def test_gains_of_widths(tmp_path):
    replay, widths, out = (tmp_path / f"{name}.csv" for name in ("r", "w", "out"))
    columns = dict(set="a", tokenizer="t", most_tokens="", least_mean_tokens="")
    columns |= dict(completion_tokens=5, own=1.2, beside=1.5, group=2.0, epoch=3.0)
    results.save(replay, [columns | {"k": k} for k in (1, 2)])
    step = dict(slots_of="row", prompt=512)
    steps = [
        step | dict(width=1, over_one=0.9),
        step | dict(width=2, over_one=1.2),
        step | dict(width=2, over_one=9, slots_of="shared"),
    ]
    results.save(widths, steps)
    paths = dict(replay=replay, widths=widths, out=out)
    run_drafting.main(["gains", *(f"--{name}={path}" for name, path in paths.items())])
    made = {row["pool"]: row for row in results.read(out)}
    assert [made[pool]["width_2"] for pool in drafting.POOLS] == [
        "1.0", "1.25", "1.667", "2.5",
    ]  # fmt: skip
    assert "width_3" not in made["own"]
