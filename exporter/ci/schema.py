"""Tables of a TOML file → frozen dataclasses; what does not fit is one line that says where."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fuseport.exporter.errors import UsageError

__all__ = ["Source", "filled"]

T = TypeVar("T")

_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}


@dataclass(frozen=True)
class Source:
    """The file that tables come from, for messages.

    Attributes:
        file: its path.
        text: its content.
    """

    file: Path
    text: str

    def wrong(self, where: Sequence[str], reason: str) -> UsageError:
        """The error of a key, by the keys that lead to it; with its line, where one can tell."""
        line = self._line(where[-1]) if where else None
        place = f"{self.file}:{line}" if line else str(self.file)
        path = ".".join(where)
        return UsageError(f"{place}: {path}: {reason}" if path else f"{place}: {reason}")

    def _line(self, key: str) -> int | None:
        """The line of a key or table that occurs once in the file."""
        name = re.escape(re.sub(r"\[\d+\]$", "", key))
        quoted = rf"(?:{name}|\"{name}\"|'{name}')"
        found = re.compile(rf"^\s*(?:\[+(?:.*\.)?{quoted}\]|(?:.*[.{{,]\s*)?{quoted}\s*=)")
        lines = [i for i, line in enumerate(self.text.splitlines(), 1) if found.match(line)]
        return lines[0] if len(lines) == 1 else None


def filled(kind: type[T], table: Mapping[str, Any], source: Source, where: Sequence[str]) -> T:
    """A dataclass with what a table says; keys are its fields, with `-` for `_`.

    Fields are strings, numbers, booleans, tuples of what a field may be, mappings from strings to
    it, and other dataclasses, or None, which is what an absent key gives; a tuple may be written
    as a single value.

    Args:
        kind: the dataclass.
        table: of the file.
        source: of the table.
        where: the keys that lead to the table.

    Raises:
        UsageError: a key is unknown or missing, or a value is of another type.
    """
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(fields)
            raise source.wrong([*where, key], f"there is no such key; {meant}there are: {known}")
    hints = typing.get_type_hints(kind)
    for key, field in fields.items():
        absent = field.default is field.default_factory is dataclasses.MISSING
        if absent and key not in table:
            raise source.wrong(where, f"the key {key} is missing")
    found = {
        fields[key].name: _value(hints[fields[key].name], value, source, [*where, key])
        for key, value in table.items()
    }
    return kind(**found)


def _value(hint: Any, value: Any, source: Source, where: Sequence[str]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        [hint] = [a for a in arguments if a is not type(None)]
        return _value(hint, value, source, where)
    if origin is tuple:
        if not isinstance(value, list):
            if dataclasses.is_dataclass(arguments[0]):
                raise source.wrong(where, f"write [[{where[-1]}]], once for each")
            value = [value]
        *rest, last = where
        return tuple(
            _value(arguments[0], item, source, [*rest, f"{last}[{i}]"])
            for i, item in enumerate(value)
        )
    if origin is not None and issubclass(origin, Mapping):
        table = _table(value, source, where)
        return {k: _value(arguments[1], v, source, [*where, k]) for k, v in table.items()}
    if dataclasses.is_dataclass(hint):
        return filled(typing.cast(type, hint), _table(value, source, where), source, where)
    fits = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and hint is not bool):
        raise source.wrong(where, f"{_shown(value)} is not {_NAMES[hint]}")
    return float(value) if hint is float else value


def _table(value: Any, source: Source, where: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise source.wrong(where, f"{_shown(value)} is not a table")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
