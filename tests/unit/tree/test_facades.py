"""What packages put behind names of the core is there, and where a package is absent, its extra is
named.
"""

import subprocess
import sys

import pytest

from midstream.client.extras import CALLS, PACKAGED
from midstream.schemas.jobs.kinds import EXTRAS, GROUP
from midstream.schemas.packages import installing, load, offered

#: As on an installation without the packages beside the core.
ALONE = """
import importlib.metadata as m
m.entry_points = lambda **asked: m.EntryPoints([])
"""


def alone(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where no package offers anything."""
    return subprocess.run(
        [sys.executable, "-c", ALONE + program], capture_output=True, text=True, timeout=300
    )


#: Runs programs one after the other, and prints the last line of what each raises.
EACH = """
import traceback

for program in {programs!r}:
    try:
        exec(program, {{}})
    except BaseException as error:
        print(traceback.format_exception_only(error)[-1], end="")
"""


def errors_of(*programs: str) -> list[str]:
    """What each of these programs raises where no package offers anything, in one process."""
    done = alone(EACH.format(programs=programs))
    errors = done.stdout.splitlines()
    assert len(errors) == len(programs), done.stderr
    return errors


def test_the_facade_has_the_names_of_its_package() -> None:
    import midstream.lens
    import midstream_bridges.lens

    assert midstream.lens.__all__ == midstream_bridges.lens.__all__
    assert dir(midstream.lens) == sorted(midstream_bridges.lens.__all__)
    assert midstream.lens.HookedModel is midstream_bridges.lens.HookedModel


def test_a_facade_whose_package_is_absent_names_the_extra() -> None:
    done = alone("from midstream.lens import HookedModel")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: midstream.lens needs the package midstream-bridges: {installing('bridges')}"
    )


def test_a_class_whose_package_is_absent_names_the_extra() -> None:
    names = ["PatchStudy", "Mapped"]
    assert errors_of(*(f"from midstream import {name}" for name in names)) == [
        f"ImportError: midstream.{name} needs the package midstream-lab: {installing('lab')}"
        for name in names
    ]


def test_a_call_whose_package_is_absent_names_the_extra() -> None:
    names = ["harvests", "map", "sweep"]
    client = "import midstream; midstream.Client('http://127.0.0.1:1')"
    assert errors_of(*(f"{client}.{name}" for name in names)) == [
        f"AttributeError: Client has no attribute {name!r}; {installing(CALLS[name])}"
        for name in names
    ]


def test_what_training_measured_without_its_package_names_the_extra() -> None:
    probe = (
        "from midstream import Client\n"
        "from midstream.schemas.artifacts.probes import Probe, ProbeContent\n"
        "content = ProbeContent(hook='post_block', layer=0, tensors=[], labels=[], thresholds=[])\n"
        "kept = {'name': 'p', 'model': 'm', 'digest': 'd', 'created': 0.0}\n"
        "probe = Probe(**kept, content=content, hidden_size=1, bytes=4)\n"
    )
    for error in errors_of(f"{probe}probe.plot()", f"{probe}probe.to_pandas()"):
        assert error.endswith(f"what draws a Probe is not installed: {installing('lab')}")


def test_the_extras_of_kinds_and_of_their_calls_are_those_of_the_rows() -> None:
    rows = [load(GROUP, name) for name in offered(GROUP) if name in EXTRAS]
    assert {row.name for row in rows} == {*EXTRAS}
    named = {name: EXTRAS[row.name] for row in rows for name in row.calls}
    assert {**named, "map": "lab"} == CALLS


GRADIENT = {"of": "gradient", "scalar": {"kind": "loss"}}
#: Path → what is sent there to an API without packages.
CALLED: dict[str, dict[str, object]] = {
    "/v1/sweeps": {},
    "/v1/sweeps/job_1": {},
    "/v1/attributions": {},
    "/v1/modules/fit": {},
    "/v1/jacobians/fit": {},
    "/v1/doses": {},
    "/v1/jobs": {"model": "m", "prompts": ["a"], "capture": GRADIENT},
}
#: Prints status and detail of each answer.
ASK = """
from litestar.testing import TestClient
from midstream.api.app import make_app
from midstream.schemas.settings.settings import Settings

with TestClient(make_app(Settings(redis_url="redis://127.0.0.1:1")), "http://127.0.0.1") as client:
    for path, body in {called!r}.items():
        answer = client.post(path, json=body)
        print(answer.status_code, answer.json()["detail"])
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Path → status and detail."""
    done = alone(ASK.format(called=CALLED))
    return dict(zip(CALLED, done.stdout.splitlines(), strict=True))


def test_routes_of_kinds_that_are_absent_name_the_extra(answers: dict[str, str]) -> None:
    for path in CALLED.keys() - {"/v1/jobs"}:
        assert answers[path].startswith(
            "501 no package that is installed here knows jobs of kind "
        ), path
        assert installing("lab") in answers[path]


def test_gradient_rows_without_their_kind_name_the_extra(answers: dict[str, str]) -> None:
    assert answers["/v1/jobs"].startswith("501 ")
    assert installing("lab") in answers["/v1/jobs"]


def test_a_gradient_worker_without_its_engine_names_the_extra() -> None:
    done = alone(
        "from midstream.schemas.settings.settings import Settings\n"
        "from midstream.workers.engines import check_options\n"
        "check_options(Settings(engine='gradients'))"
    )
    assert installing("lab") in done.stderr.splitlines()[-1]


def test_a_room_whose_package_is_absent_names_the_extra() -> None:
    extras = {"harvest": "harvest", "probes": "lab"}
    assert errors_of(*(f"import midstream; midstream.{room}" for room in extras)) == [
        f"ImportError: midstream.{room} needs the package midstream-{extra}: {installing(extra)}"
        for room, extra in extras.items()
    ]


def test_the_rest_of_the_client_needs_no_package() -> None:
    done = alone("import midstream, midstream.client.vectors; midstream.Client; print('there')")
    assert done.stdout == "there\n", done.stderr


#: Gives each command, and prints the exit code of each.
COMMANDS = """
from midstream.client.cli.main import main

for command in {commands!r}:
    try:
        main([command, 'a', 'b'])
    except SystemExit as ended:
        print(ended.code)
"""


def test_a_command_whose_package_is_absent_names_the_extra() -> None:
    done = alone(COMMANDS.format(commands=[*PACKAGED]))
    assert done.stdout.split() == ["1"] * len(PACKAGED), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, (command, (package, extra)) in zip(errors, PACKAGED.items(), strict=True):
        assert error.startswith(
            f"error: `midstream {command}` needs {package}, not installed here: {installing(extra)}"
        )


def test_help_without_packages_lists_the_commands_that_are_there() -> None:
    done = alone("from midstream.client.cli.main import main; main(['--help'])")
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout
    assert not any(f"│ {command} " in done.stdout for command in PACKAGED)
