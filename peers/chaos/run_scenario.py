"""Run ``swarm chaos``: read the scenario, choose the world, play, judge, write report and picture."""

from __future__ import annotations

import contextlib
import difflib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.chaos import schedule
from peers.chaos.cast import SwarmSpec, cast_of, manifest_of, trainers_of
from peers.chaos.faults import Fault, Kill, KillDaemon, Pause, Stop
from peers.chaos.lives import Player
from peers.chaos.picture import picture_svg
from peers.chaos.play import Play, PlayOutcome
from peers.chaos.scenario import Scenario, load_scenario
from peers.chaos.schedule import Draw
from peers.chaos.strikes import Planned, planned
from peers.chaos.verdict import MANIFEST, Judged, compare, document, judge, lines
from peers.chaos.world import PlayWorld
from peers.chaos.worlds import CannotPlay, Images, WorldName, choose_world, world_of
from peers.console.interrupt import allow, defer, interruptible
from peers.exit_codes import EXIT_ERROR, EXIT_OK
from swarm.clock import Clock
from swarm.errors import ConfigError

CHARACTERS = 120_000
"""Of text for each trainer; Python's documentation is dealt out."""
LONGEST_MINUTES = 60.0
"""How far draws reach in a play that ends by steps."""
REPORT, PICTURE, TIMELINE = "report.json", "picture.svg", "timeline.txt"
SCENARIOS = Path("docker/scenarios")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of ``swarm chaos``. ``on`` None: containers if an engine answers."""

    scenario: Path
    on: str | None = None
    out: Path | None = None
    report: Path | None = None
    images: Images = Images()
    seed: int | None = None
    keep: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """A play before it begins: what is played where, its directory, its peers, and what strikes them."""

    scenario: Scenario
    world: WorldName
    root: Path
    cast: SwarmSpec
    strikes: tuple[Planned, ...]
    drawn: tuple[Draw, ...]


def chaos(options: Options, clock: Clock) -> int:
    """Play it. Returns 0 when everything was kept, 1 when an invariant or expectation broke or a fault did not happen.
    Raises ConfigError for a scenario that cannot be played; Ctrl-C ends the play, writes the report, and passes.
    Interrupts are kept back but for the play itself: they would cut short what removes it. Main thread only."""
    say = _quiet if options.json else _say
    file = _file(options.scenario)
    scenario = load_scenario(file)
    if options.seed is not None:
        scenario = scenario.model_copy(update={"seed": options.seed})
    name, why = choose_world(scenario, options.on)
    _check_report(options.report)
    with _directory(options.out, scenario, clock) as root:
        staged = _prepare(scenario, name, file.parent, root)
        say(f"{scenario.name}: {scenario.proves}")
        say(f"played among {name} ({why}), in {root}")
        other = None
        if (compared := scenario.compared()) is not None:
            # Not within: all homes below a play's directory are its evidence.
            with _directory(root.with_name(f"{root.name}-{compared.name}"), compared, clock) as beside:
                say(f"compared with {compared.name}, which is played first, in {beside}")
                first = _prepare(compared, name, file.parent, beside)
                other = _play_somewhere(replace(options, report=None, json=False), first, say)
        judged = _play_somewhere(options, staged, say, other)
    return EXIT_OK if judged.verdict == "kept" else EXIT_ERROR


def _file(named: Path) -> Path:
    """Return the scenario's file; one of the project may be called by its name alone. Raises ConfigError for a
    misspelt name."""
    ours = {path.stem: path for path in SCENARIOS.glob("*.toml")}
    if named != Path(named.name) or named.exists():
        return named
    close = difflib.get_close_matches(named.stem, ours, n=1)
    if named.name not in ours and close:
        raise ConfigError(
            "SCENARIO.toml", str(named), "a file, or the name of one of docker/scenarios", f"Did you mean {close[0]}?"
        )
    return ours.get(named.name, named)


def _check_report(path: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written: before a play, which may take long."""
    try:
        if path is not None:
            path.open("a", encoding="utf-8").close()
    except OSError as error:
        allowed = "a file that can be written"
        raise ConfigError("--report", str(path), allowed, f"{error.strerror}; choose another.") from error


def _play_somewhere(
    options: Options, staged: Staged, say: Callable[[str], None], other: Judged | None = None
) -> Judged:
    """Play it where it was to be played, or among processes where that has no means and nobody asked for it."""
    try:
        return _play(options, staged, say, other)
    except CannotPlay as error:
        if staged.world == "processes" or options.on or staged.scenario.needs:
            raise
        say(f"{error}\nplayed among processes instead")
        return _play(options, replace(staged, world="processes"), say, other)


def _play(options: Options, staged: Staged, say: Callable[[str], None], other: Judged | None) -> Judged:
    """``other``: the play that it is compared with."""
    scenario, name, root, cast = staged.scenario, staged.world, staged.root, staged.cast
    strikes, drawn = staged.strikes, staged.drawn
    faults = [*(one.strike.fault for one in strikes), *_drawn_faults(drawn, cast)]
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        say(line)

    defer()
    with contextlib.ExitStack() as last:
        judged: list[Judged] = []
        with world_of(name, root, scenario, faults, options.images) as world:
            play = Play(scenario, cast, world, strikes, drawn)

            def close() -> None:
                play.outcome.problems += world.unkept()
                (root / TIMELINE).write_text("\n".join(told) + "\n", encoding="utf-8")
                alone = judge(scenario, name, world, _players(cast, world, play.outcome), play.outcome)
                judged.append(alone if other is None else compare(alone, other))
                _write(judged[0], root, options, say)
                if not judged[0].problems and not options.keep:
                    _forget(root)

            last.callback(close)  # once the world has ended, however the play did: only then all evidence is there
            with interruptible():
                play.run(tell)
    allow()
    return judged[0]


def _prepare(scenario: Scenario, world: WorldName, beside: Path, root: Path) -> Staged:
    from peers.founding_files import load_foundation
    from peers.manifest_file import render_tables
    from peers.options.foundation import Foundation

    manifest = root / MANIFEST
    manifest.write_text(render_tables(manifest_of(scenario, _preset(scenario))), encoding="utf-8")
    load_foundation(Foundation(file=manifest))  # the founder would refuse it
    cast = cast_of(scenario, manifest, _texts(scenario, root / "data"))
    return Staged(scenario, world, root, cast, planned(scenario, cast), _draws(scenario, cast, beside))


def _preset(scenario: Scenario) -> Mapping[str, Any]:
    if scenario.swarm.preset is None:
        return {}
    from peers.founding_files import load_foundation
    from peers.options.foundation import Foundation

    return load_foundation(Foundation(preset=scenario.swarm.preset))


def _texts(scenario: Scenario, root: Path) -> dict[str, Path]:
    """Each trainer's own text, and a sample for the tokenizer: parts of Python's documentation that do not overlap."""
    from peers.data.text import built_in_corpus

    names = ("sample", *trainers_of(scenario))
    paragraphs = "\n\n".join(built_in_corpus(CHARACTERS * len(names)).documents).split("\n\n")
    root.mkdir()
    for number, name in enumerate(names):
        (root / f"{name}.txt").write_text("\n\n".join(paragraphs[number :: len(names)]), encoding="utf-8")
    return {name: root / f"{name}.txt" for name in names}


def _draws(scenario: Scenario, cast: SwarmSpec, beside: Path) -> tuple[Draw, ...]:
    if scenario.schedule is not None and scenario.trace is not None:
        raise ConfigError("trace", "…", "one of schedule and trace", "Leave one of them out.")
    seconds = 60.0 * (scenario.until.minutes or LONGEST_MINUTES)
    if scenario.schedule is not None:
        cast.chosen(scenario.schedule.among, "schedule.among")
        return schedule.draws(scenario.schedule, scenario.seed, seconds)
    if scenario.trace is None:
        return ()
    places = len(cast.chosen(scenario.trace.among, "trace.among"))
    if scenario.trace.file is not None:
        return schedule.read_trace(scenario.trace, beside, scenario.seed)
    return schedule.market(scenario.trace, places, scenario.seed, seconds)


def _drawn_faults(drawn: Sequence[Draw], cast: SwarmSpec) -> Iterator[Fault]:
    """One of each kind that will be drawn, for the world to say whether it can."""
    one = cast.names[0]
    made: Mapping[str, Fault] = {"kill": Kill((one,)), "stop": Stop((one,)), "pause": Pause((one,), 1.0)}
    for kind in sorted({draw.kind for draw in drawn}):
        yield made.get(kind, KillDaemon(one))


def _players(cast: SwarmSpec, world: PlayWorld, outcome: PlayOutcome) -> list[Player]:
    regions = {member.name: (member.spec.role, member.spec.region) for member in cast.members}
    found = []
    for name in (*cast.names, *sorted(outcome.started - set(cast.names))):
        role, region = regions.get(name, ("stage", ""))
        try:
            found.append(Player(name, world.identity(name), role, region))
        except KeyError:  # it was never started
            continue
    return found


def _write(judged: Judged, root: Path, options: Options, say: Callable[[str], None]) -> None:
    text = json.dumps(document(judged), indent=1) + "\n"
    title = f"{judged.scenario.name} ({judged.verdict}): {judged.scenario.proves}"
    (root / REPORT).write_text(text, encoding="utf-8")
    (root / PICTURE).write_text(picture_svg(title, judged.lives, judged.strikes, judged.closings), encoding="utf-8")
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    for line in lines(judged):
        say(line)
    say(f"report {root / REPORT}, picture {root / PICTURE}")
    if options.json:
        _say(json.dumps(document(judged)))


@contextlib.contextmanager
def _directory(out: Path | None, scenario: Scenario, clock: Clock) -> Iterator[Path]:
    """A new directory for everything that the play makes; none is left of a play that could not begin."""
    stamp = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%d-%H%M%S")
    root = (out or Path("out") / f"chaos-{scenario.name}-{stamp}").absolute()
    try:
        root.mkdir(parents=True)
    except OSError as error:
        allowed = "a directory that does not exist yet, where one can be made"
        raise ConfigError("--out", str(root), allowed, f"{error.strerror}; choose another.") from error
    try:
        yield root
    finally:
        if not (root / TIMELINE).exists():  # it was never played; one that cannot be judged is evidence
            shutil.rmtree(root, ignore_errors=True)


def _forget(root: Path) -> None:
    """Homes, data and logs of a play that was kept: nobody looks at them."""
    for name in ("homes", "lost", "logs", "data", "clocks", "files"):
        shutil.rmtree(root / name, ignore_errors=True)


def scenarios(root: Path = SCENARIOS) -> list[tuple[str, str, str]]:
    """(file, how long it plays once the first step is closed, what it proves) of those that come with the project,
    where they are here."""
    found = []
    for path in sorted(root.glob("*.toml")):
        scenario = load_scenario(path)
        needs = f" (needs {scenario.needs})" if scenario.needs else ""
        until = scenario.until
        long = f"{until.minutes:g} min" if until.minutes else f"{until.steps} steps"
        found.append((str(path), long, scenario.proves + needs))
    return found


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _quiet(line: str) -> None:
    """Nothing but JSON is wanted."""
