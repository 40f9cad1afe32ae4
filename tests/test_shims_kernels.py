"""The texts of CUDA kernels, interpreted; and what stands for them in torch, by its definition."""

from math import trunc
from typing import Any

import numpy as np
import pytest
import torch

from fuseport.exporter.shims._raw_kernels import splatting, windows
from fuseport.exporter.shims._raw_kernels.parser import NotUnderstood
from fuseport.exporter.shims._raw_kernels.text import Pointer, launch
from fuseport.tests.test_shims_correlation import at, drawn


def ran(text: str, *args: Any, grid: int = 1, block: int = 1, shared: int = 0) -> None:
    launch(f'extern "C" __global__ void kernel({text}', "kernel", [grid], (block,), args, shared)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-7 / 2", -3),  # towards zero
        ("-7 % 3", -1),
        ("7 / 2 * 2", 6),
        ("7 / 2.0f", 3.5),
        ("(float) 7 / 2", 3.5),
        ("(int) -1.5f", -1),
        ("(int) (floor(-1.5f))", -2),
        ("1 + 2 * 3 - 4", 3),
        ("n > 1 && n < 4 ? 10 : 20", 10),
        ("!(n == 3) | 4", 4),
        ("n << 2", 12),
        ("max(n, 5) + fminf(1e-1f, .5)", 5.1),
        ("TWICE(n + 1) + SEVEN", 15),
        ("square(n) + 0x10", 25),
    ],
)
def test_expressions_are_those_of_c(expression: str, value: float) -> None:
    text = f"""
        #define SEVEN 7
        #define TWICE(x) ((x) * 2) /* a macro */
        __device__ __forceinline__ float square(const float x) {{ return x * x; }}
        extern "C" __global__ void kernel(const int n, double* out) {{ out[0] = {expression}; }}
    """
    out = [0.0]
    launch(text, "kernel", (1, 1, 1), (1, 1, 1), [np.int32(3), Pointer(out)], 0)
    assert out[0] == pytest.approx(value)


def p(values: list[Any]) -> Pointer:
    return Pointer(values)


def test_a_name_in_an_inner_block_is_another_variable() -> None:
    out = [0, 0, 0]
    ran(
        "int n, int* out) { for (int i = 0; i < n; i++) { int n = 7 * i; out[i] = n; } }", 3, p(out)
    )
    assert out == [0, 7, 14]


def test_loops_go_on_and_end() -> None:
    out = [0] * 6
    ran(
        """int n, int* out) {
            int k = 0;
            for (int i = 0, j = 9; i < n; ++i, j--) {
                if (i == 1) continue; else if (i == 4) { break; }
                out[i] = j;
            }
            while (k < 3) { k += 2; if (k == 2) { continue; } *(out + 5) = k; }
        }""",
        6,
        p(out),
    )
    assert out == [9, 0, 7, 6, 0, 4]


def test_threads_wait_for_one_another_and_share_memory() -> None:
    out = [0.0] * 4
    text = """const float* x, float* out) {
        extern __shared__ char bytes[];
        float* all = (float*) bytes;
        __shared__ float total[1];
        int t = threadIdx.x;
        all[t] = x[blockIdx.x * blockDim.x + t];
        __syncthreads();
        if (t > 2) { return; }
        if (t == 0) { total[0] = 0; }
        __syncthreads();
        atomicAdd(&total[0], all[t + 1]);
        __syncthreads();
        out[blockIdx.x * 2 + t % 2] = total[0];
    }"""
    ran(text, p([1.0, 2, 4, 8, 16, 32, 64, 128]), p(out), grid=2, block=4, shared=16)
    assert out == [14, 14, 224, 224]


@pytest.mark.parametrize(
    ("text", "args", "reason"),
    [
        ("int* x) { x[3] = 1; }", [p([0, 0])], "element 3 of 2"),
        ("int* x) { x[0] = x[-1]; }", [p([0, 0])], "element -1 of 2"),
        ("int* x) { assert(x[0] == 1); }", [p([0])], "asserts what does not hold"),
        ("int* x) { x[0] = __shfl_down(x[0], 1); }", [p([0])], "is not understood"),
        ("int* x) { switch (x[0]) { } }", [p([0])], "is not understood"),
        ("int* x) { x[0] = y; }", [p([0])], "`y` near .* is not understood"),
        ("int* x) { x[0] = 1;", [p([0])], "end of the text"),
        ("int* x) { @ }", [p([0])], "`@ }` is not understood"),
        ("int* x) {\n#ifdef A\n}", [p([0])], "`#ifdef A` is not understood"),
        ("int* x) { }", [1], r"a parameter is int \*, and was given int"),
        ("float* x) { }", [Pointer([0], kind="half")], r"is float \*, and was given half \*"),
        ("int* x) { }", [], "takes 1 arguments, and was given 0"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, args: list[Any], reason: str) -> None:
    with pytest.raises(NotUnderstood, match=reason):
        ran(text, *args)
    with pytest.raises(NotUnderstood, match="there is no __global__ other in it"):
        launch("__global__ void kernel(int n) { }", "other", (1,), (1,), (1,), 0)


def test_cost_volumes_of_differences() -> None:
    one, two = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    expected = torch.zeros(2, 25, 4, 5, dtype=torch.float64)
    for b, d, y, x in np.ndindex(*expected.shape):
        there = at(two[b].numpy(), y + d // 5 - 2, x + d % 5 - 2)
        expected[b, d, y, x] = np.abs(one[b, :, y, x].numpy() - there).mean()
    torch.testing.assert_close(splatting.absolute_differences(one, two, 25), expected)
    x = torch.zeros(1, 1, 1, 1, requires_grad=True)
    splatting.absolute_differences(x, torch.zeros(1, 1, 1, 1), 9).sum().backward()
    assert x.grad == 9  # to the right of 0, as kernels have it


def test_adaptive_separable_convolution() -> None:
    x, v, h = drawn(2, 3, 6, 7), drawn(2, 3, 4, 5, seed=1), drawn(2, 2, 4, 5, seed=2)
    expected = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for b, c, i, j in np.ndindex(*expected.shape):
        expected[b, c, i, j] = v[b, :, i, j] @ x[b, c, i : i + 3, j : j + 2] @ h[b, :, i, j]
    torch.testing.assert_close(splatting.adaptive_sums(x, v, h), expected)


def test_adaptive_collaboration_of_flows() -> None:
    x, w = drawn(1, 2, 6, 7), drawn(1, 4, 4, 5, seed=1)
    down, right = 3 * drawn(1, 4, 4, 5, seed=2), 3 * drawn(1, 4, 4, 5, seed=3)
    expected = torch.zeros(1, 2, 4, 5, dtype=torch.float64)
    for c, k, i, j in np.ndindex(2, 4, 4, 5):
        places = [
            (i + k // 2 * 2, float(down[0, k, i, j])),
            (j + k % 2 * 2, float(right[0, k, i, j])),
        ]
        for n in range(4):
            weight, place = float(w[0, k, i, j]), []
            for (start, by), after, size in zip(places, (n // 2, n % 2), (6, 7), strict=True):
                place.append(min(max(start + trunc(by) + after, 0), size - 1))
                weight *= by - trunc(by) if after else 1 - (by - trunc(by))
            expected[0, c, i, j] += weight * x[0, c, *place]
    torch.testing.assert_close(windows.resampled(x, w, down, right, 2), expected)
    leaves = [t.requires_grad_() for t in (w, down, right)]
    assert torch.autograd.gradcheck(lambda *t: windows.resampled(x, *t, 2), leaves, fast_mode=True)
    assert not windows.resampled(x.requires_grad_(), *(t.detach() for t in leaves), 2).requires_grad


OPTIONS = [((3, 3), (1, 1), (1, 1), (1, 1)), ((3, 2), (2, 1), (2, 0), (1, 2))]


def looked_up(x: Any, y: int, z: int, reflected: bool) -> Any:
    if reflected:
        y, z = (
            abs(v) if v < n else 2 * (n - 1) - v for v, n in zip((y, z), x.shape[1:], strict=True)
        )
    return at(x, y, z)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_sums_and_differences_over_windows(options: tuple[Any, ...], mode: str) -> None:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = options
    x, y = drawn(2, 4, 6, 7), drawn(2, 4, 6, 7, seed=1)
    oh, ow = (6 + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (7 + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    w = drawn(2, 3, 2, kh * kw, oh, ow, seed=2)
    sums = torch.zeros(2, 3, 4, oh, ow, dtype=torch.float64)
    differences = torch.zeros(2, 4, kh * kw, oh, ow, dtype=torch.float64)
    involved = torch.zeros(2, 4, oh, ow, dtype=torch.float64)
    for b, k, i, j in np.ndindex(2, kh * kw, oh, ow):
        place = (i * sh - ph + k // kw * dh, j * sw - pw + k % kw * dw)
        middle = (i * sh - ph + (kh - 1) // 2 * dh, j * sw - pw + (kw - 1) // 2 * dw)
        reflected = mode == "reflect"
        there = looked_up(x[b].numpy(), *place, reflected)
        for c in range(4):
            sums[b, :, c, i, j] += w[b, :, c % 2, k, i, j] * there[c]
            involved[b, c, i, j] += w[b, 1, c // 2, k, i, j] * there[c]
        difference = at(y[b].numpy(), *middle) - there
        differences[b, :, k, i, j] = torch.from_numpy(difference)
    found = windows.aggregated(x, w, *options, mode=mode)
    torch.testing.assert_close(found, sums.flatten(1, 2))
    one_head = w[:, 0].flatten(3)
    torch.testing.assert_close(windows.aggregated(x, one_head, *options, mode=mode), sums[:, 0])
    found = windows.subtracted(y, x, *options, mode=mode)
    torch.testing.assert_close(found, differences.flatten(3))
    if mode == "constant":
        groups = w[:, 1].unflatten(2, (kh, kw))
        torch.testing.assert_close(windows.involved(x, groups, *options[1:]), involved)


def test_halves_are_computed_in_float32() -> None:
    x = torch.full((1, 4, 2, 2), 300.0).half()
    assert (splatting.local_correlation(x, x, 9)[:, 4] == 90000).all()


def test_a_pixel_is_shared_by_the_four_that_it_flows_between() -> None:
    x, flow = torch.zeros(1, 1, 3, 3), torch.zeros(1, 2, 3, 3)
    x[0, 0, 1, 1] = 1
    flow[0, :, 1, 1] = torch.tensor([-0.25, 0.5])
    found = splatting.splatted(x, flow)[0, 0]
    assert found.tolist() == [[0, 0, 0], [0.125, 0.375, 0], [0.125, 0.375, 0]]
