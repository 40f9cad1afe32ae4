"""Weights under a file's names → a module's parameters, strictly.

The names may carry prefixes: the attribute that a Lightning module keeps its network under, the
`module.` of data parallelism, the `_orig_mod.` of torch.compile. Which one is found by comparing
with the module's own names; nothing else is guessed. The module may have one that the file lacks,
as a wrapper of one's own has around what was saved: it is put before all names then. Data
parallelism around a part of the model puts `module.` into the middle of names: that goes where no
name of the module itself has it.
"""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import Missing

__all__ = ["FitReport", "fit", "once", "some", "unwrap"]

# Segments that wrappers insert anywhere in a name; no module of a model is called so.
_WRAPPERS = frozenset(["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
# After another segment: a leading `module.` is a prefix like others.
_PARALLEL = re.compile(r"(\.)module\.")
# What torch calls that which a module keeps in a state dict beside parameters and buffers.
_EXTRA = "_extra_state"
_LISTED = 6
_COUNTING = "int", "uint", "bool"  # dtypes of counters and masks, beside weights of any other


@dataclass(frozen=True)
class FitReport:
    """How the weights of a file met the parameters of a module.

    Attributes:
        prefix: what was stripped from the file's names, with its last dot; "" if nothing.
        restored: tied parameters that the file has under another of their names only.
        left_out: names in the file beside the model's prefix (losses, metrics); not loaded.
        dtypes: how many of the loaded tensors are of each dtype, `float32` for example.
        added: what was put before the file's names, with its last dot; "" if nothing.
    """

    prefix: str
    restored: tuple[str, ...]
    left_out: tuple[str, ...]
    dtypes: dict[str, int]
    added: str = ""

    def notes(self) -> tuple[str, ...]:
        """What of this a user should know, a sentence each; nothing where all is plain."""
        notes = []
        if self.prefix:
            notes.append(f"the prefix {show(self.prefix)} was stripped from the weights' names")
        if self.added:
            notes.append(f"{show(self.added)} was put before the weights' names")
        if self.restored:
            notes.append(f"restored from the parameter it is tied to: {some(self.restored)}")
        if self.left_out:
            notes.append(f"not part of the model, left out: {some(self.left_out)}")
        floating = {d: n for d, n in self.dtypes.items() if not d.startswith(_COUNTING)}
        if len(floating) > 1:
            mixed = ", ".join(f"{count} {dtype}" for dtype, count in floating.items())
            notes.append(f"weights of several dtypes: {mixed}")
        return tuple(notes)


def unwrap(names: Iterable[str]) -> dict[str, str]:
    """Each name → the name without what wrappers insert (`_orig_mod.` and its like)."""
    return {
        name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names
    }


def fit(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    own_code: str | None = None,
    said_by: str | None = None,
) -> FitReport:
    """Load `tensors` into `module`, every parameter and persistent buffer of it and nothing else.

    Each parameter becomes a copy of the file's tensor in its own writable memory, in the file's
    dtype; `requires_grad` stays as it was. The module may be on the meta device. Tied parameters
    stay tied. What else the file has for a module that takes it (`_extra_state`), it is given.

    Args:
        module: of the architecture that the checkpoint was recognised as.
        tensors: by the file's names; not modified, and not referred to afterwards.
        source: the file, for the error.
        own_code: of a module of the user's own code, what it got, for the error.
        said_by: what names the module's class, `config.json` for example, for the error.

    Raises:
        Missing: a name is missing or unexpected, a shape or a kind of dtype differs, tied ones
            differ in the file, or two prefixes fit equally. One error lists all of it.
    """
    _settle(module, tensors)
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not _is_extra(name)
    }
    prefix, given, left_out = _strip(tensors, own, source)
    weights = [name for name in given if not _is_extra(name)]
    added = "" if given.keys() & own.keys() else _lacking(weights, own)
    given = {added + name: tensor for name, tensor in given.items()}
    extra = {name: given.pop(name).clone() for name in _extras(module) if name in given}
    # Files of before torch 0.4.1, and others' conversions, lack these counts, as torch allows.
    counts = [name for name in own if name.endswith("num_batches_tracked") and name not in given]
    given |= {name: torch.zeros((), dtype=own[name].dtype) for name in counts}
    groups = _tied_groups(own)
    problems = {
        "missing": [group[0] for group in groups if not any(name in given for name in group)],
        "unexpected": [name for name in given if name not in own],
        "mis-shaped": [
            f"{name} is {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            for name, tensor in given.items()
            if name in own and tensor.shape != own[name].shape
        ],
        "of another kind": [
            f"{name} is {_dtype(tensor)}, expected {_dtype(own[name])}"
            for name, tensor in given.items()
            if name in own and not _same_kind(tensor, own[name])
        ],
        "tied in the model but not in the file": [
            " and ".join(group)
            for group in groups
            if _differ([given[name] for name in group if name in given])
        ],
    }
    if any(problems.values()):
        said = "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names)
        if said_by is not None and not given.keys() & own.keys():
            said = f"no name of theirs is one of its, so that {said_by} is of another model; {said}"
        otherwise = "the model's own code: --model FILE:NAME"
        if own_code is not None:
            otherwise = "a callable that makes the model that they are of: --model FILE:NAME"
            otherwise += f" ({own_code})"
        raise Missing(
            f"{show(source)}: the weights do not fit {type(module).__name__}: {said};"
            f" give a checkpoint of this architecture, or {otherwise}"
        )
    state: dict[str, Tensor] = {}
    for group in groups:
        tensor = next(given[name] for name in group if name in given)
        # A copy: the file's tensor may lie in a memory map, which others can cut short under us.
        own_copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        state |= dict.fromkeys(group, own_copy)
    try:
        _loader(module)(state | extra, strict=True, assign=True)
    except RuntimeError as error:
        raise Missing(
            f"{show(source)}: {show(error)}; give a checkpoint of this architecture"
        ) from error
    for group in groups:
        if places := _places(module, group):
            _keep(places, own[group[0]])
    restored = tuple(name for group in groups for name in group if name not in given)
    dtypes = Counter(_dtype(state[group[0]]) for group in groups)
    return FitReport(prefix, restored, tuple(left_out), dict(dtypes.most_common()), added)


def _loader(module: nn.Module) -> Callable[..., Any]:
    """How a module loads what fits it: by torch's own where its own is of before `assign`."""
    own = module.load_state_dict
    given = inspect.signature(own).parameters.values()
    if any(p.name == "assign" or p.kind is p.VAR_KEYWORD for p in given):
        return own
    return functools.partial(nn.Module.load_state_dict, module)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _extras(module: nn.Module) -> list[str]:
    """The names of what parts of a module take beside parameters and buffers, of any shape."""
    return [
        f"{path}.{_EXTRA}" if path else _EXTRA
        for path, part in module.named_modules()
        if type(part).set_extra_state is not nn.Module.set_extra_state
    ]


def _lacking(given: Iterable[str], own: Collection[str]) -> str:
    """The prefix with which all names given are the module's; "" if there is none."""
    names = list(given)
    first = next(iter(own), "")
    starts = (first[: i + 1] for i, character in enumerate(first) if character == ".")
    return next((start for start in starts if all(start + name in own for name in names)), "")


def _settle(module: nn.Module, names: Iterable[str]) -> None:
    """Tell layers that have a parameter in some versions of their package which names there are."""
    given: dict[str, set[str]] = {}
    for name in unwrap(names).values():
        layer, _, last = name.rpartition(".")
        given.setdefault(layer, set()).add(last)
    for path, layer in module.named_modules():
        settle = getattr(layer, "fuseport_settle", None)
        if settle is not None:
            settle(
                set().union(*(own for at, own in given.items() if f".{at}".endswith(f".{path}")))
            )


def _strip(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str
) -> tuple[str, dict[str, Tensor], list[str]]:
    """The prefix under which most of the module's names are, the tensors under it, other names."""
    clean = unwrap(tensors)
    if not any("module" in name.split(".") for name in own):
        clean = {original: _PARALLEL.sub(r"\1", name) for original, name in clean.items()}
    if len(set(clean.values())) != len(clean):
        raise Missing(
            f"{show(source)}: the same weights occur with and without a wrapper's prefix"
            f" (module, {', '.join(sorted(_WRAPPERS))}); save one state dict alone"
        )
    votes: Counter[str] = Counter()
    for name in clean.values():
        parts = name.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in own:
                votes[".".join([*parts[:cut], ""]) if cut else ""] += 1
    ranked = votes.most_common()
    best = [prefix for prefix, count in ranked if count == ranked[0][1]]
    if len(best) > 1:
        raise Missing(
            f"{show(source)}: the model is in it more than once, under {some(sorted(best))};"
            f" choose one by --weights, for example --weights {show(min(filter(None, best))[:-1])}"
        )
    prefix = best[0] if best else ""
    given = {
        name.removeprefix(prefix): tensors[original]
        for original, name in clean.items()
        if name.startswith(prefix)
    }
    return prefix, given, [name for name in clean.values() if not name.startswith(prefix)]


def _tied_groups(own: Mapping[str, Tensor]) -> list[list[str]]:
    """The module's names, those of one and the same tensor together, in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _places(module: nn.Module, group: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """The modules that have the parameter or buffer of these names. None has what a module's own
    code makes for its state dict, as the parts of a quantized weight, and loads by itself."""
    owners = dict(module.named_modules(remove_duplicate=False))
    found = ((owners.get(owner), leaf) for owner, leaf in map(_parted, group))
    return [
        (owner, leaf)
        for owner, leaf in found
        if owner is not None and (leaf in owner._parameters or leaf in owner._buffers)
    ]


def _keep(places: Sequence[tuple[nn.Module, str]], tensor: Tensor) -> None:
    """Give all places of a group one tensor again, with new values: assigning gave each its own.

    It is the module's, which its code may have in a list, too, or a view of; or the new one, in a
    module that was on the meta device. What is not contiguous, as an expanded buffer, or changes
    its dtype gets the new one's memory.
    """
    new = getattr(*places[0])
    if tensor.device == new.device:
        if tensor.dtype == new.dtype and tensor.is_contiguous():
            tensor.data.copy_(new.data)
        else:
            tensor.data = new.data
        new = tensor
    for owner, leaf in places:
        if getattr(owner, leaf) is not new:
            setattr(owner, leaf, new)


def _parted(name: str) -> tuple[str, str]:
    owner, _, leaf = name.rpartition(".")
    return owner, leaf


def _differ(tensors: list[Tensor]) -> bool:
    return any(
        not (a.data_ptr() == b.data_ptr() and a.shape == b.shape) and not torch.equal(a, b)
        for a, b in pairwise(tensors)
    )


def _same_kind(given: Tensor, own: Tensor) -> bool:
    """Both floating (of a width that kernels compute in), or both not."""
    if own.is_floating_point():
        return given.is_floating_point() and given.dtype.itemsize > 1
    return given.is_floating_point() == own.is_floating_point()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def some(names: Iterable[str]) -> str:
    """The first of some tensors' names, for a sentence, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(show(name, 120) for name in listed[:_LISTED]) + more


def once(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module's state dict holds, tied ones once, contiguous."""
    kept: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # a model may put more into it
            kept.setdefault(id(tensor), name)
    state = module.state_dict()
    return {name: state[name].contiguous() for name in kept.values()}
