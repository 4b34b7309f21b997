"""A wire between two namespaces that can be slow and lossy: `slow_wire.py NETNS DEVICE NETNS
DEVICE`, then lines `SECONDS LOSS` on stdin.

Linux has `tc netem` for that, a module that not every kernel has. Two TAP devices, and frames that
wait their turn in between.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
FRAME = 65536


def tap(namespace: str, device: str) -> int:
    """A TAP device in a namespace; this process stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(place, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(place)
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return wire


def main() -> None:
    ends = [tap(*sys.argv[1:3]), tap(*sys.argv[3:5])]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    late: list[tuple[float, int, int, bytes]] = []  # due, number, where to, frame
    delay = loss = 0.0
    number = 0
    print("ready", flush=True)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select([*ends, sys.stdin], [], [], wait)
        for end in readable:
            if end is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                delay, loss = map(float, line.split())
                continue
            try:
                frame = os.read(end, FRAME)
            except BlockingIOError:
                continue
            if random.random() >= loss:
                number += 1
                heapq.heappush(late, (time.monotonic() + delay, number, other[end], frame))
        while late and late[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(late)
            try:
                os.write(end, frame)
            except OSError:  # the device is down, or full: a wire loses frames then
                continue


if __name__ == "__main__":
    main()
