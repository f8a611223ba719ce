"""Folders of nnU-Net, compared with nnU-Net's own predictor whose tile is as large as the volume."""

import json
import re
import shlex
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from distdl_rma import open_array, predict
from distdl_rma.__main__ import main
from distdl_rma.jobs.data.sinks import ArraySink
from distdl_rma.jobs.out_of_core.nnunet import TrainedFolder, _labels
from distdl_rma.jobs.out_of_core.nonzero import box_of_nonzero, with_mask
from distdl_rma.jobs.out_of_core.prepared import Prepared
from distdl_rma.jobs.out_of_core.processes import Processes
from tests.run_mpi import completed, mpiexec

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
needs_nnunet = pytest.mark.skipif(not find_spec("nnunetv2"), reason="nnunetv2 is not installed")

# Not called: the volume has the spacing of the plans.
OPTIONS = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
RESAMPLED = dict.fromkeys(("data", "seg", "probabilities"), OPTIONS)
NETWORK = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 2, "features_per_stage": [4, 8], "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[3, 3, 3]] * 2, "strides": [[1, 1, 1], [2, 2, 2]], "n_conv_per_stage": [1, 1],
        "n_conv_per_stage_decoder": [1], "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "dropout_op": None, "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}  # fmt: skip
PLANS = {
    "dataset_name": "Dataset001_Tiny", "plans_name": "nnUNetPlans", "image_reader_writer": "SimpleITKIO",
    "transpose_forward": [2, 0, 1], "transpose_backward": [1, 2, 0],
    "foreground_intensity_properties_per_channel": {"0": {}},
    "configurations": {"3d_fullres": {
        "data_identifier": "tiny", "preprocessor_name": "DefaultPreprocessor", "batch_size": 2,
        "patch_size": [8, 8, 8], "spacing": [0.7, 2.0, 0.8], "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [True], "architecture": NETWORK,
        **{f"resampling_fn_{name}": "resample_data_or_seg_to_shape" for name in RESAMPLED},
        **{f"resampling_fn_{name}_kwargs": RESAMPLED[name] for name in RESAMPLED},
    }},
}  # fmt: skip
LABELS = {
    "labels": ({"background": 0, "one": 1, "two": 2}, None),
    "regions": ({"background": 0, "all": [1, 2], "core": [2]}, [1, 2]),
}
# In a process of its own, without the warnings of its imports.
BY_NNUNET = """
import json, sys, numpy as np, torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
folder, folds = sys.argv[1], sys.argv[2].split(",")
plans = json.load(open(f"{folder}/plans.json"))
own = nnUNetPredictor(1.0, False, False, device=torch.device("cpu"), allow_tqdm=False)
own.initialize_from_trained_model_folder(folder, tuple(map(int, folds)))
preprocessor = own.configuration_manager.preprocessor_class(verbose=False)
managers = own.plans_manager, own.configuration_manager
x, _, facts = preprocessor.run_case(["scan.nii"], None, *managers, own.dataset_json)
tile = [max(8, n + n % 2) for n in x.shape[1:]]
own.configuration_manager.configuration["patch_size"] = tile
logits = own.predict_logits_from_preprocessed_data(torch.from_numpy(x))
found = convert_predicted_logits_to_segmentation_with_correct_shape(
    logits, own.plans_manager, own.configuration_manager, own.label_manager, facts)
np.save("own.npy", found)
"""


PROGRAM = [sys.executable, "-m", "mpi4py", "-m", "distdl_rma", "predict", "--nnunet"]


def changed(channels, changes):
    """The plans with other channels, and other entries of the configuration."""
    schemes = ["ZScoreNormalization"] * channels
    masks = {"use_mask_for_norm": [True] * channels, "normalization_schemes": schemes}
    chosen = PLANS["configurations"]["3d_fullres"] | masks | changes
    numbers = {"mean": 1.5, "std": 2.0, "percentile_00_5": -0.5, "percentile_99_5": 3.5}
    properties = {str(n): numbers for n in range(channels)}
    others = {name: changes.pop(name) for name in ("image_reader_writer",) if name in changes}
    return PLANS | others | {
        "foreground_intensity_properties_per_channel": properties, "configurations": {"3d_fullres": chosen},
    }  # fmt: skip


def written(folder, labels="labels", channels=1, **changes):
    """A folder of two folds, as training leaves it, and a volume with zeros around it and within."""
    import SimpleITK
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    model = folder / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    names, order = LABELS[labels]
    model.mkdir()
    (model / "plans.json").write_text(json.dumps(changed(channels, changes)))
    facts = {"channel_names": {str(n): "CT" for n in range(channels)}, "labels": names, "file_ending": ".nii"}
    (model / "dataset.json").write_text(json.dumps(facts | ({"regions_class_order": order} if order else {})))
    for fold in range(2):
        torch.manual_seed(fold)
        network = get_network_from_plans(
            NETWORK["network_class_name"], NETWORK["arch_kwargs"], NETWORK["_kw_requires_import"], channels,
            len(names) - (order is not None), deep_supervision=True,
        )  # fmt: skip
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        sum(y.square().mean() for y in network(torch.randn(1, channels, 8, 8, 8))).backward()
        optimizer.step()
        saved = {
            "network_weights": network.state_dict(), "optimizer_state": optimizer.state_dict(),
            "grad_scaler_state": None, "logging": {"losses": [np.float32(0.5), np.float64(0.25)]},
            "_best_ema": np.float64(0.5), "current_epoch": 1, "trainer_name": "nnUNetTrainer",
            "init_args": {"configuration": "3d_fullres", "fold": fold, "device": torch.device("cpu")},
            "inference_allowed_mirroring_axes": (0, 1, 2),
        }  # fmt: skip
        (model / f"fold_{fold}").mkdir()
        torch.save(saved, model / f"fold_{fold}/checkpoint_final.pth")
    x = np.random.default_rng(0).normal(2, 1, size=(14, 13, 21)).astype(np.float32)
    x[:3], x[:, :, 18:] = 0, 0
    x[6:9, 5:8, 4:9] = 0  # enclosed, and so within the mask
    image = SimpleITK.GetImageFromArray(x)
    image.SetSpacing((0.7, 0.8, 2.0))
    SimpleITK.WriteImage(image, str(folder / "scan.nii"))
    return model


@needs_nnunet
@pytest.mark.parametrize(
    ("labels", "folds", "out"),
    [("labels", "0", "y.zarr"), ("regions", "0,1", "y.npy"), ("labels", "1", "y.h5")],
)
def test_labels_are_those_of_nnunet_with_one_tile(tmp_path, labels, folds, out):
    model = written(tmp_path, labels)
    several = [] if "," in folds else ["--fold", folds]
    files = ["--in", "scan.nii", "--out", out, "--grid", "3x1x1", "--quiet"]
    files += [] if out == "y.npy" else ["--chunks", "4x4x4"]
    ours = [*mpiexec(2), *PROGRAM, str(model), *several, *files]
    for command in (ours, [sys.executable, "-c", BY_NNUNET, str(model), folds]):
        done = completed(command, 200, tmp_path)
        assert done.returncode == 0, done.stderr
    result = open_array(tmp_path / out)
    found, want = np.asarray(result[:, :, :]).transpose(2, 1, 0), np.load(tmp_path / "own.npy")
    assert found.shape == want.shape == (14, 13, 21) and set(np.unique(want)) == {0, 1, 2}
    assert out == "y.npy" or np.allclose(result.spacing, (0.7, 0.8, 2.0))
    # Logits are equal to rounding: a label may differ at a tie.
    assert np.mean(found != want) < 1e-3


def test_an_error_is_one_line_of_all_ranks(tmp_path):
    done = completed([*mpiexec(2), *PROGRAM, "absent", "--in", "x.nii"], 60, tmp_path)
    assert done.returncode == 1 and done.stderr.count("absent is no folder that nnU-Net has trained") == 1


def test_many_labels_are_of_16_bits(tmp_path):
    torch.manual_seed(0)
    model, x = torch.nn.Conv3d(1, 300, 1), torch.randn(1, 1, 9, 4, 5)
    post = partial(_labels, None, torch.uint16)
    found = predict(model, x, post=post, grid={"D": 3})
    assert found.dtype == torch.uint16 and torch.equal(found.int(), model(x).argmax(1).int())


SCHEMES = {
    "CTNormalization": False, "ZScoreNormalization": True, "RescaleTo01Normalization": False,
    "RGBTo01Normalization": False, "NoNormalization": True,
}  # fmt: skip


@needs_nnunet
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_volume_is_prepared_as_by_nnunet(tmp_path, order):
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor

    schemes, masks = [*SCHEMES, "ZScoreNormalization"], [*SCHEMES.values(), False]
    model = written(tmp_path, channels=6, normalization_schemes=schemes, use_mask_for_norm=masks)
    x = np.random.default_rng(1).normal(2, 1, size=(6, 14, 13, 21)).clip(0).astype(np.float32)
    x[:, :3], x[:, :, 11:], x[:, 6:9, 5:8, 4:9] = 0, 0, 0
    kept = "zyx" if order == (0, 1, 2) else "yzx"
    stored = x.transpose(0, *(1 + "zyx".index(axis) for axis in kept))
    spacing = {"z": 2.0, "y": 0.8, "x": 0.7}
    with ArraySink(
        tmp_path / "x.zarr", stored.shape, np.float32, stored.shape, axes=("c", *kept),
        spacing=(1.0, *(spacing[axis] for axis in kept)),
    ) as sink:  # fmt: skip
        sink[tuple(slice(0, n) for n in stored.shape)] = stored
    folder = TrainedFolder(str(model), str(tmp_path / "x.zarr"), False, "0")
    source = folder.measured(Processes(None))
    found = source[tuple(slice(0, n) for n in source.shape)].permute(0, *(1 + d for d in folder._order))
    want, _, _ = DefaultPreprocessor(verbose=False).run_case_npy(
        x, None, {"spacing": [2.0, 0.8, 0.7]}, folder._plans, folder._chosen, {}
    )
    # Zeros around, as nnU-Net fills up a volume.
    assert want.shape == (6, 21, 11, 11) and found.shape == (6, 22, 12, 12)
    np.testing.assert_allclose(found[:, :21, :11, :11], want, rtol=1e-5, atol=1e-6)
    assert not found[:, 21:].any() and not found[:, :, 11:].any() and not found[:, :, :, 11:].any()


REFUSED = {
    "another spacing": ({"spacing": [0.7, 1.0, 0.8]}, r"\[0.7, 0.8, 2.0\], the plans \[0.7, 0.8, 1.0\]"),
    "slices": ({"patch_size": [8, 8]}, "take a 3d one"),
    "a cascade": ({"previous_stage": "3d_lowres"}, "also takes the result of another one"),
    "another preprocessor": ({"preprocessor_name": "Mine"}, "what its plans name .'Mine'. is none of"),
    "a reader that turns": ({"image_reader_writer": "SimpleITKIOWithReorient"}, "takes RAS by Nibabel"),
    "more channels": ({"channels": 2}, "has 1 channels, .* takes 2"),
    "colours": ({"normalization_schemes": ["RGBTo01Normalization"]}, "has colours from 0 to 255"),
}


def said(capsys, folder, model, *options):
    """The error of a prediction, one line, before anything is written."""
    files = ["--in", str(folder / "scan.nii"), "--out", str(folder / "labels.npy")]
    assert main(["predict", "--nnunet", str(model), *files, *options]) == 1
    assert not [*folder.glob("labels.npy*")]
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


@needs_nnunet
def test_the_command_of_the_refusal_makes_a_file_of_the_right_spacing(tmp_path, capsys):
    model = written(tmp_path, spacing=[0.7, 1.0, 0.8])
    command = said(capsys, tmp_path, model).partition("elements: ")[2]
    done = completed([sys.executable, *shlex.split(command)[1:]], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = ["--in", str(tmp_path / "resampled.nii"), "--out", str(tmp_path / "y.npy"), "--quiet"]
    assert main(["predict", "--nnunet", str(model), "--memory", "300MiB", *files]) == 0
    assert np.load(tmp_path / "y.npy").shape == (21, 13, 28)


@needs_nnunet
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_in_a_line(tmp_path, case, capsys):
    changes, text = REFUSED[case]
    assert re.search(text, said(capsys, tmp_path, written(tmp_path, **changes)))


def test_a_folder_that_lacks_something_is_named(tmp_path, capsys, monkeypatch):
    model = tmp_path / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    assert "is no folder that nnU-Net has trained: plans.json" in said(capsys, tmp_path, model)
    model.mkdir()
    (model / "plans.json").write_text("{}")
    (model / "dataset.json").write_text("[")
    text = "is no folder that nnU-Net has trained: dataset.json: JSONDecodeError: Expecting"
    assert text in said(capsys, tmp_path, model)
    (model / "dataset.json").write_text("{}")
    assert "has a checkpoint_final.pth in no fold" in said(capsys, tmp_path, model)
    (model / "fold_1").mkdir()
    (model / "fold_1/checkpoint_final.pth").touch()
    assert "in ['fold_1'], got --fold 0,1" in said(capsys, tmp_path, model, "--fold", "0,1")
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    assert "pip install 'distdl_rma[nnunet]'" in said(capsys, tmp_path, model)
    other = model.rename(tmp_path / "mine")
    assert "is not called as nnU-Net does" in said(capsys, tmp_path, other)


@pytest.mark.parametrize("shape", [(12, 5, 6), (5, 12, 6), (5, 6, 12)])
def test_the_mask_is_that_of_the_whole_on_any_boxes(monkeypatch, shape):
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is not installed")
    monkeypatch.setattr("distdl_rma.jobs.out_of_core.prepared._BOX_COUNT", 2 * 90)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = np.where(rng.random((2, *shape)) < rng.uniform(0.3, 0.9), 1, 0).astype(np.float32)
        x[:, :1], x[:, :, :, 4:] = 0, x[:, :, :, 4:] * (seed % 2)
        want = ndimage.binary_fill_holes((x != 0).any(0))
        source = with_mask(Prepared(x, 3), Processes(None))
        found = source[tuple(slice(0, n) for n in x.shape)]
        assert np.array_equal(found != 0, np.broadcast_to(want, x.shape))
        part = source[0:2, 1:4, 2:4, 1:5]
        assert torch.equal(part, found[0:2, 1:4, 2:4, 1:5])
        ends = [np.flatnonzero(want.any(tuple({0, 1, 2} - {d}))) for d in range(3)]
        inner = box_of_nonzero(Prepared(x, 3), Processes(None))
        assert inner == tuple(slice(each[0], each[-1] + 1) for each in ends)
