"""The run manifest: what every peer of a run must agree on, and its content address.

A manifest is a TOML file; resolved (every default written out) and rendered as canonical JSON, its sha256 is the run
id, which is part of every protocol name and every DHT key, so peers with different settings cannot meet.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, ValidationInfo, field_validator

from swarm import WIRE_VERSION
from swarm.averaging.config import AveragingConfig, check_averaging
from swarm.columns import host_parts, takes
from swarm.compression.names import AUTO, EXACT, SAME, ActivationChoice, GradientChoice, exact_codec
from swarm.consensus.admissions import AdmissionConfig
from swarm.consensus.copies import MAX_COPIES
from swarm.consensus.records import record_bytes
from swarm.disk import read_named
from swarm.errors import ConfigError, OtherWire
from swarm.ids import ENDS, PartName, PeerId, RunId, shared_part
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import (
    AnyModel,
    config_type,
    delinked_at,
    expert_interval,
    family_of,
    shares,
    sparsity,
    steering,
)
from swarm.models.spec import DOMAIN, SplitConfig, split_layers
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.optim.schedules import MUON_WIDTH, OptimizerConfig
from swarm.parsing import parse_toml
from swarm.pipeline.batch import BatchConfig
from swarm.schema import MAX_FILES, MODEL_FILE, TOKENIZER_FILE, ModelFileField, Section, in_words, keys_at
from swarm.security.signing import public_key_of

_NAME, _NONCE, _SHA256 = r"^[a-z0-9][a-z0-9-]{0,40}$", r"^([0-9a-f]{16})?$", r"^[0-9a-f]{64}$"
_TOKEN = r"^[a-z]{2,10}_token$"
_PATTERNS = {
    _NAME: "1 to 41 small letters, digits and dashes, the first no dash",
    _NONCE: "16 small hex digits, or nothing",
    _SHA256: "a sha256: 64 small hex digits",
    _TOKEN: "names like bos_token",
    DOMAIN: "1 to 31 small letters, digits and dashes, the first no dash",
    MODEL_FILE: "names of files with which models come, like tokenizer_config.json",
}


MAX_TEMPLATE = 1 << 16
"""Characters of a chat template that travels with a run: ten times the longest that is known."""


class StartWhen(Section):
    """``start_when`` of ``[run]``: how many peers of each kind wait when the founder starts the run."""

    stage_hosts: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Stage hosts with which the run starts: at least ``split.stages``."""
    trainers: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Trainers with which the run starts."""


class Parent(Section):
    """``parent`` of ``[run]``: the checkpoint of another run with which this one begins, cut otherwise. No peer accepts
    a first record of that step, or of one before it, that follows another record; that the weights are that state, the
    founder is trusted for."""

    run: Annotated[str, StringConstraints(pattern=_SHA256)]
    """Id of the run whose checkpoint it is."""
    step: Annotated[int, Field(ge=0, lt=10**9)]
    """The step after which this run goes on."""
    record: Annotated[str, StringConstraints(pattern=_SHA256)]
    """Hash of the close record that decided the state of that step."""


Rewind = Literal["auto", "ask", "never"]
WAIT_FOR_LOST_S = 21_600.0
"""Six hours: a machine that died is most often started again within a working day."""


class RunConfig(Section):
    """``[run]``: name, seed of the initial weights, length, and exactness.

    ``wait_for_lost_s``, ``rewind`` and ``parent`` are left out of what is written where they are the default, so that
    manifests without them keep their id. Nothing that is computed depends on ``nonce`` (:func:`new_nonce`).
    """

    name: Annotated[str, StringConstraints(pattern=_NAME)] = "tiny"
    """Name of the run, for people."""
    nonce: Annotated[str, StringConstraints(pattern=_NONCE)] = ""
    """16 hex digits that tell apart runs that are otherwise the same; the founder draws them."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the initial weights and of all randomness in training; private ends begin from a secret seed."""
    steps: Annotated[int, Field(ge=1, lt=10**9)] = 60
    """Optimizer steps until the run is over."""
    reproducible: bool = False
    """Give the same weights, bit for bit, for any wiring; averaging sends 1.5 times the bytes, up to twice in groups
    that swap."""
    quorum_grace_s: Annotated[float, Field(ge=0, le=86_400)] = 600.0
    """Seconds without a majority of the voters after which the peers that are left go on provisionally; 0: they
    wait."""
    wait_for_lost_s: Annotated[
        float, Field(ge=0, le=30 * 86_400, exclude_if=lambda seconds: seconds == WAIT_FOR_LOST_S)
    ] = WAIT_FOR_LOST_S
    """Seconds that peers wait for a part that nobody holds, or for any other peer, before they end with exit code 3."""
    rewind: Annotated[Rewind, Field(exclude_if=lambda mode: mode == "auto")] = "auto"
    """Whether the run goes back to a checkpoint when a lost part does not come back: by itself, once a
    person says so, or never."""
    start_when: StartWhen = StartWhen()
    copies: Annotated[int, Field(ge=0, le=MAX_COPIES)] = 2
    """Peers of other parts that keep a copy of each part; a copy takes 12 bytes of host memory a parameter, 24 while it
    takes a step's update."""
    parent: Annotated[Parent | None, Field(exclude_if=lambda parent: parent is None)] = None
    wire: Literal[2] = WIRE_VERSION
    """Version of the protocol; peers refuse runs of another version."""


class TokenizerConfig(Section):
    """``[tokenizer]``: shards made with another one are refused.

    All but ``digest`` are left out of what is written where they say nothing, so that manifests without them keep their
    id.
    """

    digest: Annotated[str, StringConstraints(pattern=_SHA256)]
    """sha256 of the run's ``tokenizer.json``; where nobody gives one, the founder makes a tokenizer and fills it
    in."""
    end: Annotated[str, StringConstraints(max_length=256), Field(exclude_if=lambda value: not value)] = ""
    """Token that ends a document; empty: the first of those known to, that the tokenizer has."""
    template: Annotated[str, StringConstraints(max_length=MAX_TEMPLATE), Field(exclude_if=lambda value: not value)] = ""
    """Chat template, in Jinja, with which trainers write conversations as text."""
    tokens: Annotated[
        dict[Annotated[str, StringConstraints(pattern=_TOKEN)], Annotated[str, StringConstraints(max_length=256)]],
        Field(max_length=16, exclude_if=lambda value: not value),
    ] = {}
    """Special tokens by the names that the template calls them."""


class CodecConfig(Section):
    """``[codecs]``: how activations and their gradients travel between stages.

    A manifest replaces ``same`` and ``exact`` by what they stand for: its reader finds a codec's name, and runs that
    say ``exact`` or that codec have one id. With ``auto`` each close record names the codec of each boundary in the
    next step (:mod:`swarm.step.boundary_codecs`).
    """

    activations: ActivationChoice = EXACT
    """Codec of activations between stages; ``exact`` loses nothing, ``auto`` takes ``exact`` or ``int8h`` by the
    measured links."""
    gradients: GradientChoice = SAME
    """Codec of their gradients on the way back; ``same``: as activations."""

    @property
    def described(self) -> str:
        """Return what travels as what, for people."""
        back = "" if self.gradients == self.activations else f", gradients {self.gradients}"
        return f"{self.activations}{back}"


class SpeedConfig(Section):
    """``[speed]``: whether trainers feed a step early, while the one before is closed. Early work is computed with the
    parameters of the record before the one that its step follows."""

    mode: Literal["sync", "overlap"] = "sync"
    """``sync``: a step begins when the one before is closed; ``overlap``: it is fed early."""
    early_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """With ``overlap``: the share of a step's microbatches that may be fed early; at most a half with AdamW."""

    @property
    def overlaps(self) -> bool:
        """Return whether steps are fed early."""
        return self.mode == "overlap"


class RebalanceConfig(Section):
    """``[rebalance]``: whether hosts move between stages, each to a part of which it keeps a copy."""

    mode: Literal["off", "auto"] = "off"
    """``auto``: records move hosts as machines come and go and speeds change; ``off``: hosts stay where they are."""

    @property
    def moves(self) -> bool:
        """Return whether records move hosts."""
        return self.mode == "auto"


LEAST_AUDITED = 0.03
"""Of fewer hops a liar would stay unseen for too long."""


class VerifyConfig(Section):
    """``[verify]``: what is computed again, to see whether it was right."""

    audit: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a journey's hops that other replicas of the stage compute again before the microbatch counts; a quarter
    of those of a replica that joined later, less with each of the first eight that were right; 0: none."""


class Manifest(Section):
    """The whole run manifest. Compare by :attr:`run_id`."""

    run: RunConfig = RunConfig()
    model: AnyModel = GptConfig()
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig
    files: Annotated[
        dict[ModelFileField, Annotated[str, StringConstraints(pattern=_SHA256)]],
        Field(max_length=MAX_FILES, exclude_if=lambda files: not files),
    ] = {}
    """sha256 of the files that the model came with beside its tokenizer, by name: an export writes them as they
    were."""
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    averaging: AveragingConfig = AveragingConfig()
    codecs: Annotated[CodecConfig, Field(validate_default=True)] = CodecConfig()
    speed: Annotated[SpeedConfig, Field(exclude_if=lambda speed: not speed.overlaps)] = SpeedConfig()
    rebalance: Annotated[RebalanceConfig, Field(exclude_if=lambda moving: not moving.moves)] = RebalanceConfig()
    admission: Annotated[AdmissionConfig, Field(exclude_if=lambda admission: not admission.closed)] = AdmissionConfig()
    verify: Annotated[VerifyConfig, Field(exclude_if=lambda verify: not verify.audit)] = VerifyConfig()

    @field_validator("codecs")
    @classmethod
    def _resolve(cls, codecs: CodecConfig, info: ValidationInfo) -> CodecConfig:
        if "model" not in info.data:  # it is refused
            return codecs
        stands_for = {EXACT: exact_codec(info.data["model"].compute)}
        activations = stands_for.get(codecs.activations, codecs.activations)
        stands_for[SAME] = activations
        return CodecConfig(activations=activations, gradients=stands_for.get(codecs.gradients, codecs.gradients))

    def canonical(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, every default present."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        ).encode()

    @property
    def named_files(self) -> dict[str, str]:
        """The sha256 of each file that travels with the manifest, by name: the tokenizer, and :attr:`files`."""
        return {TOKENIZER_FILE: self.tokenizer.digest} | self.files

    @property
    def parts(self) -> tuple[PartName, ...]:
        """Return the parts with which the run begins; which there are later each record says."""
        if not shares(self.model):
            return self.split.parts
        return (shared_part(self.split.stages), *(part for part in self.split.parts if part == ENDS))

    @property
    def cuts(self) -> tuple[tuple[PartName, ...], ...]:
        """Return into which parts a state of the run may be cut, at the beginning and later."""
        return tuple(dict.fromkeys((self.parts, self.split.parts)))

    def cut_with(self, parts: Collection[str]) -> tuple[PartName, ...]:
        """Return the first of :attr:`cuts` that has these parts, which are of one state."""
        return next((cut for cut in self.cuts if set(parts) <= set(cut)), self.cuts[0])

    @property
    def step_microbatches(self) -> int:
        """Return how many microbatches a step has: one batch, or those between two synchronisations."""
        return self.batch.microbatches_per_step * self.averaging.inner_steps

    @property
    def run_id(self) -> RunId:
        """Hex sha256 of :meth:`canonical`."""
        return RunId(hashlib.sha256(self.canonical()).hexdigest())


def new_nonce() -> str:
    """16 random hex digits: no other run has the id of a manifest with it."""
    return secrets.token_hex(8)


def parse_manifest(document: dict[str, Any], origin: str) -> Manifest:
    """Validate a decoded manifest. Raises ConfigError naming key, value, what is allowed and the remedy; OtherWire for
    one of another wire version, whatever else it says."""
    _check_wire(document, origin)
    try:
        manifest = Manifest.model_validate(_tuples(document))
    except ValidationError as error:
        raise _explain(error, document, origin) from error
    check_manifest(manifest)
    return manifest


def load_manifest(path: Path) -> Manifest:
    """Read a manifest from TOML. Raises ConfigError also for a missing or malformed file."""
    try:
        document = parse_toml(read_named(path))
    except OSError as error:
        raise ConfigError(
            "manifest", str(path), "a readable TOML file", f"{error.strerror}; check the path."
        ) from error
    except ValueError as error:
        raise ConfigError("manifest", str(path), "valid TOML", f"{error}; fix that line.") from error
    return parse_manifest(document, str(path))


def check_manifest(manifest: Manifest) -> None:
    """What holds between sections; what torch is needed for last, as it takes seconds to import. Raises ConfigError."""
    model, split, start = manifest.model, manifest.split, manifest.run.start_when
    model.check()
    check_variants(manifest)
    check_tensor(manifest)
    split_layers(model.layers, split)
    members = start.stage_hosts + start.trainers + 1
    size = record_bytes(manifest.step_microbatches, split.stages, members, closed=manifest.admission.closed)
    if size > MAX_BODY_BYTES:
        local = manifest.averaging.mode == "local"
        raise ConfigError(
            "batch.microbatches_per_step",
            manifest.batch.microbatches_per_step,
            f"few enough that a step's record fits into {MAX_BODY_BYTES >> 20} MiB; these need {size >> 20} MiB",
            "Use larger microbatches and fewer of them" + (", or fewer local steps." if local else "."),
        )
    check_averaging(manifest.averaging, reproducible=manifest.run.reproducible)
    check_influence(manifest)
    check_trainer_test(manifest)
    check_verify(manifest)
    check_codecs(manifest)
    check_speed(manifest)
    check_rebalance(manifest)
    check_admission(manifest.admission)
    check_routes(manifest)
    check_shared(manifest)
    check_steering(manifest)
    check_sparsity(manifest)
    parent = manifest.run.parent
    if parent is not None and parent.step >= manifest.run.steps:
        raise ConfigError(
            "run.parent.step",
            parent.step,
            f"less than run.steps = {manifest.run.steps}, after which the run is over",
            "Go on from an earlier checkpoint.",
        )
    if start.stage_hosts < (parts := len(host_parts(split.parts))):
        held, fewer = ("variant of a stage", "variants") if split.variants else ("stage", "stages")
        raise ConfigError(
            "run.start_when.stage_hosts",
            start.stage_hosts,
            f"at least {parts}, one for each {held}" if split.variants else f"at least split.stages = {parts}",
            f"Every {held} needs a replica: start with {parts} stage hosts or more, or cut fewer {fewer}.",
        )
    if manifest.averaging.mode == "local" and manifest.averaging.local.fragments > manifest.run.steps:
        raise ConfigError(
            "averaging.local.fragments",
            manifest.averaging.local.fragments,
            f"at most run.steps = {manifest.run.steps}: each close averages one, the others would never change",
            "Use fewer fragments, or more steps.",
        )
    most = -(-start.stage_hosts // split.stages)
    if manifest.averaging.mode == "local" and most > manifest.batch.microbatches_per_step:
        raise ConfigError(
            "batch.microbatches_per_step",
            manifest.batch.microbatches_per_step,
            f'at least {most} with averaging.mode = "local": each of {most} replicas of a stage takes optimizer steps '
            "of its own for its share of such a batch",
            "Use more, smaller microbatches, or start with fewer stage hosts.",
        )
    check_family(manifest)


def check_family(manifest: Manifest) -> None:
    """Check what only the code of the model's family knows: where it has to be asked, this imports torch. Raises
    ConfigError."""
    if manifest.batch.packing == "documents" and not (family := family_of(manifest.model)).packs:
        why = f"{family.described.split(',')[0]} carries what it has read from one document of a row into the next"
        raise ConfigError("batch.packing", "documents", '"stream" for this model', "Leave it out.", why=why)
    check_optimizer(manifest)


def check_codecs(manifest: Manifest) -> None:
    """Check whether what is measured may choose codecs, whose errors are in the weights. Raises ConfigError."""
    for key, value in manifest.codecs.model_dump().items():
        if value == AUTO and manifest.run.reproducible:
            raise ConfigError(
                f"codecs.{key}",
                AUTO,
                "a codec's name with run.reproducible = true",
                f'Write codecs.{key} = "exact" for the weights of one process, or "int8h" for a quarter of the bytes; '
                "or set run.reproducible = false.",
                why="what is measured of links differs from run to run, and so would the weights",
            )


def check_influence(manifest: Manifest) -> None:
    """Check whether microbatches of this run can be bounded. Raises ConfigError."""
    key, influence = "optimizer.influence", manifest.optimizer.influence
    if 0 < influence < 1:
        why = "below 1 it would scale down most of what honest peers compute"
        raise ConfigError(key, influence, "0, or 1 and more", "Use 2, or leave it out.", why=why)
    if influence:
        _check_steps_shared(
            manifest, key, influence, "0",
            reproducible="what is usual is the replicas' word, and depends on which of them computed what",
            local="replicas that train apart take steps of their own, which nobody bounds",
        )  # fmt: skip


def check_trainer_test(manifest: Manifest) -> None:
    """Check whether trainers of this run can be tested. Raises ConfigError."""
    if manifest.optimizer.trainer_test:
        _check_steps_shared(
            manifest, "optimizer.trainer_test", True, "false",
            reproducible="who fails is found by what replicas say, which depends on which of them computed what",
            local="replicas that train apart take steps of their own, in which nobody compares trainers",
        )  # fmt: skip


def _check_steps_shared(
    manifest: Manifest, key: str, value: object, off: str, *, reproducible: str, local: str
) -> None:
    """Raises ConfigError for a key that needs steps which replicas take together, and in which any of them may have
    computed a microbatch; the reasons say why."""
    if manifest.run.reproducible:
        remedy = f"Leave {key} out, or set run.reproducible = false."
        raise ConfigError(key, value, f"{off} with run.reproducible = true", remedy, why=reproducible)
    if manifest.averaging.mode == "local":
        remedy = f'Leave {key} out, or use averaging.mode = "sync".'
        raise ConfigError(key, value, f'{off} with averaging.mode = "local"', remedy, why=local)


def check_verify(manifest: Manifest) -> None:
    """Check whether hops of this run can be computed again by others. Raises ConfigError."""
    key, audit = "verify.audit", manifest.verify.audit
    if not audit:
        return
    if audit < LEAST_AUDITED:
        why = "of fewer hops a liar would stay unseen for too long"
        raise ConfigError(key, audit, f"0, or {LEAST_AUDITED} and more", "Use 0.05, or leave it out.", why=why)
    averaging, split = manifest.averaging, manifest.split
    for other, value, refused, why in (
        ("averaging.mode", averaging.mode, "local", "replicas that train apart have parameters of their own"),
        ("averaging.strategy", averaging.strategy, "server", "one host adds up all sums, and nobody checks these"),
        ("split.routes", split.routes, "organisation", "who computes a hop again sees what goes through it"),
        ("speed.mode", manifest.speed.mode, "overlap", "nobody computes early work again, and all know which it is"),
    ):
        if value == refused:
            allowed = f'not "{refused}" with {key} = {audit:g}'
            raise ConfigError(other, value, allowed, f"Leave {other} out, or {key}.", why=why)


MOST_STALE = 0.5
"""The largest early share with AdamW: its loss suffers much more than Muon's from gradients of older parameters."""


def check_speed(manifest: Manifest) -> None:
    """Check whether steps of this run can be fed early. Raises ConfigError."""
    speed = manifest.speed
    if speed.overlaps and manifest.averaging.mode == "local":
        why = "replicas that train apart meet seldom, and have nothing to wait for"
        raise ConfigError(
            "speed.mode", "overlap", '"sync" with averaging.mode = "local"', "Leave speed.mode out.", why=why
        )
    if speed.overlaps and manifest.optimizer.name == "adamw" and speed.early_share > MOST_STALE:
        raise ConfigError(
            "speed.early_share",
            speed.early_share,
            f"at most {MOST_STALE} with AdamW, which learns much less from gradients of older parameters",
            'Use a smaller share, or optimizer.name = "muon".',
        )


def check_rebalance(manifest: Manifest) -> None:
    """Check whether hosts of this run can move between stages. Raises ConfigError."""
    if not manifest.rebalance.moves:
        return
    key, value = "rebalance.mode", manifest.rebalance.mode
    if not manifest.run.copies:
        why = "a host moves to a part of which it keeps a copy, and nobody keeps any"
        raise ConfigError(key, value, '"off" with run.copies = 0', "Set run.copies = 2, or leave it out.", why=why)


def check_routes(manifest: Manifest) -> None:
    """Check whether microbatches of this run can stay in the organisation of their trainer. Raises ConfigError."""
    admission, key = manifest.admission, "split.routes"
    if not manifest.split.own_routes:
        if admission.organisation and not manifest.split.own:
            raise ConfigError("admission.organisation", admission.organisation,
                              'none with split.routes = "any" and no split.own',
                              'Set split.routes = "organisation", or leave it out.')  # fmt: skip
        return
    if not admission.closed:
        raise ConfigError(key, "organisation", '"any" with admission.mode = "open"',
                          'Set admission.mode = "organisation", or "token".',
                          why="an invite for one peer says of which organisation it is")  # fmt: skip
    if not admission.organisation:
        raise ConfigError("admission.organisation", "", "the name of the organisation of the first issuers",
                          'Set admission.organisation = "NAME".',
                          why="they need no invite, and microbatches stay in one organisation")  # fmt: skip
    if manifest.rebalance.moves:
        raise ConfigError("rebalance.mode", manifest.rebalance.mode, '"off" with split.routes = "organisation"',
                          "Leave it out.", why="a move could leave an organisation without a stage")  # fmt: skip


def check_tensor(manifest: Manifest) -> None:
    """Check whether layers of this run can be cut into so many strips; of a model of transformers that is seen where
    one is built. Raises ConfigError."""
    key, number, model = "split.tensor", manifest.split.tensor, manifest.model
    if number == 1:
        return
    if model.lora is not None:
        raise ConfigError(key, number, "1 with model.lora", "Leave it out.",
                          why="matrices with adapters beside them stay whole")  # fmt: skip
    if isinstance(model, GptConfig):
        for name, size in (("model.heads", model.heads), ("model.kv_heads", model.key_value_heads),
                           ("model.ffn_dim", model.feed_forward_dim)):  # fmt: skip
            if size % number:
                raise ConfigError(key, number, f"a divisor of {name} = {size}", f"Change it, or {name}.")


MAX_PARTS = 1024
"""Of so many a record tells the state, and that of the ends."""


def check_variants(manifest: Manifest) -> None:
    """Check whether each microbatch finds its variant of each stage. Raises ConfigError."""
    split = manifest.split
    if not split.variants:
        for key in ("route_by", "domains", "centres", "own"):
            if value := getattr(split, key):
                raise ConfigError(f"split.{key}", value, "none where no stage has variants",
                                  "Set split.variants, as [1, 4] for two stages, or leave it out.")  # fmt: skip
        return
    if len(split.variants) != split.stages or max(split.variants) == 1 or sum(split.variants) > MAX_PARTS:
        allowed = f"{split.stages} numbers, one a stage, and one above 1; together at most {MAX_PARTS}"
        raise ConfigError("split.variants", split.variants, allowed, "Correct it or leave it out.")
    if split.own_routes:
        raise ConfigError("split.routes", split.routes, '"any" with split.variants', "Leave it out.",
                          why="each organisation would need a host of every variant")  # fmt: skip
    if manifest.averaging.mode == "local":
        raise ConfigError("averaging.mode", "local", '"sync" with split.variants', "Leave it out.",
                          why="replicas would take optimizer steps in which nothing passes their variant")  # fmt: skip
    _check_choices(split)
    _check_own(manifest)


def _check_own(manifest: Manifest) -> None:
    """Check whether organisations can keep experts to themselves. Raises ConfigError."""
    split, key = manifest.split, "split.own"
    if not split.own:
        return
    if split.route_by != "domain":
        raise ConfigError(key, split.own, 'none with split.route_by = "text"', 'Set split.route_by = "domain".',
                          why="anybody's text may be of any kind")  # fmt: skip
    for name, organisation in split.own.items():
        if name not in split.domains:
            raise ConfigError(key, split.own, f"domains of the run: {', '.join(split.domains)}",
                              "Correct the name, or add it to split.domains.",
                              why=f"{name} is none")  # fmt: skip
        parts = [part for part in split.owners if takes(part, split.domains.index(name))]
        if not parts or not organisation:
            raise ConfigError(key, split.own, "an organisation for domains whose experts no other domain passes",
                              "Name split.domains alone, and give each a variant of its own.")  # fmt: skip
    if not manifest.admission.closed:
        raise ConfigError(key, split.own, 'none with admission.mode = "open"',
                          'Set admission.mode = "organisation", or "token".',
                          why="an invite for one peer says of which organisation it is")  # fmt: skip
    if manifest.run.reproducible:
        raise ConfigError(key, split.own, "none with run.reproducible = true", "Leave one of them out.",
                          why="while an owner's hosts are away, others feed what its trainers would")  # fmt: skip


def _check_choices(split: SplitConfig) -> None:
    said = {"text": ("split.centres", split.centres), "domain": ("split.domains", split.domains)}
    widest = max(split.variants)
    if split.route_by is None:
        raise ConfigError("split.route_by", None, '"text" or "domain" with split.variants',
                          "Say how microbatches find their variant.")  # fmt: skip
    key, choices = said[split.route_by]
    if len(choices) < widest or len(set(choices)) < len(choices):
        raise ConfigError(key, choices, f"at least {widest} that differ, so that microbatches pass every variant",
                          "Name more, or set fewer split.variants.")  # fmt: skip
    if split.route_by == "text" and split.domains:
        raise ConfigError("split.domains", split.domains, 'none with split.route_by = "text"', "Leave it out.")
    if split.centres and len(split.centres) != len(choices):
        raise ConfigError("split.centres", split.centres, f"none, or one for each of the {len(choices)} domains",
                          "Correct it or leave it out.")  # fmt: skip
    if not all(map(any, split.centres)):
        raise ConfigError("split.centres", split.centres, "no centre of no text", "Leave it out.")


def check_shared(manifest: Manifest) -> None:
    """Check whether stages of this run can share their layers, and when they stop. Raises ConfigError."""
    model, split, at = manifest.model, manifest.split, delinked_at(manifest.model)
    if not shares(model):
        return
    if at >= manifest.run.steps:
        raise ConfigError("model.delink_at", at, f"less than run.steps = {manifest.run.steps}, or 0 for never",
                          "Use an earlier step, or leave it out.",
                          why="stages that part with the last step have learnt nothing of their own")  # fmt: skip
    sizes = {spec.last_layer - spec.first_layer for spec in split_layers(model.layers, split) if spec.name != ENDS}
    if len(sizes) > 1:
        key = "model.layers" if split.layers_per_stage is None else "split.layers_per_stage"
        raise ConfigError(key, split.layers_per_stage or model.layers,
                          f'the same for each of {split.stages} stages with model.share = "stages"',
                          "Use as many layers in each stage.")  # fmt: skip
    interval = expert_interval(model)
    rules: tuple[tuple[str, object, bool, str, str], ...] = (
        ("model.expert_every", interval, not interval or max(sizes) % interval == 0,
         f"a divisor of the {max(sizes)} layers of a stage", "each stage needs its experts in the same places"),
        ("split.stages", split.stages, split.stages > 1, "2 and more", "one stage shares nothing"),
        ("split.ends", split.ends, split.ends == "private", '"private"',
         "the first and the last stage have more than the others"),
        ("split.variants", split.variants, not split.variants, "none",
         "what a stage has several of, others cannot have the same of"),
        ("averaging.mode", manifest.averaging.mode, manifest.averaging.mode == "sync", '"sync"',
         "replicas that train apart have layers of their own"),
        ("averaging.guard", manifest.averaging.guard, manifest.averaging.guard == "none", '"none"',
         "what is left out of one stage's sum would be missing in some of the others' alone"),
        ("speed.mode", manifest.speed.mode, not manifest.speed.overlaps, '"sync"',
         "early work would come back to stages that have parted"),
        ("verify.audit", manifest.verify.audit, not manifest.verify.audit, "0",
         "a judge may stand in another stage of the same microbatch"),
    )  # fmt: skip
    for key, value, fits, allowed, why in rules:
        if not fits:
            raise ConfigError(key, value, f'{allowed} with model.share = "stages"',
                              f"Leave {key} out, or model.share.", why=why)  # fmt: skip


def check_steering(manifest: Manifest) -> None:
    """Check whether a step of this run can steer experts by what they got. Raises ConfigError."""
    averaging = manifest.averaging
    if not steering(manifest.model):
        return
    for key, value, wanted, why in (
        ("averaging.mode", averaging.mode, "sync", "replicas that train apart would each steer by what they fed it"),
        ("averaging.codec", averaging.codec, "float32", "others round away how many tokens an expert got"),
    ):
        if value != wanted:
            raise ConfigError(key, value, f'"{wanted}" with model.balance.kind = "bias"',
                              f'Leave {key} out, or set model.balance.kind = "aux".', why=why)  # fmt: skip


def check_sparsity(manifest: Manifest) -> None:
    """Check whether this run can train some weights of each matrix alone. Raises ConfigError."""
    key, share, optimizer = "model.sparsity", sparsity(manifest.model), manifest.optimizer.name
    if share and optimizer in ("muon", "adafactor"):
        raise ConfigError(key, share, f'0 with optimizer.name = "{optimizer}"', "Leave one of them out.",
                          why=f"{manifest.optimizer.described} looks at whole columns of a matrix")  # fmt: skip
    if share and manifest.split.tensor > 1:
        raise ConfigError(key, share, f"0 with split.tensor = {manifest.split.tensor}", "Leave one of them out.",
                          why="sparse matrices stay whole on one device")  # fmt: skip


def check_admission(admission: AdmissionConfig) -> None:
    """Check whether issuers and threshold fit. Raises ConfigError."""
    if not admission.closed:
        if admission.issuers:
            raise ConfigError("admission.issuers", list(admission.issuers), 'none with admission.mode = "open"',
                              'Set admission.mode = "token", or leave them out.')  # fmt: skip
        return
    for issuer in admission.issuers:
        if public_key_of(PeerId(issuer)) is None:
            raise ConfigError(
                "admission.issuers",
                issuer,
                "peer ids, as 12D3KooW…",
                "Correct it: each is the id of a peer that may invite.",
            )
    if admission.threshold > max(1, len(set(admission.issuers))):
        raise ConfigError("admission.threshold", admission.threshold,
                          f"at most the number of issuers, {len(set(admission.issuers))}",
                          "Name more of them.")  # fmt: skip


def check_optimizer(manifest: Manifest) -> None:
    """Check whether copies can keep up with the optimizer's steps, which they compute on the host. Raises
    ConfigError."""
    if manifest.optimizer.name != "muon" or not manifest.run.copies or manifest.averaging.mode == "local":
        return  # in local mode copies follow the outer optimizer, and compute no step of the inner one
    family = family_of(manifest.model)
    layout = family.layout(family.build(family.parts(manifest.split)[0]))
    width = max((min(slot.shape[-2:]) for slot in layout.slots if slot.name in layout.matrices), default=0)
    if width > MUON_WIDTH:
        why = f"it has matrices whose shorter side is {width}: a copy would compute a step of Muon for minutes"
        raise ConfigError(
            "optimizer.name",
            "muon",
            f"another one for a model of this width while run.copies = {manifest.run.copies}",
            f"Set run.copies = 0, or take adamw: matrices up to {MUON_WIDTH} are fine.",
            why=why,
        )


def _check_wire(document: dict[str, Any], origin: str) -> None:
    """Before anything else in it: what another version may say is not ours to judge."""
    run = document.get("run")
    wire = run.get("wire") if isinstance(run, dict) else None
    if type(wire) is int and wire > 0 and wire != WIRE_VERSION:
        raise OtherWire(wire, origin)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _explain(error: ValidationError, document: dict[str, Any], origin: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _keys_at(document, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        meant = f"Did you mean {close[0]}? If not, remove" if close else "Remove"
        value = "[…]" if isinstance(first["input"], dict) else first["input"]
        return ConfigError(key, value, f"one of {', '.join(known)}", f"{meant} it from {origin}.")
    if first["type"] == "missing":
        return ConfigError(key, None, "a value: it has no default", f"Add it to {origin}.")
    return ConfigError(key, first["input"], in_words(first, _PATTERNS), f"Correct it in {origin}.")


def _keys_at(document: dict[str, Any], path: tuple[int | str, ...]) -> list[str]:
    """Those that the table at this path may have; what a model's may depends on its family."""
    if path[:1] == ("model",):
        return keys_at(config_type(document["model"]), path[1:])
    return keys_at(Manifest, path)
