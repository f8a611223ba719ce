"""Training aids: sums of gradients over ranks, their global norm, and loss scaling.

``gradient_groups``: which ranks sum a weight's gradient. ``callback_check``: whether all ranks state the
same. ``registry``: what is synchronised, and whether it has changed since. ``bucket``: gradients that share
an allreduce. ``gradients``: what happens in a backward. ``parameter_hooks``: users' hooks of parameters.
"""

from distdl_rma.layers.sync.gradients import GradientSync
from distdl_rma.layers.sync.scaler import DistributedGradScaler

__all__ = ["DistributedGradScaler", "GradientSync"]
