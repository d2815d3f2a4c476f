#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node b, node rank 1 of 2, workers 4-7 of 8, spec 2a5dc10fad7cc919.
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

# spec: train, for deepspeed
export DTCTL_DEEPSPEED_CONFIG='{"bf16":{"enabled":true},"gradient_accumulation_steps":2,"gradient_clipping":1.0,"train_batch_size":64,"train_micro_batch_size_per_gpu":4,"zero_optimization":{"offload_optimizer":{"device":"cpu"},"offload_param":{"device":"cpu"},"stage":3}}'

# spec: train
export DTCTL_TRAIN_CONFIG='{"clip_norm":1.0,"fsdp":{"cpu_offload":true},"global_batch":64,"micro_batch":4,"precision":"bf16","strategy":"fsdp"}'

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
export CROSS_RANK=1
export CROSS_SIZE=2
export LOCAL_SIZE=4

# Last, and with exec: signals and the exit code pass straight through.
exec python3 \
  -u \
  train.py \
  "--local_rank=$LOCAL_RANK" \
  --deepspeed_config \
  eyJiZjE2Ijp7ImVuYWJsZWQiOnRydWV9LCJncmFkaWVudF9hY2N1bXVsYXRpb25fc3RlcHMiOjIsImdyYWRpZW50X2NsaXBwaW5nIjoxLjAsInRyYWluX2JhdGNoX3NpemUiOjY0LCJ0cmFpbl9taWNyb19iYXRjaF9zaXplX3Blcl9ncHUiOjQsInplcm9fb3B0aW1pemF0aW9uIjp7Im9mZmxvYWRfb3B0aW1pemVyIjp7ImRldmljZSI6ImNwdSJ9LCJvZmZsb2FkX3BhcmFtIjp7ImRldmljZSI6ImNwdSJ9LCJzdGFnZSI6M319 \
  --epochs \
  3
