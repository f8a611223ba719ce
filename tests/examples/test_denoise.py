"""The denoising demo, run as a user runs it; these tests start MPI jobs of their own."""

from __future__ import annotations

import numpy as np
import pytest
import skimage.io
import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from examples import denoise_image
from tests.examples.launching import EXAMPLES, Case, assert_mistakes_are_told_once, ended, launch_in_turn

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "denoise.py"
HEIGHT, WIDTH = 53, 47


@pytest.fixture
def picture(tmp_path):
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    disc = (rows - 25) ** 2 + (columns - 20) ** 2 < 150
    colours = np.stack([0.5 + 0.3 * np.sin(columns / 7), 0.5 + 0.3 * np.cos(rows / 5), 0.8 * disc], axis=2)
    path = tmp_path / "picture.png"
    skimage.io.imsave(path, (255 * colours).astype(np.uint8))
    return path


def assert_proved(stdout, folder):
    assert "proof holds: the limit is 1e-04" in stdout
    assert f"picture: {folder / 'denoise.png'}" in stdout
    assert skimage.io.imread(folder / "denoise.png").size


def test_one_rank_is_one_process(picture, tmp_path):
    folder = tmp_path / "not" / "there yet"
    stdout, stderr = ended(0, 1, DEMO, "--image", picture, "--steps", 4, "--output", folder)
    assert not stderr
    assert sum(line.startswith("step ") for line in stdout) == 4
    assert_proved(stdout, folder)


MISTAKES = {
    "--grid 3x2": "--grid 3x2 needs 6 ranks, but 4 are running",
    "--grid two": "a grid is ROWSxCOLUMNS, such as 2x2, not 'two'",
    "--steps 0": "at least 1 step is needed, not '0'",
    "--colour red": "unrecognized arguments: --colour red",
    "--image nowhere.png": "no such picture: nowhere.png",
    f"--image {__file__}": f"cannot read {__file__} as a picture",
    "--image {tiny} --grid 1x4": "2 x 1 pixels, too few for 1 x 4 ranks",
}


def test_four_ranks_agree_with_one_and_tell_every_mistake_once_and_a_failed_proof(picture, tmp_path):
    tiny = tmp_path / "tiny.png"
    skimage.io.imsave(tiny, np.full((2, 1), 128, np.uint8), check_contrast=False)
    run = ["--image", picture, "--output"]
    right = [
        Case([*run, tmp_path / "square", "--steps", 2]),
        Case([*run, tmp_path / "row", "--steps", 2, "--grid", "1x4"]),
    ]
    mistakes = [Case(arguments.format(tiny=tiny).split(), 2) for arguments in MISTAKES]
    impossible = Case([*run, tmp_path, "--steps", 1], 1, "demo.PROOF_LIMIT = -1.0")
    (_, stdout, _), told = launch_in_turn(4, DEMO, [*right, *mistakes, impossible], tmp_path)
    assert_mistakes_are_told_once(DEMO, MISTAKES.values(), told[2:-1])
    assert not told[0] and not told[1] and not told[-1]
    for folder in ("square", "row"):
        assert_proved(stdout, tmp_path / folder)
    proofs = [line for line in stdout if line.startswith("proof ")]
    assert proofs == ["proof holds: the limit is 1e-04"] * 2 + ["proof FAILS: the limit is -1e+00"]
    assert sum(line.startswith("step ") for line in stdout) == 2 + 2 + 1


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 1), (1, 7)])
def test_noise_does_not_depend_on_the_split(grid):
    whole = denoise_image.noise(Box.of_shape((1, 3, HEIGHT, WIDTH)), WIDTH, 5)
    ranks = tuple(range(grid[0] * grid[1]))
    layout = Decomposition.balanced(Partition(ranks, (1, 1, *grid), 0), (1, 3, HEIGHT, WIDTH))
    for rank in ranks:
        box = layout.box(rank)
        shard = denoise_image.noise(box, WIDTH, 5)
        assert torch.equal(shard, whole[box.slices(Box.of_shape(whole.shape))])


def test_noise_is_normal_and_another_for_every_draw_and_channel():
    draws = torch.cat([denoise_image.noise(Box.of_shape((1, 3, 200, 200)), 200, draw) for draw in range(3)])
    correlations = torch.corrcoef(draws.flatten(0, 1).flatten(1))
    assert torch.allclose(correlations, torch.eye(9), atol=0.03)
    assert abs(draws.mean().item()) < 0.01
    assert abs(draws.std().item() - 1) < 0.01


@pytest.mark.parametrize(
    ("name", "pixels", "expected"),
    [
        ("grey.png", np.array([[0, 51], [102, 255]], np.uint8), [[0, 0.2], [0.4, 1]]),
        ("grey16.png", np.array([[0, 13107], [26214, 65535]], np.uint16), [[0, 0.2], [0.4, 1]]),
        ("colour16.tif", np.full((2, 2, 3), 13107, np.uint16), [[0.2, 0.2], [0.2, 0.2]]),
        (
            "clear.png",
            np.dstack([np.zeros((2, 2, 3), np.uint8), np.uint8([[0, 255], [51, 255]])]),
            [[1, 0], [0.8, 0]],
        ),
        ("bright.tif", np.array([[0, 20], [40, 100]], np.float32), [[0, 0.2], [0.4, 1]]),
    ],
)
def test_read_gives_rgb_between_0_and_1(name, pixels, expected, tmp_path):
    skimage.io.imsave(tmp_path / name, pixels, check_contrast=False)
    image = denoise_image.read(tmp_path / name)
    assert image.shape == (1, 3, 2, 2)
    assert image.is_contiguous()
    assert torch.allclose(image, torch.tensor(expected).expand(1, 3, 2, 2), atol=1e-6)
