"""Workers that are forked from a process that has imported what they need: the same as others, only sooner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox, SandboxNode
from tests.hosts import Project, spec_text, wait_until, workers

pytestmark = pytest.mark.usefixtures("sandbox")

SLOW = "import time\ntime.sleep(600)\n"
SHOW = """\
import json, os, sys
preloaded = "decimal" in sys.modules
open_files = [fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")]
facts = {
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "name": __name__, "file": __file__, "files": open_files,
    "env": dict(os.environ), "leader": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(),
}
print("SHOW " + json.dumps([preloaded, facts]), flush=True)
"""


def spec(preload: list[str], **job: object) -> str:
    more = "".join(f", {key}: {json.dumps(value)}" for key, value in job.items())
    return spec_text(grace_s=1, slots=2).replace("grace_s: 1", f"grace_s: 1, preload: {json.dumps(preload)}{more}")


def shown(text: str) -> dict[str, tuple[bool, dict[str, object]]]:
    """Rank -> whether the module was there before the program imported it, and what the worker found."""
    found = {}
    for line in text.splitlines():
        if "SHOW " in line:
            preloaded, facts = json.loads(line.split("SHOW ", 1)[1])
            found[facts["env"]["RANK"]] = (preloaded, facts)
    return found


def test_a_forked_worker_finds_what_a_fresh_one_finds(project: Project) -> None:
    project.write("train.py", SHOW)
    job = {"args": ["--x", "", "a b"], "env": {"GREETING": "héllo\n'you'"}, "setup": ["export SET=up"]}
    project.write("dtctl.yaml", spec(["decimal"], **job))
    seen = []
    for change in ("job.preload=[]", "job.name=test"):
        done = project.run("launch", "--set", change)
        assert done.code == 0, done.err
        seen.append(shown(done.out))
    fresh, warm = seen
    assert sorted(fresh) == sorted(warm) == [str(rank) for rank in range(6)]
    for rank, (preloaded, facts) in warm.items():
        assert preloaded
        assert not fresh[rank][0]
        of_this_run = {"DTCTL_RUN_ID", "DTCTL_RUN_DIR", "DTCTL_METRICS", "DTCTL_SNAPSHOT_DIR", "DTCTL_MEMORY_DIR"}
        of_this_run |= {
            "PWD",
            "MASTER_PORT",
            "DTCTL_PROGRESS",
            "DTCTL_RUN_TOKEN",
            "SSH_CLIENT",
            "SSH_CONNECTION",
            "_",
            "PET_LOG_DIR",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        }
        for found in (facts, fresh[rank][1]):
            of_the_run = found["env"]["DTCTL_RUN_DIR"] + "/work"
            assert {found["path"], found["cwd"], found["env"]["PWD"]} == {of_the_run}
            assert found["file"] == f"{of_the_run}/train.py"
            found["path"] = found["cwd"] = found["file"] = "work"
            found["env"] = {name: value for name, value in found["env"].items() if name not in of_this_run}
        assert facts["env"].items() ^ fresh[rank][1]["env"].items() == set()
        assert facts == fresh[rank][1]


def test_a_restart_is_warm_too_and_has_the_variables_of_its_attempt(project: Project) -> None:
    script = """\
import os, signal, sys
how = "warm" if "decimal" in sys.modules else "cold"
os.write(1, (" ".join([how, os.environ["DTCTL_ATTEMPT"], os.environ["MASTER_PORT"]]) + "\\n").encode())  # at once
if os.environ["DTCTL_ATTEMPT"] == "0" and os.environ["RANK"] == "3":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause() if os.environ["DTCTL_ATTEMPT"] == "0" else None
"""
    project.write("train.py", script)
    project.write("dtctl.yaml", spec(["decimal"], max_restarts=1))
    done = project.run("launch", "--json")
    assert done.code == 0, done.err
    assert done.done["attempts"] == 2
    exits = [event for event in done.events if event["event"] == "exit" and event["rank"] == 3]
    assert (exits[0]["exit_code"], exits[0]["signal"]) == (137, 9)
    run = project.folder / ".dtctl" / "runs" / str(done.done["run"])
    for rank in range(6):
        text = (run / "logs" / f"node{1 + rank // 2}" / f"rank-{rank}.log").read_text()
        lines = [line.split() for line in text.splitlines()]  # a worker may have been stopped before its first word
        assert [line[:2] for line in lines] in ([["warm", "0"], ["warm", "1"]], [["warm", "1"]])
        if rank == 3:
            assert len(lines) == 2
            assert lines[0][2] != lines[1][2]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "started 1 threads",
        ),
        ("import nonsense", "ModuleNotFoundError"),
        ("raise SystemExit(5)", "SystemExit: 5"),
        ("import os; os._exit(5)", "has exited"),
    ],
    ids=["threads", "missing", "exits", "dies"],
)
def test_where_it_cannot_be_done_workers_start_afresh(project: Project, module: str, why: str) -> None:
    project.write("bad.py", module)
    project.write("train.py", "import os; print('here', os.environ['RANK'])")
    project.write("dtctl.yaml", spec(["bad"], env={"PYTHONPATH": "."}))
    done = project.run("launch", "--json")
    assert done.code == 0, done.err
    assert done.err.count("] here ") == 6
    texts = [str(event["text"]) for event in done.events if event["event"] == "note"]
    notes = [text for text in texts if "separate programs" not in text]
    assert len(notes) == 3
    assert all(why in note for note in notes), notes


def test_a_failing_program_says_what_it_says_without_dtctl(project: Project) -> None:
    project.write("train.py", "import sys\ndef f():\n    raise ValueError('mine')\nf()\n")
    project.write("dtctl.yaml", spec(["decimal"]))
    done = project.run("launch", "--json")
    assert done.code == 8
    log = Path(done.done["first_failure"]["log"]).read_text()  # type: ignore[index]
    assert log.splitlines()[0] == "Traceback (most recent call last):"
    assert log.splitlines()[1].endswith('train.py", line 4, in <module>')
    assert "fork_server_main.py" not in log
    assert log.splitlines()[-1] == "ValueError: mine"


def test_it_can_be_stopped_while_it_imports(project: Project, sandbox: Sandbox) -> None:
    project.write("slow.py", SLOW)
    project.write("train.py", "print('here')")
    project.write("dtctl.yaml", spec(["slow"], env={"PYTHONPATH": "."}))
    process = project.start("launch")
    wait_until(
        lambda: all(any("fork_server_main.py" in line for line in workers(node).values()) for node in sandbox.nodes),
        what="import",
    )
    process.send_signal(signal.SIGINT)
    done = project.finish(process)
    assert done.code == 130
    assert "0 processes left on 3 nodes" in done.err
    wait_until(lambda: all(workers(node) == {} for node in sandbox.nodes), what="nothing is left")


def find(node: SandboxNode, which: str) -> int:
    """The warm process of a host, the first that loaded the file, or its supervisor, which is its parent."""
    warm = min(pid for pid, line in control.list_host_processes(node).items() if "fork_server_main.py" in line)
    parent = int(Path(f"/proc/{warm}/stat").read_text().rpartition(")")[2].split()[1])
    return warm if which == "warm" else parent


@pytest.mark.parametrize("victim", ["launcher", "supervisor", "warm"])
def test_nothing_is_left_whoever_is_killed(project: Project, sandbox: Sandbox, victim: str) -> None:
    project.write("train.py", "import os, time; print('here', flush=True); time.sleep(1000)")
    project.write("dtctl.yaml", spec(["decimal"]))
    process = project.start("launch")
    logs = project.folder / ".dtctl" / "runs"
    wait_until(lambda: len(list(logs.glob("*/logs/*/rank-*.log"))) == 6, what="all run")
    if victim == "launcher":
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    else:
        os.kill(find(sandbox.nodes[0], victim), signal.SIGKILL)
    if victim == "warm":  # the workers do not need it any more
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
    project.finish(process)
    wait_until(lambda: all(workers(node) == {} for node in sandbox.nodes), what="nothing is left")


def test_ps_calls_a_forked_worker_by_its_program(project: Project) -> None:
    """Its command line is that of the process it was forked from, so that people would not find it by anything."""
    project.write("train.py", "print('I am', open('/proc/self/comm').read().strip(), flush=True)\n")
    project.write("dtctl.yaml", spec(["decimal"]))
    done = project.run("launch")
    assert done.code == 0, done.err
    assert done.out.count("I am train.py\n") == 6
