"""Settings of rollouts that an inference engine samples."""

import dataclasses
import urllib.parse
from typing import Literal

from jaxmem.base.fields import check_field, check_numbers
from jaxmem.base.ranges import integers, reals

_RANGES = {
    "max_staleness": integers(0, below=1000),
    "concurrency": integers(1, limit=2**12),
    "timeout": reals(above=0),
}
_LOCAL = "localhost", "127.0.0.1", "::1"


@dataclasses.dataclass(frozen=True)
class RolloutsConfig:
    """The engine that samples completions, and the age of weights that it may use."""

    # inference server that samples the completions: "vllm", whose routes `jaxmem serve`
    # has too, or "sglang". None: the run samples them itself
    engine: Literal["vllm", "sglang"] | None = None
    # address of the server, as in "http://localhost:8000", or addresses of several,
    # which share the groups of a step
    urls: str | tuple[str, ...] = ()
    # folder for new weights, which the servers read at the same path. None: a folder in
    # /dev/shm, for servers on this host
    weights: str | None = None
    # maximum number of updates of the policy between the begin of a group of
    # completions and its own update. Above 0, groups of later steps are sampled while
    # the policy is updated
    max_staleness: int = 0
    concurrency: int = 64  # maximum number of simultaneous requests to the servers
    # seconds without a useful answer of any server after which the run ends
    timeout: float = 600.0

    def __post_init__(self):
        check_numbers(self, _RANGES)
        kinds = ("vllm", "sglang", None)
        check_field(self, "engine", self.engine in kinds, f"one of {kinds}")
        if self.engine is None:
            for field in dataclasses.fields(self):
                unset = getattr(self, field.name) == field.default
                expected = f"left out, or {field.default!r}, without rollouts.engine"
                check_field(self, field.name, unset, expected)
            return
        once = len(set(self.addresses)) == len(self.addresses) > 0
        good = once and all(map(_is_address, self.addresses))
        expected = 'addresses as in "http://localhost:8000", each once'
        check_field(self, "urls", good, expected)
        local = self.weights is not None or self.is_local
        expected = "a folder that the servers of other hosts read too"
        check_field(self, "weights", local, expected)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the servers."""
        return (self.urls,) if isinstance(self.urls, str) else self.urls

    @property
    def is_local(self) -> bool:
        """True if all servers are on this host."""
        hosts = (urllib.parse.urlsplit(url).hostname for url in self.addresses)
        return all(host in _LOCAL for host in hosts)


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises for one that is no number
    except ValueError:
        return False
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
