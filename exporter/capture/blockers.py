"""What in a model's code keeps it from being exported: found by running it once, watched.

The capture of torch ends at the first call that it cannot follow, with an error of its own about
symbolic tensors. Here the model runs eagerly on its example inputs, and every call is noted that
leaves torch: functions of extension modules, memory handed out, operators without a fake, Triton
kernels. What a `torch.autograd.Function` does in it is noted as its.
"""

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuseport.exporter.capture._tests_of_loops import asks_there
from fuseport.exporter.program import near, one_line
from fuseport.exporter.user_code import hint
from fuseport.exporter.user_code.known_calls import OWN_OP, advice, stand_in
from fuseport.ops import registration

__all__ = ["MEND", "Blocker", "ending", "find", "fixed_sizes", "is_users", "users_frame"]

Kind = Literal["extension", "memory", "value", "operator", "kernel", "error"]


MEND = "mend that first"
"""What to do about an error of the code's own, of which no more is known."""


@dataclass(frozen=True)
class Blocker:
    """A call that an export cannot follow.

    Attributes:
        kind: a function of an extension module, memory or values handed out of torch, an operator
            without fake or autograd, a kernel that is launched, or an error that the code raises.
        call: what is called, or the error.
        where: `file:line` of the call, and of what it was called from where that is other code.
        why: what is wrong with it.
        what_to_do: in a few words.
        missing: whether it is that something is not installed.
    """

    kind: Kind
    call: str
    where: str
    why: str
    what_to_do: str
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.call}: {self.why}; {self.what_to_do}"


def find(run: Callable[[], Any]) -> tuple[Blocker, ...]:
    """Every blocker in a call, in the order of the first call of each.

    Where the code raises an error, that is the last one: what would have come after it is not seen.

    Args:
        run: calls the model on example inputs. What it prints or raises goes no further.
    """
    watch = _Watch()
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(_functions(watch))
        stack.enter_context(_Handed(watch))
        stack.enter_context(_Operators(watch))
        stack.enter_context(_profiled(watch))
        try:
            run()
        except Exception as error:  # model code can raise anything
            failure = error
        else:
            return tuple(watch.found.values())
    watch.failed(failure)
    return tuple(watch.found.values())


def ending(error: BaseException, found: Sequence[Blocker]) -> Blocker | None:
    """Where the code is at which a capture ended, if no call is known there.

    Such are functions that get a dynamic size in place of a number, for one.

    Args:
        error: that ended it.
        found: what `find` gave.
    """
    lines = dict(traceback.walk_tb(error.__traceback__))
    own = [frame for frame in lines if is_users(frame)]
    if not own:
        return None
    where, around = _place(own[-1], lines)
    known = {blocker.where.split(" ")[0] for blocker in found}
    if where.split(" ")[0] in known:
        return None
    otherwise, why = "compute it by functions of torch", "the capture ends here"
    if isinstance(error, GuardOnDataDependentSymNode):
        why += ", where a size hangs on the values of a tensor"
        otherwise = "compute with tensors whose sizes do not (a mask, torch.where)"
    if isinstance(error, DynamicOutputShapeException):
        why += f", where torch does not know the shapes of what {error.func} gives"
        otherwise = OWN_OP
    if "data is not allocated yet" in str(error):
        why += ", where a value of a tensor is read that a capture has none of"
        otherwise = "compute with tensors instead"
    if isinstance(error, KeyError) and re.search(r"\bs\d+\b", str(error)):
        why += ", where a text that dynamic sizes are in is looked up: such a size has no digits"
        otherwise = "take a key without them, or give the numbers instead of names for them"
    return Blocker("error", type(error).__name__, where, why, advice(*around, otherwise=otherwise))


@contextmanager
def fixed_sizes() -> Iterator[dict[int, tuple[str, str | None]]]:
    """Where code makes dynamic sizes of a capture into numbers meanwhile, by the number.

    Beside the place: the function that computes what that there seems to, for any size.
    """
    found: dict[int, tuple[str, str | None]] = {}
    replace = ShapeEnv._set_replacement

    def noted(self: ShapeEnv, symbol: Any, becomes: Any, why: str) -> None:
        if becomes.is_Integer:
            frame = sys._getframe(1)
            where, around = _place(frame)
            instead = stand_in(around[0]) if around else None
            found.setdefault(int(becomes), (where, instead or _for_a_loop(frame)))
        replace(self, symbol, becomes, why)

    with mock.patch.object(ShapeEnv, "_set_replacement", noted):
        yield found


def _for_a_loop(frame: FrameType | None) -> str | None:
    """What computes in a graph what a loop in Python does, if there is one."""
    if frame is None or not is_users(frame := users_frame(frame)):
        return None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return _LOOPS if re.search(r"\bfor\b.*\bin\b", line) else None


_LOOPS = "a layer such as nn.LSTM or torch's scan"

# Calls on tensors that leave torch: what is handed out, and why that cannot be followed.
_MEMORY = {
    "numpy": "hands its values to numpy",
    "__array__": "hands its values to numpy",
    "data_ptr": "hands its memory out",
    "__dlpack__": "hands its memory out",
    "untyped_storage": "hands its memory out",
}
_VALUES = {
    "item": "makes a number of a tensor's value",
    "tolist": "makes numbers of a tensor's values",
    "__bool__": "decides by a tensor's value",
    "__int__": "makes a number of a tensor's value",
    "__float__": "makes a number of a tensor's value",
    "__index__": "makes a number of a tensor's value",
}
_NAMESPACES = {"aten", "prim", "prims", "profiler", "inductor", "higher_order", "_c10d_functional"}


class _Watch:
    """What was found so far, by kind, call and place."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], Blocker] = {}
        self.functions: list[str] = []  # autograd functions that are being applied

    def note(
        self, kind: Kind, call: str, why: str, frame: FrameType | None, *names: str, do: str = ""
    ) -> None:
        where, around = _place(frame)
        if kind == "memory" and any(
            b.kind == "extension" and b.where == where for b in self.found.values()
        ):
            return  # it is the extension that asks for it
        inside = f", in the autograd function {self.functions[-1]}" if self.functions else ""
        known = (*names, *reversed(self.functions), *around)
        self.found.setdefault(
            (kind, call, where),
            Blocker(kind, call, where, why + inside, do or advice(*known)),
        )

    def failed(self, error: Exception) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = dict(traceback.walk_tb(error.__traceback__))
        own = [frame for frame in frames if is_users(frame)]
        frame = own[-1] if own else None
        where, around = _place(frame, lines)
        missing = isinstance(error, ImportError)
        names = (
            str(getattr(error, "name", None) or ""),
            str(error).splitlines()[0] if str(error) else "",
            *around,
        )
        what_to_do = MEND
        said = hint(error).removeprefix("; ")
        if said and not missing:
            what_to_do = said
        elif missing or _is_foreign(error):
            what_to_do = advice(*names, otherwise=said) if said else advice(*names)
        if "_OpNamespace" in str(error):
            what_to_do = (
                "no such operator is registered here: import what registers it, or give an op of "
                "your own that computes the same, in the model's code and with --ops (README)"
            )
        why = "the model's own code fails here, before any export; what comes after is not seen"
        if "new Tensor subclass" in str(error):
            why = "an export has tensors of a class of its own; what comes after is not seen"
            what_to_do = "use the tensor itself, and functions in place of the subclass's methods"
        last = next(iter(reversed(self.found.values())), None)
        if last is not None and last.where.split(" ")[0] == where.split(" ")[0]:
            return  # it is what a call that is noted raised
        self.found[("error", where)] = Blocker(
            "error",
            one_line(error),
            where,
            why,
            what_to_do,
            missing,
        )


def _is_foreign(error: Exception) -> bool:
    """Whether an error says that there is no kernel or no device, and not that code is wrong."""
    text = str(error)
    return any(part in text for part in ("Could not run", "CUDA", "driver", "Triton", "triton"))


@contextmanager
def _functions(watch: _Watch) -> Iterator[None]:
    """Know which autograd function calls are made in."""
    apply = torch.autograd.Function.__dict__["apply"]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":  # those of operators, for one
            return apply.__get__(None, cls)(*args, **kwargs)
        watch.functions.append(cls.__name__)
        try:
            return apply.__get__(None, cls)(*args, **kwargs)
        finally:
            watch.functions.pop()

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(noted)):
        yield


class _Handed(TorchFunctionMode):
    """Notes what hands memory or values of tensors out."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        ours = getattr(Tensor, name, None) is func
        if ours and _caller(sys._getframe(1)).f_code.co_filename.startswith(_OURS):
            return func(*args, **(kwargs or {}))
        if ours and name in _MEMORY:
            self._watch.note("memory", f"Tensor.{name}", _MEMORY[name], sys._getframe(1))
        elif ours and name in _VALUES:
            do = "compute with tensors instead, or make it a constant of the module"
            if name == "__bool__" and asks_there(users_frame(sys._getframe(1))):
                do = "have torch.while_loop go on until it is reached, which is exported"
            self._watch.note("value", f"Tensor.{name}", _VALUES[name], sys._getframe(1), do=do)
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType) -> FrameType:
    """The frame that a call comes from, be it through other modes."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _Operators(TorchDispatchMode):
    """Notes operators that torch.export cannot trace, or not differentiate."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.namespace not in _NAMESPACES:
            given = pytree.tree_leaves((args, kwargs))
            wanted = any(isinstance(t, Tensor) and t.requires_grad for t in given)
            if not registration.has_fake(name):
                why = "an operator without a fake implementation"
                self._watch.note("operator", name, why, sys._getframe(1), name)
            elif wanted and not registration.has_autograd(name):
                why = "an operator without autograd"
                self._watch.note("operator", name, why, sys._getframe(1), name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _profiled(watch: _Watch) -> Iterator[None]:
    """Notes calls of extension modules' functions, and launches of Triton's kernels."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            module = _extension(argument)
            if module is not None and _holds_tensors(frame):
                call = f"{module}.{argument.__name__}"
                watch.note("extension", call, "a function of an extension module", frame, call)
        elif event == "call" and _launches(frame):
            kernel = getattr(frame.f_locals.get("self"), "__name__", "?")
            call = f"the Triton kernel {kernel}"
            watch.note("kernel", call, "a kernel that is launched", frame.f_back, kernel)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def _launches(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return frame.f_code.co_name == "run" and module == "triton.runtime.jit"


def _extension(function: Any) -> str | None:
    """The module of a compiled function that is not torch's or Python's; None for others."""
    name = getattr(function, "__module__", None)
    if not isinstance(name, str) or name.partition(".")[0] in _USUAL:
        return None
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name if file.endswith(tuple(EXTENSION_SUFFIXES)) else None


_USUAL = {"torch", "torchgen", "numpy", "fuseport", *sys.stdlib_module_names}


def _holds_tensors(frame: FrameType) -> bool:
    # Python does not tell a profile what a call is given: without a tensor near, it is given none.
    return any(isinstance(v, Tensor) for v in pytree.tree_leaves(list(frame.f_locals.values())))


_OURS = tuple(str(Path(__file__).parents[2] / part) for part in ("exporter", "ops"))
_STDLIB = sysconfig.get_path("stdlib")
_SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def is_users(frame: FrameType) -> bool:
    """Whether code is neither torch's or Triton's, nor Python's, nor ours."""
    file = frame.f_code.co_filename
    if str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "triton"):
        return False
    if file.startswith(_SITE):
        return True
    return not file.startswith((*_OURS, _STDLIB, "<"))


def users_frame(frame: FrameType) -> FrameType:
    """The innermost frame of such code that a call is made in; the outermost, if none is."""
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def _place(
    frame: FrameType | None, lines: dict[FrameType, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Where a call is, in words, and the names of the functions around it, innermost first."""
    chain: list[FrameType] = []
    within: int | None = None  # of them, those that are called from here
    while frame is not None:
        if is_users(frame):
            chain.append(frame)
        elif frame.f_code.co_filename.startswith(_OURS):
            within = len(chain)
        frame = frame.f_back
    chain = chain[:within]
    if not chain:
        return "the model", ()

    def at(one: FrameType) -> str:
        return f"{near(one.f_code.co_filename)}:{(lines or {}).get(one, one.f_lineno)}"

    where = at(chain[0])
    if chain[0].f_code.co_filename.startswith(_SITE):
        own = next((f for f in chain if not f.f_code.co_filename.startswith(_SITE)), None)
        if own is not None:
            where += f" (called from {at(own)})"
    return where, tuple(frame.f_code.co_name for frame in chain[:4])
