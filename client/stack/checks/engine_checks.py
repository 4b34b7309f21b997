"""Checks of this environment's engine: vLLM, its options, and extensions."""

import subprocess
import sys
from collections.abc import Iterator

from ....schemas.base.settings import Settings, SettingsError
from .finding import Finding

#: Most seconds that an import may take; on a cold disk, torch takes tens of them.
IMPORT_S = 120.0


def vllm(settings: Settings) -> Iterator[Finding]:
    """Check this environment's vLLM; yield nothing if it is not installed.

    Options are checked only if any are set, because the check imports vLLM.
    """
    from ....workers.engines import check_options
    from ....workers.runner.support.seams import WINDOW, SeamError, verify
    from ....workers.runner.support.vllm_source import installed

    try:
        source = installed()
    except ModuleNotFoundError:
        return
    if trouble := _import_trouble("torch"):
        advice = "reinstall the extra `cpu` or `gpu` in this environment"
        yield Finding("fail", "vllm", f"torch cannot be imported: {trouble}", advice)
        return
    try:
        caveats = verify(source, unproven=settings.engine_unproven)
        yield Finding(
            "warn" if caveats else "ok", "vllm", "; ".join(caveats) or f"version {source.version}"
        )
    except SeamError as error:
        yield Finding(
            "fail", "vllm", str(error), f"install an unchanged build of one of {', '.join(WINDOW)}"
        )
        return
    try:
        for caveat in check_options(settings):
            yield Finding(
                "warn",
                "vllm options",
                caveat,
                "remove it from the table [engine], or compare rows with a reference yourself",
            )
    except SettingsError as error:
        yield Finding(
            "fail", "vllm options", str(error), "docs/engine-options.md lists what is accepted"
        )


def _import_trouble(module: str) -> str:
    """Import a module in another process; return why that failed, or an empty string."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the import takes more than {IMPORT_S:.0f} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def extensions(settings: Settings) -> Iterator[Finding]:
    """Yield the extensions that packages of this environment offer, and whether the setting names
    them; does not import the packages.
    """
    from ....workers.runner.base.extensions import check_installed, named, offered

    try:
        check_installed(settings.extensions)
    except SettingsError as error:
        yield Finding(
            "fail",
            "extensions",
            str(error),
            "install the package where the worker runs, or remove it from the setting extensions",
        )
    for offer in offered():
        about = f"{offer.package} {offer.version} offers the {offer.kind} {offer.name}"
        if offer.package in named(settings.extensions):
            yield Finding("ok", "extensions", about)
        else:
            yield Finding(
                "ok",
                "extensions",
                (
                    f"{about}; a worker with these settings does not load it, because the setting "
                    f"extensions does not name {offer.package}"
                ),
            )
