"""Names of other trainers: jaxmem's keys beside them, and the page that shows them."""

from pathlib import Path

import pytest

from jaxmem.train import peers
from jaxmem.train.configuration import sections

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
KEYS = {
    f"{section}.{field}"
    for section, made in sections().items()
    for field in made.__dataclass_fields__
}


def test_table_names_keys_of_jaxmem():
    assert {row.key.partition("=")[0] for row in peers.TABLE} <= KEYS | {""}
    assert all(row.key or row.note for row in peers.TABLE)
    names = {name for row in peers.TABLE for name in row.names}
    assert len(names) >= 60 and not names & KEYS - {
        "data.chat_template_kwargs", "data.shuffle", "model.lora_rank",
        "model.lora_alpha", "optimizer.weight_decay",
    }  # fmt: skip


def test_answer_exists_for_every_other_name():
    for row in peers.TABLE:
        for name in row.names:
            last = name.rpartition(".")[2]
            same = last == row.key.rpartition(".")[2]
            assert same or peers.answer(name), name


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("actor_rollout_ref.actor.use_kl_loss", "grpo.kl_coefficient"),
        ("algorithm.filter_groups.enable", "grpo.resample"),
        ("actor.policy_loss.loss_mode", "grpo.loss"),
        ("rollout.val_kwargs.n", "eval.samples"),
        ("trainer.val_before_train", "eval.at_start"),
        ("eval_on_start", "eval.at_start"),
        ("algorithm.rollout_correction", "grpo.correction"),
        ("trainer.nnodes", "section mesh"),
        ("rollout.gpu_memory_utilization", "no such setting"),
        ("rollout.temperature", "rollout.temperature is sampling.temperature"),
        ("log_completions", "run.save_rollouts"),
    ],
)
def test_answer_knows_names_of_reinforcement_learning(name, key):
    assert key in (peers.answer(name) or "")


def test_page_shows_the_table_and_its_versions():
    text = PAGE.read_text("utf-8")
    assert "\n".join(peers.markdown()) in text
    for peer, version in peers.VERSIONS.items():
        assert f"{peer} {version}" in text
