"""Where model code asks whether a loop goes on: `while …:`, `if …: break` or `return` in one."""

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["Test", "asks_there", "test_at"]

_Position = tuple[int | None, ...]  # first and last line, first and last column

_Loop = ast.While | ast.For
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(frozen=True)
class Test:
    """What asks whether a loop goes on.

    Attributes:
        line: of it.
        goes_on: what all conditions in it come to where the loop goes on.
        inner: whether the loop is in another of the same function.
    """

    line: int
    goes_on: bool
    inner: bool


def asks_there(frame: FrameType) -> bool:
    """Whether code asks there if a loop goes on."""
    _, lines = _tests("".join(linecache.getlines(frame.f_code.co_filename)))
    return frame.f_lineno in lines


def test_at(frame: FrameType) -> tuple[Test, _Position] | None:
    """What asks there whether a loop goes on, and which of its conditions; None if nothing does, or
    if these do not come to the same where it goes on."""
    by_position, lines = _tests("".join(linecache.getlines(frame.f_code.co_filename)))
    if frame.f_lineno not in lines:
        return None
    position = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    test = by_position.get(position)
    return None if test is None else (test, position)


@functools.cache
def _tests(source: str) -> tuple[dict[_Position, Test], frozenset[int]]:
    """The tests of code by the places of their conditions, and all lines where it asks so."""
    found: dict[_Position, Test] = {}
    lines: set[int] = set()
    for statement, going, inner in _statements(ast.parse(source), ()):
        test = statement.test
        lines.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
        conditions = [*_conditions(test, going)]
        comes_to = {value for _, value in conditions}
        if len(comes_to) == 1 and None not in comes_to:
            made = Test(test.lineno, bool(comes_to.pop()), inner)
            # Python has the place of the statement for a condition that is a name.
            for node in (statement, *(condition for condition, _ in conditions)):
                place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                found[place] = made
    return found, frozenset(lines)


def _statements(
    node: ast.AST, loops: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.While | ast.If, bool, bool]]:
    """Those that ask, what their tests come to where a loop goes on, and if it is in another."""
    if isinstance(node, ast.While):
        yield node, True, bool(loops)
    elif isinstance(node, ast.If) and loops and isinstance(node.body[-1], ast.Break | ast.Return):
        yield node, False, len(loops) > 1
    for name, field in ast.iter_fields(node):
        around = () if isinstance(node, _FUNCTIONS) else loops
        if isinstance(node, _Loop) and name == "body":
            around = (*loops, node)
        for each in field if isinstance(field, list) else [field]:
            if isinstance(each, ast.AST):
                yield from _statements(each, around)


def _conditions(test: ast.expr, value: bool | None) -> Iterator[tuple[ast.expr, bool | None]]:
    """The conditions of a test, and what each comes to where that comes to a value; None where it
    may come to either."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            yield from _conditions(operand, None if value is None else not value)
        case ast.BoolOp(op, values):
            all_same = value is isinstance(op, ast.And)
            for each in values:
                yield from _conditions(each, value if all_same else None)
        case _:
            yield test, value
