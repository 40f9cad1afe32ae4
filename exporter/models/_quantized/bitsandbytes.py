"""Layers of bitsandbytes in a user's own model: they multiply by what the checkpoint has.

Such a layer keeps its class and its place, so that what is made of it, a subclass with an adapter
of its own or PEFT's layer around it, goes on calling it. Code that does without bitsandbytes has
torch's linear layers there.
"""

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing
from fuseport.exporter.models._quantized import four_bits
from fuseport.exporter.models._quantized.four_bits import Stored
from fuseport.exporter.models.weights import unwrap

__all__ = ["place"]

_PACKAGE = "bitsandbytes"
_QUANTIZED = ("Params4bit", "Int8Params")


def place(code: str, module: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Have the layers of a module that are stored in four bits be such, their values not set yet.

    Args:
        code: what made the module, which messages begin with.
        module: changed in place.
        stored: by the checkpoint's names, which may have a prefix; see `four_bits.stored`.

    Returns:
        The same by the module's own names, of those layers that it has.

    Raises:
        Missing: it has layers of bitsandbytes that the checkpoint has no weight in four bits for,
            or of other kinds than linear ones; or what is stored so is no linear layer.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    found = _own(stored, parts)
    for name, how in found.items():
        if not isinstance(parts[name], nn.Linear):
            raise Missing(
                f"--model {code}: {show(name)} is a {type(parts[name]).__name__}, and stored in"
                " four bits: only bitsandbytes' Linear4bit and torch's own linear layers can be"
            )
        _convert(parts[name], how)
    for name, part in parts.items():
        for leaf, parameter in part.named_parameters(recurse=False):
            if any(_theirs(parameter, kind) for kind in _QUANTIZED):
                _refuse(code, name, leaf, part)
    return found


def _own(stored: Mapping[str, Stored], parts: Collection[str]) -> dict[str, Stored]:
    """What is stored, by the names of a module's parts: with the prefix that most of them are
    under, or with one that the checkpoint lacks."""
    clean = {unwrap([name])[name]: how for name, how in stored.items()}
    votes: Counter[str] = Counter()
    for name in clean:
        segments = name.split(".")
        for cut in range(len(segments)):
            if ".".join(segments[cut:]) in parts:
                votes[".".join([*segments[:cut], ""]) if cut else ""] += 1
    if votes:
        prefix = votes.most_common(1)[0][0]
        own = {n.removeprefix(prefix): h for n, h in clean.items() if n.startswith(prefix)}
        return {name: how for name, how in own.items() if name in parts}
    ends = {part: name for part in parts for name in clean if part.endswith(f".{name}")}
    return {part: clean[name] for part, name in ends.items()}


def _theirs(thing: Any, kind: str) -> type | None:
    """The class of bitsandbytes of that name that a thing is of; None if it is of none."""
    for parent in type(thing).__mro__:
        if parent.__name__ == kind and parent.__module__.partition(".")[0] == _PACKAGE:
            return parent
    return None


def _convert(layer: Any, how: Stored) -> None:
    if isinstance(layer, four_bits.InFourBits):
        return  # it has another name, too
    linear4bit = _theirs(layer, "Linear4bit")
    if linear4bit is not None:
        layer.quant_state = None
    own: type = type(layer)
    del layer.weight
    layer.__class__ = _class(own, linear4bit or nn.Linear)
    layer.store(how)


class _InFourBits(four_bits.InFourBits):
    """Before bitsandbytes' own class, in the order of those that methods are looked up in."""

    # Those of bitsandbytes look for what is not here.
    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


@functools.cache
def _class(own: type, linear: type) -> type:
    """`own`, whose base `linear` computes as `InFourBits` does, for `super().forward` too."""
    form = _form(linear)
    return form if own is linear else type(own.__name__, (own, form), _named(own))


@functools.cache
def _form(linear: type) -> type:
    return type(linear.__name__, (_InFourBits, linear), _named(linear))


def _named(like: type) -> dict[str, Any]:
    return {"__module__": like.__module__, "__qualname__": like.__qualname__}


def _refuse(code: str, name: str, leaf: str, part: nn.Module) -> None:
    said = f"--model {code}: {show(f'{name}.{leaf}'.lstrip('.'))}"
    kind = type(part).__name__
    if not _theirs(part, "Linear4bit"):
        raise Missing(
            f"{said} is what bitsandbytes quantizes, of the class {kind}: only its Linear4bit"
            " has a form here; have the model use that, or plain layers"
        )
    raise Missing(
        f"{said} is of a layer in four bits of bitsandbytes ({kind}), and the checkpoint has no"
        " weight in four bits for it: bitsandbytes quantizes a layer when it is moved to a device;"
        " do that, model.to('cpu'), and then save its whole state dict"
    )
