"""Loops with several models, in a session: each gives the weights of one process, and survives kills.

torchrun --nproc-per-node 2 examples/several_models.py gan
torchrun --nproc-per-node 2 examples/several_models.py byol --fsdp

gan        a maker and a critic, with an optimizer each
actor      an actor and its critic
byol       a student and a teacher that follows it
reference  preferences, beside a frozen copy of the model
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dtctl.runtime import session

BATCH, EPOCHS = 16, 3


def spread(model):
    """Divide a model over the workers, or copy it to all of them."""
    if "--fsdp" in sys.argv:
        fully_shard(model)
        return model
    return DistributedDataParallel(model)


def batches(*tensors):
    """Return a loader that gives each worker its share of every batch."""
    data, workers = TensorDataset(*tensors), dist.get_world_size()
    return DataLoader(data, BATCH // workers, sampler=DistributedSampler(data, shuffle=True, seed=1))


def follow(teacher, student, share):
    """Move the weights of a teacher towards those of its student."""
    if "--fsdp" in sys.argv:
        teacher.reshard()  # a pass without a backward pass leaves the weights in one piece
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, share)


def gan():
    """Random numbers are a part of the data: so each sample has the same ones on any number of workers."""
    maker, critic = spread(nn.Linear(3, 4)), spread(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    models = {"maker": maker, "critic": critic}
    steps = {"maker": torch.optim.Adam(maker.parameters()), "critic": torch.optim.SGD(critic.parameters(), 0.1, 0.9)}
    rates = {"critic": torch.optim.lr_scheduler.ExponentialLR(steps["critic"], 0.98)}

    def step(training, noise, real):
        made = maker(noise)
        judged = critic(torch.cat([made.detach(), real]))
        training.backward(judged[: len(made)].mean() - judged[len(made) :].mean())
        training.update("critic")
        loss = -critic(made).mean()
        training.backward(loss)
        training.update("maker")
        return loss

    loader = batches(torch.randn(96, 3), torch.randn(96, 4) + 1)
    with session(models, steps, loader, schedule=rates, clip=1.0, every_steps=4) as s:
        for _ in s.epochs(EPOCHS):
            for noise, real in s.batches:
                s.end_step(step(s, noise, real))
    return models


def actor():
    """The noise that chooses an action is a part of the data, too."""
    models = {"actor": spread(nn.Linear(4, 3)), "critic": spread(nn.Linear(4, 1))}
    steps = {name: torch.optim.Adam(model.parameters(), 0.01) for name, model in models.items()}
    states, noise = torch.randn(96, 4), -(-torch.rand(96, 3).log()).log()
    with session(models, steps, batches(states, noise), every_steps=4) as s:
        for _ in s.epochs(EPOCHS):
            for state, drawn in s.batches:
                logits, value = models["actor"](state), models["critic"](state)[:, 0]
                action = (logits + drawn).argmax(1)
                reward = state.gather(1, action[:, None])[:, 0]
                chosen = functional.log_softmax(logits, 1).gather(1, action[:, None])[:, 0]
                s.step(-(chosen * (reward - value).detach()).mean() + (reward - value).square().mean())
    return models


def byol():
    """The teacher has no optimizer; it is a model of the session, so that snapshots have it."""
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    student, teacher = network, copy.deepcopy(network).requires_grad_(False)
    if "--fsdp" in sys.argv:
        fully_shard(student)
        fully_shard(teacher)
    predict = spread(nn.Linear(4, 4))
    model = student if "--fsdp" in sys.argv else DistributedDataParallel(student)
    trained = {"student": student, "predict": predict}
    steps = {name: torch.optim.Adam(module.parameters(), 0.01) for name, module in trained.items()}
    views = torch.randn(96, 4)
    loader = batches(views + 0.1 * torch.randn(96, 4), views + 0.1 * torch.randn(96, 4))
    models = {"student": model, "predict": predict, "teacher": teacher}
    with session(models, steps, loader, every_steps=4) as s:
        for _ in s.epochs(EPOCHS):
            for one, other in s.batches:
                with torch.no_grad():
                    wanted = teacher(other)
                s.step(-functional.cosine_similarity(predict(model(one)), wanted).mean())
                follow(teacher, student, 0.05)
    return models


def reference():
    """The frozen copy is made again by the program in each attempt, so it is no part of the session."""
    policy = nn.Linear(4, 6)
    frozen = copy.deepcopy(policy).requires_grad_(False)
    policy = spread(policy)
    better, worse = torch.randint(0, 6, (96,)), torch.randint(0, 6, (96,))
    loader = batches(torch.randn(96, 4), better, worse)
    with session(policy, torch.optim.Adam(policy.parameters(), 0.01), loader, clip=1.0, every_steps=4) as s:
        for _ in s.epochs(EPOCHS):
            for prompt, good, bad in s.batches:
                ratio = functional.log_softmax(policy(prompt), 1) - functional.log_softmax(frozen(prompt), 1)
                margin = ratio.gather(1, good[:, None]) - ratio.gather(1, bad[:, None])
                s.step(-functional.logsigmoid(0.5 * margin).mean())
    return {"policy": policy}


def main():
    """Train, and print a sum of the weights."""
    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    models = {"gan": gan, "actor": actor, "byol": byol, "reference": reference}[sys.argv[1]]()
    weights = [parameter.detach() for model in models.values() for parameter in model.parameters()]
    whole = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]
    if dist.get_rank() == 0:
        print(f"weights {sum(float(weight.square().sum()) for weight in whole):.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
