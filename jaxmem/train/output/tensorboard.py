"""TensorBoard events as bytes, for a caller that writes them synchronously.

tensorboardX's `SummaryWriter` has a queue and a thread. When a write fails, the thread
ends, the queue fills, and `add_scalar` blocks for ever.
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
    """Return the path of a new event file; it sorts after the existing ones."""
    name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}"
    return directory / f"{name}.{os.getpid()}.{time.time_ns() % 10**9:09d}"


def head(first_step: int) -> bytes:
    """Return the first records of a file.

    TensorBoard discards `first_step` and later ones of earlier files.
    """
    version = Event(wall_time=time.time(), file_version="brain.Event:2")
    session = SessionLog(status=SessionLog.START)
    start = Event(wall_time=time.time(), step=first_step, session_log=session)
    return _frame_record(version) + _frame_record(start)


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Return the record of a step's scalars, by tag."""
    summary = Summary(
        value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
    )
    return _frame_record(Event(wall_time=time.time(), step=step, summary=summary))


def _frame_record(event: Event) -> bytes:
    """Frame an event as TFRecord does: length and content, each with its CRC32C."""
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


def _masked_crc(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
