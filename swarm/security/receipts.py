"""What replicas sign for the work they did, so that a trainer cannot invent it."""

from __future__ import annotations

from swarm.ids import MicrobatchId


def receipt_bytes(run: str, step: int, microbatch: MicrobatchId, stage: int) -> bytes:
    """What a replica signs when it adds a microbatch's gradient to its open step."""
    return f"receipt|{run}|{step}|{'|'.join(map(str, microbatch))}|{stage}".encode()
