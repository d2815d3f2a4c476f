#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node b, node rank 1 of 2, workers 4-7 of 8, spec 7e90714a203a4bb3.
# Started in the folder of the pushed code, 4 times, each with its own RANK, ROLE_RANK, LOCAL_RANK and TORCHELASTIC_ERROR_FILE. Set on the node before this runs:
# DTCTL_RUN_DIR, DTCTL_METRICS, DTCTL_SNAPSHOT_DIR, DTCTL_PROGRESS, DTCTL_GRACE_S, PET_LOG_DIR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (the interface
# towards the head node).
set -e -o pipefail
umask "${DTCTL_UMASK:-$(umask)}"  # of the login; what dtctl writes is for its user alone

# dtctl: unbuffered output, and the same order of sets in each run
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

# torch's own default, unless the node sets it
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

# dtctl: signals that torchrun passes on to workers
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP

# spec: train, for accelerate
export ACCELERATE_MIXED_PRECISION=bf16
export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2
export ACCELERATE_DYNAMO_BACKEND=INDUCTOR
export ACCELERATE_USE_FSDP=true
export FSDP_VERSION=2
export FSDP_RESHARD_AFTER_FORWARD=true
export FSDP_OFFLOAD_PARAMS=false
export FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
export FSDP_ACTIVATION_CHECKPOINTING=true
export ACCELERATE_USE_PARALLELISM_CONFIG=true
export PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2
export PARALLELISM_CONFIG_DP_SHARD_SIZE=4
export PARALLELISM_CONFIG_CP_SIZE=1
export PARALLELISM_CONFIG_TP_SIZE=1

# job.env
export FSDP_TRANSFORMER_CLS_TO_WRAP=BertLayer

# spec: train
export DTCTL_TRAIN_CONFIG='{"accumulate":2,"checkpointing":"full","compile":true,"model":{"layers":2},"precision":"bf16","strategy":"hsdp"}'

# dtctl: place in the job
export DTCTL_RUN_ID=run-1
export DTCTL_ATTEMPT=0
export DTCTL_NODE=b
export DTCTL_NODE_RANK=1
export DTCTL_NNODES=2
export DTCTL_SLOTS=4
export MASTER_ADDR=10.0.0.1
export MASTER_PORT=31399
export WORLD_SIZE=8
export LOCAL_WORLD_SIZE=4
export GROUP_RANK=1
export NODE_RANK=1
export GROUP_WORLD_SIZE=2
export ROLE_NAME=default
export ROLE_WORLD_SIZE=8
export TORCHELASTIC_RUN_ID=run-1.0
export TORCHELASTIC_RESTART_COUNT=0
export TORCHELASTIC_MAX_RESTARTS=0
export TORCHELASTIC_USE_AGENT_STORE=False

# Last, and with exec: signals and the exit code pass straight through.
exec python3 \
  -u \
  nlp_example.py
