"""Requests of commands that are no library: their options."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from jaxmem.base import options
from jaxmem.base.command_options import (
    CodeOptions,
    CommandOptions,
    DType,
    Flag,
    Positional,
)
from jaxmem.base.ranges import integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions(CommandOptions):
    """The processes of a run."""

    TITLE: ClassVar = (
        "several processes",
        "every process runs the same command on its own devices",
    )

    cluster: Annotated[
        bool, "take processes and address from SLURM, Open MPI or Kubernetes"
    ] = False
    coordinator: Annotated[
        str | None, Flag(metavar="HOST:PORT"), "address of process 0"
    ] = None
    processes: Annotated[int | None, "number of processes"] = None
    process_id: Annotated[int | None, "number of this process, counted from 0"] = None
    heartbeat: Annotated[
        int,
        integers(1),
        Flag(metavar="SECONDS"),
        "seconds without a sign of life after which a process counts as dead, which "
        "ends the run (default {default})",
    ] = 30


@dataclasses.dataclass(frozen=True)
class TrainRequest(ProcessOptions):
    """Options of `jaxmem train`; one of file and keys is set."""

    file: Annotated[
        str | None,
        Positional("FILE.gin"),
        "path of a gin file, or name of a shipped one",
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        Positional("section.field=value"),
        "settings that replace those of the file, as in run.steps=200 "
        "data.source=notes.txt",
    ] = ()
    keys: Annotated[
        str | None,
        Flag(metavar="SECTION", bare=""),
        "list the settings of all sections, or of one, with default, type and "
        "meaning; FILE.gin adds the sections of its own job",
    ] = None
    verbose: Annotated[bool, "print the settings that differ from the defaults"] = False


@dataclasses.dataclass(frozen=True)
class DataRequest(CommandOptions):
    """Options of `jaxmem data`."""

    file: Annotated[
        str, Positional("FILE.gin"), "path of a gin file, or name of a shipped one"
    ]
    overrides: Annotated[
        tuple[str, ...],
        Positional("section.field=value"),
        "settings that replace those of the file",
    ] = ()
    show: Annotated[
        int, Flag(parse=options.count), "number of records to print (default {default})"
    ] = 3


@dataclasses.dataclass(frozen=True)
class ExportRequest(CodeOptions):
    """Options of `jaxmem export`."""

    path: Annotated[str, Positional("DIR"), "run, checkpoint, adapter or Hub model"]
    _: dataclasses.KW_ONLY
    out: Annotated[str | None, "directory to create; required without --push"] = None
    push: Annotated[
        str | None,
        Flag(metavar="OWNER/NAME"),
        "upload the model to this repository of the Hub",
    ] = None
    private: Annotated[bool, "with --push, make a new repository private"] = False
    merge: Annotated[bool, "merge the adapters into the weights"] = False
    base: Annotated[
        str | None,
        Flag(metavar="OWNER/NAME"),
        "base model to record in the saved adapter: a Hub model or a directory",
    ] = None
    dtype: Annotated[DType | None, "type of the saved weights"] = None


@dataclasses.dataclass(frozen=True)
class DoctorRequest(CommandOptions):
    """Options of `jaxmem doctor`."""

    as_json: Annotated[bool, Flag("--json"), "print JSON"] = False


@dataclasses.dataclass(frozen=True)
class BenchRequest(CommandOptions):
    """Options of `jaxmem bench`; kernel and out are for tune."""

    shape: Annotated[
        tuple[int, int, int] | None,
        Flag(metavar="N,D,V", parse=options.shape),
        "number of tokens, width of the hidden states, and size of the vocabulary",
    ] = None
    dtype: Annotated[
        DType | None, "type of the hidden states and the vocabulary matrix"
    ] = None
    chunk: Annotated[
        int | Literal["auto"],
        Flag(parse=options.chunk),
        "number of tokens whose logits exist at a time, or auto (default {default})",
    ] = 1024
    repetitions: Annotated[
        int,
        Flag(parse=options.count),
        "number of measurements, whose median is printed (default {default})",
    ] = 3
    tune: Annotated[bool, "measure the tiles of the Hopper kernels instead"] = False
    kernel: Annotated[
        tuple[str, ...], "with --tune, measure only this kernel; may be repeated"
    ] = ()
    out: Annotated[
        Path | None, "with --tune, file for the table (default tuned.json)"
    ] = None
