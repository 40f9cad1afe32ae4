"""Every submodule of `triton` that has no file of its own: all its names are placeholders."""

from fuseport.exporter.shims._triton import Placeholder

__all__: list[str] = []


def __getattr__(name: str) -> Placeholder:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Placeholder(f"{__name__}.{name}")
