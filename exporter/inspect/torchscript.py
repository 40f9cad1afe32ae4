"""A TorchScript archive: its code as text, its pickle's names and storages; nothing is loaded."""

import ast
import io
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint import pickles
from fuseport.exporter.checkpoint.allowed import STORAGES
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.inspect import known
from fuseport.exporter.inspect.archive import Archive, opened

__all__ = ["found"]

_DTYPES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
}


def found(path: str) -> dict[str, Any]:
    """Inputs and outputs of `forward`, op counts of all code, weights by dtype.

    Raises:
        UnsafeInput, CorruptInput: as the archive's reader does.
    """
    with opened(Path(path)) as archive:
        scan = pickles.scan(io.BytesIO(archive.read("data.pkl")))
        if scan.broken is not None:
            raise CorruptInput(f"{show(path)}: data.pkl: {show(scan.broken)}")
        root = next((name for name in scan.names if name.startswith("__torch__.")), "")
        trees = {name: ast.parse(archive.read(name)) for name in _sources(archive)}
        version = archive.read("version").decode("ascii", "replace").strip()
    counts: Counter[tuple[str, str]] = Counter()
    for tree in trees.values():
        for node in _once(tree):
            target = _operator(node)
            if target is not None:
                counts[target] += 1
    inputs, outputs = _forward(trees, root)
    return {
        "what": "a TorchScript archive",
        "version": {"archive": version},
        "inputs": inputs,
        "outputs": outputs,
        "ops": known.tally(counts, known.of_torch),
        "weights": _weights(scan),
        "module": root.removeprefix("__torch__."),
    }


def _sources(archive: Archive) -> list[str]:
    return [n for n in archive.members if n.startswith("code/") and n.endswith(".py")]


def _once(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, of branches that say the same one alone (`formats/_autodiff.py`)."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        if isinstance(node, ast.If) and _said(node.body) == _said(node.orelse):
            waiting += [node.test, *node.body]
        else:
            waiting += ast.iter_child_nodes(node)


def _said(branch: list[ast.stmt]) -> list[str]:
    """The calls of a branch; what they give has other names in another one."""
    nodes = (node for statement in branch for node in ast.walk(statement))
    return [ast.dump(node) for node in nodes if isinstance(node, ast.Call)]


def _operator(node: ast.AST) -> tuple[str, str] | None:
    """`torch.add(…)` is aten's, `ops.<domain>.<name>(…)` any other's."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    match ast.unparse(node.func).split("."):
        case ["torch", name]:
            return "aten", name
        case ["ops", domain, name]:
            return domain, name
    return None


def _forward(
    trees: dict[str, ast.Module], root: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    module, _, class_name = root.rpartition(".")
    tree = trees.get(f"code/{module.replace('.', '/')}.py")
    for outer in tree.body if tree is not None else ():
        if isinstance(outer, ast.ClassDef) and outer.name == class_name:
            for function in outer.body:
                if isinstance(function, ast.FunctionDef) and function.name == "forward":
                    inputs = [
                        {"name": a.arg, "type": ast.unparse(a.annotation) if a.annotation else ""}
                        for a in function.args.args[1:]
                    ]
                    result = ast.unparse(function.returns) if function.returns else ""
                    return inputs, [{"name": "", "type": result}]
    return [], []


def _weights(scan: pickles.Scan) -> dict[str, Any]:
    dtypes: dict[str, dict[str, int]] = {}
    for key, size in scan.storages.items():
        kind = scan.kinds[key].removeprefix("torch.")
        short = kind.removesuffix("Storage")
        entry = dtypes.setdefault(_DTYPES.get(short, short.lower()), {"elements": 0, "bytes": 0})
        entry["elements"] += size // STORAGES.get(kind, 1)
        entry["bytes"] += size
    return known.total(dtypes)
