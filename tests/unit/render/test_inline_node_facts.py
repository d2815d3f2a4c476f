"""Programs that carry what they need of dtctl, run where dtctl is not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dtctl
from dtctl import node_facts
from dtctl.render.inline_node_facts import build_standalone_program

PACKAGE = Path(dtctl.__file__).parent
PROGRAMS = ("kubernetes/pick_endpoint.py",)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", "-", *arguments]
    return subprocess.run(
        argv, input=build_standalone_program(PACKAGE / program), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_the_standard_library_is_imported(program: str) -> None:
    tree = ast.parse(build_standalone_program(PACKAGE / program), feature_version=(3, 8))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in found} <= sys.stdlib_module_names
    assert {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} == {"__future__"}


def test_the_interface_is_printed() -> None:
    place, interface, cores = run("kubernetes/pick_endpoint.py", "localhost", "0").stdout.split()
    assert place in ("127.0.0.1", "::1")
    assert (interface, cores) == ("lo", str(node_facts.count_usable_cores()))
