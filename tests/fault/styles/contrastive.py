"""A contrastive loss: each sample against those of all workers, gathered with their gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather

from dtctl.runtime import TensorData, Trainer, run
from tests.fault.styles.final import save_weights


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, image, text):
        return nn.functional.normalize(self.image(image)), nn.functional.normalize(self.text(text))


def gather(rows):
    return torch.cat(all_gather(rows)) if dist.is_initialized() else rows


def loss(model, batch):
    image, text = model(*batch)
    first = len(image) * (dist.get_rank() if dist.is_initialized() else 0)
    own = torch.arange(first, first + len(image))
    of_image = nn.functional.cross_entropy(5 * image @ gather(text).T, own)
    return (of_image + nn.functional.cross_entropy(5 * text @ gather(image).T, own)) / 2


def train(config, worker):
    torch.set_default_dtype(torch.float64)
    images = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorData(images, images[:, :4] + images[:, 2:])
    trainer = Trainer(config, worker, Towers(), loss, data)
    outcome = trainer.run()
    save_weights(trainer.full_weights())
    return outcome


if __name__ == "__main__":
    raise SystemExit(run(train, defaults={"global_batch": 16, "steps": 18, "lr": 0.01}))
