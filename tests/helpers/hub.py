"""A stand-in for the Hugging Face Hub, which the Hub's own client talks to.

It serves repositories of models and data sets with their commits, asks for a token,
fails on demand, and takes pushes. Data sets go through the same paths.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

TOKEN = "hf_token_of_the_tests"
_PATHS = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
    r"(/(?P<verb>revision|tree|paths-info|preupload|commit)/(?P<revision>[^/]+)"
    r"(/(?P<folder>.+))?)?"
)
_FILE = re.compile(
    r"/(?P<data>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
)


@dataclasses.dataclass
class Repository:
    """The files of each commit, the oldest first, and who may read them."""

    commits: list[dict[str, bytes]] = dataclasses.field(default_factory=list)
    tags: dict[str, int] = dataclasses.field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def sha(self, index=-1):
        """The hash of a commit."""
        index %= len(self.commits)
        content = repr((index, sorted(self.commits[index].items())))
        return hashlib.sha1(content.encode()).hexdigest()

    def find(self, revision):
        """The index of a commit by hash, tag or "main"; None if there is none."""
        if revision == "main":
            return len(self.commits) - 1
        hashes = [self.sha(i) for i in range(len(self.commits))]
        if revision in hashes:
            return hashes.index(revision)
        return self.tags.get(revision)


class Hub:
    """The repositories of a server, by kind and name, and what it was asked.

    Attributes:
        url: of the server, for HF_ENDPOINT.
        requests: "METHOD path" of each request.
        down: True to answer each request by an error of the server.
    """

    def __init__(self):
        self.repositories = {}
        self.requests, self.down, self.url = [], False, ""

    def add(self, name, files, kind="models", **options):
        """Add a commit of files, a directory or contents by path; its hash."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {str(p.relative_to(files)): p.read_bytes() for p in paths}
        repository = self.repositories.setdefault((kind, name), Repository(**options))
        contents = {
            k: v.encode() if isinstance(v, str) else v for k, v in files.items()
        }
        repository.commits.append(contents)
        return repository.sha()

    def files(self, name, kind="models"):
        """The files of a repository's newest commit, by path, but .gitattributes."""
        files = self.repositories[kind, name].commits[-1]
        return {k: v for k, v in files.items() if k != ".gitattributes"}

    def asked(self, part):
        """The requests whose path contains a text."""
        return [request for request in self.requests if part in request]


@contextlib.contextmanager
def serve():
    """A `Hub` that answers at its `url`, in threads of this process."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub, monkeypatch, home):
    """Point the client of this process, and its children, to a server and a cache."""
    from huggingface_hub import constants

    cache = home / "hub"
    for name, value in {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url
        + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    return cache


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *arguments):
        """Print nothing."""

    def do_GET(self):
        """Answer a request for facts or for a file."""
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self):
        """Answer a request that has a body."""
        length = int(self.headers.get("Content-Length") or 0)
        self._body = self.rfile.read(length)
        self._answer(self._post)

    def _answer(self, answer):
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.down:
            return self._send(503, b"down")
        return answer(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path))

    def _get(self, path):
        if match := _FILE.fullmatch(path):
            kind = "datasets" if match["data"] else "models"
            repository, index = self._find(kind, match["name"], match["revision"])
            if repository is None:
                return
            content = repository.commits[index].get(match["path"])
            if content is None:
                return self._fail(404, "EntryNotFound")
            return self._send(
                200, content, "application/octet-stream",
                ETag=f'"{hashlib.sha1(content).hexdigest()}"',
                **{"X-Repo-Commit": repository.sha(index)},
            )  # fmt: skip
        if path == "/api/whoami-v2":
            return self._send_json({"name": "tester", "type": "user"})
        match = _PATHS.fullmatch(path)
        if not match:
            return self._send(404, b"")
        revision = match["revision"] or "main"
        repository, index = self._find(match["kind"], match["name"], revision)
        if repository is None:
            return
        contents = repository.commits[index]
        if match["verb"] == "tree":
            return self._send_json([*map(_entry, contents, contents.values())])
        self._send_json(
            {
                "id": match["name"], "sha": repository.sha(index), "tags": [],
                "private": repository.private, "downloads": 0, "likes": 0,
                "siblings": [{"rfilename": name} for name in contents],
            }
        )  # fmt: skip

    def _post(self, path):
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if not self._has_token():
            return self._fail(401, None, "Invalid username or password.")
        if path == "/api/repos/create":
            return self._create(json.loads(self._body))
        match = _PATHS.fullmatch(path)
        repository, index = self._find(match["kind"], match["name"], "main")
        if repository is None:
            return
        if match["verb"] == "preupload":
            asked = json.loads(self._body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in asked
            ]
            return self._send_json({"files": modes})
        if match["verb"] == "paths-info":
            wanted = dict(urllib.parse.parse_qsl(self._body.decode())).values()
            contents = repository.commits[index]
            return self._send_json(
                [_entry(p, contents[p]) for p in wanted if p in contents]
            )
        self._commit(match["name"], repository)

    def _create(self, asked):
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        key = f"{asked.get('type') or 'model'}s", name
        if key in self.hub.repositories:
            return self._send_json({"url": f"{self.hub.url}/{name}"}, 409)
        visibility = asked.get("private") or asked.get("visibility") == "private"
        first = {".gitattributes": b""}  # as the Hub makes repositories
        self.hub.repositories[key] = Repository([first], private=bool(visibility))
        self._send_json({"url": f"{self.hub.url}/{name}", "name": name})

    def _commit(self, name, repository):
        import base64

        contents = dict(repository.commits[-1])
        for line in self._body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                contents[value["path"]] = base64.b64decode(value["content"])
        repository.commits.append(contents)
        sha = repository.sha()
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self._send_json({"commitUrl": url, "commitOid": sha, "success": True})

    def _find(self, kind, name, revision):
        """The repository and the commit; (None, None) after an error was sent."""
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not self._has_token()):
            self._fail(401, "RepoNotFound", "Repository not found")
            return None, None
        if repository.gated and not self._has_token():
            self._fail(401, "GatedRepo", "Access to this model is restricted")
            return None, None
        index = repository.find(revision)
        if index is None:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None, None
        return repository, index

    def _has_token(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _fail(self, status, code, message=""):
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, b"", **headers, **{"X-Error-Message": message})

    def _send_json(self, value, status=200):
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status, content, kind="text/plain", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path, content):
    blob = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": blob}
