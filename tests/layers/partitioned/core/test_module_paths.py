"""Where modules are in their models, as far as torch says when they are put into one another."""

import copy
import gc
import weakref

from torch import nn

from distdl_rma.layers.partitioned.core.module_paths import path_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_the_path_is_that_of_named_modules():
    assert path_of(nn.ReLU()) == ""
    model = nn.ModuleDict({"down": nn.ModuleList([Block(), Block()]), "up": Block()})
    model.add_module("last", nn.Identity())
    model["down"].append(Block())
    for path, part in model.named_modules():
        assert path_of(part) == path


def test_a_wrapper_is_the_outermost_module():
    model = Block()
    wrapped = Wrapper(model)
    assert path_of(model.conv[0]) == "module.conv.0"
    del wrapped
    assert path_of(model.conv[0]) == "conv.0"


def test_the_first_model_counts_as_long_as_it_is_there():
    shared = nn.Linear(1, 1)
    first, second = nn.Sequential(shared), Wrapper(shared)
    assert path_of(shared) == "0"
    part = first[:1]
    assert path_of(shared) == "0"
    del first, part
    assert path_of(shared) == "module"
    del second
    assert path_of(shared) == ""


def test_containers_may_number_anew():
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ELU())
    last = model[2]
    model.insert(0, nn.Identity())
    assert path_of(last) == "3"
    del model[0]
    del model[0]
    assert path_of(last) == "1"
    model[1] = nn.Identity()
    assert path_of(last) == ""


def test_copies_of_models_are_not_known_and_modules_in_each_other_end_somewhere():
    assert path_of(copy.deepcopy(Block()).conv[0]) == ""
    first, second = Wrapper(None), Wrapper(None)
    first.module, second.module = second, first
    assert path_of(first) == "module"


def test_nothing_is_kept_alive():
    gc.disable()
    try:
        model = Block()
        seen = [weakref.ref(part) for part in model.modules()]
        del model
        assert not any(part() for part in seen)
    finally:
        gc.enable()


def test_modules_that_compare_as_they_like():
    class Odd(nn.Module):
        __hash__ = None

        def __eq__(self, other):
            raise TypeError

    odd = Odd()
    model = nn.Sequential(odd)
    model.register_module("absent", None)
    assert path_of(odd) == "0"
