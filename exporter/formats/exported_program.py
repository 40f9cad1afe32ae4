"""Program → exported program, the `.pt2` that `torch.export.load` opens."""

import re
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.formats import Options
from fuseport.exporter.formats._numbers import FORMS, written_out
from fuseport.exporter.formats._quiet import quiet
from fuseport.exporter.formats._sink import sink
from fuseport.exporter.program import Program, one_line
from fuseport.exporter.program.complex_numbers.real_regions import differentiable
from fuseport.exporter.program.loops import until
from fuseport.exporter.program.refusing import checked

__all__ = ["DEFAULT", "SUFFIX", "write"]

SUFFIX = ".pt2"
DEFAULT = True


def write(program: Program, path: Path, options: Options) -> dict[str, Any]:
    """Write `program` as `torch.export.save` does; the ops must be registered to load it again.

    `torch.export.load(path).module()` takes the inputs by position. It returns the one output as it
    is, several as a dictionary by name.

    Raises:
        ExportFailed: the graph holds something that cannot be serialised.
    """
    del options
    try:
        with quiet("torch._export.serde.serialize"), sink(path) as file:
            whole = checked(program)
            if program.kind == "forward":
                whole = until.differentiable(whole)
            whole = differentiable(whole)
            torch.export.save(written_out(whole, FORMS), file)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch's serializer raises several unrelated types
        called = re.search(
            r"Failed serializing node .*\[target=(?!torch\.ops)([\w.]+)\]", str(error)
        )
        reason = f"torch has no form of {called[1]} of a size" if called else one_line(error)
        raise ExportFailed(f"the {program.kind} program cannot be serialised: {reason}") from error
    return {}
