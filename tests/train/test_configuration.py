"""Gin files: what they give, and what every mistake in one says."""

import dataclasses
import math
import re
from pathlib import Path

import gin
import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmem.base import fields
from jaxmem.train import configuration
from jaxmem.train.configuration import ConfigError, load
from jaxmem.train.jobs import JOBS
from jaxmem.train.jobs.config import SftJobConfig
from tests.helpers import nasty

CONFIGS = Path(__file__).parents[2] / "configs"
FROM_USERS = "data.source", "task.source", "model.checkpoint"  # what they have


@pytest.fixture
def gin_file(tmp_path, monkeypatch):
    """Writes a file into an empty current directory and gives its relative name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="a.gin"):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write


def complaint(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------- values


def test_empty_file_gives_every_default(gin_file):
    config, _ = load(gin_file(""))
    for field in dataclasses.fields(SftJobConfig):
        section = getattr(config, field.name)
        assert section == type(section)()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, dataclasses.fields(section)[0].name, None)


def test_overrides_follow_file_and_includes(gin_file):
    gin_file("model.hidden = 64\nmodel.layers = 1\nmodel.ff = 32", "base.gin")
    file = gin_file('include "base.gin"\nmodel.layers = 2\nmodel.ff = 48')
    config, _ = load(file, ["model.ff=56"])
    model = config.model
    assert (model.hidden, model.layers, model.ff) == (64, 2, 56)


def test_include_beside_file_or_in_current_directory(gin_file):
    gin_file("model.hidden = 64", "sub/beside.gin")
    gin_file("model.layers = 2", "here.gin")
    file = gin_file('include "beside.gin"\ninclude "here.gin"', "sub/a.gin")
    assert load(file)[0].model.hidden == 64
    assert load(file)[0].model.layers == 2


def test_shipped_file_can_be_included_from_anywhere(gin_file):
    file = gin_file('include "model_qwen3_0_6b.gin"', "sub/a.gin")
    assert load(file)[0].model.hidden == 1024


def test_macros_and_blocks_are_gin(gin_file):
    file = gin_file("WIDTH = 64\nmodel:\n  hidden = %WIDTH\n  ff = %WIDTH\n")
    model = load(file)[0].model
    assert (model.hidden, model.ff) == (64, 64)


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("run.steps=1_000", "run", "steps", 1000),
        ("optimizer.learning_rate=3e-4", "optimizer", "learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1),
        ("model.tied=False", "model", "tied", False),
        ("model.logits.softcap=None", "model", "logits.softcap", None),
        ("head.chunk=auto", "head", "chunk", "auto"),
        ("head.chunk='auto'", "head", "chunk", "auto"),
        ("run.out_dir=runs/2026-11-21", "run", "out_dir", "runs/2026-11-21"),
        ("run.out_dir=a=b c", "run", "out_dir", "a=b c"),
        ("data.source='1.txt'", "data", "source", "1.txt"),
    ],
)
def test_override_is_a_literal_or_a_bare_word(
    gin_file, override, section, field, value
):
    config, _ = load(gin_file(""), [override])
    assert fields.value_of(getattr(config, section), field) == value


def test_nothing_leaks_into_the_next_load(gin_file):
    load(gin_file("W = 64\nmodel.hidden = %W"), ["run.steps=30"])
    complaint(gin_file("model.hidden = 63\nmodel.nonsense = 1", "bad.gin"))
    default, text = load(gin_file("", "empty.gin"))
    assert default.model.hidden != 64 and default.run.steps != 30
    assert "W = " not in text
    assert "is not defined" in complaint(gin_file("model.ff = %W", "late.gin"))


def test_load_ignores_and_leaves_the_bindings_of_gin(gin_file):
    @gin.configurable(module="theirs")
    def hidden(width=1):
        return width

    with gin.unlock_config():
        gin.bind_parameter("theirs.hidden.width", 64)
    assert load(gin_file("run.steps = 30"))[0].run.steps == 30
    assert hidden() == 64 and "hidden.width = 64" in gin.config_str()


def test_every_setting_has_a_help_and_a_default():
    known = configuration._settings(JOBS)
    assert len(known) > 200
    missing = dataclasses.MISSING
    assert not [k for k, x in known.items() if not x.help or x.default is missing]


def test_operative_text_loads_to_same_config(gin_file):
    overrides = ["run.out_dir=" + "a long path/" * 20, "head.chunk=auto"]
    config, text = load(gin_file("W = 64\nmodel.hidden = %W\n"), overrides)
    assert load(gin_file(text, "operative.gin")) == (config, text)
    for section in dataclasses.fields(SftJobConfig):
        for path in fields.settings(section.type):
            assert f"\n{section.name}.{path} = " in text


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.hiden = 3", "a.gin:1: unknown key 'model.hiden'; did you mean "),
        ("model.hiden = 3", "model.hidden"),
        ("\n\nmodle.hidden = 3", "a.gin:3: unknown key 'modle.hidden'; did you mean "),
        ("data.steps = 3",
         "a.gin:1: unknown key 'data.steps'; did you mean run.steps?"),
        ("a.seed = 3", "did you mean data.seed or run.seed or task.seed?"),
        ("head.zzz = 3", "unknown key 'head.zzz'; the nearest keys are head."),
        ("zzz.qqq = 3", "the sections are data, model, head, optimizer, run"),
        ("model:\n  hiden = 3", "a.gin:2: unknown key 'model.hiden'; did you mean "),
        ("model.layers = 'two'", "a.gin:1: model.layers must be int, got 'two' (str)"),
        ("model.layers = 2.0", "a.gin:1: model.layers must be int, got 2.0 (float)"),
        ("model.layers = True", "a.gin:1: model.layers must be int, got True (bool)"),
        ("model.tied = 1", "a.gin:1: model.tied must be bool, got 1 (int)"),
        ("model.lora_targets = 'q_proj'",
         "a.gin:1: model.lora_targets must be a tuple of names, as in "
         "'(\"query\",)', got 'q_proj' (str); q_proj is query"),
        ("model.lora_targets = ['q_proj', 'value', 'down_proj']",
         "as in '(\"query\", \"value\", \"down\")', got ['q_proj', 'value', 'down_proj'"
         "] (list); q_proj is query, down_proj is down"),
        ("model.lora_targets = ('q_proj', 'value', 'up_proj')",
         "got 'q_proj'; q_proj is query, up_proj is up"),
        ("data.ignored = 'id, x'",
         "a tuple of names, as in '(\"id\", \"x\")', got 'id"),
        ("optimizer.b1 = '1'", "optimizer.b1 must be float, got '1' (str)"),
        ("model.logits.softcap = 'x'",
         "model.logits.softcap must be float or None, got 'x' (str)"),
        ("head.chunk = 1.5", "head.chunk must be int or 'auto' or None, got 1.5"),
        ("head.logits = 'x'", "must be 'fused' or 'materialised', got 'x'"),
        ("data.batch_size = 0", "a.gin:1: data.batch_size must be at least 1, got 0"),
        ("\nmodel.heads = 3", "a.gin:2: model.kv_heads must be a divisor of heads"),
        ("run.steps = 1\nrun.steps = 2", "a.gin:2: run.steps is already set on line 1"),
        ("run.steps = ten", "a.gin:1: ten is not a value; a string needs quotes"),
        ("run.steps =", "a.gin:1: Unable to parse value."),
        ("run.steps 3", "a.gin:1: Couldn't parse statement, expected ':' or '='."),
        ("\nrun.steps = (1,", "a.gin:"),
        ("run.steps = @run", "a.gin:1: @run is not a value; write a Python literal"),
        ("run.steps = %TEN", "a.gin:1: %TEN is not defined"),
        ("a/run.steps = 3", "a.gin:1: a/run: scopes are not supported"),
        ("import os", "a.gin:1: a configuration file cannot import"),
        ("include 'b.gin'", "a.gin:1: include 'b.gin': no such file beside a.gin ("),
        ("include 'a.gin'", "a.gin includes itself"),
        ("A = %A\nrun.steps = %A", "a.gin:1: %A is defined by itself"),
        ("A = %B\nB = (1, %A)", "a.gin:1: %A is defined by itself"),
        ("A = %B\nrun.steps = %A", "a.gin:1: %B is not defined"),
        ("optimizer.learning_rate = 1e999", "optimizer.learning_rate must be finite"),
        ("optimizer.weight_decay = 1e999", "weight_decay must be finite, got inf"),
        ("model.logits.softcap = 1e999", "a.gin:1: model.logits.softcap must be fin"),
        ("model.rope.theta = 1e999", "model.rope.theta must be finite, got inf"),
        ("model.norm.eps = 1e30", "model.norm.eps must be in (0, 1), got 1e+30"),
        ("grpo.kl_coefficient = 1e999\nrun.job = 'grpo'", "kl_coefficient must be fin"),
        ("model.layers = 10000000",
         "model.layers must be at most 10,000, got 10000000"),
        ("data.seed = 0x" + "f" * 9000,
         "data.seed must be at most 9,223,372,036,854,7"),
        ("run.out_dir = 'a\\0b'",
         "a.gin:1: run.out_dir must not contain a NUL character, got 'a\\x0"),
        ("run.out_dir = 's3://runs/a'", "run.out_dir must be a directory of a mounted"),
        ("run.out_dir = '\\ud800'", "run.out_dir must be text that UTF-8 can encode"),
        ("run.steps = " + "-" * 100_000, "a.gin:1: Unable to parse value"),
        ("run.steps = " + "[" * 100_000, "a.gin:1: nested too deeply"),
        ("run.steps = " + "a" * 9000, "aaa' is not a value; a string needs quotes"),
        ("task.origin = 'x'", "unknown key 'task.origin'; the nearest keys are task."),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_mistake_in_the_file_says_where_and_what(gin_file, text, expected):
    assert expected in complaint(gin_file(text))


def test_override_may_have_spaces(gin_file):
    path = gin_file("run.steps = 40")
    assert load(path, [" run.steps = 3 "])[0].run.steps == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["steps"], "override 'steps': expected section.field=value, as in data."),
        (["run.steps="], "override 'run.steps=': expected section.field=value"),
        (["=3"], "override '=3': expected section.field=value"),
        (["--steps=3"], "override '--steps=3': expected section.field=value"),
        (["steps=3"], "unknown key 'steps'; did you mean run.steps?"),
        (["run.step=3"],
         "override 'run.step=3': unknown key 'run.step'; did you mean "),
        (["run.steps=10k"], "'run.steps=10k': run.steps must be int, got '10k' (str)"),
        (["model.tied=true"], "model.tied must be bool, got 'true' (str)"),
        (["run.steps=[1"], "override 'run.steps=[1': '[1' is not a Python literal"),
        (["run.out_dir='a"], "is not a Python literal"),
        (["run.steps=" + "-" * 100_000], "run.steps must be int, got '---"),
        (["run.steps=" + "[" * 100_000], "[[[' is not a Python literal"),
        (["run." + "a" * 9000 + "=1"], "aaa'; the nearest keys are run."),
        (["run.steps=" + "9" * 6000], "run.steps must be int, got '999"),
        (["model.logits.softcap=1e999"],
         "'model.logits.softcap=1e999': model.logits.softcap must be finite"),
        (["task.origin=x"], "unknown key 'task.origin'; the nearest keys are task."),
        (["data.batch_size=1000000000000"],
         "batch_size must be below 2**31 / sequence"),
        (["run.seed=-1"], "override 'run.seed=-1': run.seed must be in [0, 2**31)"),
    ],
)  # fmt: skip
def test_mistake_in_an_override_says_which_and_what(gin_file, overrides, expected):
    assert expected in complaint(gin_file("run.steps = 40"), overrides)


def test_error_of_a_long_value_is_short(gin_file):
    for override in ("run.steps=" + "9" * 10**5, "run." + "a" * 10**5 + "=1"):
        assert len(complaint(gin_file(""), [override])) < 600
    assert len(complaint(gin_file("run.steps = '" + "x" * 10**5 + "'"))) < 600


def test_none_restores_the_default_of_a_field(gin_file):
    gin_file("model.ff = 32\nmodel.layers = 2", "base.gin")
    file = gin_file('include "base.gin"\nmodel.layers = None')
    assert load(file)[0].model.layers == SftJobConfig.sections()["model"]().layers
    config, text = load(file, ["model.ff=None"])
    assert config.model == load(gin_file("", "empty.gin"))[0].model
    assert "model.ff = 448" in text
    # Where None is a value, it is that value.
    file = gin_file("optimizer.clip_norm = 2.0")
    assert load(file, ["optimizer.clip_norm=None"])[0].optimizer.clip_norm is None


WORDS = st.sampled_from([
    "-" * 5000, "[" * 5000, "(1,", "1e999", "-1e999", "nan", "None", "True", "''",
    "9" * 5000, "0x" + "f" * 5000, "%A", "@x", "10**9", "1 2", "{'a': 1}", "auto",
    "[[1], 2]", "b'x'", "1j", "-1", "0", "3", "2.5", "1e-300", "1e39", "x" * 5000,
    "'\\0'", "'\\ud800'", "é", "\\", "\t", "#", "lambda: 0", "(1, 2)", "'grpo'",
])  # fmt: skip
KEYS = st.sampled_from([
    "run.steps", "run.job", "run.out_dir", "model.layers", "model.pattern", "A",
    "model.logits.softcap", "data.held_out", "data.batch_size", "optimizer.trainable",
    "head.chunk", "mesh.data", "task.digits", "remat.memory_limit", "x.y", "run.",
    "grpo.row_lengths", "sampling.top_p", "optimizer.b1", "run", ".", "a/b.c",
])  # fmt: skip


@nasty.profile(300)
@hypothesis.given(
    lines=st.lists(st.tuples(KEYS, WORDS), max_size=3),
    overrides=st.lists(st.tuples(KEYS, WORDS), max_size=2),
)
def test_any_file_and_overrides(tmp_path_factory, lines, overrides):
    path = tmp_path_factory.getbasetemp() / "any.gin"
    path.write_text("\n".join(f"{key} = {word}" for key, word in lines))
    words = [f"{key}={word}" for key, word in overrides]
    loaded, made = nasty.outcome(lambda: load(path, words), "")
    if loaded:
        config, text = made
        path.write_text(text)
        assert load(path) == (config, text)


def test_mistake_in_an_included_file_names_that_file(gin_file):
    gin_file("\nmodel.hiden = 3", "sub/base.gin")
    file = gin_file("include 'sub/base.gin'")
    assert complaint(file).startswith("sub/base.gin:2: unknown key 'model.hiden'")


def test_files_that_cannot_be_read_are_named(gin_file, tmp_path):
    assert (
        complaint("absent.gin") == "cannot read absent.gin: No such file or directory"
    )
    assert "cannot read sub/sft_lora.gin: " in complaint("sub/sft_lora.gin")
    assert "Is a directory" in complaint(tmp_path)
    Path("latin.gin").write_bytes(b"run.out_dir = '\xe9'")
    assert complaint("latin.gin") == "latin.gin is not UTF-8 text (byte 15)"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=1", "'optimizer.lr'; optimizer.lr is optimizer.learning_rate"),
        ("model.load_in_4bit=True", '; load_in_4bit is model.base="nf4"'),
        ("load_in_8bit=True", '; load_in_8bit is model.base="int8"'),
        ("data.packing=True", "; packing is always on; leave it out"),
        ("beta=0.1", "; beta is distill.beta or dpo.beta or grpo.kl_coefficient"),
        ("grpo.beta=0.1", "; grpo.beta is grpo.kl_coefficient"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n is grpo.group_size"),
        ("actor.optim.lr=1", "actor.optim.lr is optimizer.learning_rate"),
        ("run.max_steps=3", "; run.max_steps is run.steps"),
        ("num_train_epochs=3", "; num_train_epochs is run.epochs"),
        ("per_device_train_batch_size=8", "is data.batch_size (rows on all devices to"),
        ("gradient_checkpointing=True", 'is remat.policy ("full", the default, is'),
        ("lora_r=8", "; lora_r is model.lora_rank"),
        ("use_vllm=True", "; use_vllm is rollouts.engine"),
        ("data.learning_rate=1", "; did you mean optimizer.learning_rate?"),
    ],
)  # fmt: skip
def test_load_answers_names_of_other_trainers(override, expected, gin_file):
    said = complaint(gin_file(""), [override])
    assert "unknown key " in said and expected in said


def test_load_lists_five_nearest_keys_at_most(gin_file):
    said = complaint(gin_file(""), ["model.xyzzy=1"])
    assert said.count("model.") == 2 + 5 and "`jaxmem train --keys model` lists" in said


# ------------------------------------------------- replaced, and placeholders


def test_load_last_override_wins_and_is_printed(gin_file, capsys):
    file = gin_file("run.steps = 40")
    overrides = ["run.steps=3", "run.steps=4", "run.out_dir=a b", "run.out_dir=c"]
    run = load(file, overrides)[0].run
    assert (run.steps, run.out_dir) == (4, "c")
    assert capsys.readouterr().err == (
        "jaxmem: run.steps=4 replaces run.steps=3\n"
        "jaxmem: run.out_dir=c replaces run.out_dir=a b\n"
    )


@pytest.mark.parametrize(
    ("file", "overrides", "steps", "epochs", "said"),
    [
        ("run.epochs = 3", ["run.steps=7"], 7, None, "steps=7 replaces run.epochs=3"),
        ("run.epochs = 3\nrun.steps = 7", [], 7, 3, ""),
        ("run.steps = 7\nrun.epochs = 3", [], 7, 3, ""),
        ("run.steps = 7", ["run.epochs=3"], 7, 3, ""),
        ("", ["run.epochs=3", "run.steps=7"], 7, None, "run.steps=7 replaces run.epoc"),
        ("run.epochs = 3", ["run.steps=7", "run.epochs=2"], 7, 2, ""),
        ("run.epochs = None", ["run.steps=7"], 7, None, ""),
        ('include "three.gin"\nrun.steps = 7', [], 7, None, "replaces run.epochs=3"),
    ],
)  # fmt: skip
def test_load_later_steps_replace_epochs(
    file, overrides, steps, epochs, said, gin_file, capsys
):
    gin_file("run.epochs = 3", "three.gin")
    run = load(gin_file(file), overrides)[0].run
    assert (run.steps, run.epochs) == (steps, epochs)
    err = capsys.readouterr().err
    assert (said in err) if said else not err


def test_load_names_all_placeholders(gin_file):
    file = gin_file('include "sft_lora.gin"\nmodel.lora_rank = 8')
    assert complaint(file) == (
        "data.source and model.checkpoint are placeholders of sft_lora.gin; add "
        "data.source=FILE.jsonl and model.checkpoint=DIR or OWNER/NAME"
    )
    named = ["data.source=chats.jsonl"]
    assert (
        complaint(file, named)
        == complaint("sft_lora", named)
        == (
            "model.checkpoint is the placeholder of sft_lora.gin; add "
            "model.checkpoint=DIR or OWNER/NAME"
        )
    )
    own = gin_file('include "sft_lora.gin"\nrun.wandb = %gin.REQUIRED', "own.gin")
    assert "; run.wandb is the placeholder of own.gin; add run.wandb=VALUE" in (
        complaint(own)
    )
    whole = gin_file('include "a.gin"\nmodel.checkpoint = "x"\n', "whole.gin")
    config, text = load(whole, named)
    assert config.model.lora_rank == 8 and "REQUIRED" not in text


def test_load_keeps_optional_placeholders(gin_file):
    file = gin_file("data.source = %gin.REQUIRED\nmodel.layers = %gin.REQUIRED")
    with pytest.raises(ConfigError, match="^model.layers is the placeholder of a.gin"):
        load(file, [], ("data.source",))
    config, _ = load(file, ["model.layers=1"], ("data.source",))
    assert config.data.source == "<data.source>"


# ---------------------------------------------------------- shipped configs


def test_load_finds_shipped_files(gin_file):
    gin_file("")
    assert (
        load("sft_stdlib.gin") == load("sft_stdlib") == load(CONFIGS / "sft_stdlib.gin")
    )
    recipe = load("recipes/qwen3_8b_24g", ["model.checkpoint=a", "data.source=b"])[0]
    assert recipe.model.base == "nf4"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.gin")), ids=lambda p: p.stem)
def test_shipped_configs_load_and_explain_lines(path):
    text = path.read_text()
    needed = re.findall(r"^(\S+) = %gin.REQUIRED", text, re.M)
    assert set(needed) <= {"distill.teacher", *FROM_USERS}
    config, _ = load(path, [f"{key}=x" for key in needed])
    if "model.checkpoint" in needed and config.run.job != "grpo":
        assert config.eval.every and config.eval.keep_best
    for line in text.splitlines():
        if line and not line.startswith("#"):
            _, _, comment = line.partition("  # ")
            assert comment[:1].isupper() and comment.endswith("."), line


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Parameters as published; Gemma's extra norms are a few thousandths.
        ("qwen3_0_6b", 0.596),
        ("qwen3_8b", 8.19),
        ("llama3_8b", 8.03),
        ("gemma2_2b", 2.61),
        ("gemma3_4b", 3.88),
    ],
)
def test_published_dimensions_give_published_size(name, billions):
    model = load(CONFIGS / f"model_{name}.gin")[0].model
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    block = attention + 3 * model.hidden * model.ff
    tables = model.vocab_size * model.hidden * (1 if model.tied else 2)
    total = model.layers * block + tables
    assert math.isclose(total / 1e9, billions, rel_tol=0.005)


def test_default_job_matches_its_comments():
    config, _ = load(CONFIGS / "sft_stdlib.gin")
    rows = config.data.batch_size * config.data.sequence_length
    assert config.data.source == "stdlib"
    assert config.head.logits == "fused"
    assert config.head.chunk <= rows // 4  # else the memory saved is not visible
