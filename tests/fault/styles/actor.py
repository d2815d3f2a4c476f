"""Advantage actor-critic on environments that go on from step to step: no loader, their state in `extra_state`."""

import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime import session
from tests.fault.styles.final import gather_weights, save_weights
from tests.fault.styles.spread import begin, spread


class Environments:
    """This worker's share of 16 environments; each draws from a generator of its own."""

    def __init__(self, numbers):
        self.generators = {number: torch.Generator().manual_seed(number) for number in numbers}
        self.state = torch.stack([torch.randn(4, generator=each) for each in self.generators.values()])

    def act(self, logits):
        noise = torch.stack([torch.rand(3, generator=each) for each in self.generators.values()])
        action = (logits - (-noise.log()).log()).argmax(1)
        reward = self.state.gather(1, action[:, None])[:, 0]
        drift = torch.stack([torch.randn(4, generator=each) for each in self.generators.values()])
        self.state = 0.9 * self.state.roll(1, 1) + 0.3 * drift + 0.1 * action[:, None]
        return action, reward

    def state_dict(self):
        return {"state": self.state, "random": [each.get_state() for each in self.generators.values()]}

    def load_state_dict(self, state):
        self.state = state["state"]
        for generator, kept in zip(self.generators.values(), state["random"], strict=True):
            generator.set_state(kept)


def main():
    rank, workers = begin()
    actor, critic = spread(nn.Linear(4, 3)), spread(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    models = {"actor": actor, "critic": critic}
    steps = {name: torch.optim.Adam(model.parameters(), 0.01) for name, model in models.items()}
    environments = Environments(range(rank * 16 // workers, (rank + 1) * 16 // workers))
    with session(models, steps, every_steps=4, extra_state={"environments": environments}) as s:
        while s.steps_done < 18:
            seen = environments.state
            logits, value = actor(seen), critic(seen)[:, 0]
            action, reward = environments.act(logits.detach())
            after = reward + 0.9 * critic(environments.state)[:, 0].detach()
            chosen = logits.log_softmax(1).gather(1, action[:, None])[:, 0]
            s.step(-(chosen * (after - value).detach()).mean() + (after - value).square().mean())
    save_weights(gather_weights(models))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
