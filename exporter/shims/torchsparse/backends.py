"""Settings, which code may read and write; of no effect."""

__all__ = ["allow_fp16", "allow_tf32", "benchmark", "hash_rsv_ratio", "init"]

allow_tf32 = False
allow_fp16 = False
benchmark = False
hash_rsv_ratio = 2


def init() -> None:
    """As there."""
