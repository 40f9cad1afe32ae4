"""What a `fuseport.toml` says is exported and verified, all of it, with one verdict.

`config` reads the file, `run` does what it says, `expected` knows the failures that the file
expects, `reuse` spares exports of what has not changed, and `report` is what comes of it.
"""
