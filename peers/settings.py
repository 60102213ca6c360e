"""The settings with which one peer is started, as plain data; nothing here reads the environment or a file.

Not the run manifest: that is agreed between peers (``swarm.config``), this is one machine's business. What a person
says about the peer is in it as :mod:`peers.options.reading` read it; the rest is what the command made of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from peers.options.fields import settings_of
from peers.options.model import Address, Name, PeerOptions
from peers.options.reading import check_options, expected
from peers.sharing.limit_options import Return, read_rate
from swarm.consensus.placement import Wish
from swarm.errors import ConfigError
from swarm.membership.settings import MemberSettings
from swarm.schema import BesideField, in_words

PATIENCE_S = 120.0
VOTE_FILE = "vote"
"""Beside the key: what this peer voted last."""

Role = Literal["bootstrap", "stage", "trainer"]


class PeerSettings(BaseModel):
    """The settings of one peer, for :func:`peers.node.run_peer`. Build them with :func:`exact_settings`.

    Attributes:
        home: The directory of this one life: ``events.jsonl``, ``history.jsonl``, ``peer.log``, sockets.
        identity: The key file; without it ``identity.key`` in ``home``.
        role: What it does in the run.
        name: What people call it.
        bootstrap: Multiaddrs ending in ``/p2p/<peer id>``, for all but a bootstrap that founds the run.
        run: The run that it joins, where that is known before.
        manifest: For the bootstrap that founds the run, which serves it, and the files next to it that it names.
        ends_seed: Seed of the private ends' initial weights, for a bootstrap; None: a secret one. Anyone who knows it
            can read what trainers send: give it only where all peers of the run are on this machine.
        model_files: Directory of the model's files: a bootstrap's run begins with the weights in them, and others need
            not download these.
        frozen: Where this machine keeps frozen weights, for all runs; by default in ``home``.
        beside: The peers with which it was started, one for each device, by the ends of their ids.
        turn: Its number among the peers of this machine: with device ``auto`` each GPU has its turn.
        host_bytes: Its share of the machine's memory, where it was started alongside others; None: all that is free.
        patience_s: How long a bootstrap waits for the peers that the run needs; None: for ever.
        run_directory: Where this machine keeps the run: manifest, its files, and the checkpoints that its peers write
            and those they end with; ``{run}`` in it stands for the run's name and id.
        checkpoints_kept: How many older ones stay; None: all.
        alone: All peers of the run are on this machine: no step need be kept for others besides those of the options.
        resume: A bootstrap founds the run with the checkpoint of that step there.
        credential: What admits it, where one must be admitted, as JSON.
        control: The socket on which it answers ``swarm status``; None: it does not.
        returns: Whether it was in the run before, and comes back to it through ``bootstrap``; a bootstrap as its
            founder.
        back: Who starts it again after a pause or a crash, and after what it has come back; None: nobody does.
        verbose: On stdout it tells what happens.
        json_lines: On stdout it writes every event.
        options: What a person said about it. Of their ``role``, ``name``, ``home``, ``invite`` and ``checkpoints`` the
            above was made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    home: Path
    identity: Path = Path("identity.key")
    role: Role
    name: Name = "peer"
    bootstrap: tuple[Address, ...] = ()
    run: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    manifest: Path | None = None
    ends_seed: Annotated[int | None, Field(ge=0, repr=False)] = None
    model_files: Path | None = None
    frozen: Path | None = None
    beside: BesideField = ()
    turn: Annotated[int, Field(ge=0)] = 0
    host_bytes: Annotated[int | None, Field(ge=0)] = None
    patience_s: Annotated[float, Field(gt=0)] | None = PATIENCE_S
    run_directory: Path | None = None
    checkpoints_kept: Annotated[int, Field(ge=1)] | None = None
    alone: bool = False
    resume: Annotated[int, Field(ge=0)] | None = None
    credential: str | None = None
    control: Path | None = None
    returns: bool = False
    back: Return | None = None
    verbose: bool = False
    json_lines: bool = False
    options: PeerOptions = PeerOptions()

    @model_validator(mode="before")
    @classmethod
    def _identity_at_home(cls, given: Any) -> Any:
        if isinstance(given, dict) and "identity" not in given and "home" in given:
            return given | {"identity": Path(given["home"]) / "identity.key"}
        return given


def exact_settings(**given: Any) -> PeerSettings:
    """Return the given settings, with defaults for the rest. Raises ConfigError naming key, value and what is
    allowed."""
    try:
        settings = PeerSettings(**given)
    except ValidationError as error:
        raise _explained(error) from None
    _check(settings)
    return settings


def member_settings(settings: PeerSettings, machine: str = "", choice: int | None = None) -> MemberSettings:
    """Return what the membership of a run needs of a peer's settings, of its ``machine``'s mark, and of the ``choice``
    of variants that its domain is."""
    limits = (settings.options.max_upload, settings.options.max_download)
    return MemberSettings(
        role=settings.role,
        name=settings.name,
        wish=Wish(settings.options.stage, choice),
        region=settings.options.region,
        beside=settings.beside,
        machine=machine,
        dial_out_only=settings.options.dial_out_only,
        max_in_flight=settings.options.max_in_flight,
        limit_bytes_s=min(map(read_rate, filter(None, limits)), default=None),
        ends_seed=settings.ends_seed,
        patience_s=settings.patience_s,
        returns=settings.returns,
        history=settings.home / "history.jsonl",
        votes=settings.identity.with_name(VOTE_FILE),
    )


def _check(settings: PeerSettings) -> None:
    needed: dict[Role, tuple[str, ...]] = {
        "bootstrap": ("bootstrap",) if settings.returns else ("manifest",),
        "stage": ("bootstrap",),
        "trainer": ("bootstrap",),
    }
    for key in needed[settings.role]:
        if not getattr(settings, key):
            raise ConfigError(key, None, f"a value when role is {settings.role}", "Give one.")
    if settings.resume is not None and (settings.role != "bootstrap" or settings.run_directory is None):
        allowed = "only for role bootstrap, together with run_directory"
        raise ConfigError("resume", settings.resume, allowed, "Say where the checkpoint is.")
    check_options(settings.options, settings.role)
    if settings.options.checkpoint_every is not None and settings.run_directory is None:
        allowed = "only together with run_directory"
        raise ConfigError("checkpoint_every", settings.options.checkpoint_every, allowed, "Say where to write them.")


def _explained(error: ValidationError) -> ConfigError:
    """A failed validation of settings as the ConfigError of its first mistake."""
    first = error.errors(include_url=False)[0]
    section, *below = (str(one) for one in first["loc"]) if first["loc"] else ("settings",)
    if section == "options" and below and (setting := settings_of(PeerOptions).get(below[0])) is not None:
        return ConfigError(below[0], first["input"], expected(first, setting), "Correct it.")
    if first["type"] == "missing":
        return ConfigError(section, None, "a value: it has no default", "Give one.")
    message = "no such key" if first["type"] == "extra_forbidden" else in_words(first, {})
    return ConfigError(section, first["input"], message, "Correct it.")
