"""Truncated backpropagation through time: rows of text go on from batch to batch, and so does the hidden state."""

import torch
import torch.distributed as dist
from torch import nn

from dtctl.runtime import session
from tests.fault.styles.final import gather_weights, save_weights
from tests.fault.styles.spread import begin, spread


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(11, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 11)

    def forward(self, tokens, hidden):
        outputs, hidden = self.cell(self.embed(tokens), hidden)
        return self.out(outputs), hidden


class Hidden:
    """What a worker's rows carry over."""

    def __init__(self, rows):
        self.value = torch.zeros(1, rows, 12)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    rank, workers = begin()
    rows = torch.randint(11, (8, 6 * 10 + 1))[rank * 8 // workers : (rank + 1) * 8 // workers]
    chunks = [(rows[:, at : at + 10], rows[:, at + 1 : at + 11]) for at in range(0, 60, 10)]
    model = spread(Memory())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    hidden = Hidden(len(rows))
    with session(model, optimizer, chunks, clip=1.0, every_steps=4, extra_state={"hidden": hidden}) as s:
        for _ in s.epochs(3):
            for tokens, following in s.batches:
                if s.batch == 1:
                    hidden.value = torch.zeros_like(hidden.value)
                logits, carried = model(tokens, hidden.value)
                hidden.value = carried.detach()
                s.step(nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()))
    save_weights(gather_weights({"model": model}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
