"""A stand-in for torchvision where it is not installed: vLLM's model files import it, though text and PIL's processors need none of it.

There is no CPU build of torchvision on PyPI. Model files of vLLM import names from transformers' torchvision-based image processors
when they are loaded, so that without torchvision even text would not be served. The stand-in's names exist and fail when they are
used, with a message that says what is missing; transformers goes on with its processors for PIL.
"""

import importlib.machinery
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torchvision"


class MissingTorchvisionError(ImportError):
    """Something of torchvision is used, which is not installed."""


class _Name(type):
    """A class for each name of torchvision: annotations and base classes take it, calls and members do not."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingTorchvisionError(f"{cls.__qualname__} is needed, but torchvision is not installed")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__qualname__": f"{cls.__qualname__}.{name}"})


class _StandIn(ModuleType):
    """A module whose every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__qualname__": f"{self.__name__}.{name}"})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, "Stands in for torchvision, which is not installed.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Have `import torchvision` succeed in this process, if it is not installed. vLLM calls this in every process that it starts."""
    if importlib.util.find_spec(NAME) is not None:
        return
    from transformers.utils import import_utils

    for available in (import_utils.is_torchvision_available, import_utils.is_torchvision_v2_available):
        available()  # remembered by transformers: it is not there
    sys.meta_path.append(_Finder())


def stand_in() -> None:
    """Have every process of vLLM that is started from here on call `install`, through vLLM's plugin group; this process too."""
    install()
    folder = str(Path(__file__).parent / "plugin")
    found = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder not in found:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *found])
    if folder not in sys.path:  # which `multiprocessing` hands on to the processes that it spawns, in place of theirs
        sys.path.append(folder)
