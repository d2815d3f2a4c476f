"""Every way in which `ssh` logs in to a node, a launch does; where `ssh` is refused, a launch says why.

Each set-up is a second SSH server on a virtual host and a configuration of the client. `ssh -o BatchMode=yes gpu1 true`
decides what is right.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox, SandboxNode
from dtctl.transport import openssh
from dtctl.transport.base import Target
from dtctl.transport.openssh import LOG_LIMIT, OpenSshTransport
from tests.hosts import Project, wait_until, workers

PORTS = itertools.count(2300)
SERVER: Final = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile {folder}/pid
UsePAM no
StrictModes no
UseDNS no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="second SSH servers on hosts need root")
pytestmark = needs_root


def keygen(*arguments: str | Path) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, arguments)], check=True, stdin=subprocess.DEVNULL)


@dataclass
class Server:
    """An SSH server on a host."""

    address: str
    port: int
    host_key: str
    """Public."""

    @property
    def name(self) -> str:
        return f"[{self.address}]:{self.port}"


@dataclass
class Rig:
    """Keys, servers and the client's files of one test."""

    sandbox: Sandbox
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    _agents: list[str] = field(default_factory=list)
    _servers: list[tuple[SandboxNode, str]] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def key(self, name: str, passphrase: str = "") -> Path:
        """Make a key of the user's."""
        keygen("-t", "ed25519", "-N", passphrase, "-C", name, "-f", self.folder / name)
        return self.folder / name

    def sh(self, node: SandboxNode, script: str, stdin: str = "") -> str:
        argv = control.enter_argv(self.sandbox, node, ["sh", "-c", script])
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=True).stdout

    def serve(
        self, node_index: int, *keys: Path, options: str = "", authorized: str = "", is_known: bool = True,
        files: Mapping[str, str] | None = None,
    ) -> Server:  # fmt: skip
        """Start a server that lets these keys in.

        Args:
            node_index: from 0.
            keys: private ones.
            options: more of sshd_config; `{folder}` is its own folder.
            authorized: options before each key in authorized_keys.
            is_known: whether the client knows its host key.
            files: more files of its folder.
        """
        node, port = self.sandbox.nodes[node_index], next(PORTS)
        folder = f"/tmp/sshd-{port}"  # of the host's own
        lines = "".join(f"{authorized} {key.with_suffix('.pub').read_text()}" for key in keys)
        self.sh(node, f"mkdir -p {folder} && ssh-keygen -q -t ed25519 -N '' -f {folder}/host_key")
        self.sh(node, f"cat > {folder}/authorized", lines)
        for name, text in (files or {}).items():
            self.sh(node, f"cat > {folder}/{name}; chmod 600 {folder}/{name}", text)
        config = SERVER.format(port=port, folder=folder)
        self.sh(node, f"cat > {folder}/config", options.replace("{folder}", folder) + "\n" + config)
        # It goes into the background before it listens, and writes the number of its process after that.
        self.sh(node, f"/usr/sbin/sshd -f {folder}/config -E {folder}/log")
        self.sh(node, f"timeout 30 sh -c 'until [ -s {folder}/pid ]; do sleep 0.02; done'")
        self._servers.append((node, folder))
        public = " ".join(self.sh(node, f"cat {folder}/host_key.pub").split()[:2])
        server = Server(node.address, port, public)
        if is_known:
            self.known.append(f"{server.name} {public}")
        return server

    def agent(self, *keys: Path, passphrase: str = "") -> str:
        """Start an agent with these keys; return its socket."""
        socket = self.folder / f"agent-{len(self._processes)}"
        self._processes.append(subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL))
        wait_until(socket.exists, 10, "an agent")
        ask = self.folder / "askpass"
        ask.write_text(f"#!/bin/sh\necho {passphrase}\n")
        ask.chmod(0o700)
        environ = {**os.environ, "SSH_AUTH_SOCK": str(socket), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env=environ, check=True, stdin=subprocess.DEVNULL)
        return str(socket)

    def configure(self, *blocks: str) -> Path:
        """Write the client's configuration and known hosts."""
        (self.folder / "known").write_text("".join(f"{line}\n" for line in self.known))
        path = self.folder / "config"
        default = f"Host *\n User {self.sandbox.user}\n UserKnownHostsFile {self.folder / 'known'}\n"
        path.write_text("\n".join(blocks) + "\n" + default)
        return path

    def ssh(self, config: Path, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ssh", "-F", str(config), *argv], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, **self.env}, start_new_session=True, timeout=60,
        )  # fmt: skip

    def start(self, config: Path, *argv: str) -> subprocess.Popen[bytes]:
        """Start an ssh that stays."""
        process = subprocess.Popen(
            ["ssh", "-F", str(config), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, **self.env}, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        for node, folder in self._servers:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.sh(node, f"kill $(cat {folder}/pid); rm -rf {folder}")


@pytest.fixture
def rig(sandbox: Sandbox, tmp_path: Path) -> Iterator[Rig]:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    made = Rig(sandbox, folder, {"SSH_AUTH_SOCK": ""})
    yield made
    made.close()


def host(server: Server, *lines: str, name: str = "gpu1") -> str:
    """A block of ssh_config for a server."""
    return "".join(
        f"{line}\n" for line in (f"Host {name}", f"HostName {server.address}", f"Port {server.port}", *lines)
    )


# -- set-ups: each returns the client's configuration -------------------------------------------------------------


def plain(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}"))


def locked_key_in_agent(rig: Rig) -> Path:
    key = rig.key("one", "secret")
    rig.env["SSH_AUTH_SOCK"] = rig.agent(key, passphrase="secret")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", "IdentitiesOnly yes"))


def locked_key(rig: Rig) -> Path:
    key = rig.key("one", "secret")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}"))


def _many_keys(rig: Rig, *lines: str) -> Path:
    key, others = rig.key("one"), [rig.key(f"other{number}") for number in range(6)]
    rig.env["SSH_AUTH_SOCK"] = rig.agent(*others, key)
    return rig.configure(host(rig.serve(0, key, options="MaxAuthTries 3"), f"IdentityFile {key}", *lines))


def many_keys_one_named(rig: Rig) -> Path:
    return _many_keys(rig, "IdentitiesOnly yes")


def many_keys_none_named(rig: Rig) -> Path:
    key, others = rig.key("one"), [rig.key(f"other{number}") for number in range(6)]
    rig.env["SSH_AUTH_SOCK"] = rig.agent(*others)
    return rig.configure(host(rig.serve(0, key, options="MaxAuthTries 3"), f"IdentityFile {key}"))


def identity_agent(rig: Rig) -> Path:
    key = rig.key("one")
    socket = rig.agent(key)
    server = rig.serve(0, key)
    key.unlink()
    return rig.configure(host(server, f"IdentityAgent {socket}"))


def _certified(rig: Rig) -> tuple[Path, Server]:
    authority, key = rig.key("authority"), rig.key("one")
    keygen("-s", authority, "-I", "me", "-n", rig.sandbox.user, key.with_suffix(".pub"))
    public = authority.with_suffix(".pub").read_text()
    server = rig.serve(0, options="TrustedUserCAKeys {folder}/authority", files={"authority": public})
    (rig.folder / "one-cert.pub").rename(rig.folder / "certificate")
    return key, server


def certificate(rig: Rig) -> Path:
    key, server = _certified(rig)
    return rig.configure(host(server, f"IdentityFile {key}", f"CertificateFile {rig.folder / 'certificate'}"))


def certificate_not_named(rig: Rig) -> Path:
    key, server = _certified(rig)
    return rig.configure(host(server, f"IdentityFile {key}"))


def public_key_named(rig: Rig) -> Path:
    key, other = rig.key("one"), rig.key("other")
    rig.env["SSH_AUTH_SOCK"] = rig.agent(other, key)
    server = rig.serve(0, key)
    key.unlink()
    return rig.configure(host(server, f"IdentityFile {key.with_suffix('.pub')}", "IdentitiesOnly yes"))


TWO_KEYS: Final = "AuthenticationMethods publickey,publickey"


def two_keys(rig: Rig) -> Path:
    one, two = rig.key("one"), rig.key("two")
    return rig.configure(host(rig.serve(0, one, two, options=TWO_KEYS), f"IdentityFile {one}", f"IdentityFile {two}"))


def second_factor(rig: Rig) -> Path:
    key = rig.key("one")
    server = rig.serve(0, key, options="AuthenticationMethods publickey,password\nPasswordAuthentication yes")
    return rig.configure(host(server, f"IdentityFile {key}"))


def master(rig: Rig) -> Path:
    """A connection that the user has opened with what the configuration alone does not have."""
    one, two = rig.key("one"), rig.key("two")
    server = rig.serve(0, one, two, options=TWO_KEYS)
    config = rig.configure(host(server, f"IdentityFile {one}", f"ControlPath {rig.folder}/m"))
    rig.start(config, "-M", "-N", "-i", str(two), "gpu1")
    wait_until((rig.folder / "m").exists, 10, "a master")
    return config


def master_at_jump_host(rig: Rig) -> Path:
    one, two = rig.key("one"), rig.key("two")
    jump, server = rig.serve(0, one, two, options=TWO_KEYS), rig.serve(1, one)
    config = rig.configure(
        host(jump, f"IdentityFile {one}", f"ControlPath {rig.folder}/m", name="login"),
        host(server, f"IdentityFile {one}", "ProxyJump login"),
    )
    rig.start(config, "-M", "-N", "-i", str(two), "login")
    wait_until((rig.folder / "m").exists, 10, "a master")
    return config


def second_factor_at_jump_host(rig: Rig) -> Path:
    one, two = rig.key("one"), rig.key("two")
    jump, server = rig.serve(0, one, two, options=TWO_KEYS), rig.serve(1, one)
    return rig.configure(
        host(jump, f"IdentityFile {one}", name="login"), host(server, f"IdentityFile {one}", "ProxyJump login")
    )


def _host_authority(rig: Rig, names: str) -> Path:
    key, authority = rig.key("one"), rig.key("authority")
    server = rig.serve(0, key, is_known=False)
    node, folder = rig._servers[-1]
    (rig.folder / "host.pub").write_text(server.host_key + "\n")
    keygen("-s", authority, "-I", "host", "-h", "-n", names.format(server.address), rig.folder / "host.pub")
    rig.sh(node, f"cat > {folder}/host_key-cert.pub", (rig.folder / "host-cert.pub").read_text())
    rig.sh(node, f"echo HostCertificate {folder}/host_key-cert.pub >> {folder}/config; kill -HUP $(cat {folder}/pid)")
    public = " ".join(authority.with_suffix(".pub").read_text().split()[:2])
    rig.known.append(f"@cert-authority * {public}")
    config = rig.configure(host(server, f"IdentityFile {key}"))
    wait_until(lambda: "refused" not in rig.ssh(config, "-o", "BatchMode=yes", "gpu1", "true").stderr, 10, "a restart")
    return config


def host_authority(rig: Rig) -> Path:
    return _host_authority(rig, "{}")


def host_authority_for_another_host(rig: Rig) -> Path:
    return _host_authority(rig, "elsewhere")


def _hardened(rig: Rig, options: str) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key, options=options), f"IdentityFile {key}"))


def chacha20_only(rig: Rig) -> Path:
    return _hardened(rig, "Ciphers chacha20-poly1305@openssh.com")


def sntrup761_only(rig: Rig) -> Path:
    return _hardened(rig, "KexAlgorithms sntrup761x25519-sha512@openssh.com")


def umac_only(rig: Rig) -> Path:
    return _hardened(rig, "Ciphers aes256-ctr\nMACs umac-128-etm@openssh.com")


def jump_host(rig: Rig) -> Path:
    one, two = rig.key("one"), rig.key("two")
    jump, server = rig.serve(0, two), rig.serve(1, one)
    return rig.configure(
        host(jump, f"IdentityFile {two}", name="login"), host(server, f"IdentityFile {one}", "ProxyJump login")
    )


def two_jump_hosts(rig: Rig) -> Path:
    key = rig.key("one")
    first, second, server = rig.serve(0, key), rig.serve(1, key), rig.serve(2, key)
    return rig.configure(
        host(first, f"IdentityFile {key}", name="outer"),
        host(second, f"IdentityFile {key}", "ProxyJump outer", name="inner"),
        host(server, f"IdentityFile {key}", "ProxyJump inner"),
    )


def jump_host_unknown(rig: Rig) -> Path:
    key = rig.key("one")
    jump, server = rig.serve(0, key, is_known=False), rig.serve(1, key)
    return rig.configure(
        host(jump, f"IdentityFile {key}", name="login"), host(server, f"IdentityFile {key}", "ProxyJump login")
    )


def behind_jump_host_unknown(rig: Rig) -> Path:
    key = rig.key("one")
    jump, server = rig.serve(0, key), rig.serve(1, key, is_known=False)
    return rig.configure(
        host(jump, f"IdentityFile {key}", name="login"), host(server, f"IdentityFile {key}", "ProxyJump login")
    )


def proxy_command(rig: Rig) -> Path:
    key = rig.key("one")
    jump, server = rig.serve(0, key), rig.serve(1, key)
    proxy = f"ProxyCommand ssh -F {rig.folder}/config -W %h:%p login"
    return rig.configure(host(jump, f"IdentityFile {key}", name="login"), host(server, f"IdentityFile {key}", proxy))


def host_key_alias(rig: Rig) -> Path:
    key = rig.key("one")
    server = rig.serve(0, key, is_known=False)
    rig.known.append(f"cluster {server.host_key}")
    return rig.configure(host(server, f"IdentityFile {key}", "HostKeyAlias cluster"))


def match_exec(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(f'Match host gpu1 exec "test %n = gpu1"\nIdentityFile {key}', host(rig.serve(0, key)))


def include(rig: Rig) -> Path:
    key = rig.key("one")
    (rig.folder / "more").write_text(host(rig.serve(0, key), f"IdentityFile {key}"))
    return rig.configure(f"Include {rig.folder}/more")


def banner(rig: Rig) -> Path:
    key = rig.key("one")
    text = "".join(f"Authorized use only, line {number}.\n" for number in range(200))
    server = rig.serve(0, key, options="Banner {folder}/banner", files={"banner": text})
    return rig.configure(host(server, f"IdentityFile {key}"))


def rekeying(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key, options="RekeyLimit 64K"), f"IdentityFile {key}", "RekeyLimit 32K"))


def forced_command(rig: Rig) -> Path:
    key = rig.key("one")
    forced = 'command="exec sh -c \\"$SSH_ORIGINAL_COMMAND\\"",restrict'
    return rig.configure(host(rig.serve(0, key, authorized=forced), f"IdentityFile {key}"))


def terminal_wanted(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", "RequestTTY force"))


def persistent_master_wanted(rig: Rig) -> Path:
    key = rig.key("one")
    lines = ("ControlMaster auto", f"ControlPath {rig.folder}/m", "ControlPersist no")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", *lines))


def forwardings(rig: Rig) -> Path:
    key = rig.key("one")
    lines = ("LocalForward 1 127.0.0.1:1", "ForwardAgent yes", "ExitOnForwardFailure no")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", *lines))


def unknown(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key, is_known=False), f"IdentityFile {key}"))


def changed(rig: Rig) -> Path:
    key = rig.key("one")
    server = rig.serve(0, key, is_known=False)
    rig.known.append(f"{server.name} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}")
    return rig.configure(host(server, f"IdentityFile {key}"))


def revoked(rig: Rig) -> Path:
    key = rig.key("one")
    server = rig.serve(0, key)
    rig.known.append(f"@revoked {server.name} {server.host_key}")
    return rig.configure(host(server, f"IdentityFile {key}"))


def nothing_listens(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(Server(rig.sandbox.nodes[0].address, 2299, ""), f"IdentityFile {key}"))


def bad_configuration(rig: Rig) -> Path:
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", "NoSuchKey yes"))


def too_many_logins(rig: Rig) -> Path:
    """A server that drops most connections while others log in."""
    key = rig.key("one")
    return rig.configure(host(rig.serve(0, key, options="MaxStartups 1:50:2"), f"IdentityFile {key}"))


def ipv6(rig: Rig) -> Path:
    """A node that has an IPv6 address only, as far as the client knows."""
    key = rig.key("one")
    server, (node, _) = rig.serve(0, key, is_known=False), rig._servers[-1]
    rig.sh(node, f"ip -6 address replace fd77::{node.index}/64 dev eth0 nodad")
    bridge = ["ip", "-6", "address", "replace", "fd77::ffff/64", "dev", rig.sandbox.bridge, "nodad"]
    subprocess.run(bridge, check=True)
    server.address = f"fd77::{node.index}"
    rig.known.append(f"{server.name} {server.host_key}")
    return rig.configure(host(server, f"IdentityFile {key}"))


LOGS_IN: Final = (
    plain, locked_key_in_agent, many_keys_one_named, identity_agent, certificate, public_key_named, two_keys, master,
    master_at_jump_host, host_authority, chacha20_only, sntrup761_only, umac_only, jump_host, two_jump_hosts,
    proxy_command, host_key_alias, match_exec, include, banner, rekeying, forced_command, terminal_wanted,
    persistent_master_wanted, forwardings, too_many_logins, ipv6,
)  # fmt: skip
REFUSED: Final[dict[Callable[[Rig], Path], str]] = {
    locked_key: "ssh-add",
    many_keys_none_named: "cluster.identity_file",
    certificate_not_named: "Permission denied",
    second_factor: "second factor",
    second_factor_at_jump_host: "jump host",
    host_authority_for_another_host: "is unknown",
    jump_host_unknown: "jump host",
    behind_jump_host_unknown: "log in once by hand",
    unknown: ">> /",
    changed: "has changed",
    revoked: "revoked",
    nothing_listens: "refuses connections",
    bad_configuration: "nosuchkey",
}
SPEC: Final = """\
cluster: {{transport: ssh, nodes: [gpu1], ssh_config: {config}, python: /usr/bin/python3}}
job: {{name: test, command: "echo hello from the node", kind: command}}
"""


@pytest.mark.parametrize("set_up", LOGS_IN, ids=lambda one: one.__name__)
def test_a_launch_logs_in_where_ssh_does(rig: Rig, project: Project, set_up: Callable[[Rig], Path]) -> None:
    config = set_up(rig)
    done = rig.ssh(config, "-o", "BatchMode=yes", "gpu1", "true")
    assert done.returncode == 0, done.stderr
    project.write("dtctl.yaml", SPEC.format(config=config))
    project.write("data.bin", "x" * 400_000)
    before = {path.name for path in rig.folder.iterdir()}
    launched = project.run("launch", "--yes", env=rig.env)
    assert launched.code == 0, launched.out + launched.err
    assert "hello from the node" in launched.out
    assert {path.name for path in rig.folder.iterdir()} == before, "a launch leaves no connection behind"


@pytest.mark.parametrize("set_up", REFUSED, ids=lambda one: one.__name__)
def test_a_launch_says_why_where_ssh_is_refused(rig: Rig, project: Project, set_up: Callable[[Rig], Path]) -> None:
    config = set_up(rig)
    assert rig.ssh(config, "-o", "BatchMode=yes", "gpu1", "true").returncode == 255
    project.write("dtctl.yaml", SPEC.format(config=config))
    launched = project.run("launch", "--yes", env=rig.env)
    assert launched.code == 6, launched.out + launched.err
    words = re.sub(r"\s+", " ", launched.err)
    assert REFUSED[set_up] in words, launched.err
    assert "Traceback" not in launched.err


@pytest.mark.slow
@pytest.mark.parametrize("set_up", [*LOGS_IN, *REFUSED], ids=lambda one: one.__name__)
def test_the_doctor_agrees(rig: Rig, project: Project, set_up: Callable[[Rig], Path]) -> None:
    config = set_up(rig)
    logs_in = rig.ssh(config, "-o", "BatchMode=yes", "gpu1", "true").returncode == 0
    project.write("dtctl.yaml", SPEC.format(config=config))
    looked = project.run("doctor", "--yes", "--json", env=rig.env)
    assert (looked.code == 0) == logs_in, looked.out + looked.err


@pytest.mark.parametrize("client", ["openssh", "paramiko"])
def test_a_key_that_a_user_accepts_is_not_accepted_by_a_launch(rig: Rig, project: Project, client: str) -> None:
    """Who writes `StrictHostKeyChecking no` for himself has not said so for a launch on hundreds of nodes."""
    key = rig.key("one")
    server = rig.serve(0, key, is_known=False)
    config = rig.configure(host(server, f"IdentityFile {key}", "StrictHostKeyChecking no"))
    project.write("dtctl.yaml", SPEC.format(config=config).replace("cluster: {", f"cluster: {{ssh: {client}, "))
    launched = project.run("launch", "--yes", env=rig.env)
    assert launched.code == 6, launched.out + launched.err
    assert "is unknown" in launched.err
    assert "SHA256:" in launched.err
    assert not (rig.folder / "known").read_text(), "nothing was learnt"


def test_the_death_of_a_shared_connection_ends_the_run(rig: Rig, project: Project) -> None:
    config = master(rig)
    text = SPEC.format(config=config).replace("echo hello from the node", "sleep 300")
    project.write("dtctl.yaml", text)
    process = project.start("launch", "--yes", "--name", project.unique)
    events = project.folder / ".dtctl" / "runs" / project.unique / "events.jsonl"
    wait_until(lambda: events.exists() and "started" in events.read_text(), 30, "workers")
    rig._processes[-1].terminate()
    done = project.finish(process)
    assert done.code == 8, done.out + done.err
    assert "ControlMaster" in done.err + done.out, done.err


def test_paramiko_is_not_imported_where_there_is_an_ssh(rig: Rig, project: Project) -> None:
    trap = rig.folder / "trap"
    trap.mkdir()
    (trap / "paramiko.py").write_text("raise SystemExit('paramiko was imported')\n")
    project.write("dtctl.yaml", SPEC.format(config=plain(rig)))
    path = os.pathsep.join(filter(None, [str(trap), os.environ.get("PYTHONPATH")]))
    project.env = project.env | {"PYTHONPATH": path}
    for command in (
        ["launch", "--yes", "--name", project.unique],
        ["doctor"],
        ["stop", project.unique],
        ["clean", "--yes"],
    ):
        done = project.finish(project.start(*command))
        assert "paramiko" not in done.out + done.err, command
        assert done.code == 0, done.err


def target_of(config: Path) -> Target:
    return Target(name="gpu1", address="gpu1", ssh_config=str(config))


def test_ssh_does_not_wait_for_its_log_to_be_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs each exchange of keys; these are many in a connection that lasts for weeks."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    key = rig.key("one")
    config = rig.configure(host(rig.serve(0, key), f"IdentityFile {key}", "RekeyLimit 16K"))
    connection = OpenSshTransport().connect(target_of(config))
    stream = connection.open("exec head -c 20000000 /dev/zero")
    size = 0
    while data := stream.read(1 << 16):
        size += len(data)
    assert size == 20_000_000
    assert stream.exit_status(60) == 0
    assert len(connection._streams[0]._login.words.log) < 2 * LOG_LIMIT
    connection.close()


def test_a_login_that_was_not_used_ends_on_a_node_whose_link_was_cut(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    monkeypatch.setattr(openssh, "COMMAND_LIMIT_S", 5)
    node = rig.sandbox.nodes[0]
    transport = OpenSshTransport([target_of(plain(rig))])

    def waiting() -> list[str]:
        return [line for line in workers(node).values() if "echo dtctl-" in line]

    wait_until(waiting, what="the shell on the node waits")
    faults.disconnect_host(rig.sandbox, node, None)
    faults.write_recorded_faults(rig.sandbox, ["cut node1"])
    del transport
    time.sleep(1)
    assert waiting(), "nothing tells it that the link was cut"
    wait_until(lambda: not waiting(), 10, "it ends by itself")
    assert "timeout" not in " ".join(workers(node).values())


def test_a_login_that_is_too_old_is_begun_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    monkeypatch.setattr(openssh, "COMMAND_LIMIT_S", 2)
    monkeypatch.setattr(openssh, "COMMAND_MARGIN_S", 1)
    target = target_of(plain(rig))
    transport = OpenSshTransport([target])
    time.sleep(3)
    connection = transport.connect(target)
    for word in ("one", "two", "three"):
        time.sleep(3)
        stream = connection.open(f"echo {word}")
        assert stream.read(100) == f"{word}\n".encode()
        assert stream.exit_status(60) == 0
    connection.close()
