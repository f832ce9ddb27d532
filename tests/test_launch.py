"""The files of docs/launch, against what starts them."""

import ast
import os
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from jaxmem.commands import cli

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "docs" / "launch"


def overrides(words):
    """A command of jaxmem, as its own parser reads it."""
    asked = cli._parser().parse_args(words)
    assert asked.cluster and asked.coordinator is None
    return dict(word.split("=") for word in asked.overrides)


@pytest.mark.parametrize("status", [0, 143])
def test_sbatch(status, tmp_path):
    """With an srun that runs a task after another, of a jaxmem that ends so."""
    programs = {
        "srun": 'shift; for i in 1 2; do "$@" || status=$?; done; exit ${status-0}',
        "jaxmem": f'echo "$@" >> {tmp_path}/tasks; exit {status}',
        "scontrol": f'echo "$@" > {tmp_path}/requeued',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(
        ["bash", LAUNCH / "train.sbatch", "a.gin", "run.out_dir=b"],
        env=os.environ | variables | {"SLURM_NTASKS": "2"},
    )
    assert ended.returncode == status
    tasks = (tmp_path / "tasks").read_text().splitlines()
    assert len(tasks) == 2
    assert overrides(tasks[0].split()) == {
        "mesh.fsdp": "2", "data.streams": "2", "run.out_dir": "b",
    }  # fmt: skip
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (status == 143)
    assert not status or requeued.read_text() == "requeue 7\n"


def test_sbatch_has_a_task_for_each_gpu():
    text = (LAUNCH / "train.sbatch").read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    assert given["signal"].startswith("TERM@") and given["requeue"] == ""


def test_kubernetes():
    text = (LAUNCH / "kubernetes.yaml").read_text()
    kinds = {x["kind"]: x for x in yaml.safe_load_all(text)}
    service, job = kinds["Service"], kinds["Job"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["serviceAccountName"] == kinds["ServiceAccount"]["metadata"]["name"]
    (subject,) = kinds["RoleBinding"]["subjects"]
    assert subject["name"] == pod["serviceAccountName"]
    allowed = {x for rule in kinds["Role"]["rules"] for x in rule["resources"]}
    assert allowed == {"pods", "services", "jobs"}
    spec, (container,) = job["spec"], pod["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    gpus = spec["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    given = overrides(container["args"])
    assert given["mesh.fsdp"] == given["data.streams"] == str(gpus)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert given["run.out_dir"].startswith(mounts["runs"])


def test_container():
    """Instructions that a builder knows, and extras that there are."""
    text = (LAUNCH / "Containerfile").read_text()
    lines = [x for x in text.splitlines() if x and x[0] not in "# "]
    known = "FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"
    assert [line.split()[0] for line in lines] == list(known)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"python:([\d.]+)", text)
    ceiling = next(x for x in project["dependencies"] if x.startswith("jax>"))
    assert tuple(map(int, version.split("."))) >= (3, 12)
    assert f"]{ceiling[ceiling.index('<') :]}'" in text


def test_sbatch_of_rollouts_gives_the_trainer_all_servers(tmp_path):
    """With an srun that runs one task, on the host that it names."""
    engine, trainer = tmp_path / "engine", tmp_path / "trainer"
    shown = 'printf \'%s\\n\' "$HOST" "$CUDA_VISIBLE_DEVICES" "$@"'
    programs = {
        "srun": """
            while [[ $1 == --* ]]; do
              [[ $1 == --nodelist=* ]] && export HOST="${1#*=}"
              shift
            done
            SLURM_LOCALID=3 exec "$@"
        """,
        # The trainer is as slow as the engine.
        "jaxmem": f"until [ -e {engine} ]; do sleep 0.05; done; {shown} > {trainer}",
        "vllm": f"{shown} > {engine}.part; mv {engine}.part {engine}; exec sleep 60",
        "scontrol": "printf 'first\\nsecond\\n'",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MODEL": "/shared/m",
        "SLURM_JOB_NODELIST": "nodes",
    }
    subprocess.run(
        ["bash", LAUNCH / "rollouts.sbatch", "a.gin", "run.out_dir=b"],
        env=os.environ | variables,
        check=True,
        timeout=60,
    )
    host, _, *words = trainer.read_text().splitlines()
    given = overrides(words)
    urls = ast.literal_eval(given.pop("rollouts.urls"))
    assert urls == tuple(f"http://second:{8000 + i}" for i in range(8))
    assert host == "first" and given == {
        "run.out_dir": "b", "model.checkpoint": "/shared/m", "mesh.fsdp": "8",
        "rollouts.engine": "vllm", "rollouts.weights": "/shared/weights",
    }  # fmt: skip
    host, device, _, model, *flags = engine.read_text().splitlines()
    assert (host, device, model) == ("second", "3", "/shared/m")
    assert flags[:2] == ["--port", "8003"]


def test_kubernetes_of_rollouts_shares_gpus_and_memory():
    (job,) = yaml.safe_load_all((LAUNCH / "rollouts.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (engine,), (trainer,) = pod["initContainers"], pod["containers"]
    given = dict(word.split("=", 1) for word in trainer["args"][2:])
    served = dict(word.split("=") for word in engine["args"] if "=" in word)
    assert engine["restartPolicy"] == "Always"
    assert engine["volumeMounts"] == trainer["volumeMounts"]
    assert {x["mountPath"] for x in engine["volumeMounts"]} >= {"/dev/shm"}
    assert served["--model"] == given["model.checkpoint"]
    assert given["rollouts.urls"] == f"http://localhost:{served['--port']}"
    assert str(engine["startupProbe"]["httpGet"]["port"]) == served["--port"]
    gpus = [x["resources"]["limits"]["nvidia.com/gpu"] for x in (engine, trainer)]
    assert [served["--tensor-parallel-size"], given["mesh.fsdp"]] == [*map(str, gpus)]
