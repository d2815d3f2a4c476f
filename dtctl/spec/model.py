"""The keys of a spec: every key with its meaning, its default and its unit.

The text under a field is its documentation: `dtctl validate --schema` takes it from here (see schema.py).
Unknown keys are refused everywhere but in `train.model`, `train.data`, `job.deepspeed` and `slurm.extra`, which belong
to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from dtctl import shell
from dtctl.names import DEFAULT_WORKDIR
from dtctl.spec.places import Places, parse_key
from dtctl.spec.section import Count, CountOrZero, Port, Positive, PositiveOrZero, Section, Text, Word
from dtctl.spec.training import Train

__all__ = [  # the sections
    "Cluster",
    "Files",
    "Job",
    "Kubernetes",
    "Network",
    "NodeEntry",
    "Slurm",
    "Spec",
    "Train",
]

TransportName = Literal["local", "ssh", "slurm", "sandbox"]
KindName = Literal["torchrun", "direct", "deepspeed", "accelerate", "command"]
Slots = Annotated[int, Field(strict=True, ge=1, le=65_536)] | Literal["auto"]
_OR_TEXT: dict[str, Any] = {"type": ["array", "string"]}


class NodeEntry(Section):
    """One entry of `cluster.nodes` that is more than a name. Values here win over those of `cluster`."""

    name: Word
    """Name of the node, or a range of names: `gpu[01-04]`. May also be spelt `host`."""
    address: Word | None = None
    """Host name, OpenSSH alias or numeric address to connect to. Default: the name. Not with a range."""
    slots: Slots | None = None
    """Workers on this node."""
    env: dict[str, Text] = Field(default={})
    """Variables for the workers of this node; they win over `job.env`."""
    python: str | None = None
    """Python on this node."""
    port: Port | None = None
    """Port of the node's SSH server."""
    user: Word | None = None
    """Login user."""
    workdir: Word | None = None
    """Folder for everything that dtctl writes on this node."""

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
    """How nodes are reached: `local` is this machine alone, `sandbox` virtual hosts on it."""
    nodes: tuple[Text | NodeEntry, ...] | Annotated[int, Field(strict=True, ge=1, le=65_536)] = ()
    """Names (`gpu1`), ranges (`gpu[01-04]`), entries with more keys; or, for the sandbox and Slurm, a number; in the
    sandbox at most 250. Default: 3 hosts in the sandbox, this machine with transport local."""
    hostfile: Path | None = None
    """MPI or DeepSpeed hostfile (`name slots=4`) to take the nodes from, instead of `nodes`."""
    slots: Slots = "auto"
    """Workers per node. auto: one per GPU, 1 on a node without."""
    user: Word | None = None
    """Login user. Default: what `ssh NODE` would use."""
    port: Port | None = None
    """Port of the SSH servers. Default: what `ssh NODE` would use."""
    identity_file: Path | None = None
    """Private key. Default: what `ssh NODE` would use, agent included."""
    known_hosts: Path | None = None
    """File of known host keys instead of the user's and the system's."""
    ssh_config: Path | None = None
    """OpenSSH configuration file. Default: the user's and the system's. none: no configuration at all."""
    python: str | None = None
    """Python on the nodes, for dtctl and for the job. Default: `python3` and `torchrun` from the node's PATH; with
    transport local and sandbox the Python that runs dtctl."""
    workdir: Word = DEFAULT_WORKDIR
    """Folder on every node for everything that dtctl writes there. `~` is the login user's home."""
    connect_timeout_s: Positive = 10.0
    """Seconds a node has to answer."""
    link_timeout_s: Annotated[float, Field(strict=True, ge=2, allow_inf_nan=False)] = 10.0
    """Seconds of silence from the other end after which the link counts as lost: the node ends the run
    (without --detach), the launcher stops the others. At least 2."""
    login: Word | None = None
    """With transport slurm: the node to submit from. Default: this machine."""
    spares: tuple[Text, ...] = ()
    """Spare nodes, each of which replaces a lost one."""
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
    """Whether files are copied at all. false: the job's folder is already there, at `root` on every node."""
    root: Word = "."
    """Folder to copy, relative to the spec."""
    include: tuple[Word, ...] = ()
    """Patterns, as in .gitignore, of files to copy although .gitignore or dtctl's list of secrets leaves them out."""
    exclude: tuple[Word, ...] = ()
    """Patterns, as in .gitignore, of files to exclude."""


class Job(Section):
    """What is run."""

    name: Word = "job"
    """Name of the job; run ids begin with it."""
    script: Word | None = None
    """Python script, relative to the folder that is copied to the nodes."""
    module: Word | None = None
    """Python module, instead of a script."""
    command: Annotated[tuple[Text, ...], Field(min_length=1, json_schema_extra=_OR_TEXT)] | None = None
    """Any program and its arguments, instead of a script; as text it is split as a shell would."""
    args: tuple[Text, ...] = ()
    """Arguments of the script or module."""
    add_args: tuple[Literal["local_rank", "deepspeed_config", "megatron"], ...] | None = None
    """Arguments that dtctl puts before `args`. local_rank: `--local_rank=N`, as DeepSpeed's launcher gives it (default
    with kind deepspeed). deepspeed_config: `--deepspeed_config` with a configuration made of `train`. megatron: options
    of Megatron-LM made of `train`."""
    deepspeed: dict[str, Any] = Field(default={})
    """Further keys of DeepSpeed's configuration (kind deepspeed); they win over those made of `train`."""
    env: dict[str, Text] = Field(default={})
    """Variables for the workers. They appear in scripts and dry runs, so do not put secrets here."""
    env_from: tuple[Word, ...] = ()
    """Patterns of variables to take from the environment of `dtctl launch`: `WANDB_*`."""
    secrets: tuple[Word, ...] = ()
    """Names of variables to take from the environment of `dtctl launch` but never to store or print."""
    files: Files = Field(default_factory=Files.model_construct)
    """Which files are copied to the nodes."""
    max_restarts: CountOrZero = 0
    """How often all workers are restarted after a failure."""
    setup: tuple[str, ...] = ()
    """Shell lines that every node runs before the job: `module load cuda`, `source ~/venv/bin/activate`."""
    kind: KindName | None = None
    """Who starts the workers. torchrun (default): one torchrun per node. direct: dtctl itself, faster, and unequal
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
    """The same before the first steps are measured: from the start through compilation to the first steps of an
    attempt. auto: 1800; never less than `hang_s`."""
    time_s: Positive | None = None
    """Seconds after which the job is stopped as by SIGUSR1: workers with dtctl.runtime end with a snapshot, and `dtctl
    launch` with exit code 75, which asks for another launch. Default: no limit."""
    grace_s: PositiveOrZero = 10.0
    """Seconds between SIGTERM and SIGKILL when the job is stopped."""

    @field_validator("env_from")
    @classmethod
    def _not_everything(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if any(not pattern.strip("*?") for pattern in patterns):
            raise ValueError(
                "a pattern that matches every name sends the whole environment, secrets included; start it with letters"
            )
        return patterns

    @field_validator("hang_s", "hang_start_s", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML takes it for a truth value

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return shell.split(value)
        except ValueError:
            raise ValueError("a quotation mark is not closed") from None

    @model_validator(mode="after")
    def _one_program(self) -> Job:
        programs = [key for key in ("script", "module", "command") if getattr(self, key)]
        if len(programs) > 1:
            raise ValueError(f"only one of script, module and command may be set, and these are: {', '.join(programs)}")
        return self


class Network(Section):
    """How workers find and reach each other."""

    interface: Word | dict[str, Word] = "auto"
    """Interface for the traffic between workers: a name, or a name per node. auto: that of the route to the head."""
    profile: Literal["auto", "nvlink", "ethernet", "roce", "infiniband", "efa", "gcp-tcpxo", "azure"] = "auto"
    """What the network between the nodes is made of."""
    rendezvous_port: Port | Literal["auto"] = "auto"
    """Port on the head node. auto: one that is free there, a different one for every attempt."""
    rendezvous_address: Word | None = None
    """Address of the head node on the network between the nodes. Default: the address at which dtctl reaches it."""


class Slurm(Section):
    """What a Slurm job asks for."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account."""
    time: str | None = None
    """Time limit as Slurm writes it: `1-12:00:00`."""
    qos: str | None = None
    """Quality of service."""
    gres: str | None = None
    """Generic resources per node: `gpu:8`."""
    array: str | None = None
    """Indexes of a job array: `0-9%2`; each runs the whole job."""
    requeues: int = Field(default=10, ge=0)
    """How often a job that was stopped before its end is started again, from its snapshot."""
    warn_s: int = Field(default=120, ge=1)
    """Seconds before the end of the time limit at which the workers are asked to save and exit."""
    srun: list[str] = Field(default=[])
    """Further options of srun: `["--container-image=docker://pytorch/pytorch"]`."""
    extra: dict[str, str | int | float | bool] = Field(default={})
    """Further directives: `{constraint: h100}`."""


class Kubernetes(Section):
    """What a JobSet of Kubernetes asks for; see `dtctl render`."""

    image: Word | None = None
    """Image of the pods, with Python and torch, and with the job's code unless `claim` has it. Needed."""
    workdir: Word = "/workspace"
    """Folder with the job's code in the container."""
    claim: Word | None = None
    """PersistentVolumeClaim with the job's code, mounted at `workdir`. Default: the code is in the image."""
    namespace: Word | None = None
    """Namespace. Default: that of kubectl."""
    gpu: str = "nvidia.com/gpu"
    """Resource that a pod asks one of per worker. Empty: none, for training on CPUs."""
    resources: dict[str, Text] = Field(default={})
    """Further resources of a pod: `{cpu: 32, memory: 256Gi, rdma/hca: 1}`."""
    shm: Word = "16Gi"
    """Largest size of /dev/shm, which data loaders and NCCL use."""
    node_selector: dict[str, Text] = Field(default={})
    """Labels of the nodes that the pods may run on."""
    queue: Word | None = None
    """Queue of Kueue."""
    secret: Word | None = None
    """Secret that the variables of `job.secrets` come from, a key for each."""
    restarts: CountOrZero = 10
    """How often all pods are started again after one was stopped before its end (exit code 75) or taken off its node;
    `job.max_restarts` is added to it."""


class Spec(Section):
    """A whole spec."""

    # model_construct: a missing section consists of defaults, and needs no validator of its own to be built.
    cluster: Cluster = Field(default_factory=Cluster.model_construct)
    """The machines and how to reach them."""
    job: Job = Field(default_factory=Job.model_construct)
    """What is run."""
    network: Network = Field(default_factory=Network.model_construct)
    """How workers find and reach each other."""
    train: Train | None = None
    """Read by `dtctl.runtime` in the workers."""
    slurm: Slurm | None = None
    """What a Slurm job asks for."""
    kubernetes: Kubernetes | None = None
    """What a JobSet of Kubernetes asks for."""
    base_dir: Path = Field(default=Path(), exclude=True)
    """Folder of the spec, to which relative paths refer. Set by dtctl; not a key of the file."""
    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def pushes(self) -> bool:
        """Whether code is copied to the nodes."""
        return self.job.files.push

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that `train:` sets; none without the section."""
        return self.train.values if self.train is not None else {}

    @property
    def snapshot_dir(self) -> str | None:
        """Folder or URL of the snapshots, if `train:` names one."""
        return self.train.config.snapshot.dir if self.train is not None else None

    def written_at(self, key: str) -> str:
        """Where the user wrote `key`, or what is nearest above it: `dtctl.yaml:12`, `--set train.lr=1`.

        Without a file or a command line behind the spec, `key` itself.
        """
        return self._places.of(parse_key(key)) or key
