"""Checkpoints that survive a kill at any moment, and refuse to continue another run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The newest `keep` checkpoints of a run, each whole or absent.

    Orbax writes a checkpoint under a temporary name and renames it when every byte is
    there, so what a kill leaves behind is never taken for a checkpoint.  Saving is
    synchronous: when `save` returns, the step can be resumed.

    Args:
      directory: where checkpoints live; made when missing.
      keep: how many of the newest to keep.
    """

    def __init__(self, directory: Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The newest step that can be resumed, None in a new run."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_state: Mapping, config: Mapping) -> None:
        """Save everything the next step depends on.

        Args:
          step: how many steps are done.
          state: pytree of arrays: parameters, optimizer, rng.
          data_state: what the data iterator's `get_state` returned; JSON.
          config: what must not change on resume, by section and field; JSON.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave(dict(data_state)),
                config=ocp.args.JsonSave(dict(config)),
            ),
        )

    def saved_config(self, step: int) -> dict[str, dict[str, Any]]:
        """The `config` that was given to `save`."""
        items = ocp.args.Composite(config=ocp.args.JsonRestore())
        return self._manager.restore(step, args=items)["config"]

    def saved_shapes(self, step: int) -> Any:
        """What describes each array of the `state` that was given to `save`.

        Orbax's, by name in dicts and lists; it says the arrays' shapes.
        """
        path = self._manager.directory / str(step) / "state"
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path)
        return found.item_metadata.tree

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load a checkpoint.

        Args:
          step: one that was saved.
          like: pytree of `jax.ShapeDtypeStruct`, the shape of the saved state and
            where it shall be, whatever devices it was on.

        Returns:
          The state, on the default device where `like` names none, and the data
          iterator's state.
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding or device
            ),
            like,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(placed), data=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["data"]


def check_same_config(
    saved: Mapping[str, Mapping], current: Mapping[str, Mapping], directory: Path
) -> None:
    """Refuse to resume a run whose model or data was another one.

    Args:
      saved: section to field to value, as `Checkpoints.saved_config` returns it.
      current: the same of the run that wants to resume.
      directory: the run's directory, for the message.

    Raises:
      ValueError: some fields differ; the message names each, with both values.
    """
    was, now = _flat(saved), _flat(current)
    differing = [
        f"{key} was {was.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(
            f"run.out_dir={str(directory)!r} holds checkpoints of another run: "
            f"{'; '.join(differing)}. Give the old values back to resume it, or name "
            "another run.out_dir to start anew."
        )


def _flat(config: Mapping[str, Mapping]) -> dict[str, str]:
    """Section.field to JSON text, which a JSON round trip does not change."""
    return {
        f"{section}.{field}": json.dumps(value)
        for section, fields in config.items()
        for field, value in fields.items()
    }
