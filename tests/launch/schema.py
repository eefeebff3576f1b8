"""A check of objects against the schema of a CRD: types, required fields, values, and fields that it does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
SCHEMAS = Path(__file__).parent / "schemas"


def schema_errors(given: Any, kind: str) -> list[str]:
    return list(errors_in(given, yaml.safe_load((SCHEMAS / f"{kind.lower()}.yaml").read_text())))


def errors_in(given: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(given, int | str):
            yield f"{path}: {given!r} is neither a number nor a string"
        return
    if kind and (not isinstance(given, TYPES[kind]) or (kind in ("integer", "number") and isinstance(given, bool))):
        yield f"{path}: {given!r} is no {kind}"
        return
    if "enum" in schema and given not in schema["enum"]:
        yield f"{path}: {given!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(given)):
        yield f"{path}: {given!r} does not match"
    if isinstance(given, int) and not schema.get("minimum", given) <= given <= schema.get("maximum", given):
        yield f"{path}: {given} is out of range"
    if isinstance(given, str) and not schema.get("minLength", 0) <= len(given) <= schema.get("maxLength", len(given)):
        yield f"{path}: {given!r} is too short or too long"
    if isinstance(given, list) and not schema.get("minItems", 0) <= len(given) <= schema.get("maxItems", len(given)):
        yield f"{path}: {len(given)} items"
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from errors_in(item, schema.get("items", {}), f"{path}[{index}]")
    if isinstance(given, dict):
        yield from fields_in(given, schema, path)


def fields_in(given: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    yield from (f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in given)
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, value in given.items():
        if name not in known and others is None and path != ".metadata":
            yield f"{path}: {name} is unknown"
        else:
            yield from errors_in(value, known.get(name, others or {}), f"{path}.{name}")
