"""The example of nnU-Net, compared with nnU-Net's own predictor whose tile is as large as the volume."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.run_mpi import completed

if not find_spec("nnunetv2"):
    pytest.skip("nnunetv2 is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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
x, _, facts = preprocessor.run_case(["scan.nii.gz"], None, *managers, own.dataset_json)
tile = [max(8, n + n % 2) for n in x.shape[1:]]
own.configuration_manager.configuration["patch_size"] = tile
logits = own.predict_logits_from_preprocessed_data(torch.from_numpy(x))
found = convert_predicted_logits_to_segmentation_with_correct_shape(
    logits, own.plans_manager, own.configuration_manager, own.label_manager, facts)
np.save("own.npy", found)
"""


def written(folder, labels):
    """A folder of two folds, as training leaves it, and a volume with zeros around it."""
    import SimpleITK
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    model = folder / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    names, order = LABELS[labels]
    model.mkdir()
    (model / "plans.json").write_text(json.dumps(PLANS))
    facts = {"channel_names": {"0": "CT"}, "labels": names, "file_ending": ".nii.gz"}
    (model / "dataset.json").write_text(json.dumps(facts | ({"regions_class_order": order} if order else {})))
    for fold in range(2):
        torch.manual_seed(fold)
        network = get_network_from_plans(
            NETWORK["network_class_name"], NETWORK["arch_kwargs"], NETWORK["_kw_requires_import"], 1,
            len(names) - (order is not None), deep_supervision=True,
        )  # fmt: skip
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        sum(y.square().mean() for y in network(torch.randn(1, 1, 8, 8, 8))).backward()
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
    image = SimpleITK.GetImageFromArray(x)
    image.SetSpacing((0.7, 0.8, 2.0))
    SimpleITK.WriteImage(image, str(folder / "scan.nii.gz"))
    return model


@pytest.mark.parametrize(("labels", "folds"), [("labels", "0"), ("regions", "0,1")])
@pytest.mark.filterwarnings("ignore")
def test_labels_are_those_of_nnunet_with_one_tile(tmp_path, labels, folds):
    model = written(tmp_path, labels)
    several = {"NNUNET_FOLDS": folds} if "," in folds else {}
    changes = {"NNUNET": str(model), "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}", **several}
    weights = [] if several else ["--checkpoint", str(model / "fold_0/checkpoint_final.pth")]
    example, run = (
        [sys.executable, str(EXAMPLES / "nnunet.py")],
        [sys.executable, "-m", "distdl_rma", "predict"],
    )
    files = ["--in", "prepared/scan.npy", "--out", "prepared/labels.npy", "--grid", "1x1x3", "--quiet"]
    for command in (
        [*example, "prepare", "scan.nii.gz", "prepared"],
        [*run, "nnunet:network", *weights, "--post", "nnunet:labels", *files],
        [*example, "finish", "prepared", "labels.npy"],
        [sys.executable, "-c", BY_NNUNET, str(model), folds],
    ):
        done = completed(command, 200, tmp_path, **changes)
        assert done.returncode == 0, done.stderr
    found, want = np.load(tmp_path / "prepared/labels.npy"), np.load(tmp_path / "own.npy")
    assert found.shape == want.shape == (14, 13, 21) and set(np.unique(want)) == {0, 1, 2}
    # Logits are equal to rounding: a label may differ at a tie.
    assert np.mean(found != want) < 1e-3
