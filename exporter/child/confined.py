"""Runs a Python module in this process, without network and without writing outside some folders.

`python -m fuseport.exporter.child.confined BOUNDS MODULE ARGUMENT...`, BOUNDS being `Bounds` in
JSON. What confines is the Linux kernel: Landlock for files, abstract sockets and signals, a seccomp
filter for sockets. It lasts for this process and all that it starts, and cannot be taken back.
Where the kernel lacks a part, that part is not confined: `available` says so. It contains faults
and careless code; it is no promise that hostile native code finds no way out.

Sources: landlock(7), seccomp(2), linux/landlock.h and linux/seccomp.h of Linux 6.12.
"""

import ctypes
import errno
import json
import os
import platform
import runpy
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

__all__ = ["Bounds", "available", "confine", "main", "work_in"]

# System calls have these numbers on every architecture of Linux.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH

# LANDLOCK_ACCESS_FS_*: those that change something.
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_REFER = 1 << 13
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make of every kind
_SINCE = {2: _REFER, 3: _TRUNCATE}
_OF_A_FILE = _WRITE_FILE | _TRUNCATE
_SCOPES = 0b11  # abstract Unix sockets and signals, since version 6
_SCOPES_SINCE = 6

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl(2)
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | errno.EACCES  # SECCOMP_RET_*
# Machine → AUDIT_ARCH, number of socket(2). io_uring, which opens sockets too, is 425 everywhere.
_SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING_SETUP = 425
_X32 = 0x40000000  # marks the system calls of x86-64's other ABI

# Devices that numerical libraries open for writing.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/shm", "/dev/nvidia*", "/dev/kfd", "/dev/dri")

# CUDA's driver does not start (error 304) without a local socket, nor where it cannot write the
# names of its threads to /proc/self/task, which is another folder in each process that is started.
_OF_A_DRIVER = ("/proc",)
_LOCAL_SOCKET = 1  # AF_UNIX


@dataclass(frozen=True)
class Bounds:
    """What a confined process may do.

    Attributes:
        writable: folders and files that exist, in which it may change what it likes.
        gpu: whether it may have what CUDA's driver needs besides: local sockets, but for abstract
            ones of processes that are not confined as it is, and to write to files of /proc, which
            lets nobody write to the memory of a process that is not confined as it is.
    """

    writable: tuple[Path, ...] = ()
    gpu: bool = False

    def to_json(self) -> str:
        return json.dumps({"writable": [str(path) for path in self.writable], "gpu": self.gpu})

    @staticmethod
    def of_json(text: str) -> "Bounds":
        told = json.loads(text)
        return Bounds(tuple(map(Path, told["writable"])), told["gpu"])


def main(arguments: Sequence[str]) -> None:
    """Confine this process, and be the module."""
    bounds, module, *rest = arguments
    confine(Bounds.of_json(bounds))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def available() -> dict[str, bool]:
    """Which of `files` and `network` this system can confine."""
    return {
        "files": _landlock_version() > 0,
        "network": sys.platform == "linux" and platform.machine() in _SOCKET,
    }


def confine(bounds: Bounds) -> None:
    """Let this process change no file, and open no socket, outside its bounds, from now on.

    To be called while the process has one thread: the others would stay free.

    Raises:
        OSError: the kernel has it, and refuses.
    """
    if sys.platform != "linux":
        return
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    version = _landlock_version()
    if version:
        devices = (path for pattern in _DEVICES for path in glob(pattern))
        drivers = _OF_A_DRIVER if bounds.gpu else ()
        _confine_files([*map(str, bounds.writable), *devices, *drivers], version)
    if platform.machine() in _SOCKET:
        _confine_sockets(*_SOCKET[platform.machine()], local=bounds.gpu)


def work_in(folder: Path) -> None:
    """Have libraries keep what they unpack and remember in a folder, the one that is writable."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # The parent's may be set: torch tells its children so.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


def _landlock_version() -> int:
    """Of the kernel's Landlock; 0 where it has none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)))


def _confine_files(writable: Sequence[str], version: int) -> None:
    changes = _CHANGES | sum(bit for since, bit in _SINCE.items() if version >= since)
    scopes = _SCOPES if version >= _SCOPES_SINCE else 0
    # struct landlock_ruleset_attr: files, TCP ports (sockets are confined below), scopes.
    attributes = struct.pack("=QQQ", changes, 0, scopes)[: 24 if scopes else 8]
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in writable:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = changes if os.path.isdir(path) else changes & _OF_A_FILE
                rule = struct.pack("=Qi", allowed, opened)  # struct landlock_path_beneath_attr
                _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(opened)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _confine_sockets(architecture: int, socket: int, *, local: bool) -> None:
    """Refuse socket(2) and io_uring, and every system call of another ABI, with EACCES.

    Local sockets are not refused where they may be.
    """
    load, equal, above, answer = 0x20, 0x15, 0x35, 0x06  # BPF_LD|ABS, JEQ, JGE, RET
    family = _LOCAL_SOCKET if local else 0xFFFF  # of which there is no socket
    program = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 0, 6, architecture),
        (load, 0, 0, 0),  # seccomp_data.nr
        (above, 4, 0, _X32),
        (equal, 3, 0, _IO_URING_SETUP),
        (equal, 0, 3, socket),
        (load, 0, 0, 16),  # the lower half of seccomp_data.args[0]
        (equal, 1, 0, family),
        (answer, 0, 0, _DENY),
        (answer, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    # struct sock_fprog: a count, padding, a pointer.
    described = struct.pack("@HP", len(program), ctypes.addressof(code))
    _prctl(_SET_SECCOMP, _FILTER, described, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    return _checked(result)


def _prctl(*arguments: object) -> None:
    _checked(int(_libc().prctl(*arguments)))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot confine this process: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
