"""Files that only GitHub and Docker run: they are what they should be as far as can be told without them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
release: dict[str, Any] = runpy.run_path(str(ROOT / ".ci/release.py"))


def run(*argv: str | Path) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("custom.github-workflows-require-timeout", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
    ],
)
def test_github_takes_them(schema: str, files: str) -> None:
    found = sorted(ROOT.glob(files))
    assert found
    run(BIN / "check-jsonschema", "--builtin-schema", schema, *found)


def test_the_workflows_give_nobody_more_than_he_needs() -> None:
    run(BIN / "zizmor", "--offline", "--quiet", ".github")


def test_ci_runs_what_developers_run() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == ".ci/run"
    assert "\nmake test-lowest test test-slow\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("name", ["docker/Dockerfile", ".devcontainer/Dockerfile"])
def test_the_images_are_made_as_images_should_be(name: str) -> None:
    run(BIN / "hadolint", name)
    for source in re.findall(r"^COPY (?!--from)(\S+)", (ROOT / name).read_text(), re.MULTILINE):
        assert (ROOT / source).exists()


def test_the_devcontainer_is_json_with_remarks() -> None:
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    settings = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).exists()
    assert ".ci/setup.sh" in settings["postCreateCommand"]


def changelog(folder: Path, heading: str) -> Path:
    (folder / "dtctl").mkdir()
    (folder / "dtctl/__init__.py").write_text('"""doc"""\n\n__version__ = "1.2.0"\n')
    releases = {"1.3.0 - unreleased": "- no", heading: "- one\n- two", "1.1.0 - 2026-01-02": "- old"}
    text = "".join(f"\n## {title}\n\n{changes}\n" for title, changes in releases.items())
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n{text}")
    return folder


def test_the_notes_of_a_release_are_those_of_the_changelog(tmp_path: Path) -> None:
    assert release["notes"]("v1.2.0", changelog(tmp_path, "1.2.0 - 2026-11-22")) == "- one\n- two"


@pytest.mark.parametrize(
    ("tag", "heading"),
    [("v1.3.0", "1.2.0 - 2026-11-22"), ("v1.2.0", "1.2.0 - unreleased"), ("v1.2.0", "1.2.1 - 2026-11-22")],
    ids=["another version", "no date", "nothing said"],
)
def test_a_tag_that_does_not_fit_releases_nothing(tmp_path: Path, tag: str, heading: str) -> None:
    with pytest.raises(SystemExit, match="error: "):
        release["notes"](tag, changelog(tmp_path, heading))


def test_this_version_has_a_place_in_the_changelog() -> None:
    assert f"\n## {release['version']()} - " in (ROOT / "CHANGELOG.md").read_text()
