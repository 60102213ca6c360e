"""The words of commands: errors as cause, check and next command; what to type next; names, lists and amounts."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.exit_codes import EXIT_ERROR
from swarm import WIRE_VERSION
from swarm.columns import held_columns
from swarm.disk import size_text
from swarm.errors import Advice, ConfigError, Ending, OtherWire, RunEnded, SwarmError
from swarm.ids import ENDS, PartName, shared_by

_PEER_ID = re.compile(r"(?<!/p2p/)\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
"""As libp2p writes the ids of Ed25519 keys, which all of ours are."""
SAMPLE_WIDTH = 300
VALUE_WIDTH = 120


def print_error(cause: str, *, check: str = "", next_: str = "", label: str = "error") -> None:
    """The cause on stderr and, where there are any, what to look at and what to do; no traceback, no colour. Where
    stderr takes nothing, the exit code must do."""
    lines = [f"{label}: {_flat(cause)}"]
    if check:
        lines.append(f"  check: {_flat(check)}")
    if next_:
        lines.append(f"  next:  {_flat(next_)}")
    with contextlib.suppress(OSError):
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _flat(text: str) -> str:
    """Each on a line of its own, and harmless: what another peer said may be part of it."""
    return " ".join(printable(text).splitlines())


def report_error(error: SwarmError) -> None:
    """An error of ours as :func:`print_error` lays it out: whatever a command ends with goes through here."""
    match error:
        case ConfigError():
            cause = (
                f"{error.key} is missing"
                if error.value is None
                else f"{error.key} = {_shown(error.value)} cannot be used"
            )
            cause += f": {error.why}" if error.why else ""
            next_ = _like_it(error) or with_commands(error.remedy, error)
            print_error(cause, check=f"expected {error.allowed}", next_=next_)
        case CommandError():
            print_error(error.cause, check=error.check, next_=error.next)
        case RunEnded():
            check, next_ = with_commands(error.check), with_commands(error.remedy) or _after(error)
            print_error(with_commands(error.reason), check=check, next_=next_)
        case _:
            print_error(with_commands(str(error)))


def reason_of(error: SwarmError) -> str:
    """Return an error's whole text, the library's advice in it with commands."""
    return with_commands(str(error), error)


def with_commands(text: str, error: SwarmError | None = None) -> str:
    """Return a text in which each :class:`~swarm.errors.Advice` of the library is said with what a person types.

    Args:
        text: What the library says; part of it may be advice.
        error: Where it comes from, for commands that need its value.
    """
    for advice, said in _COMMANDS.items():
        if advice in text:
            home = str(error.value) if isinstance(error, ConfigError) else "HOME"
            text = text.replace(advice, said.format(swarm=command_name(), home=home))
    return text


GIVES_INVITE = "swarm invite (where a run admits by invite, at an issuer: swarm invite --for NAME --role ROLE)"
"""How somebody gives an invite, for who asks for one and may not know how the run admits."""
NEW_INVITE = f"Ask somebody in the run for a new invite: {GIVES_INVITE}"

_COMMANDS: Mapping[Advice, str] = {
    Advice.NEW_INVITE: NEW_INVITE,
    Advice.NEW_GRANT: "Ask an issuer of the run for a new one: swarm invite --for NAME --role ROLE",
    Advice.JOIN_ANEW: f"{NEW_INVITE}; and join with that one.",
    Advice.JOIN_FOUNDER: f"Join with an invite from the founder, or from another waiting peer: {GIVES_INVITE}",
    Advice.FOUND_AGAIN: "Have the founder start the same run again, on its machine: swarm new FILES/run.toml (FILES: "
    "the directory in its line `files`). With the same --port the invite stays good; else it prints a new one.",
    Advice.WHICH_VERSION: "which version of swarm runs there, and which here? swarm --version",
    Advice.SAME_VERSION: "Update the older of the two. Found the run again where it was (swarm new). Ask there for the "
    f"new invite: {GIVES_INVITE}",
    Advice.WHAT_IS_KEPT: "{swarm} ckpt ls, on each machine: which step is complete, there or together?",
    Advice.SAY_SO: "{swarm} rewind, on the machine of any peer that votes",
    Advice.RESUME: "Start the run again from its newest checkpoint: {swarm} new --resume, once the parts are on one "
    "machine: {swarm} ckpt pull --from A --from B",
    Advice.GO_ON: "to go on: {swarm} new --resume",
    Advice.PORT: "can they reach a port of this machine? (swarm join --port N, opened in the firewall)",
    Advice.RELAY: "Open a port, let a peer relay for this one (--relay auto, here and there), or start {swarm} relay "
    "on a machine that everybody can call, and this peer with --through and the address that it prints.",
    Advice.RELAY_THERE: "Start one there ({swarm} relay), and give the address that it prints.",
    Advice.OTHER_HOME: "Look at it with swarm history --file {home}/history.jsonl; then give this peer a new home.",
    Advice.PROVEN_WRONG: "look at the proof ({swarm} history --faults), and check this machine ({swarm} doctor)",
    Advice.DAMAGED_STEP: "Use the step before it, or copy the damaged file from another peer: swarm ckpt pull.",
}
"""The words and commands for each advice of the library."""


def command_to_join(part: PartName | None, *, open_port: bool = False, admission: str = "open") -> str:
    """Return what a person types for one more replica of a part: see :class:`swarm.consensus.roster.HowToJoin`.

    Args:
        part: What it shall hold.
        open_port: Whether others must be able to call it.
        admission: How the run admits: its ``admission.mode``.
    """
    command = f"swarm join INVITE {wish_for(part)}"
    command = f"{command} --port N, opened in its firewall" if open_port else command
    if admission == "open":
        return command
    role = "trainer" if part in (None, ENDS) else "stage"
    return f"at an issuer: {command_to_invite(admission, role)}; then {command}"


def wish_for(part: PartName | None) -> str:
    """Return the option with which a peer joins for a part."""
    stages = () if part is None else held_columns((part,))
    return f"--stage {stages[0]}" if stages else "--role trainer"


def command_to_invite(mode: str, role: str = "ROLE", name: str = "NAME") -> str:
    """Return what an issuer types, on the machine of its peer, for an invite to a run that admits by this mode."""
    if mode == "open":
        return f"{command_name()} invite"
    return f"{command_name()} invite --for {name} --role {role}{' --id PEER_ID' if mode == 'organisation' else ''}"


def command_to_order(verb: str, who: str) -> str:
    """Return what a person types for an order about who belongs to a run (:class:`~swarm.security.credentials.Order`):
    ``who`` is the name of a grant, or an issuer's peer id."""
    return f"{command_name()} revoke {who}" if verb == "revoke" else f"{command_name()} issuers --{verb} {who}"


def agreed_text(agreed: int, voters: int) -> str:
    """``1 of the 3 that vote has agreed, and it takes 2``: for an order more than half are enough, whatever decides a
    record."""
    has = "has" if agreed == 1 else "have"
    return f"{agreed} of the {voters} that vote {has} agreed, and it takes {voters // 2 + 1}"


def _like_it(error: ConfigError) -> str:
    """Return how to found a run with the settings of one of an older wire version; nothing for other errors."""
    if not isinstance(error, OtherWire) or error.wire > WIRE_VERSION or not os.path.isfile(error.origin):
        return ""
    tokenizer = Path(error.origin).with_name("tokenizer.json")
    beside = f" --tokenizer {shlex.quote(str(tokenizer))}" if tokenizer.is_file() else ""
    copy = _free_name()
    copied = f"grep -Ev '^[[:space:]]*(run\\.)?wire[[:space:]]*=' {shlex.quote(error.origin)} > {copy}"
    return (
        f"go on with it in the swarm that made it, or found a new run with its settings: {copied} && "
        f"{command_name()} new {copy}{beside}"
    )


def _free_name() -> str:
    """A manifest's name that nothing has in the working directory: what a command writes there overwrites nothing,
    least of all what it reads."""
    names = itertools.chain(["RUN.toml"], (f"RUN-{number}.toml" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _after(ended: RunEnded) -> str:
    """Return a remedy for unreachable peers when the error itself has none."""
    if ended.ending is not Ending.UNREACHABLE:
        return ""
    swarm = command_name()
    return (
        f"look whether the run goes on: {swarm} peers (here, or where another of its peers runs). If it does, start "
        f"this one again as before: it is the same peer then. What was learned is kept: {swarm} sample"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_WIDTH else text[: VALUE_WIDTH - 1] + "…"


def command_name() -> str:
    """Return the command for this program: ``swarm`` where the shell finds this very one, else its path, else
    the interpreter and the module. Quoted for a shell."""
    program = Path(sys.argv[0])
    if program.name != "swarm":
        # Started as a module: the command lies next to the interpreter where there is one.
        program = Path(sys.executable).with_name("swarm")
    if not program.is_file():
        return f"{_typed(Path(sys.executable))} -m peers.cli"
    found = shutil.which("swarm")
    return "swarm" if found and Path(found).resolve() == program.resolve() else _typed(program)


def _typed(program: Path) -> str:
    """The path as one would type it from here: relative where it lies below the working directory."""
    below = program.absolute().is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(program) if below else str(program.absolute()))


def another_path(path: Path) -> str:
    """Return a remedy for a wrong path, with the command that lists it or the nearest directory."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))
    return f"See what is there: ls -la {_typed(there)}; then the same command again with another path."


def next_commands(root: Path) -> list[str]:
    """Return commands to try after a local run, ready to paste."""
    swarm, run = command_name(), shlex.quote(str(root))
    commands = {
        f'{swarm} sample {run} --prompt "The"': "more of what it says",
        f"{swarm} dashboard {run}": "the run as a page",
        f"{swarm} export --out {shlex.quote(str(root / 'model'))} --run {run}": "the model for transformers",
        f"{swarm} quickstart --minutes 10": "longer; of your own: --text FILE",
        f"{swarm} new --preset tiny": "the same in several terminals, or machines",
    }
    widest = max(map(len, commands))
    return [f"{command:<{widest}}  # {what}" for command, what in commands.items()]


def gathering(root: Path) -> str:
    """Return the command that gathers parts from several directories in one."""
    command = f"{command_name()} ckpt pull {shlex.quote(str(root))}"
    return (
        f"{command} --from A --from B, where A and B are the run's directories, copied from those machines "
        "(while peers of the run still live: --from INVITE)"
    )


def short_address(address: str) -> str:
    """A multiaddr of which a person sees enough: the peer id's middle is left out."""
    place, separator, peer = address.rpartition("/p2p/")
    return f"{place}{separator}{short_id(peer)}" if separator and len(peer) > 16 else address


def short_id(peer: str) -> str:
    """A peer id of which a person sees enough."""
    return f"{peer[:6]}…{peer[-6:]}"


def named(text: str, names: Mapping[str, str]) -> str:
    """A text with names in the place of peer ids, as far as they are known, and short ids else. What is part of an
    address stays: it is to be copied."""
    return _PEER_ID.sub(lambda found: names.get(found[0]) or short_id(found[0]), text)


def age_of_checkpoint(step: int, closed: int | None) -> str | None:
    """Return a note on the age of weights of ``step`` when the run closed ``closed`` steps (None: unknown); None:
    nothing."""
    later = f"; the run closed {count(closed, 'step')}" if closed is not None and closed > step else ""
    if step == 0:
        return f"using the checkpoint of step 0, the untrained weights{later}"
    return f"using the checkpoint of step {step}{later}" if later else None


def count(number: int, noun: str) -> str:
    """``1 trainer``, ``2 trainers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


MANY_TIMES = 20.0
"""Reading a text more often teaches a model that text, and little of the language."""


def read_over(tokens: int, microbatches: int, times: float, option: str = "--data") -> str:
    """Say how much a trainer's text is next to what the run reads of it, and what follows where it is little."""
    text = f"{tokens:,} tokens make {microbatches:,} microbatch{'es' if microbatches != 1 else ''}"
    if times < 1:
        return f"{text}, more than the run reads"
    text += f", which the run reads about {times:,.0f} times"
    if times < MANY_TIMES:
        return text
    return f"{text}: so little text is learned by heart, and not what is common to texts; give more with {option}"


def relaying_text(figures: Mapping[str, Any]) -> str:
    """``3 slots of 1 run, 2 circuits; 12 MB passed on, 0 requests refused``: of a relay's figures by name."""
    slots = f"{count(figures['slots'], 'slot')} of {count(figures['runs'], 'run')}"
    done = f"{size_text(figures['relayed_bytes'])} passed on, {count(figures['refused'], 'request')} refused"
    return f"{slots}, {count(figures['circuits'], 'circuit')}; {done}"


def listed(names: Sequence[str], joint: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``; empty for none."""
    *first, last = names or ("",)
    return f"{', '.join(first)} {joint} {last}" if first else last


def numbered(steps: Sequence[int]) -> str:
    """``step 36``, ``steps 36, 48 and 60``."""
    return f"step{'' if len(steps) == 1 else 's'} {listed([str(step) for step in steps])}"


def amount(value: float) -> str:
    """A number for people: ``950``, ``3.1 k``, ``12 M``; thousands, not 1024."""
    for unit in ("", " k", " M", " G"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"


def learnt_text(learnt: int, computed: int, figure: Callable[[int], str] = "{:,}".format) -> str:
    """``2,048 tokens``; ``512 learnt of 2,048 tokens`` where data leaves some out: prompts, padding."""
    return f"{figure(learnt)} learnt of {figure(computed)} tokens" if computed > learnt else f"{figure(learnt)} tokens"


def passed_text(kinds: Sequence[str], passed: int, of: int) -> str:
    """``for law and code, 12 of 16 microbatches in the newest step``: what passes a variant of a stage."""
    many = f", {passed} of {of} microbatches in the newest step" if of else ""
    return f"for {listed(kinds)}{many}" if kinds else many.removeprefix(", ")


def sharing_text(parts: Iterable[PartName], delink_at: int) -> str:
    """Say of a run that began with stages that share their layers whether they still do, by the parts there are."""
    if not (stages := max(map(shared_by, parts), default=0)):
        return f"each stage has layers of its own since step {delink_at}"
    until = f"until step {delink_at} is closed" if delink_at else "to the end"
    return f"{stages} stages share their layers {until}: any host serves any of them"


def printable(text: str) -> str:
    """A text with nothing in it that a terminal would obey; line ends and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def one_line(text: str) -> str:
    """A text as one line of bounded width, printable."""
    joined = " ".join(printable(text).split())
    return joined if len(joined) <= SAMPLE_WIDTH else joined[: SAMPLE_WIDTH - 1] + "…"


# --- what a command cannot do ----------------------------------------------------------------------------------------
# Said so that the reader knows what to look at and what to type next.


class CommandError(SwarmError):
    """An error as a person reads it: its cause, what to ``check``, the ``next`` command, and the exit code.

    For troubles of one machine that are no wrong setting (that is ConfigError) and no other peer's doing.
    """

    def __init__(self, cause: str, *, check: str = "", next_: str = "", exit_code: int = EXIT_ERROR) -> None:
        super().__init__(cause)
        self.cause, self.check, self.next, self.exit_code = cause, check, next_, exit_code


# --- codecs ----------------------------------------------------------------------------------------------------------


def codecs_text(codecs: Sequence[tuple[str, str]]) -> str:
    """Return what travels as what, for each boundary its codec of activations and of gradients: ``int8h``, or ``int8h
    (gradients float32) at boundaries 1 to 3, else float32``; "" for none. The first boundary, 0, lies before stage 0.
    """
    at: dict[tuple[str, str], list[int]] = {}
    for boundary, (forward, backward) in enumerate(codecs):
        at.setdefault((forward, backward), []).append(boundary)
    *rare, most = sorted(at, key=lambda pair: len(at[pair])) or [("", "")]
    some = "".join(f"{_pair_text(pair)} at {_span_text(at[pair])}, " for pair in rare)
    return f"{some}else {_pair_text(most)}" if rare else _pair_text(most)


def _pair_text(pair: tuple[str, str]) -> str:
    forward, backward = pair
    return forward if forward == backward else f"{forward} (gradients {backward})"


def _span_text(boundaries: Sequence[int]) -> str:
    first, last = boundaries[0], boundaries[-1]
    if first == last:
        return f"boundary {first}"
    whole = last - first == len(boundaries) - 1
    return f"boundaries {first} to {last}" if whole else f"boundaries {listed([str(one) for one in boundaries])}"
