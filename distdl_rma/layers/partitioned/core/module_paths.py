"""Paths of modules in their models, as far as torch says when modules are put into one another.

An error in ``down2.conv.0`` helps more than one in ``DistributedConv2d#7``. A module does not know where it
is: torch's modules know their children only, and a layer is built before the model that contains it. So
torch's hook, which runs whenever a module is put into another one, notes the parent here::

    net.down2 = block              _parents[block]  = [(net,   "down2")]
    block.conv = Sequential(...)   _parents[conv]   = [(block, "conv")]      path_of(layer) = "down2.conv.0"
    Sequential(layer)              _parents[layer]  = [(conv,  "0")]

Paths are for people. Ranks find each other's layers by the name, which never changes: the path of a layer may
change as long as the program builds its model.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

# For each module the modules that contain it, oldest first, and its key in each. Weak references; by id,
# since modules of a program may define equality.
_parents: WeakIdKeyDictionary = WeakIdKeyDictionary()


def path_of(module: nn.Module) -> str:
    """Keys that lead to a module from the outermost module that contains it; empty if there is none.

    If several models contain the module, the first one that still exists counts. Only torch's functions
    record containment; ``copy.deepcopy``, for example, does not.
    """
    keys: list[str] = []
    # Modules may contain each other, in a circle.
    passed = {id(module)}
    while True:
        found = _parent_of(module)
        if found is None or id(found[0]) in passed:
            return ".".join(reversed(keys))
        module, key = found
        passed.add(id(module))
        keys.append(key)


def _parent_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    for parent, key in _living(module):
        if parent._modules.get(key) is module:
            return parent, key
        # Containers may have renumbered their modules.
        for other, child in parent._modules.items():
            if child is module:
                return parent, other
    return None


def _living(module: nn.Module) -> list[tuple[nn.Module, str]]:
    entries = ((parent(), key) for parent, key in _parents.get(module, ()))
    return [(parent, key) for parent, key in entries if parent is not None]


def _remember(parent: nn.Module, key: str, module: nn.Module | None) -> None:
    # torch calls this whenever a module is put into another one. Drops entries of modules that are gone.
    if module is not None:
        entries = [(weakref.ref(other), old) for other, old in _living(module)]
        _parents[module] = [*entries, (weakref.ref(parent), key)]


register_module_module_registration_hook(_remember)
