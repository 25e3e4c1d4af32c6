"""Checks of single values that come from a person or from an untrusted file; each failure is a UserError with one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from edgekv.errors import UserError


def is_number(value: object) -> bool:
    """A finite int or float that fits float32, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 3e38


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_count(name: str, value: object, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 27:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def known_fields(cls: type, obj: object, what: str) -> dict:
    """The fields of dataclass `cls` found in `obj`; refuses unknown names and missing ones that have no default."""
    if not isinstance(obj, Mapping):
        raise UserError(f"The {what} must be an object with named fields.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = [str(name) for name in obj if name not in fields]
    if unknown:
        raise UserError(f"The {what} has unknown fields: {', '.join(sorted(unknown))}.")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in obj]
    if missing:
        raise UserError(f"The {what} lacks {', '.join(missing)}.")
    return dict(obj)
