#!/usr/bin/env bash
# Made by dtctl 0.1.0 for run run-1, attempt 0: node a, node rank 0 of 2, workers 0-3 of 8, spec b4bd87c8d3156af9.
# Started in the folder of the pushed code. Set on the node before this runs:
# DTCTL_RUN_DIR, DTCTL_METRICS, DTCTL_SNAPSHOT_DIR, DTCTL_PROGRESS, PET_LOG_DIR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (the interface
# towards the head node).
set -e -o pipefail

# dtctl: lines reach the log when they are printed
export PYTHONUNBUFFERED=1

# dtctl: tells the ranks' lines apart
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[dtctl:${rank}] '

# spec: train
export DTCTL_TRAIN_CONFIG='{"checkpointing":"full","clip_norm":1.0,"global_batch":64,"lr":0.0003,"micro_batch":2,"min_lr":3e-05,"pipeline":{"schedule":"interleaved","stages_per_worker":3},"precision":"bf16","schedule":"cosine","snapshot":{"dir":"/shared/gpt","every_steps":100},"steps":500,"strategy":{"dp":-1,"pp":2,"tp":2},"tp":{"sequence_parallel":true},"warmup_steps":10}'

# dtctl: place in the job
export DTCTL_RUN_ID=run-1
export DTCTL_ATTEMPT=0
export DTCTL_NODE=a
export DTCTL_NODE_RANK=0
export DTCTL_NNODES=2
export DTCTL_SLOTS=4

# Last, and with exec: signals and the exit code pass straight through.
exec torchrun \
  --nnodes=2 \
  --nproc-per-node=4 \
  --node-rank=0 \
  --rdzv-backend=static \
  --rdzv-id=run-1.0 \
  --master-addr=10.0.0.1 \
  --master-port=31399 \
  --max-restarts=0 \
  --tee=3 \
  pretrain_gpt.py \
  --tensor-model-parallel-size \
  2 \
  --pipeline-model-parallel-size \
  2 \
  --sequence-parallel \
  --num-virtual-stages-per-pipeline-rank \
  3 \
  --micro-batch-size \
  2 \
  --global-batch-size \
  64 \
  --lr \
  0.0003 \
  --min-lr \
  3e-05 \
  --lr-warmup-iters \
  10 \
  --train-iters \
  500 \
  --clip-grad \
  1.0 \
  --lr-decay-style \
  cosine \
  --bf16 \
  --recompute-granularity \
  full \
  --recompute-method \
  uniform \
  --recompute-num-layers \
  1 \
  --save \
  /shared/gpt \
  --load \
  /shared/gpt \
  --save-interval \
  100 \
  --num-layers \
  24 \
  --mock-data
