"""Install a peer as a systemd service of this user: the unit, its settings and its invite, and what systemctl says.

The unit names two files of the home that only this user can read: the settings, as ``--config`` takes them, and the
invite. So no list of processes, no environment and no unit shows the invite.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peers.commands.preflight import has_gpu_driver
from peers.console.words import CommandError, command_name
from peers.exit_codes import EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_PAUSED, FINAL
from peers.home.places import home_directory
from peers.options.fields import settings_of
from peers.options.model import PeerOptions
from swarm.disk import write_named
from swarm.errors import ConfigError

STOP_MARGIN_S = 30.0
"""Beyond the grace: what a peer takes to end once it has left, its last checkpoint included."""
PROCESS_GB = 2.0
"""What a process takes beside the memory that it plans with: torch, the daemon, buffers."""
RESTART_S, LONGEST_RESTART_S, STEPS_SINCE = 60, 900, 254
"""systemd starts again what ``--retry`` gave up, later and later where its version can do that."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")

CALL_S = 60.0
"""How long systemctl may take for what stops no peer, and beyond the time that a unit gives its peer to stop."""
_STOP = re.compile(r"^TimeoutStopSec=([0-9]{1,9})$", re.MULTILINE)


class Systemctl(Protocol):
    """Runs ``systemctl --user``; a test puts another in its place."""

    def __call__(self, words: Sequence[str], timeout_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
        """See :func:`systemctl`."""


def systemctl(words: Sequence[str], timeout_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
    """Run ``systemctl --user`` with these words. A program that is not there, or hangs, is a failed one."""
    command = ["systemctl", "--user", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFiles:
    """Where the files of a service are: the unit where systemd looks for it, the others in the home."""

    unit: Path
    config: Path
    invite: Path

    @staticmethod
    def of(name: str, home: Path, units: Path) -> ServiceFiles:
        """Those of a service by its name. Raises ConfigError for a name that is none."""
        if not NAME.fullmatch(name):
            raise ConfigError("--unit", name, "small letters, digits and dashes, 41 at most", "Choose another.")
        kept = home.absolute() / "services"
        return ServiceFiles(
            unit=units / f"{name}.service", config=kept / f"{name}.toml", invite=kept / f"{name}.invite"
        )


# --- texts -----------------------------------------------------------------------------------------------------------


def config_text(options: PeerOptions) -> str:
    """The settings that a person gave, as TOML for ``--config``; paths absolute, the invite left out, ``retry`` on."""
    lines = []
    given = dict.fromkeys([*options.origins, "home", "retry"])
    for key in settings_of(PeerOptions):
        if key not in given or key in ("invite", "invite_file"):
            continue
        value = True if key == "retry" else home_directory(options.home) if key == "home" else getattr(options, key)
        lines.append(f"{key} = {_toml(value)}")
    return "".join(f"{line}\n" for line in lines)


def _toml(value: object) -> str:
    if isinstance(value, Path):
        return json.dumps(str(value.absolute()), ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # TOML has no surrogates: what is outside the BMP stays as it is


def unit_text(options: PeerOptions, files: ServiceFiles, *, version: int, python: str = sys.executable) -> str:
    """The unit of a peer with these options. ``version`` is systemd's: older ones do not know all that is in it. Pure,
    but for the default home."""
    command = [
        python,
        "-P",
        "-m",
        "peers.cli",
        "join",
        "--config",
        str(files.config),
        "--invite-file",
        str(files.invite),
    ]
    home = home_directory(options.home).absolute()
    writes = [home, *(path.absolute() for path in (options.checkpoints, options.report_dir) if path is not None)]
    unless = " ".join(str(code) for code in sorted(FINAL - {0}))
    told = " ".join(str(code) for code in (EXIT_DRAINED, EXIT_PAUSED, 129, EXIT_INTERRUPTED, 143))
    service = [
        ("Type", "exec"),
        ("ExecStart", " ".join(map(_quoted, command))),
        ("WorkingDirectory", str(home).replace("%", "%%")),  # no quotes: all of the line is the path
        ("UMask", "0077"),
        ("Nice", "10"),
        ("SyslogIdentifier", files.unit.stem),
        # Told to leave, a peer leaves in order; only what is left of it afterwards is killed.
        ("KillMode", "mixed"),
        ("KillSignal", "SIGTERM"),
        ("TimeoutStopSec", f"{options.grace + STOP_MARGIN_S:.0f}"),
        ("Restart", "on-failure"),
        ("SuccessExitStatus", told),
        ("RestartPreventExitStatus", unless),
        ("RestartSec", str(RESTART_S)),
        *([("RestartSteps", "5"), ("RestartMaxDelaySec", str(LONGEST_RESTART_S))] if version >= STEPS_SINCE else []),
        ("NoNewPrivileges", "yes"),
        ("PrivateUsers", "yes"),
        ("PrivateTmp", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "read-only"),
        ("ReadWritePaths", " ".join(map(_listed, writes))),
        ("ProtectKernelTunables", "yes"),
        ("ProtectControlGroups", "yes"),
        ("LockPersonality", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
    ]
    on_cpu = options.device == "cpu" or (options.device == "auto" and not has_gpu_driver())
    if options.max_memory is not None and on_cpu:
        service.append(("MemoryMax", f"{(options.max_memory + PROCESS_GB) * 1e9:.0f}"))
    return "\n".join(
        [
            "[Unit]",
            "Description=A peer of a swarm that trains a model together",
            "After=network-online.target",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            *(f"{key}={value}" for key, value in service),
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def _quoted(word: str) -> str:
    """A word of a command line in a unit: systemd's own quotes, and neither its specifiers nor its variables."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if re.search(r"[\s\"';\\]", text) or not text else text


def _listed(path: Path) -> str:
    """A path in a unit's list of them: quotes as of a shell. No backslash escapes there, and a dollar is a dollar."""
    text = str(path).replace("%", "%%")
    return '"' + text.replace('"', '"\'"\'"') + '"' if re.search(r"[\s\"']", text) else text


# --- installing ------------------------------------------------------------------------------------------------------


def known_version(run: Systemctl) -> int:
    """The version of systemd here; 0 where there is none."""
    found = re.match(r"systemd (\d+)", run(["--version"]).stdout)
    return int(found[1]) if found else 0


def systemd_version(run: Systemctl) -> int:
    """The version of systemd whose manager of this user answers. Raises CommandError where none does."""
    version, reached = known_version(run), run(["show-environment"])
    if not version or reached.returncode:
        join = f"{command_name()} join --invite-file FILE --retry"
        said = reached.stderr.strip().splitlines()
        raise CommandError(
            "systemd does not answer for this user", check=said[0] if said else "systemctl --user status",
            next_=f"without it: nohup {join} > peer.log 2>&1 &   or in crontab -e: @reboot {join}",
        )  # fmt: skip
    return version


def install(options: PeerOptions, invite: str, files: ServiceFiles, run: Systemctl) -> list[str]:
    """Write the files, and have systemd start the peer now and whenever this user's services start; returns lines to
    print. Raises CommandError, having left nothing new: no systemd, a service of that name, or one that cannot start.
    """
    version = systemd_version(run)
    if files.unit.exists():
        other = f"{command_name()} service uninstall --unit {files.unit.stem}, or another --unit"
        raise CommandError(f"the service {files.unit.stem} exists already", check=str(files.unit), next_=other)
    texts = {files.invite: (invite, 0o600), files.config: (config_text(options), 0o600),
             files.unit: (unit_text(options, files, version=version), 0o644)}  # fmt: skip
    try:
        for path, (text, mode) in texts.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_named(path, [text.encode()], mode=mode)
        for words in (["daemon-reload"], ["enable", "--now", files.unit.name]):
            _checked(run(words), words)
    except OSError as error:
        _remove(files)
        raise CommandError(f"{error.filename or files.unit} cannot be written: {error.strerror}") from error
    except CommandError:
        _stopped(files, run)
        _remove(files)
        run(["daemon-reload"])
        raise
    return [
        f"installed  {files.unit}",
        f"settings   {files.config}",
        f"look       {command_name()} service status, {command_name()} status, journalctl --user -u {files.unit.stem}",
        "note       it runs while you are logged in; to run from the machine's start on: loginctl enable-linger",
    ]


def uninstall(files: ServiceFiles, run: Systemctl) -> list[str]:
    """Have the peer leave in order, and remove the service's files; the home with its places stays. Raises
    CommandError where there is no such service, or systemd does not stop it: its files stay then."""
    _check_there(files)
    _checked(_stopped(files, run), ["disable", "--now", files.unit.name])
    _remove(files)
    run(["daemon-reload"])
    return [f"removed    {files.unit}"]


SHOWN = ("ActiveState", "SubState", "NRestarts", "ExecMainStatus", "MainPID")


def service_status(files: ServiceFiles, run: Systemctl) -> Mapping[str, str]:
    """Return what systemd says of the service, by its own names. Raises CommandError as :func:`uninstall`."""
    _check_there(files)
    words = ["show", files.unit.name, f"--property={','.join(SHOWN)}"]
    answer = _checked(run(words), words)
    return dict(line.split("=", 1) for line in answer.stdout.splitlines() if line.partition("=")[0] in SHOWN)


def _check_there(files: ServiceFiles) -> None:
    if not files.unit.exists():
        raise CommandError(f"the service {files.unit.stem} does not exist", check=f"ls {files.unit}",
                           next_=f"{command_name()} service install INVITE")  # fmt: skip


def _stopped(files: ServiceFiles, run: Systemctl) -> subprocess.CompletedProcess[str]:
    """Have the peer leave, and wait for as long as its unit gives it, which somebody may have changed since."""
    given = _STOP.search(files.unit.read_text(errors="replace"))
    return run(["disable", "--now", files.unit.name], (float(given[1]) if given else 0.0) + CALL_S)


def _checked(answer: subprocess.CompletedProcess[str], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if answer.returncode:
        said = answer.stderr.strip().splitlines()
        raise CommandError(f"systemctl --user {' '.join(words)} failed", check=said[-1] if said else "",
                           next_="systemctl --user status")  # fmt: skip
    return answer


def _remove(files: ServiceFiles) -> None:
    for path in (files.unit, files.config, files.invite):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
