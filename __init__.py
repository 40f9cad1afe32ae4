"""fuseport: export models with fused custom ops, and prove outputs and gradients."""

from typing import TYPE_CHECKING, Any

__all__ = ["export", "ops", "shims", "verify"]
__version__ = "0.1.0"

_FOLDERS = {"ops": "fuseport.ops", "shims": "fuseport.exporter.shims"}

if TYPE_CHECKING:
    from fuseport import ops
    from fuseport.exporter import shims
    from fuseport.exporter.api import export, verify


def __getattr__(name: str) -> Any:
    # Lazily, so that `import fuseport` stays free of torch and takes milliseconds.
    if name in _FOLDERS:
        import importlib

        return importlib.import_module(_FOLDERS[name])
    if name in __all__:
        from fuseport.exporter import api

        return getattr(api, name)
    raise AttributeError(f"module 'fuseport' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
