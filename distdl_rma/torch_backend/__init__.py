"""A backend of torch.distributed for tensors on the processor: ``init_process_group("rma")``.

Single collective calls on any tensors, for DistributedDataParallel, FSDP, DTensor and programs of one's
own. It needs torch and ``segments``, of ``layers`` the types of tensors only; no other wing imports it. Begin
with ``group.py``, the calls of torch in three classes, then ``node_slots.py``, where the ranks of a node
show each other their data. ``inter_node.py`` goes on between nodes, ``quick.py`` is the short way of small
vectors, ``registration.py`` and ``creation.py`` make the backend known to torch.

Importing it is cheap: torch is told of the backend, and the first group loads the rest.
"""

from distdl_rma.torch_backend.registration import register, register_with_torch

__all__ = ["register", "register_with_torch"]
