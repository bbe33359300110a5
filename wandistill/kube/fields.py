"""What a values file may hold, as a tree of fields: the check, the defaults, the JSON schema and the comments.

One tree (`wandistill.kube.values`) gives the chart's values.yaml, its values.schema.json and its README, and checks the
same file for `wandistill render` and `submit`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from wandistill.errors import ConfigError

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (Mapping,),
}
_CALLED = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a map",
}


@dataclass(frozen=True)
class Field:
    """One value."""

    kind: str  # a type of JSON schema
    doc: str
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    pattern: str = ""
    also: str = ""  # a second type that is taken too, such as integer for a quantity
    items: Field | None = None  # of a list
    fields: Mapping[str, Field] = field(default_factory=dict)  # of an object whose keys are known
    each: Field | None = None  # of an object whose keys are names; without it and `fields` anything goes


def text(doc: str, default: str = "", *, choices: tuple[str, ...] = (), pattern: str = "") -> Field:
    """A text."""
    return Field("string", doc, default, choices=choices, pattern=pattern)


def quantity(doc: str, default: str = "") -> Field:
    """An amount as Kubernetes writes it, such as 64Gi or 500m, or empty."""
    return Field("string", doc, default, pattern=r"^([0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?)?$", also="number")


def integer(doc: str, default: int | None, *, minimum: int | None = None) -> Field:
    """A whole number."""
    return Field("integer", doc, default, minimum=minimum)


def boolean(doc: str, default: bool) -> Field:
    """True or false."""
    return Field("boolean", doc, default)


def listing(doc: str, items: Field | None = None, default: tuple[Any, ...] = ()) -> Field:
    """A list."""
    return Field("array", doc, list(default), items=items)


def free(doc: str) -> Field:
    """A map that goes into the objects as it is."""
    return Field("object", doc, {})


def names(doc: str, each: Field, default: Mapping[str, Any] | None = None) -> Field:
    """A map from names to fields that are alike."""
    return Field("object", doc, dict(default or {}), each=each)


def record(doc: str, **fields: Field) -> Field:
    """A map with known keys."""
    return Field("object", doc, None, fields=fields)


def defaults(spec: Field) -> Any:
    """The default of a field, with those of all below it."""
    if spec.fields:
        return {name: defaults(sub) for name, sub in spec.fields.items()}
    return deepcopy(spec.default)


def merge(base: Any, over: Any) -> Any:
    """`over` on `base` as Helm lays values over defaults: maps key by key, null removes, all else replaces."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return deepcopy(over)
    merged = {key: value for key, value in base.items() if not (key in over and over[key] is None)}
    for key, value in over.items():
        if value is not None:
            merged[key] = merge(merged.get(key), value)
    return merged


def complete(spec: Field, values: Any) -> Any:
    """`values` with what they leave out filled in, the entries of maps by name too."""
    if spec.fields:
        given = values if isinstance(values, Mapping) else {}
        own = {name: complete(sub, given.get(name, defaults(sub))) for name, sub in spec.fields.items()}
        return own
    if spec.each is not None and isinstance(values, Mapping):
        return {name: complete(spec.each, value) for name, value in values.items()}
    return deepcopy(values)


def check(spec: Field, values: Any, path: str = "") -> None:
    """Refuses what the tree does not know.

    Raises:
        ConfigError: an unknown key, with the one that was probably meant; a wrong type; a value out of its range.
    """
    where = path or "the values"
    kinds = _TYPES[spec.kind] + (_TYPES[spec.also] if spec.also else ())
    is_bool = isinstance(values, bool)
    if not isinstance(values, kinds) or (is_bool and spec.kind != "boolean"):
        raise ConfigError(f"{where}: {_shown(values)} is not {_CALLED[spec.kind]}.")
    if spec.choices and values not in spec.choices:
        raise ConfigError(
            f"{where}: {_shown(values)} is not one of {', '.join(c or chr(34) * 2 for c in spec.choices)}."
        )
    if spec.pattern and not re.search(spec.pattern, str(values)):
        raise ConfigError(f"{where}: {_shown(values)} is not of the form {spec.pattern}.")
    if spec.minimum is not None and isinstance(values, int) and values < spec.minimum:
        raise ConfigError(f"{where}: {values} must be at least {spec.minimum}.")
    if isinstance(values, list) and spec.items is not None:
        for index, item in enumerate(values):
            check(spec.items, item, f"{path}[{index}]")
    if isinstance(values, Mapping):
        for key, value in values.items():
            name = f"{path}.{key}" if path else str(key)
            if spec.fields and key not in spec.fields:
                close = difflib.get_close_matches(str(key), spec.fields, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(spec.fields)}."
                raise ConfigError(f"{name}: is not a key; {hint}")
            below = spec.fields.get(key) if spec.fields else spec.each
            if below is not None and value is not None:
                check(below, value, name)


def json_schema(spec: Field) -> dict[str, Any]:
    """The field as JSON schema (draft 7)."""
    schema: dict[str, Any] = {"type": [spec.kind, spec.also] if spec.also else spec.kind}
    if spec.doc:
        schema["description"] = spec.doc
    if spec.choices:
        schema["enum"] = list(spec.choices)
    if spec.pattern:
        schema["pattern"] = spec.pattern
    if spec.minimum is not None:
        schema["minimum"] = spec.minimum
    if spec.items is not None:
        schema["items"] = json_schema(spec.items)
    if spec.fields:
        schema["additionalProperties"] = False
        schema["properties"] = {name: json_schema(sub) for name, sub in spec.fields.items()}
    elif spec.each is not None:
        each = json_schema(spec.each)
        schema["additionalProperties"] = each | {"type": [each["type"], "null"]}  # null takes an entry away
    return schema


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
