"""Split tensors: unchanged models run on tensors whose blocks are on many ranks."""

from distdl_rma.layers.split import functions as functions
from distdl_rma.layers.split.tensor import SplitTensor as SplitTensor
