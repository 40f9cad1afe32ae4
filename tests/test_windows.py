"""Windows whose length is a size of the input."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.as_files import session_of

WINDOWS: dict[str, Callable[[int], Tensor]] = {
    "hann": torch.hann_window,
    "hann, symmetric": lambda n: torch.hann_window(n, periodic=False),
    "hamming": lambda n: torch.hamming_window(window_length=n),
    "hamming by numbers": lambda n: torch.hamming_window(n, False, 0.6, beta=0.3),
    "blackman": torch.blackman_window,
    "blackman, symmetric": lambda n: torch.blackman_window(n, False),
    "bartlett": torch.bartlett_window,
    "bartlett, symmetric": lambda n: torch.bartlett_window(n, False, dtype=torch.float32),
    "kaiser": torch.kaiser_window,
    "kaiser, symmetric": lambda n: torch.kaiser_window(n, False, 8.6),
    "kaiser, steep": lambda n: torch.kaiser_window(n, True, 60.0),
    "kaiser, flat": lambda n: torch.kaiser_window(n, True, 0.0),
    "in float64": lambda n: torch.hann_window(n, dtype=torch.float64),
    "in float16": lambda n: torch.kaiser_window(n, dtype=torch.float16),
    "of torch.signal": lambda n: torch.signal.windows.hann(n, sym=False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_as_long_as_the_input(name: str, tmp_path: Path) -> None:
    window = WINDOWS[name]

    class Windowed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * window(x.shape[0] + 1)[1:].to(x.dtype)

    dtype = window(2).dtype if name != "in float16" else torch.float32
    spec = TensorSpec("x", str(dtype).removeprefix("torch."), ("length",))
    program = capture_forward(Windowed(), {"x": torch.rand(9, dtype=dtype)}, [spec])
    session = session_of(program, tmp_path, "onnxruntime")
    near = {"rtol": 2e-3, "atol": 1e-3} if name == "in float16" else {"rtol": 1e-5, "atol": 1e-6}
    for length in (1, 2, 5, 400):
        x = torch.ones(length, dtype=dtype)
        wanted = Windowed()(x)
        torch.testing.assert_close(program.exported.module()(x), wanted, **near)
        torch.testing.assert_close(session.run({"x": x})["output"], wanted, **near)


@pytest.mark.parametrize("periodic", [False, True])
def test_a_window_of_one_is_one(periodic: bool) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(
                [
                    f(x.shape[0], periodic)
                    for f in (torch.hann_window, torch.blackman_window, torch.kaiser_window)
                ]
            )

    spec = TensorSpec("x", "float32", ("length",))
    program = capture_forward(Net(), {"x": torch.rand(9)}, [spec]).exported.module()
    for length in (0, 1, 2):
        x = torch.rand(length)
        torch.testing.assert_close(program(x), Net()(x))
