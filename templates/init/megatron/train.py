"""Train a tiny GPT of Megatron-Core with tensor and data parallelism, on GPUs or CPUs; resumes from its checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, CONTEXT = 64, 32
LATEST = "latest_checkpointed_iteration.txt"


def arguments() -> argparse.Namespace:
    """Options as Megatron-LM spells them, so that dtctl can make them of the spec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, choices=[1])  # its p2p is for GPUs alone
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    here = Path(os.environ.get("DTCTL_SNAPSHOT_DIR", "checkpoints"))
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--save", type=Path, default=here, help="A folder that all nodes see.")
    parser.add_argument("--load", type=Path, default=here)
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def setup(options: argparse.Namespace) -> torch.device:
    """Process groups and random states; the device of this worker."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(options.tensor_model_parallel_size)
    torch.manual_seed(options.seed)
    if gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)  # the one tracker that asks no GPU; there is no dropout here
    return torch.device("cuda" if gpu else "cpu")


class Attention(torch.nn.Module):
    """Causal attention by torch, in the place of Megatron-Core's own, which takes its buffers from a GPU."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """From [token, sample, head, feature] to [token, sample, all features of this worker's heads]."""
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def build(options: argparse.Namespace) -> GPTModel:
    """The same parameters on every worker, each with its part of the matrices."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=CONTEXT,
    )


def batch(step: int, options: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """Counting with a step of its own in each row: a function of the step, and of the place in the batch."""
    seed = options.seed + step * parallel_state.get_data_parallel_world_size() + parallel_state.get_data_parallel_rank()
    source = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (options.micro_batch_size, 1), generator=source)
    stride = torch.randint(1, 4, (options.micro_batch_size, 1), generator=source)
    return ((start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY).to(device)


def loss_of(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(CONTEXT, device=tokens.device).expand_as(inputs)
    return model(inputs.contiguous(), positions, None, labels=targets.contiguous()).mean()


def average(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Gradients averaged over the workers that have the same part of the model."""
    group = parallel_state.get_data_parallel_group()
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def file_of(folder: Path, step: int) -> Path:
    """Where this worker's part of the model is kept, as Megatron-LM's checkpoint format `torch` has it."""
    part = parallel_state.get_tensor_model_parallel_rank()
    return folder / f"iter_{step:07d}" / f"mp_rank_{part:02d}" / "model_optim_rng.pt"


def save(folder: Path, model: GPTModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint, and then that it is there. Megatron-Core's dist_checkpointing would need GPUs."""
    if parallel_state.get_data_parallel_rank() == 0:
        path = file_of(folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": step}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(str(step))
        (folder / "latest.new").replace(folder / LATEST)


def load(folder: Path, model: GPTModel, optimizer: torch.optim.Optimizer) -> int:
    """Take up the newest whole checkpoint; the step that it was written at, 0 without one."""
    dist.barrier()
    if not (folder / LATEST).is_file():
        return 0
    found = torch.load(file_of(folder, int((folder / LATEST).read_text())), map_location="cpu", weights_only=False)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return found["iteration"]


def main() -> None:
    """Read the place in the job from the environment, train, leave."""
    options = arguments()
    device = setup(options)
    model = build(options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    first = load(options.load, model, optimizer)
    if first and dist.get_rank() == 0:
        print(f"resumed at step {first}", flush=True)
    for step in range(first, options.train_iters):
        loss = loss_of(model, batch(step, options, device))
        optimizer.zero_grad()
        loss.backward()
        average(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{options.train_iters}  loss {loss.item():.4f}", flush=True)
        if (step + 1) % options.save_interval == 0:
            save(options.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
