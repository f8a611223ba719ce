"""Split tensors: unchanged models run on tensors whose blocks are on many ranks."""

from distdl_rma.split import functions as functions
from distdl_rma.split.tensor import SplitTensor as SplitTensor
