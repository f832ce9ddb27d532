"""Options of `jaxmem plan`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from jaxmem.base import options
from jaxmem.base.command_options import CommandOptions, Flag, Positional


@dataclasses.dataclass(frozen=True)
class PlanRequest(CommandOptions):
    """Options of the command."""

    file: Annotated[
        str,
        Positional("CONFIG"),
        "a gin file; or the directory of a checkpoint, to plan scoring",
    ]
    overrides: Annotated[
        tuple[str, ...],
        Positional("section.field=value"),
        "settings that replace those of the file; for scoring, options of `jaxmem "
        "score`, as in base=nf4",
    ] = ()
    _: dataclasses.KW_ONLY
    device: Annotated[str, "name of the device, such as h200 or v5e"]
    devices: Annotated[
        int | None,
        Flag(parse=options.count),
        "number of devices (default: the product of the mesh axes)",
    ] = None
    hosts: Annotated[
        int, Flag(parse=options.count), "number of hosts (default {default})"
    ] = 1
    fit: Annotated[
        bool,
        "also search for remat policies, offloading and batch sizes that fit",
    ] = False
    as_json: Annotated[bool, Flag("--json"), "print all numbers, in bytes"] = False
    picture: Annotated[
        Path | None,
        Flag(metavar="FILE.png"),
        "draw the memory as a picture in this file",
    ] = None
