"""Find a model of ``transformers`` that a person names, and say what a run's ``[model]`` says of it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from peers.console.words import another_path
from peers.data.tokenizer_files import CameWith, came_with, read_encoding, special_tokens
from peers.home.places import FROZEN
from swarm.config import MAX_TEMPLATE
from swarm.disk import size_text
from swarm.errors import ConfigError
from swarm.models.hf.hf_config import (
    ARCHITECTURES,
    MAX_CONFIG_BYTES,
    POSITION_KEYS,
    HfConfig,
    canonical,
    numbers_of,
    read_config,
)
from swarm.models.registry import AnyModel
from swarm.models.spec import DType, SplitConfig
from swarm.parsing import parse_json
from swarm.pipeline.batch import Packing
from swarm.schema import MODEL_FILE

if TYPE_CHECKING:
    from peers.settings import PeerSettings
    from swarm.state.frozen import ModelFiles

ADAPTER_LR = 2e-4
"""Adapters begin at nothing, so they take ten times what weights that are trained already take (Hu et al., arXiv
2106.09685, appendix D)."""
CONTEXT = 512
"""Tokens in a row where nothing is said: more costs memory that grows with it."""
HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(@(?P<revision>[\w./-]{1,100}))?")
_CACHED = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})$")
_DOWNLOADED = re.compile(rf"(?!consolidated)[^/]*\.(safetensors|json|jinja)$|{MODEL_FILE}")
"""Files of a hub's model: weights and what comes back with an export, no code and no pickle."""
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id")
OPTION = "--model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """A model that is on this machine: its directory, where it came from, and its checked config as canonical JSON."""

    directory: Path
    source: str
    revision: str
    config: str

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json, if there is one."""
        path = self.directory / "tokenizer.json"
        return path if path.is_file() else None

    def spoken(self) -> dict[str, Any]:
        """Return what ``[tokenizer]`` says beside the digest: what ends a document, and how a conversation is written.

        Raises ConfigError for files next to the tokenizer that cannot be used.
        """
        if self.tokenizer is None:
            return {}
        encoding = read_encoding(self.tokenizer, key=OPTION)
        said: dict[str, Any] = {"end": encoding.end_token or "", "tokens": special_tokens(self.tokenizer)}
        if encoding.template is not None and len(encoding.template.text) <= MAX_TEMPLATE:
            said["template"] = encoding.template.text
        return said

    def came_with(self, tokenizer: bytes, said: dict[str, Any]) -> tuple[dict[str, Any], CameWith]:
        """Return what a run's ``[tokenizer]`` says, and the files that come back with an export.

        Args:
            tokenizer: The run's, which need not be the model's.
            said: What the run says itself: it wins over what the model says.

        Raises:
            ConfigError: As :meth:`spoken`, or a file cannot be read.
        """
        if self.tokenizer is None or self.tokenizer.read_bytes() != tokenizer:
            return said, came_with(self.directory, tokenizer, ["digest"])
        theirs = self.spoken()
        contrary = [key for key in ("end", "tokens", "template") if key in said and said[key] != theirs.get(key)]
        return theirs | said, came_with(self.directory, tokenizer, contrary)

    def model(self, *, scratch: bool = False, context: int | None = None, compute: DType = "float32") -> HfConfig:
        """Return the ``[model]`` of a run with it.

        Builds it without weights, to learn its numbers and with which attention it runs: a second or two.

        Args:
            scratch: Begin with random weights.
            context: Tokens in a row; None for a usual number that the model has positions for.
            compute: The dtype that it is computed in.

        Raises:
            ConfigError: It cannot be built, or its layers cannot be parted.
        """
        from swarm.models.hf.hf_family import HfFamily, require_transformers

        require_transformers()
        from swarm.models.hf.skeleton import their_config

        text = their_config(self.config).get_text_config()
        most = max(numbers_of(json.loads(self.config), POSITION_KEYS), default=CONTEXT)
        for attention in ("sdpa", "eager"):
            made = _table(
                family="hf", source=self.source, revision=self.revision, architecture=text.model_type,
                layers=text.num_hidden_layers, width=text.hidden_size, vocab_size=text.vocab_size,
                context=min(CONTEXT, most) if context is None else context, scratch=scratch, attention=attention,
                compute=compute, config=self.config,
            )  # fmt: skip
            made.check()
            try:
                HfFamily(made).warm_up()
            except ConfigError as error:
                if attention == "eager" or "scaled_dot_product_attention" not in error.why:
                    raise
                continue
            break
        return made

    def tried(
        self, *, scratch: bool, context: int | None = None, compute: DType = "float32", packing: Packing = "stream"
    ) -> HfConfig:
        """Return the ``[model]`` as :meth:`model` does, once it was tried that it gives the same bits cut as whole, in
        rows that are packed like this: some seconds. Raises ConfigError also where it does not."""
        from swarm.device import free_memory
        from swarm.models.hf.selftest import self_test

        made = self.model(scratch=scratch, context=context, compute=compute)
        self_test(made, free=free_memory()).check(made.architecture, packing)
        return made


def _table(**said: Any) -> HfConfig:
    try:
        return HfConfig(**said)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = str(first["loc"][0])
        raise ConfigError(f"--{key}", said.get(key), first["msg"].lower(), "Correct it, or leave it out.") from None


def without_tokenizer(directory: Path) -> str:
    """Return what to do where a model has no tokenizer.json: transformers makes one of what slower tokenizers read."""
    where = json.dumps(str(directory))
    program = f"from transformers import AutoTokenizer as T; T.from_pretrained({where}).save_pretrained({where})"
    return f"Make it of its vocabulary, if it has one: python -c {shlex.quote(program)}"


def check_parts(model: HfConfig, split: SplitConfig) -> None:
    """Build each part without weights, and try a small model with adapters where it has them: some seconds more. Raises
    ConfigError for a cut, or adapters, that the model does not bear."""
    import torch

    from swarm.models.hf.hf_family import HfFamily
    from swarm.models.strips import strips_of

    family, here = HfFamily(model), [torch.device("cpu")]
    built = [family.build(spec) for spec in family.parts(split)]
    cut = [strips_of(part, family.layout(part), family.tensor_plan, split.tensor, here) for part in built]
    if split.tensor > 1 and not any(cut):
        why = "no layer of its kind can be cut: swarm model check says why"
        raise ConfigError("split.tensor", split.tensor, "1 for this model", "Leave it out.", why=why)
    if model.lora is not None:
        from swarm.models.hf.selftest import check_adapters

        check_adapters(model)


def check_founding(model: HfConfig, split: SplitConfig) -> None:
    """Raise ConfigError where this machine has not the memory to found a run of the model
    (:func:`~swarm.planning.costs.founding_bytes`)."""
    from swarm.device import free_memory
    from swarm.planning.costs import founding_bytes

    needed, free = founding_bytes(model, split), free_memory()
    if needed > free:
        why = f"its founder holds {size_text(needed)} until the run has begun, and {size_text(free)} are free here"
        raise ConfigError(OPTION, model.source, "a machine with more memory", "Found the run there.", why=why)


def find_model(given: str, key: str = OPTION) -> ForeignModel:
    """Return the model that a person names: a directory, or ``OWNER/NAME[@REVISION]`` on a hub, which is downloaded.

    Raises ConfigError naming ``key`` where it is not there, has no usable config.json, or the hub does not answer.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        cached = _CACHED.search(path.resolve().as_posix())
        source = (
            f"{cached['owner']}/{cached['name']}" if cached else re.sub(r"[^A-Za-z0-9._-]", "-", path.resolve().name)
        )
        return _read(path, source, cached["revision"] if cached else "", key)
    named = HUB_ID.fullmatch(given)
    if named is None or path.exists():
        raise ConfigError(key, given, "a directory with a model's files, or OWNER/NAME[@REVISION]", another_path(path))
    directory, revision = _download(named["id"], named["revision"], key)
    return _read(directory, named["id"], revision, key)


def files_here(model: AnyModel, settings: PeerSettings) -> ModelFiles:
    """Return what this machine has of a run's model: its directory as it was given or, if that was asked for,
    downloaded from the hub in the very revision that the run names; and where frozen weights are. Blocking.

    Raises ConfigError where the run names no revision of a hub, or that does not give it.
    """
    from swarm.state.frozen import FrozenStore, ModelFiles

    frozen = FrozenStore(settings.frozen or settings.home / FROZEN)
    if not settings.options.from_hub:
        return ModelFiles(settings.model_files or settings.options.model_files, frozen)
    if not isinstance(model, HfConfig) or not model.revision or not HUB_ID.fullmatch(model.source):
        why = "it was founded with files of its founder, or is our own transformer"
        raise ConfigError("--from-hub", True, "a run with a model of a hub", "Leave it out.", why=why)
    return ModelFiles(_download(model.source, model.revision, "--from-hub")[0], frozen)


def _read(directory: Path, source: str, revision: str, key: str) -> ForeignModel:
    path = directory / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                key, str(path), f"a config.json of at most {MAX_CONFIG_BYTES} bytes", "Use another model."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"config.json: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}".lower()
        raise ConfigError(key, str(directory), "a directory with a model's config.json and safetensors",
                          "Name the directory that holds them.", why=why) from None  # fmt: skip
    return ForeignModel(directory=directory, source=source, revision=revision, config=_text_config(text))


def _text_config(text: str) -> str:
    """The config of the model that writes, of one that also sees or hears, with the tokens between which the whole
    writes; canonical. Raises ConfigError."""
    try:
        config: Any = parse_json(text)
    except ValueError:
        config = None
    if isinstance(config, dict) and config.get("model_type") not in ARCHITECTURES:
        inner = config.get("text_config")
        if isinstance(inner, dict) and inner.get("model_type") in ARCHITECTURES:
            outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
            return canonical(read_config(json.dumps(inner | outer)))
    return canonical(read_config(text))


def _download(name: str, revision: str | None, key: str) -> tuple[Path, str]:
    """The directory where a hub's model lies now, and its revision in full."""
    from swarm.models.hf.hf_family import require_transformers

    require_transformers()
    from huggingface_hub import HfApi, snapshot_download

    try:
        found = HfApi().model_info(name, revision=revision)
        resolved = found.sha or ""
        if not re.fullmatch(r"[0-9a-f]{40}", resolved):
            raise ValueError(f"its revision is {resolved!r}")
        names = [one.rfilename for one in found.siblings or () if _DOWNLOADED.match(one.rfilename)]
        return Path(snapshot_download(name, revision=resolved, allow_patterns=names)), resolved
    except Exception as error:  # noqa: BLE001 - whatever network, hub and disk raise
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        remedy = f"Check the name and the network, or download it elsewhere and name its directory: {key} DIR"
        raise ConfigError(key, name, "a model that the hub has and gives", remedy, why=cause) from None
