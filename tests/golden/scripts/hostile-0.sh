#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node a;b, node rank 0 of 1, workers 0-1 of 2, spec b484a9ba8f9e1e58.
# Started in the folder of the pushed code. Set on the node before this runs:
# DTCTL_RUN_DIR, DTCTL_METRICS, DTCTL_SNAPSHOT_DIR, DTCTL_PROGRESS, DTCTL_GRACE_S, PET_LOG_DIR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (the interface
# towards the head node).
set -e -o pipefail
umask "${DTCTL_UMASK:-$(umask)}"  # of the login; what dtctl writes is for its user alone

# dtctl: unbuffered output, and the same order of sets in each run
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

# dtctl: shows the rank of each line
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[dtctl:${rank}] '

# job.env
export VALUE='a,b '"'"'c'"'"' "d"
$(e) `f` \'
export NCCL_IB_HCA=mlx5_0,mlx5_1

# cluster.nodes: a;b
export NODE='it'"'"'s'

# dtctl: place in the job
export DTCTL_RUN_ID=run-1
export DTCTL_ATTEMPT=0
export DTCTL_NODE='a;b'
export DTCTL_NODE_RANK=0
export DTCTL_NNODES=1
export DTCTL_SLOTS=2
export NODE_RANK=0

# Last, and with exec: signals and the exit code pass straight through.
exec torchrun \
  --nnodes=1 \
  --nproc-per-node=2 \
  --node-rank=0 \
  --rdzv-backend=static \
  --rdzv-id=run-1.0 \
  --master-addr=10.0.0.1 \
  --master-port=31399 \
  --max-restarts=0 \
  --tee=3 \
  'a b'"'"'c.py' \
  '' \
  -n \
  'a
b' \
  "${HOME}" \
  ''"'"'' \
  '"' \
  'é' \
  '*' \
  "${HOME}" \
  a,b \
  '\' \
  '!!' \
  '#'
