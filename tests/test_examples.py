"""Every public name has an example in its docstring, and the example shows what happens on two ranks.

An example is the section Examples of the docstring. It may use ``np``, ``torch``, ``nn``, ``F``, ``MPI``, all
names of ``distdl_rma`` and those of its own module, and the folder in which it runs. All ranks run it; what
it shows is the output of the first one.
"""

from __future__ import annotations

import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, DocTestParser, OutputChecker
from importlib import import_module
from inspect import cleandoc
from threading import local
from traceback import format_exception_only

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

import distdl_rma
from distdl_rma import rehearse

# Whoever starts pytest chooses the threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*set OMP_NUM_THREADS:RuntimeWarning")
RANKS = 2
HOMES = "distdl_rma", "distdl_rma.layers", "distdl_rma.segments", "distdl_rma.geometry"
NAMES = {home: [name for name in import_module(home).__all__ if name != "__version__"] for home in HOMES}

# What virtual ranks do not call.
IN_ONE_PROCESS = "rehearse", "predict", "plan_prediction", "Predictor"


def example_of(home, name):
    """The section Examples of a docstring, empty if there is none."""
    return cleandoc(getattr(import_module(home), name).__doc__ or "").partition("\nExamples\n--------\n")[2]


@pytest.mark.parametrize("home", HOMES)
def test_every_public_name_has_an_example(home):
    assert [name for name in NAMES[home] if ">>> " not in example_of(home, name)] == []


@pytest.mark.parametrize(("home", "name"), [(home, name) for home in HOMES for name in NAMES[home]])
def test_an_example_shows_what_happens(home, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", OutputOfThread())
    steps = DocTestParser().get_examples(example_of(home, name))
    given = {"np": np, "torch": torch, "nn": nn, "F": F, "MPI": MPI}
    for module in (distdl_rma, import_module(home)):
        given |= {each: getattr(module, each) for each in module.__all__}
    if name in IN_ONE_PROCESS:
        outputs = [*outputs_of(steps, given)]
    else:
        outputs = rehearse(RANKS, lambda _: [*outputs_of(steps, dict(given))])[0]
    for step, output in zip(steps, outputs, strict=True):
        wanted = step.exc_msg or step.want
        assert OutputChecker().check_output(wanted, output, ELLIPSIS | NORMALIZE_WHITESPACE), (
            f">>> {step.source}shows\n{output}instead of\n{wanted}"
        )


class OutputOfThread(local):
    """Standard output, kept for each thread by itself."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        """Does nothing."""


def outputs_of(steps, names):
    """What each step writes, or the last line of the traceback that it shows."""
    for step in steps:
        sys.stdout.text = ""
        try:
            exec(compile(step.source, "example", "single", dont_inherit=True), names)
        except Exception as error:
            if step.exc_msg is None:
                raise
            sys.stdout.write("".join(format_exception_only(error)))
        yield sys.stdout.text
