"""Look at a tokenizer that comes from a peer before this process loads it.

A tokenizer is a program: regular expressions that backtrack, rules that make a text a thousand times as long, tables
that fill the memory. :func:`check_foreign_tokenizer` has it loaded by a child process with little time and memory
(``python -m peers.data.foreign_tokenizer``), which names the rule that it refuses. What byte-level BPE, SentencePiece
and WordPiece tokenizers of known families consist of passes.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from data_shards.tokenize import MOST_ADDED
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CPU_S = 2
MEMORY_BYTES = 512 << 20
"""What the child may use, on top of its imports: a vocabulary of 262,144 takes 0.6 s and 280 MB."""
WALL_S = 60.0
"""For a machine that is busy with other things."""

MAX_GROWTH = 64.0
"""How many times as long normalising may make a text."""
MAX_ADDED_CHARS = 256
"""What a rule may put before or after a text, or in the place of a match."""
MAX_PATTERN_CHARS, MAX_REPEATS, MAX_COUNTED = 4096, 3, 8
"""Of a regular expression: its length, the repeats without bound in a row, and what a bounded repeat may count to."""
_STRANGE_GROUP = re.compile(r"(?<!\\)\(\?(?![:=!>]|<[=!])")
"""Comments and switches among them: what is behind one may mean something else than it says."""

_STEPS = {
    "normalizer": {
        "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer",
        "Replace", "Prepend", "Precompiled", "ByteLevel",
    },
    "pre_tokenizer": {
        "Sequence", "ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit",
        "BertPreTokenizer", "UnicodeScripts", "CharDelimiterSplit", "FixedLength",
    },
    "decoder": {
        "Sequence", "ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace", "WordPiece", "BPEDecoder",
        "CTC",
    },
}  # fmt: skip
_PROSE = "the quick brown fox jumps over the lazy dog "
_PROBES = (
    "a" * 20_000,
    _PROSE * 500,
    " " * 20_000,
    "aA1 .\n'" * 3_000,
    "\u00e9\u4e2d\U0001f600\t" * 5_000,
    "=-" * 10_000,
)


@functools.lru_cache(maxsize=8)
def check_foreign_tokenizer(document: bytes) -> None:
    """Raise ConfigError where a tokenizer's JSON must not be loaded here: no tokenizer, or a hostile one.

    Blocking, some 0.3 s: call it in a thread. What passed once is not looked at again by this process.
    """
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-P", "-m", "peers.data.foreign_tokenizer"]
    try:
        child = subprocess.run(
            command, input=document, capture_output=True, env=environment, timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(f"it is not loaded in {WALL_S:g} s") from None
    if child.returncode:
        raise _refused(f"loading it takes more than {CPU_S} s, or {MEMORY_BYTES >> 20} MiB")
    problem = json.loads(child.stdout)
    if problem:
        raise _refused(str(problem)[:400])


def _refused(why: str) -> ConfigError:
    return ConfigError(
        "the run's tokenizer",
        None,
        "one that is safe to load",
        "Do not train with it; ask the one who founded the run where it comes from.",
        why=why,
    )


# --- the child's side ------------------------------------------------------------------------------------------------


def main() -> None:
    """Read a tokenizer from stdin; print what is wrong with it as JSON, an empty text for nothing."""
    document = sys.stdin.buffer.read()
    from tokenizers import Tokenizer

    spent = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_S, spent + CPU_S))
    bound_memory()
    try:
        tokenizer = Tokenizer.from_str(document.decode())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no tokenizer
        print(json.dumps(f"it is no tokenizer.json: {type(error).__name__}"))  # noqa: T201
        return
    problem = next(problems(tokenizer), "")
    print(json.dumps(problem))  # noqa: T201


def bound_memory() -> None:
    """Let this process use :data:`MEMORY_BYTES` more than it does, and leave no core."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def problems(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what is hostile in a loaded tokenizer, each by its name."""
    growth = 1.0
    for name, known in _STEPS.items():
        step = getattr(tokenizer, name)
        for rule in _rules(None if step is None else json.loads(step.__getstate__())):
            kind = str(rule.get("type"))[:40]
            if kind not in known:
                yield f"its {name} has a step {kind}, which is not known"
            yield from _pattern_problems(name, rule)
            if name == "normalizer":
                growth *= _growth(rule)
    if growth > MAX_GROWTH:
        yield f"its normalizer makes a text up to {growth:.0f} times as long"
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.normalizer is not None:
        every = "".join(map(chr, (*range(0x20, 0xD800), *range(0xE000, 0x20000))))
        for probe in (*_PROBES, every):
            if len(tokenizer.normalizer.normalize_str(probe)) > MAX_GROWTH * len(probe):
                yield "its normalizer makes a text too long"
    yield from _problems_encoding(tokenizer)


def _problems_encoding(tokenizer: Tokenizer) -> Iterator[str]:
    for probe in _PROBES:
        tokenizer.encode(probe, add_special_tokens=False)
    if len(tokenizer.encode("a").ids) > len(tokenizer.encode("a", add_special_tokens=False).ids) + MOST_ADDED:
        yield f"its post_processor puts more than {MOST_ADDED} tokens around a text"


def _rules(step: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a component, those in sequences one by one."""
    if isinstance(step, dict):
        inner = [one for key in ("normalizers", "pretokenizers", "decoders") for one in step.get(key, ())]
        yield step
        for one in inner:
            yield from _rules(one)


def _growth(rule: Mapping[str, Any]) -> float:
    """Return how many times as long one normalising step may make a text, at most."""
    kind = rule.get("type")
    if kind == "Replace":
        pattern = rule.get("pattern", {})
        least = len(pattern.get("String", "")) or 1  # a regular expression may match one character, or none
        return max(1.0, (len(rule.get("content", "")) + ("Regex" in pattern)) / least)
    return 2.0 if kind in ("BertNormalizer", "ByteLevel") else 1.0


def _pattern_problems(name: str, rule: Mapping[str, Any]) -> Iterator[str]:
    for key in ("content", "prepend", "replacement"):
        if len(str(rule.get(key, ""))) > MAX_ADDED_CHARS:
            yield f"its {name} puts {len(rule[key])} characters in at a time"
    pattern = rule.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if regex is None:
        return
    if len(regex) > MAX_PATTERN_CHARS:
        yield f"its {name} has a regular expression of {len(regex)} characters"
    elif why := backtracks(regex):
        yield f"the regular expression {regex[:80]!r} of its {name} {why}"


# --- regular expressions ---------------------------------------------------------------------------------------------


def backtracks(regex: str) -> str:
    """Return why a regular expression may take very long on some text, "" where it does not.

    It may where something that repeats without bound is within something else that does, or is a choice, where many
    such follow each other, and where it refers to what it has matched. Those of known tokenizers do none of these.
    Possessive repeats never backtrack.
    """
    from re import _parser as parser  # type: ignore[attr-defined]

    plain = re.sub(r"\(\?i:", "(?:", re.sub(r"\\[pP](\{\^?[A-Za-z_]+\}|[A-Z])", r"\\w", _without_classes(regex)))
    if _STRANGE_GROUP.search(plain):
        return "has a group of a kind that is not known"
    if _repeats_a_choice(plain):
        return "repeats a choice without bound"
    try:
        return _nested(parser.parse(plain), within=False)
    except (re.error, RecursionError, OverflowError):
        return "cannot be understood"


def _without_classes(regex: str) -> str:
    """The same with each class of characters, those within classes included, as one that Python has."""
    plain, depth, skip = [], 0, False
    for at, character in enumerate(regex):
        if skip:
            skip = False
        elif character == "\\":
            skip = True
            if not depth:
                plain.append(regex[at : at + 2])
        elif character == "[":
            depth += 1
        elif character == "]" and depth:
            depth -= 1
            if not depth:
                plain.append(r"\w")
        elif not depth:
            plain.append(character)
    return "".join(plain)


def _repeats_a_choice(regex: str) -> bool:
    """Return whether a group with alternatives is followed by a repeat without bound; a parser may simplify it away."""
    groups, skip = [False], False
    for at, character in enumerate(regex):
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character == "(":
            groups.append(False)
        elif character == "|":
            groups[-1] = True
        elif (
            character == ")"
            and len(groups) > 1
            and groups.pop()
            and re.match(r"([*+]|\{\d+,\})(?!\+)", regex[at + 1 :])
        ):
            return True
    return False


def _nested(parsed: Any, *, within: bool) -> str:
    repeats = 0
    for kind, argument in parsed:
        name = str(kind)
        if name in ("GROUPREF", "GROUPREF_EXISTS"):
            return "refers to what it has matched"
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, inner = argument
            unbounded = int(most) > MAX_COUNTED
            repeats += unbounded
            if unbounded and within:
                return "repeats what repeats without bound"
            if repeats > MAX_REPEATS:
                return f"repeats without bound more than {MAX_REPEATS} times in a row"
            why = _nested(inner, within=within or unbounded)
        elif name == "POSSESSIVE_REPEAT":
            why = _nested(argument[2], within=False)
        else:
            why = next(filter(None, (_nested(inner, within=within) for inner in _inner(argument))), "")
        if why:
            return why
    return ""


def _inner(argument: Any) -> Iterator[Any]:
    """The sub-patterns of a parsed node, whatever it is."""
    if hasattr(argument, "data"):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for one in argument:
            yield from _inner(one)


if __name__ == "__main__":
    main()
