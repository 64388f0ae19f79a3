# Copyright The dflash.fleet authors
# SPDX-License-Identifier: Apache-2.0
"""Validation on hosts that have nothing but Python: the few JSON Schema keywords that ``schemas.py`` uses."""

from __future__ import annotations

import re
from typing import Any, Dict, List

from ansible_collections.dflash.fleet.plugins.module_utils.errors import DflashError
from ansible_collections.dflash.fleet.plugins.module_utils.schemas import SCHEMAS

KEYWORDS = {
    "$schema",
    "title",
    "type",
    "required",
    "properties",
    "additionalProperties",
    "items",
    "enum",
    "pattern",
    "oneOf",
}
_TYPES: Dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _among(value: Any, allowed: List[Any]) -> bool:
    """Membership as JSON has it: true is not 1."""
    return any(item == value and isinstance(item, bool) == isinstance(value, bool) for item in allowed)


def errors(value: Any, schema: Dict[str, Any], path: str = "$") -> List[str]:
    """Every place where ``value`` departs from ``schema``; empty when it does not.

    Raises ``KeyError`` for a keyword outside ``KEYWORDS``, so that no rule is silently ignored.
    """
    for keyword in schema:
        if keyword not in KEYWORDS:
            raise KeyError("schema keyword %s is not supported" % keyword)
    found: List[str] = []
    if "oneOf" in schema:
        tries = [errors(value, option, path) for option in schema["oneOf"]]
        if sum(1 for found_in in tries if not found_in) != 1:
            nearest = sorted(tries, key=len)[0]
            found.extend(nearest or ["%s matches more than one form" % path])
    if "enum" in schema and not _among(value, schema["enum"]):
        found.append("%s is %r, not one of %s" % (path, value, ", ".join(map(str, schema["enum"]))))
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is(value, name) for name in names):
            return found + ["%s is %s, not %s" % (path, type(value).__name__, " or ".join(names))]
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        found.append("%s is %r, which does not match %s" % (path, value, schema["pattern"]))
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                found.append("%s lacks %s" % (path, name))
        properties = schema.get("properties", {})
        for name, item in value.items():
            if name in properties:
                found.extend(errors(item, properties[name], "%s.%s" % (path, name)))
            elif isinstance(schema.get("additionalProperties"), dict):
                found.extend(errors(item, schema["additionalProperties"], "%s.%s" % (path, name)))
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found.extend(errors(item, schema["items"], "%s[%d]" % (path, index)))
    return found


def require(value: Any, name: str, where: str) -> Any:
    """``value`` itself when it follows the schema ``name``; raises ``DflashError`` naming the first departures."""
    found = errors(value, SCHEMAS[name])
    if found:
        raise DflashError("not a valid %s: %s" % (name, "; ".join(found[:3])), where)
    return value
