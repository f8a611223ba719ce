"""Arguments of layers, read as torch reads them.

A twin builds torch's layer from the arguments that the user gave it, and takes over its attributes. So
torch's own code binds names, fills in defaults, may turn 3 into (3, 3), and refuses what it would refuse, in
its words. A reader of our own would have to follow every version of torch::

    DistributedMaxPool2d(P_x, 3, stride=2, name="pool")
        own_options      name="pool"                                  for the distributed layer
        by_name          kernel_size=3, stride=2                      names, by torch's signature
        torchs_layer     nn.MaxPool2d(kernel_size=3, stride=2)        refuses, and completes
        take_over        kernel_size, stride, padding, ...            attributes of the distributed layer
"""

from __future__ import annotations

import inspect
import re
import reprlib
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.tensors import MAX_DIMS
from distdl_rma.layers.ops.losses import LEGACY
from distdl_rma.layers.partitioned.core.callbacks import Callbacks

# Numbers of dimensions of the tensors that layers take.
OF_TENSORS = range(1, MAX_DIMS + 1)


class LayerOptions(Callbacks, total=False):
    """Keyword arguments of every layer: its name in messages, and callbacks."""

    name: str | None


class PlacedOptions(LayerOptions, total=False):
    """Keyword-only arguments of layers with parameters, beside those of torch."""

    placement: str | None
    weights: str | None


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of every layer out of keyword arguments; the others are torch's.

    So ``options`` is changed. What is then left over is unknown to torch too, and ``by_name`` says so.
    """
    return {key: options.pop(key) for key in LayerOptions.__annotations__ if key in options}


def torchs_class(layer: type) -> type[nn.Module]:
    """The class of torch that a class of layers is the twin of: the first in the order of its bases.

    A family may inherit from torch's base class, such as ``_ConvNd``; the twin's own class comes before it.
    """
    return next(base for base in layer.__mro__ if base.__module__.startswith("torch.nn.modules"))


def function_of(layer: type) -> str:
    """Name of the function of torch that the twin calls: ``avg_pool3d`` for ``AvgPool3d``."""
    between = r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(between, "_", torchs_class(layer).__name__).lower()


def spatial_dims(layer: type) -> int:
    """Number of spatial dimensions in the name of the twin, such as ``MaxPool2d``; 0 without any."""
    name = torchs_class(layer).__name__
    return int(name[-2]) if name[-2].isdigit() else 0


def signature_of(layer: type) -> inspect.Signature:
    """Signature of the twin without the arguments that torch has given up.

    They keep their places: arguments behind one are given by name, except if nothing is before it. So
    ``(weight, size_average, reduce, reduction)`` becomes ``(weight, *, reduction)``, and ``(size_average,
    reduce, reduction, beta)`` becomes ``(reduction, beta)``. A positional argument never has another meaning
    than for torch's layer.
    """
    found: list[inspect.Parameter] = []
    by_position = True
    for key, parameter in inspect.signature(torchs_class(layer)).parameters.items():
        if key in LEGACY:
            by_position = not found
        else:
            found.append(parameter if by_position else parameter.replace(kind=parameter.KEYWORD_ONLY))
    return inspect.Signature(found)


def by_name(layer: type, *arguments: Any, **given: Any) -> dict[str, Any]:
    """Arguments of the twin by their names; ``TypeError`` if one is missing or unknown.

    Those that are not given are left out, so that torch's defaults hold.

    Examples
    --------
    >>> by_name(DistributedLayerNorm, 32, bias=False)
    {'normalized_shape': 32, 'bias': False}
    """
    signature = signature_of(layer)
    try:
        return signature.bind(*arguments, **given).arguments
    except TypeError as error:
        raise TypeError(f"{layer.__name__}: {error}; it takes partitions, then {signature}") from None


def torchs_layer(
    layer: type, *arguments: Any, sample: Sequence[torch.Tensor] = (), memory: bool = True, **given: Any
) -> Any:
    """Build the twin of the same arguments, which checks them, some only in a call: here with a sample.

    Many of torch's layers take anything when they are built, and raise in the first call. A distributed layer
    must not: there a rank may already wait for another. So such a twin is called once at construction, with
    a tiny tensor, or with one on the device ``meta``, where calls take no memory and no time. Without
    ``memory`` the twin is there itself: it has no values, and draws none.

    Raises ``ArgumentError`` with torch's text and the arguments if torch raises, and ``TypeError`` as
    ``by_name``.
    """
    twin, named = torchs_class(layer), by_name(layer, *arguments, **given)
    if "device" in signature_of(layer).parameters:
        # Before the twin draws its parameters there.
        check_device(layer.__name__, named.get("device"))
    try:
        like: Any = twin(**named if memory else named | {"device": "meta"})
        if sample:
            with warnings.catch_warnings():
                # They are told in the calls of users.
                warnings.simplefilter("ignore")
                like(*sample)
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        shown = ", ".join(f"{key}={reprlib.repr(it)}" for key, it in named.items()) or "no arguments"
        tried = f", tried with an input of shape {tuple(sample[0].shape)}" if sample else ""
        raise ArgumentError(f"{layer.__name__}: {error}; got {shown}{tried}") from None
    return like


def check_dims(layer: type, dims: Collection[int], **partitions: Partition | None) -> None:
    """Raise ``PartitionError`` if what is given is no partition, or not of the tensor's dimensions."""
    for label, P in partitions.items():
        if P is not None and not isinstance(P, Partition):
            raise PartitionError(f"{layer.__name__}: {label} must be a partition, got {P!r}")
        if P is not None and P.dim not in dims:
            wanted = " or ".join(map(str, dims)) if len(dims) < 3 else f"{min(dims)} to {max(dims)}"
            raise PartitionError(
                f"{layer.__name__}: {label} has {P.dim} dimensions {P.shape}, the tensor has {wanted}"
            )


def placed_options(
    layer: type, allowed: Sequence[str], options: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """``own_options`` of a layer with parameters, and their placement, which is taken out as well.

    It is one of ``allowed``, by default the first. ``weights`` is another name of ``placement``.
    ``ArgumentError`` if the two differ, or are not allowed.
    """
    kind, placement, weights = layer.__name__, options.pop("placement", None), options.pop("weights", None)
    if None not in (placement, weights) and placement != weights:
        raise ArgumentError(
            f"{kind}: placement={placement!r} and weights={weights!r} mean the same; give one"
        )
    chosen = next((word for word in (placement, weights) if word is not None), allowed[0])
    if chosen not in allowed:
        raise ArgumentError(f"{kind}: placement is one of {tuple(allowed)}, got {chosen!r}")
    return own_options(options), chosen


def check_device(kind: str, device: torch.device | str | None) -> None:
    """Raise ``UnsupportedError`` if a device is not the CPU; None is torch's default device."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type != "cpu":
        raise UnsupportedError(
            f"{kind}: device {found} is not supported: build the layer on the CPU, then move it by to()"
        )


def shown_signature(layer: type[nn.Module], named: Iterable[str]) -> inspect.Signature:
    """Signature of a constructor for ``help``: partitions, the arguments of the twin, and keyword ones.

    The constructor itself takes ``*arguments, **options``, as it serves all layers of a family.
    """
    kinds = inspect.Parameter
    own = inspect.signature(layer.__init__).parameters.values()
    _self, *partitions = (each for each in own if each.kind is kinds.POSITIONAL_OR_KEYWORD)
    keywords = [kinds(key, kinds.KEYWORD_ONLY, default=None) for key in named]
    return inspect.Signature([*partitions, *signature_of(layer).parameters.values(), *keywords])
