"""All ranks refuse what one of them does wrong."""

import pytest
import torch

from distdl_rma import DistdlError, ShapeError

# What one rank passes in the place of a tensor; more of it where shapes and types are those of one tensor.
FAULTS = {
    "nothing": lambda x: None,
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.detach().numpy(),
    "sparse": lambda x: x.detach().to_sparse(),
    "on no device": lambda x: x.detach().to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x.detach().flatten()], layout=torch.jagged),
    "another type": lambda x: x.detach().to(torch.complex64),
    "too many dimensions": lambda x: x.detach().reshape(*(1,) * 7, *x.shape),
}
MORE_FAULTS = FAULTS | {
    "a shorter type": lambda x: x.detach().to(torch.float16),
    "too few dimensions": lambda x: x.detach().reshape(-1),
    "other extents": lambda x: torch.nn.functional.pad(x.detach(), (0, 1) * x.dim()),
}


def same_error(comm, call, kind=DistdlError, match=None):
    """The call raises on all ranks, of one type and in the same words, which are returned."""
    with pytest.raises(kind, match=match) as caught:
        call()
    texts = comm.allgather((type(caught.value).__name__, str(caught.value)))
    assert len(set(texts)) == 1, texts
    return texts[0][1]


def refused(comm, loss, x, target, words):
    """A call of a loss raises the same ShapeError on all ranks, again and again."""
    for _ in range(2):
        same_error(comm, lambda: loss(x, target), ShapeError, words)
