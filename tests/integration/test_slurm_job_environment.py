"""`job.environment` under Slurm: one of the job's nodes makes it on the disk that all of them share."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project
from tests.integration.slurm_hosts import cluster, shared
from tests.integration.test_environment import PASSWORD, SHOW, list_files_with, make_wheel, serve

__all__ = ["cluster", "shared"]


@pytest.fixture
def index() -> Iterator[Path]:
    """A folder of wheels that this machine and the nodes see."""
    folder = Path.home() / ".cache" / f"dtctl-slurm-index-{os.getpid()}"
    make_wheel(folder, "alpha", "1.0", ["beta>=1"])
    make_wheel(folder, "beta", "1.2")
    yield folder
    shutil.rmtree(folder)


def write_job(where: Project, index: Path, slurm: str = "{}", **environment: object) -> None:
    wanted = {"requirements": "requirements.txt", "index": [str(index)], **environment}
    where.write("requirements.txt", "alpha\n")
    where.write("train.py", SHOW.format(first="alpha"))
    where.write(
        "dtctl.yaml",
        f"cluster: {{transport: slurm, nodes: 2, slots: 1, python: {json.dumps(sys.executable)}}}\n"
        f"job: {{name: env, script: train.py, kind: direct, environment: {json.dumps(wanted)}}}\n"
        f"slurm: {slurm}\n",
    )


def environments(project: Project) -> list[Path]:
    return [path.parent for path in (project.folder / ".dtctl" / "envs").glob("*/dtctl.json")]


def test_one_node_makes_it_and_all_workers_run_in_it(shared: Project, index: Path) -> None:
    write_job(shared, index)
    first = shared.run("launch", "--name", "first")
    assert first.code == 0, first.err
    (made,) = environments(shared)
    assert first.out.count(f"runs in {made}\n") == 2
    assert first.out.count("has alpha 1.0") == 2
    assert first.err.count("uv has installed 2 packages") == 1, "the other node waits for it"
    assert shared.run("launch", "--dry-run").out.count(f"{made}/bin/python") == 2

    again = shared.run("launch", "--name", "again")
    assert again.code == 0, again.err
    assert again.out.count("has alpha 1.0") == 2
    assert "uv " not in again.err

    assert shared.run("clean", "--older", "0", "--yes").code == 0
    assert environments(shared) == [made], "while there are runs that use it"
    assert shared.run("clean", "--older", "0", "--yes").code == 0
    assert environments(shared) == []


def test_wheels_are_sent_to_nodes_without_an_index(shared: Project, index: Path) -> None:
    write_job(shared, index, wheels="relay")
    done = shared.run("launch", "--name", "relayed")
    assert done.code == 0, done.err
    assert done.out.count("has alpha 1.0") == 2


def test_the_password_of_an_index_is_in_no_file_of_the_job(shared: Project, cluster: Sandbox, index: Path) -> None:
    variables = {"UV_INDEX_CORP_USERNAME": "ann", "UV_INDEX_CORP_PASSWORD": PASSWORD}
    with serve(index, cluster.bridge_address, PASSWORD) as url:
        write_job(shared, index)
        shared.write("dtctl.yaml", (shared.folder / "dtctl.yaml").read_text().replace(str(index), f"corp={url}"))
        more = (
            "\nimport os\nprint('knows', [name for name, text in os.environ.items() if 's3cret' in text], flush=True)\n"
        )
        shared.write("train.py", SHOW.format(first="alpha") + more)
        done = shared.run("launch", "--name", "asked", env=variables)
    assert done.code == 0, done.err
    assert done.out.count("has alpha 1.0") == 2
    assert done.out.count("knows []") == 2, "it is for uv alone"
    assert PASSWORD not in done.err
    assert list_files_with(PASSWORD, [str(shared.folder)]) == []
    # The launcher's zip is compressed, and has what the job is told.
    with zipfile.ZipFile(shared.folder / ".dtctl" / "slurm" / "asked" / "launcher.zip") as launcher:
        assert PASSWORD not in launcher.read("job.json").decode()


def test_an_environment_that_cannot_be_made_ends_the_job(shared: Project, index: Path) -> None:
    write_job(shared, index)
    shared.write("requirements.txt", f"beta==1.2 --hash=sha256:{'0' * 64}\n")
    done = shared.run("launch")
    assert done.code == 8, done.err
    assert not missing(" ".join(done.err.split()), "node[1-2]: requirements.txt:1: beta: uv: Hash mismatch")


@pytest.mark.parametrize(("command", "slurm"), [(("launch",), "{launcher: none}"), (("sbatch", "--out", "job"), "{}")])
def test_a_job_without_a_submission_or_a_launcher_has_none(
    shared: Project, index: Path, command: tuple[str, ...], slurm: str
) -> None:
    write_job(shared, index, slurm)
    done = shared.run(*command)
    assert done.code == 4, done.err
    assert not missing(done.err, "dtctl.yaml:2")
