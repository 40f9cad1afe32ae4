"""The fork server: `python -m fuseport.exporter.child._fork_server DESCRIPTOR MODULE...`.

It imports the modules that are here, once. DESCRIPTOR is of a socket. Each message asks for a
child: a module's name and arguments, and what of the environment is new; with it come descriptors:
the child's connection, its standard input, its standard error. Over its connection the child's
process id is told, and how it ended; it is reaped when the connection is closed, and killed if it
runs then. When the socket closes, all end.

Nothing may be computed here before a fork: see `fork_server`.
"""

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fuseport.exporter.child import die_with_parent
from fuseport.exporter.child.fork_server import MARK, PARENT, READ_LATE
from fuseport.exporter.garbage import importing

__all__ = ["main"]


@dataclass(frozen=True)
class _Child:
    pid: int
    ended: int  # a descriptor that can be read when it has
    connection: socket.socket

    def tell_end(self) -> None:
        """Say how it ended; it stays unreaped."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with suppress(OSError):  # nobody asks
            self.connection.send(json.dumps({"code": code}).encode())

    def remove(self) -> None:
        """Kill it, if it still runs, and forget it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has made no group of its own yet
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.ended)
        self.connection.close()


def main(descriptor: int, *modules: str) -> None:
    """Fork children until the socket closes; in a child, be what was asked for."""
    with importing():  # frozen, for the children's collections would copy every page
        for name in modules:
            with suppress(ImportError):  # of another version: a child finds out what it lacks
                importlib.import_module(name)
    control = socket.socket(fileno=descriptor)
    request = _serve(control)
    if request is not None:
        module, *rest = request["arguments"]
        sys.argv = [module, *rest]
        sys.modules.pop(module, None)  # it is to be the main one
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> Mapping[str, Any] | None:
    """The request of a child, in that child; None in the server, at its end."""
    children: dict[int, _Child] = {}  # by descriptor of its end, and of its connection
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                message, passed, _, _ = socket.recv_fds(control, 2**20, 3)
                if not message:
                    for child in dict.fromkeys(children.values()):
                        child.remove()
                    return None
                request: dict[str, Any] = json.loads(message)
                server = os.getpid()
                try:
                    pid = os.fork()
                except OSError:  # too many processes: who asked sees the connection end
                    _close(passed)
                    continue
                if pid == 0:
                    _let_go(control, *children.values())
                    _become(request, passed, server)
                    return request
                connection, *others = passed
                _close(others)
                forked = _Child(pid, os.pidfd_open(pid), socket.socket(fileno=connection))
                for at in (forked.ended, forked.connection.fileno()):
                    children[at] = forked
                    poll.register(at, select.POLLIN)
            elif descriptor in children:
                child = children[descriptor]
                poll.unregister(descriptor)
                del children[descriptor]
                if descriptor == child.ended:
                    child.tell_end()
                else:  # nothing is ever sent over it: it was closed
                    if children.pop(child.ended, None):
                        poll.unregister(child.ended)
                    child.remove()


def _let_go(control: socket.socket, *children: _Child) -> None:
    """Close what is the server's, in a child of it."""
    control.close()
    for child in dict.fromkeys(children):
        child.connection.close()
        os.close(child.ended)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _become(request: Mapping[str, Any], passed: Sequence[int], server: int) -> None:
    """Take the place of a process that was started as the request says."""
    os.setsid()
    connection, standard_input, standard_error = passed
    os.dup2(standard_input, 0)
    os.dup2(standard_error, 2)
    environment = {**request["environment"], PARENT: str(server)}
    for name in [n for n in os.environ if n.startswith(READ_LATE)]:
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)
    die_with_parent()
    _show(environment[MARK])
    with socket.socket(fileno=connection) as told:
        told.send(json.dumps({"pid": os.getpid()}).encode())
    _close((standard_input, standard_error))


def _show(mark: str) -> None:
    """Have other processes find the mark in this one's environment, as if it had been started with
    it: the kernel shows the bytes that were there at the start, and these may be written."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5), 50 and 51
    there = ctypes.string_at(begin, end - begin)
    at = there.find(f"{MARK}=".encode())
    written = f"{MARK}={mark}\0".encode()
    if at >= 0 and there[at : at + len(written)].endswith(b"\0"):
        ctypes.memmove(begin + at, written, len(written))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
