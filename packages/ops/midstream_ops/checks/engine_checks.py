"""Checks of this environment's engine: vLLM, its options, and extensions."""

import math
from collections.abc import Iterator

from midstream.schemas.settings.settings import SettingsError

from ..engine_packages import COMPANIONS_ADVICE, companions_trouble, import_trouble
from .finding import CheckFinding, graded
from .service import Service


def vllm(service: Service) -> Iterator[CheckFinding]:
    """Check this environment's vLLM; yield nothing if it is not installed.

    Options are checked only if any are set, because the check imports vLLM. Raises SeamError.
    """
    from midstream.workers.engines import check_options
    from midstream.workers.runner.support.seams import verify
    from midstream.workers.runner.support.vllm_source import installed

    try:
        source = installed()
    except ModuleNotFoundError:
        return
    if (trouble := import_trouble("torch")) != "":
        yield (
            CheckFinding(
                "warn",
                "vllm",
                "not checked: importing torch takes too long, so this machine is busy",
                "run it again when it has less to do",
            )
            if trouble is None
            else CheckFinding(
                "fail",
                "vllm",
                f"torch cannot be imported: {trouble}",
                "reinstall the extra `cpu` or `gpu` in this environment",
            )
        )
        return
    if trouble := companions_trouble():
        yield CheckFinding("fail", "vllm", trouble, COMPANIONS_ADVICE)
        return
    caveats = verify(source)
    required = service.settings.compare == "require"  # then the engine refuses what is unproven
    found = "; ".join(caveats) or f"version {source.version}"
    yield graded("vllm", bool(caveats), found, fail=1 if required else math.inf)
    try:
        for caveat in check_options(service.settings):
            advice = "remove it from the table [engine], or compare rows with a reference yourself"
            yield CheckFinding("fail" if required else "warn", "vllm options", caveat, advice)
    except SettingsError as error:
        advice = "docs/vllm.md lists what is accepted"
        yield CheckFinding("fail", "vllm options", str(error), advice)


def extensions(service: Service) -> Iterator[CheckFinding]:
    """Yield the extensions that packages of this environment offer, and whether the setting names
    them; does not import the packages. Raises SettingsError if it names others.
    """
    from midstream.workers.runner.base.extensions import check_installed, named, offered

    for offer in offered():
        about = f"{offer.package} {offer.version} offers the {offer.kind} {offer.name}"
        if offer.package not in named(service.settings.extensions):
            about += (
                "; a worker with these settings does not load it, because the setting extensions "
                f"does not name {offer.package}"
            )
        yield CheckFinding("ok", "extensions", about)
    check_installed(service.settings.extensions)
