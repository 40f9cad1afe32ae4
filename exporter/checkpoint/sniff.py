"""What a file is, by its first bytes. Names and extensions are never asked."""

import re
import stat
from pathlib import Path
from typing import Literal

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, UsageError

__all__ = ["Container", "require_regular", "sniff"]

Container = Literal["zip", "pickle", "safetensors"]

# What people pass by mistake, by its signature: a better reason than "unrecognised".
_KNOWN = (
    (rb"version https://git-lfs", "a git-lfs pointer, not the file itself; run `git lfs pull`"),
    (
        rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|\?xml|!--)",
        "a web page; download the file itself",
    ),
    (rb"\x1f\x8b|\xfd7zXZ|\x28\xb5\x2f\xfd|BZh", "compressed; unpack it first"),
    (rb"\x89HDF", "an HDF5 file, which is no PyTorch checkpoint; convert it to safetensors"),
    (rb"GGUF", "a GGUF file, which holds quantised weights; give the original checkpoint"),
    (rb"\x7fELF|MZ", "a program or native library; give a checkpoint"),
    (rb"\s*[\[{]", "a JSON text; give the file with the weights, or the folder of both"),
)


def require_regular(path: Path) -> None:
    """Raise UsageError unless `path` (symlinks followed) is a regular file; never opens a FIFO."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{show(path)}: there is no such file; check the path") from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{show(path)}: not a regular file; give a checkpoint file or folder")


def sniff(path: Path) -> Container:
    """The container format of a file.

    Raises:
        UsageError: the file does not exist or is no regular file.
        CorruptInput: it is empty, something else, or nothing known.
    """
    require_regular(path)
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise CorruptInput(f"{show(path)}: the file is empty; fetch or save it again")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head[257:262] == b"ustar":
        raise CorruptInput(
            f"{show(path)}: a tar archive; if torch < 0.2 wrote it, save the weights again with a"
            " newer torch, else unpack it first"
        )
    # Byte 8 of a safetensors file opens its JSON header. The eight before it are a length, which is
    # never text: eight printable bytes would be 2**61 at least.
    if head[8:9] == b"{" and not re.match(rb"[\t-\r -~]{8}", head):
        return "safetensors"
    for signature, what in _KNOWN:
        if re.match(signature, head, re.IGNORECASE):
            raise CorruptInput(f"{show(path)}: {what}")
    return "pickle"  # protocols 0 and 1 have no signature: the pickle reader judges
