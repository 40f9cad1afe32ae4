"""Layers of bitsandbytes in a user's own model code, and checkpoints of it."""

import json
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api, checkpoint, models, user_code
from fuseport.exporter.errors import ExportFailed, FuseportError, Missing
from fuseport.exporter.models.user import parse_inputs
from fuseport.ops.nf4_linear import dequantize_4bit, quantize_4bit
from fuseport.ops.nf4_linear.storage import CODES

CODE_OF_A_USER = """
import bitsandbytes as bnb
import lightning
import torch
import torch.nn.functional as F
from torch import nn


class Beside(nn.Module):
    def __init__(self, double):
        super().__init__()
        self.base = bnb.nn.Linear4bit(64, 128, compress_statistics=double)  # FP4
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(64, 3, bias=False), nn.Linear(3, 128, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.b(self.a(x))


class Within(bnb.nn.LinearNF4):
    def __init__(self):
        super().__init__(128, 64, bias=False)
        self.lora_a = nn.Parameter(torch.randn(3, 128))
        self.lora_b = nn.Parameter(torch.ones(64, 3))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Net(lightning.LightningModule):
    def __init__(self, double=True):
        super().__init__()
        self.save_hyperparameters()
        self.up, self.down = Beside(double), Within()

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))

    def training_step(self, batch, _):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Peft(Net):
    def __init__(self, double=True, **settings):
        super().__init__(double)
        import peft

        plain = nn.Sequential(
            bnb.nn.LinearFP4(64, 128, compress_statistics=double),
            nn.SiLU(),
            bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32),
        )
        plain.is_loaded_in_4bit = True
        plain.to("cpu")
        settings |= {"target_modules": ["0", "2"], "init_lora_weights": False}
        self.up = peft.get_peft_model(plain, peft.LoraConfig(r=3, **settings))
        self.down = nn.Identity()


class Dora(Peft):
    def __init__(self, double=True):
        super().__init__(double, use_dora=True)


class One(nn.Module):
    def __init__(self, layer="Linear4bit", **settings):
        super().__init__()
        self.layer = getattr(bnb.nn, layer)(64, 64, **settings)

    def forward(self, x):
        return self.layer(x)


class Apart(One):
    def forward(self, x):
        weight = self.layer.weight
        return bnb.matmul_4bit(x, weight.t(), quant_state=weight.quant_state)


def one():
    return One(quant_type="nf4")


def apart():
    return Apart(quant_type="nf4")


def eight():
    return One("Linear8bitLt", has_fp16_weights=False)


def table():
    module = one()
    module.table = bnb.nn.EmbeddingNF4(4, 64)
    return module


def elsewhere():
    module = one()
    module.layer = nn.Bilinear(64, 64, 64)
    return module
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    written = tmp_path_factory.mktemp("code") / "nets.py"
    written.write_text(CODE_OF_A_USER)
    return written


def trained(module: Any, path: Path) -> None:
    """A checkpoint of Lightning, which has bitsandbytes quantize the layers when it begins."""
    import lightning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.TensorDataset(torch.randn(8, 64))
        trainer.fit(module, torch.utils.data.DataLoader(data, 4))
        trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "double"), [("Net", True), ("Net", False), ("Peft", True), ("Dora", True)]
)
def test_it_computes_what_bitsandbytes_does(
    file: Path, tmp_path: Path, name: str, double: bool
) -> None:
    if name != "Net":
        pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    expected: Any = getattr(user_code.imported("", str(file)), name)(double)
    trained(expected, tmp_path / "net.ckpt")
    model, _ = models.from_checkpoint(
        checkpoint.load(tmp_path / "net.ckpt"),
        code=f"{file}:{name}",
        inputs=parse_inputs(["x:[batch,64]"]),
    )
    assert [len(model.config[code]) for code in CODES] == [1, 1]
    x, cotangent = torch.randn(2, 5, 64)
    found = {}
    for module in (model.module, expected.eval()):
        given, named = x.clone().requires_grad_(), dict(module.named_parameters())
        wanted = {n: p for n, p in named.items() if p.requires_grad}
        out = module(given)
        gradients = torch.autograd.grad(out, [given, *wanted.values()], cotangent)
        found[module] = dict(zip(["out", "x", *wanted], [out, *gradients], strict=True))
    ours, theirs = found.values()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_verifies(file: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained(user_code.imported("", str(file)).Net(), tmp_path / "net.ckpt")
    given: dict[str, Any] = {"model": f"{file}:Net", "inputs": "x:[batch,64]", "format": "onnx"}
    bundle = api.export(tmp_path / "net.ckpt", tmp_path / "b", **given)
    nodes = [node.op_type for node in onnx.load(bundle.folder / "forward.onnx").graph.node]
    assert nodes.count("nf4_linear") == 2
    outputs = [spec["name"] for spec in bundle.manifest["programs"]["gradient"]["outputs"]]
    adapters = ("up.a.weight", "up.b.weight", "down.lora_a", "down.lora_b")
    assert {*outputs} == {"output", "grad/x", *(f"grad/{name}" for name in adapters)}
    report = api.verify(bundle.folder, model=given["model"], runtime=["onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()


@pytest.mark.parametrize(
    ("saved", "moved", "name", "kind", "said"),
    [
        (
            "eight",
            True,
            "eight",
            Missing,
            r"layer\.weight is in eight bits .* only four bits",
        ),
        ("one", False, "one", Missing, r"layer\.weight is of a layer .* model\.to\('cpu'\)"),
        ("one", True, "table", Missing, r"table\.weight is what .* of the class EmbeddingNF4"),
        ("one", True, "elsewhere", Missing, "layer is a Bilinear, and stored in four bits: only"),
        ("one", True, "apart", ExportFailed, "quant_state'; .* call the layer itself"),
    ],
)
def test_what_has_no_form_here_is_refused_in_a_line(
    file: Path,
    tmp_path: Path,
    saved: str,
    moved: bool,
    name: str,
    kind: type[FuseportError],
    said: str,
) -> None:
    module = getattr(user_code.imported("", str(file)), saved)()
    torch.save((module.to("cpu") if moved else module).state_dict(), tmp_path / "w.pth")
    with pytest.raises(kind, match=said):
        api.export(
            tmp_path / "w.pth", tmp_path / "b", model=f"{file}:{name}", inputs="x:[batch,64]"
        )


PLAIN = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 8), nn.Linear(8, 4))
"""


def in_nf4(layer: nn.Linear, name: str, block_size: int) -> dict[str, Tensor]:
    """What a checkpoint has of a layer in NF4, and the layer with the values of that."""
    packed, absmax = quantize_4bit(layer.weight, block_size)
    shape = [*layer.weight.shape]
    state = {"quant_type": "nf4", "blocksize": block_size, "dtype": "float32", "shape": shape}
    layer.weight.data = dequantize_4bit(packed, absmax, tuple(shape), block_size)
    return {
        f"{name}.bias": layer.bias.detach(),
        f"{name}.weight": packed[:, None],
        f"{name}.weight.absmax": absmax,
        f"{name}.weight.quant_map": torch.tensor(CODES["nf4"]),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        ),
    }


def test_without_bitsandbytes_code_has_plain_layers(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(PLAIN)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    tensors = in_nf4(expected[0], "net._orig_mod.0", 32)
    others = {f"net._orig_mod.1.{name}": t for name, t in expected[1].state_dict().items()}
    torch.save({"state_dict": {**tensors, **others, "loss.weight": torch.ones(2)}}, tmp_path / "w")
    code, specs = f"{tmp_path / 'net.py'}:Net", parse_inputs(["x:[batch,16]"])
    loaded = checkpoint.load(tmp_path / "w")
    model, notes = models.from_checkpoint(loaded, code=code, inputs=specs)
    assert model.config["nf4"] == {"0": 32}
    assert "not part of the model, left out: loss.weight" in notes
    x = torch.randn(3, 16)
    torch.testing.assert_close(model.module(x), expected(x), rtol=1e-6, atol=1e-6)
