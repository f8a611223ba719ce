"""Users' hooks of parameters get the gradient summed over all ranks.

A hook that a user registered on a parameter was written for one machine: it sees the gradient, and may change
it. On split tensors each rank computes a contribution only, which the bucket sums later. So the order is:

    torch computes this rank's contribution
    our hook, made the first one   part of it that must be summed; with hooks of a user: summed over the ranks
    hooks of the user              see and change the whole gradient, alike on all ranks
    our post-accumulate hook       the first rank contributes the result, the others zeros, so that the
                                   bucket's sum is the hooks' result
    post-accumulate hooks of the user, such as a fused optimizer: kept back until ``.grad`` is summed
"""

from __future__ import annotations

import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.checks.gradient_origin import RUNNING, GradientCheck, has_common_gradient, part_to_sum
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.tensors import as_array, as_tensor
from distdl_rma.layers.sync.bucket import GradientSlot
from distdl_rma.segments.machine import Machine


class ParameterHooks:
    """Runs hooks of a parameter of a model on split tensors, which may change its gradient.

    A hook that clamps must get the gradient, not one rank's contribution. So the ranks sum before the hooks
    run. All ranks then get the same result, and the first rank contributes it. Collective to construct over
    the ranks of the slot.
    """

    def __init__(self, machine: Machine, slot: GradientSlot, name: str) -> None:
        self._first = slot.kind.ranks[0] == machine.rank
        self._dtype = sum_dtype(slot.kind.dtype)
        self._sum = slot.kind.allreduce(machine, slot.shape.numel(), self._dtype, name)
        # .grad from before, until the new gradient is there.
        self._before: torch.Tensor | None = None
        self.seen = False

    def whole(self, slot: GradientSlot, contribution: torch.Tensor) -> torch.Tensor:
        """The summed gradient, for the hooks; blocking."""
        total = self._sum(as_array(contribution.detach().to("cpu", self._dtype).reshape(-1)))
        result = as_tensor(total, self._dtype).view(contribution.shape)
        parameter = slot.parameter()
        self._before, parameter.grad, self.seen = parameter.grad, None, True
        return result.to(contribution.device, contribution.dtype, copy=True)

    def contribute(self, slot: GradientSlot) -> None:
        """Replace the hooks' result in ``.grad`` by this rank's contribution."""
        self.seen = False
        parameter, before = slot.parameter(), self._before
        found, self._before = parameter.grad, None
        if found is not None:
            mine = found * slot.kind.divisor if self._first else torch.zeros_like(found)
            parameter.grad = mine if before is None else before + mine


def contribution(
    machine: Machine, slot: GradientSlot, computed: torch.Tensor, alike_on: tuple[int, ...]
) -> torch.Tensor | None:
    """Replacement for the computed gradient of a parameter of a model on split tensors; None to keep it.

    If all ranks computed the gradient identically, as of a penalty on weights, the first rank contributes it
    and the others contribute zeros. ``alike_on`` are the ranks on which plain tensors are equal. Blocking if
    the parameter has hooks of a user.
    """
    parameter = slot.parameter()
    if slot.contributes_common is None:
        first = next((rank for rank in alike_on if rank in slot.kind.ranks), machine.rank)
        slot.contributes_common = first == machine.rank
    found = None
    if not RUNNING.depth:
        alike = has_common_gradient(parameter)
        if alike:
            GradientCheck.of(machine, alike_on).note(slot.name, computed)
        if not slot.contributes_common:
            found = torch.zeros_like(computed) if alike else part_to_sum(parameter)
    if len(parameter._backward_hooks) > 1:
        if slot.hooks is None:
            slot.hooks = ParameterHooks(machine, slot, f"hooks of {slot.name}")
        found = slot.hooks.whole(slot, computed if found is None else found)
    return found


def keep_back(slot: GradientSlot, label: str, paused: bool) -> None:
    """Postpone the user's post-accumulate hooks until the gradient is summed over the ranks."""
    if paused:
        raise UnsupportedError(
            f"{label!r}: within no_sync() a hook of register_post_accumulate_grad_hook would see a gradient"
            " that the ranks have not summed; change it in one of register_hook, or do without no_sync()"
        )
    hooks, own = slot.parameter()._post_accumulate_grad_hooks, {each.id for each in slot.handles}
    slot.later = {key: hooks.pop(key) for key in [*hooks] if key not in own}


@torch.no_grad()
def run_kept_back(slot: GradientSlot) -> None:
    """Call the postponed hooks."""
    hooks, slot.later = slot.later, {}
    for hook in hooks.values():
        hook(slot.parameter())
