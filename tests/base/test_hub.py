"""Names of models of the Hub, and local copies of their files."""

import sys
from concurrent import futures
from pathlib import Path

import pytest

from jaxmem.base import files, hub
from tests.helpers import hub as stand_in

FILES = {
    "config.json": "{}", "tokenizer.json": "{}", "model.safetensors": b"weights",
    "chat_template.jinja": "t", "additional_chat_templates/a.jinja": "a",
    "pytorch_model.bin": b"pickled", "README.md": "card",
    "original/model.safetensors": b"copy", "consolidated.safetensors": b"copy",
}  # fmt: skip
READ = {
    "config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja",
    "additional_chat_templates/a.jinja",
}  # fmt: skip


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with stand_in.serve() as server:
        stand_in.use(server, monkeypatch, tmp_path / "home")
        yield server


def told(capfd):
    """Lines of jaxmem on stderr, where huggingface_hub may warn as well."""
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("jaxmem: ")]


def names_in(directory):
    paths = Path(directory).rglob("*")
    return {str(p.relative_to(directory)) for p in paths if not p.is_dir()}


def fault(name):
    with pytest.raises(hub.HubError) as raised:
        hub.local_directory(name)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-0.6B", hub.HubModel("Qwen/Qwen3-0.6B")),
        ("Qwen/Q@v1.0", hub.HubModel("Qwen/Q", "v1.0")),
        ("hf://Qwen/Q", hub.HubModel("Qwen/Q")),
        ("hf://Qwen/Q@refs/pr/1", hub.HubModel("Qwen/Q", "refs/pr/1")),
        ("hf://here/m", hub.HubModel("here/m")),
        ("runs/sft", None), ("here/m", None), ("here/other", None), ("here", None),
        ("./Qwen/Q", None), ("~/Qwen/Q", None), ("/Qwen/Q", None), ("a/b/c", None),
    ],
)  # fmt: skip
def test_parse_tells_models_from_paths(text, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "m").mkdir(parents=True)
    assert hub.parse(text) == model
    assert model is None or hub.parse(str(model)) == model


def test_parse_refuses_other_addresses():
    with pytest.raises(
        hub.HubError, match="write a model of the Hub as hf://OWNER/NAME or"
    ):
        hub.parse("hf://datasets/owner/name")


def test_directory_fetches_what_is_read(server, capfd):
    sha = server.add("owner/m", FILES)
    copy = hub.local_directory("owner/m")
    assert names_in(copy) == READ and copy.endswith(sha)
    (line,) = told(capfd)
    assert line == (
        f"jaxmem: downloading hf://owner/m@{sha[:12]} (5 files, 0.0 MB) to "
        f"{copy.split('/models--')[0]}"
    )
    asked = len(server.requests)
    assert hub.local_directory(f"hf://owner/m@{sha}") == copy
    assert len(server.requests) == asked  # a commit never changes
    (line,) = told(capfd)
    assert line == f"jaxmem: hf://owner/m@{sha[:12]} is in the cache, {copy}"
    assert hub.local_directory("owner/m", tells_cached=False) == copy
    assert not told(capfd)


def test_directory_fetches_no_weights_for_a_config(server):
    server.add("owner/m", FILES)
    copy = hub.local_directory("owner/m", hub.CONFIG)
    assert names_in(copy) == {"config.json"}
    assert hub.local_directory("owner/m") == copy and names_in(copy) == READ


def test_directory_is_that_of_its_revision(server):
    old = server.add("owner/m", FILES, tags={"v1": 0})
    new = server.add("owner/m", {**FILES, "model.safetensors": b"newer"})
    for name, sha in (("@v1", old), (f"@{old}", old), ("", new), ("@main", new)):
        copy = hub.local_directory(f"owner/m{name}")
        assert hub.model_of(copy) == hub.HubModel("owner/m", sha)
        assert hub.recorded(copy) == f"hf://owner/m@{sha}"


def test_recorded_is_the_path_of_other_directories(tmp_path):
    assert hub.recorded(str(tmp_path)) == str(tmp_path)
    assert hub.model_of("models--a--b/snapshots/main") is None


def test_directory_names_what_is_missing(server):
    server.add("owner/m", FILES)
    server.add("owner/gguf", {"m.gguf": b"w"})
    server.add("owner/bin", {"config.json": "{}", "pytorch_model.bin": b"w"})
    assert "is neither a directory nor a public model of the Hub" in fault("owner/none")
    assert "the Hub has no revision 'v2' of this model" in fault("owner/m@v2")
    assert "has neither config.json nor adapter_config.json" in fault("owner/gguf")
    assert "has no model.safetensors" in fault("owner/bin")


def test_directory_of_a_private_model_needs_a_token(server, monkeypatch):
    server.add("owner/private", FILES, private=True)
    server.add("owner/gated", FILES, gated=True)
    assert fault("owner/private").endswith("variable HF_TOKEN if the model is private")
    page = f"{server.url}/owner/gated"
    assert f"is gated; accept its terms at {page}, and log in" in fault("owner/gated")
    monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
    assert names_in(hub.local_directory("owner/private")) == READ
    assert names_in(hub.local_directory("owner/gated")) == READ


def test_directory_is_read_from_the_cache_in_an_outage(server, capfd):
    server.add("owner/m", FILES)
    copy = hub.local_directory("owner/m")
    hub.local_directory("owner/m@main", hub.CONFIG)
    capfd.readouterr()
    server.down = True
    assert hub.local_directory("owner/m") == copy
    assert "the Hub cannot be reached (" in capfd.readouterr().err
    said = fault("owner/other@v1")
    assert "the Hub cannot be reached (" in said and "503" in said
    assert "run `hf download owner/other --revision v1` on a machine" in said
    assert said.endswith("set HF_HUB_OFFLINE=1")


def test_directory_names_why_the_hub_cannot_be_reached(server, monkeypatch):
    closed = "http://127.0.0.1:9"  # nobody listens there
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed)
    assert "cannot be reached ([Errno 111] Connection refused)" in fault("owner/m")


def test_directory_is_read_from_the_cache_offline(server, monkeypatch, capfd):
    server.add("owner/m", FILES)
    server.add("owner/half", FILES)
    copy = hub.local_directory("owner/m")
    hub.local_directory("owner/half", hub.TEXT)
    capfd.readouterr()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(server.requests)
    assert hub.local_directory("owner/m") == copy
    assert "is in the cache" in capfd.readouterr().err
    for name in ("owner/other", "owner/half"):
        assert "HF_HUB_OFFLINE=1 is set, and" in fault(name)
    assert len(server.requests) == asked


def test_directory_needs_room_on_the_disk(server, monkeypatch):
    server.add("owner/m", FILES)
    monkeypatch.setattr(files, "free_bytes", lambda path: 3)
    said = fault("owner/m")
    assert "full (0.0 MB are needed, 0.0 MB free); free some space, or set HF_" in said


def test_directory_needs_the_library(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "needs 'huggingface_hub', which is not installed; run: pip" in fault("a/b")


def test_directory_is_downloaded_once_at_a_time(server, capfd):
    server.add("owner/m", FILES)
    with futures.ThreadPoolExecutor(4) as pool:  # each opens the lock, as processes do
        copies = [*pool.map(hub.local_directory, ["owner/m"] * 4)]
    assert len({*copies}) == 1
    assert capfd.readouterr().err.count("downloading") == 1


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory to push, and a token."""
    monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
    (tmp_path / "made").mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "made" / name).write_text(name)
    return tmp_path / "made"


def refused(directory, name, **options):
    with pytest.raises(hub.HubError) as raised:
        hub.push(directory, name, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("private", [False, True])
def test_push_makes_a_repository(private, server, model, capfd):
    address = hub.push(model, "me/new", private=private)
    assert address == f"{server.url}/me/new"
    assert server.files("me/new") == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    assert server.repositories["models", "me/new"].private is private
    line = f"jaxmem: uploading {model} (0.0 MB) to {address}"
    assert line in capfd.readouterr().err


def test_push_keeps_a_card_of_the_user(server, model, capfd):
    server.add("me/m", {"README.md": "mine", "config.json": "old"})
    hub.push(model, "me/m", is_own=lambda path: path.read_text() != "mine")
    files = server.files("me/m")
    assert files["README.md"] == b"mine" and files["config.json"] == b"config.json"
    assert "me/m keeps its README.md, which jaxmem did not" in capfd.readouterr().err
    server.add("me/other", {"README.md": "ours"})
    hub.push(model, "me/other", is_own=lambda path: path.read_text() != "mine")
    assert server.files("me/other")["README.md"] == b"README.md"


def test_push_refuses_what_would_mix_or_show_models(server, model):
    server.add("me/m", {"model-00001-of-00002.safetensors": b"", "README.md": b""})
    said = refused(model, "me/m")
    assert "contains files of another model on the Hub" in said
    assert "(model-00001-of-00002.safetensors)" in said
    server.add("me/public", {})
    assert "me/public is public on the Hub" in refused(model, "me/public", private=True)
    assert not server.files("me/public") and len(server.files("me/m")) == 2


def test_push_needs_a_name_and_a_token(server, model, monkeypatch):
    assert "pushed to OWNER/NAME, got 'name'" in refused(model, "name")
    server.down = True
    assert "me/m: the Hub cannot be reached (" in refused(model, "me/m")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    server.down = False
    assert "me/m: the Hub refuses the upload (401): log in" in refused(model, "me/m")
    monkeypatch.delenv("HF_TOKEN")
    assert "me/m: uploading needs a token: log in with `hf" in refused(model, "me/m")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "nothing is uploaded with HF_HUB_OFFLINE=1" in refused(model, "me/m")
