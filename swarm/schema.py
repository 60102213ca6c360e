"""Base classes of everything decoded from bytes or files that others wrote: strict, closed, immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints, TypeAdapter
from pydantic_core import CoreSchema, PydanticCustomError

from swarm.ids import MAX_NAME, NAME_WORDS, MicrobatchId, is_name

PeerIdField = Annotated[str, StringConstraints(pattern=r"^[1-9A-HJ-NP-Za-km-z0]{1,64}$")]
"""A peer id as it may appear in a message; whether it is the sender's is checked against the connection."""

PartField = Annotated[
    str,
    StringConstraints(pattern=r"^(ends|(shared|stage)-[0-9]{1,3}|stage-[0-9]{1,3}\.v[0-9]{1,2}of([2-9]|[1-9][0-9]))$"),
]


def _named(text: str) -> str:
    if not is_name(text):
        raise PydanticCustomError("not_a_name", "a name: {words}", {"words": NAME_WORDS})
    return text


NameField = Annotated[str, StringConstraints(max_length=MAX_NAME), AfterValidator(_named)]
"""What a peer is called, for people."""

MachineField = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")]
"""What peers of one machine have in common in one run, and nobody else; "" where that is not known."""
OrganisationName = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,40})?$")]
RegionField = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{0,32}$")]
"""Where a peer is, as its owner calls it; "" where nobody said."""

ID_TAIL, MAX_BESIDE = 12, 15
BesideField = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=rf"^[1-9A-HJ-NP-Za-km-z0]{{1,{ID_TAIL}}}$")], ...],
    Field(max_length=MAX_BESIDE),
]
"""The peers on a peer's machine that it was started with, by the ends of their ids: 70 bits each."""

TOKENIZER_FILE = "tokenizer.json"
_STEM = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}"
MODEL_FILE = (
    r"^(tokenizer[_-][A-Za-z0-9_-]{1,40}\.json|tokenizer\.model\.v[0-9]{1,3}|(vocab|merges)\.(json|txt|bpe)"
    r"|(special_tokens_map|added_tokens|tekken|generation_config|chat_template)\.json|chat_template\.jinja"
    rf"|{_STEM}\.(model|tiktoken)|additional_chat_templates/{_STEM}\.jinja"
    r"|(LICEN[CS]E|NOTICE|README|COPYING|USE_POLICY)[A-Za-z0-9_-]{0,40}(\.(md|txt))?)$"
)
"""What a file of a model may be called that travels with a run next to its tokenizer.json and comes back with an
export: no code, no pickle, no weights."""
ModelFileField = Annotated[str, StringConstraints(pattern=MODEL_FILE)]
MAX_FILES, MAX_FILES_BYTES = 64, 32 << 20
"""Of those that travel with a run: how many beside the tokenizer, and the bytes of all with it."""

DigestField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16,64}$")]
WHOLE_WORD, FEWEST_TRAINERS = 10_000, 5
"""Of a trainer a replica says a cosine, in 1 / WHOLE_WORD, and nothing where there are fewer than FEWEST_TRAINERS: a
single one could have most words say of an honest one, unlike the others, that it pulls against them. It turns itself
away from that one and from the others at once."""
AFTER_CHARS = 16
"""How much of a record's hash says what a round or a journey of the next step follows."""
AfterField = Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{0,{AFTER_CHARS}}}$")]
SignatureField = Annotated[bytes, Field(min_length=64, max_length=64)]
MAX_COUNT = 2**53 - 1
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

MAX_LISTED = 1 << 16
"""Of what has no smaller bound of its own: more than the largest body holds of anything that is listed."""
LISTED = Field(max_length=MAX_LISTED)
"""The bound of a list or map, for its ``Annotated`` type."""

MAX_LATENCY_US, MAX_BYTES_PER_S = 60_000_000, 1 << 40
"""Of a link: a minute, and a tebibyte a second. What is measured, or claimed, is taken for no more."""


BINS, MOST_IN_BIN = 256, 4096
HistogramField = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MOST_IN_BIN)], ...], Field(min_length=BINS, max_length=BINS)
]
"""How often tokens are in some text: in each of BINS, into which their ids are hashed, the root of its share."""

ShardField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_BeforeAnother = Annotated[int, Field(ge=0, lt=2**53 - 1)]
"""The next one is a :data:`Count`, too."""
_microbatch = TypeAdapter(
    tuple[PeerIdField, ShardField, _BeforeAnother, _BeforeAnother], config=ConfigDict(strict=True)
)


def _checked(microbatch: MicrobatchId) -> MicrobatchId:
    _microbatch.validate_python(microbatch)
    return microbatch


MicrobatchField = Annotated[MicrobatchId, AfterValidator(_checked)]
"""A microbatch as it may appear in a message: records keep it, so that nobody may make it long."""


def in_words(error: Mapping[str, Any], patterns: Mapping[str, str]) -> str:
    """Return what was expected, for people: of one of ``ValidationError.errors()``. ``patterns`` says what the regular
    expressions of the caller's own fields mean."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        pattern = str(error["ctx"]["pattern"])
        return patterns.get(pattern, f"text that matches {pattern}")
    wanted = message.removeprefix("Input should be ")
    if error["type"] in _BOUNDS:
        return f"a number {wanted}"
    return wanted[0].lower() + wanted[1:] if wanted == message else wanted


_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


class Section(BaseModel):
    """One section of a manifest or settings file: unknown keys are errors, values are immutable, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def keys_at(section: type[Section], path: Sequence[int | str]) -> list[str]:
    """Those that the table at this path below a section may have, also where it is one of many."""
    for name in path:
        field = section.model_fields.get(name) if isinstance(name, str) else None
        section = section if field is None else _section(field.annotation) or section
    return list(section.model_fields)


def _section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for one in get_args(annotation) if (found := _section(one)) is not None), None)


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("tuple", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Message(BaseModel):
    """The body of one call or answer. Decoded strictly: sequences are tuples, no coercion, no unknown field, no number
    that is not finite.

    Every list and map has a bound, and validation ends at the first element that is wrong: another peer chose how many
    there are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, whose lists and maps fail at the first wrong element."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def to_wire(self) -> dict[str, Any]:
        """Plain data for msgpack."""
        return self.model_dump()


class Empty(Message):
    """An answer that says no more than: done."""


class Record(Message):
    """The body of a directory record. ``kind`` names its DHT key; signature, owner and expiry are the directory's."""

    kind: ClassVar[str] = ""
