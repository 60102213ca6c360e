"""Chat templates: programs in Jinja that write a conversation as text.

They come with models and with invites, so that they are hostile: they run in jinja2's immutable sandbox, what they
write is bounded here, and the process that renders bounds time and memory (:mod:`peers.data.encoder`). What they see is
that which ``transformers`` shows them, without a clock: the same conversation is the same text every day.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.errors import ConfigError

LONGEST_TEMPLATE = 1 << 20
LONGEST_RENDERED = 1 << 20
_REASON_CHARS = 200
ANOTHER = "Give another: --template FILE, or with swarm join --data-template FILE."


class RenderingFailed(Exception):
    """A template does not write this conversation; the text says why, and shows nothing of it."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text, and the special tokens by the names that it calls them (``bos_token``, …)."""

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex sha256 of both: what a shard's manifest names it by."""
        canonical = json.dumps([self.text, dict(self.tokens)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


class ChatTemplate:
    """A template, compiled.

    Args:
        source: Its text.
        bounded: What is around compiling it, and around each rendering: the process's bounds of time.

    Raises:
        ConfigError: It is too long, or none.
    """

    def __init__(
        self,
        source: TemplateSource,
        bounded: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        import jinja2

        if len(source.text) > LONGEST_TEMPLATE:
            allowed = f"at most {LONGEST_TEMPLATE:,} characters"
            raise ConfigError("the chat template", source.digest[:16], allowed, ANOTHER)
        self.source, self._bounded = source, bounded
        environment = _environment()
        try:
            with bounded():
                self._template = environment.from_string(source.text)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            why = f"line {getattr(error, 'lineno', '?')}: {str(error).splitlines()[0][:_REASON_CHARS]}"
            raise ConfigError("the chat template", source.digest[:16], "one in Jinja", ANOTHER, why=why) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, ask: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Write a conversation.

        Args:
            messages: What was said so far.
            ask: Whether what introduces an answer comes behind it.
            variables: What else the template gets, such as ``tools``.

        Raises:
            RenderingFailed: The template refuses it.
            ConfigError: It writes more than :data:`LONGEST_RENDERED` characters.
        """
        import jinja2

        given: dict[str, Any] = {"tools": None, "documents": None, **self.source.tokens, **(variables or {})}
        try:
            with self._bounded():
                return self._write({**given, "messages": messages, "add_generation_prompt": ask})
        except jinja2.exceptions.SecurityError:
            allowed = "one that keeps to what templates may do"
            why = "it reaches for what the sandbox forbids"
            raise ConfigError("the chat template", self.source.digest[:16], allowed, ANOTHER, why=why) from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RenderingFailed(self._reason(error)) from None
        except RecursionError:
            raise RenderingFailed("the chat template recurses too deeply") from None

    def _write(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > LONGEST_RENDERED:
                allowed = f"one that writes at most {LONGEST_RENDERED:,} characters for a conversation"
                raise ConfigError("the chat template", self.source.digest[:16], allowed, ANOTHER)
            parts.append(part)
        return "".join(parts)

    def _reason(self, error: Exception) -> str:
        """Its own words where they are in the template, and only the kind of error else: they may hold the text."""
        words = str(error)
        if words and words in self.source.text:
            return f"the chat template refuses it: {words[:_REASON_CHARS]}"
        return f"the chat template fails on it with {type(error).__name__}"


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks answers for others; what is inside it is written."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Return the nodes inside."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object = "") -> None:
        raise jinja2.TemplateError(str(message))

    def as_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    return environment
