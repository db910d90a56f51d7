"""A stand-in for the Hub on this machine: the part of its API that pushing and loading need, in memory."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def at(self, revision: str) -> str | None:
        revision = self.branches.get(revision, revision)
        return revision if revision in self.commits else None


class HubStandIn:
    """Serves repositories over HTTP as long as the `with` block lasts.

    Attributes:
        repositories: By id, with every commit's files.
        requests: "METHOD path" of all requests so far.
        token: Where it is set, what a request must bring to see a private repository.
        url: For `HF_ENDPOINT`.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.token: str | None = None
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, folder: Path):
        """Make a repository that holds the files of a folder."""
        self.repositories[name] = Repository(private=False)
        self.repositories[name].commit("main", {path.name: path.read_bytes() for path in folder.iterdir()})

    def environment(self, folder) -> dict[str, str]:
        """Return the variables that make a process take this for the Hub, its caches in `folder`."""
        return {
            **{"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
            **{"HF_TOKEN": "hf_stand_in", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"},
            **{"TRANSFORMERS_OFFLINE": "0", "DISABLE_SAFETENSORS_CONVERSION": "1"},
        }


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(preupload|commit|branch|revision|tree)/(.+))?", path):
            return self.api(match[1], match[2] or "revision", match[3] or "main", body)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*match.groups())
        return self.send({"error": f"unknown to the stand-in: {path}"}, 404)

    do_HEAD = do_POST = do_GET

    def create(self, asked: dict):
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        if name in self.hub.repositories:
            return self.send({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(private))
        self.hub.repositories[name].commit("main", {".gitattributes": b""})
        return self.send({"url": f"{self.hub.url}/{name}", "name": name})

    def api(self, name: str, action: str, revision: str, body: bytes):
        repository = self.repository(name)
        if repository is None:
            return self.miss("Repo")
        if action == "branch":
            if revision in repository.branches:
                return self.send({"error": "exists"}, 409)
            repository.branches[revision] = repository.branches["main"]
            return self.send({})
        commit = repository.at(revision.split("/")[0])
        if commit is None:
            return self.miss("Revision")
        files = repository.commits[commit]
        if action == "preupload":
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return self.send({"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]})
        if action == "commit":
            return self.commit(repository, name, revision, dict(files), body)
        if action == "tree":
            return self.send([{"type": "file", "path": p, "size": len(c), "oid": _etag(c)} for p, c in files.items()])
        siblings = [{"rfilename": path} for path in sorted(files)]
        return self.send({"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []})

    def commit(self, repository: Repository, name: str, revision: str, files: dict[str, bytes], body: bytes):
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(revision, files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        return self.send({"success": True, "commitUrl": url, "commitOid": commit})

    def repository(self, name: str) -> Repository | None:
        """Return a repository, unless it is a private one and the request's token is not its owner's."""
        repository = self.hub.repositories.get(name)
        is_closed = repository is not None and repository.private and self.hub.token is not None
        return None if is_closed and self.headers.get("Authorization") != f"Bearer {self.hub.token}" else repository

    def resolve(self, name: str, revision: str, path: str):
        repository = self.repository(name)
        if repository is None:
            return self.miss("Repo")
        commit = repository.at(revision)
        if commit is None:
            return self.miss("Revision")
        content = repository.commits[commit].get(path)
        if content is None:
            return self.miss("Entry", {"X-Repo-Commit": commit})
        return self.send(content, 200, {"X-Repo-Commit": commit, "ETag": f'"{_etag(content)}"'})

    def miss(self, what: str, headers: dict[str, str] | None = None):
        self.send({"error": f"no such {what.lower()}"}, 404, {**(headers or {}), "X-Error-Code": f"{what}NotFound"})

    def send(self, content, status: int = 200, headers: dict[str, str] | None = None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
