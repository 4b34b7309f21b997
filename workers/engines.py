"""Chooses the engine that a worker hosts: vLLM, gradients, or one of an installed package."""

from importlib.metadata import EntryPoint, entry_points
from typing import cast

from ..schemas.base.errors import MidstreamError, Translated
from ..schemas.jobs.queues import GRADIENTS
from ..schemas.model.banks import asked_hooks
from ..schemas.packages import installing
from ..schemas.settings.settings import NO_TOOLS, Settings, SettingsError
from .engine.protocol import Engine
from .runner.base.extensions import check_installed

VLLM = "vllm"
#: Entry points of this group are functions or classes that make an `Engine` from the settings.
GROUP = "midstream.engines"
#: What an import of vLLM or torch raises where it is not installed.
NEEDS_LIBRARIES = Translated(
    ModuleNotFoundError,
    lambda error: MidstreamError(
        "engine_failed", f"vLLM is not installed ({error}): install the `cpu` or `gpu` extra"
    ),
)


def make_engine(settings: Settings) -> Engine:
    """Returns the engine that `settings.engine` names, not started yet.

    Raises MidstreamError("engine_failed") where its libraries are not installed, and SettingsError
    for an unknown engine.
    """
    if settings.engine != VLLM:
        return cast(Engine, _offered(settings.engine).load()(settings))
    with NEEDS_LIBRARIES:
        from .engine.vllm import VllmEngine
    return VllmEngine(settings)


def check_options(settings: Settings) -> list[str]:
    """Checks hooks, extensions and, where vLLM is installed, the parser of tool calls and
    `settings.engine_options`; returns caveats of unproven ones.

    Other engines check their own options. Raises SettingsError, also for an unknown engine.
    """
    if settings.engine != VLLM:
        _offered(settings.engine)
    if settings.engine not in (VLLM, GRADIENTS):
        return []
    asked_hooks(settings.hooks)
    check_installed(settings.extensions)
    try:
        if settings.tool_parser not in ("", NO_TOOLS):
            from .engine.prompts.tool_calls import check_name

            check_name(settings.tool_parser)
        if not settings.engine_options:
            return []
        from .engine.options.option_check import accepted
    except ModuleNotFoundError:
        return []  # the worker, which has vLLM, checks them
    return accepted(settings).caveats


def _offered(name: str) -> EntryPoint:
    """Returns the entry point of the engine `name`, without importing it.

    Raises SettingsError unless exactly one installed package offers it.
    """
    offers = entry_points(group=GROUP)
    named = [offer for offer in offers if offer.name == name]
    if len(named) == 1:
        return named[0]
    if named:
        wrong = "several packages offer this engine"
    elif name == GRADIENTS:
        wrong = f"its package is not installed: {installing('lab')}"
    else:
        wrong = "unknown engine"
    valid = ", ".join([VLLM, *sorted({offer.name for offer in offers})])
    raise SettingsError(f"engine={name!r}: {wrong}; valid: {valid}")
