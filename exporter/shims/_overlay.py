"""An installed package with the ops in the place of what of it runs on GPUs only.

Its modules are executed as they are, and functions of theirs replaced by name: from one version to
the next they change files, not names. Code gets such modules only while stand-ins are on the import
path; modules of the package that were imported before are aside meanwhile.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

__all__ = ["OVERLAID", "PACKED", "Lender", "aside", "lent"]

OVERLAID: Mapping[str, str] = {"fla": "flash-linear-attention"}
"""Packages, and what installs each. The module `_<package>` beside this one has its replacements:
`FUNCTIONS`, by name, `Class.method` among them, and `IMMATERIAL`, arguments that change no value.
"""

PACKED = "there are no packed sequences, which layers make of an attention_mask: call it without"
"""What is said of arguments for them."""

# Executed once in a process, as stand-ins are, under all names that they have in `sys.modules`.
_kept: dict[str, ModuleType] = {}
# By package, those whose stand-ins were imported when it was.
_needed: dict[str, list[str]] = {}


class Lender(Loader):
    """Gives a module that has been imported, such as the stand-in for a copy's file."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Executed it has been; only its own spec comes back."""
        module.__spec__ = self._spec


def lent(fullname: str, spec: ModuleSpec | None, used: list[str]) -> ModuleSpec | None:
    """How a module of an overlaid package is imported.

    Args:
        fullname: of the module.
        spec: of the file, as Python finds it; None where there is none.
        used: the packages whose stand-ins have been imported; this one joins them, with those that
            it has needed.
    """
    root = _root(fullname)
    if fullname in _kept:
        sys.modules.update({n: m for n, m in _kept.items() if _root(n) == root})
        used.extend(name for name in _needed[root] if name not in used)
        return spec_from_loader(fullname, Lender(_kept[fullname]))
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _Overlaying(fullname, spec.loader.path)
    if spec is not None and root not in used:
        used.append(root)
        _needed.setdefault(root, used)
    return spec


def aside() -> dict[str, ModuleType]:
    """Takes overlaid packages out of `sys.modules`, and keeps them for the next time.

    Returns:
        What there was of these packages in `sys.modules`, overlaid or not.
    """
    found = {n: m for n, m in [*sys.modules.items()] if _root(n) in OVERLAID}
    for name, module in found.items():
        root = found.get(_root(name))
        # The package's word for all of it: some modules are made without a file.
        if isinstance(getattr(root, "__loader__", None), _Overlaying):
            _kept[name] = module
        del sys.modules[name]
    return found


def _root(name: str) -> str:
    return name.partition(".")[0]


class _Overlaying(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        root = _root(module.__name__)
        package = importlib.import_module(f"{__package__}._{root}")
        _overlay(module, root, package.FUNCTIONS, package.IMMATERIAL)


def _overlay(
    module: ModuleType, root: str, functions: Mapping[str, Any], immaterial: frozenset[str]
) -> None:
    """Replaces what a module that was just executed defines, and its entries in tables there.

    What it has imported from others of the package was replaced in these.
    """
    names = vars(module)
    for name, ours in functions.items():
        owner, _, last = name.rpartition(".")
        holder = names.get(owner) if owner else module
        own = None if holder is None else vars(holder).get(last)
        if own is None or not _is_of(own, root) or (owner and holder.__module__ != module.__name__):
            continue
        replaced = _replaced(own, f"{root}'s {name}", ours, immaterial)
        setattr(holder, last, replaced)
        for table in [t for t in names.values() if type(t) is dict and t is not names]:
            table.update({key: replaced for key, value in table.items() if value is own})
    for kernel in names.values():
        if type(kernel).__module__.startswith("triton.") and hasattr(kernel, "run"):
            _compute(kernel)


def _is_of(function: Any, root: str) -> bool:
    """Whether a function, or the `apply` of an autograd function, is the package's own."""
    owner = getattr(function, "__self__", function)
    return callable(function) and _root(getattr(owner, "__module__", "")) == root


@functools.cache
def _replaced(
    own: Callable[..., Any], called: str, ours: Callable[..., Any], immaterial: frozenset[str]
) -> Callable[..., Any]:
    """`ours` with the arguments of `own`, in order and with its defaults, and given by name.

    One that `ours` lacks has to be None or False, or immaterial. The `apply` of an autograd
    function takes no names: `ours` has its place as it is.
    """
    if hasattr(own, "__self__"):
        return ours
    signature = inspect.signature(own)
    known = inspect.signature(ours).parameters

    # fla looks up by `inspect.unwrap` what it has registered for a function.
    @functools.wraps(own, ("__name__", "__qualname__"), ())
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{called}: {error}") from None
        bound.apply_defaults()
        given = dict(_flat(bound))
        for name in [name for name in given if name not in known]:
            value = given.pop(name)
            if value is not None and value is not False and name not in immaterial:
                reason = (
                    PACKED if name == "cu_seqlens" else "fuseport's form of it does not take it"
                )
                raise NotImplementedError(f"{called} was called with {name}: {reason}")
        try:
            return ours(**given)
        except NotImplementedError as error:
            raise NotImplementedError(f"{called} was called {error}") from error
        except ValueError as error:
            raise ValueError(f"{called}: {error}") from error

    return function


def _flat(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            yield name, value


def _compute(kernel: Any) -> None:
    """Has a kernel of Triton itself computed by torch when it is launched, as by its stand-in."""
    from fuseport.exporter.shims._triton import JITFunction

    kernel.run = JITFunction.of(kernel).run
