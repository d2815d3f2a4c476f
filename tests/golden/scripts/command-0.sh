#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node a, node rank 0 of 1, workers 0 of 1, spec 5317acee3290273e.
# Started in the folder of the pushed code. Set on the node before this runs:
# DTCTL_RUN_DIR, DTCTL_METRICS, DTCTL_SNAPSHOT_DIR, DTCTL_PROGRESS, DTCTL_GRACE_S, PET_LOG_DIR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (the interface
# towards the head node).
set -e -o pipefail
umask "${DTCTL_UMASK:-$(umask)}"  # of the login; what dtctl writes is for its user alone

# dtctl: unbuffered output, and the same order of sets in each run
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

# dtctl: place in the job
export DTCTL_RUN_ID=run-1
export DTCTL_ATTEMPT=0
export DTCTL_NODE=a
export DTCTL_NODE_RANK=0
export DTCTL_NNODES=1
export DTCTL_SLOTS=1
export MASTER_ADDR=10.0.0.1
export MASTER_PORT=31399
export WORLD_SIZE=1
export LOCAL_WORLD_SIZE=1
export GROUP_RANK=0
export NODE_RANK=0

# Last, and with exec: signals and the exit code pass straight through.
exec nvidia-smi \
  --query-gpu=name \
  --format=csv
