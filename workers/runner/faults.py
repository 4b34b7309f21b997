"""Tests only: which fault is this rank told to have? `name` or `name:rank=1`, several separated by commas."""


class Faults:
    """`MIDSTREAM_FAULT`, read once at boot. Empty in production.

    put_vectors: registering vectors fails on this rank · admit: applying a request's steering fails ·
    skip_action: one action is applied but not accounted for · write: writing a capture raises
    """

    def __init__(self, text: str, rank: int) -> None:
        self._active = set()
        for fault in filter(None, text.split(",")):
            name, _, condition = fault.partition(":")
            if condition in ("", f"rank={rank}"):
                self._active.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._active
