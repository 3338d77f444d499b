"""A small hub on the loopback interface: the requests that huggingface_hub makes, and its faults.

It serves model info, file trees and files with ETag, size and range; it can ask for a token, be
gated, cut a connection in mid-file or answer with an error, and it remembers what was asked.
"""

import hashlib
import json
import socket
import threading
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "hf_right"


@dataclass
class Repository:
    """One model on the hub.

    Attributes:
        commits: Commit -> file name -> bytes.
        branches: Branch or tag -> commit.
        private: Whether only TOKEN sees that it is there.
        gated: Whether only TOKEN reads files other than the model card.
    """

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    private: bool = False
    gated: bool = False


@dataclass
class HubServer:
    """A hub in a thread of its own.

    Attributes:
        repositories: Hub id -> model.
        cuts: File name -> bytes after which the connection is cut, once for each entry.
        status: Answer to everything, if it is not None.
        requests: Method and path of each request, in order.
        bytes_sent: File name -> bytes of its content sent.
        ranges: File name -> first byte of each request that did not start at 0.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    status: int | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, list[int]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, model: str, files: dict[str, bytes], **settings: Any) -> str:
        """Publish a model with one commit, at its branch main; returns the commit."""
        commit = commit_of(model)
        self.repositories[model] = Repository({commit: files}, {"main": commit}, **settings)
        return commit

    def downloaded(self) -> set[str]:
        """Return the files of which anything was sent."""
        return set(self.bytes_sent)


def commit_of(text: str) -> str:
    """Return 40 hexadecimal digits, as commits have."""
    return hashlib.sha1(text.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server_state
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        if hub.status is not None:
            self._refuse(hub.status)
            return
        is_api = path.startswith("/api/models/")
        model, action, rest = self._split(path.removeprefix("/api/models") if is_api else path)
        repository = hub.repositories.get(model)
        token = self.headers.get("Authorization")
        if token is not None and token != f"Bearer {TOKEN}":
            self._refuse(401, message="Invalid credentials in Authorization header")
        elif repository is None or (repository.private and token is None):
            # The hub does not tell a stranger which of the two it is.
            self._refuse(404 if token else 401, "RepoNotFound")
        else:
            revision, _, file = rest.partition("/")
            commit = repository.branches.get(revision or "main", revision)
            if commit not in repository.commits:
                self._refuse(404, "RevisionNotFound")
            elif not is_api:
                self._file(repository, commit, file, with_body=with_body)
            elif action == "tree":
                self._json(_tree(repository.commits[commit]))
            else:
                self._json(_info(model, commit, repository))

    def _split(self, path: str) -> tuple[str, str, str]:
        """Return the model, what is asked about it, and the rest of the path."""
        for action in ("revision", "tree", "resolve"):
            model, found, rest = path.strip("/").partition(f"/{action}/")
            if found:
                return model, action, rest
        return path.strip("/"), "", ""

    def _file(self, repository: Repository, commit: str, name: str, *, with_body: bool) -> None:
        if repository.gated and name != "README.md" and "Authorization" not in self.headers:
            self._refuse(401, "GatedRepo")
            return
        content = repository.commits[commit].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        requested = self.headers.get("Range")
        start = int(requested.removeprefix("bytes=").partition("-")[0]) if requested else 0
        self.send_response(206 if requested else 200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Linked-ETag", f'"{_etag(content)}"')
        self.send_header("Content-Length", str(len(content) - start))
        if requested:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if with_body:
            self._send(name, content, start)

    def _send(self, name: str, content: bytes, start: int) -> None:
        hub = self.server_state
        if start:
            hub.ranges.setdefault(name, []).append(start)
        cuts = hub.cuts.get(name)
        end = min(start + cuts.pop(0), len(content)) if cuts else len(content)
        hub.bytes_sent[name] += end - start
        self.wfile.write(content[start:end])
        if end < len(content):
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str | None = None, *, message: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if message is not None:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _etag(content)[:40]}
        for name, content in files.items()
    ]


def _info(model: str, commit: str, repository: Repository) -> dict[str, Any]:
    files = repository.commits[commit]
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    facts = {"private": repository.private, "gated": repository.gated, "tags": []}
    return {"id": model, "modelId": model, "sha": commit, "siblings": siblings, **facts}
