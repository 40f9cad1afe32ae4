"""The line of a runtime's error that tells."""

__all__ = ["telling_line"]


def telling_line(text: str) -> str:
    """The first line; of libtorch's interpreter the last: its first ones tell where it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return lines[-1] if "failed in the TorchScript interpreter" in lines[0] else lines[0]
