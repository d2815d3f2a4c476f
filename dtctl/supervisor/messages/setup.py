"""Messages before a run starts, and after it. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import Record, flag, integer, list_of, nullable, number, prose, text, value
from dtctl.schema import address as numeric_address
from dtctl.schema import path as printable_path
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, PROCESSES, WORKERS, Message

RUNS = 1000
"""Most runs of one node in one list; the newest."""


class Hello(Message):
    """The first message to a node that is to be prepared."""

    op = "hello"
    ports: list[int] = value(list_of(PORT), default=[])
    """Candidates for the rendezvous, in order of preference; empty on all nodes but the head."""
    environment: str = value(text(64), default="")
    """Digest of the environment that the job needs; empty: none."""


class PushTree(Message):
    """Keep this tree of files, and report its missing parts."""

    op = "push"
    tree: str = value(text(64))
    """Digest of the tree."""
    store: str = value(text(8), default="code")
    """Folder of the workdir: `code`, or `data`, which is kept until the user removes it."""


class PushManifestEnd(Message):
    """The list of files was sent."""

    op = "push-manifest-end"


class PushEnd(Message):
    """The contents of files were sent."""

    op = "push-end"


class PushRelay(Message):
    """Contents come in blocks, perhaps from other nodes; the digests of the blocks follow, then PushManifestEnd."""

    op = "push-relay"
    certificate: str = value(text(1 << 16))
    """Certificate of the run, PEM; its nodes authenticate each other with it."""
    key: str = value(text(1 << 16))
    """Private key of the run, PEM."""


class PushSource(Message):
    """Fetch the blocks that are missing from this node."""

    op = "push-source"
    address: str = value(numeric_address, default="")
    port: int = value(PORT, default=0)
    """0: none; the blocks follow over this link, then PushEnd."""


class DataLink(Record):
    """Files in addition to the code that appear in the working folder."""

    to: str = value(NAME)
    """Path in there."""
    tree: str = value(text(64), default="")
    """Digest of the tree that was brought; empty: the node has had the files."""
    path: str = value(NAME, default="")
    """A file of the tree, empty for all of it; or where the node has the files, which may begin with `~`."""


class EnvironmentOrder(Record):
    """The environment that a node makes unless it has it; see dtctl/supervisor/environments.py."""

    digest: str = value(text(64))
    tree: str = value(text(64), default="")
    """Digest of the tree with the lock and the wheels that were brought; empty: the environment has to be there."""
    uv: str = value(text(64), default="")
    """Digest of the tree with uv, where it was brought."""
    lock: str = value(NAME, default="")
    """Name of the lock in the tree."""
    python: str = value(text(16), default="")
    """Version: 3.12."""
    machine: str = value(text(40), default="")
    """Processor that the lock was made for."""


class Prepare(Message):
    """Check now whatever would make the start fail."""

    op = "prepare"
    run: str = value(NAME)
    fresh: bool = value(flag)
    """True if the run is new to this node."""
    cwd: str = value(NAME)
    """Folder of the job's code."""
    pushed: bool = value(flag, default=True)
    """True if it was pushed there; else it is the user's own, and may begin with `~`."""
    shared: bool = value(flag, default=False)
    """True if it is one folder for all nodes, in which the workers start."""
    files: list[str] = value(list_of(NAME))
    """Files that have to exist."""
    programs: list[str] = value(list_of(NAME))
    path: str = value(NAME, default="")
    """Folder in which programs are looked for before PATH."""
    outputs: list[str] = value(list_of(NAME), default=[])
    """Paths in the working folder that are worth keeping."""
    earlier: str = value(NAME, default="")
    """Run whose outputs this run continues."""
    replicated: list[str] = value(list_of(NAME), default=[])
    """Folders in the working folder whose files all nodes have (`job.shared`)."""
    data: list[DataLink] = value(list_of(DataLink.parse), default=[])
    environment: EnvironmentOrder | None = value(nullable(EnvironmentOrder.parse), default=None)


class Sweep(Message):
    """End a run whose launcher is gone."""

    op = "sweep"
    run: str = value(NAME)
    token: str = value(NAME)
    grace_s: float = value(number)
    by: str = value(NAME, default="")
    """User and machine that asked for it, if that is not the launcher's machine."""


class NodeDescription(Message):
    """Description of a node before a job starts on it."""

    op = "hello"
    gpus: int = value(integer(0, WORKERS))
    cores: int = value(integer(0, 1 << 16), default=0)
    """Processors that its processes may use; 0: not known."""
    address: str = value(numeric_address)
    """Address of the node that the control machine connected to; empty when not known."""
    port: int = value(PORT)
    """The first of the candidates that is free; 0: none, or none was named."""
    python: str = value(text(40), default="")
    host: str = value(text(255), default="")
    """Host name of the machine; empty when not known."""
    workdir: str = value(NAME, default="")
    running: list[str] = value(list_of(prose, RUNS), default=[])
    """Runs of this user that are under way here already."""
    machine: str = value(text(40), default="")
    """Processor architecture: x86_64."""
    has_environment: bool = value(flag, default=False)
    """True if it has the environment that was asked about."""
    has_uv: bool = value(flag, default=False)
    """True if it has uv; not looked for where it has the environment, or none was asked about."""
    has_glibc: bool = value(flag, default=True)
    """True if programs for glibc run there; found out where uv is missing."""


class PushState(Message):
    """State of a push: have, want-manifest, need, blocks, got, source-failed, done or error."""

    op = "push"
    state: str = value(text(40))
    path: str = value(printable_path, default="")
    """have, done: the folder of the tree."""
    digest: str = value(text(64), default="")
    """done: of the tree."""
    indexes: list[int] = value(list_of(COUNT, 10_000_000), default=[])
    """need: files of the manifest whose contents are to be sent."""
    blocks: list[int] = value(list_of(COUNT, 10_000_000), default=[])
    """blocks: those that are missing here, by their number."""
    address: str = value(numeric_address, default="")
    """blocks: where this node serves them; empty when not known."""
    port: int = value(PORT, default=0)
    """blocks: 0: it serves none."""
    count: int = value(COUNT, default=0)
    """got: blocks that came from other nodes so far."""
    code: str = value(text(40), default="")
    """error: as in Refusal. source-failed: unreachable, digest or lost. blocks: no-ssl, or empty."""
    message: str = value(prose, default="")


class EnvironmentProgress(Message):
    """Progress of the environment of a node."""

    op = "environment"
    text: str = value(prose)


class Ready(Message):
    """The run may be started on this node."""

    op = "ready"


class Swept(Message):
    """A run's processes were ended."""

    op = "swept"
    found: int = value(PROCESSES)
    left: int = value(PROCESSES)
