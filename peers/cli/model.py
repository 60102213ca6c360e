"""``swarm export``, ``merge``, ``eval`` and ``sample``: what a trained model is for; and ``swarm model``, before."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.light import WholeGroup
from peers.cli.options import AsJson, Home

if TYPE_CHECKING:
    from peers.commands.evaluate import LoadedModel, Sampling, TextLoss
    from peers.data.encoder import Encoded, Encoding
    from peers.home.run_directory import RunDirectory

SCHEMA = 1


class StoredAs(StrEnum):
    """What exported weights are stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A run's directory, or the beginning of its id.  [default: the newest under ./out and in the home]",
    ),
]
Step = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Checkpoint to use.  [default: the newest complete one]")
]

ModelPath = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="NAME",
        help="Of a run whose stages have variants: the model of this domain, or of the kind of text with this number.  "
        "[default: of kinds of text all, each for its own]",
    ),
]

Model = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="DIR", help="An exported model instead of a run's checkpoint (needs the extra hf)."
    ),
]


def export(
    into: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the model to this new or empty directory.")],
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Gather the run's parts first, as swarm ckpt pull does: from an invite (-: from stdin), a peer of "
            "this machine, runs' directories or homes; repeat for more.  [default: what --run names]",
        ),
    ] = None,
    run: Run = None,
    step: Step = None,
    path: ModelPath = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the whole model of a run with LoRA, with its adapters in it, in float32.",
        ),
    ] = False,
    dtype: Annotated[
        StoredAs, typer.Option(help="Store the weights in this dtype. bfloat16 is half as large, and rounded.")
    ] = StoredAs.float32,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as a directory that transformers loads, with its tokenizer and a model card.

    Reads the checkpoints on this machine, whether the run goes on or not. --from gathers them first, from the run's
    peers or from other directories. Needs no transformers itself. Writes the adapters of a run with LoRA, as peft loads
    them, or the whole model with --merge.

    Example: swarm export --out my-model --run out/first

    Example: swarm export --out my-model --from swarm1:eyJydW4…
    """
    from peers.commands.model_directory import check_target
    from peers.home.run_directory import find_run_directory
    from swarm.errors import ConfigError

    check_target(into)
    if sources and run is not None:
        raise ConfigError("--run", str(run), "no option besides --from", "Leave one of the two out.")
    if sources:
        from peers.cli.ckpt import pulled_from

        found = pulled_from(sources, None, home, words=not as_json, frozen=merge).directory
    else:
        found = find_run_directory(run, home, key="--run")
    # After both directories are known to be right: a wrong path should not cost the seconds that torch takes.
    from peers.checkpoints.choose_checkpoint import choose_step
    from peers.commands.adapter import export_adapter, load_adapter, trains_adapters
    from peers.commands.export import export, export_routed, load_command
    from peers.console.words import command_name

    chosen = choose_step(found, step).on_path(path)
    routed = path is None and bool(chosen.manifest.split.centres)
    adapter = trains_adapters(chosen, merge=merge) and not merge
    _tell_which(found, chosen.step, chosen.passed_over, asked=step is not None, named=run is not None)
    told = (lambda line: None) if as_json else typer.echo
    if adapter:
        made = export_adapter(chosen, into, told)
    elif routed:
        made = export_routed(chosen, into, dtype.value, told)
    else:
        made = export(chosen, into, dtype.value, told)
    if as_json:
        document = {"schema": SCHEMA, "path": str(into.absolute()), "run": chosen.manifest.run_id, "step": chosen.step,
                    "adapters": adapter, "parameters": made.parameters, "bytes": made.bytes,
                    "dtype": "float32" if adapter else dtype.value, "files": made.files}  # fmt: skip
        typer.echo(json.dumps(document))
        return
    of = f"step {chosen.step} of {chosen.manifest.run.name}"
    if adapter:
        typer.echo(f"{of}, adapters of {made.parameters:,} parameters, is in {into}; --merge writes the whole model")
        typer.echo(f"next: {load_adapter(into, chosen)}")
        return
    typer.echo(f"{of}, {made.parameters:,} parameters, is in {into}")
    asked = f"{command_name()} sample --model {shlex.quote(str(into))}"
    typer.echo(f"next: {asked if routed else load_command(into, chat=bool(chosen.manifest.tokenizer.template))}")


def merge(
    base: Annotated[
        str, typer.Option("--base", metavar="RUN@STEP", help="The checkpoint that every site's run began with.")
    ],
    sites: Annotated[
        list[str],
        typer.Option(
            "--site",
            metavar="RUN@STEP=WEIGHT",
            help="A checkpoint of a run that went on from it, and how much it counts; repeat, for 1 together.",
        ),
    ],
    into: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the model to this new or empty directory.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibrate",
            metavar="TEXT",
            help="Learn what each tensor weighs, on a text of a site's kind that nobody trained on; one a --site.",
        ),
    ] = None,
    dtype: Annotated[
        StoredAs, typer.Option(help="Store the weights in this dtype. bfloat16 is half as large, and rounded.")
    ] = StoredAs.float32,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Learn on auto, mps, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Compute with this many CPU threads.")] = 1,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Merge models that sites trained apart from one checkpoint into one that transformers loads.

    RUN is a run's directory, or the beginning of its id; without @STEP it is the newest complete checkpoint. Every
    tensor is the mean of the sites' by weight. With --calibrate what each tensor of each site weighs is learnt, so that
    the loss on the texts is low, each counted as its site is; that holds all models in memory.

    Example: swarm merge --base out/base@60 --site out/clinic@90=.7 --site out/lab@90=.3 --out merged
    """
    from functools import partial

    from peers.checkpoints.named import BASE, named_step, weighted_steps
    from peers.commands.model_directory import check_target
    from peers.commands.preflight import check_device

    check_target(into)
    check_device(device)
    named = named_step(base, BASE, home), weighted_steps(sites, home)
    # After what costs nothing: a wrong path should not cost the seconds that torch takes.
    import torch

    from peers.commands.export import load_command
    from peers.commands.merge import calibrate, merge, merging_of
    from peers.console.lasting import Lasting
    from peers.console.words import print_error
    from swarm.device import resolve_device

    merging = merging_of(*named, texts or [])
    torch.set_num_threads(threads)
    learnt = None
    if texts and len(merging.sites) == 1:
        print_error("one site has all the weight, so nothing is learnt: it is that site's model", label="note")
    elif texts:
        say = Lasting(partial(print_error, label="calibrate")).told
        learnt = calibrate(merging, resolve_device(device), say)
    made = merge(merging, learnt, into, dtype.value, (lambda line: None) if as_json else typer.echo)
    losses = None if learnt is None else {"linear": learnt.linear, "learnt": learnt.learnt}
    if as_json:
        first, *others = ({"run": one.manifest.run_id, "step": one.step} for one in merging.models)
        each = [one | {"share": site.weight} for one, site in zip(others, merging.sites, strict=True)]
        document = {"schema": SCHEMA, "path": str(into.absolute()), "base": first, "sites": each,
                    "calibration_loss": losses, "parameters": made.parameters, "bytes": made.bytes,
                    "dtype": dtype.value, "files": made.files}  # fmt: skip
        typer.echo(json.dumps(document))
        return
    if losses is not None:
        typer.echo("loss on the calibration text: {linear:.4f} by weight alone, {learnt:.4f} learnt".format(**losses))
        if losses["learnt"] >= losses["linear"]:
            typer.echo("learning gained nothing: the model is the mean by weight")
    typer.echo(f"{len(merging.sites)} merged, {made.parameters:,} parameters, are in {into}")
    typer.echo(f"next: {load_command(into, chat=bool(merging.sites[0].chosen.manifest.tokenizer.template))}")


def evaluate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Text or conversations: files, or directories.")],
    run: Run = None,
    model: Model = None,
    step: Step = None,
    on_path: ModelPath = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens in a window.  [default: a run's context, an exported model's positions; at most 2048]",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens from window to window.  [default: half a window]"),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The key or column that has the text.  [default: as of data build]"),
    ] = None,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Read special tokens as tokens, not as text.")
    ] = False,
    allow_bad: Annotated[
        bool, typer.Option("--allow-bad", help="Go on where more than 1 % of the records or bytes cannot be used.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Compute on auto, mps, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Compute with this many CPU threads.")] = 1,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a trained model predicts text: loss, perplexity, and bits a byte.

    Windows slide over each document, so that every token is counted once and foretold from at least half a window. Bits
    a byte compare models whose tokenizers differ, and --context N makes windows alike. Of conversations the assistant's
    answers alone count, written with the model's chat template.

    Example: swarm eval --run out/first notes.txt
    """
    from dataclasses import asdict, replace

    from peers.commands.preflight import check_device
    from peers.data.files import source_files

    check_device(device)
    named = [source_files(given, "FILE") for given in files]
    paths = dict.fromkeys(file.path for found in named for file in found if file.bytes or len(found) == 1)
    _check_named(run, model, step, home, key="--run")
    # After there are some: a wrong path should not cost the seconds that libraries take.
    from peers.data.building import encoded_documents
    from peers.data.flaws import LeftOut, nothing_in
    from peers.data.keys import KeyCount

    if not paths:
        raise nothing_in(files[0], "FILE")
    encoding = _encoding(run, model, step, home)  # before the weights: it may have no template
    encoding = replace(encoding, field=field, special_in_text=special_tokens)
    left_out, keys = LeftOut("FILE", allow_bad=allow_bad), KeyCount()
    for given in files:
        left_out.pass_by(given)
    texts = {path: list(encoded_documents([path], encoding, left_out, keys)) for path in paths}
    left_out.check(files[0], some=True)
    loaded, source = _load(run, model, step, home, named=False, path=on_path, device=device, threads=threads)
    from peers.commands.evaluate import TextLoss, text_loss, window_of

    length, by = window_of(loaded.model, context, stride)
    losses = {path: text_loss(loaded, text, context=length, stride=by) for path, text in texts.items()}
    total = sum(losses.values(), TextLoss(nats=0.0, tokens=0, bytes=0))
    counted = _counted(itertools.chain(*texts.values()))
    if as_json:
        each = [{"file": str(path), "counted": _counted(texts[path])} | _figures(loss) for path, loss in losses.items()]
        windows = {"context": length, "stride": by, "counted": counted}
        document = {"schema": SCHEMA, **source, **windows, **_figures(total), "files": each, "keys": asdict(keys)}
        typer.echo(json.dumps(document))
        for line in left_out.lines():
            typer.echo(line, err=True)
        return
    if len(losses) > 1:
        for path, loss in losses.items():
            typer.echo(f"{loss.bits_per_byte:8.4f} bits a byte  {loss.perplexity:12,.2f} perplexity  {path}")
    typer.echo(f"loss         {total.loss:.4f} nats a token")
    typer.echo(f"perplexity   {total.perplexity:,.2f}")
    typer.echo(f"bits a byte  {total.bits_per_byte:.4f}")
    what = "text" if counted == "all" else counted
    said = left_out.words + keys.words("--special-tokens")
    size = f"{total.tokens:,} tokens, {total.bytes:,} bytes; windows of {length} by {by}"
    typer.echo(f"{what:<12} {size}{said}")


def sample(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Directory of a run.  [default: the newest under ./out and in the home]",
        ),
    ] = None,
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text to continue, or the message to a model with a chat template.  [default: The, or Hello]",
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with it: it answers each line of standard input.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt also where the model has a chat template.")
    ] = False,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Tokens to generate.")] = 100,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31 - 1, help="The same seed gives the same text.")
    ] = 0,
    temperature: Annotated[
        float,
        typer.Option(metavar="X", min=0.0, max=10.0, help="Sampling temperature; 0 always takes the likeliest token."),
    ] = 0.8,
    step: Step = None,
    path: ModelPath = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text, with --chat one for each answer.")
    ] = False,
) -> None:
    """Have a trained model continue a prompt, or chat with it.

    Takes the directory of a swarm quickstart, or of a run that this machine's peers joined, or with --model an exported
    model, and prints the prompt and the text that the model generates. A model with a chat template answers the prompt
    as that writes it, and its answer alone is printed.

    Example: swarm sample --chat
    """
    from dataclasses import replace

    from swarm.errors import ConfigError

    if chat and (raw or prompt is not None):
        name = "--raw" if raw else "--prompt"
        raise ConfigError(name, prompt or raw, "no option besides --chat", f"Leave out {name}, or --chat.")
    _check_named(directory, model, step, None, key="DIR")
    encoding = _encoding(directory, model, step, None, key="DIR")  # before the weights: it may have no template
    if chat and encoding.template is None:
        where = str(model or directory or "the newest run")
        raise ConfigError("--chat", where, "a model with a chat template", "Without --chat it continues a --prompt.")
    loaded, source = _load(directory, model, step, None, named=True, path=path)
    from peers.commands.evaluate import Sampling, sample_text

    talks = encoding.template is not None and not raw
    said = prompt or ("Hello" if talks else "The")
    sampling = Sampling(prompt=said, tokens=tokens, seed=seed, temperature=temperature)

    def told(prompt: str, text: str, shown: str) -> None:
        line = json.dumps({**source, "prompt": prompt, "text": text, "seed": seed}) if as_json else printable(shown)
        typer.echo(line)

    from peers.console.words import printable

    if not talks:
        made = sample_text(loaded, sampling)
        told(said, made, said + made)
        return
    if chat and not as_json:
        typer.echo(f"seed {seed}: the same conversation gets the same answers; for others give --seed N", err=True)
    lines = _lines_typed(asks=not as_json) if chat else [said]
    for question, answer in _conversation(loaded, replace(encoding, key="--prompt"), sampling, lines):
        told(question, answer, answer)


def _lines_typed(*, asks: bool) -> Iterator[str]:
    """The lines of standard input that say something; a person is shown where to type."""
    while True:
        if asks and sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _conversation(
    loaded: LoadedModel, encoding: Encoding, sampling: Sampling, lines: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Say each line to the model, and yield it with the answer, which is part of what the next one follows."""
    from peers.commands.evaluate import answer_text
    from peers.data.encoder import PromptWriter

    messages = list[dict[str, str]]()
    with PromptWriter(encoding) as questions:
        for line in lines:
            messages.append({"role": "user", "content": line})
            answer = answer_text(loaded, questions.tokens(messages), sampling)
            messages.append({"role": "assistant", "content": answer})
            yield line, answer


def _load(
    run: Path | None, model: Path | None, step: int | None, home: str | None, *, named: bool, **how: Any
) -> tuple[LoadedModel, dict[str, Any]]:
    """Load what is asked for; return it, and what it is for scripts. ``named`` is whether the run is an argument, and
    no option; ``how`` are device, threads, and the path where it is a run's."""
    from swarm.errors import ConfigError

    found = _check_named(run, model, step, home, key="DIR" if named else "--run")
    # After the directory is known to be one: a wrong path should not cost the seconds that torch takes.
    if isinstance(found, Path):
        from peers.commands.exported import load_exported

        if (path := how.pop("path")) is not None:
            raise ConfigError("--path", path, "no option besides --model", "Leave out --path, or --model.")
        return load_exported(found, **how), {"model": str(model)}
    from peers.checkpoints.choose_checkpoint import choose_step
    from peers.commands.evaluate import load_to_ask

    chosen = choose_step(found, step).on_path(how.pop("path"))
    loaded = load_to_ask(chosen, **how)
    _tell_which(found, chosen.step, chosen.passed_over, asked=step is not None, named=run is not None)
    return loaded, {"directory": str(found.root), "step": chosen.step}


def _check_named(
    run: Path | None, model: Path | None, step: int | None, home: str | None, *, key: str
) -> RunDirectory | Path:
    """Return the run that is named, or the newest; or the directory of the model that is, which is known to be one
    then. ``key`` is what the run is called in errors."""
    from peers.commands.model_directory import check_model
    from peers.home.run_directory import find_run_directory
    from swarm.errors import ConfigError

    if model is None:
        return find_run_directory(run, home, key=key)
    for name, value in ((key, run), ("--step", step)):
        if value is not None:
            raise ConfigError(name, str(value), "no option besides --model", f"Leave out {name}, or --model.")
    check_model(model)
    return model


def _encoding(run: Path | None, model: Path | None, step: int | None, home: str | None, key: str = "--run") -> Encoding:
    """Return how files become tokens: as the exported model's files say, or the run's manifest. ``key`` names the
    run."""
    from peers.checkpoints.choose_checkpoint import choose_step, run_tokenizer
    from peers.commands.model_directory import check_model, models_in
    from peers.data.tokenizer_files import model_encoding, run_encoding
    from peers.home.run_directory import find_run_directory

    if model is not None:
        check_model(model)
        return model_encoding(models_in(model)[0], key="FILE")
    chosen = choose_step(find_run_directory(run, home, key=key), step)
    return run_encoding(run_tokenizer(chosen)[0], chosen.manifest.tokenizer, key="FILE")


def _counted(found: Iterable[Encoded]) -> str:
    """Return what the loss is of: all of the text, or of conversations the assistant's answers."""
    from data_shards.draft import Documents
    from peers.commands.evaluate import is_text

    documents = (Documents.of(one) for some in found for one in some.documents.apart())
    kinds = {is_text(document) for document in documents}
    return "all" if False not in kinds else "answers and text" if True in kinds else "answers"


def _figures(loss: TextLoss) -> dict[str, Any]:
    perplexity, bits = (one if one < float("inf") else None for one in (loss.perplexity, loss.bits_per_byte))
    return {"loss": loss.loss, "perplexity": perplexity, "bits_per_byte": bits,
            "tokens": loss.tokens, "bytes": loss.bytes}  # fmt: skip


def _tell_which(found: RunDirectory, step: int, passed_over: str | None, *, asked: bool, named: bool) -> None:
    """Say on stderr which checkpoint is used, as far as nobody ``asked`` for the step or ``named`` the run."""
    from peers.console.words import age_of_checkpoint, print_error, with_commands
    from peers.local.report import closed_steps

    if passed_over is not None:
        print_error(f"taking step {step}, because of {with_commands(passed_over)}", label="warning")
    # Anyone who names a step knows its age.
    age = None if asked else age_of_checkpoint(step, closed_steps(found.report))
    if age is not None:
        print_error(age, label="note")
    if not named:
        print_error(f"step {step} of {found.root}", label="from")


# --- a model of transformers, before it is trained --------------------------------------------------------------------


look = typer.Typer(cls=WholeGroup, help="Check whether a model can be trained here.", no_args_is_help=True)


@look.command()
def check(
    given: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A model's directory, OWNER/NAME[@REVISION] on the hub, a RUN.toml, or a preset."
        ),
    ],
    stages: Annotated[
        int | None, typer.Option(min=1, max=512, help="Show what a part is of so many stages.  [default: 2]")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help="Show what experts take: a number for each stage, or one for all but the first."
        ),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row.  [default: 512, or what it has]")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how a model can be cut, what a peer needs for a part, and whether it gives the same bits cut as whole; and
    whether its stages can be several experts each, or share their layers.

    Builds the model without its weights, and tries a small one of its kind: some seconds. Needs the extra hf. Exits
    with 2, and says why, where the model cannot be trained here, or only with --from-scratch.

    Example: swarm model check models/llama --stages 4
    """
    from peers.commands.model import examine, lines

    facts = examine(given, stages=stages, context=context, variants=variants)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for label, text in lines(facts):
            typer.echo(f"{label:<12}  {text}")
    files = facts.get("files", {"error": ""})
    if not facts["trainable"] or files["error"] or facts.get("flaw"):
        raise typer.Exit(2)
