"""What torch asserts of sizes that hang on values, and which of it is kept."""

import operator

import torch
from torch import fx

from fuseport.exporter.program.tracing._unbound import forget_beyond

HELD = torch.ops.aten._assert_scalar.default


def asserting(*bounds: tuple[object, int]) -> fx.Graph:
    """A graph that asserts relations of its input to numbers."""
    graph = fx.Graph()
    size = graph.placeholder("size")
    for relation, number in bounds:
        held = graph.call_function(relation, (size, number))
        graph.call_function(HELD, (held, f"it is beyond {number}"))
    graph.output(size)
    return graph


def left(graph: fx.Graph) -> list[tuple[object, int]]:
    asserted = graph.find_nodes(op="call_function", target=HELD)
    return [(node.args[0].target, node.args[0].args[1]) for node in asserted]


def test_bounds_that_no_size_can_reach_are_forgotten_and_no_others() -> None:
    beyond = (operator.le, 8 * (2**63 - 1))
    kept = [(operator.le, 7), (operator.le, 2**63 - 1), (operator.ge, 0), (operator.ge, 2**64)]
    graph = asserting(beyond, *kept)
    forget_beyond(graph)
    graph.lint()
    assert left(graph) == kept
    assert all(node.args[1:] != (beyond[1],) for node in graph.nodes)
