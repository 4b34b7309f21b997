"""A consumer of a harvest's stream that is a process of its own: `stream_consumer.py URL HARVEST
FOLDER [SEED]` stores each unit as a file, once; with a seed, it kills itself at a random moment.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from midstream.client import Client

#: Seconds after its first unit at which a consumer that kills itself is gone at the latest, and
#: that it takes for each step, so that kills come between all of them.
LONGEST_S = 0.15
STEP_S = 0.02


def consume(url: str, harvest: str, folder: Path, seed: int | None) -> None:
    pause = 0.0 if seed is None else STEP_S
    with Client(url) as client:
        # its own files are what it has: it may have been killed before it could acknowledge them
        for unit in client.harvests.stream(harvest, after=len(list(folder.glob("*.npz")))):
            if seed is not None:
                threading.Thread(target=die, args=(seed,)).start()
                seed = None
            time.sleep(pause)
            keys = unit.keys()
            partial = folder / f"{unit.cursor:05d}.partial"
            with partial.open("wb") as file:
                np.savez(
                    file,
                    **keys._asdict(),
                    **{f"{hook}.{layer}": unit.rows(layer, hook) for hook, layer in SITES},
                )
            target = partial.with_suffix(".npz")
            assert not target.exists(), f"{target} came twice"
            time.sleep(pause)
            partial.rename(target)
            time.sleep(pause)


def die(seed: int) -> None:
    time.sleep(random.Random(seed).uniform(0, LONGEST_S))
    os.kill(os.getpid(), signal.SIGKILL)


SITES = [("post_block", 1), ("post_block", 3)]

if __name__ == "__main__":
    consume(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else None)
