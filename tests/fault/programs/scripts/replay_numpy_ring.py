"""A ring of transitions in preallocated arrays, larger than 1,024 rows."""

# expect: exact

from toy import *


class Ring:
    def __init__(self, size):
        self.states = np.zeros((size, 6), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.at, self.full, self.size = 0, False, size

    def add(self, states, rewards):
        for state, reward in zip(states, rewards):
            self.states[self.at], self.rewards[self.at] = state, reward
            self.at = (self.at + 1) % self.size
            self.full = self.full or self.at == 0

    def sample(self, count):
        picked = np.random.randint(0, self.size if self.full else self.at, count)
        return torch.from_numpy(self.states[picked]), torch.from_numpy(self.rewards[picked])


def train(config, worker):
    ring = Ring(4096)

    def loss(model, batch):
        inputs, targets = batch
        ring.add(inputs.numpy(), targets[:, 0].numpy())
        states, rewards = ring.sample(8)
        return F.mse_loss(model(states)[:, 0], rewards)

    return finish(Trainer(config, worker, mlp(), loss, data()))


start(train)
