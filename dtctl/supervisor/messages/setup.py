"""Messages before a run starts, and after it. Used by both ends; stdlib only, Python 3.8."""

from __future__ import annotations

from dtctl.schema import (
    Record,
    check_flag,
    check_number,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_text_check,
    mapping_of,
)
from dtctl.schema import check_address as numeric_address
from dtctl.schema import check_path as printable_path
from dtctl.supervisor.messages.base import COUNT, NAME, PORT, PROCESSES, WORKERS, Message

RUNS = 1000
"""Most runs of one node in one list, which has the newest."""


class Hello(Message):
    """First message to a node that will be prepared."""

    op = "hello"
    ports: list[int] = define_record_key(list_of(PORT), default=[])
    """Candidate ports for the rendezvous, in order of preference; empty for all nodes but the head."""
    environment: str = define_record_key(make_text_check(64), default="")
    """Digest of the environment that the job needs; empty: none."""


class PushTree(Message):
    """Request to store a tree of files, and to report its missing parts."""

    op = "push"
    tree: str = define_record_key(make_text_check(64))
    """Digest of the tree."""
    store: str = define_record_key(make_text_check(8), default="code")
    """Folder of the workdir: `code`, or `data`, whose trees are kept until the user removes them."""


class PushManifestEnd(Message):
    """Report: the list of files was sent."""

    op = "push-manifest-end"


class PushEnd(Message):
    """Report: the contents of files were sent."""

    op = "push-end"


class PushRelay(Message):
    """Request to get contents in blocks, also from other nodes; digests of blocks and PushManifestEnd follow."""

    op = "push-relay"
    certificate: str = define_record_key(make_text_check(1 << 16))
    """Certificate of the run as PEM, with which the nodes of the run authenticate each other."""
    key: str = define_record_key(make_text_check(1 << 16))
    """Private key of the run as PEM."""


class PushSource(Message):
    """Order to fetch the missing blocks from this address."""

    op = "push-source"
    address: str = define_record_key(numeric_address, default="")
    port: int = define_record_key(PORT, default=0)
    """Port of the serving node; 0: the blocks follow over this link, then PushEnd."""


class DataLink(Record):
    """Files in addition to the code that appear in the working folder."""

    to: str = define_record_key(NAME)
    """Path of the files in the working folder."""
    tree: str = define_record_key(make_text_check(64), default="")
    """Digest of the pushed tree; empty: the node has the files already."""
    path: str = define_record_key(NAME, default="")
    """Path of a file in the tree, empty for the whole tree; without a tree, path on the node, which may begin with
    `~`."""


class EnvironmentOrder(Record):
    """Order to make an environment unless the node has it; see dtctl/supervisor/environments.py."""

    digest: str = define_record_key(make_text_check(64))
    tree: str = define_record_key(make_text_check(64), default="")
    """Digest of the pushed tree with the lock and the wheels; empty: the environment has to exist."""
    uv: str = define_record_key(make_text_check(64), default="")
    """Digest of the tree with uv; empty: it was not pushed."""
    static_uv: str = define_record_key(make_text_check(64), default="")
    """Digest of the tree with a uv that needs no library; empty: it was not pushed."""
    lock: str = define_record_key(NAME, default="")
    """Name of the lock in the tree."""
    python: str = define_record_key(make_text_check(16), default="")
    """Version of Python, such as 3.12."""
    machine: str = define_record_key(make_text_check(40), default="")
    """Processor for which the lock was made."""
    own_index: bool = define_record_key(check_flag, default=False)
    """True if the spec names the sources of packages, so that the node's variables for these are ignored."""
    offline: bool = define_record_key(check_flag, default=False)
    """True if the tree has all wheels, so that uv needs no network."""
    workdir: str = define_record_key(NAME, default="")
    """Folder with the environments and the trees, on a disk that all nodes share; empty: the node's workdir."""
    credentials: dict[str, str] = define_record_key(mapping_of(NAME, NAME), default={})
    """Variables with users and passwords of package indexes, which only uv's process gets and no file contains."""


class Prepare(Message):
    """Request to check that the run can start on this node."""

    op = "prepare"
    run: str = define_record_key(NAME)
    fresh: bool = define_record_key(check_flag)
    """True if the run is new to this node."""
    cwd: str = define_record_key(NAME)
    """Folder of the job's code."""
    pushed: bool = define_record_key(check_flag, default=True)
    """True if the code was pushed to `cwd`; otherwise `cwd` is the user's own folder, and may begin with `~`."""
    shared: bool = define_record_key(check_flag, default=False)
    """True if `cwd` is one folder for all nodes, in which the workers start."""
    files: list[str] = define_record_key(list_of(NAME))
    """Files that have to exist."""
    programs: list[str] = define_record_key(list_of(NAME))
    path: str = define_record_key(NAME, default="")
    """Folder that is searched for programs before PATH."""
    outputs: list[str] = define_record_key(list_of(NAME), default=[])
    """Paths of `job.outputs` in the working folder."""
    earlier: str = define_record_key(NAME, default="")
    """Run whose outputs this run continues."""
    replicated: list[str] = define_record_key(list_of(NAME), default=[])
    """Folders in the working folder whose files all nodes have (`job.shared`)."""
    data: list[DataLink] = define_record_key(list_of(DataLink.parse), default=[])
    environment: EnvironmentOrder | None = define_record_key(make_nullable_check(EnvironmentOrder.parse), default=None)


class EndOrphanedRun(Message):
    """Request to end a run whose launcher is gone."""

    op = "sweep"
    run: str = define_record_key(NAME)
    token: str = define_record_key(NAME)
    grace_s: float = define_record_key(check_number)
    by: str = define_record_key(NAME, default="")
    """User and machine that requested the end, if not the launcher's machine."""


class NodeDescription(Message):
    """Description of a node before a job starts on it."""

    op = "hello"
    gpus: int = define_record_key(make_integer_check(0, WORKERS))
    cores: int = define_record_key(make_integer_check(0, 1 << 16), default=0)
    """Number of processors that the run's processes may use; 0: not known."""
    address: str = define_record_key(numeric_address)
    """Address of the node to which the control machine connected; empty if it is not known."""
    port: int = define_record_key(PORT)
    """First free port of the candidates; 0: none is free, or there were no candidates."""
    python: str = define_record_key(make_text_check(40), default="")
    host: str = define_record_key(make_text_check(255), default="")
    """Host name of the machine; empty if it is not known."""
    workdir: str = define_record_key(NAME, default="")
    running: list[str] = define_record_key(list_of(check_prose, RUNS), default=[])
    """Runs of this user that already run on this node."""
    machine: str = define_record_key(make_text_check(40), default="")
    """Processor architecture, such as x86_64."""
    has_environment: bool = define_record_key(check_flag, default=False)
    """True if the node has the requested environment."""
    has_uv: bool = define_record_key(check_flag, default=False)
    """True if the node has uv; not checked if it has the environment, or if none was requested."""
    has_glibc: bool = define_record_key(check_flag, default=True)
    """True if programs for glibc run on the node; checked only if uv is missing."""
    free_bytes: int | None = define_record_key(make_nullable_check(COUNT), default=None)
    """Free bytes on the disk of the workdir, if the node lacks the environment; None: not known."""


class PushState(Message):
    """State of a push: have, want-manifest, need, blocks, got, source-failed, done or error."""

    op = "push"
    state: str = define_record_key(make_text_check(40))
    path: str = define_record_key(printable_path, default="")
    """Folder of the tree (have, done)."""
    digest: str = define_record_key(make_text_check(64), default="")
    """Digest of the tree (done)."""
    indexes: list[int] = define_record_key(list_of(COUNT, 10_000_000), default=[])
    """Indexes of the files in the manifest whose contents are needed (need)."""
    blocks: list[int] = define_record_key(list_of(COUNT, 10_000_000), default=[])
    """Numbers of the blocks that are missing here (blocks)."""
    address: str = define_record_key(numeric_address, default="")
    """Address at which this node serves blocks (blocks); empty if it is not known."""
    port: int = define_record_key(PORT, default=0)
    """Port at which this node serves blocks (blocks); 0: it serves none."""
    count: int = define_record_key(COUNT, default=0)
    """Number of blocks that came from other nodes so far (got)."""
    code: str = define_record_key(make_text_check(40), default="")
    """Code, depending on the state. error: as in Refusal. source-failed: unreachable, digest or lost. blocks: empty;
    no-ssl, if the node uses an HMAC in place of TLS; or no-port, if it serves no blocks."""
    message: str = define_record_key(check_prose, default="")


class EnvironmentProgress(Message):
    """Progress of the environment of a node."""

    op = "environment"
    text: str = define_record_key(check_prose)


class NodeReady(Message):
    """Report: the run can be started on this node."""

    op = "ready"


class OrphanedRunEnded(Message):
    """Report: a run's processes were ended."""

    op = "swept"
    found: int = define_record_key(PROCESSES)
    left: int = define_record_key(PROCESSES)
