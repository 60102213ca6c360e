"""How Google says that it takes a machine back.

Source: Compute Engine documentation, "Preemptible VM instances" and "Query VM metadata" (waiting for changes).
"""

from __future__ import annotations

from urllib.parse import quote

from peers.preemption.http import ANSWER_S, Answer, MetadataServer
from peers.preemption.source import Notice, SourceFailed


class GcpSource:
    """Compute Engine: instance/preempted, by a request that the server keeps until the value changes."""

    name = "GCP"
    pause_s = 1.0
    LEFT_S = 30.0
    """What Google gives a machine from the notice to its end; it is not told when the notice was."""
    HELD_S = 10
    """How long the server may keep a request; short, so that one that hangs is noticed well within LEFT_S."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._etag = "0"

    async def is_here(self) -> bool:
        """See :class:`~peers.preemption.clouds.CloudSource`: the header that tells Google's server from others."""
        try:
            return (await self._get("/computeMetadata/v1/instance/id", ANSWER_S)).successful().body.strip().isdigit()
        except SourceFailed:
            return False

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.source.NoticeSource`. Takes HELD_S seconds while nothing changes."""
        held = f"wait_for_change=true&timeout_sec={self.HELD_S}&last_etag={quote(self._etag, safe='')}"
        path = f"/computeMetadata/v1/instance/preempted?{held}"
        answer = (await self._get(path, self.HELD_S + ANSWER_S)).successful()
        # Without an etag the server would answer at the next change only, and miss one between two requests.
        self._etag = answer.header("ETag")[:64] or "0"
        match answer.body.strip().upper():
            case b"TRUE":
                return Notice(left_s=self.LEFT_S)
            case b"FALSE":
                return None
            case _:
                raise SourceFailed("instance/preempted is neither TRUE nor FALSE")

    async def _get(self, path: str, timeout_s: float) -> Answer:
        answer = await self._server.ask(path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if answer.header("Metadata-Flavor") != "Google":
            raise SourceFailed("it does not say that it is Google's metadata server")
        return answer
