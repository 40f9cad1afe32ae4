"""What is planned to be compared."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import sympy
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._sympy.functions import FloorDiv, Mod

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import Entry, Kind
from fuseport.exporter.program.conditions import in_words, summarised
from fuseport.exporter.program.rounding import close
from fuseport.exporter.verify.plan import admitted, cases, conditional, ungraded
from fuseport.exporter.verify.sample import read_all

SIZES = {"batch": 2, "length": 16}


def test_cases_break_coincidences() -> None:
    planned = cases(SIZES, seed=7)
    assert len({case.name for case in planned}) == len({case.seed for case in planned}) == 6
    assert {"batch": 1, "length": 1} in [case.sizes for case in planned]
    assert {"batch": 2, "length": 1} in [case.sizes for case in planned]
    assert any(case.sizes["batch"] != case.sizes["length"] != 16 for case in planned)
    assert {case.layout for case in planned} == {"contiguous", "transposed", "sliced", "expanded"}


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_several_are_compared_where_all_else_is_1(entry: Entry) -> None:
    """A batch, or what comes first; of one dimension, there are several of nothing."""
    for sizes, wanted in (
        ({"length": 16, "batch": 3}, {"length": 1, "batch": 2}),
        ({"height": 8, "width": 8, "n": 2}, {"height": 2, "width": 1, "n": 1}),
    ):
        assert wanted in [case.sizes for case in cases(sizes, 0, entry)]
    assert {"length": 2} not in [case.sizes for case in cases({"length": 16}, 0, entry)]


def test_of_one_input_two_dimensions_at_most_are_past_a_chunk() -> None:
    sizes = {"batch": 2, "frames": 4, "h": 8, "w": 8, "tokens": 5}
    film, text = ("batch", "frames", 3, "h", "w"), ("batch", "tokens")
    [edge] = [c for c in cases(sizes, 0, together=[film, text]) if c.name.startswith("past")]
    assert dict(edge.sizes) == {"batch": 1, "frames": 3, "h": 65, "w": 65, "tokens": 65}


def test_masks_are_compared_where_they_select_nothing(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x, mask):
        return FORMULA
"""
    inputs = ["x:[batch,3]", "mask:int64[batch]<2"]
    made = {}
    for name, formula in (
        ("kept", "self.w(x[mask > 0]).sum(0)"),
        ("lost", "self.w(x[mask > 0]).mean(0)"),
    ):
        checkpoint, model = saved_with(code.replace("FORMULA", formula), w=nn.Linear(3, 3))
        made[name] = api.export(
            checkpoint, tmp_path / name, model=model, inputs=inputs, format="torchscript"
        )
    samples = {name: read_all(bundle.folder / "samples") for name, bundle in made.items()}
    (case,) = (sample for sample in samples["kept"] if sample.case.nothing)
    with safe_open(case.file, "pt") as file:
        assert not file.get_tensor("input/mask").any()
        assert file.get_tensor("input/x").any()
    assert not any(sample.case.nothing for sample in samples["lost"])
    note = "not compared, masks of zeros: the model gives nothing there to hold on to"
    assert [note in bundle.manifest["notes"] for bundle in made.values()] == [False, True]


def test_cases_move_up_to_sizes_that_the_program_holds_for() -> None:
    def even(sizes: Mapping[str, int]) -> bool:
        return sizes["length"] % 2 == 0

    kept, notes = admitted(cases(SIZES, seed=0), even)
    assert all(even(case.sizes) for case in kept)
    assert not notes
    assert any(
        case.name.startswith("every dimension 1, moved up to batch 1, length 2") for case in kept
    )


def test_of_many_dimensions_those_move_up_that_have_to() -> None:
    def even(sizes: Mapping[str, int]) -> bool:
        return sizes["height"] % 2 == 0 and sizes["width"] % 4 == 0

    usual = {"batch": 2, "frames": 3, "height": 8, "width": 8, "tokens": 5}
    kept, notes = admitted(cases(usual, seed=0), even)
    assert not notes
    sizes = {case.name.split(",")[0]: list(case.sizes.values()) for case in kept}
    assert sizes["every dimension 1"] == [1, 1, 2, 4, 1]
    assert sizes["odd"] == [3, 7, 12, 16, 17]


def test_cases_of_a_large_example_have_its_sizes_but_for_one() -> None:
    """As of a network that halves a picture five times."""
    usual = {"batch": 2, "height": 64, "width": 96}

    def halved(sizes: Mapping[str, int]) -> bool:
        return all(sizes[name] >= 64 and sizes[name] % 32 == 0 for name in ("height", "width"))

    kept, notes = admitted(cases(usual, seed=0), halved)
    assert not notes
    assert {case.name: dict(case.sizes) for case in kept[2:]} == {
        "every dimension 1, moved to batch 1, height 64, width 96": {**usual, "batch": 1},
        "odd, transposed, moved to batch 3, height 64, width 128": {
            **usual, "batch": 3, "width": 128
        },
        "past a chunk, sliced, moved to batch 1, height 96, width 96": {
            **usual, "batch": 1, "height": 96
        },
        "batch 2, all else 1, moved to batch 2, height 64, width 128": {**usual, "width": 128},
    }  # fmt: skip
    kept, notes = admitted(cases(usual, seed=0), lambda s: halved(s) and s["batch"] == 2)
    assert [note.partition(": ")[0] for note in notes] == ["not compared, every dimension 1"]
    assert len(kept) == 5


def test_a_case_that_cannot_be_kept_is_said() -> None:
    def exact(sizes: Mapping[str, int]) -> bool:
        return dict(sizes) == SIZES

    kept, notes = admitted(cases(SIZES, seed=0), exact)
    assert {case.name for case in kept if case.sizes == SIZES} >= {"export"}
    assert len(kept) + len(notes) == 6
    assert notes
    assert all("not compared" in note for note in notes)


NET = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[1]
"""
# At other lengths than multiples of 4, a branch cuts the padding off.
PADDED = """
        missing = -length % 4
        y = self.up(F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, 4))).cumsum(2).flatten(1, 2)
        return y[:, :length] if missing else y
"""
# A part is written to in place; and one sequence alone takes another way, to the same.
SINGLE = """
        y = self.up(x)
        z = torch.zeros_like(y)
        z[:, :, :4] = y[:, :, 4:]
        return y[0].unsqueeze(0) * z if x.shape[0] == 1 else y * z
"""
# A norm takes channels last, which its kernel does not see in one sequence alone.
GROUPS = """
        y = self.up(torch.cat([x, x], 1)).mT.reshape(x.shape[0], 8, 2, length)
        return F.group_norm(y, 4).sigmoid()
"""
# At lengths that are no multiple of 4 the model gives something else; the program fails at none.
OTHERWISE = """
        y = self.up(x)
        return y if length % 4 == 0 else OTHER
"""
# A mask is looked at of several steps alone, as by mixers of transformers.
UNMASKED = """
        y = self.up(x)
        mask = mask[:, :, None] if length > 1 else None
        return y if mask is None else y * mask
"""
# The program divides by zero at one step.
DIVIDING = """
        y = self.up(x)
        if length > 1:
            y = F.pad(y, (0, 0, 0, length // (length - 1)))
        return y[:, :length]
"""
# A table of positions ends; and a long sequence takes another way.
LIMITED = """
        assert length <= 512
        y = self.up(x)
        return y if length <= 300 and x.shape[0] < 5000 else y.cumsum(1)
"""
# Beyond 100 steps it drifts away, which can hardly be seen at 101.
DRIFTING = """
        y = self.up(x).mean(1)
        return y if length <= 100 else y * (1 + (length - 100) * 1e-5)
"""
# Slices of other sizes than the example's, which torch tells from empty ones; down to 4 steps.
SHIFTED = """
        y = self.up(F.avg_pool1d(x.mT, 4).mT)
        steps, z = y.shape[1], torch.zeros_like(y)
        z[:, 1:steps, :4] = y[:, :steps - 1, :4]
        z[:, :steps - 1, 4:] = y[:, 1:steps, 4:]
        return z
"""
# A gradient needs what is written to.
IN_PLACE = """
        y = self.up(x).sigmoid()
        z = y * y
        return z + y.mul_(2)
"""


def test_conditions_are_in_words() -> None:
    batch, length = sympy.symbols("batch length", integer=True, positive=True)
    said = {
        "batch != 1": sympy.Ne(16 * batch * length, 16 * length),
        "length >= 2": length > 1,
        "Mod(length, 4) == 0": sympy.Eq(Mod(length, 4), 0),
        "-length >= -4": -length > -5,
        "batch*length + batch + 3 >= 5": batch * length + batch + 3 >= 5,
    }
    assert {text: in_words(condition) for text, condition in said.items()} == {t: t for t in said}


def test_a_condition_that_is_so_wherever_it_can_be_asked_is_in_words() -> None:
    """Of no places there is no remainder."""
    height, width = sympy.symbols("height width", integer=True, positive=True)
    patches = FloorDiv(height, 2) + FloorDiv(width, 2)
    (said,) = summarised([sympy.Eq(Mod(8 * patches, 4 * patches), 0)])
    assert said.startswith("Mod(8*")


def test_conditions_of_one_dimension_are_its_sizes() -> None:
    batch, height, width = sympy.symbols("batch height width", integer=True, positive=True)
    half = FloorDiv(height - 1, 8)
    found = summarised(
        [
            batch > 1,
            sympy.Eq(half, 1),
            height < 15,
            sympy.Eq(Mod(width, 8), 0),
            sympy.Ne(width, 8),
            sympy.Eq(half * batch * width, batch * width),  # follows
            sympy.Eq(Mod(batch * height, 3), 0),
            batch > 1,
        ]
    )
    assert found[:2] == ["batch >= 2", "9 <= height <= 14"]
    assert found[2] == "width is a multiple of 8 and >= 16"
    assert found[3:] == ["Mod(batch*height, 3) == 0"]
    few = [sympy.Eq(half, 1), batch < 4, sympy.Ne(half + batch, 7)]
    assert summarised(few) == ["9 <= height <= 16", "1 <= batch <= 3"]
    assert summarised([sympy.Eq(height, 7)]) == ["height == 7"]
    down = [height >= 64, FloorDiv(height, 8) > 1, 8 * FloorDiv(height, 16) > 9]
    halves = [sympy.Eq(n * FloorDiv(height, 32), FloorDiv(height, 32 // n)) for n in (2, 4, 8)]
    assert summarised([*down, *halves]) == ["height is 64 to 67, 96 to 99 and so on"]
    uneven = [sympy.Ne(height, 70), sympy.Ne(height, 71)]
    assert summarised([*down, *halves, sympy.Ne(height, 97)]) == [
        "height >= 64",
        "8*((height//32)) == (height//4)",
        "height != 97",
    ]
    assert summarised([*uneven]) == ["height != 70", "height != 71"]
    assert summarised([sympy.Eq(FloorDiv(height, 8) * 16, FloorDiv(height, 4) * 8)]) == [
        "height is 1 to 3, 8 to 11 and so on"
    ]
    assert summarised([sympy.Eq(Mod(height, 4), 1), sympy.Ne(height, 4), height > 0]) == [
        "Mod(height, 4) == 1"
    ]
    chunks = sympy.Eq(4 * batch * width, 32 * batch * FloorDiv(width, 8))
    assert summarised([width > 7, chunks]) == ["width is a multiple of 8"]
    tokens = height * width // 4
    even = [sympy.Eq(Mod(height, 8), 0), sympy.Eq(Mod(width, 8), 0)]
    said = ["height is a multiple of 8", "width is a multiple of 8"]
    assert summarised([*even, sympy.Eq(Mod(tokens, 16), 0)]) == said
    assert len(summarised([*even, sympy.Eq(Mod(tokens, 32), 0)])) == 3
    assert len(summarised([*even, height * width < 10**6])) == 3
    follows = 256 * batch * FloorDiv(width, 8) > 1
    of_eight = sympy.Eq(Mod(width, 8), 0)
    assert summarised([of_eight, follows]) == ["width is a multiple of 8"]
    assert summarised([of_eight, follows, batch * width < 2000])[1:] == ["batch*width < 2000"]
    assert summarised([sympy.Eq(Mod(width, 3), 0), batch * width <= 1023])[1:]  # 1026 is one, too
    assert summarised([of_eight, batch * width < 2**31])[1:] == [f"batch*width < {2**31}"]
    assert summarised([sympy.Eq(height, 7), batch * height > 6]) == ["height == 7"]
    assert summarised([sympy.Eq(height, 7), batch * height > 7])[1:] == ["batch*height >= 8"]
    limit = [sympy.Eq(height, sympy.Min(2000, height)), height < 1999, height < 5000]
    assert summarised(limit) == ["height <= 1998"]
    assert summarised([height <= 1024]) == ["height <= 1024"]  # as far as is tried
    assert summarised([*limit, height > 7, height * width > 7]) == [
        "height >= 8",
        "height <= 1998",
    ]
    assert summarised([of_eight, width < 5000]) == ["width is a multiple of 8", "width <= 4999"]
    assert summarised([of_eight, width < 5000, width * height <= 4992 * height])[2:] == []
    assert summarised([of_eight, width < 5000, width * height < 4992 * height]) == [
        "width is a multiple of 8",
        "width <= 4991",
    ]
    odd = sympy.Eq(Mod(height, 2), 1)
    assert summarised([odd]) == [in_words(odd)]
    assert summarised([]) == []


def test_conditions_that_nobody_reads_are_counted() -> None:
    short, long = "length >= 2", " + ".join(["length"] * 20)
    assert f"only where {short}, which" in conditional("forward", {"conditions": [short]})
    one = conditional("forward", {"conditions": [long, short]})
    assert f"only where {short} and 1 longer condition of the manifest holds, which" in one
    two = conditional("f", {"conditions": [long, long]})
    assert "where 2 longer conditions of the manifest hold, which" in two
    assert two.endswith("; elsewhere its artifacts refuse")
    unseen = conditional("f", {"conditions": [short], "unchecked": [short]})
    assert f"refuse, but for {short}: there they may give something else unnoticed" in unseen


def exported(
    forward: str,
    folder: Path,
    programs: Sequence[Kind] = api.PROGRAMS,
    *,
    mask: bool = False,
    seed: int = 0,
) -> tuple[Bundle, str]:
    """A bundle of a net with one layer, and what --model would be."""
    file = folder / "net.py"
    file.write_text((NET.replace("(self, x)", "(self, x, mask)") if mask else NET) + forward)
    state = {"up.weight": torch.randn(8, 8), "up.bias": torch.randn(8)}
    torch.save(state, folder / "w.pth")
    bundle = api.export(
        folder / "w.pth",
        folder / "bundle",
        model=f"{file}:Net",
        inputs=parse_inputs(["x:[batch,length,8]", *["mask:int64[batch,length]<2"] * mask]),
        programs=programs,
        format=["onnx", "exported_program"],
        seed=seed,
    )
    return bundle, f"{file}:Net"


@pytest.mark.parametrize("forward", [SINGLE, GROUPS], ids=["single", "groups"])
def test_what_torch_need_not_take_for_granted_is_compared(forward: str, tmp_path: Path) -> None:
    bundle, model = exported(forward, tmp_path)
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, model=model, runtime=["onnxruntime", "exported_program"])
    assert report.exit_code(strict=True) == 0, report.failures()
    alone = [row for row in report.results if row.case == "every dimension 1"]
    assert {row.runtime for row in alone} == {"float64", "onnxruntime", "exported_program"}


_OF_A_GRADIENT = "y.detach() + 0 * y"


@pytest.mark.parametrize(
    ("other", "programs"),
    [
        ("2 * y", ["forward"]),
        (_OF_A_GRADIENT, ["forward", "gradient"]),
        (_OF_A_GRADIENT, ["forward"]),  # which autograd takes
        ("y + 3e-5 * y.flip(-1)", ["forward"]),
        ("2 * y if x.shape[1] < 10 else y", ["forward"]),
    ],
    ids=["outputs", "gradients", "gradients of a forward", "little", "short"],
)
def test_what_makes_a_difference_is_no_harmless_condition(
    other: str, programs: list[Kind], tmp_path: Path
) -> None:
    bundle, _ = exported(OTHERWISE.replace("OTHER", other), tmp_path, programs)
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["length is a multiple of 4"]


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_that_happens_to_hide_nothing_shows_no_harmless_condition(
    seed: int, tmp_path: Path
) -> None:
    """Of a mask of one step, half of all draws do so."""
    bundle, _ = exported(UNMASKED, tmp_path, ["forward"], mask=True, seed=seed)
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["length >= 2"]


def test_torch_prints_nothing_of_a_size_that_is_tried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = exported(DIVIDING, tmp_path)
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["length >= 2"]
    assert "ZeroDivisionError" not in capfd.readouterr().err


def test_what_a_program_does_not_hold_for_is_said(tmp_path: Path) -> None:
    """Exported at a multiple of 4, the branch that cuts the padding off is in no artifact."""
    bundle, model = exported(PADDED, tmp_path)
    facts = bundle.manifest["programs"]["forward"]
    assert any(words.startswith("length is a multiple of 4") for words in facts["conditions"])
    assert "unchecked" not in facts
    branch = (NET + PADDED).split("\n").index("        return y[:, :length] if missing else y") + 1
    placed = conditional("forward", facts, [f"{tmp_path / 'net.py'}:{branch}"])
    assert placed in bundle.manifest["notes"]
    note = conditional("forward", facts)
    report = api.verify(bundle.folder, model=model, runtime=["onnxruntime"])
    moved = "every dimension 1, moved up to batch 1, length "
    assert any(row.case.startswith(moved) for row in report.results)  # by as much as torch wants
    assert note in report.notes
    assert report.exit_code() == 0


def test_limits_that_no_case_passes_are_said(tmp_path: Path) -> None:
    bundle, _ = exported(LIMITED, tmp_path, ["forward"])
    facts = bundle.manifest["programs"]["forward"]
    assert sorted(facts["conditions"]) == ["1 <= length <= 300", "batch <= 4999"]
    lines = (NET + LIMITED).split("\n")
    asked = (next(n for n, x in enumerate(lines, 1) if word in x) for word in ("cumsum", "assert"))
    places = [f"{tmp_path / 'net.py'}:{line}" for line in asked]
    assert conditional("forward", facts, places) in bundle.manifest["notes"]


def test_limits_below_are_tried_too(tmp_path: Path) -> None:
    bundle, model = exported(SHIFTED, tmp_path)
    found = bundle.manifest["programs"]["forward"].get("conditions", [])
    assert found == ["length >= 4"]
    assert api.verify(bundle.folder, model=model).exit_code() == 0


def test_a_limit_is_tried_further_beyond_it(tmp_path: Path) -> None:
    bundle, _ = exported(DRIFTING, tmp_path, ["forward"])
    assert bundle.manifest["programs"]["forward"]["conditions"] == ["1 <= length <= 100"]


@pytest.mark.parametrize("programs", [["forward"], ["forward", "gradient"]])
def test_programs_have_the_gradient_of_what_is_written_to_in_place(
    programs: list[str], tmp_path: Path
) -> None:
    """Autograd refuses the model itself; what it saves is copied, but for its other forms."""
    bundle, model = exported(IN_PLACE, tmp_path, programs)
    runtimes = ["eager", "onnxruntime", "exported_program"]
    report = api.verify(bundle.folder, model=model, runtime=runtimes)
    assert report.exit_code() == 0, report.failures()
    lacking = [row for row in report.results if row.verdict == "unsupported"]
    assert {(row.runtime, row.way) for row in lacking} == {("eager", "autograd forms")}
    assert all("writes in place" in str(row.reason) for row in lacking)
    compared = {row.runtime for row in report.results if row.tensor == "grad/up.weight"}
    assert compared - {"float64"} == (
        {"eager", "exported_program"} if len(programs) == 1 else set(runtimes)
    )
    power = api.self_test(bundle.folder, model=model, runtime=["exported_program"])
    assert power.exit_code() == 0


def test_gradients_that_there_are_none_of_are_told() -> None:
    def said(none: list[str], *outputs: str) -> list[str]:
        entry = {"none": none, "outputs": [{"name": name} for name in outputs]}
        return ungraded({"forward": {"none": ["grad/w"]}, "gradient": entry})

    assert ungraded({"forward": {"none": []}}) == []
    assert said([], "y", "grad/x") == []
    assert "there is no gradient at all" in said(["grad/x"], "y")[0]
    (note,) = said([f"grad/{i}" for i in range(5)], "y", "grad/x")
    assert note.startswith("there is no grad/0, grad/1, grad/2 and 2 more: ")


def test_sizes_hold_where_a_gradient_is_zero_but_for_rounding() -> None:
    """As a bias before a norm, of VMRNN at batch 1, beside gradients of 17."""
    rounded, otherwise = torch.tensor([5e-5, -3e-5]), torch.tensor([-1e-5, 2e-5])
    assert close(rounded, otherwise, 17.0)
    assert not close(rounded, otherwise, 1.0)
    assert not close(rounded + 1e-3, otherwise, 17.0)
    none = torch.tensor([float("nan"), float("inf"), 1.0])
    assert close(none, none.clone(), 0.0)
    assert not close(none, torch.tensor([float("nan"), 2.0, 1.0]), 0.0)
    assert not close(none, none.nan_to_num(), 0.0)
