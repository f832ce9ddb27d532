"""Checkpoints are whole or absent, and belong to one run."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.train.state.checkpoint import Checkpoints, RunCheckpointError, _check_arrays
from jaxmem.train.state.resuming import check_same_config

CONFIG = {"model": {"hidden": 8, "dtype": "float32"}, "data": {"source": "a.txt"}}


def state_at(step):
    return {
        "params": {"kernel": jnp.full((3, 2), step / 7, jnp.float32)},
        "moments": (jnp.arange(4, dtype=jnp.bfloat16) * step, jnp.int32(step)),
    }


def save(checkpoints, step):
    checkpoints.save(step, state_at(step), {"position": step, "seed": None}, CONFIG)


def assert_restores(checkpoints, step):
    state, data_state = checkpoints.restore(
        step, jax.eval_shape(lambda: state_at(step))
    )
    jax.tree.map(np.testing.assert_array_equal, state, state_at(step))
    assert data_state == {"position": step, "seed": None}


def test_restore_equals_saved_bitwise(tmp_path):
    with Checkpoints(tmp_path / "run", keep=3) as checkpoints:
        assert checkpoints.latest() is None
        save(checkpoints, 4)
        assert_restores(checkpoints, 4)
    with Checkpoints(tmp_path / "run", keep=3) as reopened:
        assert reopened.latest() == 4
        assert reopened.saved_config(4) == CONFIG
        assert_restores(reopened, 4)


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
        assert checkpoints.latest() == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_truncated_checkpoint_is_ignored_and_replaced(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    # What a kill leaves while saving 2: the temporary name, half of the files.
    cut = tmp_path / "2.orbax-checkpoint-tmp"
    (tmp_path / "2").rename(cut)
    shutil.rmtree(cut / "state" / "d")
    (cut / "data" / "data").unlink(missing_ok=True)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 1
        assert_restores(checkpoints, 1)
        save(checkpoints, 2)
        assert_restores(checkpoints, 2)


def test_half_deleted_checkpoint_is_harmless(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    shutil.rmtree(tmp_path / "1" / "state")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 2
        assert_restores(checkpoints, 2)
        save(checkpoints, 3)
        assert_restores(checkpoints, 3)


def test_check_same_config_passes():
    check_same_config(CONFIG, {**CONFIG}, Path("runs/a"))


def test_another_config_is_refused_by_field():
    other = {
        "model": {"hidden": 16, "dtype": "float32", "qk_norm.enabled": True},
        "data": {"source": "b.txt"},
    }
    with pytest.raises(ValueError) as error:
        check_same_config(CONFIG, other, Path("runs/a"))
    message = str(error.value)
    assert "run.out_dir='runs/a' contains checkpoints of another run" in message
    assert "data.source was 'a.txt', is 'b.txt'" in message
    assert "model.hidden was 8, is 16" in message
    assert "model.qk_norm.enabled was absent, is True" in message
    assert "dtype" not in message
    assert "name another run.out_dir" in message


# ------------------------------------------------- whole before others go


def test_non_finite_state_replaces_no_finite_one(tmp_path):
    state = state_at(2)
    state["moments"] = (state["moments"][0].at[1].set(jnp.inf), state["moments"][1])
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        with pytest.raises(FloatingPointError, match="after step 2 moments/0 is not f"):
            checkpoints.save(2, state, {}, CONFIG)
        state["params"]["kernel"] *= jnp.nan
        with pytest.raises(FloatingPointError, match="moments/0, and 1 more is not fi"):
            checkpoints.save(2, state, {}, CONFIG)
        assert checkpoints.latest() == 1
        assert_restores(checkpoints, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("part", ["state/manifest.ocdbt", "state/_METADATA"])
def test_unreadable_save_replaces_nothing(part, tmp_path, monkeypatch):
    """As where a bracket in the path hides a file from orbax."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        written = checkpoints._orbax.save

        def incomplete(path, **given):
            written(path, **given)
            (path / part).unlink()

        monkeypatch.setattr(checkpoints._orbax, "save", incomplete)
        with pytest.raises(RunCheckpointError, match="/2: cannot be written: "):
            save(checkpoints, 2)
        assert checkpoints.latest() == 1
        assert_restores(checkpoints, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_missing_array_is_named(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
    more = state_at(1) | {"ema": jnp.ones(2), "moments": (jnp.ones(5), jnp.int32(1))}
    with pytest.raises(ValueError, match="^ema, and 1 more is not found in it$"):
        _check_arrays(tmp_path / "1", more)
    _check_arrays(tmp_path / "1", state_at(1))


@pytest.mark.parametrize("sign", "[]*?")
def test_path_that_storage_cannot_hold_is_refused(sign, tmp_path):
    """A name that a glob takes for a pattern which does not match it."""
    directory = tmp_path / {"[": "a[1]", "]": "a[]]", "*": "a*", "?": "a?"}[sign]
    refused = False
    with Checkpoints(directory, keep=1) as checkpoints:
        try:
            checkpoints.check_storage()
        except RunCheckpointError as error:
            refused = True
            assert "no checkpoint can be saved there (its path has '" in str(error)
        else:
            save(checkpoints, 1)
            assert_restores(checkpoints, 1)
    assert refused == (sign in "[]")
    assert directory.exists() != refused


NAMES = ("\u00b2", "007", "1e3", "9" * 30)  # digits of a kind, and no steps


@pytest.mark.parametrize("name", NAMES)
def test_other_names_are_no_steps(name, tmp_path):
    (tmp_path / name).mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() is None
        save(checkpoints, 1)
        save(checkpoints, 2)
        assert checkpoints.latest() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["2", name])


def test_link_to_step_is_read_and_target_kept(tmp_path):
    with Checkpoints(tmp_path / "a", keep=1) as checkpoints:
        save(checkpoints, 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1").symlink_to(tmp_path / "a" / "1")
    with Checkpoints(tmp_path / "b", keep=1) as checkpoints:
        assert_restores(checkpoints, 1)
        save(checkpoints, 2)
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["2"]
    with Checkpoints(tmp_path / "a", keep=1) as checkpoints:
        assert_restores(checkpoints, 1)


def test_file_in_the_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(OSError, match="checkpoints: cannot be written: File exists"):
        Checkpoints(tmp_path / "checkpoints", keep=1)
