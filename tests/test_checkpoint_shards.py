"""Weights in several files: read as one, or one line on what does not belong together."""

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import CorruptInput

HUGGING_FACE = Path(__file__).parent.parent / "fixtures" / "huggingface"


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The index of the fixture in two shards."""
    stem, suffix = request.param.rsplit(".", 1)
    tensors = safetensors.torch.load_file(HUGGING_FACE / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    save = safetensors.torch.save_file if suffix == "safetensors" else torch.save
    for i, part in enumerate((names[:10], names[10:]), start=1):
        file = f"{stem}-{i:05}-of-00002.{suffix}"
        save({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    shutil.copy(HUGGING_FACE / "config.json", tmp_path)
    index = tmp_path / f"{request.param}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards(sharded: Path) -> None:
    whole = load(HUGGING_FACE).tensors
    tensors = load(sharded.parent).tensors
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())


def test_shards_of_transformers(tmp_path: Path) -> None:
    model = transformers.MambaForCausalLM.from_pretrained(HUGGING_FACE)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    checkpoint, whole = load(tmp_path), load(HUGGING_FACE).tensors
    assert checkpoint.weights == "model.safetensors.index.json"
    assert checkpoint.tensors.keys() == whole.keys()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "not in the folder; fetch it too"),
        ("unlisted", "a shard that the index does not list"),
        ("twice", "another shard has it too"),
        ("unlisted key", "does not list it"),
        ("wrong shard", "says that it is in"),
        ("listed twice", "occurs twice"),
        ("truncated", "00002"),
    ],
)
def test_shards_that_do_not_belong_together(sharded: Path, fault: str, said: str) -> None:
    folder, value = sharded.parent, json.loads(sharded.read_text())
    first, second = sorted(set(value["weight_map"].values()))
    key = next(iter(value["weight_map"]))
    if fault == "missing":
        (folder / second).unlink()
    elif fault == "unlisted":
        shutil.copy(folder / second, folder / second.replace("00002-of-00002", "00003-of-00003"))
    elif fault == "twice":
        shutil.copy(folder / first, folder / second)
    elif fault == "unlisted key":
        del value["weight_map"][key]
    elif fault == "wrong shard":
        value["weight_map"][key] = second
    elif fault == "truncated":
        (folder / second).write_bytes((folder / second).read_bytes()[:-1])
    sharded.write_text(json.dumps(value))
    if fault == "listed twice":
        sharded.write_text(json.dumps(value).replace('"metadata": {}', '"weight_map": {}'))
    with pytest.raises(CorruptInput) as caught:
        load(folder)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("__0_0.distcp", "whose .metadata is not there; fetch it too"),
        ("latest", "zero_to_fp32.py FOLDER FILE"),
        ("mp_rank_00_model_states.pt", "DeepSpeed's"),
        ("adapter_config.json", "merge_and_unload"),
    ],
)
def test_folders_that_are_no_state_dict_yet(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CorruptInput, match=re.escape(advice)):
        load(tmp_path)
