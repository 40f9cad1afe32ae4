"""A kernel's code, in which a number that gets a name is a value of the kernel's.

Triton takes `total = 0.0` for a float32 from then on, and `0.0` inside an expression for whatever
the other operand is. Python knows of no such difference: the code is compiled anew, from its text.
"""

import ast
import functools
import inspect
import textwrap
from types import CodeType
from typing import Any

from fuseport.exporter.shims._triton.values import NUMBERS, Value

__all__ = ["ASSIGNED", "assigned", "assigning"]

ASSIGNED = "__assigned__"
"""The name of `assigned` in such code."""


def assigned(value: Any) -> Any:
    """What a name stands for that a kernel gives a value."""
    if isinstance(value, tuple):
        return tuple(map(assigned, value))
    return Value(value, 0) if isinstance(value, NUMBERS) else value


@functools.lru_cache(maxsize=256)
def assigning(function: Any) -> CodeType:
    """The code of a kernel, which assigns by `ASSIGNED`; as it is where there is no text of it."""
    code: CodeType = function.__code__
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return code
    (kernel,) = tree.body
    if not isinstance(kernel, ast.FunctionDef):
        return code
    _Assigning().generic_visit(kernel)
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


class _Assigning(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = _called(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """But for a constant of the kernel's, which says so."""
        if node.value is not None and "constexpr" not in ast.unparse(node.annotation):
            node.value = _called(node.value)
        return node


def _called(value: ast.expr) -> ast.expr:
    called = ast.Call(ast.Name(ASSIGNED, ast.Load()), [value], [])
    return ast.copy_location(called, value)
