"""The connection to the daemon over which hivemind's own calls go, as something that can be ended whole."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

from swarm.network.libp2p.lean import spare_init

spare_init()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit, at hivemind's import
    from hivemind.p2p.p2p_daemon_bindings import p2pclient
    from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE, ControlClient, DaemonConnector
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr

GONE = "the libp2p daemon is gone"


class DaemonClient(p2pclient.Client):  # type: ignore[misc]
    """hivemind's client. What it leaves open when it is cancelled, or waits for when the daemon is gone, ends here."""

    def __init__(self, control: HivemindMultiaddr) -> None:
        """``control`` is the daemon's socket. :meth:`attach` must follow."""
        super().__init__(_initialized_with_create=True)
        self._connector = _Connector(control)
        self._ended = False

    async def attach(self, client: HivemindMultiaddr) -> None:
        """Connect; the daemon will reach us at ``client``. Raises what :data:`swarm.network.libp2p.attach.LINK_ERRORS`
        names; then nothing is open."""
        try:
            self.control = await ControlClient.create(
                self._connector, client, persistent_conn_max_msg_size=DEFAULT_MAX_MSG_SIZE
            )
        except BaseException:
            self._connector.close()
            raise

    @property
    def alive(self) -> bool:
        """True if the daemon still holds its end of the connection, and we ours."""
        return not self._ended and not self.control._read_task.done()

    @property
    def handlers(self) -> dict[str, Any]:
        """hivemind's own calls that are served here, by name."""
        return dict(self.control.unary_handlers)

    def fail_pending(self) -> None:
        """Fail what waits for a daemon that is gone; hivemind would wait for ever."""
        for pending in list(self.control._pending_calls.values()):
            if not pending.done():
                pending.set_exception(P2PDaemonError(GONE))
                pending.exception()  # retrieved: the one who waited may just have been cancelled

    async def end(self) -> None:
        """Close every connection, end what is still handled for others. Idempotent. One that is told now that a call
        has failed may try the next one at once: nobody would ever answer that."""
        self._ended = True
        self.fail_pending()
        tasks = [task for task in (self.control._read_task, self.control._write_task) if task is not None]
        tasks += self.control._handler_tasks.values()
        for task in tasks:
            task.cancel()
        self._connector.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fail_pending()


class _Connector(DaemonConnector):  # type: ignore[misc]
    """hivemind's way to the daemon, remembering what it opened."""

    def __init__(self, control: HivemindMultiaddr) -> None:
        super().__init__(control)
        self._writers: list[asyncio.StreamWriter] = []

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See hivemind."""
        reader, writer = await super().open_connection()
        self._writers = [each for each in self._writers if not each.is_closing()]
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        """Close all that are open."""
        for writer in self._writers:
            writer.close()
