"""The text part of a model that reads images: where it is, what is left, what it makes.

test_weights.py holds its numbers to torch's, test_architectures.py reads its config.
"""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.families import ropes
from tests.helpers import seeded
from tests.helpers.cases import slow
from tests.helpers.texts import MISTRAL_3, NESTED, QWEN3_5_MOE

TINY = pathlib.Path(__file__).parent / "tiny"
IMAGES = TINY / "gemma3_images"
MINISTRAL_3 = "ministral3"  # its record, of test_families.py
IGNORED = pytest.mark.filterwarnings("ignore:.*only the text part")


def tensors(directory=IMAGES):
    return load_file(directory / "model.safetensors")


def changed(tmp_path, made):
    """A checkpoint with these tensors."""
    source = pathlib.Path(shutil.copytree(IMAGES, tmp_path / "source"))
    save_file(made, source / "model.safetensors")
    return source


def renamed(name):
    """As transformers calls the modules."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    return "model." + name


def renamed_3(name):
    """As transformers calls the modules; the head is beside the text part there."""
    return name.replace("model.", "model.language_model.", 1)


def copied_whole(name, directory):
    """A tiny checkpoint with all tensors in one file."""
    made = {}
    for path in sorted((TINY / name).glob("*.safetensors")):
        made |= load_file(path)
    directory.mkdir()
    shutil.copy(TINY / name / "config.json", directory)
    save_file(made, directory / "model.safetensors")
    return directory


def test_load_warns_of_image_tensors():
    left = [n for n in tensors() if not n.startswith("language_model.model.")]
    assert {n.split(".")[0] for n in left} == {"vision_tower", "multi_modal_projector"}
    with pytest.warns(UserWarning, match=f"leaves out {len(left)} tensors of"):
        checkpoints.load(IMAGES)


@IGNORED
def test_it_is_found_under_either_prefix(tmp_path):
    source = changed(tmp_path, {renamed(k): v for k, v in tensors().items()})
    states = map(nnx.state, map(checkpoints.load, (IMAGES, source)))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_it_is_saved_as_a_model_of_its_own(tmp_path):
    with pytest.warns(UserWarning, match="only the text part"):
        decoder = checkpoints.load(IMAGES)
    checkpoints.save(tmp_path / "out", decoder, like=IMAGES)
    text = {k: v for k, v in tensors().items() if k.startswith("language_model.")}
    after = tensors(tmp_path / "out")
    assert after.keys() == {k.removeprefix("language_model.") for k in text}
    assert after.keys() == tensors(TINY / "gemma3").keys()
    for name, tensor in text.items():
        np.testing.assert_array_equal(
            after[name.removeprefix("language_model.")], tensor
        )
    ours, theirs = (
        json.loads((d / "config.json").read_text())
        for d in (tmp_path / "out", TINY / "gemma3")
    )
    assert ours == ropes.in_both(theirs)
    assert ours["rope_theta"] == 1000 and ours["rope_local_base_freq"] == 50
    again = checkpoints.load(tmp_path / "out")  # of which nothing is left out
    assert again.config == decoder.config


@IGNORED
@pytest.mark.parametrize("rename", [lambda name: name, renamed])
def test_wrong_tensors_named_as_stored(rename, tmp_path):
    made = {rename(k): v for k, v in tensors().items()}
    lost = rename("language_model.model.layers.1.mlp.up_proj.weight")
    source = changed(tmp_path, {k: v for k, v in made.items() if k != lost})
    with pytest.raises(CheckpointError, match=f"tensor {lost} is missing"):
        checkpoints.load(source)
    for extra in ("audio_tower.weight", "model.layers.1.mlp.up_proj.weight"):
        save_file(made | {extra: made[lost]}, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{extra} is not part of the model"):
            checkpoints.load(source)


@IGNORED
@pytest.mark.parametrize(
    ("rename", "head"),
    [(lambda name: name, "language_model.lm_head"), (renamed, "lm_head")],
)
def test_tied_head_may_be_stored_too(rename, head, tmp_path):
    made = {rename(k): v for k, v in tensors().items()}
    made[f"{head}.weight"] = np.ones((40, 16), np.float32)
    with pytest.raises(
        CheckpointError, match="lm_head.weight is not a copy of .*embed_t"
    ):
        checkpoints.load(changed(tmp_path / "other", made))
    made[f"{head}.weight"] = next(v for k, v in made.items() if "embed_tokens" in k)
    np.testing.assert_array_equal(
        checkpoints.load(changed(tmp_path, made)).embed.embedding[...],
        checkpoints.load(IMAGES).embed.embedding[...],
    )


def test_image_tensors_in_text_model_are_refused(tmp_path):
    source = pathlib.Path(shutil.copytree(TINY / "gemma3", tmp_path / "source"))
    extra = {"vision_tower.weight": np.ones(2, np.float32)}
    save_file(tensors(source) | extra, source / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="vision_tower.weight is not part of the mo"
    ):
        checkpoints.load(source)


@IGNORED
@pytest.mark.parametrize(
    "rename", [slow(lambda name: f"language_model.{name}"), renamed_3]
)
def test_text_part_of_mistral_3_is_a_model(rename, tmp_path):
    """Mistral Small 3's is a Mistral, later ones' a Ministral 3; heads are untied."""
    record = dict(np.load(seeded.RECORDS / f"{MINISTRAL_3}.npz"))
    alone = (
        seeded.write(record, tmp_path / MINISTRAL_3),
        copied_whole("mistral", tmp_path / "mistral"),
    )
    for directory in alone:
        text = json.loads((directory / "config.json").read_text())
        within = tmp_path / f"{directory.name} within"
        within.mkdir()
        config = MISTRAL_3 | {"text_config": text, "tie_word_embeddings": False}
        (within / "config.json").write_text(json.dumps(config))
        made = {rename(name): x for name, x in tensors(directory).items()}
        made["vision_tower.weight"] = np.ones(2, np.float32)
        save_file(made, within / "model.safetensors")
        states = map(nnx.state, map(checkpoints.load, (directory, within)))
        jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.filterwarnings("ignore:.*leaves out|.*only the text part")
@pytest.mark.parametrize("name", [n if n == "llama4" else slow(n) for n in NESTED])
def test_text_part_is_a_model(name, tmp_path):
    """As transformers nests it, beside tensors of images."""
    alone = seeded.write(dict(np.load(seeded.RECORDS / f"{name}.npz")), tmp_path / name)
    text, source = json.loads((alone / "config.json").read_text()), tmp_path / "source"
    source.mkdir()
    config = NESTED[name] | {"text_config": text}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    images, rename = {
        "gemma4": ("model.vision_tower", renamed_3),
        "llama4": ("vision_model", lambda name: f"language_model.{name}"),
        "qwen3_5": ("model.visual", renamed_3),
    }[name]
    made = {rename(name): x for name, x in tensors(alone).items()}
    made[f"{images}.weight"] = np.ones(2, np.float32)
    save_file(made, source / "model.safetensors")
    states = map(nnx.state, map(checkpoints.load, (alone, source)))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_text_part_of_qwen3_5_with_experts(tmp_path):
    record = dict(np.load(seeded.RECORDS / "qwen3_5_moe.npz"))
    alone = seeded.write(record, tmp_path / "alone")
    text, held = json.loads(str(record["config"])), tensors(alone)
    made = {"model.visual.merger.weight": np.ones(3), "mtp.fc.weight": np.ones(3)}
    for name, array in held.items():
        if ".experts." not in name:
            made[renamed_3(name)] = array
            continue
        start, end = renamed_3(name).split(".experts.")
        joined = f"{start}.experts.{'down_proj' if 'down' in end else 'gate_up_proj'}"
        if joined in made:
            continue
        every = [name.rpartition(".experts.")[0] + f".experts.{i}." for i in range(6)]
        kinds = ("down_proj",) if "down" in end else ("gate_proj", "up_proj")
        parts = [[held[f"{e}{kind}.weight"] for kind in kinds] for e in every]
        made[joined] = np.stack([np.concatenate(part) for part in parts])
    source = tmp_path / "source"
    source.mkdir()
    save_file(made, source / "model.safetensors")
    config = QWEN3_5_MOE | {"text_config": text, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    states = map(nnx.state, map(checkpoints.load, (alone, source)))
    jax.tree.map(np.testing.assert_array_equal, *states)
