"""Tensors among the arguments of a call, also within lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

import torch


def tensors_in(*arguments: Any) -> list[torch.Tensor]:
    """All tensors among arguments, also within lists, tuples and dicts."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += tensors_in(*argument)
        elif isinstance(argument, dict):
            found += tensors_in(*argument.values())
    return found


def mapped(change: Any, argument: Any) -> Any:
    """Arguments with ``change`` applied to every tensor."""
    if isinstance(argument, torch.Tensor):
        return change(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(mapped(change, one) for one in argument))
    if isinstance(argument, (list, tuple)):
        return type(argument)(mapped(change, one) for one in argument)
    if isinstance(argument, dict):
        return {key: mapped(change, one) for key, one in argument.items()}
    return argument
