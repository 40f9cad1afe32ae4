"""The child process: `python -m fuseport.exporter.runtimes._worker REQUEST`.

REQUEST is a JSON file, written by `fuseport.exporter.verify.run`. A line on standard input allows
one more job; its end ends the child. For each job the child leaves `<id>.started`, `<id>.loaded`
once the artifact is, and a result: `<id>.<call>.safetensors` with tensors, and `<id>.json`. It
repeats each job, and hands the results of a later call back only where they are not the first's,
bit for bit.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter import runtimes
from fuseport.exporter.child import die_with_parent
from fuseport.exporter.child.confined import work_in
from fuseport.exporter.child.spent import OF_CHILD, Spent
from fuseport.exporter.runtimes import Session, Unsupported
from fuseport.exporter.runtimes._device import place_of
from fuseport.exporter.runtimes._forms import run_forms
from fuseport.exporter.runtimes._layouts import apart, lay_out
from fuseport.exporter.runtimes._reason import telling_line
from fuseport.exporter.user_code.op_choice import own_ops

__all__ = ["failure", "main", "standard_input", "write"]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Around = Callable[[Mapping[str, Any]], AbstractContextManager[Any]]


def main(request_file: str, around: Around = nullcontext) -> None:
    """Do all jobs of a request.

    Args:
        request_file: see above.
        around: of a job, what to run it in, once its artifact is loaded.
    """
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    die_with_parent()
    allowed = standard_input()
    folder = Path(request["folder"])
    # What a runtime unpacks goes with the folder, even if this process is killed.
    work_in(folder)
    with own_ops(request["own_ops"]):
        _work(request, allowed, folder, around)


def _work(request: Mapping[str, Any], allowed: IO[bytes], folder: Path, around: Around) -> None:
    sessions: dict[tuple[str, str], Session | dict[str, Any]] = {}
    spent = Spent()
    spent.add({"loading": time.time() - psutil.Process().create_time()})  # Python and torch
    for job in request["jobs"]:
        if not allowed.readline():
            return
        here = job["artifact"], job["program"].get("kind", "forward")
        if here not in sessions:
            # One artifact at a time: models can be large. Before the start: what dies of taking the
            # last one down has not died of this one.
            sessions.clear()
        (folder / f"{job['id']}.started").touch()
        if here not in sessions:
            with spent.on("loading"):
                sessions[here] = _load(job)
        (folder / f"{job['id']}.loaded").touch()
        session = sessions[here]
        with around(job):
            answer = session if isinstance(session, dict) else _run(session, job, folder, spent)
        took = {part: spent.seconds[part] for part in OF_CHILD}
        write(folder / f"{job['id']}.json", {**answer, "spent": took, "token": request["token"]})
        spent = Spent()


def standard_input() -> IO[bytes]:
    """Standard input for this file alone; whatever else reads it finds it empty."""
    own = os.fdopen(os.dup(0), "rb", buffering=0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return own


def _load(job: Mapping[str, Any]) -> Session | dict[str, Any]:
    try:
        return runtimes.get(job["runtime"]).load(Path(job["artifact"]), job["program"])
    except Exception as error:  # whatever a runtime raises becomes a row of the report
        return failure("cannot load the artifact", error)


def _run(session: Session, job: Mapping[str, Any], folder: Path, spent: Spent) -> dict[str, Any]:
    place = place_of(session)
    with spent.on("comparing"):
        inputs, cotangents = _passed(job, place)
    state = _random_state()
    if job["way"].endswith("forms"):
        try:
            with spent.on("running"):
                done = run_forms(
                    session,
                    job["way"],
                    inputs,
                    cotangents,
                    lambda call: folder / f"{job['id']}.{call}.safetensors",
                    spent,
                )
        except Exception as error:  # as above
            return failure("the plain gradient failed", error)
        return {"status": "done", "mutated": [], "drew": _random_state() != state, **done}
    calls: list[int] = []
    for call in range(1, job["repeats"] + 1):
        try:
            results = _called(session, job["way"], inputs, cotangents, spent)
        except Exception as error:  # as above
            return failure(f"call {call} failed", error)
        with spent.on("comparing"):
            found = {n: t.detach().cpu().contiguous() for n, t in results.items() if t is not None}
            del results
            # On disk, so that later results of a large model do not lie in memory beside the first.
            if call == 1 or not _same(folder / f"{job['id']}.1.safetensors", found):
                try:
                    save_file(apart(found), folder / f"{job['id']}.{call}.safetensors")
                except Exception as error:  # no room, or a dtype that the file format lacks
                    return failure(f"what call {call} gave cannot be written", error)
                calls.append(call)
            del found
    with spent.on("comparing"):
        given, seeds = _passed(job, place)
        mutated = _changed(given, inputs) + [f"cotangent_{n}" for n in _changed(seeds, cotangents)]
    drew = _random_state() != state
    return {"status": "done", "calls": calls, "mutated": mutated, "drew": drew}


def _random_state() -> tuple[Any, ...]:
    """What random numbers come next where code draws some."""
    return random.getstate(), torch.get_rng_state().numpy().tobytes()


def _called(
    session: Session,
    way: str,
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    spent: Spent,
) -> Mapping[str, Tensor | None]:
    begin = time.monotonic()
    results: Mapping[str, Tensor | None]
    if way == "autograd":
        results = session.differentiate(inputs, cotangents)  # type: ignore[attr-defined]
    else:
        named = {f"cotangent_{name}": tensor for name, tensor in cotangents.items()}
        results = session.run({**inputs, **named})
    passed = time.monotonic() - begin
    # Handing tensors to another process and back is no running.
    running = getattr(session, "seconds", None) or passed
    spent.add({"running": running, "comparing": passed - running})
    return results


def _passed(
    job: Mapping[str, Any], place: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and cotangents on a device, laid out in memory as the case wants them."""

    def read(kind: str, names: Iterable[str], layout: str) -> dict[str, Tensor]:
        with safe_open(job["tensors"], "pt") as file:
            return {n: lay_out(file.get_tensor(f"{kind}/{n}").to(place), layout) for n in names}

    layout = job["layout"]
    return read("input", job["inputs"], layout), read("cotangent", job["cotangents"], layout)


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    return [n for n in before if not torch.equal(_bits(before[n]), _bits(after[n]))]


def _same(first: Path, found: Mapping[str, Tensor]) -> bool:
    with safe_open(first, "pt") as file:
        if set(file.keys()) != set(found):
            return False
        for name, tensor in found.items():
            other = file.get_tensor(name)
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                return False
            if not torch.equal(_bits(other), _bits(tensor)):
                return False
    return True


def _bits(tensor: Tensor) -> Tensor:
    """The same values as integers, so that NaN equals NaN and -0.0 is not 0.0; no copy if it is
    contiguous, since results of a large model should not lie in memory twice."""
    dense = tensor.detach().contiguous()
    # A dimension of size 1 keeps its stride, which a view needs to be 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64)) if flat.numel() else flat


def failure(what: str, error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    status = "unsupported" if isinstance(error, Unsupported) else "error"
    reason = f"{what}: {type(error).__name__}: {telling_line(str(error))}"
    return {"status": status, "reason": str(error) if status == "unsupported" else reason}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """In one step, so that a result is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    main(sys.argv[1])
