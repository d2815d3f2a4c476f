"""A sum tree as a list of 4,095 floats that are set in place."""

# expect: not exact

from toy import *


class SumTree:
    def __init__(self, leaves):
        self.leaves, self.tree, self.at = leaves, [0.0] * (2 * leaves - 1), 0

    def add(self, priority):
        node = self.at + self.leaves - 1
        change = priority - self.tree[node]
        while True:
            self.tree[node] += change
            if node == 0:
                break
            node = (node - 1) // 2
        self.at = (self.at + 1) % self.leaves


tree = SumTree(2048)


def loss(model, batch):
    value = mse(model, batch)
    tree.add(value.item())
    return value * (1 + 0.1 * tree.tree[0])


fit(loss)
