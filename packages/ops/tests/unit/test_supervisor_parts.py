"""Does one process get started, understood and stopped as the supervisor promises, and does one of
the engine end with the one that started it? With real processes, without a stack.
"""

import asyncio
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusal_kit import refuses

from midstream.broker.processes.orphans import die_with_parent
from midstream.client.sdk import discovery
from midstream.client.sdk.discovery import STATE_FILE
from midstream.schemas.settings.settings import Settings, SettingsError, load_settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream_ops import processes, supervisor
from midstream_ops.engine_packages import COMPANIONS, COMPANIONS_ADVICE
from midstream_ops.processes import Child, birth, end_leftover, members, wait_for
from midstream_ops.supervisor import Supervisor, child_environment, prepare


def child(
    tmp_path: Path, code: str, stop_timeout_s: float = 5.0, longest_pause_s: float = 4.0
) -> Child:
    """A part that is a shell, which starts faster than Python."""
    log = tmp_path / "logs" / "part.log"
    return Child("part", ["sh", "-c", code], dict(os.environ), log, stop_timeout_s, longest_pause_s)


def test_a_secret_goes_to_the_child_alone_that_needs_it_and_is_not_shown(tmp_path: Path) -> None:
    stack = Supervisor(Settings(data_dir=str(tmp_path), admin_key="a", flower_auth="u:p"))
    found = {
        name: stack._environment(name) for name in ("api", "worker", "relay", "callbacks", "flower")
    }
    for secret, needs in (("ADMIN_KEY", "api"), ("FLOWER_AUTH", "flower")):
        assert [name for name in found if f"MIDSTREAM_{secret}" in found[name]] == [needs]
    redis = "redis://:hunter2@10.0.0.7:6379/0"
    line = Supervisor(load_settings({}, data_dir=str(tmp_path), redis_url=redis)).ready_line()
    assert "redis redis://:***@10.0.0.7:6379/0" in line
    assert "hunter2" not in line


@dataclass
class Fleet:
    """What one worker of this host and process number has published."""

    host: str
    pid: int
    closed: bool = False

    async def workers(self) -> list[Any]:
        return [SimpleNamespace(host=self.host, pid=self.pid, model="m")]

    async def model(self, name: str) -> Any:
        return SimpleNamespace(name=name, dtype="float32", dtype_reason="no bf16")

    async def close(self) -> None:
        self.closed = True


def test_the_model_is_that_of_this_start_s_own_worker(tmp_path: Path) -> None:
    here = socket.gethostname()
    found = []
    for host, pid in ((here, 7), ("elsewhere", 7), (here, 8)):
        fleet = Fleet(host, pid)
        found.append(asyncio.run(supervisor._model_of(fleet, 7)))  # type: ignore[arg-type]
        assert fleet.closed
    own, elsewhere, before = found
    assert own.name == "m"
    assert elsewhere is None
    assert before is None
    stack = Supervisor(Settings(data_dir=str(tmp_path), model_name="m"))
    assert " · model m · " in stack.ready_line()
    stack._model = own
    assert " · model m in float32 (no bf16) · " in stack.ready_line()


def test_models_in_folders_are_checked_made_absolute_and_need_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head").mkdir()
    fake = Settings(engine="fake", draft_model="./head", api_port=0, flower_port=0)
    for settings, words in (
        (Settings(model=str(tmp_path)), r"model=.*config\.json"),
        (fake, r"draft_model='\./head': no checkpoint found"),
    ):
        with pytest.raises(SettingsError, match=words):
            prepare(settings, tmp_path, print)
    (tmp_path / "head" / "config.json").write_text("{}")
    assert prepare(fake, tmp_path, print).draft_model == str(tmp_path / "head")
    assert child_environment(Settings(model=str(tmp_path)))["HF_HUB_OFFLINE"] == "1"
    assert child_environment(Settings(model=str(tmp_path), draft_model="org/head")).get(
        "HF_HUB_OFFLINE"
    ) == os.environ.get("HF_HUB_OFFLINE"), "the hub has the head"


def run(part: Child) -> Child:
    """`part`, started and ended."""
    part.start()
    assert wait_for(lambda: part.exit_code is not None, 60)
    return part


# --- Settings on their way to the children ---


def test_each_process_has_a_metrics_port_of_its_own_counted_from_the_setting(
    tmp_path: Path,
) -> None:
    stack = Supervisor(Settings(data_dir=str(tmp_path), metrics_port=9100))
    assert {
        name: stack._metrics_port(name).get("MIDSTREAM_METRICS_PORT")
        for name in ("relay", "worker", "callbacks", "api")
    } == {"relay": "9100", "worker": "9101", "callbacks": "9102", "api": None}
    assert Supervisor(Settings(data_dir=str(tmp_path)))._metrics_port("worker") == {}


def test_settings_reach_a_child_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MIDSTREAM_MAX_WAIT_S", "1")
    config = tmp_path / "midstream.toml"
    config.write_text('model_name = "from-file"')
    monkeypatch.setenv("MIDSTREAM_CONFIG", str(config))
    settings = Settings(
        data_dir=str(tmp_path),
        max_wait_s=7.5,
        vllm=VllmOptions(enable_prefix_caching=False, max_model_len=64),
        model="some/model",
    )
    environment = child_environment(settings)
    assert load_settings(environment) == settings
    assert environment["PATH"] == os.environ["PATH"]


Sleeping = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    """Starts processes that do nothing, each in a session of its own, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                ["sleep", "600"], env={**os.environ, **environment}, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:9"),
        ("::", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("a.example", "http://a.example:9"),
    ],
)
def test_the_printed_address_is_reachable(host: str, url: str) -> None:
    assert Supervisor(Settings(api_host=host, api_port=9)).url == url


def has_loopback_of_ipv6() -> bool:
    """The kernel may know IPv6 and have no address of it."""
    addresses = Path("/proc/net/if_inet6")
    return addresses.exists() and f"{1:032x} " in addresses.read_text()


@pytest.mark.skipif(not has_loopback_of_ipv6(), reason="this machine has no loopback of IPv6")
def test_a_port_is_found_on_the_loopback_of_ipv6_as_well(tmp_path: Path) -> None:
    assert (
        prepare(Settings(engine="fake", api_host="::1", api_port=0), tmp_path, print).api_port > 0
    )


def test_only_a_default_port_that_is_taken_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = Settings(engine="fake", api_port=port, flower_port=0)
        with pytest.raises(SettingsError, match=f"api_port {port} is not available .*: 0 takes"):
            prepare(settings, tmp_path, said.append)
        assert said == []
        monkeypatch.setattr(supervisor, "Settings", lambda: settings)  # it is the default now
        prepared = prepare(settings, tmp_path, said.append)
        assert prepared.api_port not in (0, port)
        assert prepared.flower_port > 0
        assert prepared.relay_url[:16] == "tcp://127.0.0.1:"
        assert f"api_port {port} is not available" in said[0]
        assert f"using {prepared.api_port}" in said[0]
        with pytest.raises(SettingsError, match=f"api_port {port} is not available"):
            prepare(settings, tmp_path, said.append, fixed={"api_port"})


# --- One child ---


#: Case → the lines that a process printed before it ended, and the one reported as the reason.
ENDINGS = {
    "a line after the reason": (
        ["loading", "\x1b[31mworker failed: GPT-J is not supported\x1b[0m", "bye"],
        "worker failed: GPT-J is not supported",
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_the_first_cause_in_the_output_is_reported(case: str, tmp_path: Path) -> None:
    lines, reason = ENDINGS[case]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    part = run(child(tmp_path, f"cat {tmp_path}/lines; exit 3"))
    assert part.exit_code == 3
    assert part.last_words() == reason


@pytest.mark.parametrize("name", COMPANIONS)
def test_an_end_by_a_companion_of_torch_comes_with_the_remedy(name: str, tmp_path: Path) -> None:
    words = f"RuntimeError: operator {name}::nms does not exist"
    part = run(child(tmp_path, f"echo {words}; exit 1"))
    assert part.last_words() == f"{words}: {COMPANIONS_ADVICE}"


def test_a_killed_child_is_reported_as_killed(tmp_path: Path) -> None:
    part = run(child(tmp_path, "echo all is well; kill -9 $$"))
    assert part.ending == "SIGKILL"
    assert part.last_words() == "it was killed, possibly by the kernel for lack of memory"


def test_only_the_last_start_is_quoted(tmp_path: Path) -> None:
    part = run(child(tmp_path, "echo ValueError: old"))
    part.died()
    part.command[-1] = "echo all is well"
    run(part)
    assert part.last_words() == "all is well"


def test_a_child_that_ignores_sigterm_is_killed_and_that_is_known(tmp_path: Path) -> None:
    deaf = "trap '' TERM; echo deaf; while true; do sleep 600; done"
    part = child(tmp_path, deaf, stop_timeout_s=0.2)
    part.start()
    assert wait_for(lambda: "deaf" in part.output(), 60)
    pid = part.pid
    assert part.stop() is False
    assert pid is not None
    assert birth(pid) == 0


def test_processes_left_by_a_dead_child_are_ended(tmp_path: Path) -> None:
    part = run(child(tmp_path, "sleep 600 & echo $!"))
    orphan = int(part.output())
    session = part.pid
    assert session is not None
    assert members(session) == [orphan]
    part.died()
    assert wait_for(lambda: birth(orphan) == 0, 60)


def test_a_child_goes_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from midstream_ops.processes import Child
command = [sys.executable, "-c", "import time; time.sleep(600)"]
part = Child("part", command, {{}}, Path({str(tmp_path)!r}) / "part.log", 1.0)
part.start()
print(part.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    born = birth(pid)
    assert born
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: birth(pid) != born, 60)


def test_the_pause_before_a_restart_grows_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BACKOFF_S", (200.0, 500.0))
    part = child(tmp_path, "exit 1", longest_pause_s=500.0)
    pauses = []
    for _ in range(3):
        run(part)
        pauses.append(part.died())
        assert not part.due
        part._not_before -= pauses[-1]  # as if it were over
        assert part.due
    assert pauses == [200.0, 400.0, 500.0]


def test_a_child_that_ran_long_restarts_without_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = child(tmp_path, "exit 1")
    pauses = []
    for healthy_after in (60.0, 60.0, 60.0, 60.0, -1.0, 60.0):
        monkeypatch.setattr(processes, "HEALTHY_AFTER_S", healthy_after)
        run(part)
        pauses.append(part.died())
    assert pauses == [1.0, 2.0, 4.0, 4.0, 1.0, 2.0], (
        "a part that is killed again and again is away for seconds"
    )
    stack = Supervisor(Settings(data_dir=str(tmp_path)), say=lambda line: None)
    assert {part.name: part.longest_pause_s for part in stack._make_children()}["api"] == 4.0


def test_a_start_that_fails_ends_no_supervisor(tmp_path: Path) -> None:
    said: list[str] = []
    stack = Supervisor(Settings(data_dir=str(tmp_path)), say=said.append)
    part = child(tmp_path, "")
    part.command = [str(tmp_path / "nothing")]
    stack._children = {"part": part}
    stack.tend()
    assert "part could not be started; retrying in 1 s" in said[0]
    assert not part.due


def test_parts_stop_at_the_same_time_and_the_relay_after_them(tmp_path: Path) -> None:
    """`api` ends only once the worker was told to, and the worker only while the relay runs."""
    said: list[str] = []
    stack = Supervisor(Settings(data_dir=str(tmp_path)), say=said.append)
    told = tmp_path / "told"
    relay = tmp_path / "relay"
    ends = {
        "api": f"until [ -e {told} ]; do sleep 0.01; done; exit",
        "worker": f"touch {told}; [ ! -e {relay} ] && exit; sleep 600",
        "relay": f"touch {relay}; exit",
    }
    for name, code in ends.items():
        part = child(
            tmp_path, f"trap '{code}' TERM; echo {name} up; while true; do sleep 0.1; done"
        )
        part.name = name
        part.log = tmp_path / f"{name}.log"
        part.stop_timeout_s = 30.0
        stack._children[name] = part
        part.start()
    assert wait_for(lambda: all("up" in part.output() for part in stack._children.values()), 60)
    stack.stop()
    assert said == [], "none was killed"


def test_a_download_that_fails_is_told_of_once_while_the_worker_goes_on_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "answers", lambda http, url: False)
    monkeypatch.setattr(supervisor, "TICK_S", 0.01)
    said: list[str] = []
    stack = Supervisor(Settings(data_dir=str(tmp_path)), say=said.append)
    round_ = "\n".join(
        f"'[Errno -2] unknown' thrown while requesting HEAD https://hub/m/config.json\n"
        f"Retrying in 1s [Retry {number}/5]."
        for number in range(1, 6)
    )
    worker = child(tmp_path, f'echo "{round_}"; echo "{round_}"; exec sleep 600')
    stack._children = {"worker": worker}
    worker.start()
    looks = iter(range(100))

    def look() -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(stack, "_while_starting", look)
    try:
        assert wait_for(lambda: worker.output().count("5/5") == 2, 60)
        with pytest.raises(KeyboardInterrupt):
            stack._await_ready(60.0)
    finally:
        worker.stop()
    assert said == [
        "https://hub/m/config.json cannot be downloaded: [Errno -2] unknown; the worker goes on "
        "trying. A model in a folder needs no network: --model FOLDER"
    ]


def test_a_download_that_is_tried_again_is_not_told_of_yet(tmp_path: Path) -> None:
    once = "'x' thrown while requesting HEAD https://hub/m\nRetrying in 1s [Retry 1/5]."
    part = run(child(tmp_path, f'echo "{once}"'))
    assert not Supervisor(Settings(data_dir=str(tmp_path)))._tell_of_download(part)


def test_a_data_directory_that_cannot_be_written_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise OSError(errno.ENOSPC, "No space left on device")  # its output is on the same disk

    stack = Supervisor(Settings(data_dir=str(tmp_path / "data")), say=say)
    monkeypatch.setattr(supervisor, "DISK_LOOK_S", 0.0)
    for trouble in ("disk full: there", "disk full: there", "", "", "disk read-only: there"):
        monkeypatch.setattr(supervisor, "probe", lambda folder, trouble=trouble: trouble)
        stack._unwritten = True  # there is no directory to write to
        stack.tend()
    assert [line.split(":")[0] for line in said] == [
        "disk full",
        f"{tmp_path}/data is writable again",
        "disk read-only",
    ]
    (tmp_path / "data").mkdir()
    stack.tend()
    assert discovery.written(tmp_path / "data").pid == os.getpid()


def test_a_leftover_is_ended_only_if_it_is_the_same_process(sleeping: Sleeping) -> None:
    other = sleeping()
    born = birth(other.pid)
    assert end_leftover(other.pid, born + 1) is False  # a later process that got the same pid
    assert other.poll() is None
    assert end_leftover(other.pid, born) is True
    assert other.wait(60) == -signal.SIGTERM


# --- The data directory ---


def test_a_second_up_on_the_same_data_directory_names_the_first(tmp_path: Path) -> None:
    state = {"pid": 4711, "url": "http://127.0.0.1:8321"}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    stack = Supervisor(Settings(engine="fake", data_dir=str(tmp_path)), say=lambda line: None)
    with (tmp_path / supervisor.LOCK_FILE).open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with refuses("pid 4711, http://127.0.0.1:8321", kind="conflict", field="data_dir"):
            stack.start()
    assert json.loads((tmp_path / STATE_FILE).read_text()) == state, "the first one's own"


def test_leftovers_of_a_killed_supervisor_are_ended(tmp_path: Path, sleeping: Sleeping) -> None:
    recorded = sleeping()
    ours = sleeping(**{processes.MARK: str(tmp_path)})
    others = sleeping(**{processes.MARK: str(tmp_path / "others")})
    assert wait_for(lambda: ours.pid in processes.marked(str(tmp_path)), 60)
    state = {"pid": 1, "processes": {"relay": [recorded.pid, birth(recorded.pid)]}}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    said: list[str] = []
    stack = Supervisor(Settings(engine="fake", data_dir=str(tmp_path)), say=said.append)
    stack._take_lock()
    stack.stop()
    assert recorded.wait(60) == ours.wait(60) == -signal.SIGTERM
    assert others.poll() is None
    assert any("stopped relay" in line for line in said)
    assert said[-1] == f"stopped a process (pid {ours.pid}), left over from a killed `midstream up`"


def test_a_start_ends_soon_where_no_redis_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REDIS_TRIES", 2)
    settings = Settings(engine="fake", data_dir=str(tmp_path), redis_url="redis://127.0.0.1:1/0")
    stack = Supervisor(settings, say=lambda line: None)
    with pytest.raises(SettingsError, match=r"redis_url: Redis cannot be opened: .*refused"):
        stack.start()
    assert stack._children == {}


def test_a_redis_that_is_unreachable_does_not_end_the_search_for_a_first_key(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    settings = Settings(data_dir=str(tmp_path), auth="keys", redis_url="redis://127.0.0.1:1/0")
    Supervisor(settings, say=said.append)._say_how_to_make_a_key()
    assert said == []


#: Starts a child as vLLM starts its processes, says its pid, and stays. The child asks to end with
#: its parent when it is let: a process that imports vLLM takes seconds until then.
PARENT = """
import multiprocessing, time
from pathlib import Path

folder = Path({folder!r})

def live():
    (folder / "started").touch()
    while not (folder / "asks").exists():
        time.sleep(0.01)
    from midstream.broker.processes.orphans import die_with_parent
    die_with_parent()
    (folder / "asked").touch()
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=live)
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["after it asked", "before it asked"])
def test_an_orphan_ends_even_if_the_parent_died_first(tmp_path: Path, when: str) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT.format(folder=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    pid = born = 0
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        born = birth(pid)
        assert wait_for(lambda: (tmp_path / "started").exists(), 60)
        if when == "after it asked":
            (tmp_path / "asks").touch()
            assert wait_for(lambda: (tmp_path / "asked").exists(), 60)
        parent.kill()
        parent.wait()
        (tmp_path / "asks").touch()
        assert wait_for(lambda: birth(pid) != born, 60), "it goes on, and nobody knows of it"
        assert (tmp_path / "asked").exists() == (when == "after it asked")
    finally:
        parent.kill()
        if born and birth(pid) == born:
            os.kill(pid, signal.SIGKILL)
        parent.communicate()


HELPERS = {
    "midstream_harvest.run.process": ["2048", "600"],
    "midstream.workers.engine.prompts.format_check": ["none", "1", "1", "0", "1"],
    "midstream.api.resolve.prompts.tokenizer_pool": ["1"],
}


@pytest.mark.parametrize("module", HELPERS)
def test_a_helper_whose_starter_died_before_it_ran_ends(module: str) -> None:
    """Its input stays open, as a request that was already sent does: it would begin to compute."""
    starter = subprocess.Popen(["true"])
    starter.wait()
    command = [sys.executable, "-m", module, *HELPERS[module], str(starter.pid)]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert helper.wait(60) == -signal.SIGKILL
    finally:
        helper.kill()
        helper.communicate()


def test_a_process_without_a_parent_to_watch_goes_on() -> None:
    assert multiprocessing.parent_process() is None
    die_with_parent()


def test_a_log_is_rotated_while_its_process_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOG_LIMIT_BYTES", 1000)
    part = child(tmp_path, "n=0; while true; do n=$((n+1)); echo line $n; sleep 0.001; done")
    part.start()
    try:
        for _ in range(3):
            assert wait_for(lambda: part.log.stat().st_size > 2000, 60)
            part.rotate()
            assert part.rotated
            assert part.log.stat().st_size < 2000
        former = part.log.with_name(part.log.name + ".1")
        assert former.stat().st_size > 1000
        last = int(former.read_text().split()[-1])
        assert wait_for(lambda: part.log.stat().st_size > 100, 60)
        first = int(part.log.read_text().split()[1])
        assert last < first <= last + 3, "at most what was written in an instant is lost"
    finally:
        part.stop()


def test_a_worker_that_loads_its_model_is_not_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    stack = Supervisor(Settings(data_dir=str(tmp_path)), say=said.append)
    worker = child(tmp_path, "trap '' TERM; echo up; while true; do sleep 0.05; done")
    worker.name = "worker"
    worker.stop_timeout_s = 600.0
    stack._children = {"worker": worker}
    worker.start()
    assert wait_for(lambda: "up" in worker.output(), 60)
    stack.stop()
    assert worker.process is None
    assert said == []
