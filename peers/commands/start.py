"""The one way to start a peer: ``swarm join`` and ``swarm new`` run an order here; the Python API (:mod:`peers.api`),
several devices (:mod:`peers.local.siblings`) and the keeper of a peer that pauses have a process of its own run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from peers.local.peer_order import PeerOrder, ordered
from peers.options.reading import blaming, read_foundation, read_invocation, read_peer_options
from peers.presets import refuse_as_file
from swarm.errors import SwarmError


def to_join(typed: Mapping[str, Any]) -> PeerOrder:
    """Return the order for a peer that joins a run, with these options by key, and those of the environment. Raises
    ConfigError for what cannot be used."""
    invocation = read_invocation("join", typed)
    options = read_peer_options("join", typed, invocation)
    return PeerOrder(options=options, words=invocation.words, json_lines=invocation.json)


def to_found(typed: Mapping[str, Any]) -> PeerOrder:
    """Return the order for a peer that founds a run, or goes on with one. Raises ConfigError as :func:`to_join`."""
    foundation = read_foundation(typed)
    if not foundation.resume:
        refuse_as_file(foundation.file)
    invocation = read_invocation("new", typed)
    options = read_peer_options("new", typed, invocation)
    return PeerOrder(options=options, foundation=foundation, words=invocation.words, json_lines=invocation.json)


def run(order: PeerOrder) -> int:
    """Run a peer until its run is over or it has left; returns its exit code. Blocking; the main thread only.

    Raises as :func:`peers.commands.join.join` and :func:`peers.commands.new.new`, with who gave the option.
    """
    options, words, json_lines = order.options, order.words, order.json_lines
    with blaming(options):
        if order.foundation is not None:
            from peers.commands.new import keep_founding, new

            if order.back is None and options.retry:
                return keep_founding(order.foundation, options, words=words, json_lines=json_lines)
            return new(order.foundation, options, words=words, json_lines=json_lines, back=order.back)
        from peers.commands.join import join, keep_joined

        if order.back is None and (options.pause_when or options.retry):
            return keep_joined(options, words=words, json_lines=json_lines)
        return join(options, words=words, json_lines=json_lines, company=order.company, back=order.back)


def main() -> int:
    """Run the order that is on the standard input; returns the exit code, errors are on stderr."""
    from peers.console.words import report_error
    from peers.exit_codes import exit_code_of

    try:
        return run(ordered(sys.stdin.read()))
    except SwarmError as error:
        report_error(error)
        return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
