"""Program → AOTInductor package: C++ code that Inductor writes, compiled here, weights included.

A package runs without the model's code and without Python, on machines like this one: the same
version of torch and system, and a processor with the same instruction sets; one for a GPU, where
there is one of the same compute capability. It takes the strides of its inputs for known: they must
be contiguous.
"""

import copy
import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import join
from typing import Any
from unittest import mock

import torch
from filelock import FileLock
from torch import fx
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from fuseport.exporter.bundle import machine
from fuseport.exporter.errors import ExportFailed, Missing
from fuseport.exporter.formats import Options
from fuseport.exporter.formats._sink import sink
from fuseport.exporter.program import Program, one_line
from fuseport.exporter.program.forward import dynamic_sizes, is_dynamic
from fuseport.exporter.program.refusing import checked
from fuseport.exporter.program.tracing._branches import alike_merged
from fuseport.ops import build

__all__ = ["BOUND", "COMPILED", "DEFAULT", "SUFFIX", "write"]

SUFFIX = ".aoti.pt2"
DEFAULT = False
COMPILED = True

# The key in a package's metadata under which it says what machine it is for.
BOUND = "fuseport"

_AVX2 = ("avx2", "f16c", "fma3")


def write(program: Program, path: Path, options: Options) -> dict[str, Any]:
    """Compile `program` and write it as a package that `torch._inductor.aoti_load_package` opens.

    Inputs and outputs are those of the program, by position in C++; in Python the package returns
    several outputs as a dictionary by name. On x86-64 with AVX2 the code needs AVX2 and no more.

    Raises:
        ExportFailed: Inductor or the compiler refuses the program.
        Missing: there is no compiler that Inductor can use.
    """
    config, bound = _config(_compiler(), options.device)
    exported = _on_device(checked(program), options.device)
    exported.example_inputs = (_examples(program, options.device), {})
    with _work_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on its own code
        from torch._inductor import aot_compile
        from torch._inductor.package.package import package_aoti

        try:
            module = exported.module(check_guards=False)
            assert isinstance(module, fx.GraphModule)
            with _convolutions_of_any_size(), alike_merged():
                found = aot_compile(module, *exported.example_inputs, options=config)
            assert isinstance(found, list)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # Inductor raises errors of many unrelated types
            raise ExportFailed(
                f"AOTInductor refuses the {program.kind} program: {one_line(error)}"
            ) from error
        _refuse_fixed(program)
        # The sources are not needed any more, and name folders of this machine; but by the name of
        # one torch 2.11 finds the metadata.
        files = [file for file in found if not str(file).endswith(".cpp")]
        for source in (Path(str(file)) for file in found if str(file).endswith(".wrapper.cpp")):
            source.write_text("// Left out: it is compiled.\n", encoding="utf-8")
            files.append(str(source))
        for library in (Path(str(file)) for file in files if str(file).endswith(".so")):
            _blank(library, [folder, Path(torch.__file__).parent])
        with sink(path) as archive:
            package_aoti(archive, files)
    return {"compiled_for": bound}


@contextmanager
def _convolutions_of_any_size() -> Iterator[None]:
    """Gradients of convolutions by torch's own kernel.

    From torch 2.13 on Inductor asks for the strides of the input's gradient as numbers, to choose
    among kernels of its own, and all sizes of a convolution of one dimension are those of the
    example then.
    """
    from torch._inductor.kernel import conv
    from torch._inductor.lowering import lowerings

    own = getattr(conv, "aten_convolution_backward_fallback", None)
    chosen = {} if own is None else {torch.ops.aten.convolution_backward.default: own}
    with mock.patch.dict(lowerings, chosen):
        yield


def _refuse_fixed(program: Program) -> None:
    """Refuse code that Inductor has written for the sizes of the example alone."""
    for name, i, _, size in dynamic_sizes(program.exported, program.inputs):
        if not is_dynamic(size):
            raise ExportFailed(
                f"AOTInductor fixes dimension {i} of input {name} at {size} in the {program.kind} "
                "program; give the number instead of a name for it"
            )


def _on_device(exported: ExportedProgram, device: str) -> ExportedProgram:
    """The program there; `exported` stays as it is, and tensors that are there already are shared.

    Torch's pass changes a program in place: its graphs, what nodes say of their values, and the
    dictionaries that hold its tensors. These are the copy's own.
    """
    own = copy.copy(exported)
    if device == "cpu":
        return own
    tensors = [*own.state_dict.values(), *own.constants.values()]
    tensors += [*own.graph_module.parameters(), *own.graph_module.buffers()]
    shared: dict[int, Any] = {id(t): t for t in tensors}
    own._graph_module = copy.deepcopy(own.graph_module, shared)
    own._state_dict, own._constants = dict(own.state_dict), dict(own.constants)
    return move_to_device_pass(own, device)


def _compiler() -> str:
    try:
        command = build.compiler_command()
    except build.BuildError as error:
        raise Missing(f"aot_inductor: {error}") from error
    if len(command) > 1:
        raise Missing(f"aot_inductor: Inductor takes a program alone, not CXX='{join(command)}'")
    return command[0]


def _config(compiler: str, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inductor's options, and what the code is bound to."""
    from torch._inductor import config

    known = config.get_config_copy()
    features = machine.cpu_features()
    portable: dict[str, Any] = {}
    if "cpp.march" in known and set(_AVX2) <= set(features):
        # Inductor's own choice is -march=native, of a width that not all processors have.
        portable = {"cpp.march": "", "cpp.simdlen": 256}
        features = _AVX2
    bound: dict[str, Any] = {**machine.here(), "cpu": list(features), "device": device}
    if device == "cuda":
        bound["gpu"] = machine.gpu()
    wanted = {
        **portable,
        "aot_inductor.package": True,
        "aot_inductor.metadata": {BOUND: json.dumps(bound)},
        "aot_inductor.precompile_headers": False,  # they would stay in the temporary folder
        "aot_inductor.enable_line_tables": False,
        "compile_threads": 1,  # no pool of processes that outlives the export
        "cpp.cxx": (None, compiler),
        "cpp.dynamic_threads": True,  # as many as where it runs, not as here
        "force_disable_caches": True,
    }
    return {name: value for name, value in wanted.items() if name in known}, bound


def _examples(program: Program, device: str) -> tuple[torch.Tensor, ...]:
    """Inputs of the sizes of the capture; Inductor compiles for all sizes, and runs nothing."""
    nodes = {node.name: node for node in program.exported.graph.nodes}
    values = [nodes[str(n)].meta["val"] for n in program.exported.graph_signature.user_inputs]
    assert all(value.is_contiguous() for value in values), "callers pass contiguous inputs"
    return tuple(
        torch.zeros([_hint(size) for size in value.shape], dtype=value.dtype, device=device)
        for value in values
    )


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


@contextmanager
def _work_folder() -> Iterator[Path]:
    """A folder for all that Inductor and the compiler write, gone afterwards.

    It is always the same one, since the code that Inductor writes holds its name, and one program
    should give the same bytes each time.
    """
    from torch._inductor.utils import clear_caches

    parent = build.cache_folder()
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = parent / "inductor"
    with FileLock(parent / "inductor.lock"):
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
        folder.mkdir()
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        clear_caches()
        try:
            yield folder
        finally:
            clear_caches()
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
            shutil.rmtree(folder, ignore_errors=True)


def _blank(library: Path, folders: list[Path]) -> None:
    """Overwrite what messages in a library say of where it was compiled, in place."""
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for folder in folders:
            name = os.fsencode(folder)
            position = content.find(name)
            while position >= 0:
                content[position : position + len(name)] = b"/" * len(name)
                position = content.find(name, position)
