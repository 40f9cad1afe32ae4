"""Which loops of a kernel could be run in any order, as far as its names tell."""

import ast
from collections.abc import Iterable, Iterator

__all__ = ["apart"]


def apart(kernel: ast.FunctionDef) -> list[ast.For]:
    """The loops whose turns leave nothing to one another, nor to what is after them, in names."""
    loops = [node for node in ast.walk(kernel) if isinstance(node, ast.For)]
    return [loop for loop in loops if _is_apart(kernel, loop)]


def _is_apart(kernel: ast.FunctionDef, loop: ast.For) -> bool:
    inner = [node for statement in loop.body for node in ast.walk(statement)]
    ways_out = (ast.Break, ast.Return, ast.Yield, ast.Global, ast.Nonlocal, ast.Try, ast.With)
    if loop.orelse or any(isinstance(node, ways_out) for node in inner):
        return False
    # Of a name that a turn reads before it gives it, the first turn of a program has none: that is
    # an error, of turns that run at once as well, and then they run as they are written.
    given = _stored([*ast.walk(loop.target), *inner])
    return not given.intersection(_outside(kernel, loop))


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    names = (node for node in nodes if isinstance(node, ast.Name))
    return {name.id for name in names if not isinstance(name.ctx, ast.Load)}


def _outside(node: ast.AST, loop: ast.For) -> Iterator[str]:
    """Names of a kernel that are mentioned elsewhere."""
    for child in ast.iter_child_nodes(node):
        if child is loop:
            yield from (n.id for n in ast.walk(loop.iter) if isinstance(n, ast.Name))
            continue
        if isinstance(child, ast.Name):
            yield child.id
        if isinstance(child, ast.arg):
            yield child.arg
        yield from _outside(child, loop)
