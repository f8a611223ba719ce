"""Split tensors: unchanged models run on tensors whose blocks are on many ranks.

Begin with the head of ``functions/__init__.py``: what a rule is, and one call through it. The files, from
below; each imports from those above it in this list:

- ``calls``: the table of rules; where a function is called, with which arguments, and which errors torch has.
- ``layout``, ``layout_choice``: which rank has which box of a tensor; another cut where one cannot stay.
- ``redistribution``, ``entry``: from one layout to another, with gradients; layouts of what users pass.
- ``plain_operands``, ``function_nodes``: gradients of plain tensors, and of users' autograd functions.
- ``tensor``: ``SplitTensor``, which finds the rule of each function that torch is asked for.
- ``views``, ``operands``, ``shard``, ``reduction_axes``: what rules share.
- ``functions``: the rules.
"""

from distdl_rma.layers.split import functions as functions
from distdl_rma.layers.split.tensor import SplitTensor as SplitTensor
