"""What a replica says of another's work that it computed again, and how many must say the same to decide who is wrong.
Pure."""

from __future__ import annotations

from pydantic import ConfigDict

from swarm.schema import Message, PeerIdField, SignatureField


class AuditStatement(Message):
    """What one replica found that computed again what another did: ``wrong`` or not, signed (a hop as
    :func:`~swarm.security.signing.audit_bytes` says, averaging as :func:`~swarm.security.signing.averaging_bytes`).
    Bytes are hex in files."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    auditor: PeerIdField
    wrong: bool
    signature: SignatureField


def found_wrong(wrong: int, right: int, judges: int) -> bool | None:
    """Return whether the work is wrong, None where so many words of its ``judges`` decide nothing. It is wrong where
    more than half of them say so, two at least; right where half of them do, for who did it says so as well."""
    if wrong >= 2 and 2 * wrong > judges:
        return True
    return False if right and 2 * right >= judges else None
