"""Threads that decode at once: msgspec learns a class at its first use, and is not thread-safe
while it does.
"""

import subprocess
import sys

#: Four threads decode a nested record for the first time. Without a lock, 2 of 3 processes crash:
#: three of them find it missing nearly always.
RACE = """
import sys
import threading

from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.requests.specs import RankSpec, StoredCapture

sys.setswitchinterval(1e-6)
capture = StoredCapture(sites={"post_block": [1]}, positions="all", tag="t", layout="packed")
spec = RankSpec(
    version="1", job="j", request=1, attempt=1, prompt_tokens=3, captures=[capture]
)
raw, barrier = to_msgpack(spec), threading.Barrier(4)


def decode():
    barrier.wait()
    assert from_msgpack(raw, RankSpec) == spec


threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_uses_of_a_record_on_several_threads_do_not_crash() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0
        assert done.stderr == ""
