"""The keys of a spec, with their meanings, defaults and units.

The text under a field is its documentation, which `dtctl validate --schema` prints (see schema.py). Unknown keys are
refused, except in `train.model`, `train.data`, `job.deepspeed`, `slurm.extra`, `kubernetes.affinity` and
`kubernetes.extra`, whose keys other programs define.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, StrictBool, ValidationInfo, field_validator, model_validator

from dtctl import shell
from dtctl.names import DEFAULT_WORKDIR
from dtctl.spec.places import KeyLocations, parse_key
from dtctl.spec.section import (
    Count,
    CountOrZero,
    FilePath,
    PathText,
    Port,
    Positive,
    PositiveOrZero,
    RareSection,
    Section,
    Text,
    Word,
)  # fmt: skip
from dtctl.spec.training import Train

__all__ = [  # the sections of a spec
    "Alerts",
    "Cluster",
    "Container",
    "DataEntry",
    "Environment",
    "Files",
    "Job",
    "Kubernetes",
    "Metrics",
    "Network",
    "NodeEntry",
    "Secret",
    "SharedEntry",
    "Slurm",
    "Spec",
    "Toleration",
    "Train",
    "Volume",
]

TransportName = Literal["local", "ssh", "slurm", "sandbox"]
SshClient = Literal["auto", "openssh", "paramiko"]
KindName = Literal["torchrun", "direct", "deepspeed", "accelerate", "command"]
Slots = Annotated[int, Field(strict=True, ge=1, le=65_536)] | Literal["auto"]
_OR_TEXT: dict[str, Any] = {"type": ["array", "string"]}


def _make_pattern_validator(pattern: str, expected: str) -> AfterValidator:
    """Return the check of a text's form, so that a wrong text is an error now and not minutes later."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


SlurmTime = Annotated[
    Word,
    _make_pattern_validator(
        r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}|(?i:infinite|unlimited)",
        'minutes, H:MM:SS or D-HH:MM:SS, as text: "12:00:00"',
    ),
]
"""A time limit in the format of sbatch(1)."""
SlurmMemory = Annotated[
    Word, _make_pattern_validator(r"\d+[KMGTkmgt]?", "a size as Slurm writes it: 200G, 500M, or 0 for all of it")
]
SlurmArray = Annotated[
    Word,
    _make_pattern_validator(
        r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", "the indexes of an array: 0-9%2, or 1,3,5"
    ),
]
_OWN_DIRECTIVES = {
    "array": "set `slurm.array`",
    "chdir": "a job begins in the working folder of its run",
    "error": "what a job prints is in the folder of its run",
    "input": "a job reads nothing",
    "job-name": "set `job.name`",
    "nodes": "set `cluster.nodes`",
    "no-kill": "set `job.recovery`",
    "no-requeue": "set `slurm.requeue: false`",
    "ntasks": "set `cluster.nodes` and `cluster.slots`",
    "ntasks-per-node": "set `cluster.slots`",
    "open-mode": "a job that is started again continues in its log",
    "output": "what a job prints is in the folder of its run",
    "parsable": "dtctl reads what sbatch prints",
    "requeue": "set `slurm.requeue`",
    "signal": "set `slurm.warn_s`",
    "test-only": "see `dtctl doctor`",
    "wait": "`dtctl launch` waits for the job",
    "wrap": "set `job.command`",
}
"""Directives of sbatch on which dtctl relies, with the keys to use instead."""
SlurmGres = Annotated[
    Word, _make_pattern_validator(r"[A-Za-z][^\s]*", "a resource with its number: gpu:8, or gpu:a100:4,nic:1")
]
Drop = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]


class NodeEntry(Section):
    """Entry of `cluster.nodes` with more keys than a name. Its values take precedence over those of `cluster`."""

    name: Word
    """Name of the node, or a range of names: `gpu[01-04]`. May also be spelt `host`."""
    address: Word | None = None
    """Host name, OpenSSH alias or numeric address to connect to. Default: the name. Not allowed with a range of
    names."""
    slots: Slots | None = None
    """Workers on this node."""
    env: dict[str, Text] = Field(default={})
    """Variables for the workers of this node; they win over `job.env`."""
    python: PathText | None = None
    """Python on this node."""
    port: Port | None = None
    """Port of the node's SSH server."""
    user: Word | None = None
    """User name for the login on this node."""
    workdir: PathText | None = None
    """Folder for everything that dtctl writes on this node."""
    rack: Word | None = None
    """Name of the group of nodes that share power or a switch with this one: copies of its snapshots are kept in
    another rack. Not used under Slurm."""
    gres: SlurmGres | None = None
    """Under Slurm: generic resources of this node, instead of `slurm.gres`."""

    @model_validator(mode="before")
    @classmethod
    def _host_is_the_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "host" not in data:
            return data
        if "name" in data:
            raise ValueError("`host` is an alias of `name`, and both are set")
        return {"name" if key == "host" else key: value for key, value in data.items()}


class Cluster(Section):
    """The machines and how to reach them."""

    transport: TransportName = "local"
    """Way to reach the nodes: `local` is this machine alone, `sandbox` virtual hosts on it."""
    nodes: tuple[Text | NodeEntry, ...] | Annotated[int, Field(strict=True, ge=1, le=65_536)] = ()
    """Names (`gpu1`), ranges (`gpu[01-04]`), entries with more keys; or, for the sandbox and Slurm, a number; in the
    sandbox at most 250. Default: 3 hosts in the sandbox, this machine with transport local."""
    hostfile: FilePath | None = None
    """MPI or DeepSpeed hostfile (`name slots=4`) to take the nodes from, instead of `nodes`."""
    slots: Slots = "auto"
    """Workers per node. auto: one per GPU, 1 on a node without."""
    user: Word | None = None
    """Login user. Default: what `ssh NODE` would use."""
    port: Port | None = None
    """Port of the SSH servers. Default: what `ssh NODE` would use."""
    identity_file: FilePath | None = None
    """Private key. Default: what `ssh NODE` would use, agent included."""
    known_hosts: FilePath | None = None
    """File of known host keys instead of the user's and the system's."""
    ssh_config: FilePath | None = None
    """OpenSSH configuration file. Default: the user's and the system's. none: no configuration at all."""
    ssh: SshClient = "auto"
    """Program that connects to the nodes: `openssh` is this machine's own `ssh`, which can log in wherever you can;
    `paramiko` a library that needs no `ssh`. auto: openssh where there is an `ssh`."""
    python: PathText | None = None
    """Python on the nodes, for dtctl and for the job. Default: `python3` and `torchrun` from the node's PATH; with
    transport local and sandbox the Python that runs dtctl."""
    workdir: PathText = DEFAULT_WORKDIR
    """Folder on every node for everything that dtctl writes there. `~` is the login user's home."""
    connect_timeout_s: Positive = 10.0
    """Seconds a node has to answer."""
    link_timeout_s: Annotated[float, Field(strict=True, ge=2, allow_inf_nan=False)] | None = None
    """Seconds of silence from the other end after which the link counts as lost: the node ends the run
    (without --detach), the launcher replaces the node or stops the others. Without spares a new connection decides:
    a node that answers one has as long again. At least 2. Default: 10 with spares, 30 without."""
    login: Word | None = None
    """With transport slurm: the node to submit from. Default: this machine."""
    spares: tuple[Text, ...] = ()
    """Spare nodes, each of which can replace a lost one; with live recovery two of them are kept ready to start."""
    min_nodes: Count | None = None
    """Continue with no fewer nodes than this when some are lost. Default: all are needed."""
    return_s: PositiveOrZero = 60.0
    """Seconds for which a lost node that the run cannot do without is called again before a restart: it may be booting.
    0: once."""

    @field_validator("nodes", mode="before")
    @classmethod
    def _one_text(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class Files(Section):
    """Which files are copied to the nodes."""

    push: bool = True
    """Copy the files to the nodes. false: no files are copied, the job's folder is already on every node, at `root`. A
    run still starts in its own working folder, in which that folder appears."""
    root: PathText = "."
    """Folder to copy, relative to the spec. With `push: false`, where it lies on every node: `/opt/app`, `~/code`, or,
    relative to the spec, under the same path as here."""
    include: tuple[Word, ...] = ()
    """Patterns, as in .gitignore, of files to copy although .gitignore or dtctl's list of secrets leaves them out."""
    exclude: tuple[Word, ...] = ()
    """Patterns, as in .gitignore, of files to exclude."""


def _for_a_shell(found: str) -> str:
    """Return the error of a command without `shell: true` whose argument contains shell syntax."""
    return f"{found} is shell syntax, but no shell runs the command; add `shell: true`, or quote it as plain text"


class DataEntry(Section):
    """Files that a job reads and that do not belong to its code."""

    source: Word = Field(alias="from")
    """Source of the files: a file or folder of this machine (`~/datasets/x`; a relative path begins at the spec), a URL
    that fsspec knows (`hf://datasets/org/name`, `s3://bucket/x`), or `node:/mnt/x`, which every node has already."""
    to: PathText
    """Path in the job's working folder where it appears: `data/x`."""

    @property
    def is_on_nodes(self) -> bool:
        """Return whether the nodes have the files already."""
        return self.source.startswith("node:")

    @property
    def is_url(self) -> bool:
        """Return whether the source is a URL, from which the files must be downloaded."""
        return "://" in self.source

    @field_validator("to")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        return _path_inside(path)

    @field_validator("source")
    @classmethod
    def _is_whole(cls, source: str) -> str:
        if source.startswith("node:") and not source.removeprefix("node:").startswith(("/", "~/")):
            raise ValueError("after node: a path from / or ~/ is expected")
        return source


PythonVersion = Annotated[Text, _make_pattern_validator(r"3\.\d{1,2}", 'a version as text: "3.12"')]
_PASSWORD_IN_URL = r"://[^/]*@"


class SharedEntry(Section):
    """Folder in which what a worker writes on any node is brought to all nodes."""

    path: PathText
    """Path in the job's working folder: `checkpoints/`."""
    complete: Word | None = None
    """Pattern of the name of a file that is written last: `DONE`, `meta_*.json`. Files of one step are copied when one
    of them has such a name. Default: DCP by `.metadata`, Hugging Face by `trainer_state.json`, and any others when they
    were not written to for 10 seconds."""

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        return _path_inside(path)

    @field_validator("complete")
    @classmethod
    def _is_a_name(cls, pattern: str | None) -> str | None:
        if pattern is not None and "/" in pattern:
            raise ValueError(f"{pattern!r} is no name of a file: write it without a folder")
        return pattern


def _path_inside(path: str) -> str:
    """Return a path in a job's working folder in its shortest form.

    Raises:
        ValueError: the path leaves the folder, or is the whole folder.
    """
    if path.startswith(("/", "~")) or ".." in path.split("/") or posixpath.normpath(path) == ".":
        raise ValueError(f"{path!r} is not a path inside the job's working folder")
    return posixpath.normpath(path)


class Environment(Section):
    """The Python environment of the workers: uv makes it on every node, once, below `cluster.workdir`."""

    requirements: FilePath | None = None
    """File of requirements, as pip reads them. Its lock, `NAME.dtctl.lock`, is written next to the spec and made again
    when the file changes; a file with hashes is its own lock."""
    project: FilePath | None = None
    """Folder with pyproject.toml and uv.lock, in place of `requirements`. The project itself is not installed, since
    its files are copied to the nodes."""
    extras: tuple[Word, ...] = ()
    """Extras of the project that are installed, too (`project.optional-dependencies` in pyproject.toml): `[gpu]`."""
    groups: tuple[Word, ...] = ()
    """Dependency groups of the project that are installed, too (`dependency-groups` in pyproject.toml): `[train]`."""
    python: PythonVersion | None = None
    """Version of Python. Default: that of the Python that runs dtctl. A node without it gets one from uv."""
    platform: Literal["x86_64", "aarch64"] | None = None
    """Processor of the nodes, for which packages are chosen. Default: that of this machine."""
    index: tuple[Word, ...] = ()
    """Sources of packages instead of PyPI: URLs of indexes, and folders with wheels (relative to the spec), which nodes
    have under the same path. The lock is made from them, too. Of an index with a name (`corp=https://...`) user and
    password are those of UV_INDEX_CORP_USERNAME and UV_INDEX_CORP_PASSWORD here; else they belong in ~/.netrc."""
    wheels: Literal["index", "relay"] = "index"
    """Source of the wheels on nodes. index: each node downloads them. relay: this machine downloads and sends them, and
    nodes pass them on to each other; for nodes without internet, which then need no index and no folders."""

    @field_validator("extras", "groups", "index", mode="before")
    @classmethod
    def _one_text(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("index")
    @classmethod
    def _no_passwords(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        if any(re.search(_PASSWORD_IN_URL, place) for place in places):
            raise ValueError(
                "has a user or a password in a URL; name the index (`corp=https://...`) and set UV_INDEX_CORP_USERNAME "
                "and UV_INDEX_CORP_PASSWORD here, or write them into ~/.netrc, here and on the nodes"
            )
        return places

    @model_validator(mode="after")
    def _one_source(self) -> "Environment":
        if (self.requirements is None) == (self.project is None):
            raise ValueError("expected either requirements or project")
        chosen = [f"`{name}`" for name in ("extras", "groups") if getattr(self, name)]
        if chosen and self.project is None:
            raise ValueError(
                f"{' and '.join(chosen)} are those of a project, and a file of requirements has none: set `project` "
                "to the folder with pyproject.toml and uv.lock, or name the packages in the file"
            )
        return self


class Job(Section):
    """Program to run, its files, and what happens when it fails."""

    name: Word = "job"
    """Name of the job; run ids begin with it."""
    script: PathText | None = None
    """Python script, relative to the folder that is copied to the nodes. A script of another language (`run.sh`, or by
    its first line, `#!/usr/bin/env bash`) is run by its own interpreter, once per node unless another `kind` is set."""
    module: Word | None = None
    """Python module, instead of a script."""
    shell: bool = False
    """Run `command` as a line of bash, in which `&&`, `|`, `>` and `$NAME` have their meaning. The first command that
    fails ends it (`-e -o pipefail`); arguments of the command line are `"$@"`."""
    command: Annotated[tuple[Text, ...], Field(min_length=1, json_schema_extra=_OR_TEXT)] | None = None
    """Any program and its arguments, instead of a script; as text it is split as a shell would. The folder of
    `cluster.python` comes first on its PATH, so that `python3` is that Python."""
    args: tuple[Text, ...] = ()
    """Arguments of the script or module. `~/x`, `--out=~/x` and `$HOME/x` mean the home folder on the node; `\\~` and
    `\\$HOME` stand for themselves."""
    add_args: tuple[Literal["local_rank", "deepspeed_config"], ...] | None = None
    """Arguments that dtctl puts before `args`. local_rank: `--local_rank=N`, as DeepSpeed's launcher gives it (default
    with kind deepspeed). deepspeed_config: `--deepspeed_config` with a configuration made of `train`."""
    deepspeed: dict[str, Any] = Field(default={})
    """Further keys of DeepSpeed's configuration (kind deepspeed); they win over those made of `train`."""
    env: dict[str, Text] = Field(default={})
    """Variables for the workers. They appear in scripts and dry runs, so do not put secrets here. `~` and `$HOME` mean
    the home folder on the node, as in `args`."""
    env_from: tuple[Word, ...] = ()
    """Patterns of variables to take from the environment of `dtctl launch`: `WANDB_*`."""
    secrets: tuple[Word, ...] = ()
    """Names of variables to take from the environment of `dtctl launch` but never to store or print."""
    files: Files = Field(default_factory=Files.model_construct)
    """Which files are copied to the nodes."""
    data: tuple[DataEntry, ...] = ()
    """Files that the job reads and that are no part of its code: `[{from: ~/datasets/x, to: data/x}]`. dtctl copies
    them to every node once, even if .gitignore excludes them, keeps them there between runs, and shows them in the
    working folder."""
    environment: Environment | None = None
    """Python environment that every node makes, and in which the workers run: `{requirements: requirements.txt}`.
    `cluster.python` is then the Python of dtctl's own program alone. Default: the Python of `cluster.python`."""
    outputs: tuple[Word, ...] = ()
    """Files and folders that the job writes and that are worth keeping, relative to its working folder: `[out/]`.
    `dtctl fetch` brings them, and `dtctl launch --resume` continues in them. Default: all that was written is brought.
    An absolute path (`/scratch/out`) is brought from each node as well, and stays where it is."""
    shared: tuple[Text | SharedEntry, ...] = ()
    """Folders with checkpoints, relative to the working folder: `[checkpoints/]`, or `[{path: out, complete: DONE}]`.
    Files that workers write there on any node are on all nodes before the next attempt and at `dtctl launch --resume`,
    without a disk that the nodes share. Only complete checkpoints are copied, while workers run at a limited rate."""
    progress: Word | None = None
    """Regular expression that finds a training's progress in what the program prints, with a group `(?P<step>...)` and
    perhaps `(?P<loss>...)` and `(?P<steps>...)`. Default: the usual forms (`step 20: loss 3.4`, bars of tqdm). Not
    needed with dtctl.runtime, which writes metrics."""
    log_mib: CountOrZero = 1024
    """Most MiB that are kept of the output of a worker, on its node and here. More is cut out of the middle, and a line
    there states how much. 0: no limit."""
    max_restarts: CountOrZero = 0
    """Number of times that all workers are restarted after a failure."""
    setup: tuple[str, ...] = ()
    """Shell lines that every node runs before the job: `module load cuda`, `source ~/venv/bin/activate`."""
    kind: KindName | None = None
    """Launcher of the workers. torchrun (default): one torchrun per node. direct: dtctl itself, faster, and unequal
    slots are fine. command (default with `command`): the command once per node. accelerate, deepspeed: dtctl itself, in
    place of the framework's own launcher, with what the framework reads made of `train`."""
    preload: tuple[Word, ...] | None = None
    """Modules that each node imports once, in a process that its workers are forked from at the start and at restarts
    (kind direct). Default: torch, numpy and dtctl.runtime, if the script imports them. `[]`: workers start afresh."""
    hang_s: Positive | Literal["auto", "off"] = "auto"
    """Seconds without progress after which a training with dtctl.runtime hangs: stacks are collected, and
    all workers are restarted. auto: ten times the slowest step, at least 30. Only programs with dtctl.runtime are
    monitored."""
    hang_start_s: Positive | Literal["auto", "off"] = "auto"
    """The same limit as `hang_s`, in seconds, for the begin of an attempt: from its start through compilation to its
    first measured steps. auto: 1800; never less than `hang_s`."""
    hang_output_s: Positive | None = None
    """Seconds without a line from any worker after which a program that reports no progress hangs, for those that print
    regularly: all workers are ended, and restarted as `max_restarts` allows. Default: missing output does not count as
    a hang."""
    recovery: Literal["auto", "live", "restart"] = "auto"
    """Recovery from the loss of a worker. live: it is replaced and the others stay; the step under way is done again
    (dtctl.runtime, kind direct; ddp, hsdp, or ep with dp). restart: all workers are restarted from the newest snapshot,
    as often as `max_restarts` allows. auto: live wherever it can be done, if `max_restarts` is not 0. `dtctl launch
    --dry-run` prints which of the two it is, and why."""
    heal_s: Positive = 60.0
    """Seconds that replacing a lost worker may take; after that all workers are restarted."""
    time_s: Positive | None = None
    """Seconds after which the job is stopped as by SIGUSR1: workers with dtctl.runtime end with a snapshot, and `dtctl
    launch` with exit code 75, which asks for another launch. Default: no limit."""
    grace_s: PositiveOrZero = 10.0
    """Seconds between SIGTERM and SIGKILL when the job is stopped."""

    @field_validator("progress")
    @classmethod
    def _finds_steps(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern or "").groupindex
        except re.error as exc:
            raise ValueError(f"is no regular expression: {exc}") from exc
        if pattern is not None and "step" not in groups:
            raise ValueError("has no group (?P<step>...)")
        return pattern

    @field_validator("add_args", mode="before")
    @classmethod
    def _check_removed_args(cls, value: object) -> object:
        if isinstance(value, list | tuple) and "megatron" in value:
            raise ValueError(
                "megatron was removed (CHANGELOG.md, 0.1.0): write the options of Megatron-LM into `job.args`"
            )
        return value

    @field_validator("env_from")
    @classmethod
    def _not_everything(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if any(not pattern.strip("*?") for pattern in patterns):
            raise ValueError(
                "a pattern that matches every name sends the whole environment, secrets included; start it with letters"
            )
        return patterns

    @field_validator("outputs")
    @classmethod
    def _check_output_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if path.startswith("~") or not path.strip("./") or ".." in path.split("/"):
                raise ValueError(f"{path!r} is neither a path inside the job's working folder nor an absolute one")
        return tuple(path.removeprefix("./") for path in paths)

    @field_validator("shared")
    @classmethod
    def _one_folder_each(cls, entries: tuple[Text | SharedEntry, ...]) -> tuple[Text | SharedEntry, ...]:
        paths = [_shared_entry(entry).path for entry in entries]
        for number, path in enumerate(paths):
            for other in paths[:number]:
                if _is_overlapping_path(path, other):
                    raise ValueError(f"{other!r} and {path!r} are the same folder, or one lies in the other")
        return entries

    @property
    def shared_folders(self) -> tuple[SharedEntry, ...]:
        """Return the entries of `shared`; an entry that is only a path becomes a `SharedEntry`."""
        return tuple(map(_shared_entry, self.shared))

    @field_validator("hang_s", "hang_start_s", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads the word as a truth value

    @field_validator("command", mode="before")
    @classmethod
    def _split_command_words(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        if info.data.get("shell"):
            return [value]
        if found := shell.find_shell_syntax(value):
            raise ValueError(_for_a_shell(found))
        try:
            return shell.split_command(value)
        except ValueError:
            raise ValueError("a quotation mark is not closed") from None

    @field_validator("command")
    @classmethod
    def _no_operators(cls, words: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if words is None:
            return None
        if info.data.get("shell"):
            if len(words) > 1:
                raise ValueError("with `shell: true` it is one line of text, and this is a list")
        elif found := shell.find_shell_operator(words):
            raise ValueError(_for_a_shell(found))
        return words

    @model_validator(mode="after")
    def _shares_no_data(self) -> "Job":
        for entry in self.shared_folders:
            for data in self.data:
                if _is_overlapping_path(entry.path, data.to):
                    raise ValueError(f"`shared` names {entry.path}, and `data` puts {data.to} there")
        return self

    @model_validator(mode="after")
    def _one_program(self) -> "Job":
        programs = [key for key in ("script", "module", "command") if getattr(self, key)]
        if len(programs) > 1:
            raise ValueError(f"only one of script, module and command may be set, and these are: {', '.join(programs)}")
        if self.shell and not self.command:
            raise ValueError("`shell` is about `command`, which is not set")
        return self


def _shared_entry(entry: str | SharedEntry) -> SharedEntry:
    return SharedEntry(path=entry) if isinstance(entry, str) else entry


def _is_overlapping_path(path: str, other: str) -> bool:
    """Return whether two paths are equal, or one lies inside the other."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


class Network(Section):
    """Network of the workers, and their rendezvous."""

    interface: Word | dict[str, Word] = "auto"
    """Interface for the traffic between workers: a name, or a name per node. auto: that of the route to the head."""
    profile: Literal["auto", "nvlink", "ethernet", "roce", "infiniband", "efa", "gcp-tcpxo", "azure"] = "auto"
    """Kind of network between the nodes, which decides the settings of NCCL. auto: found on the nodes."""
    rendezvous_port: Port | Literal["auto"] = "auto"
    """Port on the head node. auto: one that is free there, a different one for every attempt."""
    rendezvous_address: Word | None = None
    """Address of the head node on the network between the nodes. Default: the address at which dtctl reaches it."""


class Container(Section):
    """The container that the workers of a Slurm job run in; what surrounds them runs on the nodes themselves."""

    image: Word
    """Image, as the runtime names it: `nvcr.io#nvidia/pytorch:25.09-py3` or a .sqsh for pyxis, a .sif for apptainer."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun's own options, where the site has the plugin. apptainer: the program of this name."""
    mounts: tuple[Word, ...] = ()
    """Folders of the nodes to mount, `SOURCE:TARGET`, in addition to those of the code and of the run."""
    python: Word = "python3"
    """Python in the container; `cluster.python` is that of the nodes."""
    options: tuple[Word, ...] = ()
    """Further options of `apptainer exec`: `["--nv"]`. For pyxis there is `slurm.srun`."""


class Slurm(Section):
    """Resources that a Slurm job requests."""

    partition: str | None = None
    """Partition that the job is submitted to."""
    account: str | None = None
    """Account that the job is charged to."""
    time: SlurmTime | None = None
    """Time limit as Slurm writes it: `1-12:00:00`."""
    qos: str | None = None
    """Quality of service (QOS) of the job."""
    gres: SlurmGres | None = None
    """Generic resources per node: `gpu:8`. With `slots: auto` there is a worker per GPU."""
    cpus_per_task: Count | None = None
    """Cores per task: per node with kind torchrun, per worker otherwise. Default: the site's, often 1."""
    mem: SlurmMemory | None = None
    """Memory per node: `200G`, `0` for all of it. Default: the site's."""
    exclusive: bool = False
    """Reserve the nodes for this job alone."""
    nodelist: Word | None = None
    """Nodes that the job must have: `gpu[01-04]`."""
    container: Container | None = None
    """Container for the workers. Default: none."""
    array: SlurmArray | None = None
    """Indexes of a job array: `0-9%2`; each task is a run of its own, `RUN.INDEX`."""
    launcher: Literal["auto", "none"] = "auto"
    """none: plain mode, a short batch file in which srun alone starts the workers. Nothing then detects hangs, restarts
    workers or replaces lost ones. auto: dtctl's launcher does all of this inside the job; with `container` or `srun`,
    it is plain mode."""
    requeue: bool = True
    """Start the job again after a warning of the time limit, a preemption or the loss of a node."""
    requeues: int = Field(default=10, ge=0)
    """Number of times that a job which was stopped before its end is started again, from its snapshot."""
    warn_s: int = Field(default=120, ge=1)
    """Seconds before the end of the time limit at which the workers are asked to save and exit."""
    srun: list[str] = Field(default=[])
    """Further options of srun: `["--mpi=pmix"]`."""
    extra: dict[str, str | int | float | bool] = Field(default={})
    """Further directives: `{constraint: h100}`."""

    @field_validator("extra")
    @classmethod
    def _not_owned(cls, extra: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name in extra:
            if name in _OWN_DIRECTIVES:
                raise ValueError(f"dtctl writes the directive {name} itself: {_OWN_DIRECTIVES[name]}")
        return extra


class Toleration(Section):
    """A taint that pods tolerate, in Kubernetes' own words."""

    key: Word | None = None
    """Key of the taint. Default: every key, with operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """Comparison with the taint: Equal compares `value`, Exists only the key. Default: Equal."""
    value: Text | None = None
    """Value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: every effect."""
    tolerationSeconds: CountOrZero | None = None  # noqa: N815 - Kubernetes spells it so
    """Seconds for which an effect NoExecute is tolerated. Default: for ever."""


class Volume(Section):
    """A volume of the pods, in addition to the one with the code."""

    mount: PathText
    """Folder in the container: `/data`."""
    claim: Word | None = None
    """Name of the PersistentVolumeClaim to mount."""
    source: dict[str, Any] = Field(default={})
    """Another source, as Kubernetes writes it: `{hostPath: {path: /local}}`."""
    read_only: StrictBool = False
    """Mount the volume so that the pods may only read it."""

    @model_validator(mode="after")
    def _one_source(self) -> "Volume":
        if (self.claim is None) == (not self.source):
            raise ValueError("expected either claim or source")
        return self


class Kubernetes(Section):
    """Resources that a JobSet of Kubernetes requests; see `dtctl render`."""

    image: Word | None = None
    """Image of the pods, with Python and torch, and with the job's code unless `claim` has it. Needed."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Times at which the image is pulled. Default: Kubernetes' own rule."""
    image_pull_secrets: tuple[Word, ...] = ()
    """Secrets with the credentials of the image's registry."""
    workdir: PathText = "/workspace"
    """Folder with the job's code in the container."""
    claim: Word | None = None
    """PersistentVolumeClaim with the job's code, mounted at `workdir`. Default: the code is in the image."""
    volumes: tuple[Volume, ...] = ()
    """Further volumes: `[{mount: /data, claim: datasets, read_only: true}]`."""
    namespace: Word | None = None
    """Namespace. Default: that of kubectl."""
    labels: dict[str, Text] = Field(default={})
    """Labels of the JobSet and of its pods."""
    annotations: dict[str, Text] = Field(default={})
    """Annotations of the JobSet and of its pods."""
    gpu: str = "nvidia.com/gpu"
    """Resource that a pod asks one of per worker. Empty: none, for training on CPUs."""
    resources: dict[str, Text] = Field(default={})
    """Further resources of a pod: `{cpu: 32, memory: 256Gi, rdma/hca: 1}`."""
    shm: Word = "16Gi"
    """Largest size of /dev/shm, which data loaders and NCCL use."""
    node_selector: dict[str, Text] = Field(default={})
    """Labels of the nodes that the pods may run on."""
    affinity: dict[str, Any] = Field(default={})
    """Affinity of the pods, as Kubernetes writes it: `{nodeAffinity: {...}}`."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate: `[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]`."""
    priority_class: Word | None = None
    """PriorityClass of the pods."""
    runtime_class: Word | None = None
    """RuntimeClass of the pods: `nvidia`."""
    service_account: Word | None = None
    """ServiceAccount of the pods. Default: the namespace's."""
    pod_security: Literal["privileged", "baseline", "restricted"] = "privileged"
    """Pod Security Standard that the namespace enforces. restricted: the pods run without root, capabilities and
    privilege escalation, under the runtime's seccomp profile. baseline, privileged: nothing is set."""
    run_as_user: CountOrZero | None = None
    """Number of the user that the workers run as. Default: the image's."""
    run_as_group: CountOrZero | None = None
    """Number of the workers' group. Default: the image's."""
    fs_group: CountOrZero | None = None
    """Number of the group that owns the volumes' files."""
    capabilities: tuple[Word, ...] = ()
    """Capabilities that the container gets: `[IPC_LOCK]` where RDMA pins memory and nothing else lifts the limit."""
    host_network: bool = False
    """Use the network of the nodes in the pods, as some RDMA fabrics need."""
    networks: tuple[Word, ...] = ()
    """Secondary networks (Multus): names of NetworkAttachmentDefinitions, `NAMESPACE/NAME` for those in other
    namespaces."""
    exclusive_topology: Word | None = None
    """Label of nodes; each of its values is a topology domain, which the job uses exclusively:
    `cloud.google.com/gke-nodepool`."""
    queue: Word | None = None
    """Queue of Kueue that the JobSet waits in."""
    secret: Word | None = None
    """Secret that the variables of `job.secrets` come from, a key for each."""
    env_secrets: tuple[Word, ...] = ()
    """Secrets; each of their keys becomes a variable of the workers."""
    active_deadline_s: Count | None = None
    """Seconds after which a start of the job is ended (activeDeadlineSeconds). Default: never."""
    restarts: CountOrZero = 10
    """Number of times that all pods are started again after one was stopped before its end (exit code 75) or taken off
    its node; `job.max_restarts` is added to it."""
    termination_s: Count | None = None
    """Seconds that a pod which is stopped has for its snapshot, all of them (terminationGracePeriodSeconds). Default:
    `job.grace_s` and 30."""
    ttl_s: Count | None = None
    """Seconds after its end at which the JobSet is removed with its pods and their logs. Default: never."""
    extra: dict[str, Any] = Field(default={})
    """Patch of the JobSet (strategic merge, as kustomize's) for everything else:
    `{spec: {suspend: true}}`."""


class Secret(Section):
    """Source of a secret value outside of the spec: a variable or a file."""

    env: Word | None = None
    """Variable in the environment of `dtctl launch`."""
    file: FilePath | None = None
    """File that contains only the value and that only its owner can read (mode 0600); it must not be pushed to the
    nodes."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Secret":
        if (self.env is None) == (self.file is None):
            raise ValueError("expected either env or file")
        return self


class Alerts(Section):
    """Alerts of a run, each sent when it begins and when it is over, and their receiver."""

    no_step_s: Positive | Literal["off"] = 600.0
    """Seconds without a new optimizer step. Counts from the first step of an attempt, or from its start if the spec
    has a section `train`."""
    loss_not_finite: StrictBool = True
    """Send an alert when a loss or a gradient is infinite or not a number."""
    restarts: Count | Literal["off"] = 1
    """Number of the restart from which on every restart sends an alert; over once training takes steps again."""
    throughput_drop: Drop | Literal["off"] = 0.2
    """Share by which the median speed of five logged steps may fall below the best of the run, which is the highest
    median of twenty."""
    failed: StrictBool = True
    """Send an alert when the run fails."""
    webhook: Secret | None = None
    """URL that receives alerts as JSON: the format of Prometheus Alertmanager's webhooks, with a `text` for chats."""

    @field_validator("no_step_s", "restarts", "throughput_drop", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads the word as a truth value


class Metrics(Section):
    """Publication of a run's figures while it runs, by a process next to the launcher, never in a worker."""

    port: Port | Literal["auto"] | None = None
    """Port of a page `/metrics` for Prometheus, on the machine of the launcher. auto: a free one, named in
    `.dtctl/prometheus/RUN.json` for Prometheus to find. Default: nothing listens."""
    address: Word = "127.0.0.1"
    """Address that the page listens at. The page has no password: others than 127.0.0.1 are for networks you trust."""
    alerts: Alerts | None = None
    """Alerts to send when something is wrong, and their receiver. Default: none; `{}`: all rules, on the terminal
    alone."""

    @property
    def secrets(self) -> dict[str, Secret]:
        """Return the sources of all secrets that the section uses, by their keys."""
        alerts = self.alerts or Alerts.model_construct()
        secret_values = {
            "metrics.alerts.webhook": alerts.webhook,
        }
        return {key: secret for key, secret in secret_values.items() if secret is not None}


class Spec(Section):
    """Contents of a spec file: the machines, the job, and how it trains."""

    # With model_construct, a missing section consists of defaults and needs no validator.
    cluster: Cluster = Field(default_factory=Cluster.model_construct)
    """The machines and how to reach them."""
    job: Job = Field(default_factory=Job.model_construct)
    """Program to run, its files, and what happens when it fails."""
    network: Network = Field(default_factory=Network.model_construct)
    """Network of the workers, and their rendezvous."""
    train: Train | None = None
    """Read by `dtctl.runtime` in the workers."""
    slurm: RareSection[Slurm] | None = None
    """Resources that a Slurm job requests."""
    kubernetes: RareSection[Kubernetes] | None = None
    """Resources that a JobSet of Kubernetes requests."""
    metrics: RareSection[Metrics] | None = None
    """Publication of the run's figures while it runs, and alerts when something is wrong."""
    base_dir: Path = Field(default=Path(), exclude=True)
    """Folder of the spec, to which relative paths refer. Set by dtctl; not a key of the file."""
    _places: KeyLocations = PrivateAttr(default_factory=KeyLocations)

    @property
    def pushes(self) -> bool:
        """Return whether code is copied to the nodes."""
        return self.job.files.push

    @property
    def plain_reason(self) -> str:
        """Return the reason why srun alone starts the workers of a Slurm job; empty if dtctl's launcher does."""
        slurm = self.slurm
        if self.cluster.transport != "slurm" or slurm is None:
            return ""
        if slurm.launcher == "none":
            return "slurm.launcher is none"
        if slurm.container is not None:
            return "srun starts the workers in their container (slurm.container)"
        return "slurm.srun determines how srun starts workers" if slurm.srun else ""

    @property
    def is_plain(self) -> bool:
        """Return whether the spec is for a Slurm job without a launcher of dtctl inside."""
        return bool(self.plain_reason)

    @property
    def max_restarts(self) -> int:
        """Return the number of times that failed workers are restarted."""
        return 0 if self.is_plain else self.job.max_restarts

    @property
    def code_folder(self) -> str:
        """Return the folder of the code on every node, if the code is not pushed; it may begin with `~`."""
        root = self.job.files.root
        return root if root.startswith("~") else posixpath.normpath(self.base_dir.absolute() / root)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the keys that section `train` sets; empty without the section."""
        return self.train.values if self.train is not None else {}

    @property
    def snapshot_dir(self) -> str | None:
        """Return the folder or URL of the snapshots, if section `train` names one."""
        return self.train.config.snapshot.dir if self.train is not None else None

    def written_at(self, key: str) -> str:
        """Return the place of `key`, or of the nearest key above it: `dtctl.yaml:12`, `--set train.lr=1`.

        The place is `key` itself if the spec comes from neither a file nor a command line.
        """
        return self._places.locate_key(parse_key(key)) or key
