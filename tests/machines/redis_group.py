"""A Redis with replicas, and a sentinel on the machine of each, in a `Network`; a user per role.

with RedisGroup(network, ("r1", "r2", "r3"), tmp_path) as group:
    settings = load_settings({}, redis_url=group.url("api"), redis_replicas=1)
    network.cut(group.master(), *group.others())
"""

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import redis
from network import Network

from midstream.broker.redis_service import server as redis_server
from midstream.broker.redis_service.acl import OPERATOR

SERVICE = "midstream"
REDIS_PORT = 6390
SENTINEL_PORT = 26390
#: After so long without an answer a sentinel takes a master for dead. A real installation gives it
#: more.
DOWN_MS = 2000
START_S = 20.0


class RedisGroup:
    """`machines`: of the master at first, and of its replicas. `acl`: a folder of `write_users`."""

    def __init__(self, network: Network, machines: tuple[str, ...], directory: Path, acl: Path):
        self.network = network
        self.machines = machines
        self.directory = directory
        self.acl = acl
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def password(self, user: str) -> str:
        return (self.acl / f"{user}.password").read_text().strip()

    def url(self, user: str) -> str:
        places = ",".join(f"{self.network.address(name)}:{SENTINEL_PORT}" for name in self.machines)
        return f"redis+sentinel://{user}:{quote(self.password(user))}@{places}/0?service={SERVICE}"

    def client(self, machine: str) -> "redis.Redis":
        """The operator's, of one Redis, whatever its role."""
        return redis.Redis(
            self.network.address(machine),
            REDIS_PORT,
            username=OPERATOR,
            password=self.password(OPERATOR),
            socket_timeout=3,
            socket_connect_timeout=3,
            retry=None,
        )

    def __enter__(self) -> "RedisGroup":
        try:
            for machine in self.machines:
                self.start(machine)
            self._wait(
                lambda: (
                    self.client(self.machines[0]).info("replication")["connected_slaves"]
                    == len(self.machines) - 1
                )
            )
            for machine in self.machines:
                self._start_sentinel(machine)
            for known in ("num-other-sentinels", "num-slaves"):
                self._wait(
                    lambda known=known: all(
                        self._state(machine)[known] == len(self.machines) - 1
                        for machine in self.machines
                    )
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(list(self.processes.values())):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def start(self, machine: str) -> None:
        """(Again) the Redis of a machine, with the role that its own file says."""
        folder = self.directory / f"redis-{machine}"
        config = folder / "redis.conf"
        if not config.exists():
            folder.mkdir(parents=True)
            (folder / "users.acl").write_bytes((self.acl / "users.acl").read_bytes())
            lines = [
                f"bind {self.network.address(machine)}",
                f"port {REDIS_PORT}",
                f"dir {folder}",
                "protected-mode no",
                "appendonly yes",
                'save ""',
                "maxmemory-policy noeviction",
                f"aclfile {folder}/users.acl",
                "masteruser replica",
                f"masterauth {self.password('replica')}",
                "min-replicas-to-write 1",
                "min-replicas-max-lag 3",
                "repl-diskless-sync yes",
                "repl-diskless-sync-delay 0",
                "repl-ping-replica-period 1",
                "repl-timeout 5",
            ]
            if machine != self.machines[0]:
                lines.append(f"replicaof {self.network.address(self.machines[0])} {REDIS_PORT}")
            config.write_text("\n".join(lines) + "\n")
        self._spawn(machine, machine, [str(config)])
        self._wait(lambda: not self.client(machine).info("persistence")["loading"])

    def _start_sentinel(self, machine: str) -> None:
        folder = self.directory / f"sentinel-{machine}"
        folder.mkdir(parents=True)
        config = folder / "sentinel.conf"
        config.write_text(
            "\n".join(
                [
                    f"bind {self.network.address(machine)}",
                    f"port {SENTINEL_PORT}",
                    f"dir {folder}",
                    "protected-mode no",
                    (
                        f"sentinel monitor {SERVICE} {self.network.address(self.machines[0])} "
                        f"{REDIS_PORT} 2"
                    ),
                    f"sentinel auth-user {SERVICE} sentinel",
                    f"sentinel auth-pass {SERVICE} {self.password('sentinel')}",
                    f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
                    f"sentinel failover-timeout {SERVICE} 10000",
                ]
            )
            + "\n"
        )
        self._spawn(f"sentinel-{machine}", machine, [str(config), "--sentinel"])

    def _spawn(self, name: str, machine: str, arguments: list[str]) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = self.network.popen(
                machine, [redis_server.executable(), *arguments], stdout=log, stderr=log
            )

    def _sentinel(self, machine: str) -> "redis.Redis":
        return redis.Redis(
            self.network.address(machine), SENTINEL_PORT, socket_timeout=3, retry=None
        )

    def _state(self, sentinel: str) -> dict[str, object]:
        with self._sentinel(sentinel) as client:
            return client.sentinel_master(SERVICE)

    def account(self) -> str:
        """What the sentinels did."""
        logs = [self.directory / f"sentinel-{machine}.log" for machine in self.machines]
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in logs)

    def master(self) -> str:
        """The machine whose Redis is the master, by the newest configuration of any sentinel."""
        states = []
        for sentinel in self.machines:
            with contextlib.suppress(redis.RedisError, OSError):
                states.append(self._state(sentinel))
        address = max(states, key=lambda state: int(str(state["config-epoch"])))["ip"]
        return next(
            machine for machine in self.machines if self.network.address(machine) == address
        )

    def others(self) -> list[str]:
        master = self.master()
        return [machine for machine in self.machines if machine != master]

    def order_failover(self) -> None:
        """As an operator does: the master lives, and a replica takes over."""
        with self._sentinel(self.machines[0]) as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)

    def await_failover(self, former: str, timeout: float = 60.0) -> float:
        """Seconds until the sentinels name another machine."""
        began = time.monotonic()
        self._wait(lambda: self.master() != former, timeout)
        return time.monotonic() - began

    def await_whole(self, timeout: float = 120.0) -> None:
        """Until all replicas follow the master, and every sentinel has seen that they do: then the
        next failover may come.

        A sentinel looks every 10 s. One that still takes a replica for the master that it was, and
        is cut off with the present master while that replica is promoted, makes it a replica again
        when it returns: see docs/machines.md.
        """
        self._wait(
            lambda: (
                self.client(self.master()).info("replication")["connected_slaves"]
                == len(self.machines) - 1
            ),
            timeout,
        )
        self._wait(
            lambda: len({str(self._state(machine)["ip"]) for machine in self.machines}) == 1,
            timeout,
        )
        self._wait(
            lambda: all(self._state(machine)["flags"] == "master" for machine in self.machines),
            timeout,
        )
        self._wait(lambda: all(map(self._sees_replicas, self.machines)), timeout)

    def _sees_replicas(self, sentinel: str) -> bool:
        with self._sentinel(sentinel) as client:
            replicas: list[dict[str, str]] = client.sentinel_slaves(SERVICE)
        return [
            replica["flags"] == "slave" and replica["role-reported"] == "slave"
            for replica in replicas
        ] == [True] * (len(self.machines) - 1)

    def kill(self, machine: str) -> None:
        self.processes[machine].kill()
        self.processes[machine].wait()

    def pause(self, machine: str) -> None:
        """As a virtual machine that is frozen: it answers nothing, and keeps its connections."""
        self.processes[machine].send_signal(signal.SIGSTOP)

    def resume(self, machine: str) -> None:
        self.processes[machine].send_signal(signal.SIGCONT)

    @staticmethod
    def _wait(check: object, timeout: float = START_S) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if check():  # type: ignore[operator]
                    return
            except (redis.RedisError, OSError):
                pass
            assert time.monotonic() < deadline, "a Redis or a sentinel did not get there in time"
            time.sleep(0.05)
