#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node a, node rank 0 of 2, workers 0-1 of 3, spec 7a3d4a5cdc88fd18.
# Started in the folder of the pushed code, 2 times, each with its own RANK, ROLE_RANK, LOCAL_RANK and TORCHELASTIC_ERROR_FILE. Set on the node before this runs:
# DTCTL_RUN_DIR, DTCTL_METRICS, DTCTL_SNAPSHOT_DIR, DTCTL_PROGRESS, DTCTL_GRACE_S, PET_LOG_DIR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (the interface
# towards the head node); WANDB_API_KEY (secret).
set -e -o pipefail
umask "${DTCTL_UMASK:-$(umask)}"  # of the login; what dtctl writes is for its user alone

# dtctl: unbuffered output, and the same order of sets in each run
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

# torch's own default, unless the node sets it
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

# dtctl: signals that torchrun passes on to workers
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP

# network.interface
export GLOO_SOCKET_IFNAME=eth0
export NCCL_SOCKET_IFNAME==eth0

# dtctl: place in the job
export DTCTL_RUN_ID=run-1
export DTCTL_ATTEMPT=0
export DTCTL_NODE=a
export DTCTL_NODE_RANK=0
export DTCTL_NNODES=2
export DTCTL_SLOTS=2
export MASTER_ADDR=10.0.0.1
export MASTER_PORT=31399
export WORLD_SIZE=3
export LOCAL_WORLD_SIZE=2
export GROUP_RANK=0
export NODE_RANK=0
export GROUP_WORLD_SIZE=2
export ROLE_NAME=default
export ROLE_WORLD_SIZE=3
export TORCHELASTIC_RUN_ID=run-1.0
export TORCHELASTIC_RESTART_COUNT=0
export TORCHELASTIC_MAX_RESTARTS=0
export TORCHELASTIC_USE_AGENT_STORE=False

# setup
trap 'echo "dtctl: this line of job.setup has failed: $BASH_COMMAND" >&2' ERR
trap '[ "$?" -ne 0 ] || { echo "dtctl: job.setup has ended the script (exit 0), and the job never began" >&2; exit 1; }' EXIT
source ~/venv/bin/activate
trap - ERR EXIT

# Last, and with exec: signals and the exit code pass straight through.
exec python3 \
  -u \
  -m \
  my.train
