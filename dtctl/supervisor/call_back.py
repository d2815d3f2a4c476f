"""Task of a job step that connects to the launcher and becomes the command that it receives. Stdlib only, Python 3.8.

srun merges the outputs of all tasks of a step, so each task needs its own connection for frames. Both ends prove that
they have the key of the step, which srun passes on standard input: other users of the node could read an argument.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import struct

NONCE_BYTES = 16
PROOF_BYTES = 32
LENGTH = struct.Struct("!I")
CONNECT_S = 5.0
"""Seconds in which the launcher has to accept the connection; after them, a firewall probably drops the packets."""


def compute_proof(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of some parts, each with its length."""
    return hmac.new(key, b"".join(LENGTH.pack(len(part)) + part for part in parts), "sha256").digest()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        OSError: the other end closes before that, or nothing arrives within the socket's time limit.
    """
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data


def receive_command(connection: socket.socket, key: bytes, node: str, task: int) -> str:
    """Prove to the launcher that this is a node's task; return the launcher's command after its own proof.

    Raises:
        OSError: the connection is lost, or the other end does not have the key.
    """
    challenge, own = receive_exactly(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
    name = json.dumps({"node": node, "task": task}).encode()
    connection.sendall(own + LENGTH.pack(len(name)) + name + compute_proof(key, b"task", challenge, own, name))
    connection.settimeout(None)  # A spare node waits until it is needed.
    size = LENGTH.unpack(receive_exactly(connection, LENGTH.size))[0]
    command = receive_exactly(connection, size)
    proof = receive_exactly(connection, PROOF_BYTES)
    if not hmac.compare_digest(proof, compute_proof(key, b"launcher", own, challenge, command)):
        raise OSError("the other end does not have the key of this job step")
    return command.decode()


def main(order: dict) -> None:  # type: ignore[type-arg]  # typing is slow to import on a node
    """Connect to the launcher by the port and the key of the order, and become the command that it sends."""
    # Slurm sends the warning of the time limit to all tasks; that of a spare node may still wait for its command.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    address = os.environ["SLURM_LAUNCH_NODE_IPADDR"], order["port"]
    try:
        connection = socket.create_connection(address, timeout=CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # Detect a loss of the launcher's machine.
        task = int(os.environ["SLURM_PROCID"])
        command = receive_command(connection, bytes.fromhex(order["key"]), os.environ["SLURMD_NODENAME"], task)
    except OSError as exc:
        raise SystemExit("no connection to the launcher at %s port %d: %s" % (*address, exc)) from None
    signal.signal(signal.SIGUSR1, before)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.execv("/bin/sh", ["/bin/sh", "-c", command])
