"""Train, validate, keep the best, resume, predict: ``mpiexec -n 2 python -m mpi4py examples/recipe.py``.

A network learns to take noise off photographs. If the job is killed, the same command goes on after the last
complete epoch, on any number of ranks, with the same losses. Comments that name ranks mark what is new.
"""

import argparse
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import skimage.io
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

from distdl_rma import Checkpoints, Machine, distribute, load_checkpoint, predict, print0

TRAIN = "astronaut.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"
VALIDATE, PREDICT = ("chelsea.png", "ihc.png"), "hubble_deep_field.jpg"
NOISE, CROP = 0.1, 128


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("recipe-output"), help="folder, which is made")
    parser.add_argument("--grid", default=None, help="blocks of height and width, as 2x2; rows if not given")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the whole training (20)")
    parser.add_argument("--crops", type=int, default=16, help="random crops in an epoch (16)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step of the optimizer (2)")
    parser.add_argument("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    parser.add_argument("--pretrained", type=Path, help="file of torch.save(model.state_dict(), file)")
    return parser.parse_args()


def read(name: str) -> Tensor:
    """A photograph, (channels, height, width), from 0 to 1."""
    pixels = skimage.io.imread(Path(skimage.data.data_dir) / name)[..., :3]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float() / 255


class Photographs(Dataset[tuple[Tensor, Tensor]]):
    """Random crops of photographs, with and without noise. torch's generator draws, alike on all ranks."""

    def __init__(self, names: tuple[str, ...], crops: int) -> None:
        self.photographs, self.crops = [read(name) for name in names], crops

    def __len__(self) -> int:
        return self.crops

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        photograph = self.photographs[number % len(self.photographs)]
        top, left = (int(torch.randint(extent - CROP + 1, ())) for extent in photograph.shape[1:])
        clean = photograph[:, top : top + CROP, left : left + CROP]
        return clean + NOISE * torch.randn(clean.shape), clean


def network() -> nn.Module:
    """Any model: this one finds the noise of a photograph."""
    inner = [layer for _ in range(3) for layer in (nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), *inner, nn.Conv2d(24, 3, 3, padding=1))


def train(model: nn.Module, loader: DataLoader[Any], optimizer: Any, chosen: argparse.Namespace) -> float:
    """One epoch; the mean of its losses."""
    model.train()
    losses = []
    for number, (noisy, clean) in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=chosen.bf16):
            loss = F.mse_loss(model(noisy), noisy - clean)
        (loss / chosen.accumulate).backward()
        if number % chosen.accumulate == 0 or number == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())  # the loss of whole crops, the same on every rank
    return sum(losses) / len(losses)


def psnr_of(x: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, the metric; of whole pictures, the same on every rank."""
    return -10 * F.mse_loss(x, clean).log10().item()


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """Mean of the metric over whole photographs, with noise that is always the same."""
    model.eval()
    draw, found = torch.Generator().manual_seed(1), []
    for clean in (read(name)[None] for name in VALIDATE):
        noisy = clean + NOISE * torch.randn(clean.shape, generator=draw)
        found.append(psnr_of(noisy - model(noisy), clean))
    return sum(found) / len(found)


def apply(machine: Machine, folder: Path) -> None:
    """Take the noise off a large photograph by the best weights, slab by slab, and draw it."""
    model, files = network(), [folder / name for name in ("noisy.npy", "noise.npy")]
    load_checkpoint(folder / "best", into=model)  # a plain model, on every rank
    clean, draw = read(PREDICT), torch.Generator().manual_seed(2)
    noisy = clean + NOISE * torch.randn(clean.shape, generator=draw)
    if machine.rank == 0:
        np.save(files[0], noisy.numpy())
        files[1].unlink(missing_ok=True)
    machine.group().barrier()  # the file is there for all ranks
    predict(model, *files, memory="256MiB")  # each rank computes its share of slabs; the first one writes
    if machine.rank == 0:
        denoised = noisy - torch.from_numpy(np.load(files[1]))
        pictures = torch.cat([noisy, denoised, clean], 2).clamp(0, 1).mul(255).byte()
        skimage.io.imsave(folder / "prediction.png", pictures.permute(1, 2, 0).numpy())
        print(
            f"prediction: {psnr_of(noisy, clean):.2f} dB with noise, {psnr_of(denoised, clean):.2f} without"
        )


def main() -> None:
    """The job; if it is told to stop before it is complete, its exit status is 3: start it again."""
    chosen = options()
    chosen.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)  # on all ranks the same: weights, order, crops and noise
    model = network()
    if chosen.pretrained:
        model.load_state_dict(torch.load(chosen.pretrained, weights_only=True))
    model = distribute(model, chosen.grid or {"H": -1})  # from here on a rank computes its block
    machine = Machine.on()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs)
    loader = DataLoader(Photographs(TRAIN, chosen.crops), shuffle=True)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"best": -math.inf, "metrics": ["epoch,loss,psnr\n"]}
    with (
        Checkpoints(chosen.output / "last", keep=2, every=1, stop_on=[signal.SIGUSR1]) as last,
        Checkpoints(chosen.output / "best", keep=1) as best,
    ):
        epoch = last.restore(state)  # 0 in a new folder: resume needs no option
        while epoch < chosen.epochs and not last.stopping:
            loss = train(model, loader, optimizer, chosen)
            psnr = validate(model)
            scheduler.step()
            epoch += 1
            state["metrics"].append(f"{epoch},{loss},{psnr}\n")
            print0(f"epoch {epoch:3}  loss {loss:.5f}  validation {psnr:.2f} dB")
            if psnr > state["best"]:
                state["best"] = psnr
                best.save(state, epoch)
            if machine.rank == 0:  # or a SummaryWriter of TensorBoard, on this rank as well
                (chosen.output / "metrics.csv").write_text("".join(state["metrics"]))
            if last.due(epoch):  # after each epoch; here the ranks learn that one of them got the signal
                last.save(state, epoch)
    if epoch < chosen.epochs:
        if machine.rank == 0:
            (chosen.output / "stopped").touch()  # for examples/cluster/slurm.sbatch
        raise SystemExit(3)
    apply(machine, chosen.output)


if __name__ == "__main__":
    main()
