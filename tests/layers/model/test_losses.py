"""Losses of MONAI, and as users write them, of split tensors: values and gradients are those of the whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.layers.model.public import torchvision_models
from tests.layers.split.against_whole import check

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4), pytest.mark.in_turn(2, 3, 4)]

CLASSES, PIXELS, PICTURE, VOLUME = 3, (2, 3, 13, 11), (2, 1, 23, 21), (1, 1, 12, 9, 10)


def labels(shape=PIXELS):
    return torch.randint(0, CLASSES, (shape[0], 1, *shape[2:]))


def one_hot(shape=PIXELS):
    return F.one_hot(labels(shape)[:, 0], CLASSES).movedim(-1, 1).double().contiguous()


def scores(shape=PIXELS):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def picture(shape=PICTURE, learns=True):
    return torch.rand(shape, dtype=torch.float64, requires_grad=learns)


# Of MONAI: arguments, what is predicted, and what is wanted.
SOFT, LABELS = {"softmax": True}, {"to_onehot_y": True}
MONAI = {
    "DiceLoss": (SOFT | {"include_background": False, "jaccard": True}, scores, one_hot),
    "DiceLoss of labels": (SOFT | LABELS | {"batch": True}, scores, labels),
    "GeneralizedDiceLoss": (SOFT, scores, one_hot),
    "TverskyLoss": (SOFT | {"alpha": 0.3, "beta": 0.7}, scores, one_hot),
    "FocalLoss": (LABELS | {"use_softmax": True, "weight": [1.0, 2.0, 0.3]}, scores, labels),
    "MCCLoss": (SOFT | LABELS, scores, labels),
    "SSIMLoss": ({"spatial_dims": 2, "win_size": 7}, picture, PICTURE),
    "MultiScaleLoss": ({"loss": nn.MSELoss(), "scales": [0, 1, 2]}, picture, PICTURE),
    "LocalNormalizedCrossCorrelationLoss": (
        {"spatial_dims": 3, "kernel_size": 3, "kernel_type": "triangular"}, picture, VOLUME,
    ),
    "GlobalMutualInformationLoss": ({"num_bins": 5}, picture, PICTURE),
    "JukeboxLoss": ({"spatial_dims": 2}, picture, PICTURE),
}  # fmt: skip
# Some of them compute in single precision whatever they are given.
SINGLE = 3e-7


def monai_loss(name, arguments):
    return getattr(pytest.importorskip("monai.losses"), name)(**arguments)


def beside(P_world, loss, x, y, atol=1e-10):
    """With what is wanted split, and with a plain one."""
    check(P_world, loss, [x, y], atol=atol)
    check(P_world, loss, [x], [y], atol=atol)


@pytest.mark.parametrize("name", MONAI)
def test_of_segmentation_and_of_pictures(P_world, name):
    arguments, found, wanted = MONAI[name]
    x, y = (picture(wanted), picture(wanted, False)) if found is picture else (found(), wanted())
    beside(P_world, monai_loss(name.split()[0], arguments), x, y, SINGLE)


@pytest.mark.filterwarnings("ignore:Using a non-tuple")
@pytest.mark.parametrize("kind", ["BendingEnergyLoss", "DiffusionLoss"])
def test_of_displacements(P_world, kind):
    check(P_world, monai_loss(kind, {"normalize": True}), [scores((1, 2, 11, 8))])


def dice(x, y):
    p = x.softmax(1)
    return 1 - ((2 * (p * y).sum((2, 3)) + 1e-6) / (p.sum((2, 3)) + y.sum((2, 3)) + 1e-6)).mean()


def flat_dice(x, y):
    p, t = torch.sigmoid(x).view(-1), y.reshape(-1)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def edges(x, y):
    sobel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    kernel = torch.stack([sobel, sobel.t()])[:, None].repeat(x.shape[1], 1, 1, 1)
    found, wanted = (F.conv2d(each, kernel, padding=1, groups=x.shape[1]) for each in (x, y))
    slopes = zip(*(torch.gradient(each, dim=(2, 3)) for each in (x, y)), strict=True)
    return F.l1_loss(found, wanted) + sum((a - b).square().mean() for a, b in slopes)


def of_a_mask(x, y):
    mask = y > 0.5
    total = torch.zeros(())
    total += ((x - y)[mask] ** 2).mean()
    total += ((x - y) ** 2 * mask).sum() / mask.sum().clamp(min=1)
    return total


def logged(x, y):
    parts = {"dice": dice(x, y), "square": F.mse_loss(x, y)}
    log = {name: part.item() for name, part in parts.items()}
    if log["dice"] > 0 and torch.isfinite(parts["square"]):
        parts["dice"] = parts["dice"] * 2
    return sum(weight * part for weight, part in zip((0.7, 0.3), parts.values(), strict=True))


@pytest.mark.parametrize("loss", [flat_dice, edges, of_a_mask, logged])
def test_as_users_write_them(P_world, loss):
    beside(P_world, loss, scores(), one_hot())


def test_of_what_a_frozen_network_perceives(P_world):
    network = torchvision_models().vgg.make_layers([4, "M", 6, "M"], False).double().requires_grad_(False)
    mean = torch.tensor([0.48, 0.45, 0.4], dtype=torch.float64).view(1, 3, 1, 1)

    def perceived(x, y):
        total, a, b = 0, (x - mean) / 0.22, (y - mean) / 0.22
        for layer in network:
            a, b = layer(a), layer(b)
            if isinstance(layer, nn.ReLU):
                total = total + F.l1_loss(a, b)
        return total

    beside(P_world, perceived, picture(PIXELS), picture(PIXELS, False))
