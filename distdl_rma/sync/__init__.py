"""Training aids: gradients summed over ranks, their global norm, and scaling for short types."""

from distdl_rma.sync.gradients import GradientSync
from distdl_rma.sync.scaler import DistributedGradScaler

__all__ = ["DistributedGradScaler", "GradientSync"]
