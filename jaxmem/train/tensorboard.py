"""TensorBoard's event files, written a record at a time.

tensorboardX's own writer has a queue and a thread: when a write fails the thread ends,
and the next call but a few waits for ever. Here a record is bytes, for whoever writes.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore
from tensorboardX.record_writer import masked_crc32c


def new_file(directory: Path) -> Path:
    """The name of an event file that is not there yet, after those that are."""
    name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}"
    return directory / f"{name}.{os.getpid()}.{time.time_ns() % 10**9:09d}"


def head(first_step: int) -> bytes:
    """What a file starts with; TensorBoard drops that step and later ones of others."""
    version = Event(wall_time=time.time(), file_version="brain.Event:2")
    session = SessionLog(status=SessionLog.START)
    start = Event(wall_time=time.time(), step=first_step, session_log=session)
    return _record(version) + _record(start)


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """The numbers of a step, by name."""
    summary = Summary(
        value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
    )
    return _record(Event(wall_time=time.time(), step=step, summary=summary))


def _record(event: Event) -> bytes:
    """As TFRecord has it: length and content, each with its checksum."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
