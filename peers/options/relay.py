"""Define every option of ``swarm relay`` once; they are read from the command alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from peers.options.fields import MODEL_CONFIG, FilePath, Option, between, lengths
from peers.options.model import Addresses, InviteText, Name, Text

_RELAY = ("relay",)
PORT = 4001
"""What libp2p's own programs take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """The settings of a relay, as a person gives them. Rates are in bytes a second, 10^6 of them a megabyte."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    announce: Annotated[
        tuple[Text, ...],
        Option(
            metavar="ADDR", of=_RELAY, default="the detected ones",
            help="Tell others this domain name, IP address or multiaddr instead of the detected ones; repeat for more.",
        ),
    ] = ()  # fmt: skip
    port: Annotated[
        int, between(1, 65535), Option(metavar="N", of=_RELAY, help="Listen on this TCP port of all interfaces.")
    ] = PORT
    listen: Annotated[
        Addresses,
        Option(
            metavar="ADDR", of=_RELAY, default="--port of all interfaces, IPv4 and IPv6",
            help="Listen on this multiaddr instead; repeat for more.",
        ),
    ] = ()  # fmt: skip
    run: Annotated[
        Annotated[tuple[InviteText, ...], lengths(0, 64, "invites, or ids of runs", "of them")],
        Option(
            metavar="RUN", of=_RELAY, default="all runs", secret=True,
            help="Serve peers of this run alone, by its invite (-: standard input) or its whole id; repeat for more.",
        ),
    ] = ()  # fmt: skip
    slots: Annotated[
        int, between(1, 4096), Option(metavar="N", of=_RELAY, help="Relay for at most this many peers.")
    ] = 128
    slots_per_host: Annotated[
        int,
        between(1, 4096),
        Option(metavar="N", of=_RELAY, help="The most for one IP address, such as that of a home or an institute."),
    ] = 32
    circuits: Annotated[
        int, between(1, 65536), Option(metavar="N", of=_RELAY, help="Pass on at most this many connections at a time.")
    ] = 256
    circuits_per_peer: Annotated[
        int, between(1, 4096), Option(metavar="N", of=_RELAY, help="The most for one peer.")
    ] = 64
    stranger_circuits: Annotated[
        int,
        between(1, 65536),
        Option(metavar="N", of=_RELAY, help="The most for all peers together that have no slot here."),
    ] = 128
    rate: Annotated[
        Annotated[float, between(0.001, 1e6)] | None,
        Option(metavar="MB/S", of=_RELAY, help="Pass on at most so many megabytes a second.", default="no limit"),
    ] = None
    rate_per_peer: Annotated[
        Annotated[float, between(0.001, 1e6)] | None,
        Option(metavar="MB/S", of=_RELAY, help="The most for one peer.", default="no limit"),
    ] = None
    stranger_rate: Annotated[
        float,
        between(0.001, 1e6),
        Option(metavar="MB/S", of=_RELAY, help="The most for each connection with a peer that has no slot here."),
    ] = 8.0
    name: Annotated[
        Name | None,
        Option(metavar="NAME", of=_RELAY, help="Name of this relay, for people.", default="two words made of its id"),
    ] = None
    place: Annotated[
        Name, Option(metavar="NAME", of=_RELAY, help="Place to use: its key is the relay's, and so its address stays.")
    ] = "relay"
    home: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", of=_RELAY, help="Directory of this machine's places and runs.",
            default="$SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm",
        ),
    ] = None  # fmt: skip
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), of=_RELAY, help="Print errors only.")] = False
    json: Annotated[bool, Option(of=_RELAY, help="Print each event as one line of JSON, and nothing else.")] = False
