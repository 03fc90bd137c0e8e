"""What msgspec says of a value that does not fit its schema, in our words."""

from __future__ import annotations

import difflib
import re
from typing import get_args

import msgspec

from shoal.gateway.errors import ApiError, invalid
from shoal.gateway.schema import Role

_AT = re.compile(r" - at (?P<key>`key` in )?`\$(?:\.(?P<path>[^`]*))?[^`]*`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def explain(violation: msgspec.ValidationError, schema: type) -> ApiError:
    """An error that names the field, in its message and in `param`."""
    problem = str(violation)
    at = _AT.search(problem)
    path = (at.group("path") or "") if at else ""
    what = problem[: at.start()] if at else problem
    prefix = f"{path}." if path else ""
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown.group("name")
        known = [] if path else [field.encode_name for field in msgspec.structs.fields(schema)]
        nearest = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
        return invalid(f"unknown field '{prefix}{name[:200]}'{hint}", f"{prefix}{name[:200]}")
    if missing := _MISSING.fullmatch(what):
        name = prefix + missing.group("name")
        return invalid(f"'{name}' is required", name)
    if what.startswith("Invalid enum value"):  # the schema has no other enumeration
        what += f"; allowed: {', '.join(get_args(Role))}"
    place = f"{path}: a key" if at and at.group("key") else path or "the body"
    return invalid(f"{place}: {what}", path or None)
