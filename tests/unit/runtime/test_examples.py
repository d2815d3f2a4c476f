"""The examples are what `dtctl init` makes, and the templates' specs say what their scripts do by default.

The templates are the source; after a change there, run this file as a script to write the examples anew.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import yaml

from dtctl.errors import UsageError
from dtctl.render import project, render_template
from dtctl.spec.load import load_spec
from dtctl.train import config, settings

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "templates" / "init"
EXAMPLES = {"gpt": "gpt", "digits": "classifier", "moe": "moe"}


def make(example: str, folder: Path) -> None:
    """An example in `folder`, which has its name, and beside its spec one for the sandbox."""
    template = EXAMPLES[example]
    project.create_project(folder, template=template, launcher="local", force=True)
    values = {"name": example, "launcher": "sandbox", "version": ""}
    text = render_template("dtctl.yaml.j2", values, folders=[TEMPLATES / template])
    (folder / "dtctl.sandbox.yaml").write_text(text, encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not project_output(path.relative_to(folder))
    }


def project_output(path: Path) -> bool:
    return path.parts[0] in (".dtctl", "data", "snapshots", "metrics.jsonl")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_what_init_makes(example: str, tmp_path: Path) -> None:
    make(example, tmp_path / example)
    assert contents(ROOT / "examples" / example) == contents(tmp_path / example), __doc__


def test_the_example_of_a_session_is_that_of_its_page() -> None:
    code = (ROOT / "examples" / "session.py").read_text()
    assert f"```python\n{code[code.index('import torch') :]}```" in (ROOT / "docs/guides/own-loop.md").read_text()


@pytest.mark.parametrize("launcher", project.LAUNCHERS)
@pytest.mark.parametrize("template", [path.name for path in sorted(TEMPLATES.iterdir())])
def test_new_projects_have_a_valid_spec(template: str, launcher: str, tmp_path: Path) -> None:
    project.create_project(tmp_path / "my-run", template=template, launcher=launcher, force=False)
    spec = load_spec(tmp_path / "my-run" / "dtctl.yaml")
    assert spec.cluster.transport == launcher
    assert spec.job.name == "my-run"
    assert (tmp_path / "my-run" / (spec.job.script or "")).is_file()


@pytest.mark.parametrize("template", ["gpt", "classifier", "moe"])
def test_the_spec_repeats_the_defaults_of_the_script(template: str, tmp_path: Path) -> None:
    """So that `python train.py` and `dtctl launch` train the same."""
    project.create_project(tmp_path / "run", template=template, launcher="local", force=False)
    source = (tmp_path / "run" / "train.py").read_text()
    defaults = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "DEFAULTS"
    )
    written = yaml.safe_load((tmp_path / "run" / "dtctl.yaml").read_text())["train"]
    del written["model"], written["strategy"]
    assert settings.merge_settings(defaults, written) == defaults
    config.load(defaults, argv=[], environ={})


@pytest.mark.parametrize("launcher", project.LAUNCHERS)
@pytest.mark.parametrize("template", ["gpt", "classifier", "moe"])
def test_the_readme_of_a_new_project_is_for_its_launcher(template: str, launcher: str, tmp_path: Path) -> None:
    project.create_project(tmp_path / "run", template=template, launcher=launcher, force=False)
    text = (tmp_path / "run" / "README.md").read_text()
    assert ("dtctl sandbox down" in text) == (launcher == "sandbox")
    assert ("dtctl doctor" in text) == ("on every node" in text) == (launcher in ("ssh", "slurm"))
    assert launcher == "local" or "cluster.transport=" not in text


@pytest.mark.parametrize("template", [path.name for path in sorted(TEMPLATES.iterdir())])
def test_dtctl_is_installed_as_the_guide_says(template: str, tmp_path: Path) -> None:
    """By no name, which stands for nothing until a version is released."""
    project.create_project(tmp_path / "run", template=template, launcher="ssh", force=False)
    written = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    required = [line for line in written.get("requirements.txt", "").splitlines() if not line.startswith("#")]
    assert [line for line in required if line.startswith("dtctl")] == []
    assert not [name for name, text in written.items() if "dtctl[" in text]
    if "from dtctl" in written["train.py"]:
        command = "pip install '.[train]'"
        assert f"$ {command}\n" in (ROOT / "docs/guides/install.md").read_text()
        assert f"`{command}` in a clone" in written["README.md"]


if __name__ == "__main__":
    for name in EXAMPLES:
        make(name, ROOT / "examples" / name)
    sys.stdout.write("examples written\n")


def test_a_program_that_exists_gets_a_spec_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError) as refused:
        project.create_project(tmp_path, template="script", launcher="ssh", force=False)
    assert "--spec-only" in str(refused.value.hint)
    made = project.create_project(tmp_path, template="script", launcher="ssh", force=False, spec_only=True)
    assert (made, {path.name for path in tmp_path.iterdir()}) == ([Path("dtctl.yaml")], {"README.md", "dtctl.yaml"})
    with pytest.raises(UsageError, match="has a spec"):
        project.create_project(tmp_path, template="script", launcher="ssh", force=False, spec_only=True)
