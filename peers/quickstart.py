"""``swarm quickstart``: a whole swarm on one machine, from text to a trained model. Read top to bottom:

prepare     tokenizer, shards, manifest, while the fork server imports torch         (peers.prepare)
train       the bootstrap first, then everybody; a row per step                      (peers.local_run)
judge       held-out loss before and after, a sample                                 (peers.evaluate)
finish      the plot, the report, what to type next; also after a failure
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from peers.interrupt import SIGNALS, Interrupted, check, received
from peers.launch import PeerGroup
from peers.local_run import BOOTSTRAP, LocalRun, RunBroken, peer_names
from peers.plot import loss_svg
from peers.prepare import RunShape, check_shape, prepare_run
from peers.progress import Progress, amount
from peers.report import Evaluation, Outcome, RunFacts, build_report, render_report, write_report
from peers.run_directory import RunDirectory, create_run_directory
from peers.run_view import RunView
from peers.text import built_in_corpus, read_corpus
from peers.watch import RunWatch
from peers.words import count, next_commands, one_line, print_error
from swarm import __version__
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.errors import EXIT_ERROR, EXIT_OK, ConfigError, StateError, SwarmError

SAMPLE_PROMPT = "The"
SAMPLE_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartOptions:
    """What the user asked for; the fields are the command's flags."""

    shape: RunShape
    text: tuple[Path, ...] = ()
    out: Path | None = None
    report: Path | None = None
    device: str = "cpu"
    json: bool = False


def quickstart(options: QuickstartOptions, clock: Clock, *, make_group: Callable[[Path], PeerGroup] = PeerGroup) -> int:
    """Run it all and return the exit code: 0 trained, 1 error, 3 a peer failed, 130 or 143 interrupted.

    Raises ConfigError, having left nothing, for what cannot be run. Everything else ends in the report and
    one line. Leaves no process and no temporary file, whatever happens. Main thread only.
    """
    check_shape(options.shape)
    if options.report is not None and options.report.is_dir():
        raise ConfigError("--report", str(options.report), "a file", "This is a directory: name a file in it.")
    if options.text:
        read_corpus(options.text)
    directory = create_run_directory(options.out, clock)
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
        self._shape = options.shape
        self._began: float = psutil.Process().create_time()
        self._progress = Progress(steps=self._shape.steps, quiet=options.json)
        self._view = RunView()
        self._watch = RunWatch({name: directory.events(name) for name in peer_names(self._shape)})
        self._announced: set[str] = set()
        self._run: str | None = None
        self._evaluation = Evaluation()

    def train_and_judge(self) -> Outcome:
        """Everything that takes time. Raises only ConfigError, and only while the run is being prepared; however it
        ends, no process is left."""
        try:
            try:
                self._train()
            finally:
                self._stop()
            self._judge()
            return Outcome(exit_reason="completed", exit_code=EXIT_OK, message=self._summary())
        except Interrupted as interrupt:
            return self._interrupted(interrupt)
        except RunBroken as broken:
            return Outcome(
                exit_reason="peer_failed" if broken.peer else "error",
                exit_code=broken.exit_code,
                message=str(broken),
                blamed=broken.peer,
            )
        except SwarmError as error:
            lost = received()
            if lost is not None:
                return self._interrupted(lost)
            wrong_request = isinstance(error, ConfigError)
            if wrong_request and self._run is None:
                raise
            code = EXIT_ERROR if wrong_request else error.exit_code
            return Outcome(exit_reason="error", exit_code=code, message=str(error))

    def _train(self) -> None:
        shape = self._shape
        self._progress.say(f"swarm {__version__} · {self._size()}, {shape.ends} ends · {self._directory.root}")
        self._group.open()
        with self._progress.waiting("preparing text"):
            manifest = self._prepare()
        LocalRun(
            shape=shape,
            manifest=manifest,
            directory=self._directory,
            device=self._options.device,
            group=self._group,
            watch=self._watch,
            view=self._view,
            clock=self._clock,
            on_change=self._show,
        ).train()

    def _prepare(self) -> Manifest:
        began = self._clock.monotonic()
        corpus = read_corpus(self._options.text) if self._options.text else built_in_corpus()
        prepared = prepare_run(self._shape, corpus, self._directory)
        self._run = prepared.manifest.run_id
        tokens = sum(shard.tokens for shard in prepared.shards)
        self._progress.done(
            "text",
            f"{corpus.name}: {amount(tokens)} tokens in {count(len(prepared.shards), 'private shard')}, "
            f"{amount(prepared.held_out.tokens)} held out",
            self._clock.monotonic() - began,
        )
        return prepared.manifest

    def _show(self) -> None:
        for name, addresses in self._view.addresses.items():
            if name not in self._announced:
                self._announced.add(name)
                if name == BOOTSTRAP:
                    self._progress.done("bootstrap", addresses[0] if addresses else "", self._elapsed)
                elif self._announced == set(peer_names(self._shape)):
                    self._progress.done("peers", f"{len(self._announced) - 1} connected", self._elapsed)
        self._progress.update(self._view, self._clock.wall())

    @property
    def _elapsed(self) -> float:
        return self._clock.wall() - self._began

    def _stop(self) -> None:
        try:
            self._group.stop()
        except Interrupted:
            # Stopping had begun and must end; the interrupt comes once only.
            self._group.stop()
            raise
        finally:
            for told in self._watch.read_all():
                self._view.add(told)
            self._progress.update(self._view, self._clock.wall(), final=True)

    def _judge(self) -> None:
        with self._progress.waiting("evaluating on held-out text"):
            # Here and not above: torch takes seconds to import, and the peers needed the processor until now.
            from peers.evaluate import Sampling, held_out_loss, load_checkpoint, sample_text

            before = held_out_loss(load_checkpoint(self._directory, 0), self._directory.held_out)
            check()
            trained = load_checkpoint(self._directory)
            check()
            after = held_out_loss(trained, self._directory.held_out)
            sampling = Sampling(prompt=SAMPLE_PROMPT, tokens=SAMPLE_TOKENS, seed=self._shape.seed)
            sample = sample_text(trained, sampling)
        self._evaluation = Evaluation(first=before, last=after, last_step=trained.step, sample=sample)

    def finish(self, outcome: Outcome) -> int:
        """Write plot and report, say how it ended, return the exit code. Signals wait until this is done."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            code = self._write(outcome)
            self._tell(outcome)
            return code
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _write(self, outcome: Outcome) -> int:
        facts = RunFacts(
            run=self._run,
            directory=str(self._directory.root),
            peers=self._shape.peers,
            stages=self._shape.stages,
            trainers=self._shape.trainers,
            steps_wanted=self._shape.steps,
            began=self._began,
            ended=self._clock.wall(),
        )
        report = build_report(facts, self._view, self._evaluation, outcome)
        try:
            self._draw()
            for path in filter(None, (self._directory.report, self._options.report)):
                write_report(report, path)
        except SwarmError as error:
            print_error(str(error))
            return outcome.exit_code or error.exit_code
        if self._options.json:
            sys.stdout.write(render_report(report) + "\n")
            sys.stdout.flush()
        return outcome.exit_code

    def _draw(self) -> None:
        evaluation = self._evaluation
        trained = [(step.step, step.loss) for step in self._view.in_order]
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

    def _tell(self, outcome: Outcome) -> None:
        if outcome.exit_reason == "completed":
            self._progress.say(f"done: {outcome.message}", "bold green")
            self._progress.say(f"sample: {one_line(SAMPLE_PROMPT + (self._evaluation.sample or ''))}")
            self._progress.say(
                f"left in {self._directory.root}: run.toml, tokenizer.json, shards, checkpoints, loss.svg, report.json"
            )
            self._progress.say("next:")
            for line in next_commands(self._directory.root):
                self._progress.say(f"  {line}", "cyan")
        elif outcome.exit_reason == "interrupted":
            print_error(outcome.message, label="interrupted")
        else:
            log = self._directory.home(outcome.blamed) / "peer.log" if outcome.blamed else self._directory.launch_log
            print_error(
                outcome.message,
                check=f"{log}, {self._directory.report}",
                next_="run swarm quickstart again, with a smaller --peers if memory was short",
            )

    def _interrupted(self, interrupt: Interrupted) -> Outcome:
        steps = f"{self._view.last_step} of {self._shape.steps} steps closed"
        kept = f"{interrupt}: all peers stopped, {steps}; kept {self._directory.root}"
        return Outcome(exit_reason="interrupted", exit_code=interrupt.exit_code, message=kept)

    def _size(self) -> str:
        shape = self._shape
        hosts, stages = count(shape.peers, "stage host"), count(shape.stages, "stage")
        return f"{hosts} for {stages}, {count(shape.trainers, 'trainer')}"

    def _summary(self) -> str:
        order = self._view.in_order
        parts = [f"{len(order)} steps, training loss {order[0].loss:.2f} → {order[-1].loss:.2f}"]
        if self._evaluation.first is not None and self._evaluation.last is not None:
            parts.append(f"held-out {self._evaluation.first:.2f} → {self._evaluation.last:.2f} nats per token")
        parts.append(f"{amount(self._view.tokens_per_s or 0)} tokens/s")
        return ", ".join(parts)
