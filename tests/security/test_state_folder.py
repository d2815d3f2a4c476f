"""The folder of records beside a spec: no link is followed into it, and nobody else can have a hand in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dtctl.errors import LaunchError
from dtctl.launch.records.run_writer import prepare_state_folder, write_private
from tests.facts import raises


@pytest.mark.parametrize("name", [".dtctl", ".dtctl/runs"])
def test_a_link_is_refused_and_nothing_is_written_through_it(tmp_path: Path, name: str) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir(mode=0o700)
    (project / name).parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    (project / name).symlink_to(home)
    with raises(LaunchError, "link") as caught:
        prepare_state_folder(project, "runs")
    assert caught.value.where == str(project / name)
    assert not list(home.iterdir())


@pytest.mark.parametrize("name", [".dtctl", ".dtctl/runs"])
def test_a_folder_that_others_may_write_to_is_refused_with_what_mends_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True, mode=0o700)
    (tmp_path / name).chmod(0o777)
    with raises(LaunchError, "others") as caught:
        prepare_state_folder(tmp_path, "runs")
    assert caught.value.hint is not None
    subprocess.run(caught.value.hint, shell=True, check=True)
    prepare_state_folder(tmp_path, "runs")


def test_a_link_in_the_place_of_a_half_written_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"run.json.{os.getpid()}.partial").symlink_to(victim)
    write_private(tmp_path / "run.json", "text")
    assert victim.read_text() == "mine"
    assert (tmp_path / "run.json").read_text() == "text"
