"""The rules of the table, one file for each kind of function; importing them fills it."""

from distdl_rma.split.functions import along as along
from distdl_rma.split.functions import attention as attention
from distdl_rma.split.functions import contractions as contractions
from distdl_rma.split.functions import convolutions as convolutions
from distdl_rma.split.functions import creation as creation
from distdl_rma.split.functions import differences as differences
from distdl_rma.split.functions import distances as distances
from distdl_rma.split.functions import extremes as extremes
from distdl_rma.split.functions import fourier as fourier
from distdl_rma.split.functions import indexing as indexing
from distdl_rma.split.functions import joining as joining
from distdl_rma.split.functions import losses as losses
from distdl_rma.split.functions import masks as masks
from distdl_rma.split.functions import norms as norms
from distdl_rma.split.functions import planes as planes
from distdl_rma.split.functions import pointwise as pointwise
from distdl_rma.split.functions import queries as queries
from distdl_rma.split.functions import random as random
from distdl_rma.split.functions import rearranging as rearranging
from distdl_rma.split.functions import reductions as reductions
from distdl_rma.split.functions import shapes as shapes
from distdl_rma.split.functions import softmax as softmax
from distdl_rma.split.functions import windows as windows
from distdl_rma.split.functions import writing as writing
