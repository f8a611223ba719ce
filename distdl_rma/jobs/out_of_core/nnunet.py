"""Folders that nnU-Net has trained: networks, and what is done before and after, for a whole volume.

What nnU-Net's predictor does in memory, and where it is done here::

    axes in the order of the plans     the network turns each slab, and its result back
    crop to what is not 0              a pass over the volume; the source reads the box alone (``Place``)
    normalise                          each box as it is read, by numbers of the cropped volume
    resample                           refused, unless the spacing of the file is that of the plans
    zeros around, for the strides      the source has them
    tiles, mirrored                    ``predict`` takes their place: one tile as large as the volume
    mean of the folds, labels          slab by slab, written where the box lies; background is around it
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import DataError, ShapeError, UnsupportedError, told
from distdl_rma.jobs.checkpoints.weights import load_weights
from distdl_rma.jobs.out_of_core.nonzero import box_of_nonzero, with_mask
from distdl_rma.jobs.out_of_core.prepared import Prepared, Step, Totals, normalised, space_of, totals
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.jobs.out_of_core.results import Place
from distdl_rma.layers.sources.remote import needed

_LEAST_STD = 1e-8
_SPACING_TOLERANCE = 1e-3
_MOST_OF_BYTE = 255
_HOME, _AXES = "nnunetv2.utilities", "zyx"
_Z_SCORE = "ZScoreNormalization"
_KNOWN = {"DefaultPreprocessor", _Z_SCORE, "CTNormalization", "NoNormalization"}
_KNOWN |= {"RescaleTo01Normalization", "RGBTo01Normalization"}


class TrainedFolder:
    """A folder of nnU-Net v2, opened for a file: its ``model``, and ``post``, which makes labels.

    ``folds`` are numbers or ``all``, divided by commas; None for all numbers that there are. Local to
    construct; ``measured`` gives the source, with numbers of the whole.
    """

    def __init__(self, folder: str, file: str | os.PathLike[str], raw: bool, folds: str | None) -> None:
        home = Path(folder)
        facts, dataset = (_read(home / name) for name in ("plans.json", "dataset.json"))
        names = home.resolve().name.split("__")
        if len(names) != len(("trainer", "plans", "configuration")):
            raise DataError(f"predict: {folder} is not called as nnU-Net does: TRAINER__PLANS__3d_fullres")
        trainer, _, configuration = names
        weights = _weights(home, folds)
        needed("nnunetv2", "nnunet")
        # It prints that its own folders are not known, which are not needed.
        with redirect_stdout(io.StringIO()):
            self._plans = import_module(f"{_HOME}.plans_handling.plans_handler").PlansManager(facts)
            self._chosen = chosen = self._plans.get_configuration(configuration)
            self._check_plans()
            labels = self._plans.get_label_manager(dataset)
            count = import_module(f"{_HOME}.label_handling.label_handling").determine_num_input_channels
            channels, heads = count(self._plans, chosen, dataset), labels.num_segmentation_heads
            # That of the trainer, which may build another network than the plans say.
            found = import_module(f"{_HOME}.find_objects").recursive_find_trainer_class_by_name(trainer)
            build = found.build_network_architecture
            networks = [
                build(self._plans, chosen, channels, heads, enable_deep_supervision=False) for _ in weights
            ]
        self._source = Prepared.of(file, networks[0], (str(chosen.configuration), str(weights)))
        if self._source.shape[0] != channels:
            raise ShapeError(
                f"predict: {file} has {self._source.shape[0]} channels, {folder} takes {channels}: have"
                " them in one array, channels first, in the order of dataset.json"
            )
        self._order = self._checked_axes()
        self._check_spacing()
        for path, network in zip(weights, networks, strict=True):
            load_weights(path, network)
        self.model: nn.Module = _Turned(networks, self._order)
        order = labels.regions_class_order if labels.has_regions else None
        dtype = torch.uint8 if len(labels.foreground_labels) < _MOST_OF_BYTE else torch.uint16
        self.post = None if raw else partial(_labels, order, dtype)

    def measured(self, processes: Processes) -> Prepared:
        """The source with all steps before the network; collective over the processes, blocking."""
        schemes, masks = self._chosen.normalization_schemes, self._chosen.use_mask_for_norm
        inner, whole = box_of_nonzero(self._source, processes), self._source.shape[1:]
        source = with_mask(self._source, processes) if any(masks) else self._source
        begin, extents = ([*each] for each in zip(*((a.start, a.stop - a.start) for a in inner), strict=True))
        place = Place(tuple(begin), tuple(extents), inner, whole)
        source = replace(source, place=place)
        numbers = cache(lambda mask: totals(source, processes, nonzero=mask, by_channel=True))
        properties = self._plans.foreground_intensity_properties_per_channel
        steps = [
            _scheme(*of_channel, properties[str(channel)], numbers, channel)
            for channel, of_channel in enumerate(zip(schemes, masks, strict=True))
        ]
        # As a volume that is smaller than a tile is filled up, to what the strides of the network divide.
        strides = np.prod(self._chosen.pool_op_kernel_sizes, axis=0)
        for d, stride, patch in zip(self._order, strides, self._chosen.patch_size, strict=True):
            filled = max(-(-extents[d] // int(stride)) * int(stride), int(patch))
            begin[d], extents[d] = begin[d] - (filled - extents[d]) // 2, filled
        place = replace(place, begin=tuple(begin), extents=tuple(extents))
        return replace(source.then(partial(_by_channel, steps)), place=place)

    def _check_plans(self) -> None:
        chosen = self._chosen
        others = sorted({chosen.preprocessor_name, *chosen.normalization_schemes} - _KNOWN)
        if len(chosen.patch_size) != len(_AXES):
            _refuse("this configuration predicts slices one by one, which need no slabs; take a 3d one")
        if chosen.previous_stage_name is not None:
            _refuse("this configuration also takes the result of another one; take 3d_fullres")
        if others:
            _refuse(f"what its plans name {others} is none of {sorted(_KNOWN)}")

    def _checked_axes(self) -> tuple[int, ...]:
        # Axes of the file in the order of the network. A reader of nnU-Net gives z, y, x.
        source, reader = self._source, self._plans.plans["image_reader_writer"]
        codes = space_of(source)[1]
        if "Reorient" in reader and not (reader.startswith("Nibabel") and codes == "RAS"):
            _refuse(f"its reader {reader} turns {source.path}, of orientation {codes}; takes RAS by Nibabel")
        names = [*(getattr(source, "axes", None) or ())][-len(_AXES) :]
        read = [names.index(axis) if sorted(names) == sorted(_AXES) else d for d, axis in enumerate(_AXES)]
        return tuple(read[d] for d in self._plans.transpose_forward)

    def _check_spacing(self) -> None:
        source = self._source
        found, codes = space_of(source)
        wanted = [float(self._chosen.spacing[self._order.index(d)]) for d in range(source.spatial)]
        if found is None:
            _refuse(f"{source.path} does not say its spacing, the plans {wanted}: write it by create_array")
        found = [round(float(each), 6) for each in found[-source.spatial :]]
        if np.allclose(found, wanted, _SPACING_TOLERANCE, 0):
            return
        shape = tuple(round(n * a / b) for n, a, b in zip(source.shape[1:], found, wanted, strict=True))
        how = f"resample it to {shape} elements"
        if codes is not None:
            how += (
                f': python -c "import nibabel as n, nibabel.processing as p; n.save(p.conform(n.load('
                f"'{source.path}'), {shape}, {wanted}, orientation='{codes}'), 'resampled.nii')\""
            )
        _refuse(f"{source.path} has the spacing {found}, the plans {wanted}; {how}")


class _Turned(nn.Module):
    """Mean of networks whose spatial axes are those of the input in another order."""

    def __init__(self, networks: Sequence[nn.Module], order: Sequence[int]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self._order, self._back = (
            (0, 1, *(2 + int(d) for d in each)) for each in (order, np.argsort(np.array(order)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits, with the axes of the input."""
        x = x.permute(self._order)
        y: torch.Tensor = self.networks[0](x)
        for network in self.networks[1:]:
            y = y + network(x)
        return (y / len(self.networks)).permute(self._back)


def _read(path: Path) -> dict[str, Any]:
    with told(DataError, f"predict: {path.parent} is no folder that nnU-Net has trained: {path.name}"):
        return json.loads(path.read_text())


def _weights(home: Path, folds: str | None) -> list[Path]:
    # Files of the folds; fold_all was trained with all data, and is none of the ensemble.
    there = sorted(each.parent.name for each in home.glob("fold_*/checkpoint_final.pth"))
    wanted = [name for name in there if name != "fold_all"]
    if folds is not None:
        wanted = [f"fold_{each}" for each in folds.split(",")]
    if not wanted or not set(wanted) <= set(there):
        raise DataError(
            f"predict: {home} has a checkpoint_final.pth in {there or 'no fold'}, got --fold {folds}"
        )
    return [home / each / "checkpoint_final.pth" for each in wanted]


def _refuse(why: str) -> NoReturn:
    raise UnsupportedError(f"predict: nnU-Net: {why}")


def _by_channel(steps: Sequence[Step], x: torch.Tensor) -> torch.Tensor:
    return torch.stack([step(each) for step, each in zip(steps, x, strict=True)])


def _scheme(
    name: str, mask: bool, properties: dict[str, float], numbers: Callable[[bool], Totals], channel: int
) -> Step:
    # What a scheme does to a channel; ``numbers`` are those of the volume, or of what is within the mask.
    if name == "CTNormalization":
        low, high = properties["percentile_00_5"], properties["percentile_99_5"]
        by = partial(normalised, properties["mean"], max(properties["std"], _LEAST_STD), False)
        return lambda x: by(x.clamp(low, high))
    if name == "NoNormalization":
        return lambda x: x
    low, high, mean, std = (float(each[channel]) for each in numbers(mask and name == _Z_SCORE))
    if name == _Z_SCORE:
        return partial(normalised, mean, max(std, _LEAST_STD), mask)
    if name == "RescaleTo01Normalization":
        return lambda x: (x - low) / max(high - low, _LEAST_STD)
    if low < 0 or high > _MOST_OF_BYTE:
        _refuse(f"its channel {channel} has colours from 0 to 255, the file numbers from {low} to {high}")
    return lambda x: x / _MOST_OF_BYTE


def _labels(order: Sequence[int] | None, dtype: torch.dtype, y: torch.Tensor) -> torch.Tensor:
    # The likeliest, or region by region, of which later ones overwrite earlier ones.
    if order is None:
        return y.argmax(1).to(dtype)
    found = torch.zeros_like(y[:, 0])
    for channel, label in enumerate(order):
        found = torch.where(y[:, channel].sigmoid() > 0.5, label, found)
    return found.to(dtype)
