"""Counts of operators by domain, and what is known of those that are none of the runtime's own."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from fuseport.ops import OPS, build, support
from fuseport.ops.spec import NAMESPACE

__all__ = ["of_ops", "of_torch", "tally", "total"]

_TORCH = frozenset(["aten", "prim", "prims", "python", "higher_order"])


def tally(
    counts: Mapping[tuple[str, str], int], judge: Callable[[str, str], str | None]
) -> dict[str, Any]:
    """Counts by domain and operator, and under `custom` what `judge` says of each that is custom.

    `judge` gives None for a runtime's own operator.
    """
    domains: dict[str, dict[str, int]] = {}
    for (domain, name), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        domains.setdefault(domain, {})[name] = count
    custom = []
    for (domain, name), count in sorted(counts.items()):
        said = judge(domain, name)
        if said is not None:
            known = not said.startswith("unknown")
            custom.append({"op": f"{domain}::{name}", "count": count, "known": known, "as": said})
    return {"counts": domains, "nodes": sum(counts.values()), "custom": custom}


def of_torch(domain: str, name: str) -> str | None:
    """What an operator of torch's dispatcher is; None for torch's own."""
    if domain in _TORCH:
        return None
    for spec in OPS.values():
        if any(o.qualified_name == f"{domain}::{name}" for o in spec.operators):
            return f"registered: the op {spec.name}"
    if domain == NAMESPACE:
        return "unknown: no op of this version of fuseport"
    return "unknown: no registered op; its library must be loaded first"


def of_ops(counts: Counter[str]) -> list[dict[str, Any]]:
    """What the ops have that operators (`fuseport::<name>`, with counts) belong to."""
    needed = []
    for spec in OPS.values():
        names = [o.qualified_name for o in spec.operators if o.qualified_name in counts]
        if not names:
            continue
        has = support.support(spec)
        native = has["CPU"].present
        compiled = native and build.cached(spec) is not None
        needed.append(
            {
                "op": spec.name,
                "operators": {name: counts[name] for name in names},
                "registered": True,
                "onnx": has["ONNX portable"].present,
                "onnx_native": has["ONNX native"].present,
                "differentiable": has["autograd"].present,
                "cpu": ("compiled" if compiled else "compiles on first use") if native else None,
                "reasons": {n: cell.reason for n, cell in has.items() if cell.reason is not None},
            }
        )
    return needed


def total(dtypes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """`elements` and `bytes` of all dtypes together, and by dtype."""
    return {
        "elements": sum(entry["elements"] for entry in dtypes.values()),
        "bytes": sum(entry["bytes"] for entry in dtypes.values()),
        "dtypes": dict(dtypes),
    }
