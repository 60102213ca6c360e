"""Which caller may call which method, in a run that not everybody may join. One table, and nothing besides it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class CallerAccess(IntEnum):
    """What a caller is to us. Each may do what those before it may."""

    STRANGER = 0
    """It knows an address, or the run's id."""
    OBSERVER = 1
    """Its credential lets it look."""
    JOINER = 2
    """Its credential lets it become a member; so are issuers."""
    MEMBER = 3
    """The newest record that is known here names it."""
    VOTER = 4
    """A member that may vote on steps, and lead them; the founder, before there is a record."""


METHODS: Mapping[str, CallerAccess] = {
    # What anyone who knows the run's id may ask, which is no more than a run's settings (see ManifestService).
    "manifest/1/get": CallerAccess.STRANGER,
    "reach/1/dialback": CallerAccess.STRANGER,
    "admit/1/present": CallerAccess.STRANGER,
    # What relays of no run answer, and say to the peers that they relay for, who check that they are theirs.
    "relay/1/dialback": CallerAccess.STRANGER,
    "relay/1/slot": CallerAccess.STRANGER,
    "relay/1/guests": CallerAccess.STRANGER,
    "relay/1/closing": CallerAccess.STRANGER,
    # Looking on.
    "observe/1/standing": CallerAccess.OBSERVER,
    "observe/1/hash": CallerAccess.OBSERVER,
    "observe/1/back": CallerAccess.OBSERVER,
    "observe/1/start": CallerAccess.OBSERVER,
    "observe/1/next": CallerAccess.OBSERVER,
    "vitals/1/standing": CallerAccess.OBSERVER,
    "health/1/ping": CallerAccess.OBSERVER,
    "reach/1/probe": CallerAccess.OBSERVER,
    # Coming in, and fetching what a run has learned.
    "observe/1/ahead": CallerAccess.JOINER,
    "observe/1/stay": CallerAccess.JOINER,
    "observe/1/leave": CallerAccess.JOINER,
    "state/1/describe": CallerAccess.JOINER,
    "state/1/chunk": CallerAccess.JOINER,
    "frozen/1/describe": CallerAccess.JOINER,
    "frozen/1/chunk": CallerAccess.JOINER,
    "checkpoint/1/list": CallerAccess.JOINER,
    "checkpoint/1/record": CallerAccess.JOINER,
    "checkpoint/1/describe": CallerAccess.JOINER,
    "checkpoint/1/chunk": CallerAccess.JOINER,
    "health/1/heard": CallerAccess.JOINER,
    "health/1/lost": CallerAccess.JOINER,
    "health/1/beat": CallerAccess.JOINER,
    "lead/1/join": CallerAccess.JOINER,
    "admit/1/order": CallerAccess.JOINER,
    "reach/1/reserve": CallerAccess.JOINER,
    "reach/1/withdrawn": CallerAccess.JOINER,
    # Taking part.
    "pipeline/1/forward": CallerAccess.MEMBER,
    "pipeline/1/targets": CallerAccess.MEMBER,
    "pipeline/1/backward": CallerAccess.MEMBER,
    "pipeline/1/evaluate": CallerAccess.MEMBER,
    "pipeline/1/resend": CallerAccess.MEMBER,
    "pipeline/1/adopt": CallerAccess.MEMBER,
    "pipeline/1/recall": CallerAccess.MEMBER,
    "pipeline/1/audit": CallerAccess.MEMBER,
    "pipeline/1/drop": CallerAccess.MEMBER,
    "pipeline/1/attend": CallerAccess.MEMBER,
    "trainer/1/output": CallerAccess.MEMBER,
    "trainer/1/gradient": CallerAccess.MEMBER,
    "trainer/1/hop": CallerAccess.MEMBER,
    "trainer/1/blocked": CallerAccess.MEMBER,
    "trainer/1/recall": CallerAccess.MEMBER,
    "averaging/1/enter": CallerAccess.MEMBER,
    "averaging/1/stay": CallerAccess.MEMBER,
    "averaging/1/chunk": CallerAccess.MEMBER,
    "averaging/1/agree": CallerAccess.MEMBER,
    "averaging/1/abort": CallerAccess.MEMBER,
    "averaging/1/sum": CallerAccess.MEMBER,
    "averaging/1/checked": CallerAccess.MEMBER,
    "mass/1/push": CallerAccess.MEMBER,
    "mass/1/yield": CallerAccess.MEMBER,
    "versions/1/take": CallerAccess.MEMBER,
    "residual/1/hand-over": CallerAccess.MEMBER,
    "lead/1/lease": CallerAccess.MEMBER,
    "lead/1/complete": CallerAccess.MEMBER,
    "lead/1/aside": CallerAccess.MEMBER,
    "lead/1/fault": CallerAccess.MEMBER,
    "lead/1/resume": CallerAccess.MEMBER,
    "lead/1/leave": CallerAccess.MEMBER,
    "step/1/arrive": CallerAccess.MEMBER,
    "step/1/working": CallerAccess.MEMBER,
    "parting/1/farewell": CallerAccess.MEMBER,
    # Deciding.
    "feed/1/again": CallerAccess.VOTER,
    "rescue/1/judge": CallerAccess.VOTER,
    "rescue/1/consent": CallerAccess.VOTER,
    "step/1/prepare": CallerAccess.VOTER,
    "step/1/reconcile": CallerAccess.VOTER,
    "step/1/apply": CallerAccess.VOTER,
    "step/1/propose": CallerAccess.VOTER,
    "step/1/decide": CallerAccess.VOTER,
    "step/1/over": CallerAccess.VOTER,
    "step/1/tied": CallerAccess.VOTER,
}
"""By name, what the caller must be at least. A method that is not here is refused to everybody."""
