"""Folders that torch.distributed.checkpoint wrote, by one process and by several."""

import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from fuseport.cli import main
from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import CorruptInput, FuseportError, UnsafeInput, UsageError

LIGHTNING = Path(__file__).parent.parent / "fixtures" / "lightning" / "mamba-kjv.ckpt"


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 3, generator=generator),
        "a.bias": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.empty(0, 2),
    }


def saved(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_model_of_what_training_saves(tmp_path: Path) -> None:
    module = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    content |= {"lr_scheduler": {"last": torch.ones(2)}, "rng_state": torch.ones(2)}
    checkpoint = load(saved(tmp_path / "f", content))
    assert_same(checkpoint.tensors, dict(module.state_dict()))
    assert (checkpoint.layout, checkpoint.weights) == ("distributed", "model")


def test_a_state_dict_alone(tmp_path: Path) -> None:
    assert_same(load(saved(tmp_path / "f", tensors())).tensors, tensors())


def test_models_inside_are_chosen_by_name(tmp_path: Path) -> None:
    content = {"app": {"ema": tensors(1), "model": tensors(2), "optim": {"m": torch.ones(2)}}}
    folder = saved(tmp_path / "f", content)
    with pytest.raises(UsageError, match=r"app\.model.*app\.ema"):
        load(folder)
    assert_same(load(folder, weights="app.ema").tensors, tensors(1))
    assert_same(load(folder, weights="app.model").tensors, tensors(2))


def test_the_usual_name_is_taken_before_others(tmp_path: Path) -> None:
    content = {"auxiliary": {"w": torch.ones(2)}, "model": tensors()}
    checkpoint = load(saved(tmp_path / "f", content))
    assert checkpoint.weights == "model"
    assert any("auxiliary is in the file too" in note for note in checkpoint.notes)


def test_what_is_no_tensor_is_said(tmp_path: Path) -> None:
    checkpoint = load(saved(tmp_path / "f", {"model": {**tensors(), "a._extra_state": b"scales"}}))
    assert_same(checkpoint.tensors, tensors())
    assert any("entries that are no tensors" in note for note in checkpoint.notes)


WORKER = """
    import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.fsdp import fully_shard
    from fuseport.tests.test_checkpoint_distributed import tensors

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    if dist.get_rank() == 0:
        torch.save(module.state_dict(), sys.argv[2])
    fully_shard(module, mesh=mesh)
    columns = distribute_tensor(tensors()["a.weight"], mesh, [Shard(1)])
    every = distribute_tensor(tensors()["a.bias"], mesh, [Replicate()])
    content = {"model": module.state_dict(), "other": {"columns": columns, "every": every}}
    dcp.save(content, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()
"""


def test_two_processes_have_parts(tmp_path: Path) -> None:
    """FSDP's of 5 rows, 3 and 2; columns, 2 and 1; and what both processes have."""
    script, folder, whole = tmp_path / "w.py", tmp_path / "f", tmp_path / "whole.pt"
    script.write_text(textwrap.dedent(WORKER))
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [sys.executable, *launched, str(script), str(folder), str(whole)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
    )
    assert len(list(folder.glob("*.distcp"))) == 2
    assert_same(load(folder, weights="model").tensors, torch.load(whole))
    other = load(folder, weights="other").tensors
    assert_same(other, {"columns": tensors()["a.weight"], "every": tensors()["a.bias"]})


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_lightnings_strategies(key: str, tmp_path: Path) -> None:
    """`ModelParallelStrategy` and `FSDPStrategy` move the weights out of what Lightning saves."""
    assert lightning.__version__
    content = torch.load(LIGHTNING, weights_only=True)
    weights = content.pop("state_dict")
    folder = saved(tmp_path / "epoch=1.ckpt", {key: weights, "optimizer_0": {"m": torch.ones(2)}})
    content.pop("optimizer_states", None)
    torch.save(content, folder / "meta.pt")
    checkpoint = load(folder)
    expected = load(LIGHTNING)
    assert_same(checkpoint.tensors, expected.tensors)
    assert checkpoint.config == expected.config
    shown = CliRunner().invoke(main, ["inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "architecture  mamba, by" in shown.output
    assert "written by Lightning" in shown.output
    assert "config        d_model: 64" in shown.output


# --- what is refused -----------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


def place(content: Any, name: str) -> Any:
    return next(v for k, v in content.storage_data.items() if k.fqn == name)


def _outside(content: Any) -> None:
    place(content, "a.weight").relative_path = "../f/__0_0.distcp"


def _absent(content: Any) -> None:
    place(content, "a.weight").relative_path = "__1_0.distcp"


def _short(content: Any) -> None:
    place(content, "a.weight").length = 8


def _late(content: Any) -> None:
    place(content, "a.weight").offset = 10**6


def _same_bytes(content: Any) -> None:
    place(content, "a.weight").offset = place(content, "a.bias").offset


def _of_another(content: Any) -> None:
    one, other = place(content, "a.weight"), place(content, "a.bias")
    one.offset, other.offset = other.offset, one.offset
    one.length, other.length = other.length, one.length


def _transformed(content: Any) -> None:
    place(content, "a.weight").transform_descriptors = ["zstd"]


def _large(content: Any) -> None:
    content.state_dict_metadata["a.weight"].size = torch.Size([2**40, 2**40])


def _beyond(content: Any) -> None:
    content.state_dict_metadata["a.weight"].chunks[0].offsets = torch.Size([1, 0])


def _less(content: Any) -> None:
    content.state_dict_metadata["a.weight"].size = torch.Size([6, 3])


def _no_parts(content: Any) -> None:
    content.state_dict_metadata["a.weight"].chunks = []


def _nowhere(content: Any) -> None:
    del content.storage_data[MetadataIndex("a.weight", torch.Size([0, 0]))]


def _no_dtype(content: Any) -> None:
    content.state_dict_metadata["a.weight"].properties = None


def _odd_part(content: Any) -> None:
    content.state_dict_metadata["a.weight"].chunks = [3]


def _odd_sizes(content: Any) -> None:
    content.state_dict_metadata["a.weight"].size = [5, 3]


def _odd_place(content: Any) -> None:
    place(content, "a.weight").offset = -1


def _odd_index(content: Any) -> None:
    content.storage_data["a.weight"] = None


def _no_values(content: Any) -> None:
    content.state_dict_metadata = None


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (_outside, UnsafeInput, "a file outside the folder"),
        (_absent, CorruptInput, "not in the folder"),
        (_short, CorruptInput, "a part of 8 bytes, too few"),
        (_late, CorruptInput, "it ends before its parts do"),
        (_same_bytes, CorruptInput, "two parts are at byte"),
        (_of_another, CorruptInput, r"is no torch\.(float32|bfloat16) of"),
        (_transformed, CorruptInput, "transformed, by .*zstd"),
        (_large, CorruptInput, "a tensor of"),
        (_beyond, CorruptInput, "a part outside of it"),
        (_less, CorruptInput, "its parts are not all of it, each once"),
        (_no_parts, CorruptInput, "it has no parts"),
        (_nowhere, CorruptInput, "a part outside of it, or of no file"),
        (_no_dtype, CorruptInput, "a.weight: it has no dtype"),
        (_odd_part, CorruptInput, "a.weight: a part that is none"),
        (_odd_sizes, CorruptInput, "sizes that are no whole numbers"),
        (_odd_place, CorruptInput, "a part at no place of a file"),
        (_odd_index, CorruptInput, "a place of something that is no value"),
        (_no_values, CorruptInput, "it does not say what there is"),
    ],
)
def test_metadata_that_do_not_fit(
    change: Callable[[Any], None], kind: type[FuseportError], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "f", tensors())
    changed(folder, change)
    with pytest.raises(kind, match=reason):
        load(folder)


def test_parts_that_overlap(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", {"a": torch.ones(5, 3)})
    with open(folder / "__1_0.distcp", "wb") as file:
        torch.save(torch.ones(3, 3), file)
    length = (folder / "__1_0.distcp").stat().st_size
    (folder / "__2_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes())

    def change(content: Any) -> None:
        parts = {"__1_0.distcp": torch.Size([0, 0]), "__2_0.distcp": torch.Size([2, 0])}
        size = torch.Size([3, 3])
        chunks = [ChunkStorageMetadata(offsets, size) for offsets in parts.values()]
        content.state_dict_metadata["a"].chunks = chunks
        content.storage_data = {
            MetadataIndex("a", offsets): _StorageInfo(name, 0, length)
            for name, offsets in parts.items()
        }

    changed(folder, change)
    with pytest.raises(CorruptInput, match="its parts are not all of it, each once"):
        load(folder)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (b"", "malformed pickle"),
        (pickle.dumps({"a": 1}), "no metadata of a checkpoint"),
        # A dtype that is called, and then the end.
        (b"ctorch\nfloat32\n)R.", "it cannot be read .TypeError"),
    ],
)
def test_what_is_no_metadata(metadata: bytes, reason: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", tensors())
    (folder / ".metadata").write_bytes(metadata)
    with pytest.raises(CorruptInput, match=reason):
        load(folder)


def test_a_part_that_is_not_dense(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", {"a": torch.ones(3)})
    torch.save(torch.ones(3).to_sparse(), folder / "__0_0.distcp")
    length = (folder / "__0_0.distcp").stat().st_size

    def change(content: Any) -> None:
        place(content, "a").offset, place(content, "a").length = 0, length

    changed(folder, change)
    with pytest.raises(CorruptInput, match="no dense tensor of the CPU"):
        load(folder)


def test_what_is_beside_the_parts_may_be_another_thing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", {"model": tensors()})
    torch.save([1], folder / "meta.pt")
    assert load(folder).config == {}


@dataclasses.dataclass
class _Command:
    ran: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.ran,)


def test_a_command_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", tensors())

    def change(content: Any) -> None:
        content.planner_data = _Command(tmp_path / "ran")

    changed(folder, change)
    with pytest.raises(UnsafeInput, match=r"would import .*nothing was run"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_command_in_a_part_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", {"a": torch.ones(3)})
    torch.save({"a": _Command(tmp_path / "ran")}, folder / "__0_0.distcp")
    length = (folder / "__0_0.distcp").stat().st_size

    def change(content: Any) -> None:
        place(content, "a").offset, place(content, "a").length = 0, length

    changed(folder, change)
    with pytest.raises(UnsafeInput, match="loading it would import and call"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_part(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", tensors())
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(tensors()["a.weight"].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptInput, match="its checksum does not match"):
        load(folder)


def test_training_alone_has_no_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "f", {"optimizer": {"m": torch.ones(2)}, "step": 3})
    with pytest.raises(CorruptInput, match="no tensors in it but of training"):
        load(folder)
