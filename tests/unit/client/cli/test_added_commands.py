"""Packages add commands to `midstream`, which finds them when it is asked for one."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import typer
from cli_kit import Cli

from midstream.client.cli.main import ADDED, ADDED_COMMANDS
from midstream.schemas import packages


def greet() -> None:
    """Greet whoever calls."""
    print("good day")


def add(app: typer.Typer) -> None:
    app.command()(greet)
    app.command("top")(greet)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups of entry points that were looked at; the one package there is is this module."""
    groups: list[str] = []
    offers = EntryPoints([EntryPoint("other", f"{__name__}:add", ADDED_COMMANDS)])
    monkeypatch.setattr(EntryPoint, "load", lambda entry: add)

    def entry_points(**asked: str) -> EntryPoints:
        groups.append(asked["group"])
        return offers.select(**asked)

    monkeypatch.setattr(packages, "entry_points", entry_points)
    return groups


def test_a_command_of_the_core_looks_for_no_package(cli: Cli, asked: list[str]) -> None:
    assert cli("list", "--help").code == 0
    assert asked == []


def test_a_command_of_a_package_is_found_when_it_is_called(cli: Cli, asked: list[str]) -> None:
    assert "good day" in cli("greet").said
    assert {*asked} == {ADDED_COMMANDS}


def test_the_help_lists_commands_of_packages_in_a_section_of_their_own(
    cli: Cli, asked: list[str]
) -> None:
    said = cli("--help").said
    assert "greet Greet whoever calls." in said.partition(f" {ADDED} ")[2]


def test_a_package_replaces_no_command_of_the_core(cli: Cli, asked: list[str]) -> None:
    cli("greet")
    assert "Greet whoever calls" not in cli("top", "--help").said


@pytest.mark.parametrize(("command", "extra"), [("up", "cpu"), ("doctor", "ops")])
def test_a_command_whose_package_is_absent_names_its_extra(
    cli: Cli, asked: list[str], command: str, extra: str
) -> None:
    ended = cli(command)
    assert ended.code == 1
    assert f"`midstream {command}` needs midstream-ops, not installed here" in ended.said
    assert f"pip install 'midstream[{extra}]'" in ended.said
    assert f"in a clone: pip install '.[{extra}]' packages/*/" in ended.said


def test_without_a_package_the_help_lists_the_other_commands(cli: Cli, asked: list[str]) -> None:
    said = cli("--help").said
    assert " submit " in said
    assert " doctor " not in said
