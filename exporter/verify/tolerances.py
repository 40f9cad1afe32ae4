"""The user's tolerances, by tensor: `--atol 1e-5 --atol out0:1e-4`."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.compare import Tolerance

__all__ = ["Tolerances", "parsed"]

_EVERY = "*"
_WILD = "*?["


@dataclass(frozen=True)
class Tolerances:
    """Tolerances by patterns of tensors' names, as `fnmatch` has them: `grad/*.bias`.

    Of the patterns that fit a name, the most specific counts: the name itself, then the pattern
    with the most characters that are no wildcards, of equals the last. A tensor that only `atol`
    has a pattern for has a relative tolerance of 0, and the reverse; one that none has a pattern
    for goes by the rule of the baseline.
    """

    atol: Mapping[str, float] = field(default_factory=dict)
    rtol: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def everywhere(cls, tolerance: Tolerance) -> "Tolerances":
        """One tolerance for all tensors."""
        return cls({_EVERY: tolerance.atol}, {_EVERY: tolerance.rtol})

    def of(self, name: str) -> Tolerance | None:
        """The tolerance of a tensor; None where the rule applies."""
        atol, rtol = _best(self.atol, name), _best(self.rtol, name)
        if atol is None and rtol is None:
            return None
        return Tolerance(atol or 0.0, rtol or 0.0)

    def check(self, names: Collection[str]) -> None:
        """Raise UsageError for a pattern that fits no name: it is misspelt, or would judge nothing.

        Args:
            names: of all tensors that are compared.
        """
        for option, given in (("--atol", self.atol), ("--rtol", self.rtol)):
            for pattern in given:
                if pattern != _EVERY and not any(_fits(pattern, name) for name in names):
                    near = get_close_matches(pattern, sorted(names), n=3, cutoff=0.3)
                    there_are = near or sorted(names)[:3]
                    raise UsageError(
                        f"{option} {pattern}: no tensor is called so; "
                        f"there are {', '.join(there_are)}{', …' * (len(names) > len(there_are))}"
                    )

    def fitting(self, names: Collection[str]) -> "Tolerances":
        """Those of patterns that fit one of `names`: of settings that several bundles share."""
        atol, rtol = (
            {p: v for p, v in given.items() if p == _EVERY or any(_fits(p, n) for n in names)}
            for given in (self.atol, self.rtol)
        )
        return Tolerances(atol, rtol)

    def __str__(self) -> str:
        options = (("--atol", self.atol), ("--rtol", self.rtol))
        return " ".join(
            f"{option} {'' if pattern == _EVERY else f'{pattern}:'}{value:g}"
            for option, given in options
            for pattern, value in given.items()
        )


def parsed(atol: Sequence[str], rtol: Sequence[str]) -> Tolerances | None:
    """What the options say, each `VALUE` or `NAME:VALUE`; None where none is given.

    Raises:
        UsageError: one is neither, or no number from 0 on.
    """
    if not atol and not rtol:
        return None
    return Tolerances(dict(_pairs("--atol", atol)), dict(_pairs("--rtol", rtol)))


def _pairs(option: str, given: Sequence[str]) -> Iterable[tuple[str, float]]:
    seen = set()
    for text in given:
        # A name may have colons of its own: the number is what comes after the last.
        name, colon, number = text.rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (0.0 <= value < math.inf) or (colon and not name):
            raise UsageError(f"{option} {text}: give a number from 0 on, or NAME:NUMBER")
        pattern = name or _EVERY
        if pattern in seen:
            raise UsageError(f"{option} {text}: {pattern} has a tolerance already")
        seen.add(pattern)
        yield pattern, value


def _best(given: Mapping[str, float], name: str) -> float | None:
    fitting = [pattern for pattern in given if _fits(pattern, name)]
    # `max` takes the first of equals: in reverse, that is the last.
    best = max(reversed(fitting), key=lambda pattern: _specific(pattern, name), default=None)
    return None if best is None else given[best]


def _fits(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def _specific(pattern: str, name: str) -> tuple[bool, int]:
    return pattern == name, sum(character not in _WILD for character in pattern)
