"""Sequence packing: a batch sampler fills rows of 32 tokens with texts; the loss is a sum and the number of tokens."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dtctl.runtime import Trainer, run
from tests.fault.styles.final import save_weights


class Texts(Dataset):
    def __init__(self):
        draws = random.Random(0)
        self.texts = [torch.tensor([draws.randrange(11) for _ in range(draws.randint(4, 20))]) for _ in range(96)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


class Packs:
    """Texts in random order, as many in a pack as fit into 32 tokens."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.packs = self.fill(list(range(len(lengths))))

    def fill(self, order):
        packs = [[]]
        for index in order:
            if sum(self.lengths[each] for each in packs[-1]) + self.lengths[index] > 32:
                packs.append([])
            packs[-1].append(index)
        return packs

    def __iter__(self):
        return iter(random.sample(self.packs, len(self.packs)))

    def __len__(self):
        return len(self.packs)


def collate(texts):
    """Return the tokens of a pack in one row, and the number of the text that each belongs to."""
    return torch.cat(texts), torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts)])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens, owner):
        query, key, value = self.mix(self.embed(tokens)).chunk(3, dim=-1)
        seen = (owner[:, None] == owner[None, :]).tril()  # of the same text, and not later
        return self.out(nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], seen)[0])


def loss(model, batch):
    tokens, owner = batch
    logits, last = model(tokens, owner)[:-1], owner[1:] != owner[:-1]
    wanted = tokens[1:].masked_fill(last, -100)
    return nn.functional.cross_entropy(logits, wanted, reduction="sum"), (wanted != -100).sum()


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    texts = Texts()
    loader = DataLoader(texts, batch_sampler=Packs([len(text) for text in texts.texts]), collate_fn=collate)
    trainer = Trainer(config, worker, Attention(), loss, loader)
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 4, "steps": 18}))
