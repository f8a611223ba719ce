"""The rules of torch's functions, one file for each kind; importing the files fills the table."""

from distdl_rma.layers.split.functions import along as along
from distdl_rma.layers.split.functions import compositions as compositions
from distdl_rma.layers.split.functions import contractions as contractions
from distdl_rma.layers.split.functions import convolutions as convolutions
from distdl_rma.layers.split.functions import embedding as embedding
from distdl_rma.layers.split.functions import indexing as indexing
from distdl_rma.layers.split.functions import losses as losses
from distdl_rma.layers.split.functions import norms as norms
from distdl_rma.layers.split.functions import pointwise as pointwise
from distdl_rma.layers.split.functions import queries as queries
from distdl_rma.layers.split.functions import random as random
from distdl_rma.layers.split.functions import rearranging as rearranging
from distdl_rma.layers.split.functions import reductions as reductions
from distdl_rma.layers.split.functions import sequences as sequences
from distdl_rma.layers.split.functions import shapes as shapes
from distdl_rma.layers.split.functions import whole_tensors as whole_tensors
from distdl_rma.layers.split.functions import windows as windows
from distdl_rma.layers.split.functions import writing as writing
