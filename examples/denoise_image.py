"""The photograph of the denoising demo: its pixels, its noise, and a picture of what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import skimage.color
import skimage.io
import skimage.util
import torch
from numpy.random import Philox

from distdl_rma.geometry.box import Box

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pixels = npt.NDArray[np.float32]

WORDS_PER_PIXEL = 4
CHANNELS = 3
ZOOM = 4


def read(path: Path) -> torch.Tensor:
    """Picture in any common format as RGB in 0..1, of shape (1, 3, height, width).

    Raises
    ------
    OSError, ValueError
        If the file is missing, is not a picture, or holds more than one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such picture: {path}")
    try:
        pixels: npt.NDArray[np.generic] = np.asarray(skimage.io.imread(path))
    except Exception as error:
        # Every file format has errors of its own.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"cannot read {path} as a picture: {reason}") from error
    if pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] > 4) or pixels.size == 0:
        raise ValueError(f"{path} is not one grey or colour picture: its pixels have shape {pixels.shape}")
    planes = np.moveaxis(rgb(pixels), 2, 0)[np.newaxis]
    return torch.from_numpy(np.ascontiguousarray(planes))


def rgb(pixels: npt.NDArray[np.generic]) -> Pixels:
    """Grey, grey with alpha, RGB or RGBA of any number type as RGB in 0..1, transparent as white."""
    values: Pixels = skimage.util.img_as_float32(pixels)
    # 32-bit integers hardly use their range, floats have none: there the brightest pixel is white.
    if values.max() > 1 or (pixels.dtype.kind in "iu" and pixels.dtype.itemsize > 2 and values.max() > 0):
        values = values / values.max()
    values = np.nan_to_num(values).clip(0, 1)
    if values.ndim == 2:
        values = values[..., np.newaxis]
    if values.shape[2] in (1, 2):
        grey, alpha = [0, 0, 0], list(range(1, values.shape[2]))
        values = values[..., grey + alpha]
    if values.shape[2] == 4:
        values = skimage.color.rgba2rgb(values)
    return values.astype(np.float32)


def noise(box: Box, width: int, draw: int) -> torch.Tensor:
    """Normal noise for the pixels in a box of an image, the same pixels the same noise however it is split.

    Philox counts instead of remembering: each pixel has a number of its own, and what the generator makes
    of that number, four words, is enough for three channels. So every rank makes its own shard's noise,
    without the others' and without a message.

    Parameters
    ----------
    box
        Box in an image of shape (1, 3, height, width).
    width
        Width of the whole image.
    draw
        Another number, other noise.
    """
    _, _, (top, bottom), (left, right) = box.bounds
    rows = [
        Philox(key=draw, counter=row * width + left).random_raw(WORDS_PER_PIXEL * (right - left))
        for row in range(top, bottom)
    ]
    # 52 bits and a half lie strictly between 0 and 1, in float64 exactly.
    uniform = ((np.stack(rows) >> np.uint64(12)) + 0.5) * 2.0**-52
    normal: torch.Tensor = torch.special.ndtri(torch.from_numpy(uniform)).to(torch.float32)
    pixels = normal.view(1, bottom - top, right - left, WORDS_PER_PIXEL)
    return pixels[..., :CHANNELS].movedim(3, 1).contiguous()


def draw_comparison(images: Mapping[str, torch.Tensor], boxes: Sequence[Box], path: Path) -> None:
    """Write whole images side by side, below them a part around a corner of the shards.

    Parameters
    ----------
    images
        Title to image of shape (1, 3, height, width); all of one size.
    boxes
        Box of every shard; their borders are drawn.
    path
        PNG file to write.
    """
    # Only the rank that draws needs it, and only at the end.
    from matplotlib.figure import Figure

    height, width = next(iter(images.values())).shape[2:]
    figure = Figure(figsize=(4 * len(images), 8 * height / width + 0.6), dpi=110, layout="constrained")
    for column, (title, image) in enumerate(images.items(), 1):
        whole = figure.add_subplot(2, len(images), column, title=title)
        part = figure.add_subplot(2, len(images), len(images) + column)
        for axes, interpolation in (whole, "antialiased"), (part, "nearest"):
            axes.imshow(image[0].movedim(0, 2).clamp(0, 1).numpy(), interpolation=interpolation)
            _mark_borders(axes, boxes)
            axes.set(xticks=[], yticks=[])
        bottom, top = _middle(boxes, 2, height) + height / ZOOM * np.array([0.5, -0.5]) - 0.5
        left, right = _middle(boxes, 3, width) + width / ZOOM * np.array([-0.5, 0.5]) - 0.5
        part.set(xlim=(left, right), ylim=(bottom, top))
    split = f"split over {len(boxes)} ranks at the dashed lines; " if len(boxes) > 1 else ""
    figure.supxlabel(f"{split}below: {ZOOM} times enlarged", size="medium")
    figure.savefig(path)


def _middle(boxes: Sequence[Box], dim: int, extent: int) -> int:
    # The border nearest to the middle of the picture, so that a seam would be seen.
    borders = {box.start[dim] for box in boxes} - {0}
    return min(borders, key=lambda border: abs(border - extent / 2), default=extent // 2)


def _mark_borders(axes: Axes, boxes: Sequence[Box]) -> None:
    style: dict[str, Any] = {"color": "white", "linewidth": 0.6, "linestyle": (0, (6, 6)), "alpha": 0.7}
    for top in {box.start[2] for box in boxes} - {0}:
        axes.axhline(top - 0.5, **style)
    for left in {box.start[3] for box in boxes} - {0}:
        axes.axvline(left - 0.5, **style)
