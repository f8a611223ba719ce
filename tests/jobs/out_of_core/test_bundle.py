"""Bundles of MONAI, compared with what MONAI makes of the whole volume in one piece."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from distdl_rma.__main__ import main
from distdl_rma.jobs.out_of_core.prepared import Prepared, totals
from distdl_rma.jobs.out_of_core.processes import Processes
from tests.run_mpi import completed, mpiexec

monai = pytest.importorskip("monai", reason="monai is not installed")
nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

NETWORK = {
    "_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 3, "channels": [4, 8],
    "strides": [2], "norm": "instance",
}  # fmt: skip
READ = [
    {"_target_": "LoadImaged", "keys": "image"},
    {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": "no_channel"},
]
# Steps before the network, each with one after it.
STEPS = {
    "a range": (
        [{"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": -1, "a_max": 3, "b_min": 0,
          "b_max": 1, "clip": True}],
        [{"_target_": "Activationsd", "keys": "pred", "softmax": True},
         {"_target_": "AsDiscreted", "keys": ["pred", "label"], "argmax": [True, False]}],
    ),
    "the whole range": (
        [{"_target_": "ScaleIntensityd", "keys": "image", "minv": -1, "maxv": 2}],
        [{"_target_": "Activationsd", "keys": "pred", "sigmoid": True}],
    ),
    "the mean of what is not 0": (
        [{"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True, "channel_wise": True},
         {"_target_": "ThresholdIntensityd", "keys": "image", "threshold": 2.0, "above": False, "cval": 2.0}],
        [{"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.0},
         {"_target_": "SaveImaged", "keys": "pred"}],
    ),
    "nothing to do in space": (
        [{"_target_": "Orientationd", "keys": "image", "axcodes": "RAS"},
         {"_target_": "Spacingd", "keys": "image", "pixdim": [0.7, 0.8, 2.0]},
         {"_target_": "NormalizeIntensityd", "keys": "image"}],
        [{"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": "image"}],
    ),
}  # fmt: skip


def written(folder, before, after, network=NETWORK):
    """A bundle that a step of training has changed, and a volume whose rows with zeros are a fifth."""
    for name in ("configs", "models"):
        (folder / "bundle" / name).mkdir(parents=True)
    config = {
        "imports": ["$import glob"],
        "network_def": network,
        "network": "$@network_def.to('cuda')",
        "preprocessing": {"_target_": "Compose", "transforms": [*READ, *before]},
        "postprocessing": {"_target_": "Compose", "transforms": after},
    }
    (folder / "bundle/configs/inference.json").write_text(json.dumps(config))
    (folder / "bundle/configs/metadata.json").write_text(json.dumps({"version": "0.1"}))
    torch.manual_seed(0)
    model = monai.networks.nets.UNet(**{key: value for key, value in NETWORK.items() if key != "_target_"})
    model(torch.rand(1, 1, 8, 8, 8)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.save(model.state_dict(), folder / "bundle/models/model.pt")
    x = np.random.default_rng(0).normal(1.5, 2, size=(24, 10, 12)).astype(np.float32)
    x[:5] = 0
    nibabel.save(nibabel.Nifti1Image(x, np.diag([0.7, 0.8, 2.0, 1])), folder / "x.nii")
    return model.eval()


def by_monai(folder, model, after):
    """What MONAI makes of the volume in one piece."""
    parser = monai.bundle.ConfigParser()
    parser.read_config(str(folder / "bundle/configs/inference.json"))
    image = parser.get_parsed_content("preprocessing")({"image": str(folder / "x.nii")})["image"]
    with torch.no_grad():
        found = {"pred": model(image[None])[0].as_tensor(), "label": torch.zeros(1)}
    for each in after:
        if each["_target_"] not in ("Invertd", "SaveImaged"):
            found = monai.bundle.ConfigParser({"it": each}).get_parsed_content("it")(found)
    return found["pred"].numpy()


def predicted(folder, *options):
    files = f"--bundle {folder}/bundle --in {folder}/x.nii --out {folder}/y.npy".split()
    return ["predict", *files, "--grid", "4x1x1", "--quiet", *options]


@pytest.mark.parametrize("case", STEPS)
def test_a_bundle_gives_what_monai_does_in_one_piece(tmp_path, case):
    model = written(tmp_path, *STEPS[case])
    assert main(predicted(tmp_path)) == 0
    found, want = np.load(tmp_path / "y.npy"), by_monai(tmp_path, model, STEPS[case][1])
    want = want[0] if case == "a range" else want
    assert found.shape == want.shape
    if found.dtype == np.uint8:
        # Values at a tie or a threshold may be either.
        assert np.mean(found != want) < 1e-3
    else:
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_ranks_share_the_volume_and_have_equal_numbers_of_the_whole(tmp_path):
    model = written(tmp_path, *STEPS["the mean of what is not 0"])
    program = [sys.executable, "-m", "mpi4py", "-m", "distdl_rma"]
    done = completed([*mpiexec(2), *program, *predicted(tmp_path, "--raw")])
    assert done.returncode == 0, done.stderr
    again = completed([*mpiexec(2), *program, *predicted(tmp_path), "--bundle", str(tmp_path)])
    assert again.returncode == 1 and again.stderr.count("is no bundle of MONAI") == 1
    want = by_monai(tmp_path, model, [])
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, rtol=1e-4, atol=1e-5)


REFUSED = {
    "resampled": ([{"_target_": "Spacingd", "keys": "image", "pixdim": [1, 1, 1]}], [], "Spacingd: .* has"),
    "turned": ([{"_target_": "Orientationd", "keys": "image", "axcodes": "LPS"}], [], "Orientationd: .* RAS"),
    "moved": ([{"_target_": "Flipd", "keys": "image", "spatial_axis": 0}], [], "Flipd: is not of single"),
    "of components": ([], [{"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}], "--raw"),
    "of a mask": ([{"_target_": "CastToTyped", "keys": "mask"}], [], "CastToTyped: works on .*mask"),
    "of labels": ([], [{"_target_": "AsDiscreted", "keys": "label", "argmax": True}], "works on .*label"),
    "in one place each": ([], [{"_target_": "AsDiscreted", "keys": "pred", "to_onehot": 3}], "to_onehot="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_transforms_are_refused_by_name(tmp_path, case, capsys):
    *steps, text = REFUSED[case]
    written(tmp_path, *steps)
    assert main(predicted(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.startswith("UnsupportedError: predict: the bundle's ") and said.count("\n") == 1
    assert re.search(text, said), said


def test_channels_that_are_last_are_refused(tmp_path, capsys):
    written(tmp_path, [], [])
    nibabel.save(nibabel.Nifti1Image(np.ones((2, 6, 8, 2), np.float32), np.eye(4)), tmp_path / "x.nii")
    assert main(predicted(tmp_path)) == 1
    assert "has its channels last" in capsys.readouterr().err


def test_a_folder_that_is_no_bundle_or_has_other_weights_is_named(tmp_path, capsys):
    written(tmp_path, [], [], NETWORK | {"channels": [4, 16]})
    assert main(predicted(tmp_path)) == 1
    assert "model.pt: 'model: " in capsys.readouterr().err
    (tmp_path / "bundle/models/model.pt").unlink()
    assert main(predicted(tmp_path)) == 1
    assert "model.pt: not found" in capsys.readouterr().err
    (tmp_path / "bundle/configs/inference.json").unlink()
    assert main(predicted(tmp_path)) == 1
    assert "bundle is no bundle of MONAI: it has none of" in capsys.readouterr().err


def test_numbers_of_the_whole_are_those_of_numpy_in_double_precision(monkeypatch):
    monkeypatch.setattr("distdl_rma.jobs.out_of_core.prepared._BOX_COUNT", 100)
    x = torch.randn(2, 9, 20) * 3 + 1000
    x[1, :4] = 0
    for nonzero in (False, True):
        for by_channel in (False, True):
            found = totals(Prepared(x, 2), Processes(None), nonzero=nonzero, by_channel=by_channel)
            for channel in range(2):
                chosen = (x[channel] if by_channel else x).double().numpy()
                chosen = chosen[chosen != 0] if nonzero else chosen
                want = chosen.min(), chosen.max(), chosen.mean(), chosen.std()
                np.testing.assert_allclose([each[channel] for each in found], want, rtol=1e-12)
