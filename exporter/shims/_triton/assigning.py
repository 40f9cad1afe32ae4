"""A kernel's code, in which a number that gets a name is a value of the kernel's.

Triton takes `total = 0.0` for a float32 from then on, and `0.0` inside an expression for whatever
the other operand is. And its `and`, `or` and `not` are those of each element of a block. Python
knows of neither: the code is compiled anew, from its text.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

from fuseport.exporter.shims._triton.branching import EITHER, branching
from fuseport.exporter.shims._triton.functions import negated, truth
from fuseport.exporter.shims._triton.language import strided
from fuseport.exporter.shims._triton.loops import apart
from fuseport.exporter.shims._triton.values import NUMBERS, Value, binary
from fuseport.exporter.shims._triton.ways import WAYS

__all__ = ["WRITTEN", "assigning"]


def _assigned(value: Any) -> Any:
    """What a name stands for that a kernel gives a value."""
    if isinstance(value, tuple):
        return tuple(map(_assigned, value))
    return Value(value, 0) if isinstance(value, NUMBERS) else value


def _named(value: Any, names: Any) -> Any:
    """A tuple as it is taken apart: values beyond the names are left, which Triton does not mind.

    Args:
        value: of an assignment.
        names: a tuple of such for each part that is named, or None for a name of all of it.
    """
    if names is None or not isinstance(value, tuple):
        return value
    return tuple(_named(*pair) for pair in zip(value, names, strict=False))


def _connected(name: str, *operands: Callable[[], Any]) -> Any:
    """`and` or `or`: of numbers, that of Python; of blocks, of each of their elements.

    Args:
        name: which of them.
        operands: what gives each, in turn; those after a number that settles it are left alone.
    """
    blocks: list[Value] = []
    value: Any = None
    for operand in operands:
        value = operand()
        if isinstance(value, Value) and value.number is None:
            blocks.append(value)
        elif bool(value) is (name == "or"):
            return value
    if len(blocks) < 2:
        return blocks[0] if blocks else value
    return functools.reduce(functools.partial(binary, name), map(truth, blocks))


def _negated(value: Any) -> Any:
    """`not`, of each element of a block."""
    if not isinstance(value, Value) or value.number is not None:
        return not value
    return negated(value)


_ASSIGNED, _CONNECTED, _NEGATED = "__assigned__", "__connected__", "__negated__"
_NAMED, _STRIDED = "__named__", "__strided__"
WRITTEN: Mapping[str, Any] = {
    _ASSIGNED: _assigned,
    _CONNECTED: _connected,
    _NAMED: _named,
    _NEGATED: _negated,
    _STRIDED: strided,
    **WAYS,
}
"""What such code names besides."""


@functools.lru_cache(maxsize=256)
def assigning(function: Any) -> CodeType:
    """The code of a kernel by names of `WRITTEN`; as it is where there is no text of it."""
    code: CodeType = function.__code__
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return code
    (kernel,) = tree.body
    if not isinstance(kernel, ast.FunctionDef):
        return code
    _Written(apart(kernel)).generic_visit(kernel)
    branching(kernel)
    kernel.decorator_list, kernel.returns = [], None
    kernel.args.defaults = []
    kernel.args.kw_defaults = [None] * len(kernel.args.kwonlyargs)
    # Within a function with the names that it takes from around it.
    outer = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body[0]
    outer.body = [kernel]  # type: ignore[attr-defined]
    tree.body = [outer]
    ast.increment_lineno(tree, first - 1)
    made = compile(ast.fix_missing_locations(tree), code.co_filename, "exec", dont_inherit=True)
    (around,) = _inner(made)
    return next((found for found in _inner(around) if found.co_name == code.co_name), code)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


class _Written(ast.NodeTransformer):
    """Writes names of `WRITTEN` into a kernel.

    Args:
        loops: whose turns have nothing in common.
    """

    def __init__(self, loops: Collection[ast.For]) -> None:
        self.loops = loops

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        over = node.iter
        if node not in self.loops or not isinstance(over, ast.Call) or len(over.args) != 3:
            return node
        if not isinstance(over.args[2], ast.Constant):
            over.args.insert(0, over.func)
            over.func = ast.copy_location(ast.Name(_STRIDED, ast.Load()), over)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _called(_ASSIGNED, node.value)
        if isinstance(node.targets[0], ast.Tuple):
            node.value = _called(_NAMED, node.value, _names(node.targets[0]))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """But for a constant of the kernel's, which says so."""
        self.generic_visit(node)
        if node.value is not None and "constexpr" not in ast.unparse(node.annotation):
            node.value = _called(_ASSIGNED, node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        return _called(_CONNECTED, name, *map(_later, node.values), at=node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _called(EITHER, node.test, *map(_later, (node.body, node.orelse)), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _called(_NEGATED, node.operand) if isinstance(node.op, ast.Not) else node


def _names(target: ast.expr) -> ast.expr:
    """What `_named` takes, of what is assigned to."""
    if isinstance(target, ast.Tuple):
        return ast.Tuple([_names(each) for each in target.elts], ast.Load())
    return ast.Constant(None)


def _later(value: ast.expr) -> ast.expr:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def _called(name: str, *values: ast.expr, at: ast.expr | None = None) -> ast.expr:
    called = ast.Call(ast.Name(name, ast.Load()), [*values], [])
    return ast.copy_location(called, values[0] if at is None else at)
