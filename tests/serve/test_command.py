"""The command: options, the printed address, signals."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from jaxmem.commands import cli
from jaxmem.serve import command
from jaxmem.serve.config import ServeRequest
from tests.helpers import served, texts
from tests.helpers.served import send

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return texts.checkpoint("llama", tmp_path_factory.mktemp("models"))


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_server_ends_by_a_signal(directory, capfd, number, status):
    port, held = free_port(), []
    url = f"http://127.0.0.1:{port}"

    def stop():
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=60).close()
                break
            except OSError:
                time.sleep(0.05)
        # A request that waits is told so, and does not hold the end up.
        send(url, "/pause?mode=keep", {})
        waiting = threading.Thread(
            target=lambda: held.append(send(url, "/v1/completions", {"prompt": [5]}))
        )
        waiting.start()
        while not send(url, "/v1/models")[0] == 200:
            pass
        time.sleep(0.2)
        os.kill(os.getpid(), number)
        waiting.join()

    thread = threading.Thread(target=stop)
    thread.start()
    flags = f"--dtype float32 --port {port} --slots 3 --max-len 64 --name policy"
    try:
        got = cli.main(["serve", str(directory), *flags.split()])
    except SystemExit as error:
        got = error.code
    thread.join()
    assert got == status
    out, err = capfd.readouterr()
    assert out == f"jaxmem: serving policy at {url}\n"
    assert "stopping after requests in progress get the status 503; " in err
    assert held[0][0] == 503
    assert held[0][1]["error"]["message"] == "the server is stopping"
    with socket.socket() as sock:  # the port is free
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(port=70000), "--port must be from 0 to 65535, got 70000"),
        (dict(slots=0), "--slots must be at least 1, got 0"),
        (dict(max_len=1), "--max-len must be at least 2, got 1"),
        (dict(max_logprobs=-1), "--max-logprobs must be at least 0, got -1"),
        (dict(token="a b "), "--token, or $JAXMEM_ENGINE_TOKEN, must be ASCII"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError) as raised:
        ServeRequest("model", **options)
    assert str(raised.value).startswith(message)
    assert "a b" not in str(raised.value)


def test_max_len_is_bounded_by_the_model(directory):
    options = served.options(directory, max_len=10**6)
    with pytest.raises(ValueError, match=r"--max-len must be at most the [\d,]+ pos"):
        with command.served(options):
            pass


def test_model_without_experts_returns_none(directory):
    options = served.options(directory, enable_return_routed_experts=True)
    with pytest.raises(ValueError, match="has no experts; leave the option out"):
        with command.served(options):
            pass


def test_failure_of_the_first_completion_names_sizes(directory, monkeypatch):
    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("jaxmem.serve.decoding_loop.SlotPool", fail)
    with pytest.raises(ValueError) as raised, command.served(served.options(directory)):
        pass
    assert str(raised.value) == (
        "--slots 3 --max-len 64: decoding failed: RuntimeError: RESOURCE_EXHAUSTED: "
        "out of memory; if memory ran out, choose smaller ones"
    )


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (dict(host="0.0.0.0"), True),
        (dict(host="0.0.0.0", token="secret"), False),
        (dict(host="127.0.0.1"), False),
    ],
)
def test_open_server_without_a_token_is_warned_of(
    directory, monkeypatch, capsys, options, warns
):
    class Stopped(command.Stop):
        signal = 15

        def __init__(self, end):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @contextlib.contextmanager
        def deferred(self):
            yield

    monkeypatch.setattr(command, "Stop", Stopped)
    monkeypatch.delenv("JAXMEM_ENGINE_TOKEN", raising=False)
    command.run(served.options(directory, **options))
    error = capsys.readouterr().err
    assert ("everybody who reaches the port can sample, pause" in error) == warns


def test_address_in_use_is_named(directory):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        options = served.options(directory, port=port)
        with pytest.raises(ValueError) as raised, command.served(options):
            pass
    assert f"--host 127.0.0.1 --port {port}: Address already in use; choose" in str(
        raised.value
    )


def test_missing_folder_of_weights_is_named(directory, tmp_path):
    options = served.options(directory, weights=(str(tmp_path / "none"),))
    with pytest.raises(ValueError, match=r"--weights .*none: no such folder"):
        with command.served(options):
            pass


def test_token_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAXMEM_ENGINE_TOKEN", "secret")
    assert ServeRequest("model").secret == "secret"
    assert ServeRequest("model", token="other").secret == "other"


def test_options_are_documented(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    flags = {*re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out)}
    assert len(flags) > 12
    page = Path("docs/serve.md").read_text("utf-8")
    documented = {*re.findall(r"`(--[\w-]+)", page.partition("## Options")[2])}
    assert flags - {"--help", "--ignore-keys"} <= documented
    assert documented <= flags | {"--seed", "--logprobs-mode"}
