"""A local stand-in for the metadata servers of AWS, GCP and Azure: as strict about headers as they are, and as slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

AWS_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
AWS_TOKEN = "X-aws-ec2-metadata-token"


@dataclass
class Metadata:
    """What the server knows; tests change it while it runs. ``seen`` are (method, path without query) of all requests.

    ``date`` is what it believes the time to be, in seconds since the Unix epoch; None: as this machine.
    """

    cloud: str
    url: str = ""
    date: float | None = None
    seen: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    granted: str = "21600"
    action: dict[str, Any] | None = None
    rebalance: dict[str, Any] | None = None
    preempted: bool = False
    etag: int = 1
    machine: str = "pool_3"
    events: list[dict[str, Any]] = field(default_factory=list)
    first_answer: threading.Event | None = None
    """Azure: the first request for events is held until this is set."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    closing: bool = False

    def preempt(self) -> None:
        """GCP: take the machine back; requests that wait for a change are answered."""
        with self.changed:
            self.preempted, self.etag = True, self.etag + 1
            self.changed.notify_all()

    def asked(self, path: str) -> int:
        """How often ``path`` was asked for."""
        return sum(seen == path for _, seen in self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    metadata: Metadata

    def do_GET(self) -> None:
        self._route("GET")

    def do_PUT(self) -> None:
        self._route("PUT")

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.metadata.date, usegmt=True)

    def _route(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.metadata.seen.append((method, parts.path))
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        getattr(self, f"_{self.metadata.cloud}")(method, parts.path, query)

    def _aws(self, method: str, path: str, query: Mapping[str, str]) -> None:
        known = self.metadata
        if (method, path) == ("PUT", "/latest/api/token"):
            if not (self.headers.get(AWS_TTL) or "").isdigit():
                return self._say(400, "Bad Request")
            known.tokens.append(f"token-{len(known.tokens)}==")
            return self._say(200, known.tokens[-1], {AWS_TTL: known.granted})
        if method != "GET":
            return self._say(405, "")
        if not known.tokens or self.headers.get(AWS_TOKEN) != known.tokens[-1]:
            return self._say(401, "Unauthorized")
        document = {
            "/latest/meta-data/spot/instance-action": known.action,
            "/latest/meta-data/events/recommendations/rebalance": known.rebalance,
        }.get(path)
        return self._say(404, "Not Found") if document is None else self._say(200, json.dumps(document))

    def _gcp(self, method: str, path: str, query: Mapping[str, str]) -> None:
        known, mine = self.metadata, {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if method != "GET":
            return self._say(405, "", mine)
        if self.headers.get("Metadata-Flavor") != "Google" or self.headers.get("X-Forwarded-For"):
            return self._say(403, "Missing Metadata-Flavor:Google header.", mine)
        if path == "/computeMetadata/v1/instance/id":
            return self._say(200, "4520031799277581759", mine)
        if path != "/computeMetadata/v1/instance/preempted":
            return self._say(404, "<!DOCTYPE html>", mine)
        with known.changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag", str(known.etag)) == str(known.etag):
                before = known.etag
                known.changed.wait_for(
                    lambda: known.etag != before or known.closing, timeout=float(query.get("timeout_sec", "300"))
                )
            said, etag = "TRUE" if known.preempted else "FALSE", str(known.etag)
        return self._say(200, said, mine | {"ETag": etag})

    def _azure(self, method: str, path: str, query: Mapping[str, str]) -> None:
        known = self.metadata
        if method != "GET":
            return self._say(405, "")
        if (self.headers.get("Metadata") or "").lower() != "true" or "api-version" not in query:
            return self._say(400, json.dumps({"error": "Bad request. Required metadata header not specified"}))
        if path == "/metadata/instance/compute":
            document = {"name": known.machine, "vmId": "02aab8a4-74ef-476e-8182-f6d2ba4166a6", "priority": "Spot"}
            return self._say(200, json.dumps(document))
        if path != "/metadata/scheduledevents":
            return self._say(404, "")
        if known.first_answer is not None:
            known.first_answer.wait(30)
            known.first_answer = None
        return self._say(200, json.dumps({"DocumentIncarnation": len(known.events), "Events": known.events}))

    def _say(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            if name != "Server":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def metadata_server(cloud: str) -> Iterator[Metadata]:
    """Serve on a free port of loopback; every thread has ended afterwards."""
    known = Metadata(cloud)
    handler = type("Handler", (_Handler,), {"metadata": known})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield known
    finally:
        with known.changed:
            known.closing = True
            known.changed.notify_all()
        if known.first_answer is not None:
            known.first_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def azure_event(kind: str, *resources: str, not_before: str = "", status: str = "Scheduled") -> dict[str, Any]:
    """A scheduled event as Azure writes it; ``not_before`` is empty once it has started."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": status,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
