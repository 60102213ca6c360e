"""``swarm quickstart``: a whole swarm on one machine, from text to a trained model. Read top to bottom:

choose      how many steps fit into the minutes, by a measurement                    (peers.local.pace)
prepare     tokenizer, shards, manifest, while the fork server imports torch         (peers.data.prepare)
train       the bootstrap first, then everybody; a row per step                      (peers.local.run)
judge       held-out loss before and after, a sample                                 (peers.commands.evaluate)
finish      the plot, the report, what to type next; also after a failure
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peers.commands.preflight import check_device, check_output, check_reporting
from peers.console.interrupt import Interrupted, allow, check, defer, interruptible, received
from peers.console.words import (
    MANY_TIMES,
    amount,
    command_name,
    count,
    learnt_text,
    listed,
    next_commands,
    one_line,
    print_error,
    read_over,
    reason_of,
    short_address,
)
from peers.data.prepare import TEXT, LocalText, PreparedRun, prepare_run
from peers.data.trainer_data import DataGiven, check_data, data_opened
from peers.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE, exit_code_of
from peers.founding_files import Founded, load_foundation, pending
from peers.home.run_directory import RunDirectory, create_run_directory
from peers.local.launch import PeerGroup
from peers.local.pace import BATCH_KEYS, MINUTES, fitting, measure
from peers.local.plot import loss_svg, loss_text
from peers.local.progress import Progress, RunView
from peers.local.report import Evaluation, RunFacts, RunOutcome, build_report, render_report, write_report
from peers.local.run import BOOTSTRAP, CHECKPOINTS_PER_RUN, LocalRun, RunBroken, peer_names
from peers.options.foundation import Foundation
from peers.options.local import MOST_PEERS, LocalOptions
from peers.profiles import put, value_at
from swarm import __version__
from swarm.clock import Clock
from swarm.config import Manifest, StartWhen, parse_manifest
from swarm.device import resolve_device
from swarm.disk import size_text
from swarm.errors import ConfigError, StateError, SwarmError
from swarm.monitoring.reader import EventTail

SAMPLE_PROMPT = "The"
SAMPLE_TOKENS, SAMPLE_TOKENS_LARGE = 60, 20
BYTES_A_PARAMETER = 12
"""Of a checkpoint with AdamW's state."""
EVALUATE_S = 4.0
"""Of a run of some minutes as much held-out text is read as this allows, before and after."""
AROUND_S, JUDGE_S = 28.0, 12.0
"""Start and end of a run of some minutes may take so long beside them, and the end of that."""
START_TIMES, JUDGE_TIMES = 4.0, 1.5
"""Start and end take so many times what the first piece does: torch is loaded, and the machine is measured."""
LATE = 0.5
"""A slow start takes this share of the minutes at most: on a machine that has a tenth of a core all takes longer."""


PRESET, HOSTS, TRAINERS = "tiny", 4, 2
"""What is played where nothing is said: of a RUN.toml its own holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartOptions:
    """The run that ``swarm quickstart`` founds, its manifest as far as it is known without a tokenizer, and what is
    said of playing it. Its steps are to take ``minutes``; None: it says how many."""

    foundation: Foundation
    document: dict[str, Any]
    local: LocalOptions
    minutes: float | None

    @property
    def manifest(self) -> Manifest:
        """Return what is known of the run's before its text is read."""
        return parse_manifest(pending(self.document), "quickstart")

    @property
    def batch_said(self) -> frozenset[str]:
        """The fields of a :class:`~peers.local.pace.StepShape` that a person named."""
        read = {} if self.foundation.file is None else self.document
        said = {
            name
            for name, key in BATCH_KEYS.items()
            if key in self.foundation.changes or value_at(read, key) is not None
        }
        return frozenset(said if self.foundation.model is not None else said | {"context"})

    @property
    def text(self) -> LocalText:
        """Return what its trainers learn."""
        local = self.local
        return LocalText(paths=local.text, special_tokens=local.special_tokens, allow_bad=local.allow_bad)


def plan_run(foundation: Foundation, local: LocalOptions) -> QuickstartOptions:
    """Return what is to be played. Of a model of ``transformers`` it tries whether it can be cut: some seconds.

    Raises ConfigError naming the option.
    """
    foundation = dataclasses.replace(foundation, text=local.text)  # for a model without a tokenizer.json
    of_model = foundation.model is not None and foundation.file is None
    peers_said = local.peers is not None or foundation.trainers is not None
    if foundation.file is None:
        if foundation.preset is None and foundation.model is None:
            foundation = dataclasses.replace(foundation, preset=PRESET)
        trainers = TRAINERS if foundation.trainers is None else foundation.trainers
        foundation = dataclasses.replace(foundation, hosts=local.peers or HOSTS, trainers=trainers)
    elif local.peers is not None:
        foundation = dataclasses.replace(foundation, hosts=local.peers)
    try:
        document = load_foundation(foundation)
    except ConfigError as error:
        raise error if foundation.hosts is None else _of_peers(error) from None
    if of_model and not peers_said:
        document = _lean(document)
    manifest = parse_manifest(pending(document), "quickstart")
    if manifest.split.route_by == "domain":
        raise ConfigError("split.route_by", "domain", "a run whose trainers each name theirs",
                          f"Found it with {command_name()} new, and join it with --domain NAME.",
                          why="all trainers of a quickstart read one text")  # fmt: skip
    start = manifest.run.start_when
    for name, number in (("--peers", start.stage_hosts), ("--trainers", start.trainers)):
        if number > MOST_PEERS:
            raise ConfigError(name, number, f"from 1 to {MOST_PEERS}", "Choose a number in that range.")
    if foundation.file is None and manifest.averaging.mode == "local":
        document["averaging"]["local"] = FEW_ROUNDS | document["averaging"].get("local", {})
    minutes = _minutes(foundation, local, manifest, value_at(document, "run.steps"))
    return QuickstartOptions(foundation=foundation, document=document, local=local, minutes=minutes)


LARGE_PARAMETERS = 32_000_000
"""Of a larger model one machine has neither memory nor time for replicas, copies and long samples."""


def _lean(document: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a run with as few peers as it takes, if its model is large."""
    from swarm.models.registry import family_of  # it imports torch, as the model has already

    manifest = parse_manifest(pending(document), "quickstart")
    family = family_of(manifest.model)
    cost = family.cost(family.whole, manifest.model.context)
    if cost.parameters + cost.frozen < LARGE_PARAMETERS:
        return document
    few = {"stage_hosts": manifest.split.stages, "trainers": 1}
    return put(put(document, ["run", "start_when"], few), ["run", "copies"], 0)


def _minutes(foundation: Foundation, local: LocalOptions, manifest: Manifest, steps: int | None) -> float | None:
    """Return how long the steps are to take; None where it is said how many. Raises ConfigError for both."""
    minutes = local.minutes
    if minutes is not None and foundation.steps is not None:
        raise ConfigError("--minutes", minutes, "one of --minutes and --steps", "Leave one of the two out.")
    if minutes is not None and manifest.run.reproducible:
        why = "a machine's speed would choose the steps, and so the weights"
        raise ConfigError("--minutes", minutes, "no option besides --reproducible", "Say --steps instead.", why=why)
    in_file = foundation.file is not None and steps is not None
    if minutes is None and (foundation.steps is not None or manifest.run.reproducible or in_file):
        return None
    return minutes or MINUTES


FEW_ROUNDS = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""Plain averaging: in the few rounds of such a run DiLoCo's momentum makes up to seven steps of one (measured: 0.5 nats
behind, benchmark `convergence` at df58d3c1)."""


def _of_peers(error: ConfigError) -> ConfigError:
    """The error of a number of stage hosts, which are called peers here."""
    if error.key not in ("--hosts", "run.start_when.stage_hosts"):
        return error
    remedy = "Ask for more peers (--peers), or fewer stages (--stages)."
    return ConfigError("--peers", error.value, error.allowed, remedy, why="every stage needs a replica")


def _little(prepared: PreparedRun) -> str:
    """Say so, where a trainer's text is read over and over in this run; "" where not."""
    manifest = prepared.manifest
    data = data_opened(manifest, min(prepared.rows) // manifest.batch.microbatch_size)
    if data.times < MANY_TIMES:
        return ""
    return f"a trainer's {read_over(data.tokens, data.microbatches, data.times, '--text')}"


def quickstart(options: QuickstartOptions, clock: Clock, *, make_group: Callable[[Path], PeerGroup] = PeerGroup) -> int:
    """Run it all and return the exit code: 0 trained, 1 error, 3 a peer failed, 130 or 143 interrupted.

    Raises ConfigError, having left nothing, for what cannot be run. Everything else ends in the report and
    one line. Leaves no process and no temporary file, whatever happens. Main thread only; interrupts count until it is
    decided how the run ended.
    """
    local = options.local
    check_device(local.device)
    if local.report is not None:
        check_output("--report", local.report)
    check_reporting(local.report_to, local.report_dir)
    for path in local.text:
        check_data(DataGiven(path, special_in_text=local.special_tokens, allow_bad=local.allow_bad), TEXT)
    # From the first trace on disk on, an interrupt must find somebody who says what is kept.
    defer()
    tempfile.gettempdir()  # the first call tries the directory by a file, which an interrupt would leave there
    directory = create_run_directory(local.out, clock)
    run = _Quickstart(options, directory, make_group(directory.launch_log), clock)
    try:
        outcome = run.train_and_judge()
    except ConfigError:
        shutil.rmtree(directory.root, ignore_errors=True)
        raise
    return run.finish(outcome)


class _Quickstart:
    def __init__(self, options: QuickstartOptions, directory: RunDirectory, group: PeerGroup, clock: Clock) -> None:
        self._options, self._directory, self._group, self._clock = options, directory, group, clock
        self._began = self._phase_began = psutil.Process().create_time()
        self._manifest = options.manifest
        self._progress = Progress(quiet=options.local.json)
        self._view = RunView()
        self._tail = EventTail({name: directory.events(name) for name in peer_names(self._manifest)})
        self._announced: set[str] = set()
        self._run: str | None = None
        self._evaluation = Evaluation()
        self._ends: float | None = None

    @property
    def _start(self) -> StartWhen:
        return self._manifest.run.start_when

    def train_and_judge(self) -> RunOutcome:
        """Do everything that takes time, with interrupts let in. Raises only ConfigError, and only while the run is
        being prepared; however it ends, no process is left."""
        try:
            with interruptible():
                try:
                    self._train()
                finally:
                    self._stop()
                self._judge()
            return RunOutcome(exit_reason="completed", exit_code=EXIT_OK, message=self._summary())
        except Interrupted as interrupt:
            return self._interrupted(interrupt)
        except RunBroken as broken:
            return RunOutcome(
                exit_reason="peer_failed" if broken.peer else "error",
                exit_code=broken.exit_code,
                message=str(broken),
                blamed=broken.peer,
            )
        except SwarmError as error:
            lost = received()
            if lost is not None:
                return self._interrupted(lost)
            if isinstance(error, ConfigError) and self._run is None:
                raise
            # Once it is prepared, what was asked for was no wrong usage.
            code = exit_code_of(error)
            code = EXIT_ERROR if code == EXIT_USAGE else code
            return RunOutcome(exit_reason="error", exit_code=code, message=reason_of(error))
        finally:
            self._progress.close()

    def _train(self) -> None:
        self._progress.say(f"swarm {__version__} · {self._size()}, {self._manifest.split.ends} ends", indent=2)
        minutes = self._options.minutes
        if minutes is not None:
            self._choose_steps(minutes)
        self._group.open()
        self._progress.waiting("preparing text")
        founded = self._prepare()
        self._check_room()
        # Not earlier: what cannot be prepared leaves no directory.
        root = self._directory.root
        self._progress.say(f"everything goes to {root}", indent=2)
        self._progress.say(f"look: {command_name()} dashboard {shlex.quote(str(root))}", indent=2)
        self._progress.waiting("starting the bootstrap")
        LocalRun(
            manifest=founded.manifest,
            model_files=founded.model_files,
            directory=self._directory,
            device=self._options.local.device,
            group=self._group,
            tail=self._tail,
            view=self._view,
            clock=self._clock,
            on_change=self._show,
            reports=self._reports(),
            ends=self._ends,
        ).train()

    def _choose_steps(self, minutes: float) -> None:
        """Measure, before anything else makes the machine busy, and have the manifest say what was chosen."""
        self._progress.waiting(f"measuring what fits into {minutes:g} minutes")
        options, manifest = self._options, self._manifest
        began = self._clock.wall()
        device = str(resolve_device(options.local.device))
        speed = measure(manifest, device, self._clock)
        check()
        took = self._clock.wall() - began
        judge_s = max(JUDGE_S, JUDGE_TIMES * took)
        late_s = min(max(0.0, START_TIMES * took + judge_s - AROUND_S), LATE * 60 * minutes)
        self._ends = began + 60 * minutes + AROUND_S - judge_s
        said, tokens = options.batch_said, options.text.tokens
        pace = fitting(manifest, speed, minutes, said=said, tokens=tokens, late_s=late_s)
        document = options.document
        for key, value in pace.changes(manifest).items():
            document = put(document, key.split("."), value)
        self._options = dataclasses.replace(options, document=document)
        self._manifest = self._options.manifest
        self._done("measured", pace.described(device, minutes))

    def _reports(self) -> dict[str, Any]:
        """Return what its one reporter is told: it sees the whole run, from the first step on."""
        local = self._options.local
        if local.report_to is None:
            return {}
        directory = local.report_dir or self._directory.root / "reports"
        return {"report_to": local.report_to, "report_dir": directory.absolute()}

    def _prepare(self) -> Founded:
        options = self._options
        prepared = prepare_run(options.foundation, options.document, options.text, self._directory)
        self._manifest, self._run = prepared.manifest, prepared.manifest.run_id
        tokens = sum(shard.tokens for shard in prepared.shards)
        self._done(
            "text",
            f"{options.text.name}: {amount(tokens)} tokens in {count(len(prepared.shards), 'private shard')}, "
            f"{amount(prepared.held_out.tokens)} held out{prepared.left_out}",
        )
        for said in prepared.founded.said:
            self._progress.say(" ".join(said), indent=2)
        if little := _little(prepared):
            self._progress.say(little, indent=2)
        return prepared.founded

    def _check_room(self) -> None:
        """Raises StateError where the disk has no room for the checkpoints."""
        from swarm.models.registry import family_of  # torch, as above

        root, family = self._directory.root, family_of(self._manifest.model)
        parameters = family.cost(family.whole, self._manifest.model.context).parameters
        wanted, free = BYTES_A_PARAMETER * parameters * (CHECKPOINTS_PER_RUN + 1), shutil.disk_usage(root).free
        if free < wanted:
            there = f"{size_text(free)} are free, and checkpoints take up to {size_text(wanted)}"
            raise StateError(f"{root}: {there}. Make room, or name a directory on another disk with --out.")

    def _show(self) -> None:
        new = self._view.addresses.keys() - self._announced
        self._announced |= new
        everybody = len(peer_names(self._manifest))
        if BOOTSTRAP in new:
            addresses = self._view.addresses[BOOTSTRAP]
            self._done("bootstrap", short_address(addresses[0]) if addresses else "")
        if new and len(self._announced) == everybody:
            devices = [f"{device} ({why})" for device, why in sorted(self._view.devices.items())]
            self._done("peers", f"{everybody - 1} connected, computing on {listed(devices)}")
        self._progress.update(self._view, self._clock.wall(), self._manifest.run.steps)
        if len(self._announced) == everybody:
            self._progress.waiting(
                f"step {min(self._view.steps.last + 1, self._manifest.run.steps)} of {self._manifest.run.steps}"
            )
        elif self._announced:
            self._progress.waiting(f"starting peers: {len(self._announced) - 1} of {everybody - 1}")

    def _done(self, label: str, text: str) -> None:
        """Say so, with the seconds since the piece of preparation before."""
        began, self._phase_began = self._phase_began, self._clock.wall()
        self._progress.done(label, text, max(0.0, self._phase_began - began))

    def _stop(self) -> None:
        """Stop every peer and take in what they said to the last; an interrupt waits for that."""
        defer()
        self._group.stop()
        for told in self._tail.read_rest():
            self._view.add(told)
        self._progress.update(self._view, self._clock.wall(), self._manifest.run.steps, final=True)
        allow()

    def _judge(self) -> None:
        self._progress.waiting("evaluating on held-out text")
        # Here and not above: torch takes seconds to import, and the peers needed the processor until now.
        from peers.checkpoints.choose_checkpoint import choose_step
        from peers.commands.evaluate import Sampling, held_out_loss, load_to_ask, sample_text

        read, ends = 0, self._clock.monotonic() + EVALUATE_S

        def enough(rows: int) -> bool:
            nonlocal read
            read = rows
            return self._options.minutes is not None and self._clock.monotonic() > ends

        large = (self._view.parameters or 0) >= LARGE_PARAMETERS
        threads = len(os.sched_getaffinity(0)) if large else 1
        first, last = choose_step(self._directory, 0), choose_step(self._directory)
        before = held_out_loss(load_to_ask(first, threads=threads), first, self._directory.held_out, enough)
        check()
        trained = load_to_ask(last, threads=threads)
        check()
        after = held_out_loss(trained, last, self._directory.held_out, lambda rows: rows >= read)
        tokens = SAMPLE_TOKENS_LARGE if large else SAMPLE_TOKENS
        sampling = Sampling(prompt=SAMPLE_PROMPT, tokens=tokens, seed=self._manifest.run.seed)
        sample = sample_text(trained, sampling)
        self._evaluation = Evaluation(first=before, last=after, last_step=last.step, sample=sample)

    def finish(self, outcome: RunOutcome) -> int:
        """Write plot and report, say how it ended, return the exit code. Interrupts are kept back."""
        code = self._write(outcome)
        self._tell(outcome)
        return code

    def _write(self, outcome: RunOutcome) -> int:
        facts = RunFacts(
            run=self._run,
            directory=str(self._directory.root),
            peers=self._start.stage_hosts,
            stages=self._manifest.split.stages,
            trainers=self._start.trainers,
            steps_wanted=self._manifest.run.steps,
            began=self._began,
            ended=self._clock.wall(),
        )
        report = build_report(facts, self._view, self._evaluation, outcome)
        try:
            self._draw()
            for path in filter(None, (self._directory.report, self._options.local.report)):
                write_report(report, path)
        except SwarmError as error:
            print_error(reason_of(error))
            return outcome.exit_code or exit_code_of(error)
        if self._options.local.json:
            sys.stdout.write(render_report(report) + "\n")
            sys.stdout.flush()
        return outcome.exit_code

    def _draw(self) -> None:
        evaluation = self._evaluation
        trained = [(row.step, row.loss) for row in self._view.steps.rows() if not row.given_up]
        held_out = [
            (step, loss)
            for step, loss in ((0, evaluation.first), (evaluation.last_step, evaluation.last))
            if step is not None and loss is not None
        ]
        title = self._size()
        try:
            self._directory.plot.write_text(loss_svg(title, trained, held_out), encoding="utf-8")
        except OSError as error:
            raise StateError(f"{self._directory.plot}: {error.strerror}. Check space and permissions.") from error

    def _tell(self, outcome: RunOutcome) -> None:
        if outcome.exit_reason == "completed":
            self._tell_done(outcome)
        elif outcome.exit_reason == "interrupted":
            print_error(outcome.message, label="interrupted")
        else:
            log = self._directory.home(outcome.blamed) / "peer.log" if outcome.blamed else self._directory.launch_log
            killed = outcome.blamed is not None and f"was killed by {signal.SIGKILL.name}" in outcome.message
            memory = ", and whether memory was short (fewer --peers then)" if killed else ""
            print_error(
                outcome.message,
                check=f"{log}, {self._directory.report}{memory}",
                next_=f"{command_name()} quickstart",
            )

    def _tell_done(self, outcome: RunOutcome) -> None:
        say, root = self._progress.say, self._directory.root
        say(f"done: {outcome.message}", "bold green", indent=6)
        if copies := self._copies():
            say(copies, indent=8)
        rows = self._view.steps.rows()
        for line in loss_text([(row.step, row.loss) for row in rows if not row.given_up]):
            self._progress.command(line)
        say(f"sample: {one_line(SAMPLE_PROMPT + (self._evaluation.sample or ''))}", indent=8)
        say(f"left in {root}: run.toml, tokenizer.json, shards, checkpoints, loss.svg, report.json", indent=8)
        say("next:")
        for line in next_commands(root):
            self._progress.command(line)

    def _copies(self) -> str:
        """Return whether the replicas of each part agreed; "" where there is one of each."""
        start = self._start
        if start.stage_hosts == self._manifest.split.stages and start.trainers == 1:
            return ""
        unlike = len(self._view.digests.mismatches())
        if unlike:
            return f"replicas disagreed {count(unlike, 'time')}: see report.json"
        hosts, trainers = count(start.stage_hosts, "stage host"), count(start.trainers, "trainer")
        return f"averaged: {hosts} and {trainers}; replicas of a part had the same bits after every step"

    def _interrupted(self, interrupt: Interrupted) -> RunOutcome:
        closed = f"{self._view.steps.last} of {self._manifest.run.steps} steps closed"
        steps = closed if self._run is not None else "nothing trained"
        kept = f"{interrupt}: all peers stopped, {steps}; kept {self._directory.root}, {self._last_checkpoint()}"
        return RunOutcome(exit_reason="interrupted", exit_code=interrupt.exit_code, message=kept)

    def _last_checkpoint(self) -> str:
        # Not swarm.state.checkpoints.parts: it imports torch, and who interrupts does not want to wait for that.
        written = [int(record.parent.name[5:]) for record in self._directory.checkpoints.glob("step-*/record.json")]
        return f"last checkpoint: step {max(written)}" if written else "no checkpoint yet"

    def _size(self) -> str:
        hosts = count(self._start.stage_hosts, "stage host")
        stages = count(self._manifest.split.stages, "stage")
        return f"{hosts} for {stages}, {count(self._start.trainers, 'trainer')}"

    def _summary(self) -> str:
        rows = self._view.steps.rows()
        trained = [f"{row.loss:.2f}" for row in rows if not row.given_up]
        apart = self._manifest.averaging.inner_steps
        wanted = self._manifest.run.steps
        early = f" of {wanted}: the time was up" if len(rows) < wanted else ""
        parts = [count(len(rows), "step") + (f" of {apart} batches each" if apart > 1 else "") + early]
        if len(trained) < len(rows):
            parts.append(f"{len(rows) - len(trained)} of them given up")
        if trained:
            parts.append(f"training loss {' → '.join(dict.fromkeys((trained[0], trained[-1])))}")
        if self._evaluation.first is not None and self._evaluation.last is not None:
            weights = (
                "" if self._evaluation.last_step == self._view.steps.last else f" at step {self._evaluation.last_step}"
            )
            parts.append(f"held-out {self._evaluation.first:.2f} → {self._evaluation.last:.2f} nats per token{weights}")
        learnt, computed = sum(row.tokens for row in rows), sum(row.computed for row in rows)
        parts.append(learnt_text(learnt, computed, amount))
        parts.append(f"{amount(self._view.tokens_per_s or 0)} tokens/s")
        return ", ".join(parts)
