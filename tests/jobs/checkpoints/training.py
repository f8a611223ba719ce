"""A model and everything that a job restores, trained on some ranks or alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel

from distdl_rma import Checkpoints, Machine, distribute

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SGD, plain": lambda p: torch.optim.SGD(p, 0.1),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, history_size=3),
}


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(width, dtype=torch.float64)
        self.last = nn.Conv2d(width, 1, 3, padding=1, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class Loader:
    """Draws a batch from a seed and a position, as a loader that can be saved."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        draw = torch.Generator().manual_seed(self.at)
        self.at += 1
        return torch.rand(2, 2, 1, 9, 7, generator=draw, dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Job:
    def __init__(self, optimizer: str = "Adam", partition=None, width: int = 4, device="cpu") -> None:
        torch.manual_seed(1)
        self.device = device
        self.model = Net(width)
        # Torch averages no integers on devices.
        averaged = AveragedModel(self.model, use_buffers=device == "cpu").to(device)
        self.model.to(device)
        if partition is not None:
            distribute(self.model, partition.create_cartesian_topology_partition((1, 1, partition.size, 1)))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3], 0.5)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": scheduler, "average": averaged,
            "scaler": torch.amp.GradScaler("cpu", 64.0), "loader": Loader(), "epoch": 0,
            "best": torch.zeros(3, device=device), "seen": {"last": [torch.zeros(2, device=device)]},
        }  # fmt: skip

    def steps(self, number: int) -> list[float]:
        return [self.step() for _ in range(number)]

    def step(self) -> float:
        x, y = next(self.state["loader"])
        # Only one random number, the same on all ranks.
        x, y = (x + torch.rand(())).to(self.device), y.to(self.device)

        def closure():
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            return loss

        loss = float(self.optimizer.step(closure).detach())
        self.state["scheduler"].step()
        self.state["average"].update_parameters(self.model)
        self.state["epoch"] += 1
        self.state["best"][self.state["epoch"] % 3] = self.state["epoch"]
        self.state["seen"]["last"][0].fill_(self.state["epoch"])
        return loss

    def close(self):
        if hasattr(self.model, "distributed"):
            self.model.distributed.close()

    def tensors(self):
        """All tensors of the job that are on its device."""
        found = [*self.model.state_dict().values(), *self.state["average"].parameters()]
        for values in self.optimizer.state.values():
            # Torch keeps the steps of Adam on the host.
            found += [x for key, x in values.items() if key != "step" and isinstance(x, torch.Tensor)]
        return [*found, self.state["best"], *self.state["seen"]["last"]]


def goes_on(comm, folder, optimizer, asynchronous, places=("cpu",) * 4):
    """Steps of a job that goes on at each of the places, on other ranks; returns one that was not killed."""
    alone = Job(optimizer)
    torch.manual_seed(7)
    wanted = alone.steps(8)
    # From one of the ranks to all; the others take no part.
    for number, size in enumerate([1, comm.size, max(1, comm.size - 1), min(2, comm.size)]):
        if comm.rank < size:
            with Machine(comm, range(size)) as machine:
                job = Job(optimizer, machine.partition(), device=places[number])
                torch.manual_seed(7 if not number else 99)
                with Checkpoints(folder, asynchronous=asynchronous, machine=machine) as kept:
                    assert kept.restore(job.state) == job.state["epoch"] == 2 * number
                    assert {x.device.type for x in job.tensors()} == {torch.device(places[number]).type}
                    losses = job.steps(2)
                    kept.save(job.state, 2 * number + 2)
                    # What is saved is that of the call.
                    for x in job.tensors():
                        x.detach().zero_()
                job.close()
            torch.testing.assert_close(losses, wanted[2 * number : 2 * number + 2])
        comm.Barrier()
    return alone
