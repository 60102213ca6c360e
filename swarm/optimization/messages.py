"""The ``step/1`` protocol: leases, completions, and the four questions with which a leader closes a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.optimization.changes import NO_CHANGES, Changes
from swarm.optimization.records import CloseRecord, Contribution
from swarm.schema import Count, DigestField, Finite, Message, PeerIdField, SignatureField


class Lease(Message):
    """A trainer wants ``total`` microbatches of a step in all."""

    step: Count
    total: Count


class Leased(Message):
    """What is leased to the trainer in all, and why not more."""

    total: Count
    reason: Annotated[str, StringConstraints(max_length=200)]


class Complete(Message):
    """A journey came home; ``receipts`` are the replicas' signatures in the order of the stages."""

    step: Count
    contribution: Contribution
    receipts: Annotated[tuple[SignatureField, ...], Field(max_length=1024)]


class Reconcile(Message):
    """The batch is complete: this is what counts. Check that you hold it, and average."""

    step: Count
    committed: tuple[Contribution, ...]


class Averaged(Message):
    """The group's result as this member has it. ``digest`` is empty for a peer that holds no part."""

    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16,64})?$")]
    sq_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    cursor: tuple[Count, Count] | None


class Apply(Message):
    """The scalars of the step: compute the update into a shadow copy."""

    step: Count
    lr: Finite
    clip: Finite


class Prepared(Message):
    """Digest of the shadow: parameters and optimizer state. Empty for a peer that holds no part."""

    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16,64})?$")]


class Propose(Message):
    """The close record, and the signed requests that explain its roster. For step 0 it is the genesis: install your
    part before you accept."""

    record: CloseRecord
    changes: Changes = NO_CHANGES


class Accepted(Message):
    """A signature over :func:`~swarm.optimization.records.acceptance_bytes`."""

    signature: SignatureField


class Decide(Message):
    """Everybody accepted: swap. The signatures prove it."""

    step: Count
    record: DigestField
    acceptances: dict[PeerIdField, SignatureField]
