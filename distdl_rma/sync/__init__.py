"""Training aids: gradients summed over ranks, their global norm, and scaling for short types.

Who decides which ranks sum a weight's gradient: ``claims``. Whether all ranks say the same: ``claim_check``.
What is synchronised, and whether it changed since: ``registry``. What travels together: ``bucket``. What
happens in a backward: ``gradients``. What hooks of parameters see: ``parameter_hooks``.
"""

from distdl_rma.sync.gradients import GradientSync
from distdl_rma.sync.scaler import DistributedGradScaler

__all__ = ["DistributedGradScaler", "GradientSync"]
