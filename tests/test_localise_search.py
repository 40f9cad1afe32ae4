"""The search for the first wrong value: right on any graph, whatever part of it can be seen."""

import random
from collections.abc import Sequence

import pytest

from fuseport.exporter.verify.localise.search import first_wrong, region, selected

Graph = dict[str, list[str]]


def chain(layers: int) -> Graph:
    """A residual network: each layer has a slice of a weight, two steps and a sum."""
    graph: Graph = {"x": []}
    last = "x"
    for i in range(layers):
        graph[f"weight{i}"] = []
        graph[f"slice{i}"] = [f"weight{i}"]
        graph[f"up{i}"] = [last, f"slice{i}"]
        graph[f"down{i}"] = [f"up{i}"]
        graph[f"sum{i}"] = [last, f"down{i}"]
        last = f"sum{i}"
    return graph


def after(graph: Graph, planted: str) -> set[str]:
    """All that a wrong value makes wrong."""
    found = {planted}
    for name, needed in graph.items():
        if found.intersection(needed):
            found.add(name)
    return found


class Looked:
    """Says which values are wrong, and keeps what it was asked in each round."""

    def __init__(self, wrong: set[str]) -> None:
        self.rounds: list[list[str]] = []
        self._wrong = wrong

    def __call__(self, names: Sequence[str]) -> set[str]:
        self.rounds.append(list(names))
        return self._wrong & set(names)


def test_a_layer_of_64_is_found_in_few_rounds_within_the_budget() -> None:
    graph = chain(64)
    sizes = {name: 100 for name in graph if not name.startswith(("weight", "x"))}
    look = Looked(after(graph, "down37"))
    found = first_wrong(graph, "sum63", sizes, look, budget=2000)
    assert found.value == "down37"
    assert found.within == ("down37",)
    assert found.right == ("up37",)
    assert len(look.rounds) <= 4
    assert max(map(len, look.rounds)) <= 21, "twenty values of 100 bytes, and the last wrong one"


@pytest.mark.parametrize("seed", range(60))
def test_what_is_found_is_wrong_and_all_it_is_computed_from_is_right(seed: int) -> None:
    choose = random.Random(seed)
    names = [f"v{i}" for i in range(80)]
    graph = {
        name: sorted({choose.choice(names[:i]) for _ in range(choose.randint(1, 3))}) if i else []
        for i, name in enumerate(names)
    }
    target = names[-1]
    # A wrong value need not make wrong what is computed from it, but one of them is the target.
    wrong = {name for name in region(graph, target, set()) if choose.random() < 0.1} | {target}
    sizes = {
        name: choose.randint(1, 50) for name in names if choose.random() < 0.7 or name == target
    }
    look = Looked(wrong)
    found = first_wrong(graph, target, sizes, look, budget=choose.choice([60, 400, 10_000]))
    assert found.value in wrong
    seen = {name for asked in look.rounds for name in asked}
    for name in region(graph, found.value, set(found.right)):
        assert name == found.value or name not in sizes or name not in wrong - {target} & seen
    assert not set(found.right) & wrong
    assert not (set(found.within) - {found.value}) & set(sizes), "all that could be seen was"


def test_a_wrong_value_beside_the_way_is_not_taken_for_the_cause() -> None:
    graph = {"a": [], "b": ["a"], "beside": ["a"], "end": ["b"]}
    found = first_wrong(graph, "end", dict.fromkeys(graph, 1), Looked({"beside", "end"}), 100)
    assert found.value == "end"


def test_a_fault_that_goes_away_when_it_is_looked_at_is_said_to() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"]}

    def wrong(names: Sequence[str]) -> set[str]:
        return {"c"} & set(names) if "b" not in names else set()

    found = first_wrong(graph, "c", dict.fromkeys("abc", 1), wrong, 100)
    assert found.vanished
    assert found.value == "c"


def test_of_a_layer_what_leaves_it_is_looked_at_first() -> None:
    graph = chain(8)
    inside = region(graph, "sum7", set())
    sizes = {name: 1 for name in inside if not name.startswith("weight")}
    chosen = selected(graph, inside, list(sizes), sizes, budget=8)
    assert len(chosen) <= 8
    assert all(name.startswith(("x", "sum")) for name in chosen), chosen


def test_values_taken_to_be_right_are_not_looked_at_again() -> None:
    graph = chain(4)
    look = Looked(after(graph, "up1"))
    found = first_wrong(
        graph, "sum3", dict.fromkeys(graph, 1), look, 100, known=frozenset({"up1", "sum1"})
    )
    assert found.value == "sum3" or found.value.endswith("2")
    assert "up1" not in {name for asked in look.rounds for name in asked}
