"""Situations from public bug reports, made anew: keys that change, odd arguments, shells of an allocation."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl.sandbox import control
from dtctl.sandbox.layout import Sandbox
from tests.hosts import LIMIT_S, Project, wait_until
from tests.integration.slurm_hosts import cluster, shared

__all__ = ["cluster", "shared"]

PORT = 2308
SSHD = f"""\
Port {PORT}
ListenAddress 0.0.0.0
HostKey {{state}}/self/ssh/host_key
AuthorizedKeysFile {{folder}}/keys
PidFile {{folder}}/pid
UsePAM no
StrictModes no
UseDNS no
PermitRootLogin yes
LogLevel DEBUG1
RekeyLimit 256K 2s
"""


@pytest.fixture
def impatient(sandbox: Sandbox) -> Iterator[Path]:
    """A second SSH server on node1 that wants new keys after 256 KiB, or 2 s; the folder of its files."""
    if sandbox.rootless:
        pytest.skip("the servers of a rootless sandbox are started by its keeper alone")
    folder = Path(os.environ["DTCTL_SANDBOX_DIR"]) / f"sshd-{secrets.token_hex(3)}"
    folder.mkdir()
    node = sandbox.nodes[0]
    key = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(sandbox.identity_file)], capture_output=True, text=True, check=True
    ).stdout
    (folder / "keys").write_text(key)
    (folder / "conf").write_text(SSHD.format(state=sandbox.state, folder=folder))
    argv = ["/usr/sbin/sshd", "-E", str(folder / "log"), "-f", str(folder / "conf")]
    subprocess.run(control.enter_argv(sandbox, node, argv), check=True)
    wait_until((folder / "pid").exists, what="the server listens")
    yield folder
    end = ["sh", "-c", f"kill $(cat {folder}/pid)"]
    subprocess.run(control.enter_argv(sandbox, node, end), check=True)
    shutil.rmtree(folder)


TALK = """\
import hashlib, time
print("digest", hashlib.sha256(open("blob.bin", "rb").read()).hexdigest(), flush=True)
for i in range(60_000):
    print(f"line {i:08d} " + "x" * 90)
for i in range(6):
    print("quiet", i, flush=True)
    time.sleep(1)
"""


def test_output_and_code_are_whole_while_the_server_changes_its_keys(
    project: Project, sandbox: Sandbox, impatient: Path
) -> None:
    """As after a gigabyte, or an hour of a long run: 6 MB of code, 6 MB of output, and seconds of quiet."""
    address = sandbox.nodes[0].address
    keys = sandbox.known_hosts.read_text().splitlines()
    key = next(line.split(None, 1)[1] for line in keys if address in line.split()[0].split(","))
    known = project.write("known_hosts", f"[{address}]:{PORT} {key}\n")
    config = project.write(
        "ssh_config",
        f"Host gpu1\n  HostName {address}\n  Port {PORT}\n  User {sandbox.user}\n"
        f"  UserKnownHostsFile {known}\n  IdentityFile {sandbox.identity_file}\n",
    )
    spec = {
        "cluster": {"transport": "ssh", "nodes": ["gpu1"], "ssh_config": str(config), "python": sys.executable},
        "job": {"script": "talk.py", "kind": "direct"},
    }
    project.write("dtctl.yaml", json.dumps(spec))
    project.write("talk.py", TALK)
    (project.folder / "blob.bin").write_bytes(os.urandom(6_000_000))
    done = project.run("launch", "--yes", "--json", "--name", project.unique)
    assert done.code == 0, done.err[-2000:]
    digest = subprocess.run(["sha256sum", project.folder / "blob.bin"], capture_output=True, text=True, check=True)
    lines = project.printed(project.unique).splitlines()
    assert lines[0] == f"digest {digest.stdout.split()[0]}"
    assert lines[1:60_001] == [f"line {i:08d} {'x' * 90}" for i in range(60_000)]
    assert lines[60_001:] == [f"quiet {i}" for i in range(6)]
    assert done.done["left_behind"] == 0
    assert len(re.findall("rekeying", (impatient / "log").read_text())) > 10, "the keys were hardly changed"


SHOW = """\
import json, os, sys
own = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("T_")}
print("GOT " + json.dumps([sys.argv[1:], own], sort_keys=True), flush=True)
"""
VARIABLES = {
    "T_A": "two words", "T_B": "it's \"quoted\" and `ticked` $(id) $HOME ${X} \\n back\\slash",
    "T_C": "line one\nline two\n", "T_D": "%n %j %h 100%", "T_E": "", "T_F": "grün ★ 日本",
    "T_G": "a=b=c;d&&e|f>g<h", "T_H": "!history * ? [a-z] ~ {1..3}", "T_I": " lead and trail ",
    "T_J": '{"json": [1, "x"]}', "T_K": "tab\there",
}  # fmt: skip
ARGUMENTS = [
    "--prompt", "a photo of a \"cat\", 50% off; $HOME `x` it's", "--empty", "", "--glob=*.pt", "--nl=a\nb", "--", "-x",
    "ü★", "{1..3}", "~", "a\\b", '--json={"k": "v w"}',
]  # fmt: skip


def _escaped(text: str) -> str:
    """The text as a spec has it where no home folder is meant."""
    return re.sub(r"\A~|\$HOME", r"\\\g<0>", text)


@pytest.mark.parametrize("kind", ["direct", "torchrun"])
@pytest.mark.parametrize("transport", ["sandbox", "slurm"])
def test_arguments_and_variables_arrive_as_they_were_written(shared: Project, transport: str, kind: str) -> None:
    env = {name: _escaped(value) for name, value in VARIABLES.items()}
    spec = {
        "cluster": {"transport": transport, "nodes": 2, "slots": 1, "python": sys.executable},
        "job": {"script": "show.py", "kind": kind, "args": [*map(_escaped, ARGUMENTS)], "env": env},
    }
    shared.write("dtctl.yaml", json.dumps(spec))
    shared.write("show.py", SHOW)
    done = shared.run("launch")
    assert done.code == 0, done.err
    got = [json.loads(line.partition("GOT ")[2]) for line in done.out.splitlines() if "GOT " in line]
    assert got == [[ARGUMENTS, VARIABLES]] * 2


TRAIN = """\
import time, torch
from dtctl.runtime import TensorData, Trainer, run
def loss(model, batch):
    time.sleep(0.2)
    return ((model(batch[0]) - batch[1]) ** 2).mean()
def train(config, worker):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return Trainer(config, worker, torch.nn.Linear(8, 1), loss, TensorData(x, x.sum(1, keepdim=True))).run()
raise SystemExit(run(train, defaults={"lr": 0.1, "steps": 60, "snapshot": {"every_steps": 2}}))
"""
OF_AN_ALLOCATION = {
    "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "interactive",
}  # fmt: skip


def test_a_program_in_a_shell_of_an_allocation_is_one_process(tmp_path: Path) -> None:
    """`salloc -n4` and notebooks of a cluster have the variables of tasks that nobody has started."""
    (tmp_path / "train.py").write_text(TRAIN)
    argv = [sys.executable, "train.py", "--train.steps=4"]
    env = {**os.environ, **OF_AN_ALLOCATION}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).startswith("single on 1"), done.stdout + done.stderr


def test_two_programs_that_srun_starts_without_a_launcher_do_not_share_snapshots(shared: Project) -> None:
    """Neither knows of the other, and both would write into the same folder."""
    shared.write("train.py", TRAIN)
    argv = ["srun", "-n2", "--ntasks-per-node=2", "-N1", "--kill-on-bad-exit=0", sys.executable, "train.py"]
    done = subprocess.run(
        argv, cwd=shared.folder, env=shared.env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode != 0, done.stdout + done.stderr
    assert "snapshots" in done.stdout + done.stderr
