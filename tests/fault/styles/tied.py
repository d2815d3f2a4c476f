"""A translator with one table for encoder, decoder and output; sentences of unequal length, a loss per token."""

import torch
from torch import nn

from dtctl.runtime import TensorData, Trainer, run
from tests.fault.styles.final import save_weights


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, source, target):
        _, state = self.encoder(self.embed(source))
        return self.out(self.decoder(self.embed(target), state)[0])


def loss(model, batch):
    source, target = batch  # 0 pads
    logits, wanted = model(source, target[:, :-1]), target[:, 1:]
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
    return summed, (wanted != 0).sum()


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(1, 13, (96, 9), generator=generator) for _ in range(2))
    target[torch.arange(9) >= torch.randint(3, 10, (96, 1), generator=generator)] = 0
    trainer = Trainer(config, worker, Translator(), loss, TensorData(source, target))
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18, "clip_norm": 1.0}))
