"""What loading a `.pt2` file would unpickle, and where it would unpack to; nothing is loaded.

`torch.export.load` reads some of its members by unrestricted pickle: weights and constants whose
entries in a list say so, objects that are no tensors, and example inputs that are more than
tensors. An exported program of plain tensors has none of them. AOTInductor unpacks a package to
files by the names of its members.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuseport.exporter.checkpoint import pickles
from fuseport.exporter.checkpoint.allowed import refused
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, UnsafeInput
from fuseport.exporter.inspect.archive import Archive, opened

__all__ = ["check"]

_LISTS = ("_weights_config.json", "_constants_config.json")
_OBJECTS = ("custom_obj_", "opaque_obj_")  # of files in data/constants
_PICKLES = (".pt", ".pth", ".pkl", ".pickle")


def check(path: Path) -> None:
    """Refuse a `.pt2` file that would unpickle more than tensors, or unpack out of its folder.

    Raises:
        UnsafeInput: it would; the message names the member.
        CorruptInput: it is damaged, or a member occurs twice.
    """
    with opened(path) as archive:
        found = next(_unpickled(archive), None)
    if found is not None:
        member, why = found
        raise UnsafeInput(
            f"{show(path)}: {show(member)}: {why}, and loading it could run anything; export the"
            " program again, with plain tensors alone"
        )


def _unpickled(archive: Archive) -> Iterator[tuple[str, str]]:
    for name, size in archive.members.items():
        last = name.rpartition("/")[2]
        if last.startswith(_OBJECTS):
            yield name, "a pickled object"
        elif name.endswith(_LISTS):
            entries: dict[str, Any] = json.loads(archive.read(name))["config"]
            for key, entry in entries.items():
                if entry["use_pickle"] or str(entry["path_name"]).startswith(_OBJECTS):
                    yield name, f"it has a pickle for {show(key)}"
        elif size and name.endswith(_PICKLES):
            yield from ((name, why) for why in _of_torch_file(archive.read(name)))


def _of_torch_file(content: bytes) -> Iterator[str]:
    """What is more than tensors in what `torch.save` wrote."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as inner:
            names = [name for name in inner.namelist() if name.rpartition("/")[2] == "data.pkl"]
            found = [pickles.scan(io.BytesIO(inner.read(name))) for name in names]
    except zipfile.BadZipFile:
        found = []
    if not found:
        yield "a pickle"
    for scan in found:
        if bad := refused(scan.names):
            yield f"a pickle that names {show(bad[0])}"
        elif scan.broken is not None:
            raise CorruptInput(f"a pickle in it: {show(scan.broken)}")
