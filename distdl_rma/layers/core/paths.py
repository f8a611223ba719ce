"""Where modules are in their models, which is what people call them by: ``down2.conv.0``."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

# The modules that a module was put into, the first one first, and by which key. By id, since the modules
# of a program may compare as they like; without a hold on any.
_parents: WeakIdKeyDictionary = WeakIdKeyDictionary()


def path_of(module: nn.Module) -> str:
    """Keys that lead to a module from the outermost one that it is in; empty if it is in none.

    Of several models that it is in the first counts that is still there. What is put into a module other
    than by torch's own functions, as ``copy.deepcopy`` does, is not found.
    """
    keys: list[str] = []
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
        # Containers may have numbered theirs anew since.
        for other, child in parent._modules.items():
            if child is module:
                return parent, other
    return None


def _living(module: nn.Module) -> list[tuple[nn.Module, str]]:
    entries = ((parent(), key) for parent, key in _parents.get(module, ()))
    return [(parent, key) for parent, key in entries if parent is not None]


def _remember(parent: nn.Module, key: str, module: nn.Module | None) -> None:
    # Called by torch whenever a module is put into another one.
    if module is not None:
        entries = [(weakref.ref(other), old) for other, old in _living(module)]
        _parents[module] = [*entries, (weakref.ref(parent), key)]


register_module_module_registration_hook(_remember)
