"""The benchmark of named models: cases, rows of tokens, columns of the device."""

import argparse
import csv
from typing import Any

import numpy as np
import pytest

from benchmarks import results, run_cards, run_step, step_rows
from jaxmem.data import documents
from jaxmem.train import configuration
from jaxmem.train.jobs import sft

# Weights of the published models, in billions; Gemma's without its images' tower.
BILLIONS = {
    "qwen3-0.6b": 0.596, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "llama-3.1-8b": 8.03,
    "gemma-3-4b": 3.88, "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9,
}  # fmt: skip


def config_of(case, folder, *overrides) -> Any:
    job = case.variant(folder).job("", [*overrides], [])
    return configuration.load(job["config"], job["overrides"])[0]


# ----------------------------------------------------------------------- cases


def test_cases_are_a_row_each():
    rows = {tuple(c.columns()[k] for k in run_cards.KEYS[:4]) for c in run_cards.CASES}
    assert len(rows) == len(run_cards.CASES)


def test_cases_have_models_of_both_trainings_and_a_peer():
    trained = {(c.model, c.training) for c in run_cards.CASES}
    assert {model for model, training in trained if training == "lora"} == set(BILLIONS)
    peers = {c.model for c in run_cards.CASES if c.side == "torch"}
    assert {"qwen3-8b", "qwen3-0.6b"} <= peers


@pytest.mark.parametrize("number", range(1, len(run_cards.CASES) + 1))
def test_cases_are_configs_with_their_adapters(number, tmp_path):
    case = run_cards.CASES[number - 1]
    config = config_of(case, tmp_path)
    short = "data.sequence_length=2048" in case.words
    assert config.data.sequence_length == (2048 if short else 4096)
    rank, trainable = config.model.lora_rank or 0, config.optimizer.trainable
    expected = (16, "lora_") if case.training == "lora" else (0, None)
    assert (rank, trainable) == expected
    if case.side == "jax":
        assert config.remat.policy == case.words[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BILLIONS)
def test_models_have_the_published_number_of_weights(name, tmp_path):
    (case,) = run_cards._cases(name, "whole", "full", "none: none")
    config = config_of(case, tmp_path)
    program = sft.SftProgram(config, config.model.vocab_size, packed=False)
    shapes = [leaf.shape for leaf in _leaves(program.state_shapes.params)]
    count = sum(float(np.prod(shape)) for shape in shapes)
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def _leaves(tree):
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    return [tree]


def arguments_of(**chosen):
    nothing = dict.fromkeys(("model", "training", "lengths", "side", "only"))
    return argparse.Namespace(**{**nothing, "variant": [], "case": None, **chosen})


def test_chosen_cases_keep_the_order_of_value():
    args = arguments_of(model="qwen3-8b", lengths="chat", side="torch")
    found = run_cards.chosen_cases(args)
    assert found[0].words == ("compiled_float32_varlen",)
    assert all(case.model == "qwen3-8b" and case.lengths == "chat" for case in found)


def test_chosen_cases_by_number_and_by_words():
    (first,) = run_cards.chosen_cases(arguments_of(case=[1]))
    assert first is run_cards.CASES[0]
    own = ["mine: full data.batch_size=8", "theirs: torch compiled"]
    args = arguments_of(model="qwen3-8b", training="lora", variant=own)
    mine, theirs = run_cards.chosen_cases(args)
    assert (mine.side, mine.words) == ("jax", ("full", "data.batch_size=8"))
    assert (theirs.side, theirs.words) == ("torch", ("compiled",))


def test_chosen_cases_refuse_what_leaves_none():
    with pytest.raises(SystemExit, match="no case is left; --list prints them"):
        run_cards.chosen_cases(arguments_of(only=["nothing of that name"]))
    with pytest.raises(SystemExit, match="--variant needs --model and --training"):
        run_cards.chosen_cases(arguments_of(variant=["mine: full"]))


class FakeWorker:
    """A worker that sends a row of its job at once."""

    def __init__(self, variant, job, environment):
        self._job = job

    def rows(self, seconds):
        share = {"class": "products", "ms": 1.5, "share": 0.5, "kernels": 3}
        shares = [share] if self._job["trace"] else []
        yield {"device": "H", "rows": 4, "shares": shares}

    def stop(self):
        pass


def test_rows_name_case_and_clocks(tmp_path, monkeypatch):
    monkeypatch.setattr(run_step, "Worker", FakeWorker)
    monkeypatch.setattr(run_cards, "clocks", lambda: {"clock_mhz": "1980"})
    out = tmp_path / "cards.csv"
    run_cards.main(["--case=1", "--case=2", "--trace=none, 4 rows", f"--out={out}"])
    ours, theirs = results.read(out)
    assert (ours["model"], ours["training"]) == ("qwen3-8b", "lora")
    assert (ours["side"], theirs["side"]) == ("jax", "torch")
    assert ours["clock_mhz"] == "1980" and ours["lengths"] == "full"
    with (tmp_path / "cards_trace.csv").open() as file:
        (share,) = csv.DictReader(file)
    assert (share["variant"], share["class"]) == ("none, 4 rows", "products")


def test_clocks_are_columns_of_the_first_gpu(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1755, 1980, 700.00, 580.1'\necho '1, 2, 3, 4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert run_cards.clocks() == {
        "clock_mhz": "1755", "highest_clock_mhz": "1980", "power_limit_w": "700.00",
        "driver": "580.1",
    }  # fmt: skip
    tool.unlink()
    assert run_cards.clocks() == {}


# ------------------------------------------------------------- rows of tokens

SHORT = "model.vocab_size=64", "data.batch_size=2", "run.steps=3"


def test_step_rows_of_full_rows_are_one_document(tmp_path):
    config = config_of(run_cards.CASES[0], tmp_path, *SHORT)
    taken = step_rows.batches(config, "full")
    assert [batch.tokens.shape for batch in taken] == [(1, 2, 4096)] * 3
    assert (taken[0].labels[..., :-1] == taken[0].tokens[..., 1:]).all()
    columns = step_rows.columns(taken, [0.0, 5.0, 7.0])
    assert columns["padding"] == 0 and columns["rows"] == 2
    assert columns["tokens_per_second"] == 2 * 4095 / 2


def test_step_rows_of_chats_are_packed_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(step_rows, "chat_lengths", lambda: [5, 3, 20, 9] * 4)
    (case,) = run_cards._cases("qwen3-8b", "lora", "chat", "none: none")
    config = config_of(case, tmp_path, *SHORT, "data.sequence_length=16")
    taken = step_rows.batches(config, "chat")
    assert [batch.tokens.shape for batch in taken] == [(1, 2, 16)] * 3
    assert not np.array_equal(taken[0].tokens, taken[1].tokens)
    for batch in taken:
        predicted = batch.labels >= 0
        assert (batch.segment_ids[predicted] > 0).all()
        inside = predicted[..., :-1] & (np.diff(batch.segment_ids) == 0)
        assert (batch.labels[..., :-1][inside] == batch.tokens[..., 1:][inside]).all()
    columns = step_rows.columns(taken, [0.0, 5.0, 7.0])
    assert columns["padding"] == round(float(np.mean(taken[2].segment_ids == 0)), 4)
    assert columns["tokens_per_second"] == round(np.sum(taken[2].labels >= 0) / 2)


def test_chat_lengths_are_a_fixed_list():
    lengths = step_rows.chat_lengths()
    assert len(lengths) == 2000 and sum(lengths) == 6_377_028
    assert (min(lengths), max(lengths)) == (45, 8143)


# ------------------------------------------------------------- the peers' side

PEERS = pytest.mark.filterwarnings("ignore")  # theirs


@PEERS
@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["full", "chat"])
def test_step_torch_trains_adapters_alone(lengths, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs torch, transformers and peft")
    pytest.importorskip("peft", reason="needs torch, transformers and peft")
    from benchmarks import step_torch

    monkeypatch.setattr(step_rows, "chat_lengths", lambda: [5, 3, 20, 9] * 4)
    tiny = "layers=2 hidden=16 ff=24 heads=2 kv_heads=1 head_dim=8".split()
    tiny = [f"model.{word}" for word in tiny]
    overrides = *SHORT, *tiny, "data.sequence_length=16"
    (case,) = run_cards._cases("qwen3-8b", "lora", lengths, "t: torch checkpoint")
    config = config_of(case, tmp_path, *overrides)
    model = step_torch.Model(config.model, 16, "checkpoint_float32")
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * 2 and all("lora_" in name for name in names)
    job = {"mode": "checkpoint_float32", "lengths": lengths}
    row = step_torch.measure(job, config)
    assert row["weights"] == "float32" and row["rows"] == 2
    assert row["first_loss"] == pytest.approx(np.log(64), abs=0.2)


@PEERS
@pytest.mark.slow
def test_step_torch_documents_end_where_segments_do():
    pytest.importorskip("torch", reason="needs torch, transformers and peft")
    from benchmarks import step_torch

    segments = np.array([[1, 1, 2, 0], [1, 2, 2, 2]])
    assert step_torch.document_ends(segments).tolist() == [2, 3, 4, 5, 8]
    few = [
        documents.Batch(*[np.array([rows])] * 4) for rows in (segments, segments * 0)
    ]
    first, second = step_torch.operands(few, "compiled_varlen", "chat")
    assert first["cu_seqlens"].tolist() == [0, 2, 3, 4, 5, 8]
    assert second["cu_seqlens"].tolist() == [0, 4, 8, 8, 8, 8]
