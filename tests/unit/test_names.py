"""Names that two parts must agree on, one of which cannot import the other's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from dtctl import folders, names, node_facts, schema
from dtctl.supervisor import environment, fork_server, processes, supervisor
from dtctl.supervisor.messages.attempt import StartAttempt

SUPERVISOR = Path(supervisor.__file__).parent


def texts_of(path: Path) -> set[str]:
    """All string constants of a module, docstrings aside."""
    tree = ast.parse(path.read_text())
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    }


def test_the_supervisor_spells_its_variables_as_the_control_plane_does() -> None:
    assert {names.RUN_DIR, names.METRICS, names.SNAPSHOT_DIR} <= set(variables())
    known = {value for key, value in vars(names).items() if key.isupper()} | {
        processes.TOKEN,
        *fork_server.OWN_VARIABLES,
    }
    spelt = {text for path in SUPERVISOR.rglob("*.py") for text in texts_of(path) if re.fullmatch(r"DTCTL_\w+", text)}
    assert spelt <= known, "the supervisor repeats a variable that names.py does not have"


def test_the_files_that_both_ends_write_have_one_name() -> None:
    texts = {text for path in SUPERVISOR.rglob("*.py") for text in texts_of(path)}
    assert names.METRICS_FILE in texts
    assert names.RUNS_DIR in texts
    assert variables()[names.METRICS] == f"/run/{names.METRICS_FILE}"


def variables() -> dict[str, str]:
    start = StartAttempt(
        run="r", token="t", attempt=0, script="", workers=[], split_ranks=False, env={}, peer="", grace_s=0.0,
        keep=False, link_timeout_s=10.0,
    )  # fmt: skip
    return environment.build_attempt_variables(start, "/run", "")


def test_the_supervisor_imports_nothing_but_itself_and_the_standard_library() -> None:
    import sys

    for path in (*SUPERVISOR.rglob("*.py"), Path(folders.__file__), Path(node_facts.__file__), Path(schema.__file__)):
        if path.stem == "bootstrap":  # the control machine's part
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if found == ["dtctl"]:
                found = [f"dtctl.{alias.name}" for alias in node.names]
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in found:
                root = name.partition(".")[0]
                ours = name.startswith("dtctl.supervisor") or name in (
                    "dtctl.folders",
                    "dtctl.node_facts",
                    "dtctl.schema",
                )  # sent along
                assert ours or root in sys.stdlib_module_names, f"{path.name}: {name}"


def test_no_two_variables_share_a_name() -> None:
    values = [value for key, value in vars(names).items() if key.isupper()]
    assert len(values) == len(set(values))
    assert processes.TOKEN not in values
