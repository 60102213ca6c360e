"""Give parts of the model by the caller's role, whatever the service that hands them out: state, checkpoints, weights
that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swarm.errors import Violation
from swarm.ids import PeerId
from swarm.membership.gate import CallGate
from swarm.network.protocols import AnyMethod, Service


def given_by_role(service: Service, gate: CallGate | None) -> Service:
    """Return a service whose calls about a part are refused to callers whose invite is for another role.

    Args:
        service: What hands out parts; it knows no roles.
        gate: Who a caller is; None in a run that anybody may join, where the service stays as it is.
    """
    return service if gate is None else _ByRole(service, gate)


class _ByRole:
    """``service`` behind what :meth:`CallGate.may_fetch` says of each request that names a part: before the service
    admits it, so that it costs nothing to refuse."""

    def __init__(self, service: Service, gate: CallGate) -> None:
        self._service, self._gate = service, gate

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [self._checked(method) for method in self._service.methods()]

    def _checked(self, method: AnyMethod) -> AnyMethod:
        def admit(caller: PeerId, body: Any, payload_bytes: int) -> None:
            if (part := getattr(body, "part", None)) is not None:
                self._gate.may_fetch(caller, part)
            if method.admit is not None:
                method.admit(caller, body, payload_bytes)
            elif payload_bytes:
                raise Violation("this takes no payload", peer=caller)

        return replace(method, admit=admit)
