"""Names that two parts of dtctl must agree on: environment variables, files and folders.

The control plane sets the variables and the runtime reads them; both take the spelling from here. The supervisor is
sent to nodes as a single file and so repeats the few that it needs; `tests/unit/test_names.py` holds the two equal.
"""

from __future__ import annotations

from typing import Final

# Variables that every worker gets. The torch ones are spelt as torchrun spells them (torch/distributed/run.py,
# "Environment Variables"), so that one script runs under either.
RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_RANK: Final = "GROUP_RANK"
NODE_RANK: Final = "NODE_RANK"
"""The same number; Lightning and others read it by this name."""
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Where a worker leaves its exception, for whoever has started it."""

RUN_ID: Final = "DTCTL_RUN_ID"
"""The run a process belongs to. Also the mark by which a run's processes are found again on a node."""
NODE: Final = "DTCTL_NODE"
"""Name of the node in the spec."""
NODES: Final = "DTCTL_NNODES"
"""Number of nodes of the run."""
NODE_INDEX: Final = "DTCTL_NODE_RANK"
"""Position of this node in the spec, from 0."""
SLOTS: Final = "DTCTL_SLOTS"
"""Workers on this node."""
ATTEMPT: Final = "DTCTL_ATTEMPT"
"""How often the gang has been started before in this run: 0 at first, 1 after the first restart."""
RUN_DIR: Final = "DTCTL_RUN_DIR"
"""The run's folder on this node; workers may write into it."""
SNAPSHOT_DIR: Final = "DTCTL_SNAPSHOT_DIR"
"""Where the runtime keeps snapshots unless the spec names a folder."""
MEMORY_DIR: Final = "DTCTL_MEMORY_DIR"
"""Where it keeps those in the node's memory; removed by the supervisor."""
RACK: Final = "DTCTL_RACK"
"""The node's rack, if the spec says it."""
TRAIN_CONFIG: Final = "DTCTL_TRAIN_CONFIG"
"""The spec's `train:` section as one JSON object; read by `dtctl.train.config`."""
DEEPSPEED_CONFIG: Final = "DTCTL_DEEPSPEED_CONFIG"
"""DeepSpeed's configuration made of `train:`, as JSON, for programs that do not take it as an argument."""
METRICS: Final = "DTCTL_METRICS"
"""Path of metrics.jsonl, appended to by rank 0."""
PROGRESS: Final = "DTCTL_PROGRESS"
"""Folder in which each worker notes how far it is, one file a rank; the supervisor reads them."""
LIVE: Final = "DTCTL_LIVE"
"""Folder of the pipes between the supervisor and workers whose lost peers are replaced; unset where they are not."""
LIVE_EPOCH: Final = "DTCTL_LIVE_EPOCH"
"""Set for a worker that takes the place of a lost one: how often workers of this attempt were replaced by then."""
COMMITTED_STEP: Final = "DTCTL_COMMITTED_STEP"
"""Step of the newest snapshot that earlier attempts of this run have told of as committed."""
VERSION: Final = "DTCTL_VERSION"
"""Version of the dtctl that launched the run; the node's own may be another."""
MONITOR_PORT: Final = "DTCTL_MONITOR_PORT"
"""Under Slurm: the port of the first node at which the nodes' monitors report."""
BACKGROUND: Final = "DTCTL_BACKGROUND"
"""Name of the run, in the launcher of `dtctl launch --detach` that stays behind."""

# The control machine, below the folder of the spec.
STATE_DIR: Final = ".dtctl"
RUNS_DIR: Final = "runs"
PLAN_FILE: Final = "plan.json"
RUN_SPEC_FILE: Final = "spec.yaml"
"""The spec of a run as it was at launch, `--set` included."""
EVENTS_FILE: Final = "events.jsonl"
LEDGER_FILE: Final = "ledger.json"
PROGRESS_FILE: Final = "progress.jsonl"
"""Under Slurm: how far the workers were, and why an attempt was ended, as the job's own monitor recorded it."""
METRICS_FILE: Final = "metrics.jsonl"
LOGS_DIR: Final = "logs"
OUTPUTS_DIR: Final = "outputs"
"""Below it a folder per node with what `dtctl fetch` has brought."""
HANGS_DIR: Final = "hangs"
"""Below it attempt-N/NODE/rank-R.txt: where the workers of an attempt stood when it made no progress."""

SPEC_FILE: Final = "dtctl.yaml"
"""The spec that commands read when none is named."""
DEFAULT_WORKDIR: Final = "~/.dtctl/node"
"""Folder on a node that holds everything dtctl writes there, unless `cluster.workdir` says otherwise."""

REQUEUE_EXIT: Final = 75
"""Exit code of a worker that was stopped and can continue from its snapshot (EX_TEMPFAIL of BSD's sysexits.h)."""
