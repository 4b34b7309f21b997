"""Chooses the engine that a worker hosts."""

from ..schemas.base.errors import MidstreamError
from ..schemas.base.settings import Settings, SettingsError
from .engine.protocol import Engine


def make_engine(settings: Settings) -> Engine:
    """The engine that `settings.engine` names, not started yet.

    Raises MidstreamError("engine_failed") where vLLM is not installed.
    """
    if settings.engine == "fake":
        from .fake.engine import FakeEngine

        return FakeEngine(settings)
    try:
        from .engine.vllm import VllmEngine
    except ModuleNotFoundError as error:
        raise MidstreamError(
            "engine_failed", f"vLLM is not installed ({error}): install the `cpu` or `gpu` extra"
        ) from error
    return VllmEngine(settings)


def check_options(settings: Settings) -> list[str]:
    """Checks `settings.engine_options` where vLLM is installed; returns what is unproven.

    Raises SettingsError.
    """
    if not settings.engine_options:
        return []
    if settings.engine == "fake":
        raise SettingsError("engine_options: they belong to vLLM, and the setting engine is fake")
    try:
        from .engine.options.option_check import accepted
    except ModuleNotFoundError:
        return []  # the worker that has it checks them
    return accepted(settings).caveats
