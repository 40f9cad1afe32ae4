"""A job of backward forms: how else a session can be asked for the same gradient."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fuseport.exporter.child.spent import Spent
from fuseport.exporter.program import one_line, real, regions
from fuseport.exporter.program.backward_forms import (
    AT_ONCE,
    FORMS,
    TRACED_AGAIN,
    Gradients,
    agree,
    plain,
)
from fuseport.exporter.runtimes._layouts import apart
from fuseport.exporter.runtimes._torch_module import ModuleSession

__all__ = ["run_forms"]

_LARGE = 64 * 2**20  # bytes of gradients, of which a child shall not hold two sets

Tensors = Mapping[str, Tensor]


def run_forms(
    session: Any,
    way: str,
    inputs: Tensors,
    cotangents: Tensors,
    write_to: Callable[[int], Path],
    spent: Spent,
) -> dict[str, Any]:
    """Every form that the session has.

    The plain gradient is on disk, not in memory, while forms run.

    Args:
        session: of a gradient program, or of one with autograd.
        way: `forms` of a program, or `autograd forms`.
        inputs: by name.
        cotangents: by output.
        write_to: the file of a call; the plain gradient is call 1, and a form that differs from it
            in its bits has one of its own, brought back to what the plain one should be.
        spent: to count the time in.

    Returns:
        `calls`, the numbers of these, and `forms`: of each its name, the number of its call if it
        has one, and an error if it raised one.
    """
    by_autograd = way.startswith("autograd")
    if by_autograd and isinstance(session, ModuleSession):
        asked = session.asked(inputs, cotangents)
        with regions.called() as inside:
            try:
                expected = _real(plain(asked))
            except (RuntimeError, ValueError) as error:
                raise session.explained(error) from error
        without = TRACED_AGAIN if inside else ()
        forms = {name: _of(form, asked) for name, form in FORMS.items() if name not in without}
        if sum(t.nbytes for t in expected.values() if t is not None) > _LARGE:
            forms.pop(AT_ONCE, None)
    else:
        call = _call(session, by_autograd, inputs)
        expected = call(cotangents)
        forms = {
            "of the opposite cotangents": lambda: _opposite(call, cotangents),
            "accumulated over two calls": lambda: _accumulated(call, cotangents),
        }
    if not any(t is not None for t in expected.values()):
        return {"calls": [], "forms": []}
    with spent.on("comparing"):
        names = _save(expected, write_to(1))
    del expected
    calls, found = [1], []
    for number, (name, form) in enumerate(forms.items(), 2):
        entry: dict[str, Any] = {"name": name, "call": None, "error": None}
        try:
            for gradients, factor in form():
                with spent.on("comparing"):
                    if _same(write_to(1), names, gradients, factor):
                        continue
                    _save(
                        {n: None if g is None else g / factor for n, g in gradients.items()},
                        write_to(number),
                    )
                    entry["call"] = number
                    calls.append(number)
                    break
        except Exception as error:  # a runtime can raise anything: that is what the row says
            entry["error"] = one_line(error)
        found.append(entry)
    return {"calls": calls, "forms": found}


def _of(form: Any, asked: Any) -> Callable[[], Iterator[tuple[Gradients, float]]]:
    return lambda: ((_real(gradients), factor) for gradients, factor in form(asked))


def _real(gradients: Gradients) -> Gradients:
    return {name: None if g is None else real(g) for name, g in gradients.items()}


def _call(session: Any, by_autograd: bool, inputs: Tensors) -> Callable[[Tensors], Gradients]:
    """Cotangents → gradients, by the runtime's autograd or by the program."""

    def call(cotangents: Tensors) -> Gradients:
        if by_autograd:
            results = session.differentiate(inputs, cotangents)
        else:
            results = session.run(
                {**inputs, **{f"cotangent_{n}": t for n, t in cotangents.items()}}
            )
        return {
            n.removeprefix("grad/"): None if t is None else t.detach()
            for n, t in results.items()
            if n.startswith("grad/")
        }

    return call


def _opposite(
    call: Callable[[Tensors], Gradients], cotangents: Tensors
) -> Iterator[tuple[Gradients, float]]:
    yield call({name: -cotangent for name, cotangent in cotangents.items()}), -1.0


def _accumulated(
    call: Callable[[Tensors], Gradients], cotangents: Tensors
) -> Iterator[tuple[Gradients, float]]:
    """By a host that adds up what two calls give."""
    total = call(cotangents)
    for name, gradient in call(cotangents).items():
        before = total[name]
        total[name] = None if before is None or gradient is None else before + gradient
    yield total, 2.0


def _save(gradients: Gradients, file: Path) -> list[str]:
    kept = {
        f"grad/{n}": t.detach().cpu().contiguous() for n, t in gradients.items() if t is not None
    }
    save_file(apart(kept), file)
    return list(gradients)


def _same(file: Path, names: list[str], found: Gradients, factor: float) -> bool:
    """Whether gradients are those on disk, times a factor.

    Raises:
        RuntimeError: one is there or not, unlike the plain one: no comparison of values.
    """
    same = True
    with safe_open(file, "pt") as stored:
        known = set(stored.keys())
        for name, gradient in found.items():
            there = f"grad/{name}" in known
            if name not in names or there != (gradient is not None):
                raise RuntimeError(f"grad/{name} is {'not ' * there}there, unlike the plain one")
            plain = stored.get_tensor(f"grad/{name}") if there else None
            same = same and agree(None if gradient is None else gradient.cpu(), plain, factor)
    return same
