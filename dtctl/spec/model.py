"""What may stand in a spec: every key with its meaning, its default and its unit.

The text under a field is its documentation: `dtctl validate --schema` takes it from here (see schema.py).
Unknown keys are refused everywhere but in `train.model`, `train.data` and `slurm.extra`, which belong to others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dtctl import shell
from dtctl.names import DEFAULT_WORKDIR

TransportName = Literal["local", "ssh", "slurm", "sandbox"]
KindName = Literal["torchrun", "direct", "deepspeed", "accelerate", "command"]
StrategyName = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp", "pipeline"]
Scalar = str | int | float | bool


class Section(BaseModel):
    """A part of the spec: closed, unchangeable, documented field by field."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _text(value: Scalar) -> str:
    """A YAML scalar as the text of an environment variable: `true` stays `true`, not Python's `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class NodeEntry(Section):
    """One entry of `cluster.nodes` that is more than a name. Values here win over those of `cluster`."""

    name: str
    """Name of the node, or a range of names: `gpu[01-04]`."""
    address: str | None = None
    """Host name, OpenSSH alias or numeric address to connect to. Default: the name. Not with a range."""
    slots: int | Literal["auto"] | None = Field(default=None)
    """Workers on this node."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the workers of this node; they win over `job.env`."""
    python: str | None = None
    """Python on this node."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the node's SSH server."""
    user: str | None = None
    """Login user."""
    workdir: str | None = None
    """Folder for everything that dtctl writes on this node."""

    @field_validator("slots")
    @classmethod
    def _at_least_one(cls, value: int | str | None) -> int | str | None:
        return _positive_slots(value)

    @field_validator("env", mode="before")
    @classmethod
    def _env_as_text(cls, value: object) -> object:
        return _texts(value)


def _texts(value: object) -> object:
    """A mapping with its numbers and truth values as text; anything else unchanged, for pydantic to refuse."""
    if not isinstance(value, dict):
        return value
    return {key: _text(item) if isinstance(item, int | float | bool) else item for key, item in value.items()}


def _positive_slots(value: int | str | None) -> int | str | None:
    if isinstance(value, int) and value < 1:
        raise ValueError("a node needs at least 1 slot")
    return value


class Cluster(Section):
    """The machines and the way to them."""

    transport: TransportName = "local"
    """How nodes are reached: `local` is this machine alone, `sandbox` virtual hosts on it."""
    nodes: list[str | NodeEntry] | int = Field(default_factory=list)
    """Names (`gpu1`), ranges (`gpu[01-04]`), entries with more keys; or, for the sandbox, a number of hosts."""
    hostfile: Path | None = None
    """MPI or DeepSpeed hostfile (`name slots=4`) to take the nodes from, instead of `nodes`."""
    slots: int | Literal["auto"] = "auto"
    """Workers per node. auto: one per GPU, 1 on a node without."""
    user: str | None = None
    """Login user. Default: what `ssh NODE` would use."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the SSH servers. Default: what `ssh NODE` would use."""
    identity_file: Path | None = None
    """Private key. Default: what `ssh NODE` would use, agent included."""
    known_hosts: Path | None = None
    """File of known host keys instead of the user's and the system's."""
    ssh_config: Path | None = None
    """OpenSSH configuration file. Default: the user's and the system's."""
    python: str | None = None
    """Python on the nodes, for dtctl and for the job. Default: `python3` and `torchrun` from the node's PATH; with
    transport local and sandbox the Python that runs dtctl."""
    workdir: str = DEFAULT_WORKDIR
    """Folder on every node for everything that dtctl writes there. `~` is the login user's home."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a node has to answer."""
    link_timeout_s: float = Field(default=10.0, ge=2)
    """Seconds without a sign of life from the other end after which the link is taken for lost: the node ends the run
    (without --detach), the launcher stops the others."""
    login: str | None = None
    """With transport slurm: the node to submit from. Default: this machine."""
    spares: list[str] = Field(default_factory=list)
    """Nodes that stand by and replace one that is lost."""
    min_nodes: int | None = Field(default=None, ge=1)
    """Go on with as few nodes as this when some are lost. Default: all are needed."""

    @field_validator("slots")
    @classmethod
    def _at_least_one(cls, value: int | str | None) -> int | str | None:
        return _positive_slots(value)

    @field_validator("nodes")
    @classmethod
    def _a_number(cls, value: list[Any] | int) -> list[Any] | int:
        if isinstance(value, int) and not 1 <= value <= 250:
            raise ValueError("a sandbox has 1 to 250 hosts")
        return value


class Files(Section):
    """Which files are brought to the nodes."""

    push: bool = True
    """Whether files are brought at all. false: the job's folder is there already, at `root` on every node."""
    root: str = "."
    """Folder to bring, relative to the spec."""
    include: list[str] = Field(default_factory=list)
    """Patterns, as in .gitignore, of files to bring although .gitignore or dtctl's list of secrets leaves them out."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns, as in .gitignore, of files to leave out."""


class Job(Section):
    """What is run."""

    name: str = "job"
    """Name of the job; run ids begin with it."""
    script: str | None = None
    """Python script, relative to the folder that is brought to the nodes."""
    module: str | None = None
    """Python module, instead of a script."""
    command: list[str] | None = None
    """Any program and its arguments, instead of a script; as text it is split as a shell would."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the script or module."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the workers. They stand in scripts and dry runs: no secrets here."""
    env_from: list[str] = Field(default_factory=list)
    """Patterns of variables to take from the environment of `dtctl launch`: `WANDB_*`."""
    secrets: list[str] = Field(default_factory=list)
    """Names of variables to take from the environment of `dtctl launch` and never to write down or print."""
    files: Files = Field(default_factory=Files)
    """Which files are brought to the nodes."""
    max_restarts: int = Field(default=0, ge=0)
    """How often the whole gang is started again after a failure."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines that every node runs before the job: `module load cuda`, `source ~/venv/bin/activate`."""
    kind: KindName | None = None
    """Who starts the workers. torchrun (default): one torchrun per node. direct: dtctl itself, faster, and unequal
    slots are fine. command (default with `command`): the command once per node."""
    grace_s: float = Field(default=10.0, ge=0)
    """Seconds between SIGTERM and SIGKILL when the job is stopped."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_as_text(cls, value: object) -> object:
        return _texts(value)

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return shell.split(value) if isinstance(value, str) else value

    @field_validator("args", "command", mode="before")
    @classmethod
    def _scalars(cls, value: object) -> object:
        if isinstance(value, list):
            return [_text(word) if isinstance(word, int | float | bool) else word for word in value]
        return value

    @model_validator(mode="after")
    def _one_program(self) -> Job:
        given = [key for key in ("script", "module", "command") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"only one of script, module and command may be set, and these are: {', '.join(given)}")
        return self


class Network(Section):
    """How workers find and reach each other."""

    interface: str | dict[str, str] = "auto"
    """Interface for the traffic between workers: a name, or a name per node. auto: that of the route to the head."""
    profile: Literal["auto", "nvlink", "ethernet", "roce", "infiniband", "efa", "gcp-tcpxo", "azure"] = "auto"
    """What the network between the nodes is made of."""
    rendezvous_port: int | Literal["auto"] = "auto"
    """Port on the head node. auto: one that is free there, another for every attempt."""
    rendezvous_address: str | None = None
    """Address of the head node on the network between the nodes. Default: the one that dtctl reaches it at."""

    @field_validator("rendezvous_port")
    @classmethod
    def _a_port(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 65535:
            raise ValueError("a port is a number from 1 to 65535")
        return value


class Mesh(Section):
    """Degrees of parallelism; their product is the number of workers."""

    dp: int = Field(default=1, ge=1)
    """Data parallel replicas."""
    fsdp: int = Field(default=1, ge=1)
    """Workers that share the parameters of one replica."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallel degree."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""


class Snapshot(Section):
    """When and where the state of training is kept."""

    dir: str | None = None
    """Folder on the nodes. Default: `snapshots` in the run's folder."""
    every_steps: int | None = Field(default=None, ge=1)
    """Steps between snapshots."""
    every_s: float | None = Field(default=None, gt=0)
    """Seconds between snapshots."""
    keep: int = Field(default=2, ge=1)
    """How many snapshots are kept."""
    replicas: int = Field(default=0, ge=0)
    """Copies of each node's part on other nodes."""


class Train(Section):
    """Read by `dtctl.runtime` in the workers; a job that does not use it ignores it."""

    strategy: StrategyName | Mesh | None = None
    """How the model is spread over the workers. auto: ddp with several workers, else single."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the computation. Default fp32."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Samples per worker and forward pass."""
    global_batch: int | None = Field(default=None, ge=1)
    """Samples per optimizer step over all workers."""
    accumulate: int | None = Field(default=None, ge=1)
    """Forward passes per optimizer step."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient; larger ones are scaled down."""
    lr: float | None = Field(default=None, gt=0)
    """Highest learning rate."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the schedule."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps over which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """How the learning rate falls after the warm-up."""
    optimizer: Literal["adamw", "sgd"] | None = None
    """Which optimizer."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the optimizer."""
    steps: int | None = Field(default=None, ge=1)
    """Length of the training in optimizer steps."""
    epochs: int | None = Field(default=None, ge=1)
    """Length of the training in passes over the data, instead of steps."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of everything random."""
    log_every: int | None = Field(default=None, ge=1)
    """Steps between lines of metrics."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which a worker that waits for its peers gives up."""
    snapshot: Snapshot | None = None
    """When and where the state is kept."""
    model: dict[str, Any] | None = None
    """Given to the job's own code."""
    data: dict[str, Any] | None = None
    """Given to the job's own code."""

    def settings(self) -> dict[str, Any]:
        """What the spec sets, as plain data; keys that it does not mention are left to the runtime."""
        return self.model_dump(exclude_none=True, exclude_unset=True)


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
    extra: dict[str, Scalar] = Field(default_factory=dict)
    """Further directives: `{constraint: h100}`."""


class Spec(Section):
    """A whole spec."""

    cluster: Cluster = Field(default_factory=Cluster)
    """The machines and the way to them."""
    job: Job = Field(default_factory=Job)
    """What is run."""
    network: Network = Field(default_factory=Network)
    """How workers find and reach each other."""
    train: Train | None = None
    """Read by `dtctl.runtime` in the workers."""
    slurm: Slurm | None = None
    """What a Slurm job asks for."""
    base_dir: Path = Field(default=Path(), exclude=True, json_schema_extra={"x-internal": True})
    """Folder of the spec; set by dtctl, relative paths are relative to it."""

    @property
    def pushes(self) -> bool:
        """Whether code is brought to the nodes."""
        return self.job.files.push
