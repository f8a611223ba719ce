"""Every public name has an example in its docstring, and the example shows what happens on two ranks.

An example is the section Examples of the docstring. It may use ``np``, ``torch``, ``nn``, ``F``, ``MPI``, all
names of ``distdl_rma`` and those of its own module, and the folder in which it runs. All ranks run it; what
it shows is the output of the first one.
"""

from __future__ import annotations

import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, DocTestParser, OutputChecker
from inspect import cleandoc
from threading import local
from traceback import format_exception_only
from unittest.mock import patch

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import rehearse
from distdl_rma.layers.split.calls.table import RULES
from tests.test_reference import PAGES, names_of

# Whoever starts pytest chooses the threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*set OMP_NUM_THREADS:RuntimeWarning")
RANKS = 2
# What virtual ranks do not call.
IN_ONE_PROCESS = "rehearse", "predict", "plan_prediction", "Predictor", "Plan"
# A base of layers has none: classes of users would show it as theirs.
WITHOUT = ("DistributedLayer",)
NAMES = {page.stem: {**public, **listed} for page in PAGES for public, listed, _ in [names_of(page)]}
EXAMPLES = [(page, name) for page, names in NAMES.items() for name in names if name not in WITHOUT]


def example_of(page, name):
    """The section Examples of a docstring, empty if there is none."""
    return cleandoc(NAMES[page][name].__doc__ or "").partition("\nExamples\n--------\n")[2]


def test_every_public_name_has_an_example():
    assert [name for page, name in EXAMPLES if ">>> " not in example_of(page, name)] == []


@pytest.mark.parametrize(("page", "name"), EXAMPLES)
def test_an_example_shows_what_happens(page, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", OutputOfThread())
    steps = DocTestParser().get_examples(example_of(page, name))
    given = {"np": np, "torch": torch, "nn": nn, "F": F, "MPI": MPI} | NAMES["distdl_rma"] | NAMES[page]
    # Rules that an example registers end with it.
    with patch.dict(RULES):
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
