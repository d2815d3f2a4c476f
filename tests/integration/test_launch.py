"""Jobs on real hosts over real SSH, from the command line to the last process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dtctl import node_facts, shell
from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox
from tests.facts import missing
from tests.hosts import Project, spec_text, wait_for_none, wait_until

pytestmark = pytest.mark.usefixtures("sandbox")

SHOW = """\
import json, os, sys
print("SHOW " + json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}), flush=True)
"""


def shown(text: str) -> list[dict[str, object]]:
    return [json.loads(line.split("SHOW ", 1)[1]) for line in text.splitlines() if "SHOW " in line]


def test_every_worker_knows_its_place(project: Project) -> None:
    project.write("dtctl.yaml", spec_text(slots=2))
    project.write("train.py", SHOW)
    done = project.run("launch", "--json", "--", "--lr", "1e-3")
    assert done.code == 0, done.err
    found = sorted(shown(done.err), key=lambda item: int(item["env"]["RANK"]))  # type: ignore[index]
    places = [[item["env"][key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DTCTL_NODE")] for item in found]  # type: ignore[index]
    assert places == [[str(r), str(r % 2), "6", f"node{r // 2 + 1}"] for r in range(6)]
    assert all(item["argv"] == ["--lr", "1e-3"] for item in found)
    assert {item["env"]["GLOO_SOCKET_IFNAME"] for item in found} == {"eth0"}  # type: ignore[index]
    assert {item["env"]["NCCL_SOCKET_IFNAME"] for item in found} == {"=eth0"}  # type: ignore[index]
    assert done.done["status"] == "succeeded"
    assert done.done["left_behind"] == 0
    assert done.done["first_failure"] is None
    assert 0 < float(done.done["launch_s"]) < float(done.done["duration_s"])  # type: ignore[arg-type]


def test_the_run_folder_is_private_and_complete(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "print('hello')")
    assert project.run("launch", "--name", project.unique).code == 0
    folder = project.folder / ".dtctl" / "runs" / project.unique
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"plan.json", "events.jsonl", "ledger.json", "logs/node1/rank-0.log", "logs/node3/rank-2.log"} <= files
    assert (folder / "logs/node2/rank-1.log").read_text() == "hello\n"
    assert {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()} == {"0o600"}
    assert {oct(path.stat().st_mode & 0o777) for path in [folder, *folder.rglob("*")] if path.is_dir()} == {"0o700"}
    ledger = json.loads((folder / "ledger.json").read_text())
    assert sum(ledger["phases_s"].values()) == pytest.approx(ledger["wall_s"], abs=0.01)


def test_a_failed_worker_is_named_and_the_others_are_stopped(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text(slots=2))
    project.write(
        "train.py",
        "import os, sys, time\nprint('working', flush=True)\n"
        "if os.environ['RANK'] == '3': raise ValueError('the loss is a banana')\ntime.sleep(600)\n",
    )
    done = project.run("launch", "--json")
    assert done.code == 8
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["exit_code"], failure["signal"]) == ("node2", 3, 1, None)
    assert failure["summary"] == "ValueError: the loss is a banana"
    assert "the loss is a banana" in Path(failure["log"]).read_text()
    assert done.done["left_behind"] == 0
    wait_for_none(*sandbox.nodes)


def test_a_worker_ended_by_a_signal_is_the_cause_though_others_end_first(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write(
        "train.py",
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"  # is told to stop because of the others, and is found to have died by then
        "    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    time.sleep(1000)\n"
        "time.sleep(0.5)\n"  # all have begun
        "sys.exit('RuntimeError: Connection closed by peer [10.0.0.1]:1')\n",
    )
    failure = project.run("launch", "--json").done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"], failure["exit_code"], failure["signal"]) == ("node2", 1, 137, 9)


def test_the_gang_is_started_again_with_a_new_rendezvous(project: Project) -> None:
    project.write("dtctl.yaml", spec_text() + "  \n".replace("  ", ""))
    project.write(
        "train.py", SHOW + "if os.environ['DTCTL_ATTEMPT'] < '2' and os.environ['RANK'] == '1': sys.exit(7)\n"
    )
    done = project.run("launch", "--json", "--set", "job.max_restarts=3")
    assert done.code == 0, done.err
    assert done.done["attempts"] == 3
    attempts = [event for event in done.events if event["event"] == "start"]
    assert len({event["rendezvous"] for event in attempts}) == 3
    last = [item["env"] for item in shown(done.err) if item["env"]["DTCTL_ATTEMPT"] == "2"]  # type: ignore[index]
    assert {f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" for env in last} == {attempts[-1]["rendezvous"]}  # type: ignore[index]


THREADS = """\
import os, sys
print("THREADS", os.environ["DTCTL_ATTEMPT"], os.environ["RANK"], os.environ["OMP_NUM_THREADS"], flush=True)
sys.exit(os.environ["DTCTL_ATTEMPT"] == "0" and os.environ["RANK"] == "2")
"""


def test_over_ssh_all_workers_of_all_attempts_have_the_same_share_of_cores(project: Project, sandbox: Sandbox) -> None:
    if sandbox.rootless:
        pytest.skip("ssh reaches the hosts of a rootless sandbox through its keeper alone")
    spec = {
        "cluster": {
            "transport": "ssh",
            "nodes": [
                {"name": node.name, "address": node.address, "slots": slots}
                for node, slots in zip(sandbox.nodes[:2], (1, 2), strict=True)
            ],
            "user": sandbox.user,
            "identity_file": str(sandbox.identity_file),
            "known_hosts": str(sandbox.known_hosts),
            "ssh_config": "none",
            "python": sys.executable,
        },
        "job": {"script": "train.py", "kind": "direct", "max_restarts": 1, "grace_s": 1},
    }
    project.write("dtctl.yaml", yaml.safe_dump(spec))
    project.write("train.py", THREADS)
    done = project.run("launch", "--json", "--yes")
    assert done.code == 0, done.err
    share = str(max(1, node_facts.count_usable_cores() // 2))
    lines = {tuple(line.split("THREADS ", 1)[1].split()) for line in done.err.splitlines() if "THREADS " in line}
    ranks = [("0", "2"), *(("1", rank) for rank in "012")]  # of those that others have ended nothing is known
    assert {(attempt, rank, share) for attempt, rank in ranks} <= lines
    assert {threads for _, _, threads in lines} == {share}


NAMES_HOSTS = """\
import os, socket, time
if os.environ["RANK"] == "1":
    raise RuntimeError(f"no answer from [{socket.gethostname()}]:29500")
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["direct", "torchrun"])
def test_what_a_worker_says_of_a_host_has_the_name_of_the_spec(project: Project, sandbox: Sandbox, kind: str) -> None:
    if sandbox.rootless:
        pytest.skip("ssh reaches the hosts of a rootless sandbox through its keeper alone")
    spec = {
        "cluster": {
            "transport": "ssh",
            "nodes": [{"name": f"gpu{i}", "address": node.address} for i, node in enumerate(sandbox.nodes[:2])],
            "slots": 1,
            "user": sandbox.user,
            "identity_file": str(sandbox.identity_file),
            "known_hosts": str(sandbox.known_hosts),
            "ssh_config": "none",
            "python": sys.executable,
        },
        "job": {"script": "train.py", "kind": kind, "grace_s": 1},
    }
    project.write("dtctl.yaml", yaml.safe_dump(spec))
    project.write("train.py", NAMES_HOSTS)
    done = project.run("launch", "--json", "--yes", "--name", project.unique)
    assert done.code == 8, done.err
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"]) == ("gpu1", 1)
    assert failure["summary"] == "RuntimeError: no answer from [gpu1]:29500"
    end = done.err[done.err.index("first failure:") :]
    assert "[gpu1]:29500" in end
    assert "[node2]" not in end
    status = project.run("status", project.unique)
    assert "no answer from [gpu1]:29500" in status.out
    told = json.loads(project.run("doctor", "--log", f".dtctl/runs/{project.unique}", "--json").out)
    assert "[gpu1]:29500" in told["diagnoses"][0]["cause"]


LEAVES = """\
import os
import re
import shlex
import torch.distributed as dist
import torch
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
if os.environ["RANK"] == "1":
    os._exit(0)
for _ in range(1000):
    dist.all_reduce(torch.zeros(1))
"""


def test_a_worker_of_a_program_without_steps_that_ends_early_is_told_so(project: Project) -> None:
    """It reports nothing, so nobody can say that it left a training, or after which step."""
    project.write("dtctl.yaml", spec_text(nodes=2))
    project.write("train.py", LEAVES)
    done = project.run("launch", "--json")
    assert done.code == 8
    failure = done.done["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["rank"]) == ("node2", 1)
    assert failure["summary"] == (
        "rank 1 ended while others ran, without an error, and rank 0 on node1 lost the connection to it"
    )
    assert "first failure: rank 1 on node2 ended while others ran" in done.err
    assert "step" not in done.err[done.err.index("first failure") :].partition("log:")[0]


def test_the_restarts_are_counted(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "import sys; sys.exit(3)")
    done = project.run("launch", "--json", "--set", "job.max_restarts=1")
    assert (done.code, done.done["attempts"]) == (8, 2)


def test_metrics_of_the_attempt_before_do_not_make_a_node_run(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write(
        "train.py",
        "import json, os, sys, time\n"
        "attempt = int(os.environ['DTCTL_ATTEMPT'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    with open(os.environ['DTCTL_METRICS'], 'a') as file:\n"
        "        file.write(json.dumps({'step': attempt + 1, 'loss': 1.0}) + '\\n')\n"
        "time.sleep(0.5)\n"
        "print('here', flush=True)\n"
        "sys.exit(1 - attempt)\n",
    )
    done = project.run("launch", "--json", "--set", "job.max_restarts=1")
    assert done.code == 0, done.err
    told: dict[object, list[object]] = {}
    for event in done.events:
        if event["event"] == "node" and event["state"] in ("started", "running"):
            told.setdefault(event["node"], []).append(event["state"])
    assert told
    assert all(states == ["started", "running"] * 2 for states in told.values()), told


@pytest.mark.parametrize("lost", [0, 1], ids=["head", "another"])
def test_the_gang_is_started_again_after_a_node_was_lost(project: Project, sandbox: Sandbox, lost: int) -> None:
    project.write("dtctl.yaml", spec_text(grace_s=1))
    project.write("train.py", "import os, time\nif os.environ['DTCTL_ATTEMPT'] == '0':\n    time.sleep(1000)\n")
    process = project.start("launch", "--json", "--set", "job.max_restarts=1", "--name", project.unique)
    events = project.folder / ".dtctl" / "runs" / project.unique / "events.jsonl"
    wait_until(lambda: events.exists() and '"event":"started"' in events.read_text(), what="it runs")
    node = sandbox.nodes[lost]
    for pid, line in control.list_host_processes(node).items():
        if line.startswith("sshd:") and "listener" not in line:
            os.kill(pid, signal.SIGKILL)
    done = project.finish(process)
    assert done.code == 0, done.err
    assert (done.done["attempts"], done.done["left_behind"]) == (2, 0)


def test_a_command_runs_once_per_node(project: Project) -> None:
    project.write("dtctl.yaml", "cluster: {transport: sandbox, nodes: 3, slots: 4}\njob: {command: hostname}\n")
    done = project.run("launch")
    assert sorted(done.out.split()) == sorted(["[node1:0]", "node1", "[node2:4]", "node2", "[node3:8]", "node3"])


def test_without_a_spec(project: Project, sandbox: Sandbox) -> None:
    config = project.write(
        "ssh_config",
        f"Host a b\n  User {sandbox.user}\n  IdentityFile {sandbox.identity_file}\n"
        f"  UserKnownHostsFile {sandbox.known_hosts}\n"
        f"Host a\n  HostName {sandbox.nodes[0].address}\nHost b\n  HostName {sandbox.nodes[1].address}\n",
    )
    project.write("train.py", SHOW)
    done = project.run(
        "launch", "--nodes", "a,b", "--slots", "2", "--set", f"cluster.ssh_config={config}", "--set", "job.kind=direct",
        "--set", f"cluster.python={sys.executable}", "--", "train.py", "--lr", "1e-3",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [item["argv"] for item in shown(done.out)] == [["--lr", "1e-3"]] * 4
    assert not missing(done.err, "4 workers direct ssh")


def test_a_node_that_is_off_is_told_with_the_command_that_runs_without_it(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text() + "train: {lr: 1.0}\n")
    project.write("train.py", SHOW)
    faults.power_off_host(sandbox, sandbox.nodes[1])
    done = project.run("launch", "--no-doctor", "--set", "cluster.connect_timeout_s=3", "--", "--lr", "2 x")
    assert done.code == 6, done.err
    (command,) = re.findall(r"without: `dtctl (.*)`$", done.err, re.MULTILINE)
    assert command == "launch --nodes node1,node3 --set cluster.connect_timeout_s=3 -- --lr '2 x'"
    again = project.run(*shlex.split(command))
    assert (again.code, [item["argv"] for item in shown(again.out)]) == (0, [["--lr", "2 x"]] * 2), again.err
    faults.power_off_host(sandbox, sandbox.nodes[2])
    both = project.run("launch", "--no-doctor", "--set", "cluster.connect_timeout_s=3")
    assert "without: `dtctl launch --nodes node1 --set" in both.err


def test_code_reaches_every_node_without_a_shared_disk(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write("train.py", "import helper; print(helper.VALUE, open('data/odd name\\u00e9.txt').read())")
    project.write("helper.py", "VALUE = 1")
    project.write("data/odd nameé.txt", "text")
    project.write(".gitignore", "junk/\n")
    project.write("junk/large.bin", "x" * 100_000)
    project.write(".env", "SECRET=1")
    first = project.run("launch")
    assert first.out.count("1 text") == 3, first.err
    again = project.run("launch")
    assert again.err.count("has the code (unchanged)") == 3
    project.write("helper.py", "VALUE = 2")
    changed = project.run("launch")
    assert changed.out.count("2 text") == 3
    assert changed.err.count("has the code (1 file, ") == 3
    for node in sandbox.nodes:
        home = sandbox.state / "hosts" / node.name / "home"
        assert not list(home.rglob("large.bin"))
        assert not list(home.rglob(".env"))


WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORD, max_size=4), WORD)
@example(
    ["$(id)", "`id`", "a'b", 'a"b', "a\nb", "", "-n", "--", "*", "a~", "a,b", "é", "!x", "\\", "${rank}"],
    "a,b 'c' \"d\"\n$(e)",
)
def test_any_argument_and_variable_arrives_byte_for_byte(project: Project, argv: list[str], value: str) -> None:
    assume(all(shell.expand_home(word) == word for word in (*argv, value)))  # those have a test of their own
    spec = {
        "cluster": {"transport": "sandbox", "nodes": 1},
        "job": {"script": "train.py", "kind": "direct", "args": argv, "env": {"VALUE": value}},
    }
    project.write("dtctl.yaml", yaml.safe_dump(spec))
    project.write("train.py", SHOW)
    done = project.run("launch")
    assert done.code == 0, done.err
    (found,) = shown(done.out)
    assert found["argv"] == argv
    assert found["env"]["VALUE"] == value  # type: ignore[index]


def test_secrets_reach_the_worker_and_nothing_else(project: Project, sandbox: Sandbox) -> None:
    secret = "hunter2-$(id)-'x'"
    project.write("dtctl.yaml", spec_text().replace("grace_s", "secrets: [API_KEY], grace_s"))
    project.write(
        "train.py",
        "import hashlib, os, subprocess\n"
        "digest = hashlib.sha256(os.environ['API_KEY'].encode()).hexdigest()\n"
        f"assert digest == {hashlib.sha256(secret.encode()).hexdigest()!r}\n"
        "print(subprocess.run(['ps', 'axww', '-o', 'args'], capture_output=True, text=True).stdout)\n",
    )
    done = project.run("launch", "--json", "--name", project.unique, env={"API_KEY": secret})
    assert done.code == 0, done.err
    assert "hunter2" not in done.out + done.err
    for path in (project.folder / ".dtctl").rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    for node in sandbox.nodes:
        for path in (sandbox.state / "hosts" / node.name / "home").rglob("*"):
            assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    assert "hunter2" not in project.run("launch", "--dry-run", env={"API_KEY": secret}).out
    refused = project.run("launch")
    assert refused.code == 4
    assert not missing(refused.err, "API_KEY")


def test_the_dry_run_is_what_is_sent(project: Project, sandbox: Sandbox) -> None:
    project.write("dtctl.yaml", spec_text().replace("kind: direct", "kind: direct, env: {A: 'x y'}"))
    project.write("train.py", "print(1)")
    assert project.run("launch", "--dry-run", "--out", "scripts", "--name", project.unique).code == 0
    assert project.run("launch", "--name", project.unique).code == 0
    for node in sandbox.nodes:
        home = sandbox.state / "hosts" / node.name / "home"
        (sent,) = home.glob(f".dtctl/node/runs/{project.unique}/attempt-0/node.sh")
        assert sent.read_text() == (project.folder / "scripts" / f"{node.name}.sh").read_text()


def test_a_template_beside_the_spec_wins(project: Project) -> None:
    project.write("dtctl.yaml", spec_text(nodes=1))
    project.write("train.py", "print('never')")
    project.write("templates/node.sh.j2", "echo mine {{ node.name }} {{ plan.run }}\n")
    assert f"mine node1 {project.unique}" in project.run("launch", "--name", project.unique).out
    project.write("templates/node.sh.j2", "echo {{ node.nmae }}\n")
    wrong = project.run("launch")
    assert wrong.code == 5
    assert "has no attribute 'nmae'" in wrong.err


def test_two_runs_on_the_same_nodes_do_not_meet(project: Project) -> None:
    project.write("dtctl.yaml", spec_text())
    project.write(
        "train.py", "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\n"
    )
    first = project.start("launch")
    second = project.run("launch", "--set", "job.script=quick.py")
    assert second.code == 4  # no quick.py yet
    project.write("quick.py", "import sys; sys.exit(5)")
    assert project.run("launch", "--set", "job.script=quick.py").code == 8
    assert first.poll() is None
    for host in ("node1", "node2", "node3"):
        assert project.run("sandbox", "exec", host, "--", "touch", "/tmp/go").code == 0
    assert project.finish(first).code == 0
    for host in ("node1", "node2", "node3"):
        project.run("sandbox", "exec", host, "--", "rm", "/tmp/go")


@pytest.mark.parametrize("job", ["{script: t.py, kind: direct}", "{script: t.py}", "{command: [python, t.py]}"])
def test_the_python_may_lie_in_the_home_folder_of_the_node(project: Project, sandbox: Sandbox, job: str) -> None:
    for node in sandbox.nodes:
        done = project.run("sandbox", "exec", node.name, "--", "sh", "-c", f"ln -sfn {sys.prefix} ~/v")
        assert done.code == 0, done.err
    project.write("t.py", "import sys; print(sys.executable)\n")
    project.write("dtctl.yaml", f"cluster: {{transport: sandbox, python: ~/v/bin/python, slots: 1}}\njob: {job}\n")
    done = project.run("launch")
    assert done.code == 0, done.err
    # An agent of torchrun that ends after the head's prints that its store is gone, with a stack and an empty line.
    printed = [line.split()[1] for line in done.out.splitlines() if ":agent]" not in line]
    assert printed == [str(sandbox.home / "v/bin/python")] * 3
