"""A stand-in for torchvision where it is not installed: vLLM's model files import it, though text
and PIL-based image processors do not need it.

There is no CPU build of torchvision on PyPI. Model files of vLLM import names from transformers'
torchvision-based image processors when they are loaded, so without torchvision even text would not
be served. The stand-in's names exist, and raise an error that names them when they are used;
transformers uses its PIL-based processors.
"""

import importlib.machinery
import importlib.util
import logging
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

NAME = "torchvision"
_VIDEO_BASES = ("BaseVideoProcessor", "VideoProcessorMixin")


class MissingTorchvisionError(ImportError):
    """A name of torchvision was used, which is not installed."""


class _Name(type):
    """The metaclass of torchvision's names: they work in annotations and as base classes; calling
    them raises.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingTorchvisionError(
            f"{cls.__qualname__} is needed, but torchvision is not installed"
        )

    def __getattr__(cls, name: str) -> Any:
        return _named(cls.__qualname__, name)


def _named(owner: str, name: str) -> _Name:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {"__qualname__": f"{owner}.{name}"})


class _StandIn(ModuleType):
    """A module whose every name exists."""

    def __getattr__(self, name: str) -> Any:
        return _named(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, "Stands in for torchvision, which is not installed.")

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing; loaders must have this method."""


def install() -> None:
    """Makes `import torchvision` succeed in this process, if it is not installed.

    vLLM calls this in every process that it starts.
    """
    if importlib.util.find_spec(NAME) is not None:
        return
    from transformers.utils import import_utils

    for available in (
        import_utils.is_torchvision_available,
        import_utils.is_torchvision_v2_available,
    ):
        available()  # caches in transformers that torchvision is not installed
    sys.meta_path.append(_Finder())
    try:
        _make_video_processors()
    except (AttributeError, ImportError) as error:
        # an unknown version of transformers: those models are served with text only
        logger.warning(
            "image processors of models that also take videos do not run without torchvision: %s",
            error,
        )


def _make_video_processors() -> None:
    """Makes transformers create video processors without torchvision: otherwise a model whose
    processor has one could not take images either.

    transformers replaces classes that need torchvision by classes that raise; image processors have
    PIL-based alternatives. Videos are rejected before they would reach a video processor.
    """
    from transformers.utils import import_utils

    lazy = import_utils._LazyModule
    look_up = lazy.__getattr__

    def look_up_with_video(module: Any, name: str) -> Any:
        if name in _VIDEO_BASES:
            return getattr(importlib.import_module("transformers.video_processing_utils"), name)
        missing = module.__dict__.get("_object_missing_backend", {})
        if list(missing.get(name, ())) == [NAME] and not (
            "ImageProcessor" in name or "image_process" in name
        ):
            del missing[name]
        return look_up(module, name)

    lazy.__getattr__ = look_up_with_video


def stand_in() -> None:
    """Makes this process, and through vLLM's plugin group every process of vLLM started from here
    on, call `install`.
    """
    install()
    folder = str(Path(__file__).parent / "plugin")
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder not in parts:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *parts])
    if folder not in sys.path:
        # `multiprocessing` gives spawned processes this `sys.path` in place of their own
        sys.path.append(folder)
