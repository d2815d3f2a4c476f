"""Kinds of input of the fuzzer: where real ones come from, how they are changed, and who reads them.

Each is a function of a folder for what is real; what it returns reads one input, made by chance, in a fresh folder.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtctl.doctor.explain.diagnose import explain_all
from dtctl.errors import DtctlError
from dtctl.launch import snapshot_answers, trust
from dtctl.launch.cluster import ResolvedCluster, build_first_plan, resolve_cluster
from dtctl.launch.control import link
from dtctl.launch.control.run import run_launch_job
from dtctl.launch.job_builder import CodePush, build_launch_job
from dtctl.launch.records.events import Event
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.record import RunInfo, RunRecord, find_run, list_run_records
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import read_run_state
from dtctl.lint import source
from dtctl.lint.engine import lint_text
from dtctl.lint.model import ClusterFacts
from dtctl.lint.project import Project
from dtctl.report import page, run
from dtctl.runtime.snapshot import commands, load, read, write
from dtctl.runtime.snapshot.format import layout
from dtctl.schema import InvalidMessage
from dtctl.spec.load import dump_spec, parse_spec
from dtctl.supervisor import frames
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalStream
from tests import messages
from tests.security import probe_answers
from tests.security.mutate import as_json, bent, odd

ROOT = Path(__file__).parents[2]
One = Callable[[Path, random.Random], object]
"""Reads one input: (a fresh folder, chance)."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Where inputs come from, and who reads them."""

    share: int
    """Of a hundred."""
    make: Callable[[Path], One]
    """Of a folder for what is real: a function of a fresh folder that reads one input."""


def specs(_: Path) -> One:
    real = [path.read_bytes() for path in sorted((ROOT / "examples").rglob("dtctl.yaml"))]
    real += [path.read_bytes() for path in sorted((ROOT / "templates").rglob("dtctl.yaml.j2"))]
    blocks = (ROOT / "docs").rglob("*.md")
    real += [
        part.split("```")[0].encode() for path in sorted(blocks) for part in path.read_text().split("```yaml\n")[1:]
    ]

    def one(folder: Path, chance: random.Random) -> object:
        text = bent(chance.choice(real), chance).decode("utf-8", "replace")
        if chance.random() < 0.3:
            text += "\n" + chance.choice(real).decode()
        spec = parse_spec(text, source="dtctl.yaml", base_dir=folder)
        trust.list_required_agreements(spec)
        trust.list_sent_items(spec)
        parse_spec(dump_spec(spec), source="again", base_dir=folder)
        if spec.cluster.transport in ("local", "slurm"):  # the others look names up
            return build_first_plan(spec, resolve_cluster(spec, start=False), run="fuzz")
        return None

    return one


def dumps(_: Path) -> One:
    folders = [path for path in (ROOT / "tests" / "unit" / "doctor" / "dumps").iterdir() if path.is_dir()]

    def one(folder: Path, chance: random.Random) -> object:
        for path in chance.choice(folders).iterdir():
            data = path.read_bytes()
            if data[:1] == b"{" and chance.random() < 0.7:
                data = as_json(odd(json.loads(data), chance))
            elif chance.random() < 0.7:
                data = bent(data, chance)
            (folder / path.name).write_bytes(data)
        return explain_all([folder])

    return one


def logs(_: Path) -> One:
    real = [path.read_bytes() for path in sorted((ROOT / "tests" / "unit" / "doctor" / "logs").glob("*.log"))]

    def one(folder: Path, chance: random.Random) -> object:
        for name in ("rank-0.log", "rank-1.log")[: chance.choice((1, 2))]:
            (folder / name).write_bytes(bent(chance.choice(real), chance))
        return [diagnosis.as_json() for diagnosis in explain_all([folder]).diagnoses]

    return one


def programs(_: Path) -> One:
    folders = (ROOT / "tests" / "unit" / "lint" / "cases", ROOT / "examples", ROOT / "templates")
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".sh", ".sbatch")
    ]
    real = [(path, path.read_bytes()) for path in files]

    def one(_: Path, chance: random.Random) -> object:
        path, data = chance.choice(real)
        data = bent(data, chance)
        try:
            kind = source.detect_file_kind(path, data)
            text = source.decode_source(data, python=kind == "python").text
        except (UnicodeDecodeError, SyntaxError):
            return None
        found = lint_text(path, text, cluster=ClusterFacts(), project=Project(), kind=kind)
        wrong = [one.message for one in found if "dtctl's mistake" in one.message]
        if wrong:
            raise AssertionError(wrong[0])
        return found

    return one


def snapshots(real: Path) -> One:
    for step in (1, 2):
        state = {"state": {"0": {"m": torch.ones(2, 3)}}, "groups": [{"lr": 0.1, "params": [0]}]}
        write.save_snapshot_parts(
            real, step, {"model": {"w": torch.full((4,), 1.0)}, "optimizer": state}, facts={"a": [1]}, keep=9
        )

    def one(folder: Path, chance: random.Random) -> object:
        shutil.copytree(real, folder / "s")
        newest = folder / "s" / "step-00000002"
        path = chance.choice(sorted(newest.iterdir()))
        data = path.read_bytes()
        if path.name == layout.MANIFEST and chance.random() < 0.8:
            data = as_json(odd(json.loads(data), chance))
        elif path.suffix == ".safetensors" and chance.random() < 0.8:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            if "tree" in header.get("__metadata__", {}) and chance.random() < 0.5:
                header["__metadata__"]["tree"] = json.dumps(odd(json.loads(header["__metadata__"]["tree"]), chance))
            else:
                header = odd(header, chance)
            text = as_json(header)
            data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        else:
            data = bent(data, chance)
        path.write_bytes(data)
        if chance.random() < 0.8:
            _sealed(newest, path)
        found = load.newest(folder / "s")
        assert found is None or found.step in (1, 2)
        if chance.random() < 0.3:
            with contextlib.suppress(DtctlError):
                load.newest(folder / "s", into={"model": {"w": torch.zeros(4)}})
        for verb in (
            commands.list_snapshots,
            commands.verify_snapshots,
            commands.describe_newest_snapshot,
            commands.compute_snapshot_digest,
            commands.list_good_files,
        ):
            with contextlib.suppress(DtctlError):
                verb(folder / "s")
        with contextlib.suppress(DtctlError):
            commands.export_snapshot_part(folder / "s", part="model", out=folder / "w.safetensors")
        with contextlib.suppress(DtctlError):
            commands.prune_snapshot_folder(folder / "s", keep=1)
        assert (folder / "s" / "step-00000001").is_dir() or read.verify_snapshot(newest).status == "ok", (
            "the last good one is gone"
        )
        return None

    return one


def _sealed(snapshot: Path, changed: Path) -> None:
    """Give what was changed the digests that it would have, so that it is looked at."""
    path = snapshot / layout.MANIFEST
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError, AttributeError):
        if changed != path:
            document = json.loads(path.read_bytes())
            document["hash"] = "sha256"
            for name in document["files"]:
                file = snapshot / name
                document["files"][name].update(
                    size_bytes=file.stat().st_size, digest=layout.compute_file_digest(file, "sha256")
                )
            path.write_bytes(as_json(document))
    (snapshot / layout.COMMIT).write_bytes(layout.commit_record(path.read_bytes(), "sha256"))


def records(real: Path) -> One:
    recorded = session(real)
    folder_of_run = recorded.record.folder

    def one(folder: Path, chance: random.Random) -> object:
        target = folder / ".dtctl" / "runs" / "one"
        shutil.copytree(folder_of_run, target)
        files = [path for path in sorted(target.rglob("*")) if path.is_file() and path.name != "lock"]
        for path in chance.sample(files, min(len(files), chance.choice((1, 1, 2)))):
            data = path.read_bytes()
            if path.suffix == ".json" and chance.random() < 0.8:
                data = as_json(odd(json.loads(data), chance))
            elif path.suffix == ".jsonl" and chance.random() < 0.8:
                lines = data.splitlines()
                at = chance.randrange(len(lines)) if lines else 0
                lines[at : at + 1] = [as_json(odd(json.loads(line), chance)) for line in lines[at : at + 1]]
                data = b"\n".join(lines) + b"\n"
            else:
                data = bent(data, chance)
            path.write_bytes(data)
        for record in list_run_records(folder):
            with contextlib.suppress(DtctlError):
                read_run_state(record)
            with contextlib.suppress(DtctlError):
                page.render_report_page([run.collect_run_facts(record)], now=0.0)
            record.read_code_folders()
        return find_run(folder, "one").info()

    return one


def probes(_: Path) -> One:
    good = probe_answers.real_answers()

    def one(_: Path, chance: random.Random) -> object:
        said = {name: odd(value, chance) if chance.random() < 0.6 else value for name, value in good.items()}
        reports = probe_answers.reports(good)
        for op, value in said.items():
            if isinstance(value, dict):
                with contextlib.suppress(DtctlError):
                    probe_answers.take(reports[1], op, json.loads(as_json(value)))
        return probe_answers.judge(reports)

    return one


REAL_MESSAGES: Sequence[dict[str, Any]] = (
    {"op": "hello", "gpus": 0, "address": "", "port": 0, "python": "3.11.7"},
    {"op": "push", "state": "need", "indexes": [0, 1]},
    {"op": "push", "state": "done", "path": "/w/code/x", "digest": "0" * 32},
    {"op": "started", "attempt": 0, "pids": [1], "interface": "eth0"},
    {"op": "stopped", "left": 0, "exits": [{"rank": 0, "code": 1, "signal": None}], "log_bytes_lost": 0},
    {"op": "stack", "rank": 0, "state": "S", "how": "none", "text": "", "flight": ""},
)


def told(_: Path) -> One:
    """Messages and answers, one at a time."""
    row = {"path": "/s", "step": 1, "record": "x", "manifest": "{}", "good": ["a"], "bad": [], "made_s": 0}
    shown = {"path": "/s", "step": 1, "rejected": [], "hash": "sha256", "facts": {"a": [1]},
             "files": {"a": {"size_bytes": 1, "digest": "0"}}, "tensors": {"w": {"dtype": "F32", "shape": [4]}},
    }  # fmt: skip

    def one(_: Path, chance: random.Random) -> object:
        message = json.loads(as_json(odd(dict(chance.choice(REAL_MESSAGES)), chance)))
        if isinstance(message, dict):
            for kinds in messages.answers():
                with contextlib.suppress(DtctlError):
                    link.parse_message(message, kinds, node="a")
        for kind, answer in (
            (snapshot_answers.SnapshotParts, {"rows": [row]}),
            (snapshot_answers.SnapshotContents, shown),
        ):
            with contextlib.suppress(DtctlError, InvalidMessage):
                told = as_json(odd(answer, chance)).decode("utf-8", "replace")
                snapshot_answers.parse_answer(kind, told, node="a")
        parser = frames.FrameParser()
        with contextlib.suppress(frames.BrokenFrame):
            for kind, _, payload in parser.feed(bent(b"".join(map(frames.pack_json, REAL_MESSAGES)), chance)):
                if kind == frames.JSON:
                    frames.decode_message(payload)
        return None

    return one


# -- sessions -----------------------------------------------------------------------------------------------------

SPEC = f"""
cluster: {{transport: ssh, nodes: [{{name: a, address: 127.0.0.1}}, {{name: b, address: 127.0.0.1}}], slots: 1,
          workdir: ~/work, link_timeout_s: 2, python: {sys.executable}}}
job: {{script: t.py, kind: direct, grace_s: 0, max_restarts: 0}}
network: {{rendezvous_address: 192.0.2.1}}
"""


class Recorder(LocalConnection):
    """This machine as a node of its own home, whose every word is kept."""

    def __init__(self, target: Target, home: Path, said: bytearray) -> None:
        super().__init__(target)
        home.mkdir(mode=0o700, exist_ok=True)
        self.home, self.said = home, said

    def open(self, command: str) -> LocalStream:
        stream = self.start(["env", f"HOME={self.home}", "/bin/sh", "-c", command])
        read = stream.read

        def kept(size: int) -> bytes:
            data = read(size)
            self.said += data
            return data

        stream.read = kept  # type: ignore[method-assign]
        return stream


class Replay:
    """A node that says what it is to say, whatever it is told; connection and stream in one."""

    def __init__(self, target: Target, said: bytes) -> None:
        self.target, self._said, self._over = target, said, threading.Event()

    def connect(self, target: Target) -> Replay:
        return self

    def peer_address(self) -> str:
        return "127.0.0.1"

    def open(self, command: str) -> Replay:
        return self

    def alive(self) -> bool:
        return not self._over.is_set()

    def read(self, size: int) -> bytes:
        data, self._said = self._said[:size], self._said[size:]
        return data

    def read_stderr(self) -> bytes:
        return b""

    def write(self, data: bytes) -> None:
        """Nobody listens."""

    def close_stdin(self) -> None:
        """As before."""

    def exit_status(self, timeout_s: float) -> int | None:
        return 0

    def close(self) -> None:
        self._over.set()


@dataclass(frozen=True, kw_only=True)
class Session:
    """A launch, and what its nodes said."""

    record: RunRecord
    said: dict[str, bytes]


class Way:
    """A transport of which each node has its own connection."""

    def __init__(self, make: Callable[[Target], Any]) -> None:
        self.connect = make


def launched(project: Path, way: Way) -> RunRecord:
    """One launch of two nodes; how it ends is no matter."""
    project.mkdir(mode=0o700, exist_ok=True)
    (project / "t.py").write_text("print('here', flush=True)\n")
    spec = parse_spec(SPEC, source="dtctl.yaml", base_dir=project)
    code, found = CodePush(spec), resolve_cluster(spec, start=False)
    cluster = ResolvedCluster(nodes=found.nodes, targets=found.targets, make_transport=lambda: way)
    job = replace(build_launch_job(spec, cluster, run="one", keep=False, code=code), token="f" * 32)
    info = RunInfo(run="one", token=job.token, pid=1, started=0.0, spec="", command=[], detached=False)
    record = RunWriter.create(project, info)
    record.write_spec(dump_spec(spec))

    def emit(event: Event) -> None:
        if event.recorded:
            record.append_event(replace(event, time=1.0))

    run_launch_job(job, record, emit=emit, signals=[], ledger=Ledger(lambda: 0.0, begun=0.0))
    return record


_SESSIONS: dict[Path, Session] = {}


def session(real: Path) -> Session:
    """A recorded launch, one for all kinds that begin with it."""
    base = real.parent
    if base not in _SESSIONS:
        said = {"a": bytearray(), "b": bytearray()}
        (base / "homes").mkdir(mode=0o700)
        way = Way(lambda target: Recorder(target, base / "homes" / target.name, said[target.name]))
        record = launched(base / "project", way)
        _SESSIONS[base] = Session(record=record, said={name: bytes(data) for name, data in said.items()})
        assert (record.log_path("a", 0)).read_bytes() == b"here\n"
    return _SESSIONS[base]


def sessions(real: Path) -> One:
    said = {name: frames.FrameParser().feed(data) for name, data in session(real).said.items()}

    def one(folder: Path, chance: random.Random) -> object:
        told = {
            name: b"".join(frames.pack_frame(kind, payload, rank) for kind, rank, payload in every)
            for name, every in said.items()
        }
        for name in chance.choice((["b"], ["b"], ["a"], ["a", "b"])):
            told[name] = _bent_session(said[name], chance)
        record = launched(folder / "p", Way(lambda target: Replay(target, told[target.name])))
        return read_run_state(record)

    return one


def _bent_session(every: Sequence[tuple[bytes, int, bytes]], chance: random.Random) -> bytes:
    found = list(every)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(found))
        kind, rank, payload = found[at]
        what = chance.randrange(8)
        if what == 0:
            del found[at]
        elif what == 1:
            found[at:at] = [found[at]] * chance.choice((1, 3, 100))
        elif what == 2:
            there = chance.randrange(len(found))
            found[at], found[there] = found[there], found[at]
        elif what == 3:
            found[at] = (
                chance.choice((b"J", b"L", b"B", b"X")),
                chance.choice((rank, -1, -2, 0, 1, 7, 1 << 30)),
                payload,
            )
        elif what == 4:
            found[at] = (kind, rank, bent(payload, chance))
        elif kind == frames.JSON:
            with contextlib.suppress(ValueError):  # it was bent before
                found[at] = (kind, rank, as_json(odd(json.loads(payload), chance)))
        if not found:
            return b""
    data = b"".join(frames.HEADER.pack(kind, rank, len(payload)) + payload for kind, rank, payload in found)
    return bent(data, chance) if chance.random() < 0.15 else data


KINDS: dict[str, Kind] = {
    "specs": Kind(share=18, make=specs),
    "flight-recorder dumps": Kind(share=12, make=dumps),
    "logs": Kind(share=14, make=logs),
    "training programs": Kind(share=14, make=programs),
    "snapshots": Kind(share=5, make=snapshots),
    "run folders": Kind(share=2, make=records),
    "probes": Kind(share=10, make=probes),
    "messages and answers": Kind(share=12, make=told),
    "recorded sessions": Kind(share=1, make=sessions),
}
