"""A rank in a process of its own, with a real process that writes its files, either of which kills
itself at a boundary. Its forward only visits the sites, see `rank_kit`.
"""

import os
import time
import traceback
from collections import Counter, deque
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import rank_kit
from killed_requests import read, request_of
from killed_rowd import ARMED, Point, arm, crash
from plane_kit import CAPACITY, Rig

from midstream.schemas.readings.lens import StoredLens
from midstream.storage import file_store
from midstream.workers.runner.files.desk import COMMAND
from midstream.workers.runner.plane.data_plane import DataPlane
from midstream.workers.runner.readings.readings import ReadingConsumer
from midstream.workers.runner.rows import delivery
from midstream.workers.runner.rows.arena import Arena
from midstream.workers.runner.rows.capture import RowStream
from midstream.workers.runner.rows.delivery import ForwardedReceipts, RowDelivery
from midstream_ops.processes import wait_for

#: Environment variable by which a test finds the processes that a rank has started.
FOLDER = "MIDSTREAM_TEST_RANK"
#: Requests that run together, and prompt tokens of each in a step.
TOGETHER = 8
CHUNK = 16
#: Seconds in which either process ends after the other, which only a fault reaches.
PATIENCE_S = 15.0
POINTS = {
    "process started": Point(delivery.Link, "begun", follows=False, most=1),
    "process serves": Point(delivery.Link, "begun", most=1),
    "step begun": Point(DataPlane, "begin", most=24),
    "step planned": Point(DataPlane, "plan", most=24),
    "in the forward": Point(rank_kit, "pair_site", most=24),
    "step over": Point(DataPlane, "drain", most=24),
    "memory wanted": Point(Arena, "take", follows=False, most=60),
    "memory taken": Point(Arena, "take", most=60),
    "memory returned": Point(Arena, "_release", most=30),
    "rows spilled": Point(Arena, "_reserve", most=4),
    "message written": Point(
        os, "write", follows=False, most=24, counts=lambda _, raw: len(raw) == COMMAND.size
    ),
    "message sent": Point(os, "write", most=24, counts=lambda _, raw: len(raw) == COMMAND.size),
    "part sent": Point(RowStream, "push", most=24),
    "request handed over": Point(RowDelivery, "submit"),
    "many messages held": Point(
        DataPlane, "plan", counts=lambda plane, _: len(plane._delivery.held) > 8
    ),
    "writers behind": Point(
        DataPlane, "plan", counts=lambda plane, _: plane._delivery.backlog.size > 4096
    ),
    "reading computed": Point(ReadingConsumer, "consume", most=1),
    "own file renamed": crash(file_store, "capture.renamed")._replace(most=1),
    "reading's receipt wanted": Point(ForwardedReceipts, "append", follows=False, most=1),
    "reading's receipt sent": Point(ForwardedReceipts, "append", most=1),
}


def main(
    folder: str, boot: str, relay_url: str, armed: str, spills: bool, driver: Connection
) -> None:
    """Compute the (number, attempt) that come from the test until None; then send what is left of
    memory, and close when the test has seen it.
    """
    os.environ.update({FOLDER: folder, ARMED: armed})
    arm(POINTS, armed)
    delivery.PROGRAM = "killed_rowd"
    rig = Rig(
        Path(folder),
        connect=delivery.connected,
        boot=boot,
        relay_url=relay_url,
        writer_threads=2,
        capture_window_mib=0,
        capture_queue_mib=int(not spills),
        capture_overload="spill" if spills else "block",
    )
    rig.plane.readings._readers[StoredLens] = read
    driver.send("serves")
    try:
        _serve(rig, driver)
        driver.send(_left(rig))
        driver.recv()
        rig.plane.close()
    except Exception:
        # vLLM reports a step that raises, and keeps the process: the rank's own thread must end it
        traceback.print_exc()
        time.sleep(PATIENCE_S)
        os._exit(1)


def _serve(rig: Rig, driver: Connection) -> None:
    waiting = deque[rank_kit.Request]()
    running = list[rank_kit.Request]()
    computed = Counter[int]()
    while True:
        while driver.poll(0 if waiting or running else None):
            if (order := driver.recv()) is None:
                return
            request = request_of(order[0])
            waiting.append(request)
            request.tracked.spec = msgspec.structs.replace(request.tracked.spec, attempt=order[1])
        ended = [each for each in running if computed[each.number] == each.total - 1]
        running = [each for each in running if computed[each.number] < each.total - 1]
        new = [waiting.popleft() for _ in range(min(len(waiting), TOGETHER - len(running)))]
        running += new
        windows = list[tuple[rank_kit.Request, int, int]]()
        room = CAPACITY
        for each in running:
            done = computed[each.number]
            if count := min(room, CHUNK, max(1, each.prompt_tokens - done)):
                windows.append((each, done, count))
                computed[each.number] = done + count
                room -= count
        rig.step(*windows, new=new, finished=ended)


def _left(rig: Rig) -> dict[str, object]:
    """Return what a rank without requests still holds."""
    delivery = rig.plane._delivery
    arena = rig.plane._arena
    # the kit's own message stays
    wait_for(lambda: delivery.turn() or len(delivery.held) == 1, PATIENCE_S)

    def empty() -> bool:
        arena.take(1, 1)  # takes back what was returned; a thread returns some of it
        return arena.used == 1

    wait_for(empty, PATIENCE_S)
    return {
        "messages": len(delivery.held) - 1,
        "bytes": arena.used - 1,
        "backlog": delivery.backlog.size,
    }
