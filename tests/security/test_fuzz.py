"""Whatever bytes come: an answer in its form, or an error of who sent them; never a Python error.

`DTCTL_FUZZ=100000` tries so many inputs of each kind instead of a few.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtctl.doctor import answers as doctor
from dtctl.errors import DtctlError, NodeError, SnapshotError
from dtctl.launch import snapshot_answers
from dtctl.launch.collect_snapshot import PruneRule, list_removable_snapshots, merge_node_snapshots
from dtctl.launch.control import link
from dtctl.launch.records.logs import LineSplitter
from dtctl.printable import make_printable
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.schema import InvalidMessage
from dtctl.slurm import answers as slurm
from dtctl.supervisor import frames
from dtctl.supervisor.messages.base import Message
from tests import forked, messages

ROOT = Path(__file__).parents[2]
MANY = settings(
    max_examples=int(os.environ.get("DTCTL_FUZZ", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
WORDS = st.one_of(st.text(max_size=20), st.sampled_from(["../../x", "/etc/passwd", "", ".", "..", "\x1b[2J", "a/b"]))
JSON = st.recursive(
    st.one_of(NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=12,
)
REAL: list[dict[str, Any]] = [
    {"op": "hello", "gpus": 0, "address": "", "port": 0, "python": "3.11.7"},
    {"op": "push", "state": "done", "path": "/w/code/x", "digest": "0" * 32},
    {"op": "started", "attempt": 0, "pids": [1], "interface": "eth0"},
    {"op": "exit", "rank": 0, "code": 1, "signal": None, "time": 1.0, "why": "", "asked": False},
    {"op": "stopped", "left": 0, "killed": False, "exits": [], "log_bytes_lost": 0},
    {"op": "pong", "time": 1.0, "sent": 1.0, "workers": [{"rank": 0, "pid": 1, "phase": 1, "step": 2}]},
    {"op": "stack", "rank": 0, "state": "S", "how": "none", "text": "", "flight": ""},
]
"""As a supervisor says them; some values are replaced."""


@st.composite
def mutated(draw: st.DrawFn, real: list[dict[str, Any]]) -> dict[str, Any]:
    message = dict(draw(st.sampled_from(real)))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([*message, "more"]))
        if draw(st.booleans()):
            message[key] = draw(JSON)
        else:
            message.pop(key, None)
    return message


@MANY
@given(mutated(REAL))
def test_messages_of_a_supervisor(message: dict[str, Any]) -> None:
    for kinds in messages.answers():
        with contextlib.suppress(NodeError):
            parsed = link.parse_message(message, kinds, node="a")
            assert parsed.op == message["op"]
            for name in ("rank", "left", "port", "gpus"):
                assert type(getattr(parsed, name, 0)) is int


@MANY
@given(st.lists(st.binary(max_size=40)))
def test_frames(pieces: list[bytes]) -> None:
    parser = frames.FrameParser()
    with contextlib.suppress(frames.BrokenFrame):
        for piece in pieces:
            for kind, _, payload in parser.feed(piece):
                if kind == frames.JSON:
                    assert isinstance(frames.decode_message(payload), dict)


@MANY
@given(
    st.sampled_from(
        [snapshot_answers.SnapshotListing, snapshot_answers.SnapshotParts, snapshot_answers.SnapshotContents]
    ),
    JSON,
    st.binary(max_size=30),
)
def test_answers_about_snapshots(kind: type[snapshot_answers.SnapshotAnswer], value: Any, raw: bytes) -> None:
    for said in (json.dumps(value), raw.decode(errors="replace")):
        with contextlib.suppress(NodeError, SnapshotError, InvalidMessage):
            assert isinstance(snapshot_answers.parse_answer(kind, said, node="a"), kind)


@MANY
@given(st.sampled_from(slurm.SlurmAnswer.__subclasses__()), JSON)
def test_answers_of_slurms_machine(kind: type[slurm.SlurmAnswer], value: Any) -> None:
    with contextlib.suppress(NodeError, InvalidMessage, slurm.SlurmRequestRefused):
        slurm.parse_login_answer(kind, {"run": "one"}, json.dumps(value), node="login")


@MANY
@given(st.sampled_from(sorted(doctor._ANSWERS)), st.dictionaries(WORDS, JSON, max_size=5))
def test_answers_of_a_probe(op: str, value: dict[str, Any]) -> None:
    with contextlib.suppress(NodeError):
        doctor.check_probe_answer(cast("Message", SimpleNamespace(op=op, wanted=[], ports=[])), value, node="a")


@MANY
@given(JSON, st.binary(max_size=60))
def test_manifests_and_headers(value: Any, raw: bytes) -> None:
    text = json.dumps(value).encode()
    for found in (text, raw):
        with contextlib.suppress(headers.MalformedFile, SnapshotError):
            layout.Manifest.from_bytes(found, where="here")
        for data in (len(found).to_bytes(8, "little") + found, found):
            with contextlib.suppress(headers.MalformedFile, SnapshotError):
                header = headers.parse_header(memoryview(data))
                assembly.assemble_part_trees([("model", "model.safetensors", header)])


@MANY
@given(JSON, JSON)
def test_the_tree_of_a_header(tree: Any, entry: Any) -> None:
    document = {"__metadata__": {"tree": json.dumps({"w": {"$tensor": "w", "$of": tree}})}, "w": entry}
    text = json.dumps(document).encode()
    with contextlib.suppress(headers.MalformedFile, SnapshotError):
        header = headers.parse_header(memoryview(len(text).to_bytes(8, "little") + text))
        assembly.assemble_part_trees([("model", "model.safetensors", header)])


@MANY
@given(JSON, st.booleans())
def test_what_nodes_say_of_their_pieces(value: Any, all_told: bool) -> None:
    row = {"path": "/s", "step": 1, "record": "x", "manifest": json.dumps(value), "good": ["a"], "bad": [], "made_s": 0}
    found = merge_node_snapshots({node: snapshot_answers.SnapshotParts.parse({"rows": [row]}) for node in "ab"})
    assert list_removable_snapshots(found, PruneRule(), "a", all_answered=all_told) == []


@MANY
@given(st.binary(max_size=200), st.text())
def test_output(data: bytes, text: str) -> None:
    lines = LineSplitter()
    for line in [*lines.feed(data), lines.flush(), text]:
        assert "\x1b" not in make_printable(line)


def test_what_is_real_and_changed_ends_as_an_answer_or_an_error(tmp_path: Path) -> None:
    """A few of what `make fuzz` reads 100,000 of, in a process of their own: their guard watches all that it does."""
    pytest.importorskip("torch")
    count = os.environ.get("DTCTL_FUZZ", "500")
    argv = [ROOT / "tests" / "security" / "fuzz.py", "--count", count, "--seed", "7", "--out", tmp_path / "out.json"]
    done = forked.launch(argv, 1, cwd=ROOT)
    assert done.code == 0, done.output[-4000:]
    counted = json.loads((tmp_path / "out.json").read_text())
    assert (counted["bad"], len(counted["outcomes"])) == ([], 9)


BAD = """
import sys
from pathlib import Path
from tests.security import fuzz, inputs

def kind(body):
    return inputs.Kind(share=1, make=lambda _: body)

def hangs(folder, chance):
    while True:
        pass

inputs.KINDS.clear()
inputs.KINDS.update(
    hangs=kind(hangs),
    writes=kind(lambda folder, chance: Path(sys.argv[2], "x").write_text("x")),
    runs=kind(lambda folder, chance: __import__("subprocess").run(["true"])),
    breaks=kind(lambda folder, chance: {}["x"]),
    grows=kind(lambda folder, chance: bytearray(1 << 40)),
    answers=kind(lambda folder, chance: 1),
)
fuzz.LIMIT_S = 0.2
found = fuzz.fuzz(30, seed=1, kinds=[*inputs.KINDS], folder=Path(sys.argv[1]))
print({name: sorted(counted) for name, counted in found["outcomes"].items()})
"""


def test_the_fuzzer_sees_what_must_not_be(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "inside").mkdir()
    (tmp_path / "bad.py").write_text(BAD)
    done = forked.launch([tmp_path / "bad.py", tmp_path / "inside", tmp_path], 1, cwd=ROOT)
    assert done.code == 0, done.output
    assert ast.literal_eval(done.output.splitlines()[-1]) == {
        "hangs": ["hang"], "writes": ["escape"], "runs": ["escape"], "breaks": ["bug"], "grows": ["memory"],
        "answers": ["answer"],
    }  # fmt: skip


def test_an_error_is_one_of_ours() -> None:
    with pytest.raises(DtctlError):
        link.parse_message({}, messages.REQUESTS, node="a")
