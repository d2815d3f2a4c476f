"""In the shape of Lightning's `Lightning in 15 minutes` and its cluster guide: LitAutoEncoder on several nodes."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn, utils


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Telling(Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            print(f"rank of {trainer.world_size}", flush=True)
            if trainer.global_step:
                print(f"Resumed from checkpoint: step {trainer.global_step}", flush=True)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.is_global_zero:
            print(f"saved step {trainer.global_step}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dirpath", type=str, required=True)
    parser.add_argument("--max_steps", type=int, default=600)
    args = parser.parse_args()
    L.seed_everything(42)
    encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
    decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
    dataset = utils.data.TensorDataset(torch.rand(2048, 28 * 28), torch.zeros(2048))
    train_loader = utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        max_steps=args.max_steps,
        callbacks=[ModelCheckpoint(dirpath=args.dirpath, every_n_train_steps=40, save_last=True), Telling()],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(LitAutoEncoder(encoder, decoder), train_loader, ckpt_path="last")
    if trainer.is_global_zero:
        print("finished", flush=True)


if __name__ == "__main__":
    main()
