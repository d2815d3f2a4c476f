"""The process behind a sandbox: makes its network and hosts, and keeps them until a request to end.

When it ends, even if it is killed, the kernel ends the hosts (PR_SET_PDEATHSIG), and with them their namespaces and
cables. As an ordinary user it first creates a user and a network namespace in which it may do all this, and provides
connections into them over a unix socket. It has one thread, because it forks hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dtctl import node_facts
from dtctl.sandbox import files, host, kernel, layout, slurm
from dtctl.sandbox.layout import Sandbox, SandboxNode

SOCKET = "keeper.sock"
READY_LIMIT_S = 20.0


class SandboxDaemon:
    """The process that makes a sandbox and keeps it."""

    def __init__(self, state: Path, name: str, count: int, *, with_slurm: bool) -> None:
        self.state = state
        self.uid, self.gid = os.getuid(), os.getgid()
        self.rootless = self.uid != 0
        if self.rootless:
            kernel.unshare_namespaces(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
            kernel.map_ids(0, 0, self.uid, self.gid)
            kernel.enable_interface("lo")
        routes = subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, check=True).stdout
        network = layout.choose_network(state, layout.parse_routes(routes))
        self.netmask = str(network.netmask)
        nodes = tuple(
            SandboxNode(name=f"node{index}", address=str(network[index]), index=index, pid=0)
            for index in range(1, count + 1)
        )
        self.sandbox = Sandbox(
            name=name,
            state_dir=str(state),
            keeper=os.getpid(),
            keeper_started=node_facts.start_ticks(os.getpid()),
            rootless=self.rootless,
            user=_user_name(self.uid),
            bridge=layout.build_bridge_name(state),
            bridge_address=str(network[254]),
            nodes=nodes,
            slurm=with_slurm,
        )

    def build(self) -> None:
        """Start everything; every host answers on port 22 when this returns."""
        environ, bridge_address = slurm.build_slurm_environment(self.sandbox), self.sandbox.bridge_address
        files.write_host_files(
            self.state, self.sandbox.nodes, uid=self.uid, bridge_address=bridge_address, environ=environ
        )
        if self.sandbox.slurm:
            slurm.write_files(self.state, self.sandbox.nodes, bridge_address=bridge_address)
        bridge = self.sandbox.bridge
        _run_ip_commands(
            [
                f"link add {bridge} type bridge forward_delay 0",
                f"addr add {self.sandbox.bridge_address}/24 dev {bridge}",
                f"link set {bridge} up",
            ]
        )
        if self.sandbox.slurm:
            slurm.start_control(self.state)
        self.power_on([node.name for node in self.sandbox.nodes])

    def power_on(self, names: list[str]) -> None:
        """Start hosts that are off, all at once, and record the sandbox."""
        started: dict[str, tuple[int, int]] = {}
        for name in names:
            started[name] = self._fork_host(self.sandbox.node(name))
        pids = {name: pid for name, (pid, _) in started.items()}
        commands = []
        for name, (pid, _) in started.items():
            link = layout.link_name(self.state, self.sandbox.node(name).index)
            # The host was on before, and the kernel removes its old cable only some time later.
            if self.sandbox.node(name).pid:
                subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
            mac = layout.build_mac_address(self.state, self.sandbox.node(name).index)
            commands.append(f"link add {link} type veth peer name eth0 address {mac} netns {pid}")
            commands.append(f"link set {link} master {self.sandbox.bridge} up")
        _run_ip_commands(commands)
        for _, go in started.values():
            os.write(go, b"g")
            os.close(go)
        nodes = tuple(
            replace(node, pid=pids[node.name], started=node_facts.start_ticks(pids[node.name]))
            if node.name in pids
            else node
            for node in self.sandbox.nodes
        )
        self.sandbox = replace(self.sandbox, nodes=nodes)
        for name in names:
            _wait_for_server(self.sandbox.node(name).address)
        layout.write_sandbox_state(self.sandbox)

    def _fork_host(self, node: SandboxNode) -> tuple[int, int]:
        """Start a host's init, which waits; return its process id and the descriptor that lets it continue."""
        wait_fd, go_fd = os.pipe()
        sys.stderr.flush()
        pid = kernel.fork_into(host.NAMESPACES)
        if pid == 0:
            os.close(go_fd)
            settings = host.HostConfig(
                name=node.name,
                address=node.address,
                netmask=self.netmask,
                state=self.state,
                uid=self.uid,
                gid=self.gid,
                rootless=self.rootless,
            )
            host.main(settings, wait_fd)
        os.close(wait_fd)
        return pid, go_fd

    def serve(self) -> None:
        """Handle requests until SIGTERM: one JSON line each, `connect` or `power-on`."""
        path = self.state / SOCKET
        path.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _working_directory(self.state):
            server.bind(SOCKET)  # a relative name, since the folder's path may be longer than the address of a socket
        path.chmod(0o600)
        server.listen(512)
        while True:
            connection, _ = server.accept()
            with connection:
                try:
                    self._handle_request(connection)
                except OSError as exc:
                    _send_keeper_answer(connection, {"error": str(exc), "errno": exc.errno})
                except Exception as exc:  # noqa: BLE001 - a bad request must not end the sandbox
                    _send_keeper_answer(connection, {"error": str(exc)})

    def _handle_request(self, connection: socket.socket) -> None:
        connection.settimeout(2.0)
        request = json.loads(connection.recv(65_536))
        if request["op"] == "power-on":
            self.power_on([request["node"]])
            _send_keeper_answer(connection, {"ok": True})
        elif request["op"] == "connect" and os.fork() == 0:  # in a child process, since it may take long
            try:
                _send_connected_socket(connection, request)
            finally:
                os._exit(0)


def _send_connected_socket(connection: socket.socket, request: dict[str, object]) -> None:
    address, port, timeout_s = str(request["address"]), int(str(request["port"])), float(str(request["timeout_s"]))
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as peer:
            socket.send_fds(connection, [b'{"ok": true}'], [peer.fileno()])
    except OSError as exc:
        _send_keeper_answer(connection, {"error": str(exc), "errno": exc.errno})


def _send_keeper_answer(connection: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client may have ended
        connection.sendall(json.dumps(message).encode())


def _run_ip_commands(commands: list[str]) -> None:
    """Run commands of ip(8) in one process."""
    text = "".join(command + "\n" for command in commands)
    done = subprocess.run(["ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")


def _wait_for_server(address: str) -> None:
    """Wait until a process listens on port 22 of `address`."""
    import time

    deadline = time.monotonic() + READY_LIMIT_S
    # The first wait is short: a packet that is sent before the cable is up is lost, and TCP repeats it only after 1 s.
    patience_s = 0.02
    while True:
        try:
            socket.create_connection((address, 22), timeout=patience_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
            patience_s = min(1.0, patience_s * 1.5)


def _user_name(uid: int) -> str:
    import pwd

    return pwd.getpwuid(uid).pw_name


@contextlib.contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    """Change to a folder for the duration of a block."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def main() -> None:
    """`python -m dtctl.sandbox.keeper STATE NAME COUNT [slurm]`, with a descriptor to report on as standard output."""
    state, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        keeper = SandboxDaemon(state, name, count, with_slurm=sys.argv[4:] == ["slurm"])
        keeper.build()
    except Exception as exc:  # noqa: BLE001 - reported to the command that waits for the sandbox
        print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), flush=True)  # noqa: T201 - a pipe, not a person
        os._exit(1)
    signal.signal(signal.SIGCHLD, lambda *_: _reap_ended_children())
    print(json.dumps({"ok": True}), flush=True)  # noqa: T201 - a pipe, not a person
    os.close(1)
    keeper.serve()


def _reap_ended_children() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
