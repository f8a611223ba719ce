"""Predict by a network of nnU-Net for a volume in one piece, exact where nnU-Net averages tiles.

nnU-Net itself prepares the volume and puts the labels back; the network runs slab by slab in between::

    export NNUNET=nnUNet_results/Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres
    python nnunet.py prepare scan.nii.gz prepared     # crops, normalises, resamples: by nnU-Net, in memory
    distdl_rma predict nnunet:network --checkpoint $NNUNET/fold_0/checkpoint_final.pth --post nnunet:labels \
        --in prepared/scan.npy --out prepared/labels.npy --memory 8GiB
    python nnunet.py finish prepared labels.npy       # of the volume's own shape and axes

Several folds: ``nnunet:network`` with ``NNUNET_FOLDS=0,1,2`` averages their logits, without ``--checkpoint``.
A volume whose spacing is not that of the plans is refused: nnU-Net resamples logits, which are not kept here.
Mirroring is not done. Needs ``pip install 'distdl_rma[nnunet]'``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from acvl_utils.cropping_and_padding.padding import pad_nd_image
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import nn

FOLDER = Path(os.environ.get("NNUNET", "."))
DATASET: dict[str, Any] = json.loads((FOLDER / "dataset.json").read_text())
PLANS = PlansManager(json.loads((FOLDER / "plans.json").read_text()))
TRAINER, _, CONFIGURATION = FOLDER.resolve().name.split("__")
CHOSEN, LABELS = PLANS.get_configuration(CONFIGURATION), PLANS.get_label_manager(DATASET)


class Mean(nn.Module):
    """Mean of the logits of the models of several folds."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.models[0](x)
        for model in self.models[1:]:
            y = y + model(x)
        return y / len(self.models)


def one_network() -> nn.Module:
    build = recursive_find_trainer_class_by_name(TRAINER).build_network_architecture
    channels = determine_num_input_channels(PLANS, CHOSEN, DATASET)
    made: nn.Module = build(
        PLANS, CHOSEN, channels, LABELS.num_segmentation_heads, enable_deep_supervision=False
    )
    return made


def network() -> nn.Module:
    """The network of the plans; with the weights of NNUNET_FOLDS, if these are given."""
    folds = [fold for fold in os.environ.get("NNUNET_FOLDS", "").split(",") if fold]
    if not folds:
        return one_network()
    from distdl_rma.jobs.checkpoints.weights import load_weights

    models = [one_network() for _ in folds]
    for fold, model in zip(folds, models, strict=True):
        load_weights(FOLDER / f"fold_{fold}" / "checkpoint_final.pth", model)
    return Mean(models)


def labels(y: torch.Tensor) -> torch.Tensor:
    """Labels of logits: the likeliest, or region by region, of which later ones overwrite earlier ones."""
    if not LABELS.has_regions:
        return y.argmax(1).to(torch.uint8)
    found = torch.zeros_like(y[:, 0])
    for channel, label in enumerate(LABELS.regions_class_order):
        found = torch.where(y[:, channel].sigmoid() > 0.5, label, found)
    return found.to(torch.uint8)


def prepare(files: list[str], folder: Path) -> None:
    """Write what the network gets, and what ``finish`` needs; a file for each channel."""
    if len(CHOSEN.patch_size) == 2:
        sys.exit(f"{CONFIGURATION} predicts slices one by one, which need no slabs; take a 3d configuration")
    preprocessor = CHOSEN.preprocessor_class(verbose=False)
    x, _, properties = preprocessor.run_case(files, None, PLANS, CHOSEN, DATASET)
    if x.shape[1:] != tuple(properties["shape_after_cropping_and_before_resampling"]):
        spacing = [properties["spacing"][d] for d in PLANS.transpose_forward]
        sys.exit(
            f"{files[0]}: its spacing is {spacing}, that of the plans {CHOSEN.spacing}: resample it first"
        )
    # As nnU-Net fills up a volume that is smaller than a tile, to what the strides of the network divide.
    strides = np.prod(CHOSEN.pool_op_kernel_sizes, axis=0)
    extents = np.maximum(-(-np.array(x.shape[1:]) // strides) * strides, CHOSEN.patch_size)
    padded, inner = pad_nd_image(x, extents, "constant", {"constant_values": 0}, True, None)
    folder.mkdir(exist_ok=True)
    np.save(folder / "scan.npy", padded)
    facts = {
        "inner": [[int(each.start), int(each.stop)] for each in inner[1:]],
        "box": [[int(a), int(b)] for a, b in properties["bbox_used_for_cropping"]],
        "shape": [int(n) for n in properties["shape_before_cropping"]],
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def finish(folder: Path, result: str) -> None:
    """Write the labels of the whole volume, in the order of axes in which nnU-Net reads it."""
    facts = json.loads((folder / "facts.json").read_text())
    y = np.load(folder / result)
    whole = np.zeros(facts["shape"], y.dtype)
    inner, box = ([slice(*each) for each in facts[name]] for name in ("inner", "box"))
    whole[tuple(box)] = y[tuple(inner)]
    np.save(folder / result, whole.transpose(PLANS.transpose_backward))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "prepare":
        prepare(arguments[:-1], Path(arguments[-1]))
    else:
        finish(Path(arguments[0]), arguments[1])
