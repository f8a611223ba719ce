"""The recipe by PyTorch Lightning: ``mpiexec -n 2 python -m mpi4py examples/recipe_lightning.py``.

The same network, photographs and losses as in ``recipe.py``. Lightning does not know the ranks: each one has
a trainer of one device, and the first one writes logs and checkpoints. A killed job goes on with the same
command. Lightning saves no random numbers, so crops and noise are then others than without the kill.
"""

import argparse
from pathlib import Path
from typing import Any

import pytorch_lightning as L  # noqa: N812
import torch
from mpi4py import MPI
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from distdl_rma import Machine, distribute
from recipe import NOISE, TRAIN, VALIDATE, Photographs, network, psnr_of, read


class Denoiser(L.LightningModule):
    """The network of the recipe, with its loss, metric and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        noisy, clean = batch
        loss = F.mse_loss(self.network(noisy), noisy - clean)
        self.log("loss", loss.item(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, clean: Tensor, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        noisy = clean + NOISE * torch.randn(clean.shape, generator=draw)
        self.log("psnr", psnr_of(noisy - self.network(noisy), clean), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("lightning-output"), help="folder, which is made")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the whole training (20)")
    parser.add_argument("--crops", type=int, default=16, help="random crops in an epoch (16)")
    chosen = parser.parse_args()
    L.seed_everything(0)  # on all ranks the same: weights, order, crops and noise
    model = Denoiser()
    distribute(model, {"H": -1})  # from here on a rank computes its block
    first = Machine.on().rank == 0
    best = ModelCheckpoint(chosen.output, "best", monitor="psnr", mode="max", save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=chosen.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(chosen.output, "logs") if first else False,
        callbacks=[best] if first else [],
        enable_checkpointing=first,
        enable_progress_bar=first,
        enable_model_summary=first,
    )
    last = chosen.output / "last.ckpt"
    training = DataLoader(Photographs(TRAIN, chosen.crops), shuffle=True)
    validation: DataLoader[Any] = DataLoader([read(name) for name in VALIDATE])  # type: ignore[arg-type]
    # As the first rank sees it: on a shared disk others may not see a new file yet.
    goes_on = MPI.COMM_WORLD.bcast(last.exists())
    trainer.fit(model, training, validation, ckpt_path=last if goes_on else None)


if __name__ == "__main__":
    main()
