"""What a run is founded with, its manifest and the files that it names: from a preset or a RUN.toml, and flags."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.commands.comeback import check_gone
from peers.console.lasting import Lasting
from peers.console.words import another_path, command_name
from peers.data.files import source_files
from peers.data.text import Corpus, built_in_corpus, read_corpus, sample_texts
from peers.data.tokenizer_files import CameWith, read_bounded
from peers.data.trainer_data import check_tokenizer
from peers.foreign_model import ADAPTER_LR, ForeignModel, check_founding, check_parts, find_model, without_tokenizer
from peers.home.places import home_directory
from peers.home.run_directory import find_run_directory
from peers.kinds import check_kinds, kinds_to_learn, learn_kinds, variants_said
from peers.manifest_file import PENDING, PENDING_CENTRES
from peers.options.fields import settings_of
from peers.options.foundation import STRANGERS, Foundation
from peers.plan.peers_file import read_file
from peers.plan.sizing import SizedStages, stages_for
from peers.presets import load_preset, preset_names
from peers.profiles import PROFILES, keys_of, profile_of, value_at, with_profile
from swarm.config import Manifest, load_manifest, new_nonce, parse_manifest
from swarm.disk import read_named, size_text
from swarm.errors import ConfigError, Incompatible
from swarm.models.gpt_config import GptConfig
from swarm.models.hf.hf_config import HfConfig
from swarm.parsing import parse_toml
from swarm.schema import MAX_FILES_BYTES, TOKENIZER_FILE
from swarm.state.checkpoints.files import step_called

if TYPE_CHECKING:
    from peers.checkpoints.resume import Resumable

Say = Callable[[str, str], None]
"""Is told how far work is that takes long, as (label, text)."""

FOR_ADAPTERS = {"lr": ADAPTER_LR, "weight_decay": 0.0}

FOR_FOREIGN = "finetune"
"""The preset for a model that is named alone; with a file of one's own it has what that leaves open."""
_BESIDE_OWN_ROUTES = {
    "split.routes": "--admission token, or --admission organisation",
    "admission.organisation": "--organisation NAME",
}
"""What ``--own-routes`` takes, by the key of the manifest that is wrong without."""
_WITH_RESUME = ("file", "resume")
_WITH_OTHER_STAGES = (*_WITH_RESUME, "stages", "layers_per_stage", "peers", "hosts", "trainers")
"""The options of a run that goes on: as it is cut, and with other stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Founded:
    """A run that can be served: its manifest, the files that it names, and where its tokenizer came from, in words.
    ``resumed`` is what an old run goes on from, ``said`` what was done to make the manifest, as (label, text),
    ``model_files`` the directory whose weights a new one begins with, ``profile`` the one that its manifest was made
    with."""

    manifest: Manifest
    files: dict[str, bytes]
    tokenizer_from: str
    resumed: Resumable | None = None
    said: tuple[tuple[str, str], ...] = ()
    model_files: Path | None = None
    profile: str | None = None


def _says_nothing(label: str, text: str) -> None:
    return None


def load_foundation(foundation: Foundation) -> dict[str, Any]:
    """The manifest as TOML gives it, with the model that is named and the changes made; checked as far as it can be
    without a tokenizer. Of a named model it tries whether it gives the same bits cut as whole: some seconds.

    Raises ConfigError for what is missing, unknown, malformed, or does not fit the model.
    """
    _check_files(foundation)
    foreign = _foreign(foundation)
    if (foundation.preset is None) == (foundation.file is None) and (foreign is None or foundation.preset is not None):
        remedy = f"For instance: swarm new --preset {preset_names()[0]}. There are {', '.join(preset_names())}."
        given = None if foundation.file is None else str(foundation.file)
        raise ConfigError("RUN.toml", given, "either a RUN.toml or --preset", remedy)
    read = {} if foundation.file is None else _read_toml(foundation.file)
    document = dict(read) if foundation.file is not None else load_preset(foundation.preset or FOR_FOREIGN)
    adapters = {key: value for key, value in _section(document, "model").items() if key == "lora"}
    if foreign is not None:
        document["model"] = _table(foreign, foundation, read) | adapters
        document = _with_fitting_rates(document, foundation)
    if foundation.lora_rank is not None or adapters:
        document = _with_rates_of_adapters(document, _section(read, "optimizer"))
    if foundation.lora_rank is None and not adapters:
        others = ("lora_alpha", "lora_base", "lora_dropout", "lora_targets")
        beside = [getattr(foundation, name) or None for name in others]
        if any(one is not None for one in beside):
            remedy = "Add --lora-rank 16 to train adapters, or leave the other options of LoRA out."
            raise ConfigError("--lora-rank", None, "a rank, with the other options of LoRA", remedy)
    by_hand = {*foundation.changes, *keys_of(read)}
    for dotted, value in (_one_host_each(foundation) | foundation.changes).items():
        _change(document, dotted, value)
    for dotted, value in variants_said(foundation, document).items():
        _change(document, dotted, value)
    try:
        document = with_profile(document, by_hand)
        checked = document if foundation.peers is None else _uncut(document)
        manifest = parse_manifest(pending(checked), _origin(foundation))  # mistakes show before a tokenizer is trained
        if foundation.tokenizer is not None and foreign is None:
            _check_fits(manifest, _read_tokenizer(foundation.tokenizer), str(foundation.tokenizer))
    except ConfigError as error:
        raise _blamed(error, foundation) from None
    return document


def _check_fits(manifest: Manifest, tokenizer: bytes, source: str) -> None:
    """Raises ConfigError for what is no tokenizer, or has more ids than the model, whatever digest the run names."""
    said = manifest.tokenizer.model_copy(update={"digest": tokenizer_digest(tokenizer)})
    try:
        check_tokenizer(manifest.model_copy(update={"tokenizer": said}), tokenizer)
    except ConfigError as error:
        if error.key != "tokenizer":
            raise
        remedy = f"{another_path(Path(source))} Without --tokenizer one is made from text."
        raise ConfigError("--tokenizer", source, error.allowed, remedy, why=error.why) from None


def origins_of(foundation: Foundation, document: dict[str, Any]) -> dict[str, str]:
    """Say where the values of what :func:`load_foundation` gave come from, by dotted key; the others are defaults."""
    read = {} if foundation.file is None else _read_toml(foundation.file)
    preset = {} if foundation.file is not None else load_preset(foundation.preset or FOR_FOREIGN)
    profile = foundation.profile or profile_of(read)
    keys = list(keys_of(document))

    def of(other: Mapping[str, Any]) -> list[str]:
        return [key for key in keys if value_at(document, key) == value_at(other, key)]

    def below(*tables: str) -> list[str]:
        return [key for key in keys if key.startswith(tables)]

    found = dict.fromkeys(keys, "one for each stage")
    for label, those in (  # the later ones replace the earlier
        ("what trained weights take", of(load_preset(FOR_FOREIGN))),
        (f"preset {foundation.preset or FOR_FOREIGN}", of(preset)),
        ("what adapters take", of({"optimizer": FOR_ADAPTERS}) if "lora" in _section(document, "model") else ()),
        (f"--model {foundation.model}", below("model.") if foundation.model is not None else ()),
        (f"profile {profile}", [choice.key for choice in PROFILES.get(profile or "", ())]),
        (str(foundation.file), of(read)),
        ("--peers", below("split.", "run.start_when.") if foundation.peers is not None else ()),
    ):
        found |= dict.fromkeys(those, label)
    return found | {key: _option_of(foundation, key) for key in foundation.changes}


def _option_of(foundation: Foundation, key: str) -> str:
    """The option that sets this key of the manifest."""
    if foundation.strangers and key in STRANGERS:
        return "--strangers"
    for one in settings_of(Foundation).values():
        if one.option.manifest == key and getattr(foundation, one.key) is not None:
            return one.names[0]
    return "--layers-per-stage" if key == "split.stages" else "--local-steps" if foundation.mode is None else "--mode"


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a manifest says there; nothing where it is no table, which is refused later."""
    said = document.get(name)
    return said if isinstance(said, Mapping) else {}


def _check_files(foundation: Foundation) -> None:
    """Read what is named beside the manifest once more than is needed: what is wrong with it is said without torch."""
    if foundation.peers is not None:
        read_file(foundation.peers)
    if foundation.tokenizer is not None:
        _read_tokenizer(foundation.tokenizer)
    for text in foundation.text:
        source_files(text, "--text")


def pending(document: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with what stands for the tokenizer, and for the kinds of text, that are to come."""
    said = document.get("tokenizer", {})
    if kinds := kinds_to_learn(document):
        document = document | {"split": document["split"] | {"centres": PENDING_CENTRES[:kinds]}}
    return document | {"tokenizer": {"digest": PENDING} | said} if isinstance(said, dict) else document


def _one_host_each(foundation: Foundation) -> dict[str, Any]:
    """Values by dotted key, as that a preset, whose stages have a replica each, is to be cut otherwise."""
    stages = foundation.changes.get("split.stages")
    if foundation.file is not None or stages is None:
        return {}
    return {"run.start_when.stage_hosts": min(max(stages, 1), 10_000)}  # what cannot be is told of the stages


def make_run(foundation: Foundation, document: dict[str, Any], made: tuple[bytes, str] | None = None) -> Founded:
    """Read or train the tokenizer, and complete the manifest with it, with what else the model came with and, where it
    has none, a fresh nonce.

    ``made`` is a tokenizer that was trained for this run where none is given, and what from, in words. Cost: nothing
    with a tokenizer, else some 2 s for the built-in text. Raises Incompatible for files that are not those the file
    names, ConfigError as :func:`load_foundation`.
    """
    foreign = _foreign(foundation)
    named = document.get("tokenizer", {}).get("digest")
    check_kinds(foundation, document)
    tokenizer, source = given_tokenizer(foundation, document) or made or _trained_tokenizer(foundation, document)
    digest = tokenizer_digest(tokenizer)
    if named is not None and digest != named:
        allowed = f"the tokenizer whose sha256 begins {named[:16]}, as the RUN.toml says; this is {digest[:16]}"
        remedy = "Give that one, or remove [tokenizer] from the file to found a new run with this one."
        raise Incompatible("--tokenizer", source, allowed, remedy)
    run = document.get("run", {})
    named_run = {"run": run | {"nonce": run.get("nonce") or new_nonce()}}
    words: dict[str, Any] = document.get("tokenizer", {}) | {"digest": digest}
    if foreign is None:
        came = CameWith(_named_beside(foundation, document, MAX_FILES_BYTES - len(tokenizer)), ())
    else:
        words, came = foreign.came_with(tokenizer, words)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in came.kept.items()}
    wanted: dict[str, str] = document.get("files", digests)
    for name in wanted:
        if digests.get(name) != wanted[name]:
            allowed = f"the file whose sha256 begins {wanted[name][:16]}, as the RUN.toml says"
            remedy = f"Put it next to {source}, or remove it from [files] in the RUN.toml."
            raise Incompatible(f"files.{name}", digests.get(name, "")[:16], allowed, remedy)
    made_of = {"tokenizer": words, "files": wanted}
    learnt = learn_kinds(foundation, document | made_of, kinds_to_learn(document), tokenizer)
    manifest = parse_manifest(document | named_run | made_of | learnt.sections, _origin(foundation))
    _check_fits(manifest, tokenizer, source)
    if foreign is not None and isinstance(manifest.model, HfConfig):
        check_parts(manifest.model, manifest.split)
        check_founding(manifest.model, manifest.split)
    files = None if foreign is None or foundation.from_scratch else foreign.directory.absolute()
    in_file = None if foundation.file is None else profile_of(_read_toml(foundation.file))
    return Founded(
        manifest=manifest,
        files={TOKENIZER_FILE: tokenizer} | {name: came.kept[name] for name in wanted},
        tokenizer_from=source,
        said=(*came.described(), *learnt.said),
        model_files=files,
        profile=foundation.profile or in_file,
    )


def resume_run(foundation: Foundation, home: Path | str | None, say: Say = _says_nothing) -> Founded:
    """The run that is to go on, from its newest checkpoint that is complete and verified; or, with other stages, the
    one that goes on with that checkpoint in its place. Says how far it is.

    Raises ConfigError for a flag that would make it another run, and as
    :func:`peers.checkpoints.resume.find_resumable` and :func:`peers.checkpoints.recut.recut_run`.
    """
    cut_anew, given = foundation.cut_said, foundation.file
    for key, setting in settings_of(Foundation).items():
        value = getattr(foundation, key)
        if key not in (_WITH_OTHER_STAGES if cut_anew else _WITH_RESUME) and value != setting.default:
            remedy = "Leave it out: the run that goes on is the one that was. Without --resume a new one is founded."
            allowed = "no other option with --resume"
            if cut_anew:
                remedy = "Leave it out: a run that is cut anew is otherwise the one that was."
                allowed = "beside --resume and --stages only --layers-per-stage, --peers, --hosts and --trainers"
            shown = value if isinstance(value, int) else " ".join(map(str, value)) if setting.many else str(value)
            raise ConfigError(setting.names[0], shown, allowed, remedy)
    named = given is not None and step_called(given.name) is not None
    directory = None if named else find_run_directory(given, home, key="--resume")
    # After there is one: torch takes seconds.
    from peers.checkpoints.recut import recut_run
    from peers.checkpoints.resume import NotWhole, find_resumable

    said = list[tuple[str, str]]()
    try:
        found = find_resumable(given, home, Lasting(functools.partial(say, "checking"), size_text).told)
    except NotWhole:
        if directory is not None:  # of a run that lives the parts that lack are no matter
            check_gone(home_directory(home), load_manifest(directory.manifest), on_purpose=False, whole=False)
        raise
    origin = str(found.directory.tokenizer)
    if not cut_anew:
        check_gone(home_directory(home), found.manifest, on_purpose=named)
    if cut_anew:
        try:
            sized = _sized(foundation, found.manifest, say)
            said = [] if sized is None else sized.said()
            changes = ({} if sized is None else sized.changes()) | foundation.changes
            recut = recut_run(found, changes, home)
        except ConfigError as error:
            raise _blamed(error, foundation) from None
        found, said = recut.resumable, said + recut.said
    return Founded(manifest=found.manifest, files=found.files, tokenizer_from=origin, resumed=found, said=tuple(said))


def sized_document(
    foundation: Foundation, document: dict[str, Any], say: Say = _says_nothing
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return what :func:`load_foundation` gave, cut as suits the peers of ``--peers`` best, and why, as (label, text).
    Says how far it is.

    What was typed of numbers of peers stays. Raises ConfigError, also where sizes are said by hand, and as
    :func:`peers.plan.sizing.stages_for`.
    """
    sized = _sized(foundation, parse_manifest(pending(_uncut(document)), _origin(foundation)), say)
    if sized is None:
        return document, ()
    document.get("split", {}).pop("layers_per_stage", None)
    for dotted, value in (sized.changes() | foundation.changes).items():
        _change(document, dotted, value)
    try:
        parse_manifest(pending(document), _origin(foundation))
    except ConfigError as error:
        raise _blamed(error, foundation) from None
    return document, tuple(sized.said())


def _uncut(document: dict[str, Any]) -> dict[str, Any]:
    """A manifest whose cut and numbers of peers are to be found. Of stages with variants it says how many there are;
    those that share their layers are alike, as stages of as few layers as can be are."""
    split, run, model = (_section(document, name) for name in ("split", "run", "model"))
    said = split.get("variants") or ()
    widths = said if isinstance(said, (list, tuple)) and all(type(one) is int for one in said) else ()
    stages = _most_alike(model) if model.get("share", "none") != "none" else 1
    kept = {key: value for key, value in split.items() if key != "layers_per_stage"}
    return document | {
        "split": kept | {"stages": len(widths) or stages},
        "run": {**run, "start_when": {"stage_hosts": sum(widths) or stages, "trainers": 1}},
    }


def _most_alike(model: Mapping[str, Any]) -> Any:
    """Return into how many stages a model can be cut which are alike; what is wrong with it is refused later."""
    usual = GptConfig()
    layers, each = model.get("layers", usual.layers), model.get("expert_every", usual.expert_every)
    whole = model.get("experts") and type(layers) is type(each) is int and each > 0
    return layers // each if whole else layers


def _sized(foundation: Foundation, manifest: Manifest, say: Say) -> SizedStages | None:
    """The cut that suits the peers of ``--peers`` best; None without."""
    if foundation.peers is None:
        return None
    if foundation.layers_per_stage is not None:
        allowed = "no --layers-per-stage with it, which says the sizes"
        raise ConfigError("--peers", str(foundation.peers), allowed, "Leave one of the two out.")
    lasting = Lasting(functools.partial(say, "searching"))
    return stages_for(manifest, foundation.peers, foundation.stages, lasting.told)


def given_tokenizer(foundation: Foundation, document: dict[str, Any]) -> tuple[bytes, str] | None:
    """Return the tokenizer that a run brings with it, and where it came from; None where one is to be trained on text.
    Raises ConfigError."""
    named = _section(document, "tokenizer").get("digest")
    beside = None if foundation.file is None else foundation.file.with_name(TOKENIZER_FILE)
    if foundation.tokenizer is not None:
        return _read_tokenizer(foundation.tokenizer), str(foundation.tokenizer)
    foreign = _foreign(foundation)
    if foreign is not None and foreign.tokenizer is not None:
        return _read_tokenizer(foreign.tokenizer), str(foreign.tokenizer)
    if foreign is not None and named is None and not foundation.text:
        remedy = "Or give another (--tokenizer FILE), or text to make a new one from (--text FILE)."
        raise ConfigError("--model", foundation.model, "a directory with a tokenizer.json",
                          f"{without_tokenizer(foreign.directory)}. {remedy}")  # fmt: skip
    if named is None:
        return None
    # What quickstart and swarm new leave lies together.
    if beside is None or not beside.is_file():
        remedy = "Give that file, or remove [tokenizer] from the RUN.toml to have a new one trained."
        raise ConfigError("--tokenizer", None, f"the tokenizer.json whose sha256 begins {named[:16]}", remedy)
    return _read_tokenizer(beside), str(beside)


def _trained_tokenizer(foundation: Foundation, document: dict[str, Any]) -> tuple[bytes, str]:
    given = foundation.text
    corpus = read_corpus(given, allow_bad=foundation.allow_bad) if given else built_in_corpus()
    return tokenizer_for(foundation, document, corpus)


def tokenizer_for(foundation: Foundation, document: dict[str, Any], corpus: Corpus) -> tuple[bytes, str]:
    """Train a tokenizer with as many tokens as the run's model has, and say on what. Cannot be interrupted."""
    vocab_size = parse_manifest(pending(document), _origin(foundation)).model.vocab_size
    return train_tokenizer(sample_texts(corpus.documents), vocab_size), corpus.name


def _foreign(foundation: Foundation) -> ForeignModel | None:
    """The model that is named, found once. Raises ConfigError for options that need one."""
    if foundation.model is not None:
        return _found(foundation.model)
    if foundation.from_scratch:
        raise ConfigError("--from-scratch", True, "only together with --model", "Name the model too, or leave it out.")
    return None


_found = functools.cache(find_model)


def _with_fitting_rates(document: dict[str, Any], foundation: Foundation) -> dict[str, Any]:
    """Return the manifest with rates for the weights that the model begins with: those for trained weights teach random
    ones nothing, and those for random ones ruin trained ones. What a file of one's own says stays."""
    for_trained = foundation.preset in (None, FOR_FOREIGN)
    if foundation.file is None and for_trained == foundation.from_scratch:
        document = {name: said for name, said in document.items() if name != "optimizer"}
    if foundation.from_scratch:
        return document
    preset = load_preset(FOR_FOREIGN)
    sections = {name: document.get(name, {}) for name in ("optimizer", "batch")}
    return document | {name: preset[name] | said for name, said in sections.items() if isinstance(said, dict)}


def _with_rates_of_adapters(document: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the rates that adapters beside frozen weights want, but where a file has ``said``
    another, or which other optimizer: these rates are AdamW's."""
    if said.get("name", "adamw") != "adamw":
        return document
    return document | {"optimizer": {**_section(document, "optimizer"), **FOR_ADAPTERS, **said}}


def _table(foreign: ForeignModel, foundation: Foundation, read: Mapping[str, Any]) -> dict[str, Any]:
    """The ``[model]`` of a run with it, once it was tried: as options say, else as the file does."""
    said: dict[str, Any] = {key: _section(read, "model").get(key) for key in ("context", "compute")}
    said["packing"] = _section(read, "batch").get("packing")
    said |= {key: value for key in said if (value := getattr(foundation, key)) is not None}
    given = {key: value for key, value in said.items() if value is not None}
    model = foreign.tried(scratch=foundation.from_scratch, **given)
    return model.model_dump(mode="json")


def _read_tokenizer(path: Path) -> bytes:
    return read_bounded(path, "--tokenizer", "a readable tokenizer.json", MAX_FILES_BYTES)


def _named_beside(foundation: Foundation, document: Mapping[str, Any], room: int) -> dict[str, bytes]:
    """The files that a RUN.toml names next to the tokenizer: they lie where that lies, at most ``room`` bytes."""
    if foundation.file is None:
        return {}
    allowed = "a readable file, which the RUN.toml names in [files]"
    there = foundation.file.parent
    found: dict[str, bytes] = {}
    for name in document.get("files", {}):
        found[name] = read_bounded(there / name, "files", allowed, room)
        room -= len(found[name])
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_named(path))
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        remedy = f"{another_path(path)} Or start with: {command_name()} new --preset {preset_names()[0]}"
        raise ConfigError("RUN.toml", str(path), "a readable TOML file", remedy, why=cause) from None
    except ValueError as error:
        raise ConfigError("RUN.toml", str(path), "valid TOML", f"Fix that line in {path}.", why=str(error)) from None


def _change(document: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    here = document
    for section in sections:
        inner = here.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(section, inner, "a section", "Correct it in the RUN.toml.")
        here = inner
    here[key] = value


def _blamed(error: ConfigError, foundation: Foundation) -> ConfigError:
    """The error with the option in place of the manifest's key that it set."""
    stages = foundation.changes.get("split.stages")
    if error.key == "run.start_when.stage_hosts" and foundation.hosts is None and stages is not None:
        remedy = f"Add --hosts {stages}, or more: every stage needs a replica."
        return ConfigError(error.key, error.value, error.allowed, remedy, why=f"so says {_origin(foundation)}")
    if foundation.strangers and any(key in error.remedy for key in STRANGERS):
        remedy = f"Leave out --strangers, or {_said_by(foundation, error.key)}."
        return ConfigError(error.key, error.value, f"{error.allowed}, as --strangers says", remedy, why=error.why)
    if foundation.own_routes and error.key in _BESIDE_OWN_ROUTES:
        allowed = f"{_BESIDE_OWN_ROUTES[error.key]} with it"
        remedy = f"Add {_BESIDE_OWN_ROUTES[error.key]}."
        return ConfigError("--own-routes", True, allowed, remedy, why=error.why)
    for setting in settings_of(Foundation).values():
        if error.key == setting.option.manifest and error.key in foundation.changes and error.value is not None:
            name = setting.names[0]
            origin = _origin(foundation)
            instead = f"Correct {name}, or leave it out for the value of {origin}."
            remedy = error.remedy.replace(f"Correct it in {origin}.", instead)
            return ConfigError(name, error.value, error.allowed, remedy, why=error.why)
    return error


def _said_by(foundation: Foundation, key: str) -> str:
    """Return what one would leave out for the default of this key of the manifest."""
    if key in foundation.changes:
        return _option_of(foundation, key)
    read = {} if foundation.file is None else _read_toml(foundation.file)
    if value_at(read, key) is None and foundation.profile is not None:
        return "--profile"
    return f"{key if value_at(read, key) is not None else 'speed.profile'} in {_origin(foundation)}"


def _origin(foundation: Foundation) -> str:
    return str(foundation.file) if foundation.file else f"the preset {foundation.preset or FOR_FOREIGN}"
