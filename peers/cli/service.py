"""``swarm service``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.light import LightCommand, WholeGroup
from peers.cli.options import AsJson, Home, offer
from peers.options.foundation import Installing
from peers.options.model import PeerOptions

if TYPE_CHECKING:
    from peers.sharing.systemd_unit import ServiceFiles

service = typer.Typer(
    cls=WholeGroup, help="Run a peer as a systemd service of this user, for weeks.", no_args_is_help=True
)

Unit = Annotated[str, typer.Option("--unit", metavar="NAME", help="Name of the service.")]


def _files(unit: str, home: Path | str | None) -> ServiceFiles:
    from peers.home.places import home_directory
    from peers.sharing.systemd_unit import ServiceFiles

    configured = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".config"
    return ServiceFiles.of(unit, home_directory(home), base / "systemd" / "user")


@service.command(cls=LightCommand)
@offer("join", PeerOptions, Installing)
def install(**typed: Any) -> None:
    """Install a service that joins a run, and start it.

    Takes the options of `swarm join`. The invite goes into a file that only you can read; --retry is always on. With
    --dry-run it prints the unit, and installs nothing.

    Example: swarm service install - --max-upload 10mbit --pause-when battery < invite.txt
    """
    from peers.commands.join import check_offered
    from peers.console.words import NEW_INVITE
    from peers.invites.invite import invite_on_standard_input, parse_invite
    from peers.invites.invite_file import check_secret, read_invite
    from peers.options.reading import blaming, read_invocation, read_peer_options
    from peers.sharing import systemd_unit as services
    from swarm.errors import ConfigError

    options = read_peer_options("join", typed, read_invocation("join", typed))
    with blaming(options):
        check_offered(options)
        if options.invite_file is not None and not options.invite:
            invite = read_invite(options.invite_file)
            if invite is not None and (warning := check_secret(options.invite_file, invite)):
                print(f"note       {warning}", file=sys.stderr)
        else:
            given = (invite_on_standard_input("service install -"),) if options.invite == ("-",) else options.invite
            invite = parse_invite("".join(given)) if given else None
        if invite is None:
            raise ConfigError("INVITE", None, "an invite", NEW_INVITE)
        files = _files(typed.get("unit") or "swarm", options.home)
        if typed.get("dry_run"):
            version = services.known_version(services.systemctl)
            print(services.unit_text(options, files, version=version), end="")
            return
        print("\n".join(services.install(options, f"{invite.text()}\n", files, services.systemctl)))


@service.command()
def uninstall(unit: Unit = "swarm", home: Home = None) -> None:
    """Have the service's peer leave in order, and remove the service.

    The peer's place, with its identity and checkpoints, stays in the home.

    Example: swarm service uninstall
    """
    from peers.sharing import systemd_unit as services

    print("\n".join(services.uninstall(_files(unit, home), services.systemctl)))


@service.command()
def status(unit: Unit = "swarm", home: Home = None, as_json: AsJson = False) -> None:
    """Show what systemd says of the service; `swarm status` shows what its peer does.

    Example: swarm service status --json
    """
    from peers.sharing import systemd_unit as services

    said = services.service_status(_files(unit, home), services.systemctl)
    print(json.dumps({"schema": 1, **said}) if as_json else "\n".join(f"{key:<15} {said[key]}" for key in said))
