"""fuseport: export models with fused custom ops, and prove outputs and gradients."""

from typing import TYPE_CHECKING, Any

__all__ = ["export", "shims", "verify"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from fuseport.exporter import shims
    from fuseport.exporter.api import export, verify


def __getattr__(name: str) -> Any:
    # Lazily, so that `import fuseport` stays free of torch and takes milliseconds.
    if name == "shims":
        import importlib

        return importlib.import_module("fuseport.exporter.shims")
    if name in __all__:
        from fuseport.exporter import api

        return getattr(api, name)
    raise AttributeError(f"module 'fuseport' has no attribute {name!r}")
