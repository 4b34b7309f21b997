"""Which port may a process listen on that starts in a while, or again?

One that nobody else on this machine takes meanwhile.

The kernel gives a free port to whoever asks, so what it once gave may be another's by the time at
which it is needed: all of these lie below those that it gives, and each of the processes which
share the tests has its own.
"""

import itertools
import os
import random
import socket

#: Linux gives 32,768 and above (`ip_local_port_range`).
FIRST = 12_000
EACH = 4_000
_SHARES = 5
#: `gw0`, `gw1`, … where several processes share the tests.
_SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
#: Begins anywhere: other tests may run on this machine.
_tries = itertools.count(random.SystemRandom().randrange(EACH))


def free_port() -> int:
    """Never the same twice in a process, up to `EACH` of them."""
    for number in itertools.islice(_tries, EACH):
        port = FIRST + _SHARE * EACH + number % EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"none of {EACH} ports is free")


def three_ports() -> int:
    """The first of three free ones in a row."""
    found = [free_port(), free_port(), free_port()]
    while found != [*range(found[0], found[0] + 3)]:
        found = [*found[1:], free_port()]
    return found[0]
