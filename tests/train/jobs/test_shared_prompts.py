"""Runs that read the prompt of a group once, against runs that read it each time."""

import re

import numpy as np
import pytest

from jaxmem.train.configuration import load
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.grpo.policy_report import phases_of
from tests.helpers.grpo import CONFIGS, SMALL, curve, train
from tests.helpers.runs import changed

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grpo", "sampling", "mesh"),
    [
        (dict(kl_coefficient=0.1, epochs=2), {}, dict(data=2)),
        (dict(loss="gspo", token_fraction=0.7), dict(top_k=5), {}),
    ],
)
def test_shared_prompts_take_same_steps(grpo, sampling, mesh, tmp_path):
    config = changed(SMALL, grpo=grpo, sampling=sampling)
    # AdamW would turn a rounding error of a gradient near 0 into a whole step.
    config = changed(config, optimizer=dict(name="sgd", learning_rate=1.0))
    rows = dict(max_tokens_train=128, max_tokens_forward=128, row_lengths=(64,))
    shared = changed(config, grpo=dict(share_prompts=True, **rows), mesh=mesh)
    config = changed(config, grpo=dict(row_lengths=(16,)))
    assert shared.branches == (16, 16)
    names = "reward", "loss", "grad_norm", "entropy", "kl", "mismatch_max", "tokens"
    names = names if "kl_coefficient" in grpo else [n for n in names if n != "kl"]
    curves = [
        curve(train(each, tmp_path / name)[0], *names)
        for name, each in (("alone", config), ("shared", shared))
    ]
    np.testing.assert_allclose(*curves, rtol=1e-4, atol=2e-6)
    assert np.ptp(curves[0][:, 1]) > 1e-3


def test_plan_counts_prompts_once():
    """Groups of 16 and prompts as long as completions: 17 parts of 32."""
    sizes = "sampling.max_new_tokens=512 task.max_prompt_tokens=513 grpo.group_size=16"
    sizes += " task.source=x.jsonl grpo.kl_coefficient=0.1 grpo.prompts=4"
    sizes += " model.checkpoint=x"
    given = [*sizes.split(), "grpo.max_tokens_train=8704"]
    given += ["grpo.max_tokens_forward=8704"]
    config, _ = load(CONFIGS / "grpo_checkpoint.gin", given)
    shared = changed(config, grpo=dict(share_prompts=True))
    assert shared.row_lengths == (512 * 5, 512 * 17)
    assert config.slots_read() == 64 * 1024
    assert shared.slots_read() == 4 * 512 * 17
    assert shared.slots_read(2) == 4 * 512 * (2 + 16)
    program = PolicyProgram(changed(SMALL, grpo=dict(share_prompts=True)))
    told = {phase.name: phase for phase in phases_of(program)}
    assert told["gradients"].tokens == 32
    # Two minibatches, whose blocks of a prompt are two each; a row has one block.
    assert told["gradients"].runs == 8 * (4 * 16 + 4 * 16) / 32


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.row_lengths=(40,)"],
         "grpo.row_lengths=(40,) must be 16 and a multiple of 16 each"),
        (["grpo.row_lengths=None", "grpo.max_tokens_train=16"],
         "max_tokens_train=16 must hold a row of 32"),
    ],
)  # fmt: skip
def test_rows_without_room_for_prompts_are_refused(overrides, expected):
    path = CONFIGS / "grpo_arithmetic_multitoken.gin"
    given = ["grpo.share_prompts=True", *overrides]
    with pytest.raises(ValueError, match=re.escape(expected)):
        load(path, given)


def test_windows_are_refused_before_compiling():
    windows = {"pattern": ("local", "global"), "self_attn.window": 4}
    with pytest.raises(ValueError, match="grpo.share_prompts.*has windows"):
        PolicyProgram(changed(SMALL, model=windows, grpo=dict(share_prompts=True)))
