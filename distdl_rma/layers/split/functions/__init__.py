"""The rules of torch's functions, one file for each family; importing the files fills the table.

A *rule* is how a function of torch acts on split tensors: a kind, and a handler that gets the user's call and
returns what torch's function returns for the whole tensors, as split tensors. One call through a rule, here
``x.sum(2)`` of a tensor whose dimension 2 is cut over two ranks:

    the user's line         x.sum(2)
         |
    __torch_function__      finds ``Rule("reduction", sums)`` in the table; notes the call, if a model runs,
    (``tensor.py``)         so that ranks can compare it; raises torch's errors, as for the whole shape
         |
    ``of_cut``              x is cut: finds the *site*, this line of the program, which keeps what the last
    (``operands.py``)       call here has made; gives all arguments torch's names and defaults
         |                  x is not cut: torch's function on the copy of every rank; the rule is not asked
    ``sums``                torch.sum of the block, then the rest of the whole:
    (``reductions.py``)
                            rank 0:  block -> partial sum --.
                                                            +-- allreduce --> SplitTensor(sum, layout)
                            rank 1:  block -> partial sum --'

What is always true:

- All ranks of the partition call the same functions in the same order, so each rank derives the layout of a
  result, and which data must move, from the layouts of the operands: without a message.
- A rule is exact or raises ``refused``, and decides this by shapes, layouts and arguments, which all ranks
  have alike. So a refusal is raised on all ranks, and no rank waits for one that refuses.
- The result's block is this rank's box of the whole result, in torch's dtype. Its layout does not depend on
  values; where it must (masks, ``nonzero``), the ranks exchange how many elements they have.

A function of many operands or dimensions has several layouts to choose from. Each kind chooses the one that
moves least, in this order: keep blocks where they are; move them to another cut, so that each element travels
once; give every rank a copy, which costs memory for the whole tensor on each.

| kind | layout of the result, and why |
|---|---|
| pointwise | that of the largest operand: the smaller ones are cheaper to move |
| reductions | the input's, where reduced dimensions become whole: partial results are small, blocks are not |
| products | a cut label of the largest operand; a cut label that is summed needs an allreduce of the result |
| windows, convolutions | outputs lie with their inputs, so that only a halo moves |
| norms, losses of elements | the input's: ranks exchange moments or sums only |
| reshapes | cuts that still are intervals of the new dimensions; else the nearest ends that are |
| sorts, transforms, flips | needed dimensions become whole, another one is cut meanwhile |
| indices, tables | chosen dimensions become whole: where an index points is known only at run time |
| sequences | samples stay cut: each step of time needs the one before it |
"""

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
from distdl_rma.layers.split.functions import refusals as refusals
from distdl_rma.layers.split.functions import sequences as sequences
from distdl_rma.layers.split.functions import shapes as shapes
from distdl_rma.layers.split.functions import windows as windows
from distdl_rma.layers.split.functions import writing as writing
