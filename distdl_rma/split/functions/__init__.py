"""The rules of the table, one file for each kind of function; importing them fills it."""

from distdl_rma.split.functions import convolutions as convolutions
from distdl_rma.split.functions import pointwise as pointwise
from distdl_rma.split.functions import queries as queries
