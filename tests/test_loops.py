"""What loops of a gradient program leave out: sums over steps, and what all steps share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.scan import scan

from fuseport.exporter.program import Program, TensorSpec, _loops
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

Step = Callable[..., tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A scan over the second dimension of x, whose steps are one of the functions below."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.start = nn.Parameter(torch.randn(4))
        self.step = step

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def one(state: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return self.step(state, at, self.weight, self.bias)

        last, outputs = scan(
            one, self.start.expand(x.shape[0], 4).clone(), x.transpose(0, 1).clone()
        )
        return last, outputs


def linear(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.tanh(nn.functional.linear(state, weight, bias) + x)
    return state, state.clone()


def both_ways(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.tanh(state @ weight + x @ weight.transpose(0, 1) + bias)
    return state, state * state


def of_rows(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    state = state * torch.sigmoid(bias) + x
    return state, (state * weight[0]).sum(-1)


def squared(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.tanh(state @ (weight @ weight) + x)
    return state, state @ weight + bias


def nothing_shared(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.sin(state) * x
    return state, state.clone()


def a_sum_itself(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    return state + y, y * bias


def in_parts(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    left, right = weight.chunk(2, 1)
    state = torch.tanh(torch.cat([state @ left, x @ right], 1) + bias)
    return state, torch.bmm(state[None], weight[None].expand(1, 4, 4))[0]


STEPS = (linear, in_parts, both_ways, of_rows, squared, nothing_shared, a_sum_itself)


def gradient_of(step: Step, of: type[Net] = Net) -> tuple[Net, Program]:
    torch.manual_seed(0)
    module = of(step).eval()
    spec = TensorSpec("x", "float32", ("batch", "length", 4))
    forward = capture_forward(module, {"x": torch.randn(2, 5, 4)}, [spec])
    return module, capture_gradient(forward)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_are_what_they_were(step: Step) -> None:
    compare(*gradient_of(step))


def compare(module: Net, program: Program) -> None:
    run = program.exported.module()
    leaves = dict(module.named_parameters())
    for sizes in ((2, 5, 4), (1, 1, 4), (3, 9, 4)):
        x = torch.randn(sizes, requires_grad=True)
        outputs = module(x)
        seeds = [torch.randn_like(y) for y in outputs]
        inputs = {"x": x, **leaves}
        wanted = torch.autograd.grad(outputs, list(inputs.values()), seeds, allow_unused=True)
        found = run(x.detach(), *seeds)
        for name, value in zip(inputs, wanted, strict=True):
            if value is None or f"grad/{name}" in program.none:
                assert value is None
                assert f"grad/{name}" not in found
            else:
                torch.testing.assert_close(found[f"grad/{name}"], value)


def loops(program: Program) -> list[tuple[fx.Node, fx.GraphModule]]:
    graph = program.exported.graph_module
    scans = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    return [(node, getattr(graph, node.args[0].target)) for node in scans]


@pytest.mark.parametrize("step", [linear, both_ways], ids=lambda step: step.__name__)
def test_weights_are_no_state_and_no_slices_of_the_loop_back(step: Step) -> None:
    _, program = gradient_of(step)
    _, (back, body) = loops(program)
    _, states, slices, shared = back.args
    assert [tuple(node.meta["val"].shape)[1:] for node in states] == [(4,)]
    assert all(node.meta["val"].shape[-2:] != (4, 4) for node in slices)
    # Turned about, and as it is where both are taken.
    assert {tuple(node.meta["val"].shape) for node in shared} == {(4, 4)}
    # The state's cotangent alone: those of weights are products after the loop.
    products = body.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == (1 if step is linear else 2)


class Summing(Net):
    """A scan with two states, of which one is a sum that begins with a parameter."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def one(states: tuple[Tensor, Tensor], at: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            state, total = states
            state = torch.tanh(state @ self.weight + at)
            return (state, total + state.mT @ at), state * self.bias

        start = self.start.expand(x.shape[0], 4).clone()
        (last, total), outputs = scan(one, (start, self.weight.clone()), x.transpose(0, 1).clone())
        return last @ total, outputs


def test_a_state_of_the_models_own_that_is_a_sum_begins_where_it_did() -> None:
    module, program = gradient_of(linear, Summing)
    (_, states, *_), *_ = (node.args for node, _ in loops(program))
    assert len(states) == 1
    compare(module, program)


class OnlyTotal(Net):
    """A scan whose one state is a sum."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def one(total: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return total + at.mT @ at, at * self.bias

        return scan(one, self.weight.clone(), x.transpose(0, 1).clone())


def test_a_scans_only_state_stays_one() -> None:
    module, program = gradient_of(linear, OnlyTotal)
    for _, states, *_ in (node.args for node, _ in loops(program)):
        assert len(states) == 1
    compare(module, program)


def test_large_products_are_one_after_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loops, "_SMALL", 15)
    for step in (linear, both_ways):
        module, program = gradient_of(step)
        compare(module, program)
        targets = [node.target for node in program.exported.graph.nodes]
        assert torch.ops.aten.bmm.default not in targets
