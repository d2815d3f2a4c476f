"""In the shape of DeepSpeed's Getting Started: add_config_arguments, initialize(args), load_checkpoint, client_sd."""

import argparse

import deepspeed
import torch
from torch.utils.data import TensorDataset


def add_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("--backend", type=str, default="nccl")
    parser.add_argument("--load_dir", type=str, required=True)
    parser.add_argument("--save_dir", type=str, required=True)
    parser.add_argument("--save_interval", type=int, default=40)
    parser.add_argument("--steps", type=int, default=600)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    cmd_args = add_argument()
    deepspeed.init_distributed(dist_backend=cmd_args.backend)
    torch.manual_seed(42)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    inputs = torch.randn(4096, 16)
    labels = (inputs.sum(dim=1) > 0).long()
    model_engine, optimizer, data_loader, _ = deepspeed.initialize(
        args=cmd_args,
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        training_data=TensorDataset(inputs, labels),
    )
    rank = torch.distributed.get_rank()
    if rank == 0:
        print(
            f"rank of {torch.distributed.get_world_size()} local {cmd_args.local_rank} stage "
            f"{model_engine.zero_optimization_stage()} micro {model_engine.train_micro_batch_size_per_gpu()} "
            f"clip {model_engine.gradient_clipping()}",
            flush=True,
        )

    # load checkpoint
    found, client_sd = model_engine.load_checkpoint(cmd_args.load_dir)
    step = client_sd["step"] if found else 0
    if found and rank == 0:
        print(f"Resumed from checkpoint: step {step}", flush=True)

    while step < cmd_args.steps:
        for batch, target in data_loader:
            # forward() method
            loss = torch.nn.functional.cross_entropy(model_engine(batch), target)
            # runs backpropagation
            model_engine.backward(loss)
            # weight update
            model_engine.step()
            step += 1
            # save checkpoint
            if step % cmd_args.save_interval == 0:
                model_engine.save_checkpoint(cmd_args.save_dir, f"step_{step}", client_state={"step": step})
                if rank == 0:
                    print(f"saved step {step} loss {loss.item():.4f}", flush=True)
            if step == cmd_args.steps:
                break
    if rank == 0:
        print("finished", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
