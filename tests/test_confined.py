"""A confined process: it reads what it likes, writes where it may, and reaches nobody.

What README's security section says of the children that runtimes are in.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fuseport.exporter import runtimes
from fuseport.exporter.child.confined import Bounds, available

CONFINED = [sys.executable, "-m", "fuseport.exporter.child.confined"]

TRY = """
import ctypes, os, socket, sys
inside, outside = sys.argv[1:]

def attempt(name, action):
    try:
        action()
        print(name, "done")
    except OSError as error:
        print(name, type(error).__name__)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def ring():  # opens sockets without socket(2)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(425, 1, ctypes.create_string_buffer(256)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")

attempt("write inside", lambda: write(f"{inside}/new"))
attempt("move inside", lambda: os.rename(f"{inside}/new", f"{inside}/newer"))
attempt("read outside", lambda: open(f"{outside}/file").read())
attempt("write outside", lambda: write(f"{outside}/new"))
attempt("append outside", lambda: open(f"{outside}/file", "a"))
attempt("truncate outside", lambda: os.truncate(f"{outside}/file", 0))
attempt("remove outside", lambda: os.unlink(f"{outside}/file"))
attempt("link outside", lambda: os.symlink("/", f"{outside}/link"))
attempt("hard link inside", lambda: os.link(f"{outside}/file", f"{inside}/hard"))
attempt("folder outside", lambda: os.mkdir(f"{outside}/folder"))
attempt("pipe outside", lambda: os.mkfifo(f"{outside}/pipe"))
attempt("memory of the parent", lambda: open(f"/proc/{os.getppid()}/mem", "r+b"))
attempt("move out", lambda: os.rename(f"{inside}/newer", f"{outside}/moved"))
attempt("network", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
attempt("datagram", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
attempt("local socket", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
attempt("ring", ring)
attempt("signal", lambda: os.kill(os.getppid(), 0))
attempt("device", lambda: write("/dev/null"))
attempt("name of a thread", lambda: write("/proc/self/comm"))
code = f"open({outside + '/by child'!r}, 'w')"
print("child", os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) != 0)
"""


ALLOWED = {"write inside", "move inside", "read outside", "device"}
NEEDS_BOTH = pytest.mark.skipif(
    not all(available().values()), reason="this kernel confines nothing"
)


@NEEDS_BOTH
@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_confined_process_can_do(gpu: bool, tmp_path: Path) -> None:
    """On a GPU also what CUDA's driver does not start without."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    (outside / "file").write_text("kept")
    (tmp_path / "attempts.py").write_text(TRY)
    bounds = Bounds((inside,), gpu).to_json()
    done = subprocess.run(
        [*CONFINED, bounds, "attempts", str(inside), str(outside)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    allowed = {name for name, result in found.items() if result == "done"}
    assert allowed == ALLOWED | ({"local socket", "name of a thread"} if gpu else set())
    assert found["child"] == "True"
    assert (outside / "file").read_text() == "kept"
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_a_child_of_a_gpus_runtime_may_have_its_driver(tmp_path: Path) -> None:
    for device, gpu in (({}, False), ({"device": "cpu"}, False), ({"device": "cuda"}, True)):
        bounds = runtimes.confine("exported_program", [device], tmp_path)
        assert bounds is not None
        assert bounds.gpu == gpu
        assert tmp_path in bounds.writable


def test_a_module_that_fails_fails(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys; sys.exit(7)")
    command = [*CONFINED, Bounds().to_json(), "fails"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 7
