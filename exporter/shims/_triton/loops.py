"""Which loops of a kernel could be run in any order, as far as its names tell."""

import ast
from collections.abc import Iterable, Iterator, Sequence

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
    given = _stored([*ast.walk(loop.target), *inner])
    if given.intersection(_outside(kernel, loop)):
        return False
    wanted, _ = _flow(loop.body, _names(loop.target))
    return not wanted & given


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


def _flow(statements: Sequence[ast.stmt], known: set[str]) -> tuple[set[str], set[str]]:
    """What statements read of what was before them.

    Args:
        statements: one after the other.
        known: names that have been given since.

    Returns:
        Names that they may read before they give them, and those that they surely have given.
    """
    wanted: set[str] = set()
    known = set(known)
    for each in statements:
        if isinstance(each, ast.If):
            wanted |= _read(each.test) - known
            first, one = _flow(each.body, known)
            second, other = _flow(each.orelse, known)
            wanted, known = wanted | first | second, one & other
        elif isinstance(each, ast.For | ast.While):
            wanted |= _read(each.iter if isinstance(each, ast.For) else each.test) - known
            target = _names(each.target) if isinstance(each, ast.For) else set()
            wanted |= _flow(each.body, known | target)[0]
        else:
            wanted |= _read(each) - known
            if isinstance(each, ast.Assign | ast.AnnAssign):
                known |= _stored(ast.walk(each))
    return wanted, known


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _read(node: ast.AST) -> set[str]:
    """Names that an expression or a statement reads; what is added to is read as well."""
    added = {_name(n.target) for n in ast.walk(node) if isinstance(n, ast.AugAssign)}
    return added | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""
