"""What a replica says of a hop that it computed again, and how many must say the same to prove somebody wrong. Pure."""

from __future__ import annotations

from pydantic import ConfigDict

from swarm.schema import Message, PeerIdField, SignatureField


class HopStatement(Message):
    """What one replica found that computed a hop again: ``wrong`` or not, signed
    (:func:`~swarm.security.signing.audit_bytes`). Bytes are hex in files."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    auditor: PeerIdField
    wrong: bool
    signature: SignatureField


def proves(agree: int, judges: int) -> bool:
    """Return whether so many that ``agree`` prove it, of so many ``judges`` of the hop: more than half, and two at
    least."""
    return agree >= 2 and 2 * agree > judges
