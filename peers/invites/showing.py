"""Have an endpoint of this machine show what its invite grants: for those who only look at a run."""

from __future__ import annotations

from peers.invites.invite import Contacts
from swarm.membership.admission import PRESENT
from swarm.network.protocols import Endpoint


def show(endpoint: Endpoint, contacts: Contacts) -> None:
    """Have the endpoint show it to anyone who asks; nothing where the invite is to a run that anybody may join. Raises
    ConfigError for an invite that names another peer."""
    if contacts.granted is not None:
        endpoint.introduce(PRESENT, contacts.granted.credential(endpoint.peer))
