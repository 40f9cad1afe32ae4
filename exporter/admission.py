"""Which artifacts may be loaded: those of this user's own exports, and what is only data.

TorchScript, exported programs and AOTInductor packages are programs: one from elsewhere is loaded
only where the user vouches for its hash. An ONNX file is data, but it names other files to read and
operators to run; it is held against what it may name before a runtime sees it.
"""

from pathlib import Path

from fuseport.exporter import runtimes
from fuseport.exporter.bundle import Bundle, hash_file, trust
from fuseport.exporter.inspect import packages
from fuseport.exporter.inspect.isolated import ask

__all__ = ["admit", "check_programs", "refused"]

_DATA = ("onnx", "onnx_native")
_PACKAGES = ("exported_program", "aot_inductor")


def refused(runtime: str, bundle: Bundle, artifact: Path | None) -> str | None:
    """Why a runtime must not load what there is: it is a program of unknown origin; else None.

    Args:
        runtime: its name.
        bundle: whose artifacts are to be loaded.
        artifact: a file that is to be loaded instead; None for the bundle's own.
    """
    form = runtimes.get(runtime).FORMAT
    if form is None or form in _DATA:
        return None
    sha256 = _vouched_by(bundle, artifact)
    if trust.is_trusted(sha256):
        return None
    known = (file["sha256"] for file in bundle.manifest["files"].values())
    if sha256 in known and trust.is_trusted(bundle.sha256):
        return None  # the bundle's own, or a copy; a program is whole in its file
    return (
        f"{artifact or bundle.folder}: {form} is a program, and this user has not exported it; if "
        f"you trust where it comes from: --trust-native {sha256}"
    )


def check_programs(runtime: str, bundle: Bundle, artifact: Path | None) -> None:
    """Hold packages that are trusted, and about to be loaded, against what no export writes.

    Args:
        runtime: its name.
        bundle: whose files are to be loaded.
        artifact: a file that is to be loaded instead, if it is of the format.

    Raises:
        UnsafeInput: a package has a pickle of more than tensors in it, or a member that leads out.
        CorruptInput: it is damaged.
    """
    form = runtimes.get(runtime).FORMAT
    if form not in _PACKAGES:
        return
    entries = bundle.manifest["artifacts"]
    own = [bundle.folder / e["file"] for e in entries if e["format"] == form]
    for file in own if artifact is None else [artifact]:
        if file.suffix == ".pt2":
            packages.check(file)


def admit(bundle: Bundle, artifact: Path | None) -> None:
    """Hold ONNX files of unknown origin against what such a file may name.

    They are parsed in a child process.

    Args:
        bundle: whose files are to be loaded.
        artifact: a file that is to be loaded instead, if it is of the format.

    Raises:
        UnsafeInput: external data lies outside the file's folder, or is no plain file.
        CorruptInput: it is no valid model, or its external data is not there.
        Missing: an operator, or a version of the operators, that no runtime here knows.
        RuntimeCrash: reading it took too much time or memory.
    """
    if trust.is_trusted(_vouched_by(bundle, artifact)):
        return
    entries = bundle.manifest["artifacts"]
    own = [bundle.folder / e["file"] for e in entries if e["format"] in _DATA]
    for file in own if artifact is None else [artifact]:
        if file.suffix == ".onnx":
            ask("admissible", path=str(file.absolute()))


def _vouched_by(bundle: Bundle, artifact: Path | None) -> str:
    """The hash that trust goes by: a file's own from elsewhere, the manifest's for the bundle's."""
    return bundle.sha256 if artifact is None else hash_file(artifact)
