"""`jaxmem plan`, all but the compiler for absent devices."""

import dataclasses
import functools
import json
import pathlib

import jax
import pytest

from jaxmem import checkpoints, devices, remat
from jaxmem.commands import cli
from jaxmem.models.config import ModelConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import by_path
from jaxmem.planning import analytic, command, roofline, search
from jaxmem.planning.accounts import Account
from jaxmem.train import configuration
from jaxmem.train.jobs import dpo, job_of, sft
from jaxmem.train.jobs.distill.program import DistillProgram
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.phases import device_bytes
from tests.helpers import texts
from tests.helpers.cases import full, slow
from tests.helpers.tiny_jobs import GRPO, TINY

SFT = (
    "sft_stdlib.gin", *TINY, "data.sequence_length=32", "data.batch_size=4",
    "data.vocab_size=300",
)  # fmt: skip
SCORE = "tests/checkpoints/tiny/qwen3"
DPO = (
    "dpo_lora.gin", f"model.checkpoint={SCORE}", "data.sequence_length=16",
    "head.chunk=32", "model.dtype=float32", "model.param_dtype=float32",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def as_elsewhere(monkeypatch):
    """The command leaves this process's platforms as they are."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def planned(capsys, *words):
    status = cli.main(["plan", *words, "--device", "h200"])
    return status, capsys.readouterr()


@pytest.mark.slow
def test_phases_of_a_policy_are_its_programs(fake, numbered):
    config, _ = configuration.load(cli._find_config(GRPO[0]), GRPO[1:])
    with devices.target("h200"):
        made = command.plan_of(job_of(config), "h200")
        compiled = PolicyProgram(config).compile()
    said = str(made)
    first = said.splitlines()[0].split()
    assert first[4:] == ["rollout", "log-probs", "gradients", "update"]
    assert "reference weights" in said and "keys and values" in said
    programs = [
        compiled.sample.first, *compiled.logprobs.values(),
        *compiled.gradients.values(), compiled.update,
    ]  # fmt: skip
    for phase, program in zip(made.phases, programs, strict=True):
        want = program.memory_analysis().temp_size_in_bytes
        assert phase.account.temporary == want, phase.name


def test_how_often_a_policy_runs_its_programs(fake):
    config, _ = configuration.load(cli._find_config(GRPO[0]), GRPO[1:])
    with devices.target("h200"):
        job = job_of(config).plan()
    assert [phase.turns for phase in job.phases] == [
        config.sampling.max_new_tokens - 1, 1, 1, 1,
    ]  # fmt: skip
    # A step trains on every sample once, and reads it once for the reference. Of the
    # old pass, the second of two minibatches is left.
    assert config.grpo.minibatches == 2
    read = config.grpo.samples * config.longest
    _, forward, backward, _ = job.phases
    assert backward.runs * backward.tokens == pytest.approx(read)
    assert forward.runs * forward.tokens == pytest.approx(1.5 * read)


@pytest.mark.slow
def test_phases_of_pairs_are_its_programs(fake, numbered, capsys):
    """The reference is in the plan, and in no step's time."""
    words = (
        f"model.checkpoint={SCORE}", "data.sequence_length=16", "head.chunk=32",
        "model.dtype=float32", "model.param_dtype=float32", "run.accumulate=2",
    )  # fmt: skip
    status, said = planned(capsys, "dpo_lora.gin", *words, "--json")
    made = json.loads(said.out)
    reference, step = made["phases"]
    unread = configuration.DATA_KEYS
    config, _ = configuration.load("dpo_lora.gin", words, unread)
    config = job_of(config).config
    with devices.target("h200"):
        program = dpo.DpoProgram(config, config.model.vocab_size)
        scoring = program.trace_logprobs().lower().compile()
        compiled = program.compile_step()
    for phase, expected in ((reference, scoring), (step, compiled)):
        account = expected.memory_analysis()
        assert phase["account"]["temporary"] == account.temp_size_in_bytes
        assert phase["account"]["arguments"] == account.argument_size_in_bytes
    moments = step["resident"]["moments"]
    assert moments > 0 and reference["resident"]["moments"] == moments  # eval.every
    assert status == 0 and "weights are trained in float32" in made["notes"][0]
    assert made["notes"][1:] == ["the reference is scored once, before the first step"]


def test_plan_dpo_reference_has_no_scoring_step(fake):
    words = (
        *DPO[1:], "data.source=pairs.jsonl", "run.accumulate=2", "data.held_out=0.0",
        "eval.every=None",
    )  # fmt: skip
    config, _ = configuration.load(cli._find_config(DPO[0]), words)
    with devices.target("h200"):
        reference, step = job_of(config).plan().phases
    assert [reference.runs, step.runs] == [0, 1] and not reference.held
    assert step.tokens == 2 * 2 * 2 * 16  # micro-batches x pairs x answers x tokens


DISTILL = (
    "distill.teacher_dtype=float32", "head.chunk=32", "model.dtype=float32",
    "model.layers=1", "model.hidden=32", "model.ff=32", "model.heads=2",
    "model.kv_heads=1", "model.head_dim=16",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mode", [slow("text"), "on_policy"])
def test_phases_of_a_student_are_its_programs(fake, numbered, tmp_path, mode):
    """The teacher is on the device in every phase; its states are on the host."""
    words = ("distill_stdlib.gin", *DISTILL, "data.sequence_length=16")
    names = ["teacher", "gradients", "update"]
    if mode == "on_policy":
        words = (
            "distill_on_policy.gin", *DISTILL, "model.checkpoint=None",
            "task.source=prompts.jsonl", "task.max_prompt_tokens=9",
            "distill.prompts=8", "distill.max_tokens=32", "sampling.max_new_tokens=8",
        )  # fmt: skip
        names.insert(0, "rollout")
    teacher = texts.checkpoint("qwen3", tmp_path)
    words += (f"distill.teacher={teacher}",)
    config, _ = configuration.load(cli._find_config(words[0]), words[1:])
    config = job_of(config).config
    with devices.target("h200"):
        job = job_of(config).plan()
        program = DistillProgram(config, config.model.vocab_size)
        compiled = program.compile()
        (shape,) = program.shapes
    assert [phase.name for phase in job.phases] == names
    by_name = {phase.name: phase for phase in job.phases}
    states = by_name["teacher"].traced.lower().compile().memory_analysis()
    expected = compiled.states[shape].memory_analysis()
    assert states.temp_size_in_bytes == expected.temp_size_in_bytes
    size = device_bytes(program.teacher.state_shapes.params)
    for phase in job.phases:
        kept = {**phase.arguments, **phase.held}
        of_teacher = {k: v for k, v in kept.items() if "teacher" in k}
        assert sum(map(device_bytes, of_teacher.values())) == size, phase.name
    runs = by_name["gradients"].runs
    assert runs == (8 * 16 / 32 if mode == "on_policy" else 1)
    parked = device_bytes(program.teacher.states(shape))
    assert job.on_host == runs * parked


def test_student_of_a_file_has_no_plan(fake, capsys):
    sizes = f"model.checkpoint={SCORE}", "model.dtype=float32"
    status, said = planned(capsys, "distill_offline.gin", *sizes)
    assert status == 2 and "distill.mode='offline' has no plan, because" in said.err


def test_pairs_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    sizes = f"model.checkpoint={SCORE}", "model.dtype=float32"
    _, said = planned(capsys, "dpo_lora.gin", *sizes)
    assert "Not compiled" in said.out and "activations kept" in said.out


def test_plan_without_compiler_counts_residuals_of_every_block(capsys, monkeypatch):
    """With nothing recomputed, a longer stack keeps more by one block's residuals."""
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")

    def kept(layers, policy):
        words = (f"model.layers={layers}", f"remat.policy={policy}", "--json")
        others = [word for word in SFT if not word.startswith("model.layers")]
        _, said = planned(capsys, *others, *words)
        (phase,) = json.loads(said.out)["phases"]
        assert phase["temporaries"] > phase["parts"]["activations kept"]
        return phase["parts"]["activations kept"]

    two = kept(2, "none")
    assert kept(4, "none") == 2 * two > 0


@pytest.mark.parametrize("gib, status", [(64, 0), (0.001, 1)])
def test_plan_status_without_compiler_is_of_range(gib, status, capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    small = dataclasses.replace(devices.known()["h200"], memory=int(gib * 2**30))
    monkeypatch.setattr(devices.table, "known", lambda: {"h200": small})
    got, said = planned(capsys, *SFT)
    assert got == status and ("does not fit: about" in said.out) == bool(status)


def test_plan_without_compiler_cannot_always_say(capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    _, said = planned(capsys, *SFT, "--json")
    made = json.loads(said.out)
    between = int((made["low"] + made["high"]) / 2 / 0.95)
    small = dataclasses.replace(devices.known()["h200"], memory=between)
    monkeypatch.setattr(devices.table, "known", lambda: {"h200": small})
    status, said = planned(capsys, *SFT)
    assert status == 2 and "may fit: about" in said.out


def test_scoring(fake, capsys):
    status, said = planned(capsys, SCORE, "max_tokens=64", "dtype=float32")
    assert status == 0 and "forward" in said.out
    status, said = planned(capsys, SCORE, "max_token=64")
    assert status == 2 and "max_token=64" in said.err and "max_tokens" in said.err


@pytest.mark.slow
def test_plan_on_a_mesh(fake, capsys):
    status, said = planned(capsys, *SFT, "mesh.fsdp=2", "--devices", "2", "--json")
    (phase,) = json.loads(said.out)["phases"]
    config, _ = configuration.load(cli._find_config(SFT[0]), SFT[1:])
    whole = device_bytes(sft.SftProgram(config, 300).state_shapes.params)
    assert status == 0 and 0 < phase["resident"]["trained weights"] < 0.6 * whole
    assert phase["account"]["collectives"]


@pytest.mark.parametrize(
    "words, said",
    [
        (("--devices", "2"), "add an override such as mesh.fsdp=2"),
        (("mesh.tensor=8",), "mesh.tensor=8 must divide"),
        (("mesh.tensr=8",), "mesh.tensor"),
        (("model.attention=cudnn",), "None or 'xla' with dtype='float32'"),
        (("model.attention=cudnn", "model.dtype=bfloat16"), "cannot compile for h200"),
    ],
)
def test_plan_errors_are_one_line(fake, capsys, words, said):
    status, made = planned(capsys, *SFT, *words)
    *_, last = made.err.strip().splitlines()
    assert status == 2 and last.startswith("jaxmem: error: ") and said in last


def test_unknown_device_is_one_line(capsys):
    status = cli.main(["plan", *SFT, "--device", "h201"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and "'h201'" in said and "h200" in said


def test_plan_without_a_compiler_sums_shapes(capsys, monkeypatch):
    lacking = "compiling needs: pip install this"
    monkeypatch.setattr(devices, "compiler_missing", lambda device: lacking)
    status, said = planned(capsys, *SFT, "--fit")
    assert status == 0 and "--fit and --picture show nothing" in said.err
    assert "Not compiled" in said.out and "pip install this" in said.out
    assert "moments" in said.out and "activations kept" in said.out


@pytest.mark.parametrize("words", [SFT, GRPO, full(DPO), (SCORE, "max_tokens=64")])
def test_plan_json_without_a_compiler(words, capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    status, said = planned(capsys, *words, "--json")
    made = json.loads(said.out)
    assert status == 0 and made["device"] == "h200"
    assert made["missing"] == "pip install this" and made["fits"] is True
    weights = "weights" if words[0] == SCORE else "trained weights"
    for phase in made["phases"]:
        assert phase["resident"][weights] > 0 and phase["low"] <= phase["high"]
    assert made["low"] <= made["expected"] <= made["high"]
    assert any("the head" in phase["parts"] for phase in made["phases"])


def test_shapes_have_the_copy_of_a_head_in_8_bits():
    model = ModelConfig(vocab_size=1000, hidden=64)
    sizes = [
        analytic.head_bytes(model, HeadConfig(gradient=("sample", 8, forward)), 128)
        for forward in ("exact", "int8")
    ]
    assert sizes[1] - sizes[0] == 1000 * (64 + 4 + 32)


@pytest.mark.parametrize(
    "words",
    [
        (*SFT, "model.lora_rank=2"),
        (*GRPO, "model.lora_rank=2"),
        DPO,
        ("distill_stdlib.gin", *TINY, f"distill.teacher={SCORE}", "model.lora_rank=2"),
    ],
)
def test_phases_hold_the_codes_of_a_base(words):
    """Codes take a quarter of blocks in float32, and half of blocks in bfloat16."""
    path, held = cli._find_config(words[0]), []
    for more in ((), ("model.base=int8",)):
        unread = configuration.DATA_KEYS  # as `jaxmem plan` does
        config, _ = configuration.load(path, (*words[1:], *more), unread)
        programs = job_of(config).plan()
        held.append(device_bytes(programs.backward.arguments["frozen weights"]))
    assert held[1] < 0.75 * held[0]


CODED = "tests/checkpoints/bitsandbytes/"


def weights_of_scoring(*words):
    """Bytes of the weights in a plan of scoring."""
    (phase,) = command.load(pathlib.Path(words[0]), words[1:]).plan().phases
    return device_bytes(phase.arguments["weights"])


@pytest.mark.parametrize(
    "directory, options", [(SCORE, {"base": "int8"}), (CODED + "qwen3_nf4", {})]
)
def test_scoring_counts_the_codes_of_a_base(directory, options):
    arrays = by_path(checkpoints.load(directory, **options)).values()
    words = [f"{key}={value}" for key, value in options.items()]
    assert weights_of_scoring(directory, *words) == sum(x.nbytes for x in arrays)


def test_scoring_reads_columns_and_refuses_what_changes_no_program(capsys):
    job = command.load(pathlib.Path(SCORE), ("sample_ids=4", "max_tokens=64"))
    (phase,) = job.plan().phases
    assert any(
        out.shape == (1, 64, 4) for out in jax.tree.leaves(phase.traced.out_info)
    )
    status, said = planned(capsys, SCORE, "stride=4")
    assert (
        status == 2
        and "'stride=4': a plan of scoring reads only adapter, b" in said.err
    )
    status, said = planned(capsys, CODED + "qwen3_nf4", "base=int8")
    assert status == 2 and "coded in nf4, and base='int8' differs" in said.err
    with pytest.raises(SystemExit):
        planned(capsys, SCORE, "--base", "nf4")
    assert (
        "takes such options as overrides, for example base=nf4"
        in capsys.readouterr().err
    )


@pytest.mark.full
def test_plan_without_a_compiler_says_which_policy_fits(capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    few = functools.partial(remat.fit, names=["gate", "up"])  # of all, each is traced
    monkeypatch.setattr(remat, "fit", few)
    fit = "remat.policy=fit", "remat.memory_limit=auto"
    status, said = planned(capsys, *SFT, *fit)
    assert status == 0 and "\nremat.policy='fit' chooses: save gate, up\n" in said.out


def test_plan_of_scoring_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "pip install this")
    status, said = planned(capsys, SCORE, "max_tokens=64")
    assert status == 0 and "the head" in said.out and "at least" in said.out


def test_plan_of_job_that_does_not_fit(fake, capsys, monkeypatch):
    small = dataclasses.replace(devices.known()["h200"], memory=2**16)
    monkeypatch.setattr(devices.table, "known", lambda: {"h200": small})
    status, said = planned(capsys, SCORE, "max_tokens=64", "dtype=float32")
    assert status == 1 and "does not fit" in said.out


@pytest.mark.full
@pytest.mark.parametrize("job", [SFT, slow(DPO)], ids=["sft", "dpo"])
def test_fit_prints_overrides_that_load(job, fake, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_POLICIES", ("none", "full"))  # each is traced
    monkeypatch.setattr(search, "_BEST", 2)  # each is compiled
    path = tmp_path / "bars.png"
    status, said = planned(capsys, *job, "--fit", "--json", "--picture", str(path))
    options = json.loads(said.out)["options"]
    assert status == 0 and len(options) == 2
    times = [option["seconds_estimate"] for option in options]
    assert times == sorted(times)
    for option in options:
        words = [*job[1:], *option["overrides"]]
        last = {word.partition("=")[0]: word for word in words}
        overrides, unread = list(last.values()), configuration.DATA_KEYS
        configuration.load(cli._find_config(job[0]), overrides, unread)
    assert path.stat().st_size > 10_000


def test_picture_replaces_no_file(capsys, tmp_path):
    path = tmp_path / "bars.png"
    path.write_text("mine")
    status, said = planned(capsys, SCORE, "--picture", str(path))
    assert status == 2 and f"--picture {path} exists" in said.err
    assert path.read_text() == "mine"


def test_keeping_more_is_expected_to_take_less_time(fake, monkeypatch):
    monkeypatch.setattr(search, "_POLICIES", ("none", "full"))  # each is traced
    config, _ = configuration.load(cli._find_config(SFT[0]), SFT[1:])
    with devices.target("h200"):
        policies = {
            p.values["remat.policy"]: p
            for p in search._measure_policies(job_of(config))
        }
        none, full = (
            roofline.of(policies[name].phase, Account(0, 0, 0))
            for name in ("none", "full")
        )
    assert none.operations < full.operations


def test_fit_is_for_training(fake, capsys):
    status, said = planned(capsys, SCORE, "dtype=float32", "--fit")
    assert status == 2 and "--fit needs a training job" in said.err


@pytest.mark.parametrize("rank, bases", [(4, [None, "nf4"]), full(0, [None])])
def test_options_have_a_base_in_4_bits_where_16_do_not_fit(
    rank, bases, fake, numbered, monkeypatch
):
    words = ["model.hidden=64", "model.head_dim=32", f"model.lora_rank={rank}"]
    if rank:
        words += ["optimizer.trainable=lora_", "model.param_dtype=bfloat16"]
    others = [
        w
        for w in SFT[1:]
        if w.partition("=")[0] not in ("model.hidden", "model.head_dim")
    ]
    config, _ = configuration.load(cli._find_config(SFT[0]), [*others, *words])
    tried = []

    def fitting(job, base):
        tried.append(job.config.model.base)
        return [search.Option({"remat.policy": "full"}, 1.0, 1)] if tried[-1] else []

    monkeypatch.setattr(search, "_fitting_options", fitting)
    with devices.target("h200"):
        found = search.options(job_of(config), None)
    assert tried == bases
    overrides = [option.overrides for option in found]
    assert overrides == [("model.base=nf4", "remat.policy=full")][: len(bases) - 1]
