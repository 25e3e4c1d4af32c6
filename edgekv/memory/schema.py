"""The part of JSON Schema that device_profiles/profile.schema.json uses, with errors that name the field.

Supported: type, const, enum, pattern, minimum, exclusiveMinimum, minItems, required, properties, additionalProperties (false),
items, $ref to #/$defs. An unsupported keyword is a defect of the schema and raises ValueError, so nothing goes unchecked; the
tests compare this with the full `jsonschema` package on mutated profiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v),
    "integer": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()),
    "null": lambda v: v is None,
}
ANNOTATIONS = {"$schema", "$id", "$defs", "title", "description"}


def first_error(value: Any, schema: Mapping, root: Mapping | None = None, path: str = "") -> str | None:
    """None when `value` fits, else a phrase that starts with the dotted path of the first field that does not."""
    root = schema if root is None else root
    if "$ref" in schema:
        return first_error(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    for keyword, rule in schema.items():
        if keyword in ANNOTATIONS or keyword == "additionalProperties":
            continue
        if keyword not in RULES:
            raise ValueError(f"keyword {keyword} is not supported")
        error = RULES[keyword](value, rule, schema, root, path)
        if error:
            return error
    return None


def _type(value, rule, schema, root, path):
    names = [rule] if isinstance(rule, str) else rule
    if not any(TYPES[name](value) for name in names):
        return f"{path or 'the file'} must be {' or '.join(names)}, not {_short(value)}"
    return None


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _const(value, rule, schema, root, path):
    return None if _equal(value, rule) else f"{path} must be {rule!r}, not {_short(value)}"


def _enum(value, rule, schema, root, path):
    if any(_equal(value, choice) for choice in rule):
        return None
    return f"{path} must be one of {', '.join(map(str, rule))}, not {_short(value)}"


def _pattern(value, rule, schema, root, path):
    if isinstance(value, str) and not re.search(rule, value):
        return f"{path} must match {rule}, not {_short(value)}"
    return None


def _minimum(value, rule, schema, root, path):
    if TYPES["number"](value) and value < rule:
        return f"{path} must be at least {rule}, not {_short(value)}"
    return None


def _above(value, rule, schema, root, path):
    if TYPES["number"](value) and value <= rule:
        return f"{path} must be more than {rule}, not {_short(value)}"
    return None


def _min_items(value, rule, schema, root, path):
    if isinstance(value, list) and len(value) < rule:
        return f"{path} needs at least {rule} entry"
    return None


def _required(value, rule, schema, root, path):
    missing = [name for name in rule if isinstance(value, dict) and name not in value]
    return f"the field {_join(path, missing[0])} is missing" if missing else None


def _properties(value, rule, schema, root, path):
    if not isinstance(value, dict):
        return None
    if schema.get("additionalProperties") is False:
        unknown = [name for name in value if name not in rule]
        if unknown:
            return f"{_join(path, _short(unknown[0], quote=False))} is not a field of a device profile"
    for name, inner in rule.items():
        if name in value:
            error = first_error(value[name], inner, root, _join(path, name))
            if error:
                return error
    return None


def _items(value, rule, schema, root, path):
    for index, item in enumerate(value if isinstance(value, list) else []):
        error = first_error(item, rule, root, f"{path}[{index}]")
        if error:
            return error
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: Any, quote: bool = True) -> str:
    if isinstance(value, (dict, list)):  # never printed: YAML aliases can make a small file a huge structure
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if quote else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


RULES = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "pattern": _pattern,
    "minimum": _minimum,
    "exclusiveMinimum": _above,
    "minItems": _min_items,
    "required": _required,
    "properties": _properties,
    "items": _items,
}
