"""What is planned to be compared."""

from collections.abc import Mapping

from fuseport.exporter.verify.plan import admitted, cases

SIZES = {"batch": 2, "length": 16}


def test_cases_break_coincidences() -> None:
    planned = cases(SIZES, seed=7)
    assert len({case.name for case in planned}) == len({case.seed for case in planned}) == 5
    assert {"batch": 1, "length": 1} in [case.sizes for case in planned]
    assert any(case.sizes["batch"] != case.sizes["length"] != 16 for case in planned)
    assert {case.layout for case in planned} == {"contiguous", "transposed", "sliced", "expanded"}


def test_cases_move_up_to_sizes_that_the_program_holds_for() -> None:
    def even(sizes: Mapping[str, int]) -> bool:
        return sizes["length"] % 2 == 0

    kept, notes = admitted(cases(SIZES, seed=0), even)
    assert all(even(case.sizes) for case in kept)
    assert not notes
    assert any(case.name.startswith("every dimension 1, moved up to batch 2") for case in kept)


def test_a_case_that_cannot_be_kept_is_said() -> None:
    def exact(sizes: Mapping[str, int]) -> bool:
        return dict(sizes) == SIZES

    kept, notes = admitted(cases(SIZES, seed=0), exact)
    assert {case.name for case in kept if case.sizes == SIZES} >= {"export"}
    assert len(kept) + len(notes) == 5
    assert notes
    assert all("not compared" in note for note in notes)
