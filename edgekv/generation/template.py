"""Renders the chat templates that models bring along: Jinja2 programs by strangers, run in a sandbox with limits.

The names a template may use are those that Hugging Face templates expect: messages, add_generation_prompt, bos_token,
eos_token, raise_exception(sentence), strftime_now(format), the filter tojson, loop controls and the `generation` block.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

from edgekv.bundle import Bundle
from edgekv.errors import BundleError, UserError

TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE = 1 << 20  # characters
MAX_RENDERED = 1 << 28
_MAX_OPERAND = 1 << 20  # of a repetition or power, in characters, items or bits
_SECONDS = 10.0  # per rendering
_FILENAME = "<template>"
# padding to a width the template chooses is the one way left to ask for unbounded memory in one call
_UNBOUNDED_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"}
_UNBOUNDED_FILTERS = ("center", "indent", "format", "wordwrap", "filesizeformat", "xmlattr", "pprint")


class _Refused(Exception):
    """The template asked for something that is not given."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        def size(value: Any) -> int:
            return abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 0

        if operator == "%" and isinstance(left, str):
            raise _Refused("string formatting with % is not available")
        if operator == "**" and (size(left) > 1 << 16 or size(right) > 64):
            raise _Refused("a power is too large")
        if operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            numbers = isinstance(left, int) and isinstance(right, int)
            if (max(size(left), size(right)) if numbers else size(left) * size(right)) > (1 << 62 if numbers else _MAX_OPERAND):
                raise _Refused("a repetition is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED_METHODS and super().is_safe_attribute(obj, attr, value)


    def wrap_str_format(self, value: Any) -> Any:
        return None if super().wrap_str_format(value) is None else _refuse_format


def _refuse_format(*args: Any, **kwargs: Any) -> None:
    raise _Refused("string formatting with format is not available")


def _raise_exception(sentence: object) -> None:
    raise _Refused(str(sentence)[:1000])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes characters of HTML, which models were not trained on."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise _Refused("tojson takes an indent between 0 and 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    for name in _UNBOUNDED_FILTERS:
        environment.filters.pop(name, None)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(str(format)[:100])
    environment.globals.pop("lipsum", None)
    return environment


class ChatTemplate:
    """A compiled template. `names` are further variables, usually bos_token and eos_token."""

    def __init__(self, source: str, **names: str):
        self._names = names
        if len(source) > MAX_TEMPLATE:
            raise UserError("The chat template of this bundle is too long to be one; export the bundle again.")
        try:
            environment = _environment()
            code = environment.compile(source, filename=_FILENAME)
            self._template = jinja2.Template.from_code(environment, code, environment.globals)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            raise UserError(f"The chat template of this bundle is not valid: {error}.") from None

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model wants to read it; messages have `role` and `content`.

        Raises UserError when the template refuses the conversation, fails, or wants more than the sandbox gives.
        """
        try:
            return self._limited(
                lambda: self._template.generate(
                    messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._names
                )
            )
        except _Refused as error:
            raise UserError(f"The chat template refuses this conversation: {error}.") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"The chat template failed: {error}.") from None
        except (RecursionError, MemoryError):
            raise UserError("The chat template wants more memory than it is given.") from None

    @staticmethod
    def _limited(pieces: Callable[[], Any]) -> str:
        """Joins the pieces under limits of time and size; a trace function sees every line, so no loop escapes the clock."""
        deadline = time.monotonic() + _SECONDS

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != _FILENAME:
                return None
            if time.monotonic() > deadline:
                raise _Refused(f"it runs for more than {_SECONDS:.0f} seconds")
            return trace

        before, rendered, size = sys.gettrace(), [], 0
        sys.settrace(trace)
        try:
            for piece in pieces():
                size += len(piece)
                if size > MAX_RENDERED:
                    raise _Refused("its text is too long")
                rendered.append(piece)
        finally:
            sys.settrace(before)
        return "".join(rendered)


def template_of(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The bundle's chat template with its special tokens, None when the model came without one; raises BundleError."""
    path = bundle.file(TEMPLATE)
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise BundleError(f"{path} cannot be read as UTF-8 text; export the bundle again.") from None

    def token(number: int | None) -> str:
        return (tokenizer.id_to_token(number) or "") if number is not None else ""

    ends = bundle.model["eos_token_ids"]
    return ChatTemplate(source, bos_token=token(bundle.model.get("bos_token_id")), eos_token=token(ends[0] if ends else None))
