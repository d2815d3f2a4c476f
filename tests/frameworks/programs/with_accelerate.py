"""In the shape of Accelerate's complete_nlp_example.py: --cpu, --checkpointing_steps, resume from the newest folder."""

import argparse
import os

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

MAX_BATCH_SIZE = 16


def get_dataloaders(accelerator, batch_size=16):
    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(dim=1) > 0).long()
    with accelerator.main_process_first():
        train, evaluation = TensorDataset(inputs[:3584], labels[:3584]), TensorDataset(inputs[3584:], labels[3584:])
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(evaluation, batch_size=32)


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, int(config["batch_size"]))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(train_dataloader) * config["num_epochs"])
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.print(f"{accelerator.distributed_type} {accelerator.mixed_precision} on {accelerator.num_processes}")

    overall_step, starting_epoch, resume_step = 0, 0, 0
    accelerator.wait_for_everyone()
    folders = [f for f in os.scandir(args.output_dir) if f.name.startswith("step_")]
    if folders:
        newest = max(folders, key=lambda f: int(f.name.removeprefix("step_")))
        accelerator.load_state(newest.path)
        overall_step = int(newest.name.removeprefix("step_"))
        accelerator.print(f"Resumed from checkpoint: step {overall_step}")
        starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        active = train_dataloader
        if epoch == starting_epoch and resume_step:
            active = skip_first_batches(train_dataloader, resume_step)
        for inputs, labels in active:
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                # Under its final name only when it is whole: a worker may be killed at any moment.
                accelerator.save_state(os.path.join(args.output_dir, "partial"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    target = os.path.join(args.output_dir, f"step_{overall_step}")
                    os.rename(os.path.join(args.output_dir, "partial"), target)
                accelerator.wait_for_everyone()
                accelerator.print(f"saved step {overall_step}", flush=True)

        model.eval()
        right = seen = 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right += int((predictions == references).sum())
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f} of {seen}", flush=True)
    accelerator.print("finished", flush=True)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", type=int, default=40)
    parser.add_argument("--output_dir", type=str, default=".")
    parser.add_argument("--num_epochs", type=int, default=12)
    args = parser.parse_args()
    config = {"lr": 1e-2, "num_epochs": args.num_epochs, "seed": 42, "batch_size": MAX_BATCH_SIZE}
    training_function(config, args)


if __name__ == "__main__":
    main()
