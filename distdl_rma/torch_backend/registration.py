"""How torch knows the backend: its name, its rendezvous, and when torch.distributed is imported later.

A user imports ``distdl_rma`` and ``torch`` in any order. torch is slow to import, so this package does not
import it for a user who needs segments only. Hence two ways::

    torch.distributed is loaded     register now
    not yet                         a finder waits at the head of sys.meta_path, lets the usual loader load
                                    the module, then registers, and is gone

torch has no hook for a rendezvous without an address, nor for errors within a block of coalesced calls. There
a function of torch is replaced by one that calls it, and calls for other backends go on as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TORCH = "torch.distributed"
_COALESCING = "_coalescing_manager"
_RECORDED = "_FR_SELF_RECORDING_BACKENDS"


def register() -> None:
    """Make ``"rma"`` known to torch as a backend for the processor; idempotent, starts nothing.

    Importing ``distdl_rma`` does it as soon as torch is imported too. torch 2.14 and newer find it by
    themselves, as an entry point of the installed package.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "RMA"):
        return
    dist.Backend.register_backend("rma", _create, extended_api=True, devices=["cpu"])
    c10d = vars(sys.modules["torch.distributed.distributed_c10d"])
    c10d[_COALESCING] = vars(dist)[_COALESCING] = _ended_by_errors(c10d[_COALESCING], c10d)
    # From 2.15 on torch records the calls of groups made of several backends, which this one is not.
    if _RECORDED in c10d:
        c10d[_RECORDED] = {*c10d[_RECORDED], "rma"}
    # Of "env://", where init_process_group looks for an address unless it is told otherwise.
    handlers = sys.modules["torch.distributed.rendezvous"].__dict__["_rendezvous_handlers"]
    by_environment = handlers["env"]

    def handler(url: str, **options: Any) -> Any:
        from distdl_rma.torch_backend.creation import rendezvous

        return rendezvous(by_environment, url, **options)

    handlers["env"] = handler


def register_with_torch() -> None:
    """``register`` now if torch.distributed has been imported, or else as soon as it is."""
    if hasattr(sys.modules.get(_TORCH), "init_process_group"):
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _create(options: Any, _: Any = None) -> Any:
    from distdl_rma.torch_backend.creation import create

    return create(options)


class _Finder(MetaPathFinder):
    """Finds torch.distributed once, and registers the backend when it is loaded.

    It loads nothing itself: the loader that Python finds without it gets one more step.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The loader may be shared with other modules.
            del loader.exec_module
            load(module)
            register()

        loader.exec_module = exec_module
        return spec


def _ended_by_errors(
    manager: Callable[..., AbstractContextManager[Any]], c10d: dict[str, Any]
) -> Callable[..., AbstractContextManager[Any]]:
    """Torch's context manager of coalesced calls; for groups of this backend, an error ends the block too.

    In torch the block stays open, and later all-reduces of the group silently do nothing.
    """

    @wraps(manager)
    @contextmanager
    def ended(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            with manager(group, *args, **kwargs) as works:
                yield works
        except BaseException:
            found = group or c10d["GroupMember"].WORLD
            drop = getattr(found, "drop_coalescing", None)
            if drop is not None:
                c10d["_world"].pg_coalesce_state.pop(found, None)
                drop()
            raise

    return ended
