"""What a replica says of another's work that it computed again, and how many must say the same to prove somebody wrong.
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


def proves(agree: int, judges: int) -> bool:
    """Return whether so many that ``agree`` prove it, of so many ``judges``: more than half, and two at
    least."""
    return agree >= 2 and 2 * agree > judges
