"""Which objects a state may have, and that a manifest with wrong types changes none of them."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma import CheckpointError, DistdlError, UnsupportedError, load_checkpoint
from distdl_rma.jobs.checkpoints.files import MANIFEST, digest
from tests.fuzz.checkpoints import made, text_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(4), lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(4), lambda g: g.random(3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(4)), lambda g: g.integers(9, size=3).tolist()),
        (lambda: np.random.RandomState(4), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(4), lambda g: [g.random(), g.gauss(0, 1)]),
    ],
)  # fmt: skip
def test_a_generator_goes_on_where_it_is(kept, make, draw):
    used, other = make(), make()
    draw(used)
    kept.save({"g": used}, 1)
    wanted = draw(used)
    # Loaders hold the object itself.
    assert kept.restore({"g": other}) == 1
    with pytest.raises(CheckpointError, match=r"'g' is an object with state_dict\(\), or a generator in it"):
        kept.restore({"g": 3})
    with pytest.raises(UnsupportedError, match=r"generators of random numbers .* are entries of the state"):
        kept.save({"g": [used]}, 2)
    assert draw(other) == wanted


def test_parameters_outside_of_models_have_their_optimizers_state(kept):
    def job(seed):
        torch.manual_seed(seed)
        model, weight = nn.Linear(2, 1), nn.Parameter(torch.rand(2))
        optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [weight]}])
        (model.weight.sum() + weight.square().sum()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "weight": weight}

    saved, here = job(1), job(2)
    kept.save(saved, 1)
    assert kept.restore(here) == 1
    with pytest.raises(DistdlError, match="of no model in the state; put the model there too, or"):
        kept.save({key: saved[key] for key in ("model", "optimizer")}, 2)
    assert torch.equal(here["weight"], saved["weight"])
    found, wanted = (each["optimizer"].state[each["weight"]] for each in (here, saved))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def put(*path, value):
    def edit(body):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return edit


def of_form(entry, *path, value):
    return put("forms", entry, *path, value=value)


def first_item(body, at, value):
    next(item for item in body["items"] if item[0] == "plain/t")[at] = value


EDITS = {
    **{f"no {key}": put(key, value=None) for key in ("step", "main", "head", "forms", "items")},
    **{f"step {value}": put("step", value=value) for value in (None, "x", -1, [], float("inf"))},
    "a dtype that is none": of_form("plain", "state", value={"dtype": "float31"}),
    "a deep value": of_form("plain", "state", value=json.loads("[" * 900 + "]" * 900)),
    "weights by another name": of_form("model", "state", "0.weight", value={"tensor": "ema/0.weight"}),
    "a weight that is a number": of_form("model", "state", "0.weight", value=5),
    "a weight that is not there": of_form("model", "state", "0.weight", value={"tensor": "nowhere"}),
    "a model that is a list": of_form("model", "state", value=[]),
    "a form that is a number": put("forms", "model", value=5),
    "a kind that is a list": of_form("scheduler", "kind", value=[]),
    "an optimizer's state of no parameter": of_form("optimizer", "state", "other", value={"dict": []}),
    "an optimizer's state that is a number": of_form("optimizer", "state", "0.weight", value=5),
    "an optimizer of texts": of_form("optimizer", "state", "0.weight", value={"dict": [["step", "x"]]}),
    "groups that are none": of_form("optimizer", "groups", value=5),
    "names that are lists": of_form("optimizer", "groups", 0, "names", value=[[], []]),
    "options that are none": of_form("optimizer", "groups", 0, "options", value={"tuple": [1]}),
    "a scheduler's state that is a text": of_form("scheduler", "state", value="x"),
    "a generator beyond its words": of_form("draws", "state", value={"dict": [
        ["bit_generator", "MT19937"], ["state", {"dict": [["key", [1] * 624], ["pos", 1 << 20]]}]
    ]}),
    "generators of texts": put("generators", value={"torch": ["x"], "python": ["x"], "numpy": ["x"]}),
    "no generators": put("generators", value={}),
    "a shape with a sign": lambda body: first_item(body, 2, [-3, -4]),
    "a large shape": lambda body: first_item(body, 2, [1 << 60]),
    "a shape of texts": lambda body: first_item(body, 2, ["3", "4"]),
    "a shape of lists": lambda body: first_item(body, 2, [[2], 1 << 40]),
    "another dtype": lambda body: first_item(body, 1, "float64"),
    "a dtype of no tensor": lambda body: first_item(body, 1, "__class__"),
    "another place": lambda body: first_item(body, 3, 8),
    "a sum that is none": lambda body: first_item(body, 4, "xyz"),
    "a name that is a list": lambda body: first_item(body, 0, []),
}  # fmt: skip


def test_a_manifest_of_wrong_types_is_an_error_and_changes_nothing(comm, folder, kept):
    file = kept.save(made(1), 1) / MANIFEST
    good, state = file.read_text(), made(2)
    before = text_of(state)
    comm.Barrier()
    for name, edit in EDITS.items():
        if comm.rank == 0:
            body = json.loads(good)["body"]
            edit(body)
            file.write_text(json.dumps({"sha256": digest(json.dumps(body).encode()), "body": body}))
        comm.Barrier()
        # Its directory is named.
        with pytest.raises(DistdlError, match="step-1") as error:
            kept.restore(state)
        assert text_of(state) == before, name
        if "generators" not in name:
            with pytest.raises(DistdlError, match="step-1"):
                load_checkpoint(folder, state)
        assert text_of(state) == before, (name, error)
        comm.Barrier()
    if comm.rank == 0:
        file.write_text(good)
    comm.Barrier()
    assert kept.restore(state) == 1
    assert text_of(state) == text_of(made(1))
