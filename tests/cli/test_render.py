"""`dtctl render`: the same file for the same spec, read by kubectl itself, and what is handed over to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.command_line import dtctl

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
SPEC = """\
cluster: {transport: ssh, nodes: [a, b], slots: 8}
job: {name: "My job", script: train.py}
kubernetes: {image: i, namespace: lab}
"""
TELLING = """\
#!/usr/bin/env python3
import json, os, sys
open("called.json", "w").write(json.dumps([sys.argv[1:], sys.stdin.read() if "-" in sys.argv else ""]))
print("from kubectl")
sys.exit(int(os.environ.get("EXIT", "0")))
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> dict[str, str]:
    """Variables under which a program that tells how it was called stands in for kubectl."""
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(TELLING)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin"}


def called(folder: Path) -> tuple[list[str], str]:
    argv, stdin = json.loads((folder / "called.json").read_text())
    return argv, stdin


def test_the_same_spec_gives_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "dtctl.yaml").write_text(SPEC)
    first, second = (dtctl("render", cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    other = dtctl("render", "--set", "job.grace_s=20", cwd=tmp_path)
    named = dtctl("render", "--name", "again", cwd=tmp_path)
    names = [yaml.safe_load(done.stdout)["metadata"]["name"] for done in (first, other, named)]
    assert names[0].startswith("my-job-")
    assert len({*names}) == 3
    assert names[2] == "again"


@pytest.mark.parametrize(
    ("more", "told"), [("", False), (", gpu: ''", True), (", gpu: '', resources: {example.com/accelerator: 1}", False)]
)
def test_accelerate_is_told_that_pods_have_no_gpus(tmp_path: Path, more: str, told: bool) -> None:
    spec = SPEC.replace("script: train.py", "script: train.py, kind: accelerate")
    (tmp_path / "dtctl.yaml").write_text(spec.replace("namespace: lab", f"namespace: lab{more}"))
    done = dtctl("render", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("export ACCELERATE_USE_CPU=true" in done.stdout) is told


@pytest.mark.parametrize("option", ["--apply", "--delete"])
def test_the_objects_are_handed_over(tmp_path: Path, kubectl: dict[str, str], option: str) -> None:
    done = dtctl("render", option, cwd=tmp_path, env=kubectl)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "from kubectl\n"
    argv, stdin = called(tmp_path)
    assert argv[0] == option.removeprefix("--")
    assert stdin == dtctl("render", cwd=tmp_path).stdout


def test_the_output_is_that_of_all_pods(tmp_path: Path, kubectl: dict[str, str]) -> None:
    done = dtctl("render", "--logs", cwd=tmp_path, env=kubectl)
    assert done.returncode == 0, done.stderr
    name = yaml.safe_load(dtctl("render", cwd=tmp_path).stdout)["metadata"]["name"]
    argv, _ = called(tmp_path)
    assert argv[0] == "logs"
    assert {f"--selector=jobset.sigs.k8s.io/jobset-name={name}", "--max-log-requests=2", "--namespace=lab"} <= {*argv}


def test_what_kubectl_refuses_is_an_error(tmp_path: Path, kubectl: dict[str, str]) -> None:
    assert dtctl("render", "--apply", cwd=tmp_path, env={**kubectl, "EXIT": "1"}).returncode == 7
    (tmp_path / "bin" / "kubectl").unlink()
    missing = dtctl("render", "--delete", cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert missing.returncode == 7
    assert "kubectl" in missing.stderr
    both = dtctl("render", "--apply", "--delete", cwd=tmp_path)
    assert both.returncode == 2


def test_kustomize_reads_the_example(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    rendered = dtctl("render", "--out", "job.yaml", cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    plain = yaml.safe_load((tmp_path / "job.yaml").read_text())
    pods, before = (each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] for each in (job, plain))
    assert job["metadata"]["name"] == plain["metadata"]["name"]
    assert job["metadata"]["namespace"] == "research"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert pods["spec"]["containers"][0]["image"] == "europe.registry.example/gpt:2"
    assert pods["metadata"]["annotations"] == before["metadata"]["annotations"]  # the script, whole
    assert [mount["name"] for mount in pods["spec"]["containers"][0]["volumeMounts"]] == ["script", "shm", "snapshots"]
