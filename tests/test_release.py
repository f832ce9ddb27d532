"""The release: its workflow, and the check of a tag's version."""

import pathlib
import shutil
import subprocess

import pytest
import yaml

import jaxmem

ROOT = pathlib.Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"


def jobs(name):
    return yaml.safe_load((WORKFLOWS / name).read_text("utf-8"))["jobs"]


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_only_the_job_that_publishes_can():
    """Trusted publishing: no stored secret, and no foreign code beside the token."""
    made = jobs("release.yml")
    allowed = {name: job.get("permissions", {}) for name, job in made.items()}
    assert [name for name in made if "id-token" in allowed[name]] == ["publish"]
    assert allowed["publish"] == {"id-token": "write"}
    assert not commands(made["publish"]) and made["publish"]["environment"]
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text("utf-8")


def test_published_files_are_those_that_were_used():
    made = jobs("release.yml")
    assert made["publish"]["needs"] == "build"
    run = commands(made["build"])
    assert run[0].startswith(".ci/check_release ")
    assert run[-1].startswith(".ci/package dist")
    assert ".ci/package dist" in commands(jobs("ci.yml")["package"])


@pytest.mark.parametrize("path", sorted(WORKFLOWS.iterdir()), ids=lambda p: p.stem)
def test_workflows_run_scripts_that_exist(path):
    for job in jobs(path.name).values():
        for command in commands(job):
            if command.startswith(".ci/"):
                assert (ROOT / command.split()[0]).stat().st_mode & 0o100


@pytest.fixture
def clone(tmp_path):
    """The files that the check reads, of a version that can be released."""
    for name in ("jaxmem/_version.py", ".ci/check_release", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    heading = f"## [{jaxmem.__version__}] - 2026-01-01"
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n{heading}\n")
    return tmp_path


def check(clone, tag=f"v{jaxmem.__version__}"):
    """The status of the check, and its error."""
    ended = subprocess.run(
        [clone / ".ci" / "check_release", tag], capture_output=True, text=True
    )
    return ended.returncode, ended.stderr


def test_check_release_accepts_the_tag_of_the_version(clone):
    assert check(clone) == (0, "")


def test_check_release_refuses_other_versions(clone):
    status, error = check(clone, "v9.9.9")
    assert status == 1 and f"the tag must be v{jaxmem.__version__}" in error
    citation = clone / "CITATION.cff"
    citation.write_text(citation.read_text().replace("version: ", "version: 9."))
    status, error = check(clone)
    assert status == 1 and "CITATION.cff has another version" in error
    (clone / "CHANGELOG.md").write_text("## [Unreleased]\n")
    status, error = check(clone)
    assert status == 1 and "rename [Unreleased]" in error
