"""What this program logs, on the screen of the person who started a peer: in the columns of everything else there."""

from __future__ import annotations

import logging

from peers.event_words import harmless, labelled
from peers.voice import Speaker

_OURS = ("peers", "swarm", "data_shards")


class LogLines(logging.Handler):
    """Says warnings and errors of our own modules from :meth:`open` to :meth:`close`; others have their own ways."""

    def __init__(self, voice: Speaker) -> None:
        super().__init__(logging.WARNING)
        self._voice = voice

    def open(self) -> None:
        """From now on."""
        for name in _OURS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`. A traceback follows on lines of its own."""
        label = "error" if record.levelno >= logging.ERROR else "warning"  # libraries rename the levels
        self._voice.say(labelled(label, harmless(record.getMessage())))
        if record.exc_info:
            self._voice.say((self.formatter or logging.Formatter()).formatException(record.exc_info))

    def close(self) -> None:
        """No more. Idempotent."""
        for name in _OURS:
            logging.getLogger(name).removeHandler(self)
        super().close()
