"""Whether code has a way of its own where a call of it fails: `try: load(…) except: …`."""

import ast
import linecache
from types import FrameType

__all__ = ["tried"]


def tried(frame: FrameType, error: type[BaseException]) -> bool:
    """Whether the statement that a frame is at is tried, and goes on where it raises the error."""
    lines = linecache.getlines(frame.f_code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # of no file, or of a notebook
        return False
    return any(
        isinstance(node, ast.Try)
        and node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0)
        and any(_goes_on(handler, error) for handler in node.handlers)
        for node in ast.walk(tree)
    )


def _goes_on(handler: ast.ExceptHandler, error: type[BaseException]) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.__name__ for kind in error.__mro__}
    caught = any(kind is None or ast.unparse(kind) in names for kind in kinds)
    return caught and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))
