"""Weights from files of others: compared with the model, and never anything that runs code."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma.errors import CheckpointError, DataError, ShapeError
from distdl_rma.jobs.checkpoints.weights import load_weights

MODEL = nn.Conv2d(1, 2, 3)
# What programs save: the state dict alone, and within what their checkpoint has besides.
SAVED = {
    "alone": MODEL.state_dict(),
    "in halves": nn.Conv2d(1, 2, 3).half().state_dict(),
    "of a wrapper, with numbers of numpy": {
        "network_weights": {f"module.{name}": x for name, x in MODEL.state_dict().items()},
        "log": [np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True)],
        "device": torch.device("cpu"),
    },
}


@pytest.mark.parametrize("case", SAVED)
def test_a_state_dict_is_loaded(tmp_path, case):
    torch.save(SAVED[case], tmp_path / "w.pt")
    other = nn.Conv2d(1, 2, 3)
    load_weights(tmp_path / "w.pt", other)
    want = SAVED[case] if "weight" in SAVED[case] else MODEL.state_dict()
    assert all(torch.equal(x, want[name].float()) for name, x in other.state_dict().items())


def test_a_file_of_safetensors_is_loaded(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(MODEL.state_dict(), tmp_path / "w.safetensors")
    other = nn.Conv2d(1, 2, 3)
    load_weights(tmp_path / "w.safetensors", other)
    assert torch.equal(other.weight, MODEL.weight)


class Harm:
    """Its pickle would run code."""

    def __reduce__(self):
        return pickle.loads, (b"",)


REFUSED = [
    (MODEL.state_dict(), nn.Conv2d(1, 2, 5), ShapeError, "weight' is float32 of shape .2, 1, 3, 3. in it"),
    (MODEL.state_dict(), nn.Sequential(MODEL), CheckpointError, "it lacks '0.weight'.* and has 'weight'"),
    (nn.Conv2d(1, 2, 3).double().state_dict(), MODEL, ShapeError, "is float64 .* and float32 .* here"),
    ({"weights": 3}, MODEL, CheckpointError, "has no state dict of a model"),
    ([1], MODEL, CheckpointError, "is no file of tensors and plain values"),
    ({"x": Harm()}, MODEL, CheckpointError, "Unsupported global: GLOBAL _?pickle.loads"),
]


@pytest.mark.parametrize(("saved", "model", "kind", "text"), REFUSED)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path, saved, model, kind, text):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(kind, match=text) as error:
        load_weights(tmp_path / "w.pt", model)
    assert "w.pt: " in str(error.value) and "\n" not in str(error.value)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_missing_file_and_one_of_other_bytes_are_named(tmp_path):
    with pytest.raises(DataError, match=r"w\.pt: not found"):
        load_weights(tmp_path / "w.pt", MODEL)
    (tmp_path / "w.pt").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"w\.pt: is no file of tensors"):
        load_weights(tmp_path / "w.pt", MODEL)
