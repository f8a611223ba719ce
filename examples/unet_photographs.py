"""The photographs of the sharpening demo: read, put out of focus, and drawn beside what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import skimage.filters
import skimage.transform
import torch

from denoise_image import read

# All come with scikit-image. The network never sees the last two while it learns.
FOLDER = Path(skimage.data.data_dir)
LESSONS = ("coffee.png", "astronaut.png", "motorcycle_left.png", "rocket.jpg")
TESTS = ("chelsea.png", "ihc.png")
BATCH = 2
BLUR = 2.0
# Size of the details that a blur takes away, so that the network works with numbers of about 1.
CONTRAST = 0.1


@dataclass(frozen=True)
class Photographs:
    """Some photographs of one size, sharp and out of focus, whole or this rank's shards of them."""

    sharp: torch.Tensor
    blurred: torch.Tensor

    @property
    def question(self) -> torch.Tensor:
        """What the network is given."""
        return (self.blurred - 0.5) / CONTRAST

    @property
    def answer(self) -> torch.Tensor:
        """What it should make of it: the details that are missing."""
        return (self.sharp - self.blurred) / CONTRAST

    def sharpened(self, answer: torch.Tensor) -> torch.Tensor:
        """Photographs with an answer of the network added."""
        return (self.blurred + CONTRAST * answer).clamp(0, 1)

    def part(self, slices: Sequence[slice]) -> Photographs:
        """A shard, in memory of its own."""
        return Photographs(self.sharp[tuple(slices)].clone(), self.blurred[tuple(slices)].clone())


def photographs(names: Sequence[str], size: tuple[int, int]) -> list[Photographs]:
    """Batches of photographs of ``size`` pixels, height and width."""
    sharp = np.stack([_framed(read(FOLDER / name)[0].numpy(), size) for name in names])
    # Put out of focus as a whole: the edge of a shard is no edge of the photograph.
    blurred = np.stack(
        [skimage.filters.gaussian(image, BLUR, mode="nearest", channel_axis=0) for image in sharp]
    )
    both = (torch.from_numpy(images.astype(np.float32)).split(BATCH) for images in (sharp, blurred))
    return [Photographs(*batch) for batch in zip(*both, strict=True)]


def _framed(image: Any, size: tuple[int, int]) -> Any:
    # The largest part around the middle that has the sides in the wanted relation.
    shrink = min(have / want for have, want in zip(image.shape[1:], size, strict=True))
    frame = [slice(None)]
    for have, want in zip(image.shape[1:], size, strict=True):
        extent = max(1, int(want * shrink))
        frame.append(slice((have - extent) // 2, (have - extent) // 2 + extent))
    return skimage.transform.resize(image[tuple(frame)], (len(image), *size), anti_aliasing=True)


def psnr(image: torch.Tensor, original: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in decibels."""
    return -10 * (image - original).square().mean().log10().item()


def draw(
    photos: Photographs,
    sharpened: torch.Tensor,
    borders: Sequence[int],
    path: Path,
    columns_at: Sequence[int] = (),
) -> None:
    """Write a picture: a row per photograph, out of focus, sharpened and as it was.

    Parameters
    ----------
    photos, sharpened
        Whole photographs, and what the network made of them.
    borders, columns_at
        Rows, and columns, of pixels at which shards begin.
    path
        PNG file to write.
    """
    # Only one rank draws, and only at the end.
    from matplotlib.figure import Figure

    columns = {"out of focus": photos.blurred, "sharpened": sharpened, "original": photos.sharp}
    count, _, height, width = photos.sharp.shape
    figure = Figure(figsize=(12, count * (4 * height / width + 0.3)), dpi=90, layout="constrained")
    axes = figure.subplots(count, len(columns), squeeze=False)
    for across, (title, images) in enumerate(columns.items()):
        for down, (image, original) in enumerate(zip(images, photos.sharp, strict=True)):
            place = axes[down, across]
            text = title if images is photos.sharp else f"{title}, {psnr(image, original):.1f} dB"
            place.imshow(image.movedim(0, 2).numpy())
            place.set(title=text, xticks=[], yticks=[])
            line: dict[str, Any] = {
                "color": "white",
                "linewidth": 0.6,
                "linestyle": (0, (6, 6)),
                "alpha": 0.7,
            }
            for row in borders:
                place.axhline(row - 0.5, **line)
            for column in columns_at:
                place.axvline(column - 0.5, **line)
    figure.savefig(path)
