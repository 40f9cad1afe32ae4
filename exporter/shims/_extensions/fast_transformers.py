"""Stands in for extensions of idiap/fast-transformers that have no form in torch here.

They hash queries, cluster them, and attend to what is chosen by that; the package imports all of
them, whatever attention a model has: any name is there, and says so when it is called.
"""

from collections.abc import Callable
from typing import NoReturn

from fuseport.exporter.shims._placeholder import refusing

__all__: list[str] = []


def __getattr__(name: str) -> Callable[..., NoReturn]:
    reason = (
        f"fast_transformers' {name} was called, of attention by clusters, hashes or the best "
        "keys, of which fuseport has no form: attention of the types linear, causal-linear, "
        "local and full has one"
    )
    return refusing(f"module {__name__!r}", name, reason)
