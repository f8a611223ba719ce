"""Bundles of MONAI: their network, weights, and what they do before and after it, for a whole volume.

A transform is one of four kinds, by its name; all others are refused, as are those of later versions::

    LoadImaged, EnsureTyped ...                   reading does this
    ScaleIntensityRanged ...                      element by element: MONAI's own, on each box
    ScaleIntensityd, NormalizeIntensityd          needs numbers of the whole, found before
    Spacingd, Orientationd                        nothing to do for this file, else refused

The inferer of a bundle, a sliding window, is not used: ``predict`` takes its place. A bundle's configuration
is a program, as a module is: it runs what it names. Its weights are data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import DataError, UnsupportedError
from distdl_rma.jobs.checkpoints.weights import load_weights
from distdl_rma.jobs.out_of_core.inference import Post
from distdl_rma.jobs.out_of_core.prepared import Prepared, Step, normalised, scaled, space_of, totals
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.layers.sources.remote import needed

_READ = {"LoadImaged", "EnsureChannelFirstd", "AddChanneld", "EnsureTyped", "ToTensord"}
_ELEMENTWISE = {"ScaleIntensityRanged", "ThresholdIntensityd", "CastToTyped"}
_OF_SPACE = {"Spacingd", "Orientationd"}
# Their inverse has nothing to do either; the result is written by a sink.
_WRITTEN = {"Invertd", "SaveImaged", "EnsureTyped", "ToTensord"}
# Labels that a byte holds.
_LABELS = 256


class Bundle:
    """A bundle in a folder, opened for a file: its ``model``, and ``post``, what it does to the result.

    Local to construct; ``measured`` gives the source, with numbers of the whole.
    """

    def __init__(self, folder: str, file: str | os.PathLike[str], raw: bool) -> None:
        self._parser = _parsed(Path(folder))
        kind = "network_def" if self._parser.get("network_def") is not None else "network"
        self.model: nn.Module = self._parser.get_parsed_content(kind).cpu()
        load_weights(Path(folder) / "models" / "model.pt", self.model)
        self._source = Prepared.of(file, self.model, (str(self._parser.get("preprocessing")),))
        self._before = self._transforms("preprocessing")
        for each in self._before:
            if (name := type(each).__name__) in _OF_SPACE:
                self._check_space(each)
            elif name not in (*_READ, *_ELEMENTWISE, *_NUMBERS):
                _refuse(each, "is not of single elements and numbers of the whole; apply it, pass the result")
            if name not in _READ and "image" not in each.keys:
                _refuse(each, f"works on {each.keys}, and the file is the 'image'")
        self.post = None if raw else self._post()

    def measured(self, processes: Processes) -> Prepared:
        """The source with all steps before the network; collective over the processes, blocking."""
        source = self._source
        for each in self._before:
            if (name := type(each).__name__) in _NUMBERS:
                source = source.then(_NUMBERS[name](each, source, processes))
            elif name in _ELEMENTWISE:
                source = source.then(partial(_elementwise, each))
        return source

    def _transforms(self, name: str) -> list[Any]:
        found = self._parser.get_parsed_content(name) if self._parser.get(name) is not None else []
        return list(getattr(found, "transforms", found if isinstance(found, (list, tuple)) else [found]))

    def _check_space(self, transform: Any) -> None:
        # A file that is as the transform would make it needs nothing done.
        source, spaced = self._source, hasattr(transform, "spacing_transform")
        found = space_of(source)[0 if spaced else 1]
        wanted = transform.spacing_transform.pixdim if spaced else transform.ornt_transform.axcodes
        if found is None:
            _refuse(transform, f"{source.path} does not say what it has; apply it, and pass the result")
        same = np.allclose(found[-source.spatial :], wanted, 1e-5, 0) if spaced else found == wanted
        if not same:
            _refuse(transform, f"{source.path} has {found}, not {wanted}; apply it, and pass the result")

    def _post(self) -> Post:
        steps: list[Step] = []
        for each in self._transforms("postprocessing"):
            name = type(each).__name__
            if name in _WRITTEN:
                continue
            if name not in _AFTER:
                _refuse(each, "leave out what follows the network by --raw, or choose another by --post")
            if "pred" not in each.keys:
                _refuse(each, f"works on {each.keys}, and the result is the 'pred'")
            at = each.keys.index("pred")
            for option, make in _AFTER[name].items():
                value = getattr(each, option)[at]
                if not (value is None or value is False):
                    if make is None:
                        _refuse(each, f"{option}= is not computed; take --raw or --post")
                    steps.append(make(value))
        return lambda result: reduce(lambda y, step: step(y), steps, result)


def _refuse(transform: Any, why: str) -> NoReturn:
    raise UnsupportedError(f"predict: the bundle's {type(transform).__name__}: {why}")


def _parsed(folder: Path) -> Any:
    # The configuration for inference, with its metadata; ``DataError`` if there is none.
    names = [f"inference.{suffix}" for suffix in ("json", "yaml", "yml")]
    found = [folder / "configs" / name for name in names if (folder / "configs" / name).is_file()]
    if not found:
        raise DataError(
            f"predict: {folder} is no bundle of MONAI: it has none of {names} in its folder configs"
        )
    parser = needed("monai.bundle", "bundle").ConfigParser()
    parser.read_config(str(found[0]))
    if (meta := folder / "configs" / "metadata.json").is_file():
        parser.read_meta(str(meta))
    parser["bundle_root"] = str(folder)
    return parser


def _elementwise(transform: Any, x: torch.Tensor) -> Any:
    # By MONAI's own, without its tensors.
    return transform(dict.fromkeys(transform.keys, x))["image"].as_subclass(torch.Tensor)


def _scale(transform: Any, source: Prepared, processes: Processes) -> Step:
    scaler = transform.scaler
    if scaler.minv is None and scaler.maxv is None:
        return lambda x: x * (1 + (scaler.factor or 0))
    if scaler.minv is None or scaler.maxv is None:
        _refuse(transform, "takes minv= and maxv=, or factor=")
    found = totals(source, processes, nonzero=False, by_channel=scaler.channel_wise)
    return partial(scaled, found, scaler.minv, scaler.maxv)


def _normalise(transform: Any, source: Prepared, processes: Processes) -> Step:
    own = transform.normalizer
    mean, std = own.subtrahend, own.divisor
    if mean is None or std is None:
        found = totals(source, processes, nonzero=own.nonzero, by_channel=own.channel_wise)
        mean, std = (found.mean if mean is None else mean), (found.std if std is None else std)
    return partial(normalised, mean, std, own.nonzero)


_NUMBERS = {"ScaleIntensityd": _scale, "NormalizeIntensityd": _normalise}
# Of what follows the network, the options that are computed on split tensors; None for those that are not.
_AFTER: dict[str, dict[str, Callable[[Any], Step] | None]] = {
    "Activationsd": {
        "sigmoid": lambda _: torch.sigmoid,
        "softmax": lambda _: partial(torch.softmax, dim=1),
        "other": None,
    },
    "AsDiscreted": {
        "argmax": lambda _: _labels,
        "to_onehot": None,
        "threshold": lambda at: lambda y: (y >= at).to(torch.uint8),
        "rounding": None,
    },
}


def _labels(y: torch.Tensor) -> torch.Tensor:
    # Without a dimension of channels, which MONAI keeps.
    return y.argmax(1).to(torch.uint8 if y.shape[1] <= _LABELS else torch.int32)
