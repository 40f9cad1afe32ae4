"""ONNX Runtime with the library of fused kernels for a device, on the same `.onnx` files.

ONNX Runtime would run a function body without a word where it did not take a kernel: each call
counts what the library's kernels have done.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.runtimes import Unsupported, _onnxruntime
from fuseport.exporter.runtimes._onnxruntime import PROVIDERS, OnnxRuntimeSession
from fuseport.ops import OPS, ort
from fuseport.ops.build import BuildError
from fuseport.ops.spec import OpSpec

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "OPTIMISES", "differs", "load", "missing", "prepare"]

FORMAT = "onnx"
AUTOGRAD = False
DEVICES = PROVIDERS
OPTIMISES = True


def missing() -> str | None:
    """What the library for the CPU needs, where it is not built and cannot be.

    That for a GPU needs more, which `load` says: it is asked for by device.
    """
    if reason := _onnxruntime.missing():
        return reason
    status = ort.status(OPS.values())
    return status.detail if status.state == "unavailable" else None


def differs(ops: Iterable[str], device: str) -> bool:
    """Whether the library has kernels of these operators; without, `onnxruntime` does the same."""
    return bool(_bound(_operators({"ops": ops}), device))


def prepare(program: Mapping[str, Any]) -> None:
    """Have the library of kernels compiled; see `runtimes.Runtime`."""
    device = program.get("device", "cpu")
    if used := _bound(_operators(program), device):
        with suppress(BuildError):
            _library(used, device)


def load(artifact: Path, program: Mapping[str, Any]) -> "_FusedSession":
    """A session on an `.onnx` file, with the kernels of the ops that are in it.

    Raises:
        Unsupported: there is no node in it that the library has a kernel for, or ONNX Runtime has
            no kernel for another one; or the library cannot be compiled.
    """
    types, device = _op_types(artifact), program.get("device", "cpu")
    if not _bound(types, device):
        found = f"no fused kernel for {', '.join(sorted(types))}" if types else "nothing to fuse"
        raise Unsupported(f"{found}: the runtime onnxruntime runs the same")
    try:
        # That of `prepare`, also where a program has some of the model's ops, as its step has.
        library = _library(_bound(types | _operators(program), device), device)
    except BuildError as error:
        raise Unsupported(str(error)) from error
    fused = sorted(op for op in types if ort.calls(library, op) is not None)
    optimised = program.get("optimised", True)
    session = OnnxRuntimeSession(artifact, library, optimised=optimised, device=device)
    return _FusedSession(session, library, fused)


def _operators(program: Mapping[str, Any]) -> set[str]:
    """The model's, as nodes are called."""
    return {name.partition("::")[2] for name in program.get("ops", ())}


def _library(used: Iterable[OpSpec], device: str) -> Path:
    """The library of all ops if it is there, as `fuseport ops build` leaves it; else of these."""
    whole = ort.status(OPS.values(), device)
    return Path(whole.detail) if whole.state == "built" else ort.library(used, device)


def _bound(types: set[str], device: str) -> list[OpSpec]:
    """The ops with one of these types of nodes that have a part in the library for a device."""
    bound = [spec for spec in OPS.values() if ort.bound(spec, device)]
    return [spec for spec in bound if types & {o.name for o in spec.operators}]


class _FusedSession:
    def __init__(self, session: OnnxRuntimeSession, library: Path, fused: Iterable[str]) -> None:
        self._session = session
        self._library = library
        self._fused = tuple(fused)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before = self._calls()
        outputs = self._session.run(inputs)
        idle = [op for op, calls in self._calls().items() if calls == before[op]]
        if idle:
            raise RuntimeError(f"the fused kernel did not run, but the body of {', '.join(idle)}")
        return outputs

    def _calls(self) -> dict[str, int | None]:
        return {op: ort.calls(self._library, op) for op in self._fused}


def _op_types(artifact: Path) -> set[str]:
    """The types of nodes of the domain of fused ops in a model, whatever graph they are in."""
    import onnx

    model = onnx.load(artifact, load_external_data=False)
    # The bodies of fused ops themselves are what is not to run.
    others = [f for f in model.functions if f.domain != ort.DOMAIN]
    found = [*_nodes(model.graph.node), *(n for f in others for n in _nodes(f.node))]
    return {node.op_type for node in found if node.domain == ort.DOMAIN}


def _nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)
