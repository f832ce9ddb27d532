"""Recipes in configs/recipes: their headers, their records, and plans of them anew."""

import functools
import re

import pytest

from benchmarks import results, run_recipes
from jaxmem import devices, remat
from jaxmem.commands import cli
from jaxmem.remat import cost, liveness
from jaxmem.remat.fitting import describe
from jaxmem.train import configuration
from jaxmem.train.jobs import job_of
from jaxmem.train.memory import RematConfig

ROWS = {row["recipe"]: row for row in results.read(run_recipes.OUT)}
PATHS = sorted(run_recipes.FOLDER.glob("*.gin"))
PLANNED = re.compile(
    r"^# Planned for (\S+): about (\S+) GiB, between (\S+) and (\S+) of (\S+)\.$", re.M
)
QUICK = "qwen3_8b_24g", "qwen3_8b_80g"


def test_recipes_have_a_record_each():
    assert {path.stem for path in PATHS} == set(ROWS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_header_repeats_the_record(path):
    text, row = path.read_text("utf-8"), ROWS[path.stem]
    ((device, *numbers),) = PLANNED.findall(text)
    columns = "expected_gib", "low_gib", "high_gib", "memory_gib"
    assert device == row["device"] and row["fits"] == "yes"
    assert numbers == [f"{float(row[name]):.1f}" for name in columns]
    assert f"jaxmem train configs/recipes/{path.name} " in text
    assert "# If memory runs out, set: " in text
    gib = int(re.findall(r"one card of (\d+) GiB", text)[0])
    assert 0.9 * gib < devices.find(device).memory / 2**30 <= gib


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.full
        )
        for path in PATHS
    ],
)
def test_plan_of_recipe_is_the_recorded_one(path):
    (_, plan), row = run_recipes.planned(path), ROWS[path.stem]
    recorded = float(row["expected_gib"])
    assert plan.expected / 2**30 == pytest.approx(recorded, rel=0.03)


@pytest.mark.slow
def test_fit_finds_the_fastest_policy_of_qwen3_8b():
    """Six rows: 141 GiB hold all residuals, and 80 GiB hold some of them."""
    path = run_recipes.FOLDER / "qwen3_8b_141g.gin"
    limits = {name: devices.find(name).usable for name in ("h100", "h200")}
    with run_recipes.checkpoint_for(path) as directory, devices.stand_in("h200"):
        named = [f"model.checkpoint={directory}"]
        config, _ = configuration.load(path, named, configuration.DATA_KEYS)
        job = job_of(config)
        program = job.make_program(job.expected_vocabulary())

        @functools.cache
        def step(policy):
            program._use_policy(policy)
            return program.trace_backward()

        def count(policy):
            traced = step(policy)
            return liveness.argument_bytes(traced) + liveness.peak(traced)

        def products(policy):
            return cost.products(step(policy).jaxpr.jaxpr)

        chosen = {}
        for name, limit in limits.items():
            remat_config = RematConfig("fit", memory_limit=limit / 2**30)
            said = []
            layers, held = config.model.layers, program.held_with_backward()
            policy = remat_config.fit(step, layers, held, said.append)
            chosen[name] = policy
            assert count(policy) <= limit, said[0]
            fitting = [p for p in remat.PRESETS.values() if count(p) <= limit]
            assert products(policy) <= min(map(products, fitting)), said[0]
            (row,) = [x for x in said[0].splitlines() if x.endswith("chosen")]
            assert row.startswith(describe(policy))
    assert chosen["h200"] is None
    assert {"gate", "q", "k", "v"} <= set(chosen["h100"].save)


@pytest.mark.parametrize("folder", ["recipes", "configs/recipes"])
def test_recipe_is_found_from_anywhere(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = cli._find_config(f"{folder}/qwen3_8b_24g.gin")
    assert path.samefile(run_recipes.FOLDER / "qwen3_8b_24g.gin")
    assert "using the shipped" in capsys.readouterr().err
    with pytest.raises(cli.UsageError):
        cli._find_config("elsewhere/qwen3_8b_24g.gin")
