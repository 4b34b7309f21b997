"""vLLM's processes sleep while they wait for each other, and wake up soon."""

import threading
import time

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from midstream.workers.runner.vllm import idle_sleep


def test_a_wait_takes_little_of_a_core_and_is_over_soon() -> None:
    idle_sleep.install()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    late = []
    for number in range(5):
        sent: list[float] = []

        def send(number: int = number, sent: list[float] = sent) -> None:
            time.sleep(0.1)
            sent.append(time.perf_counter())
            writer.enqueue(number)

        thread = threading.Thread(target=send)
        before = time.thread_time()
        thread.start()
        assert reader.dequeue(timeout=5) == number
        late.append(time.perf_counter() - sent[0])
        used = time.thread_time() - before
        thread.join()
        assert used < 0.05, "it spun for half of the 100 ms that it waited"
    assert min(late) < 0.01
