"""Programs that carry what they need of dtctl, run where dtctl is not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dtctl
from dtctl import node_facts
from dtctl.render.standalone import standalone

PACKAGE = Path(dtctl.__file__).parent
PROGRAMS = (
    "slurm/pick_endpoint.py", "slurm/find_interface.py", "slurm/count_threads.py", "kubernetes/pick_endpoint.py"
)  # fmt: skip


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", "-", *arguments]
    return subprocess.run(argv, input=standalone(PACKAGE / program), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_the_standard_library_is_imported(program: str) -> None:
    tree = ast.parse(standalone(PACKAGE / program), feature_version=(3, 8))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in found} <= sys.stdlib_module_names
    assert {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} == {"__future__"}


def test_the_interface_is_printed() -> None:
    assert run("slurm/find_interface.py", "127.0.0.1").stdout == "lo\n"
    place, interface, cores = run("kubernetes/pick_endpoint.py", "localhost", "0").stdout.split()
    assert place in ("127.0.0.1", "::1")
    assert (interface, cores) == ("lo", str(node_facts.usable_cores()))


def test_a_way_that_is_not_there_is_an_error() -> None:
    done = run("slurm/find_interface.py", "not-a-number.invalid")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dtctl: there is no route to not-a-number.invalid\n"


def test_the_meeting_point_is_a_port_of_those_that_a_launch_takes() -> None:
    address, port, other = run("slurm/pick_endpoint.py", "run.17.0", "0", "1", "localhost").stdout.split()
    assert address in ("127.0.0.1", "::1")
    assert int(port) in node_facts.port_candidates("run.17.0")
    assert int(other) in set(node_facts.port_candidates("run.17.0")) - {int(port)}
    assert run("slurm/pick_endpoint.py", "run.17.0", port, "1", "localhost").stdout.split()[1] == port


def test_several_nodes_never_meet_at_an_address_that_each_has_for_itself() -> None:
    """A name that only Slurm knows, or that /etc/hosts takes for this machine."""
    own = node_facts.address_towards("192.0.2.1")
    done = run("slurm/pick_endpoint.py", "run.17.0", "0", "2", "localhost", "nowhere.invalid")
    if own:
        assert done.stdout.split()[0] != "127.0.0.1"
    else:  # no route but that to itself
        assert done.returncode == 1
        assert "no address that localhost or nowhere.invalid can reach" in done.stderr


@pytest.mark.parametrize(
    ("components", "threads"),
    [
        (["1=1"], "1"),
        (["2=64(x3),1"], "1"),
        (["1=1000", "8=64(x2),48,72"], None),
        (["1=1000", "1000=64"], "1"),
    ],
)
def test_threads_are_counted_of_what_slurm_gives(components: list[str], threads: str | None) -> None:
    here = node_facts.bound_cores()  # the first of the nodes
    done = run("slurm/count_threads.py", *components)
    assert done.stdout.strip() == (threads or str(min(here, 6))), done.stderr
