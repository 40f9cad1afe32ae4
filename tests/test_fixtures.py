"""The shipped checkpoints are what fixtures/README.md says, and their scripts still make them."""

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from fuseport.exporter.checkpoint import load
from fuseport.exporter.models import mamba
from fuseport.exporter.models.mamba import MambaLM
from fuseport.exporter.models.weights import fit

FIXTURES = Path(__file__).parent.parent / "fixtures"
README = (FIXTURES / "README.md").read_text()
CHECKPOINTS = ["lightning/mamba-kjv.ckpt", "state_spaces", "huggingface"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hold(made: Mapping[str, Tensor], shipped: Mapping[str, Tensor]) -> None:
    """The same to the bit, but what comes of torch's logarithm, which processors round apart."""
    assert made.keys() == shipped.keys()
    for name, tensor in shipped.items():
        if name.endswith(("A_log", "dt_proj.bias")):
            torch.testing.assert_close(made[name], tensor, rtol=2e-7, atol=0)
        else:
            assert torch.equal(made[name], tensor), name


def model_of(path: Path) -> MambaLM:
    checkpoint = load(path)
    config = mamba.recognise(checkpoint)
    assert config is not None
    model = mamba.model(config)
    fit(model.module, model.renamed(checkpoint.tensors), str(path))
    assert isinstance(model.module, MambaLM)
    return model.module.eval()


def test_hashes_are_those_in_the_readme() -> None:
    listed = dict(re.findall(r"^([\w./-]+) +([0-9a-f]{64})$", README, re.MULTILINE))
    shipped = {
        str(file.relative_to(FIXTURES))
        for folder in (
            *("lightning", "state_spaces", "huggingface", "text"),
            *("nf4", "fp4", "nf4_lora", "gptq", "awq"),
        )
        for file in (FIXTURES / folder).iterdir()
        if file.name != "LICENSE"
    }
    assert listed.keys() == shipped
    for name, digest in listed.items():
        assert hashlib.sha256((FIXTURES / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_small_and_runs(name: str) -> None:
    path = FIXTURES / name
    files = list(path.iterdir()) if path.is_dir() else [path]
    assert sum(file.stat().st_size for file in files) < 2_000_000
    model = model_of(path)
    ids = torch.arange(40).reshape(2, 20) * 5
    logits = model(ids)
    logits.backward(torch.randn_like(logits))
    assert logits.isfinite().all()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-6, f"{parameter_name}: a gradient too small to test"


def test_the_trained_model_has_learned() -> None:
    """1.3 nats per byte: chance is 5.5, and byte pairs alone give 2.2."""
    model = model_of(FIXTURES / "lightning" / "mamba-kjv.ckpt")
    text = (FIXTURES / "text" / "genesis-kjv.txt").read_bytes()
    ids = torch.tensor([list(text[i : i + 201]) for i in range(0, 40_000, 5_000)])
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss < 1.3


def test_lightning_script_writes_the_layout_that_is_shipped(tmp_path: Path) -> None:
    path = script("make_lightning").main(tmp_path, steps=2, batch=2, length=16)
    made, shipped = load(path), load(FIXTURES / "lightning" / "mamba-kjv.ckpt")
    assert made.layout == shipped.layout
    assert made.config.keys() == shipped.config.keys()
    assert {n: t.shape for n, t in made.tensors.items()} == {
        n: t.shape for n, t in shipped.tensors.items()
    }


def test_state_spaces_script_writes_what_is_shipped(tmp_path: Path) -> None:
    made = load(script("make_state_spaces").main(tmp_path / "new"))
    shipped = load(FIXTURES / "state_spaces")
    assert made.config == shipped.config
    hold(made.tensors, shipped.tensors)


def test_huggingface_script_writes_what_is_shipped(tmp_path: Path) -> None:
    made = load(script("make_huggingface").main(tmp_path / "new"))
    shipped = load(FIXTURES / "huggingface")
    assert made.tensors.keys() == shipped.tensors.keys()
    if transformers.__version__ == shipped.config["transformers_version"]:
        # Another version may draw its initial values in another order.
        assert made.config == shipped.config
        hold(made.tensors, shipped.tensors)
