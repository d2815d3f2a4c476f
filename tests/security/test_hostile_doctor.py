"""An examination with one node whose probe lies: it is named, nobody else is, and the examination comes to its end."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from dtctl.cli.common import doctor_view
from dtctl.doctor import node_probes
from dtctl.doctor.examine import Examination, examine_spec_nodes
from dtctl.launch.cluster import ResolvedCluster, resolve_cluster
from dtctl.spec.load import parse_spec
from tests.security import liar
from tests.security.test_hostile_node import SPEC, HostileTransport

HONEST = "no lie"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probes, "ANSWER_LIMIT_S", 4.0)
    monkeypatch.setattr(node_probes, "MEASURE_LIMIT_S", 1.0)
    monkeypatch.setattr(node_probes, "HELLO_LIMIT_S", 8.0)
    monkeypatch.setattr(node_probes, "FACTS_LIMIT_S", 8.0)
    monkeypatch.setattr("dtctl.doctor.examine.MEASURE_S", 0.05)


def examined(folder: Path, lie: str) -> Examination:
    project = folder / "project"
    project.mkdir(mode=0o700)
    (folder / "homes").mkdir(mode=0o700)
    text = SPEC.replace("PYTHON", sys.executable).replace("slots: 1", "slots: 1, connect_timeout_s: 1")
    text = text.replace("192.0.2.1", "127.0.0.2")  # where calls are answered or refused, and never wait
    spec = parse_spec(text, source="dtctl.yaml", base_dir=project)
    found, transport = resolve_cluster(spec, start=False), HostileTransport(folder / "homes", lie)
    cluster = ResolvedCluster(nodes=found.nodes, targets=found.targets, make_transport=lambda: transport)
    try:
        return examine_spec_nodes(spec, cluster, skip=("collective",), progress=lambda _: None)
    finally:
        transport.bury()


def blamed(done: Examination) -> set[str]:
    """The checks that the honest node fails, and that have nothing to do with the other one."""
    failed = [one for one in done.findings if one.status == "fail"]
    alone = [one for one in failed if "a" in one.nodes and "b" not in {*one.nodes, *one.peers}]
    found = {one.check for one in alone if not one.follows}
    return found - {"rendezvous-port"}  # which another test of this machine may have just now


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a node on this machine fails without a lie."""
    return {one.check for one in examined(tmp_path_factory.mktemp("honest"), HONEST).findings if one.status == "fail"}


@pytest.mark.parametrize("lie", liar.DOCTOR)
def test_a_lie_of_a_probe_is_the_fault_of_its_node(
    tmp_path: Path, lie: str, usual: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = examined(tmp_path, lie)
    assert not blamed(done) - usual, done.findings
    assert done.seen[0].error is None
    doctor_view.show_examination(done, 1.0)
    for finding in done.findings:
        json.dumps(finding.as_json(), allow_nan=False)
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\u202e")
    assert len(shown) < 5_000_000
    assert {path.name for path in tmp_path.rglob("*")} <= {"project", "homes", "a", "b"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "more than 200 MiB"


def test_there_are_more_than_forty_lies() -> None:
    assert min(len(liar.LIES), len(liar.DOCTOR)) >= 40
    assert len({**liar.LIES, **liar.DOCTOR}) == len(liar.LIES) + len(liar.DOCTOR)
