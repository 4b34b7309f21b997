"""The row of a kind of jobs: what every process knows of its jobs, and where its parts are.

It imports nothing of the kind, so that a process loads the parts that it needs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..packages import part
from .queues import Queue


class JobKind(NamedTuple):
    name: str
    # step of the queue for priority `normal`: clients of the OpenAI-style endpoints wait for an
    # answer; batch jobs are not urgent
    step: int = 6
    path: str | None = None  # where it is submitted, if that is one place
    queue: Queue = ""  # that its jobs enter first
    # its worker reads the receipts from the ticket: they neither count towards the job nor fail it
    reads_receipts: bool = False
    grid: bool = False  # it is computed in units, and read as a grid of cells
    slow: bool = False  # it takes as long as there is to compute, so its time is no latency
    nullable: bool = False  # results of other kinds have null in its field, and do not omit it

    # Its parts, each as `module:name`; empty: it has none.
    #: What is stored with its jobs: a subclass of `works.Work`.
    work: str = "midstream.schemas.jobs.works:Work"
    #: Of a kind that is submitted to `/v1/jobs` by what its request has: accepts such a request.
    #: Takes the `ParsedRequest` and the `Submission`; a coroutine that returns the job's id.
    submit: str = ""
    #: Queue → what workers of that queue run it with: takes a `Bench`, returns a `Run`. Kinds that
    #: name the same share what it returns.
    run: Mapping[str, str] = {}
    #: Type of the field of a result that has the kind's name. Empty: its results are outputs.
    result: str = ""
    #: Makes that field from the outcome that its worker stored, packed, and the receipts. Of a
    #: grid, it takes the work, the packed records of its units and the seconds that it took, if it
    #: is over, and returns also the receipts of the units.
    outcome: str = ""
    #: Litestar's handlers that accept and show it, a list.
    routes: str = ""
    #: Name of a client's attribute → a group of calls (a class), or a call of one (`Class.call`).
    calls: Mapping[str, str] = {}
    #: What the client makes of that field, for figures and tables: takes a `JobResult`. Empty: the
    #: field itself.
    answer: str = ""
    #: Its commands on the command line: functions as typer takes them, a list.
    verbs: str = ""
    #: Verb and kind of things, such as `fit module` → what that verb does with that kind.
    acts: Mapping[str, str] = {}
    #: What its verbs do with the things that its jobs make: a list of `client.cli.kind.Kind`.
    things: str = ""
    #: Class → its `client.render.forms.Form`: how results of the class are drawn, written and
    #: printed.
    forms: str = ""

    def load(self, name: str) -> Any:
        """Load a part by its field, which is not empty."""
        return part(getattr(self, name))
