"""The processes of an attempt: started, listened to, counted out; with real children of a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.supervisor.exit_cause import exit_facts
from dtctl.supervisor.frames import AGENT
from dtctl.supervisor.node_processes import NodeProcesses, split_prefix
from dtctl.supervisor.output_log import OutputLog, RankLogs

# A group reaps every child of its process, so each test gives it a process of its own.
HARNESS = """
import json, os, select, sys
from dtctl.supervisor.node_processes import NodeProcesses
from dtctl.supervisor.output_log import RankLogs
folder, split, *commands = sys.argv[1:]
group = NodeProcesses(RankLogs(folder), split == "1")
env = {"PATH": os.environ["PATH"], "GREETING": "a b'c"}
for rank, command in enumerate(commands):
    group.start(["sh", "-c", command], folder, {**env, "RANK": str(rank)}, rank)
ended = {}
while len(ended) < len(commands):
    select.select([process.pipe for process in group.processes if process.pipe is not None], [], [], 0.02)
    for process in group.processes:
        group.drain(process)
    for process in group.collect():
        ended[process.rank] = process.status
left = len(group.running())
group.close()
print(json.dumps({"ended": ended, "left": left, "pids": [p.pid for p in group.processes], "sid": os.getsid(0)}))
"""


def run(folder: Path, *commands: str, split: bool = False) -> dict[str, dict[str, int]]:
    argv = [sys.executable, "-c", HARNESS, str(folder), "1" if split else "0", *commands]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_output_and_errors_of_each_rank_go_to_its_file(tmp_path: Path) -> None:
    run(tmp_path, "echo out; echo err >&2; printf unfinished", "printf '%s' \"$GREETING\"", ":")
    assert (tmp_path / "rank-0.log").read_text() == "out\nerr\nunfinished"
    assert (tmp_path / "rank-1.log").read_text() == "a b'c"
    assert not (tmp_path / "rank-2.log").exists()
    assert (tmp_path / "rank-0.log").stat().st_mode & 0o777 == 0o600


def test_exit_codes_and_signals_are_told_apart(tmp_path: Path) -> None:
    ended = run(tmp_path, "exit 0", "exit 7", "kill -9 $$", "kill -15 $$", "exit 137")["ended"]
    facts = [exit_facts(ended[str(rank)]) for rank in range(5)]
    assert facts == [(0, None), (7, None), (137, 9), (143, 15), (137, None)]


def test_each_process_has_a_session_of_its_own_and_no_input(tmp_path: Path) -> None:
    found = run(tmp_path, "ps -o sid= -p $$; cat; echo end")
    session, end = (tmp_path / "rank-0.log").read_text().split()
    assert (int(session), end) == (found["pids"][0], "end")
    assert int(session) != found["sid"]


def test_much_output_is_kept_whole(tmp_path: Path) -> None:
    run(tmp_path, "head -c 5000000 /dev/zero", "seq 100000")
    assert (tmp_path / "rank-0.log").stat().st_size == 5_000_000
    assert (tmp_path / "rank-1.log").read_text() == "".join(f"{n}\n" for n in range(1, 100_001))


def test_a_grandchild_that_holds_the_pipe_does_not_hold_up_the_end(tmp_path: Path) -> None:
    found = run(tmp_path, "echo first; (sleep 30; echo late) & echo $! > pid; exit 3")
    os.kill(int((tmp_path / "pid").read_text()), 9)
    assert exit_facts(found["ended"]["0"]) == (3, None)
    assert (tmp_path / "rank-0.log").read_text() == "first\n"


def test_signals_that_the_supervisor_handles_have_their_usual_effect_in_workers(tmp_path: Path) -> None:
    run(tmp_path, f"exec {sys.executable} -c \"import signal as s; print(*[s.getsignal(n) == s.SIG_DFL for n in "
        "(s.SIGTERM, s.SIGHUP, s.SIGCHLD)])\"")  # fmt: skip
    assert (tmp_path / "rank-0.log").read_text() == "True True True\n"


def test_what_cannot_be_started_says_so_in_its_log(tmp_path: Path) -> None:
    program = (
        "import sys; from dtctl.supervisor.node_processes import NodeProcesses\n"
        "from dtctl.supervisor.output_log import RankLogs\n"
        "group = NodeProcesses(RankLogs(sys.argv[1]), False)\n"
        "group.start(['no-such-program'], '/', {}, 0); group.start(['true'], '/no/such/folder', {}, 1)\n"
        "while group.running(): group.collect()\n"
        "print([process.status >> 8 for process in group.processes]); group.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "[127, 127]\n"
    assert "cannot start no-such-program in /: No such file" in (tmp_path / "rank-0.log").read_text()
    assert "cannot start true in /no/such/folder: No such file" in (tmp_path / "rank-1.log").read_text()


def test_the_lines_of_torchrun_go_to_the_ranks_that_they_name(tmp_path: Path) -> None:
    run(
        tmp_path,
        "printf '[dtctl:4] four\\nagent\\n[dtctl:5] fi'; sleep 0.05; printf 've\\n[dtctl:4]\\n[dtctl:4] cut'",
        split=True,
    )
    assert (tmp_path / "rank-4.log").read_text() == "four\n\ncut\n"
    assert (tmp_path / "rank-5.log").read_text() == "five\n"
    assert (tmp_path / "agent.log").read_text() == "agent\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"[dtctl:12] text", (12, b"text")), (b"[dtctl:0]  two", (0, b" two")), (b"[dtctl:3]", (3, b"")),
        (b"[dtctl:3]x", (3, b"x")), (b"[dtctl:x] y", (AGENT, b"[dtctl:x] y")), (b"[dtctl:", (AGENT, b"[dtctl:")),
        (b"[dtctl:] y", (AGENT, b"[dtctl:] y")), (b"", (AGENT, b"")), (b" [dtctl:1] y", (AGENT, b" [dtctl:1] y")),
        (b"[dtctl:-1] y", (AGENT, b"[dtctl:-1] y")),
    ],
)  # fmt: skip
def test_the_prefix_of_a_line(line: bytes, found: tuple[int, bytes]) -> None:
    assert split_prefix(line) == found


def test_marks_inside_of_lines_are_taken_out(tmp_path: Path) -> None:
    """torchrun writes its prefix before each piece that it reads, and tqdm writes its bars in pieces."""
    bars = "[dtctl:0]  10%|#[dtctl:0]   | 1/10[dtctl:1]  20%|##\\n[dtctl:0] \\n[dtctl:1] |\\nagent [dtctl:x] y\\n"
    run(tmp_path, f"printf '{bars.replace('%', '%%')}'", split=True)
    assert (tmp_path / "rank-0.log").read_text() == " 10%|#  | 1/10\n"
    assert (tmp_path / "rank-1.log").read_text() == " 20%|##\n|\n"
    assert (tmp_path / "agent.log").read_text() == "agent [dtctl:x] y\n"


@given(st.binary(max_size=50))
def test_any_line_has_a_rank(line: bytes) -> None:
    rank, text = split_prefix(line)
    assert rank >= AGENT
    assert line.endswith(text)


@given(
    st.lists(st.sampled_from([b"[dtctl:1] a\n", b"b\n", b"[dtctl:2] c\n", b"[dtctl:1] \n", b"\n"]), max_size=8),
    st.data(),
)
def test_it_does_not_matter_where_the_output_was_cut(lines: list[bytes], data: st.DataObject) -> None:
    class Kept(RankLogs):
        def __init__(self) -> None:
            self.data: dict[int, bytes] = {}

        def write(self, rank: int, data: bytes) -> None:
            self.data[rank] = self.data.get(rank, b"") + data

    class Source:
        rank, pipe, partial, midst = 0, None, b"", None

    whole = b"".join(lines)
    at = data.draw(st.integers(0, len(whole)))
    found = []
    for parts in ([whole], [whole[:at], whole[at:]]):
        logs, source = Kept(), Source()
        group = NodeProcesses(logs, split_ranks=True)
        for part in parts:
            group.store(source, part, last=False)  # type: ignore[arg-type]
        group.store(source, b"", last=True)  # type: ignore[arg-type]
        found.append(logs.data)
    assert found[0] == found[1]
    assert b"".join(found[0].values()).count(b"\n") == len(lines)


def test_a_log_gives_what_was_not_sent_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "x.log")
    log = OutputLog(path)
    log.write(b"0123456789")
    assert (log.take_unsent(4), log.take_unsent(100)) == ((0, b"0123"), (0, b"456789"))
    log.rewind(8)
    assert log.take_unsent(100) == (0, b"89")
    again = OutputLog(path)
    assert (again.size, again.sent) == (10, 0)
    for opened in (log, again):
        os.close(opened.fd)


def test_a_full_disk_costs_lines_and_not_the_run() -> None:
    log = OutputLog("/dev/full")
    log.write(b"sent on ")
    log.write(b"all the same")
    assert (log.lost(is_linked=True), log.lost(is_linked=False), log.unstored) == (0, 20, 20)
    assert (log.take_unsent(10), log.take_unsent(100), log.take_unsent(10)) == (
        (0, b"sent on al"),
        (0, b"l the same"),
        (0, b""),
    )
    assert log.lost(is_linked=False) == 0
    os.close(log.fd)
