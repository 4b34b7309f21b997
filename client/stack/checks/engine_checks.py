"""Checks of this environment's engine: vLLM, its options, and extensions."""

from collections.abc import Iterator

from ....schemas.base.settings import Settings, SettingsError
from ...extras import COMPANIONS_ADVICE, companions_trouble, import_trouble
from .finding import Finding


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
    if trouble := import_trouble("torch"):
        advice = "reinstall the extra `cpu` or `gpu` in this environment"
        yield Finding("fail", "vllm", f"torch cannot be imported: {trouble}", advice)
        return
    if trouble := companions_trouble():
        yield Finding("fail", "vllm", trouble, COMPANIONS_ADVICE)
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
