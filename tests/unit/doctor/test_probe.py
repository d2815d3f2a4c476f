"""The probe: runs from memory on a bare Python 3.8, and tells what stands in its way."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from dtctl.doctor.observe import PROBE
from dtctl.doctor.probe import facts, pairs
from dtctl.supervisor import bootstrap, frames


def source(module: str) -> str:
    package, _, leaf = module.rpartition(".")
    return (resources.files(package) / f"{leaf}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", PROBE)
def test_it_is_written_in_python_3_8_and_imports_only_what_is_sent_before_it(module: str) -> None:
    before = PROBE[: PROBE.index(module)]
    for node in ast.walk(ast.parse(source(module), feature_version=(3, 8))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dtctl"):
            for alias in node.names:
                assert f"{node.module}.{alias.name}" in before


def test_it_answers_from_memory_on_a_python_without_site_packages() -> None:
    sent = bootstrap.in_memory(PROBE) + frames.pack_json({"op": "time"}) + frames.pack_json({"op": "quit"})
    command = bootstrap.command(sys.executable)
    done = subprocess.run(
        ["sh", "-c", command], input=sent, capture_output=True, check=False, cwd="/", env={}, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert [frames.decode(payload)["op"] for _, _, payload in frames.Parser().feed(done.stdout)] == ["time"]


def test_a_call_tells_who_answers_and_that_large_packets_arrive() -> None:
    ears = pairs.Listeners("b", "secret")
    port = ears.open(0)
    said = pairs.call_all([["b", "127.0.0.1", port, "data"], ["c", "127.0.0.1", port, "data"]], "secret", 5.0)
    assert [one["result"] for one in said] == ["ok", "stranger"]
    assert (said[0]["seen"], said[1]["said"]) == ("127.0.0.1", "b")
    assert ears.open(port) < 0, "the port is taken, and that is told"
    assert pairs.call("127.0.0.1", port, "b", "wrong", 5.0)["result"] == "stranger"
    for ear in ears.sockets:
        ear.close()


def test_a_port_on_which_nobody_listens_refuses() -> None:
    ears = pairs.Listeners("b", "secret")
    port = ears.open(0)
    (ear,) = ears.sockets
    ear.shutdown(2)
    ear.close()
    assert pairs.call("127.0.0.1", port, "b", "secret", 5.0)["result"] == "refused"


def test_the_versions_of_torch_and_nccl_are_read_without_loading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1'\ncuda = '12.8'\n")
    (tmp_path / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = facts.job_python(sys.executable)
    assert (said["torch"], said["cuda"], said["nccl"]) == ("2.9.1", "12.8", "2.27.5")
