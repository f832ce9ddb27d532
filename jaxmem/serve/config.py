"""Options of `jaxmem serve`."""

import dataclasses
import os
from typing import Annotated

from jaxmem.base import options
from jaxmem.base.command_options import Flag, ModelOptions
from jaxmem.base.fields import Must
from jaxmem.base.ranges import integers

TOKEN = "JAXMEM_ENGINE_TOKEN"  # variable of the environment


@dataclasses.dataclass(frozen=True)
class ServeRequest(ModelOptions):
    """Options of the command."""

    _: dataclasses.KW_ONLY
    host: Annotated[
        str, "address to listen on (default {default}: only this machine)"
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Must("from 0 to 65535", lambda port: 0 <= port < 2**16),
        "port to listen on (default {default}); 0 takes a free one",
    ] = 8000
    name: Annotated[str | None, "name of the model in requests (default DIR)"] = None
    slots: Annotated[
        int,
        Flag(parse=options.count),
        integers(1),
        "number of completions to decode at a time (default {default})",
    ] = 16
    max_len: Annotated[
        int | None,
        Flag(parse=options.count),
        integers(2),
        "maximum number of tokens of a prompt and its completion (default: the "
        "model's, at most 2048)",
    ] = None
    weights: Annotated[
        tuple[str, ...],
        Flag(metavar="FOLDER"),
        "load new weights from directories below this folder when a request asks for "
        "it; may be repeated (default: load none)",
    ] = ()
    token: Annotated[
        str | None,
        "token that requests must send as `Authorization: Bearer TOKEN` (default: "
        f"${TOKEN}, or none)",
    ] = None
    enable_return_routed_experts: Annotated[
        bool, "return the experts of each token, for trainers that replay them"
    ] = False
    max_body: Annotated[
        int,
        Flag(metavar="MIB", parse=options.count),
        integers(1),
        "maximum size of a request (default {default})",
    ] = 16
    max_waiting: Annotated[
        int,
        Flag(metavar="COMPLETIONS", parse=options.count),
        integers(1),
        "maximum number of completions that wait for a slot (default {default})",
    ] = 4096
    max_logprobs: Annotated[
        int,
        Flag(metavar="K"),
        integers(0),
        "maximum number of most probable tokens that a request may ask for (default "
        "{default})",
    ] = 256

    # No flag: a model of the user's own is not served.
    factory: None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        super().__post_init__()
        secret = self.secret or ""  # an error must not print it
        if secret != secret.strip() or not secret.isascii():
            raise ValueError(
                f"--token, or ${TOKEN}, must be ASCII characters without spaces "
                "around them"
            )

    @property
    def secret(self) -> str | None:
        """The token that requests must send; None: none."""
        return self.token or os.environ.get(TOKEN) or None

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model if self.name is None else self.name
