"""A connection of every process of a run to the first one, beside jax's own.

jax's service ends a process in C++, with a stack, where two have one index or one is
gone, half a minute later. Here the first process knows every index before jax is asked,
and each learns at once, from the operating system, that another has ended.
"""

import contextlib
import errno
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any

MEETING_SECONDS = 300  # as long as jax waits
_GREETING_SECONDS = 5.0
_GRACE = 3.0  # seconds in which a process that has failed, or others with it, say why
_LOST = 1  # exit status

Connections = dict[int, socket.socket]


class Meeting:
    """The connections of this process: to all others, or to the first."""

    def __init__(self, index: int, count: int, connections: Connections):
        self._index, self._count, self._connections = index, count, connections
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self) -> None:
        """Say that this process ends as it should."""
        self._ended.set()
        _tell(self._connections, {"left": self._index})

    def fail(self) -> None:
        """Say that this process ends with an error, and wait for the others to end."""
        self._ended.set()
        connections = list(self._connections.values())
        _tell(self._connections, {"failed": self._index})
        deadline = time.monotonic() + _GRACE
        while connections and (seconds_left := deadline - time.monotonic()) > 0:
            for connection in select.select(connections, [], [], seconds_left)[0]:
                with contextlib.suppress(OSError):
                    if connection.recv(4096):
                        continue
                connections.remove(connection)

    def _watch(self) -> None:
        """End this process soon after another has ended as it should not."""
        open_ = {c.fileno(): (i, c) for i, c in self._connections.items()}
        while open_ and not self._ended.is_set():
            for file in select.select(list(open_), [], [], 1.0)[0]:
                index, connection = open_[file]
                message = _receive(connection)
                if message is not None and "left" in message:
                    del open_[file]
                elif not self._ended.is_set():
                    self._end_process(index, message or {})

    def _end_process(self, index: int, message: dict[str, Any]) -> None:
        """Tell the others and end, at once unless a process has time to say why."""
        gone = message.get("failed", message.get("gone", index))
        if index != 0:  # the first one tells the others
            _tell(self._connections, message or {"gone": gone})
        if "failed" in message and self._ended.wait(_GRACE):
            return
        sys.stdout.flush()
        print(
            f"jaxmem: error: process {gone} of {self._count} has ended, so process "
            f"{self._index} cannot go on; read what process {gone} printed, and start "
            "all processes again; the same command resumes the run",
            file=sys.stderr,
            flush=True,
        )
        os._exit(_LOST)


def meet(
    coordinator: str, count: int, index: int, seconds: float = MEETING_SECONDS
) -> Meeting:
    """Meet the other processes at the address where jax's service will listen.

    Raises:
        ValueError: two have one index or another number of processes, some do not
            come, or the address is not one of this machine.
    """
    host, _, port = coordinator.rpartition(":")
    address, deadline = (host.strip("[]"), int(port)), time.monotonic() + seconds
    if index == 0 and (listener := _open_listener(int(port))) is not None:
        with listener:
            return Meeting(0, count, _gather(listener, count, deadline))
    return Meeting(index, count, {0: _join(address, count, index, deadline)})


def _open_listener(port: int) -> socket.socket | None:
    """A socket that listens at all addresses, as jax does; None where another does."""
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=4096, dualstack_ipv6=dual_stack
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ValueError(f"--coordinator: port {port}: {error.strerror}") from error


def _gather(listener: socket.socket, count: int, deadline: float) -> Connections:
    """The connections of the others, once all have come."""
    connections: Connections = {}
    try:
        while missing := sorted(set(range(1, count)) - set(connections)):
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                listed = ", ".join(map(str, missing))
                raise ValueError(
                    f"--coordinator: of {count} processes, {listed} did not connect in "
                    "time; start one process for each --process-id"
                ) from None
            connection.settimeout(_GREETING_SECONDS)
            greeting = _receive(connection) or {}
            connection.settimeout(None)
            if "index" not in greeting:  # not one of ours
                connection.close()
                continue
            index = greeting["index"]
            is_taken = index == 0 or index in connections
            if is_taken or greeting["count"] != count:
                connections[-1] = connection
                raise ValueError(
                    f"two processes have --process-id={index}: give each its own"
                    if is_taken
                    else f"--processes is {count} in process 0 and "
                    f"{greeting['count']} in process {index}: it must be the same"
                )
            connections[index] = connection
    except ValueError as error:
        _tell(connections, {"refused": str(error)})
        for connection in connections.values():
            connection.close()
        raise
    _tell(connections, {"met": count})
    return connections


def _tell(connections: Connections, message: dict[str, Any]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _send(connection, message)


def _join(address, count: int, index: int, deadline: float) -> socket.socket:
    """A connection to process 0, which knows all others."""
    while True:
        try:
            connection = socket.create_connection(address, timeout=_GREETING_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process 0 does not answer at --coordinator={address[0]}:"
                    f"{address[1]}: {error.strerror or error}"
                ) from error
            time.sleep(0.2)
    _send(connection, {"index": index, "count": count})
    connection.settimeout(max(deadline - time.monotonic(), 1.0))
    answer = _receive(connection) or {}
    if "met" not in answer:
        connection.close()
        fault = (
            "process 0 ended before all processes had connected; read what it printed"
        )
        if index == 0:
            fault = f"--coordinator: port {address[1]} is in use by something else"
        raise ValueError(answer.get("refused") or fault)
    connection.settimeout(None)
    return connection


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next line; None at the end of the connection, or if it is not ours."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            part = connection.recv(1)
            if not part or len(line) > 4096:
                return None
            line += part
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
