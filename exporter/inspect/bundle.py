"""A bundle: what its manifest says, and whether its files are as it says."""

from collections import Counter
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import WEIGHTS, differences, machine, read_manifest
from fuseport.exporter.bundle.trust import is_trusted
from fuseport.exporter.inspect import known

__all__ = ["found"]


def found(folder: Path) -> dict[str, Any]:
    """Programs, artifacts, ops, versions, trust, and every file that is not as it was written.

    Raises:
        CorruptInput: the manifest is damaged or was edited.
        Missing: another version of fuseport wrote it.
    """
    manifest, sha256 = read_manifest(folder)
    files = manifest["files"]
    artifacts = [
        {**artifact, "bytes": files.get(artifact["file"], {}).get("bytes")}
        for artifact in manifest["artifacts"]
    ]
    native = [a["file"] for a in artifacts if a["format"] == "aot_inductor"]
    libraries = [
        {**entry, "here": machine.unlike(entry) or "runs here"}
        for entry in manifest.get("libraries", ())
    ]
    return {
        "what": f"a bundle of {manifest['architecture']['name']}",
        "sha256": sha256,
        "differences": [
            {"file": name, "state": state} for name, state in differences(folder, files)
        ],
        "files": len(files),
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "trusted": is_trusted(sha256),
        "machine_code": native + [entry["file"] for entry in libraries],
        "checkpoint": manifest["checkpoint"],
        "architecture": manifest["architecture"],
        "parameters": {**manifest["parameters"], "bytes": files.get(WEIGHTS, {}).get("bytes")},
        "programs": manifest["programs"],
        "artifacts": artifacts,
        "libraries": libraries,
        "ops": known.of_ops(Counter(dict.fromkeys(manifest["ops"], 0))),
        "unknown_ops": _unknown(manifest["ops"]),
        "samples": sum(name.startswith("samples/") for name in files),
        "versions": manifest["versions"],
        "notes": manifest["notes"],
    }


def _unknown(operators: dict[str, str]) -> list[str]:
    held = {
        o
        for entry in known.of_ops(Counter(dict.fromkeys(operators, 0)))
        for o in entry["operators"]
    }
    return sorted(set(operators) - held)
