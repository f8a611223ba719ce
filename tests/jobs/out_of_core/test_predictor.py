"""MONAI's users change one line."""

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, ConfigurationError
from distdl_rma.jobs.out_of_core.predict import Predictor
from tests.jobs.out_of_core.nets import UNet, seeded, whole


def test_an_evaluator_of_monai_takes_it(tmp_path):
    pytest.importorskip("monai")
    pytest.importorskip("ignite")
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedEvaluator
    from monai.handlers import MeanSquaredError

    model = seeded(lambda: UNet(2, "instance", classes=1))
    items = [{"image": torch.randn(1, 60, 32), "label": torch.zeros(1, 60, 32)} for _ in range(3)]
    found = []

    def pairs(data):
        return [each["pred"] for each in data], [each["label"] for each in data]

    for inferer in (None, Predictor(grid={"H": 3})):
        loader, metric = DataLoader(Dataset(items), batch_size=1), MeanSquaredError(output_transform=pairs)
        options = {"inferer": inferer, "key_val_metric": {"error": metric}}
        evaluator = SupervisedEvaluator(torch.device("cpu"), loader, model, **options)
        evaluator.run()
        found.append(evaluator.state.metrics["error"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_inputs_and_network_as_monai_passes_them():
    model, x = seeded(lambda: UNet(3, "group")), torch.randn(2, 1, 20, 12, 12)
    y = Predictor(grid={"D": 2})(x, model)
    torch.testing.assert_close(y, whole(model, x), rtol=1e-4, atol=1e-5)
    monai = pytest.importorskip("monai.data")
    assert type(Predictor(grid={"D": 2})(monai.MetaTensor(x), model)) is torch.Tensor


def test_what_is_no_module_and_further_arguments_are_refused():
    model, x = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 8, 8)
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn\.Module, .* got 'method'"):
        Predictor()(x, model.forward)
    with pytest.raises(ArgumentError, match="1 further arguments were passed"):
        Predictor()(x, model, x)
