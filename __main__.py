"""The command, as `python -m fuseport`: for where scripts of a Python are not on the path."""

from fuseport.cli import main

if __name__ == "__main__":
    main()
