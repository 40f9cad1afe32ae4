"""The weights inside an AOTInductor package."""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.runtimes import _aot_inductor

__all__ = ["constants"]


def constants(artifact: Path) -> dict[str, Tensor]:
    """Those that a package has as data, by their names in the model.

    The compiler writes tensors of a few elements into its code, and leaves out what it does not
    need: these are not among them. It loads the package's code, as running it does.

    Raises:
        Unsupported: it was compiled for another machine or version of torch.
    """
    device = _aot_inductor.check(artifact, None)
    with tempfile.TemporaryDirectory(prefix="fuseport-") as folder:
        with zipfile.ZipFile(artifact) as package:
            [library] = [n for n in package.namelist() if n.endswith(".so")]
            file = Path(package.extract(library, folder))
        kind = getattr(torch._C._aoti, f"AOTIModelContainerRunner{device.title()}")
        runner: Any = kind(str(file), 1)
        found = runner.extract_constants_map(False)
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}
