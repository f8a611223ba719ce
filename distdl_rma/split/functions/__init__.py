"""The rules of torch's functions, one file for each kind; importing the files fills the table."""

from distdl_rma.split.functions import whole_tensors as whole_tensors
from distdl_rma.split.functions.elements import pointwise as pointwise
from distdl_rma.split.functions.elements import queries as queries
from distdl_rma.split.functions.elements import random as random
from distdl_rma.split.functions.images import convolutions as convolutions
from distdl_rma.split.functions.images import norms as norms
from distdl_rma.split.functions.images import windows as windows
from distdl_rma.split.functions.places import indexing as indexing
from distdl_rma.split.functions.places import rearranging as rearranging
from distdl_rma.split.functions.places import shapes as shapes
from distdl_rma.split.functions.places import writing as writing
from distdl_rma.split.functions.products import contractions as contractions
from distdl_rma.split.functions.products import sequences as sequences
from distdl_rma.split.functions.totals import along as along
from distdl_rma.split.functions.totals import compositions as compositions
from distdl_rma.split.functions.totals import losses as losses
from distdl_rma.split.functions.totals import reductions as reductions
