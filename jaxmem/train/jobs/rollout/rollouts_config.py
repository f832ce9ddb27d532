"""Settings of rollouts that an inference engine samples."""

import dataclasses
import urllib.parse
from typing import Annotated, Literal

from jaxmem.base.fields import check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import left_out, must

_LOCAL = "localhost", "127.0.0.1", "::1"


@dataclasses.dataclass(frozen=True)
class RolloutsConfig:
    """The engine that samples completions, and the age of weights that it may use."""

    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        'inference server that samples the completions: "vllm", whose routes `jaxmem '
        'serve` has too, or "sglang". None: the run samples them itself',
    ] = None
    urls: Annotated[
        str | tuple[str, ...],
        'address of the server, as in "http://localhost:8000", or addresses of '
        "several, which share the groups of a step",
    ] = ()
    weights: Annotated[
        str | None,
        "folder for new weights, which the servers read at the same path. None: a "
        "folder in /dev/shm, for servers on this host",
    ] = None
    max_staleness: Annotated[
        int,
        integers(0, below=1000),
        "maximum number of updates of the policy between the begin of a group of "
        "completions and its own update. Above 0, groups of later steps are sampled "
        "while the policy is updated",
    ] = 0
    concurrency: Annotated[
        int,
        integers(1, limit=2**12),
        "maximum number of simultaneous requests to the servers",
    ] = 64
    timeout: Annotated[
        float,
        reals(above=0),
        "seconds without a useful answer of any server after which the run ends",
    ] = 600.0

    RULES = (
        left_out(
            "urls weights max_staleness concurrency timeout",
            "without rollouts.engine",
            lambda config: config.engine is None,
        ),
        must(
            "urls",
            'addresses as in "http://localhost:8000", each once',
            lambda config: config.engine is None or _are_addresses(config.addresses),
        ),
        must(
            "weights",
            "a folder that the servers of other hosts read too",
            lambda config: config.weights is not None or config.is_local,
        ),
    )

    def __post_init__(self):
        check(self)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the servers."""
        return (self.urls,) if isinstance(self.urls, str) else self.urls

    @property
    def is_local(self) -> bool:
        """True if all servers are on this host."""
        hosts = (urllib.parse.urlsplit(url).hostname for url in self.addresses)
        return all(host in _LOCAL for host in hosts)


def _are_addresses(urls: tuple[str, ...]) -> bool:
    """True if they are addresses of servers, each once."""
    return len(set(urls)) == len(urls) > 0 and all(map(_is_address, urls))


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
