"""Several engines that share the prompts of a run and have the same weights."""

import concurrent.futures
import filecmp
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from jaxmem.train.jobs.rollout.engines import weight_version
from jaxmem.train.jobs.rollout.engines.patience import (
    Deadline,
    EngineError,
    EngineFailure,
    Patience,
)
from jaxmem.train.jobs.rollout.engines.protocol import (
    Engine,
    EngineAnswer,
    EngineInfo,
    EngineOptions,
    SamplingRequest,
)
from jaxmem.train.jobs.rollout.engines.sglang import Sglang
from jaxmem.train.jobs.rollout.engines.vllm import Vllm

_Result = TypeVar("_Result")

_REST = 1.0  # seconds for which a server that failed gets no request, if others do


ENGINES: dict[str, type[Engine]] = {"vllm": Vllm, "sglang": Sglang}


def connect(kind: str, urls: Sequence[str], options: EngineOptions) -> "EnginePool":
    """The pool of some servers of a kind in `ENGINES`, all of which are ready."""
    pool = EnginePool([ENGINES[kind](url, options) for url in urls])
    pool.wait_ready()
    return pool


class _Update(NamedTuple):
    """Weights that all servers have, or are loading."""

    directory: Path
    version: int
    adapter: bool


class _Member:
    """One server with the pool's view of it; the pool's lock guards it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.requests = 0  # in flight
        self.rests_until = 0.0
        self.is_suspect = False  # it has failed, and served nothing since
        self.loading = threading.Lock()  # held while its weights are loaded


class EnginePool:
    """Engines of one run; its methods may be called from many threads.

    A prompt goes to the engine with the fewest requests in flight. An engine that has
    restarted, and so states no version, gets the last weights again before it gets a
    request.
    """

    def __init__(self, engines: Sequence[Engine]):
        if not engines:
            raise EngineError("rollouts.urls must name at least one server, got none")
        addresses = [engine.url for engine in engines]
        for address in addresses:
            if addresses.count(address) > 1:
                raise EngineError(f"rollouts.urls names {address} twice")
        self.engines = tuple(engines)
        self._options = engines[0].options
        self._members = [_Member(engine) for engine in engines]
        self._changed = threading.Condition()
        self._updating = threading.Lock()
        self._loading: _Update | None = None
        self._last: _Update | None = None
        self._error: EngineError | None = None
        self._checksum: str | None = None  # of the first engine's weights
        self._compared = False  # with those of before an update

    def wait_ready(self) -> list[EngineInfo]:
        """Wait until all servers are ready; their facts in the order of the urls."""
        return self._on_all(lambda member: member.engine.wait_ready())

    def generate(self, request: SamplingRequest) -> list[EngineAnswer]:
        """The completions of a prompt by one engine, with versions by token.

        While weights are loaded, it waits. If the engine does not state versions, all
        tokens count as sampled by the weights of when the request was sent.
        """
        for engine in self.engines:
            engine.check_request(request)
        patience = Patience(
            [engine.reporter for engine in self.engines],
            self._options.timeout,
            self._options.first_pause,
            self.engines[0].http.wait,
        )
        while True:
            member, update = self._take()
            engine, pause, began = member.engine, 0.0, time.monotonic()
            deadline = patience.deadline_of(engine.reporter)
            try:
                if not self._has_weights(member, update, deadline):
                    continue  # an update has begun; wait for its end
                answers = engine.ask(request, deadline)
                answers = [self._with_versions(x, update, engine) for x in answers]
            except EngineFailure as failure:
                if self._suspect(member):
                    patience.renew()
                pause = patience.after(failure, engine.reporter)
                pause = self._rest(member, pause, time.monotonic() - began)
            else:
                engine.reporter.succeeded()
                self._trust(member)
                return answers
            finally:
                self._release(member)
            engine.http.wait(pause)

    def load_weights(
        self, directory: Path, version: int, adapter: bool
    ) -> Mapping[str, float]:
        """Load a directory in all engines; the most seconds of each step.

        Raises:
            EngineError: one of the engines cannot load it; `generate` then raises the
                same error.
        """
        update = _Update(directory, version, adapter)
        with self._updating:
            with self._changed:
                self._check_usable()
                self._loading = update
            try:
                by_engine = self._on_all(lambda member: _load(member, update))
                self._check_same_weights(update)
            except BaseException as error:
                self._end(f"rollouts.weights: the update has ended: {error!r}", error)
                raise
            with self._changed:
                self._last, self._loading = update, None
                self._changed.notify_all()
        steps = {step for seconds in by_engine for step in seconds}
        return {step: max(s.get(step, 0.0) for s in by_engine) for step in steps}

    def versions(self) -> list[int | None]:
        """The number of each engine's weights; see `Engine.version`."""
        return self._on_all(lambda member: member.engine.version())

    def close(self) -> None:
        """End all requests; the threads that wait for them get an EngineError.

        Servers free the run's adapter.
        """
        for engine in self.engines:
            engine.release()
        self._end("rollouts.urls: the run ends")
        for engine in self.engines:
            engine.close()

    def _end(self, message: str, error: BaseException | None = None) -> None:
        """Let all requests that wait raise an error, the given one if it fits."""
        with self._changed:
            fits = isinstance(error, EngineError)
            self._error = error if fits else EngineError(message)
            self._changed.notify_all()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error

    def _take(self) -> tuple[_Member, _Update | None]:
        """Reserve an engine for a request, when no update is in progress."""
        with self._changed:
            while self._loading is not None and self._error is None:
                self._changed.wait()  # `load_weights` ends within the timeout
            self._check_usable()
            now = time.monotonic()
            member = min(
                self._members,
                key=lambda m: (
                    max(m.rests_until - now, 0),
                    m.is_suspect and m.requests > 0,  # one request is a test of it
                    m.requests,
                ),
            )
            member.requests += 1
            return member, self._last

    def _release(self, member: _Member) -> None:
        with self._changed:
            member.requests -= 1

    def _suspect(self, member: _Member) -> bool:
        """Note that an engine has failed; True if another one has not."""
        with self._changed:
            member.is_suspect = True
            return not all(m.is_suspect for m in self._members)

    def _trust(self, member: _Member) -> None:
        """Note that an engine serves requests."""
        with self._changed:
            member.is_suspect, member.rests_until = False, 0.0

    def _rest(self, member: _Member, pause: float, spent: float) -> float:
        """Give a failed engine a rest; the seconds until another can be asked.

        One that hangs costs a request the whole timeout, so it rests as long.
        """
        with self._changed:
            now = time.monotonic()
            member.rests_until = now + max(pause, spent, _REST)
            others = [m for m in self._members if m.rests_until <= now]
            return 0.0 if others else pause

    def _has_weights(
        self, member: _Member, update: _Update | None, deadline: Deadline
    ) -> bool:
        """Make sure that an engine has the weights of an update, the last one.

        False: they are not the last ones any more.
        """
        if update is not None and not self._is_current(member, deadline):
            self._load_again(member, update, deadline)
        with self._changed:
            return self._loading is None and self._last is update

    def _load_again(self, member: _Member, update: _Update, deadline: Deadline) -> None:
        """Load weights into an engine that has lost them, unless another thread has."""
        left = max(deadline() - time.monotonic(), 0)
        if not member.loading.acquire(timeout=left):
            raise EngineFailure("is still loading weights")
        try:
            with self._changed:
                if self._loading is not None or self._last is not update:
                    return
            if self._is_current(member, deadline):
                return
            engine = member.engine
            engine.options.say(
                f"rollouts.urls: {engine.url} has restarted, as its weights have no "
                f"version; version {update.version} is loaded again"
            )
            text = weight_version.text(self._options.run, update.version)
            engine.load_once(update.directory, text, update.adapter, deadline)
        finally:
            member.loading.release()

    def _is_current(self, member: _Member, deadline: Deadline) -> bool:
        """True if an engine has the last weights, False if it has lost its version.

        Raises:
            EngineError: something else has loaded weights.
        """
        stated = member.engine.read_version(deadline)
        url = member.engine.url
        number = weight_version.number(stated, self._options.run, url)
        with self._changed:
            expected = [x.version for x in (self._last, self._loading) if x is not None]
        if number is None or number in expected:
            return number is not None
        raise EngineError(
            f"rollouts.urls: {url} states the version {number} of its weights, and "
            f"{expected[0]} was loaded; end the program that also loads weights there"
        )

    def _check_same_weights(self, update: _Update) -> None:
        """Compare digests of the weights among engines, and with those of before.

        The first is done after the first update, the second where files have changed
        first: reloading has left weights unchanged (vllm-project/vllm#32718).
        """
        if update.adapter or self._compared:  # checksums do not cover adapters
            return
        before = self._last
        if before is not None and not _differ(before.directory, update.directory):
            return
        digests = self._on_all(lambda member: member.engine.checksum())
        for engine, digest in zip(self.engines, digests, strict=True):
            if digest != digests[0]:
                raise EngineError(
                    f"rollouts.urls: {engine.url} has other weights than "
                    f"{self.engines[0].url} after both loaded {update.directory}; "
                    "start both again with the same flags"
                )
        if before is not None and digests[0] is not None:
            self._compared = True
            if digests[0] == self._checksum:
                raise EngineError(
                    f"rollouts.urls: {self.engines[0].url} has the weights of version "
                    f"{before.version} after it loaded {update.directory}; start it "
                    "with the run's model.dtype, or try another version of the engine"
                )
        self._checksum = digests[0]

    def _with_versions(
        self, answer: EngineAnswer, update: _Update | None, engine: Engine
    ) -> EngineAnswer:
        """The answer with versions that its request may have seen."""
        if update is None:
            return answer._replace(versions=None)
        if answer.versions is None:
            return answer._replace(versions=[(update.version, len(answer.ids))])
        with self._changed:
            newest = max(x.version for x in (self._last, self._loading) if x)
        first, last = answer.versions[0][0], answer.versions[-1][0]
        if first < update.version:  # as of a server that restarted just before
            raise EngineFailure(
                f"has sampled with the weights of version {first}; {update.version} "
                "was loaded"
            )
        if last > newest:
            raise EngineError(
                f"rollouts.urls: {engine.url} has sampled with the weights of version "
                f"{last}, and the newest is {newest}; end the program that also loads "
                "weights there"
            )
        return answer

    def _on_all(self, action: Callable[[_Member], _Result]) -> list[_Result]:
        """The action's results for all engines, side by side; its first error."""
        with concurrent.futures.ThreadPoolExecutor(len(self._members)) as threads:
            try:
                return [*threads.map(action, self._members)]
            except (KeyboardInterrupt, SystemExit):  # do not wait for a server
                self.close()
                raise


def _load(member: _Member, update: _Update) -> Mapping[str, float]:
    with member.loading:
        return member.engine.load_weights(*update)


def _differ(before: Path, after: Path) -> bool:
    """True if two versions of the weights are there and have different bytes."""
    if not before.is_dir():
        return False
    names = [sorted(p.name for p in d.glob("*.safetensors")) for d in (before, after)]
    if names[0] != names[1]:
        return True
    return any(
        not filecmp.cmp(before / name, after / name, shallow=False) for name in names[0]
    )
