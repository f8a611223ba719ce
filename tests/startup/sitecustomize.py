"""What Python does first in the jobs that tests start: it leaves out work that no law of a test needs.

``environment()`` of ``tests/run_mpi.py`` puts this folder on the path, where Python looks for a module of
this name. On each rank of a small job most of the time is that of importing torch, and of ending.

- At the end Python collects garbage among all objects of torch, for 0.4 seconds; here they are left out.
- Optimizers of torch, and tensors without memory, import torch's compiler, for two seconds: only to say that
  it shall not compile a function, or to read an option. Here it is loaded when it is used for more.

``AS_USERS_START`` in the environment of a job takes both back, where it matters how a job ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
# This file of the package can be imported without the others.
OPTIONS = f"{COMPILER}.config"


class UnloadedCompiler(ModuleType):
    """The package of the compiler, which is loaded in place when anything else is asked of it."""

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """The function, which nothing compiles."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing: no graph is made."""

    def __getattr__(self, name: str) -> Any:
        # The machinery of imports asks for these while it makes the module.
        if name.startswith("__"):
            raise AttributeError(name)
        load(self)
        return getattr(self, name)


def load(module: ModuleType) -> None:
    """Run the package's own code, which replaces what stood for it."""
    loader = module.__spec__.loader if module.__spec__ else None
    if isinstance(module, UnloadedCompiler) and isinstance(loader, LateLoader):
        module.__class__ = ModuleType  # type: ignore[assignment]
        loader.of_torch.exec_module(module)


class LateLoader(Loader):
    def __init__(self, of_torch: Loader) -> None:
        self.of_torch = of_torch

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return UnloadedCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == COMPILER:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = LateLoader(spec.loader)
            return spec
        if name.startswith(f"{COMPILER}.") and name != OPTIONS:
            load(sys.modules[COMPILER])
        return None


if "AS_USERS_START" not in os.environ:
    # Of all that is called at the end this is the last.
    atexit.register(gc.freeze)
    sys.meta_path.insert(0, Finder())
