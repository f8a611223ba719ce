"""A backend of torch.distributed for tensors on the processor: ``init_process_group("rma")``.

Importing it is cheap: torch is told of the backend, and the first group loads the rest.
"""

from distdl_rma.torch_backend.registration import register, register_with_torch

__all__ = ["register", "register_with_torch"]
