"""What runtimes gave, kept in a folder: one machine makes it, another compares it.

    outputs.json        what it is of, and every file's hash
    <n>.<call>.safetensors

A folder belongs to one bundle, by the hash of its manifest, and to inputs, by their hashes.
"""

import hashlib
import json
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fuseport.exporter import runtimes
from fuseport.exporter.bundle import Bundle, hash_file
from fuseport.exporter.bundle.staging import replaced
from fuseport.exporter.describe import environment
from fuseport.exporter.errors import CorruptInput, Missing, StorageError, UsageError
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.run import Answer
from fuseport.exporter.verify.sample import Sample

__all__ = ["INDEX", "SCHEMA", "Recorder", "Saved", "load", "recording"]

SCHEMA = "fuseport.outputs/1"
INDEX = "outputs.json"

_SELF = "self_sha256"


class Recorder:
    """Takes answers into a folder.

    Args:
        folder: to write to; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._answers: dict[str, list[dict[str, Any]]] = {}
        self._inputs: dict[str, str] = {}

    def expect(self, runtimes: Iterable[str]) -> None:
        """Whose answers come, in the order in which they are to be kept: those that run at once
        answer in any."""
        self._answers = {name: [] for name in runtimes}

    def keep(self, answer: Answer, sample: Sample) -> None:
        """Copy an answer's tensors, and note what they are of.

        Raises:
            OSError: they cannot be written.
        """
        if self._folder is None:
            return
        files: dict[str, dict[str, Any]] = {}
        number = sum(map(len, self._answers.values()))
        for call, path in (answer.calls or {}).items():
            name = f"{number}.{call}.safetensors"
            shutil.copyfile(path, self._folder / name)
            digest = hash_file(self._folder / name)
            files[str(call)] = {"file": name, "sha256": digest}
        job = answer.job
        if job.case not in self._inputs:
            self._inputs[job.case] = _inputs_sha256(sample)
        self._answers.setdefault(job.runtime, []).append(
            {
                "runtime": job.runtime,
                "artifact": job.artifact.name,
                "program": job.program,
                "way": job.way,
                "case": job.case,
                "status": answer.status,
                "reason": answer.reason,
                "mutated": list(answer.mutated),
                "forms": [list(form) for form in answer.forms],
                "drew": answer.drew,
                "files": files,
            }
        )

    def content(self) -> dict[str, Any]:
        """What is known of the answers and of their inputs."""
        return {"inputs": self._inputs, "answers": [*chain.from_iterable(self._answers.values())]}


@contextmanager
def recording(
    target: Path | None, bundle: Bundle, seeds: Sequence[int], device: str = "cpu"
) -> Iterator[Recorder]:
    """A recorder whose folder is at `target` on leaving, whole; if the body raises, nothing is.

    Args:
        target: a folder that is not there yet, or is empty; None records nothing.
        bundle: whose artifacts are run.
        seeds: of the cases, see `plan.seeded`.
        device: that runtimes compute on.

    Raises:
        UsageError: something is at the target.
        StorageError: writing failed.
    """
    if target is None:
        yield Recorder(None)
        return

    def check() -> None:
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise UsageError(f"{target}: a file or a link is there; choose another folder")
        if target.is_dir() and any(target.iterdir()):
            raise UsageError(f"{target}: it is not empty; choose another folder")

    with replaced(target, check) as folder:
        recorder = Recorder(folder)
        yield recorder
        content = {
            "schema": SCHEMA,
            "bundle": bundle.folder.name,
            "manifest_sha256": bundle.sha256,
            "environment": environment(device),
            "seeds": list(seeds),
            **recorder.content(),
        }
        content[_SELF] = _digest(content)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Saved:
    """Outputs on disk, whose files are as they were written.

    Attributes:
        folder: where they are.
        seeds: of the cases, see `plan.seeded`.
        device: that they were computed on.
        note: a sentence on where they come from.
        entries: of the answers, as in the index.
        inputs: by case, a hash of its inputs and cotangents.
    """

    folder: Path
    seeds: tuple[int, ...]
    device: str
    note: str
    entries: tuple[Mapping[str, Any], ...]
    inputs: Mapping[str, str]

    def jobs(self, bundle: Bundle, chosen: Sequence[str] | None) -> dict[str, list[Job]]:
        """By runtime, the jobs whose answers are here.

        Args:
            bundle: that they are of.
            chosen: names of runtimes; None for all that are here.

        Raises:
            UsageError: there is nothing of a runtime that was chosen.
        """
        found: dict[str, list[Job]] = {}
        for entry in self.entries:
            found.setdefault(entry["runtime"], []).append(_job(bundle, entry))
        for name in chosen or ():
            if name not in found:
                raise UsageError(f"{self.folder}: has nothing of {name}, only {', '.join(found)}")
        return {name: jobs for name, jobs in found.items() if chosen is None or name in chosen}

    def answers(
        self, jobs: Sequence[Job], samples: Mapping[str, Sample]
    ) -> Generator[Answer, None, None]:
        """The answers of jobs, in their order.

        Raises:
            CorruptInput: their inputs are not those that the cases have here.
        """
        by_job = {_key(entry): entry for entry in self.entries}
        for job in jobs:
            if job.case not in samples or self.inputs[job.case] != _inputs_sha256(
                samples[job.case]
            ):
                raise CorruptInput(
                    f"{self.folder}: the inputs of the case {job.case!r} are not those that it has "
                    "here: make the outputs again, with this bundle and version"
                )
            entry = by_job[job.runtime, job.artifact.name, job.program, job.way, job.case]
            files = {int(n): self.folder / f["file"] for n, f in entry["files"].items()}
            yield Answer(
                job,
                entry["status"],
                entry["reason"],
                files or None,
                tuple(entry["mutated"]),
                tuple((name, call, error) for name, call, error in entry["forms"]),
                drew=entry.get("drew") is True,  # older ones do not say
            )


def load(folder: Path, bundle: Bundle) -> Saved:
    """Outputs that `recording` wrote.

    Raises:
        UsageError: there is no such folder.
        CorruptInput: they are of another bundle, or a file is missing or has changed.
        Missing: another version of fuseport wrote them.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; verify --save-outputs writes one")
    index = folder / INDEX
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get(_SELF) != _digest(content):
            raise ValueError("changed since it was written")
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptInput(f"{index}: no index of outputs: {error}; make them again") from error
    if content["schema"] != SCHEMA:
        raise Missing(f"{index}: written as {content['schema']}, this fuseport reads {SCHEMA}")
    if content["manifest_sha256"] != bundle.sha256:
        raise CorruptInput(
            f"{folder}: made by another bundle than {bundle.folder}: its manifest is "
            f"{content['manifest_sha256'][:12]}…, this one {bundle.sha256[:12]}…"
        )
    for entry in content["answers"]:
        if entry["runtime"] not in runtimes.RUNTIMES:
            raise Missing(f"{index}: this fuseport has no runtime {entry['runtime']}")
        for file in entry["files"].values():
            path = folder / Path(file["file"]).name
            if not path.is_file() or path.is_symlink() or hash_file(path) != file["sha256"]:
                raise CorruptInput(f"{path}: missing, or changed since it was written")
    made = content["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items() if k != "fuseport")
    note = f"outputs were made elsewhere: {made['system']}, {versions}"
    return Saved(
        folder,
        tuple(content["seeds"]),
        made.get("device", "cpu"),
        note,
        tuple(content["answers"]),
        content["inputs"],
    )


def _job(bundle: Bundle, entry: Mapping[str, Any]) -> Job:
    artifact = bundle.folder / Path(entry["artifact"]).name
    return Job(entry["runtime"], artifact, entry["program"], entry["way"], entry["case"])


def _key(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("runtime", "artifact", "program", "way", "case"))


def _inputs_sha256(sample: Sample) -> str:
    """A hash of a case's inputs and cotangents: names, dtypes, shapes and bits."""
    whole = hashlib.sha256()
    try:
        with safe_open(sample.file, "np") as file:
            for name in sorted(file.keys()):
                if not name.startswith("truth/"):
                    part = file.get_slice(name)
                    whole.update(f"{name}\0{part.get_dtype()}\0{part.get_shape()}\0".encode())
        with safe_open(sample.file, "pt") as file:
            for name in sorted(file.keys()):
                if not name.startswith("truth/"):
                    whole.update(_bytes(file.get_tensor(name)))
    except (OSError, RuntimeError) as error:  # torch opens files, too, and has its own error
        raise StorageError(f"{sample.file}: cannot be read: {error}") from error
    return whole.hexdigest()


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != _SELF}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
