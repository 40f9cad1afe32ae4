"""The commands, one file each: `COMMANDS`.

Every module here has one click command of its own name; a module with a leading underscore is a
part of commands. They parse, call and print. Heavy imports wait until a command needs them, so that
`--help` is instant.
"""

import importlib
import pkgutil

import click

__all__ = ["COMMANDS"]

_names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
COMMANDS: tuple[click.Command, ...] = tuple(
    getattr(importlib.import_module(f"{__name__}.{name}"), name) for name in _names
)
