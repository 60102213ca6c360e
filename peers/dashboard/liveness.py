"""Is what is shown of a run the present, and who of its members does not answer? Pure.

:func:`standing` decides how the run stands, and says why it is not as one would wish; :class:`Pulse` keeps what it
needs to know for that, and :class:`Silences` who has fallen silent, so that one can be told of it and of the return.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from swarm.clock import moment

SILENT_S = 60.0
"""Files to which nobody wrote for so long are of a run that is over, or was cut short."""
UNHEARD_S = 8.0
"""A peer that is asked may take so long until it counts as silent."""
STALLED_S = 20.0
STALLED_STEPS = 6
"""A run stalls when no step closes for so long, and for the time of so many steps."""
LOOKS = 2
"""So many times a member must have been asked in vain until it is told as silent, for one answer may come late; and
must have answered until it is told as back."""


# --- how the run stands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What is known of a run ``at`` a time. ``wrote_at`` is when somebody wrote to the files that are read, None where
    none are; ``heard_at`` when an answer came last, None where nobody is asked; ``unheard`` says who does not answer,
    and ``gone`` why nobody can be asked any more. ``step_s`` is what a step took lately."""

    at: float
    ended: bool = False
    begun: bool = False
    wrote_at: float | None = None
    heard_at: float | None = None
    unheard: tuple[str, str] | None = None
    gone: str = ""
    step: int = 0
    step_at: float | None = None
    step_s: float | None = None
    silent: Collection[str] = ()
    waits_for: str = ""


def standing(signs: Signs) -> tuple[str, str]:
    """Return how a run stands, and why where that is not plain: ``training``, ``waiting`` to begin or for what members
    wait for, ``ended``; ``stalled`` where no step closes or who is asked hangs, ``away`` where nobody can be asked any
    more, and ``past`` of files to which nobody writes. Figures are the present where it is :func:`fresh`."""
    if signs.ended:
        return "ended", ""
    if signs.gone:
        return "away", f"{signs.gone}; what is shown is from before"
    if signs.unheard is not None and signs.heard_at is not None and signs.at - signs.heard_at > UNHEARD_S:
        how, who = signs.unheard
        return how, f"{who}; what is shown is from {moment(signs.heard_at)[:8]}"
    steps_s = (signs.step_s or 0.0) * STALLED_STEPS
    if signs.heard_at is None and signs.wrote_at is not None and signs.at - signs.wrote_at > max(SILENT_S, steps_s):
        since = f" since {moment(signs.wrote_at)[:8]}" if signs.wrote_at else ""
        return "past", f"nobody writes to its files{since}: the run is over, was cut short, or goes on elsewhere"
    if not signs.begun:
        return "waiting", signs.waits_for or "the run has not begun"
    asked = signs.heard_at is not None or signs.wrote_at is not None
    if asked and signs.step_at is not None and (late_s := signs.at - signs.step_at) > max(STALLED_S, steps_s):
        return "stalled", _stalled(signs, late_s)
    if signs.waits_for:
        return "waiting", signs.waits_for
    return "training", "" if signs.step else "step 1 is under way: there are figures when it closes"


def fresh(state: str, signs: Signs) -> bool:
    """Return whether figures are of a run that lives, and not what was seen of it before."""
    if state == "stalled":  # of a run that hangs they are true; of one that nobody answers for nobody knows
        return signs.unheard is None
    return state in ("training", "waiting")


def _stalled(signs: Signs, late_s: float) -> str:
    took = f", where one took {signs.step_s:.1f} s" if signs.step_s else ""
    silent = f"; no answer from {', '.join(sorted(signs.silent)[:8])}" if signs.silent else ""
    waits = f"; it waits for {signs.waits_for}" if signs.waits_for else ""
    return f"no step has closed for {late_s:.0f} s{took}{silent}{waits}"


class Pulse:
    """When there was news of a run, and of which kind; ``asked`` is the id of the peer that is asked, if it is one."""

    def __init__(self) -> None:
        self.wrote_at: float | None = None
        self.heard_at: float | None = None
        self.unheard: tuple[str, str] | None = None
        self.gone = self.waits_for = self.asked = ""
        self.now: float | None = None
        self._news = False
        self._step: tuple[int, float] | None = None

    def wrote(self, at: float) -> None:
        """Somebody wrote to the files that are read."""
        if at > (self.wrote_at or 0.0):
            self.wrote_at = at

    def answered(self) -> None:
        """The one who was asked has answered."""
        self._news, self.unheard, self.gone = True, None, ""

    def missed(self, how: str, who: str) -> None:
        """It has not: ``stalled`` where it is there, ``away`` where it may be gone; ``who`` says so in words."""
        self.unheard = how, who

    def nobody_asks(self) -> None:
        """Nobody is asked for a while, so that its silence means nothing."""
        self.heard_at, self.unheard, self._news = None, None, False

    def tick(self, at: float, step: int, step_at: float | None) -> float:
        """Take the time ``now``; return since when this is the newest step: since it closed, where that is known."""
        self.now = at
        if self._news or (self.unheard is not None and self.heard_at is None):
            self.heard_at, self._news = at, False
        if self._step is None or self._step[0] != step:
            self._step = step, at if step_at is None else min(at, step_at)  # clocks may differ
        return self._step[1]


# --- who does not answer ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Silence:
    how: str
    why: str
    step: int
    looks: int = 0
    told: bool = False
    answers: int = 0


class Silences:
    """Members that do not answer: how, why and since which step. Forgets who has left the run."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}

    def __contains__(self, peer: str) -> bool:
        """Return whether it is told to be silent."""
        return peer in self._silent and self._silent[peer].told

    def __iter__(self) -> Iterator[str]:
        """Those told to be silent."""
        return iter([peer for peer, one in self._silent.items() if one.told])

    def how(self, peer: str) -> str:
        """Return ``stalled`` or ``away``; "" where nobody knows."""
        return self._silent[peer].how if peer in self._silent else ""

    def why(self, peer: str) -> str:
        """Return the reason in words; "" for who is not silent."""
        one = self._silent.get(peer)
        return "" if one is None else one.why or f"{IN_WORDS[one.how]} since step {one.step}"

    def lost(self, peer: str, why: str, step: int, how: str = "") -> bool:
        """Somebody says that it does not answer, and why. Return whether that is news."""
        known = self._silent.setdefault(peer, _Silence(how, why, step))
        known.why, news, known.told, known.answers = why or known.why, not known.told, True, 0
        return news

    def missed(self, peer: str, how: str, step: int) -> bool:
        """It was asked in vain. Return whether that is news: once it was often enough."""
        known = self._silent.setdefault(peer, _Silence(how, "", step))
        known.how, known.looks, known.answers = how, known.looks + 1, 0
        news = known.looks >= LOOKS and not known.told
        known.told = known.told or news
        return news

    def answered(self, peer: str) -> bool:
        """It has answered. Return whether that is news: an answer may be older than somebody's word of its silence, so
        that two are waited for."""
        known = self._silent.get(peer)
        if known is None:
            return False
        known.answers += 1
        return (not known.told or known.answers >= LOOKS) and self.back(peer)

    def back(self, peer: str) -> bool:
        """It is there. Return whether it was told to be silent."""
        known = self._silent.pop(peer, None)
        return known is not None and known.told

    def forget(self, peer: str) -> None:
        """It is not in the run any more."""
        self._silent.pop(peer, None)


IN_WORDS: Mapping[str, str] = {
    "stalled": "it has not answered, though its connection stands (stopped, too busy, or cut off)",
    "away": "it cannot be reached",
    "": "it has not answered",
}
"""How a member does not answer."""
