"""A backend of torch.distributed for tensors on the processor: ``init_process_group("rma")``.

Single collective calls on any tensors, for DistributedDataParallel, FSDP, DTensor and programs of one's own.
It needs torch, ``segments`` and ``geometry``, and of ``layers`` the types of tensors and their sums; no other
wing imports it. Begin with ``collectives.py``, where a call of torch becomes data that move by one of five
ways, and ``group.py``, which begins it. The ways are in ``on_node.py``, by rounds of ``node_slots.py``, and
``inter_node.py``. ``operations.py`` advances what has begun, and ``work.py`` lets torch wait for it.
``registration.py`` and ``creation.py`` make the backend known to torch.

Importing it is cheap: torch is told of the backend, and the first group loads the rest.
"""

from distdl_rma.torch_backend.registration import register, register_with_torch

__all__ = ["register", "register_with_torch"]
