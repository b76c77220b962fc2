"""A Hub on this machine: real HTTP, repositories in memory, faults on demand.

It keeps what it is sent byte for byte, and makes a commit only of what has wholly arrived.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Optional
from urllib.parse import unquote, urlparse

TOKEN = "hf_" + "TheTokenOfTheTests0123456789abcd"
LARGE_BYTES = 50_000
"""Files above this, and all safetensors, go the way of large files."""


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"main": []})
    """By branch: sha, message, and the files that there are after it, by name."""

    def files(self, branch: str = "main") -> dict[str, bytes]:
        made = self.commits[branch]
        return made[-1]["files"] if made else {}


@dataclass
class Faults:
    """What goes wrong, and when.

    drop_put: numbers, from 1, of the uploads whose connection is cut in the middle. refuse_put: those answered with
    403. fail_commit, fail_create: statuses of the next answers to that request, 0 for a cut connection. lose_answer:
    the next commit is made, and its answer never sent. refuse_repo: name, and how many of its commits get 403.
    create_status: of every answer to a creation. stall_s: seconds without an answer to each of the next creations,
    whose connection is cut then.
    """

    drop_put: tuple[int, ...] = ()
    refuse_put: tuple[int, ...] = ()
    fail_commit: list[int] = field(default_factory=list)
    fail_create: list[int] = field(default_factory=list)
    lose_answer: bool = False
    refuse_repo: tuple[str, int] = ("", 0)
    create_status: Optional[int] = None
    stall_s: list[float] = field(default_factory=list)


class Hub:
    """``requests``: (method, path) in their order. ``puts``: sizes of the uploads that were begun."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.puts: list[int] = []
        self.cards: list[str] = []
        self.faults = Faults()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def environment(self, home: Path, token: Optional[str] = TOKEN) -> dict[str, str]:
        """Of a process that is to take this for the Hub; they count before huggingface_hub is imported."""
        found = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return found if token is None else {**found, "HF_TOKEN": token}


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._serve("GET")

        def do_HEAD(self) -> None:
            self._serve("HEAD")

        def do_POST(self) -> None:
            self._serve("POST")

        def do_PUT(self) -> None:
            self._serve("PUT")

        def _serve(self, method: str) -> None:
            self.path = unquote(urlparse(self.path).path)
            with hub.lock:
                hub.requests.append((method, self.path))
            if method == "PUT":
                return self._put()
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = self._chunked()
            for pattern, verb, answer in ROUTES:
                found = re.fullmatch(pattern, self.path)
                if found and method in verb:
                    if answer is not _resolve and not self._is_allowed():
                        return self.reply(401, {"error": "Invalid username or password."})
                    return answer(self, hub, body, *found.groups())
            return self.reply(404, {"error": f"no route {self.path}"})

        def _is_allowed(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def _chunked(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _put(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            with hub.lock:
                hub.puts.append(size)
                number = len(hub.puts)
            if number in hub.faults.drop_put:
                self.rfile.read(size // 2)
                return self.cut()
            body = self._chunked() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(size)
            if number in hub.faults.refuse_put:
                return self.reply(403, {"error": "no room"})
            oid = hashlib.sha256(body).hexdigest()
            if oid != self.path.rpartition("/")[2]:
                return self.reply(400, {"error": "torn"})
            hub.blobs[oid] = body
            return self.reply(200, {})

        def cut(self) -> None:
            self.close_connection = True
            self.connection.close()

        def reply(self, status: int, content: Any, headers: Optional[dict[str, str]] = None) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


# -- what is asked -----------------------------------------------------------------------------------------------------


def _fails(handler: Any, kinds: list[int]) -> bool:
    if not kinds:
        return False
    status = kinds.pop(0)
    handler.cut() if status == 0 else handler.reply(status, {"error": "not now"})
    return True


def _create(handler: Any, hub: Hub, body: bytes) -> None:
    if hub.faults.stall_s:
        time.sleep(hub.faults.stall_s.pop(0))
        return handler.cut()
    if _fails(handler, hub.faults.fail_create):
        return None
    if hub.faults.create_status:
        return handler.reply(hub.faults.create_status, {"error": "You don't have the rights"})
    asked = json.loads(body)
    name = f"{asked['organization'] or 'me'}/{asked['name']}"
    url = {"url": f"{hub.url}/{name}", "id": name}
    if name in hub.repos:
        return handler.reply(409, {"error": "You already created this model repo", **url})
    hub.repos[name] = Repo(asked.get("visibility") == "private")
    return handler.reply(200, url)


def _branch(handler: Any, hub: Hub, body: bytes, repo: str, branch: str) -> None:
    commits = hub.repos[repo].commits
    if branch in commits:
        return handler.reply(409, {"error": "Reference already exists"})
    commits[branch] = list(commits["main"])
    return handler.reply(200, {})


def _may_write(handler: Any, hub: Hub, body: bytes, repo: str) -> None:
    if repo not in hub.repos:
        return handler.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
    status = hub.faults.create_status
    return handler.reply(status or 200, {"error": "You don't have the rights"} if status else {})


def _who(handler: Any, hub: Hub, body: bytes) -> None:
    handler.reply(200, {"type": "user", "name": "me"})


def _card(handler: Any, hub: Hub, body: bytes) -> None:
    content = json.loads(body)["content"]
    hub.cards.append(content)
    base = re.search(r"^base_model: (.*)$", content, re.MULTILINE)
    if base and not re.fullmatch(r"[\w.-]+/[\w.-]+", base[1]):
        return handler.reply(400, {"errors": [{"message": f'"base_model" with value "{base[1]}" is not valid'}]})
    return handler.reply(200, {"errors": [], "warnings": []})


def _preupload(handler: Any, hub: Hub, body: bytes, repo: str, branch: str) -> None:
    if branch not in hub.repos[repo].commits:
        return handler.reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
    there = hub.repos[repo].files(branch)
    answers = []
    for asked in json.loads(body)["files"]:
        name = asked["path"]
        is_large = name.endswith((".safetensors", ".pt", ".bin", ".pth")) or asked["size"] > LARGE_BYTES
        answer = {"path": name, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
        if name in there:
            answer["oid"] = hashlib.sha256(there[name]).hexdigest() if is_large else _git_hash(there[name])
        answers.append(answer)
    handler.reply(200, {"files": answers})


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _batch(handler: Any, hub: Hub, body: bytes, repo: str) -> None:
    objects = []
    for asked in json.loads(body)["objects"]:
        entry = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in hub.blobs:
            entry["actions"] = {"upload": {"href": f"{hub.url}/blob/{asked['oid']}?signature=secret"}}
        objects.append(entry)
    handler.reply(200, {"transfer": "basic", "objects": objects})


def _commit(handler: Any, hub: Hub, body: bytes, repo: str, branch: str) -> None:
    if _fails(handler, hub.faults.fail_commit):
        return None
    refused, count = hub.faults.refuse_repo
    if repo == refused and count:
        hub.faults.refuse_repo = (refused, count - 1)
        return handler.reply(403, {"error": "not this one"})
    commits = hub.repos[repo].commits[branch]
    lines = [json.loads(line) for line in body.splitlines() if line]
    files = dict(hub.repos[repo].files(branch))
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "lfsFile":
            if value["oid"] not in hub.blobs:
                return handler.reply(400, {"error": f"{value['path']} has not arrived"})
            files[value["path"]] = hub.blobs[value["oid"]]
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    sha = hashlib.sha1(f"{len(commits)}{sorted(files)}".encode()).hexdigest()
    commits.append({"sha": sha, "message": lines[0]["value"]["summary"], "files": files})
    if hub.faults.lose_answer:
        hub.faults.lose_answer = False
        return handler.cut()
    return handler.reply(200, {"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha})


def _info(handler: Any, hub: Hub, body: bytes, repo: str, branch: Optional[str] = None) -> None:
    if repo not in hub.repos:
        return handler.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
    found = hub.repos[repo]
    made = found.commits[branch or "main"]
    names = [{"rfilename": name} for name in found.files(branch or "main")]
    content = {"id": repo, "private": found.private, "sha": made[-1]["sha"] if made else "0" * 40, "siblings": names}
    return handler.reply(200, {**content, "tags": [], "downloads": 0, "likes": 0})


def _tree(handler: Any, hub: Hub, body: bytes, repo: str, branch: str) -> None:
    found = hub.repos[repo]
    made = next((c for commits in found.commits.values() for c in commits if c["sha"] == branch), None)
    files = made["files"] if made else found.files(branch)
    entries = [
        {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
        for name, content in files.items()
    ]
    handler.reply(200, entries)


def _no_folder(handler: Any, hub: Hub, body: bytes, repo: str, branch: str, folder: str) -> None:
    handler.reply(404, {"error": f"no folder {folder}"}, {"X-Error-Code": "EntryNotFound"})


def _resolve(handler: Any, hub: Hub, body: bytes, repo: str, branch: str, name: str) -> None:
    found = hub.repos.get(repo)
    if found is None:
        return handler.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
    made = next((c for commits in found.commits.values() for c in commits if c["sha"] == branch), None)
    files = made["files"] if made else found.files(branch) if branch in found.commits else {}
    if name not in files:
        return handler.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
    content = files[name]
    sha = made["sha"] if made else found.commits[branch][-1]["sha"]
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
    return handler.reply(200, content, headers)


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"/api/repos/create", ("POST",), _create),
    (r"/api/validate-yaml", ("POST",), _card),
    (r"/api/whoami-v2", ("GET",), _who),
    (rf"/api/models/{REPO}/auth-check/write", ("GET",), _may_write),
    (rf"/api/models/{REPO}/branch/(.+)", ("POST",), _branch),
    (rf"/api/models/{REPO}/preupload/(.+)", ("POST",), _preupload),
    (rf"/api/models/{REPO}/commit/(.+)", ("POST",), _commit),
    (rf"/{REPO}\.git/info/lfs/objects/batch", ("POST",), _batch),
    (rf"/api/models/{REPO}/tree/([^/]+)", ("GET",), _tree),
    (rf"/api/models/{REPO}/tree/([^/]+)/(.+)", ("GET",), _no_folder),
    (rf"/api/models/{REPO}/revision/(.+)", ("GET",), _info),
    (rf"/api/models/{REPO}", ("GET",), _info),
    (rf"/{REPO}/resolve/([^/]+)/(.+)", ("GET", "HEAD"), _resolve),
]
