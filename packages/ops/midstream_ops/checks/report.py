"""Terminal output of the findings of `midstream doctor` and `demo`."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from .finding import CheckFinding

_STYLES = {"info": "dim", "ok": "green", "warn": "yellow", "fail": "bold red"}
#: Width of the column with a finding's subject. It is fixed, because findings are printed one by
#: one.
_ABOUT = 14
_NEXT = "\n" + " " * (4 + 1 + _ABOUT + 1)


class Report:
    """Prints findings as they are found, and collects them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.findings: list[CheckFinding] = []

    def add(self, findings: Iterable[CheckFinding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.console.print(_text(finding), soft_wrap=True)

    @property
    def failed(self) -> list[str]:
        """The subjects of the findings that are failures."""
        return [finding.about for finding in self.findings if finding.level == "fail"]

    def end(self) -> int:
        """Print the number of judged findings of each level, and what failed; return the exit
        code.
        """
        levels = [finding.level for finding in self.findings]
        named = f" ({', '.join(dict.fromkeys(self.failed))})" if self.failed else ""
        self.console.print(
            f"ok: {levels.count('ok')}, warnings: {levels.count('warn')}, "
            f"failures: {len(self.failed)}{named}",
            soft_wrap=True,
        )
        return 1 if self.failed else 0


def _text(finding: CheckFinding) -> Text:
    """Return one line, and another one for each further line and for the advice."""
    advice = f"\n→ {finding.advice}" if finding.advice else ""
    return Text.assemble(
        (f"{finding.level:<4} ", _STYLES[finding.level]),
        f"{finding.about:<{_ABOUT}} {finding.found}{advice}".replace("\n", _NEXT),
    )
