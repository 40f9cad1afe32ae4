"""Layouts as projects write them: which weights are taken, and what a wrong file is told.

Where the project's library is here (Lightning, torch, transformers), it writes the file; elsewhere
code that follows what the project publishes.
"""

import argparse
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.checkpoint import load, registry
from fuseport.exporter.errors import CorruptInput, FuseportError, UnsafeInput, UsageError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.models.weights import fit


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(Network().state_dict())


def assert_fits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    module = Network()
    fit(module, tensors, "f")
    assert all(torch.equal(t, expected[name]) for name, t in module.state_dict().items())


def refused(path: Path, kind: type[FuseportError], weights: str | None = None) -> str:
    with pytest.raises(FuseportError) as caught:
        load(path, weights)
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    return str(caught.value)


# --- what training scripts save ------------------------------------------------------------------


def training_state() -> dict[str, Any]:
    optimizer = torch.optim.AdamW(Network().parameters())
    sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    return {
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "scaler": scaler.state_dict(),
    }


def vim() -> dict[str, Any]:
    """`main.py` of Vim."""
    args = argparse.Namespace(model="vim_tiny", lr=1e-3, output_dir=Path("out"), device="cuda")
    return {"model": weights(), "model_ema": weights(1), **training_state(), "args": args}


def vmamba(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`save_checkpoint_ema` of VMamba; yacs' CfgNode is a dict with attributes of its own."""
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    package, module = types.ModuleType("yacs"), types.ModuleType("yacs.config")
    vars(module)["CfgNode"] = node
    monkeypatch.setitem(sys.modules, "yacs", package)
    monkeypatch.setitem(sys.modules, "yacs.config", module)
    config, inner = node(), node(TYPE="vssm", EMBED_DIM=96)
    config["MODEL"] = inner
    for one in (config, inner):
        vars(one).update({"__immutable__": True, "__deprecated_keys__": set()})
    best = {"max_accuracy": np.float64(82.5), "max_accuray_ema": 83.0}
    state = {"model": weights(), "model_ema": weights(1), **training_state(), "config": config}
    return state | best


def timm() -> dict[str, Any]:
    """`CheckpointSaver` of timm, which MambaVision is trained with; under data parallelism."""
    args = argparse.Namespace(model="mamba_vision_T", amp=True, opt_betas=None)
    state = {"epoch": 3, "arch": "mamba_vision_T", "version": 2, "args": args, "metric": 82.3}
    state["state_dict"] = {f"module.{name}": t for name, t in weights().items()}
    return state | {"state_dict_ema": weights(1), "optimizer": training_state()["optimizer"]}


@pytest.fixture(params=["vim", "vmamba", "timm"])
def trained(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, Path]:
    name = request.param
    state = {"vim": vim, "timm": timm, "vmamba": lambda: vmamba(monkeypatch)}[name]()
    torch.save(state, tmp_path / "w.pth.tar")
    return name, tmp_path / "w.pth.tar"


def test_averaged_weights_are_chosen_by_name(trained: tuple[str, Path]) -> None:
    layout, path = trained
    own, averaged = ("state_dict", "state_dict_ema") if layout == "timm" else ("model", "model_ema")
    message = refused(path, UsageError)
    assert f"equal shapes under {own} and {averaged}" in message
    for name, seed in ((own, 0), (averaged, 1)):
        checkpoint = load(path, name)
        assert (checkpoint.layout, checkpoint.weights) == (layout, name)
        assert_fits(checkpoint.tensors, weights(seed))
    assert f"{own} and {averaged}" in refused(path, UsageError, "ema")


def test_settings_of_the_training_are_no_arguments_of_the_model(trained: tuple[str, Path]) -> None:
    layout, path = trained
    checkpoint = load(path, "state_dict" if layout == "timm" else "model")
    expected: dict[str, dict[str, Any]] = {
        "vim": {"model": "vim_tiny", "lr": 1e-3, "output_dir": "out", "device": "cuda"},
        "vmamba": {"MODEL": {"TYPE": "vssm", "EMBED_DIM": 96}},
        "timm": {"model": "mamba_vision_T", "amp": True, "opt_betas": None},
    }
    said = expected[layout]
    assert checkpoint.config == {}
    assert said.items() <= checkpoint.training.items()


def test_the_only_weights_are_taken(tmp_path: Path) -> None:
    torch.save({"network": weights(), **training_state()}, tmp_path / "w.pth")
    checkpoint = load(tmp_path / "w.pth")
    assert checkpoint.weights == "network"
    assert_fits(checkpoint.tensors, weights())


def test_weights_of_other_shapes_are_noted(tmp_path: Path) -> None:
    torch.save({"model": weights(), "teacher": {"w": torch.ones(9)}}, tmp_path / "w.pth")
    checkpoint = load(tmp_path / "w.pth")
    assert checkpoint.weights == "model"
    assert any("teacher" in note for note in checkpoint.notes)
    assert load(tmp_path / "w.pth", "teacher").tensors.keys() == {"w"}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_two_models_in_one_state_dict_are_chosen_by_prefix(tmp_path: Path, form: str) -> None:
    both = {
        f"{prefix}.{name}": tensor
        for prefix, seed in (("net", 0), ("ema.module", 1))
        for name, tensor in weights(seed).items()
    }
    save = torch.save if form == "torch" else safetensors.torch.save_file
    save(both, tmp_path / "w")
    with pytest.raises(FuseportError, match=r"--weights (ema|net)"):
        fit(Network(), load(tmp_path / "w").tensors, "f")
    assert_fits(load(tmp_path / "w", "ema").tensors, weights(1))
    assert_fits(load(tmp_path / "w", "net").tensors, weights(0))
    refused(tmp_path / "w", UsageError, "bet")


def test_an_averaged_model_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    average = torch.optim.swa_utils.AveragedModel(Network())
    torch.save({"model": weights(), "average": average.state_dict()}, tmp_path / "w")
    assert "model and average" in refused(tmp_path / "w", UsageError)
    assert_fits(load(tmp_path / "w", "average").tensors, weights())


def test_the_command_wants_a_choice_and_takes_it(tmp_path: Path) -> None:
    torch.save(vim(), tmp_path / "w.pth")
    export = ["export", str(tmp_path / "w.pth"), "-o", str(tmp_path / "bundle")]
    unchosen = CliRunner().invoke(main, export)
    assert unchosen.exit_code == 2
    assert "choose by --weights model or --weights model_ema" in unchosen.stderr
    chosen = CliRunner().invoke(main, [*export, "--weights", "model_ema"])
    assert chosen.exit_code == 5, "of no architecture that is built in"
    assert "give your own code" in chosen.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("damage", ["args", "weights"])
def test_a_damaged_training_state(tmp_path: Path, damage: str) -> None:
    state = vim()
    if damage == "args":
        bomb: list[Any] = ["x"]
        for _ in range(60):
            bomb = [bomb, bomb]
        state["args"].bomb = bomb
        torch.save(state, tmp_path / "w")
        assert "args" in refused(tmp_path / "w", CorruptInput)
    else:
        state |= {"model": {}, "model_ema": {}}
        torch.save(state, tmp_path / "w")
        assert "nearest is vim" in refused(tmp_path / "w", CorruptInput)


# --- Lightning -----------------------------------------------------------------------------------


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EMA(Callback):
    """As packages of their own have it: the average in the callback's state."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, tensor in pl_module.state_dict().items():
            before = self.average.get(name, tensor).to(tensor)
            mixed = (before * 0.5 + tensor * 0.5).to(tensor.dtype)
            self.average[name] = mixed.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "ema_state_dict": self.average}


@pytest.mark.parametrize(
    ("callback", "names"),
    [
        (lambda: EMAWeightAveraging(decay=0.5), ["state_dict", "current_model_state"]),
        (
            lambda: StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1),
            ["state_dict", "callbacks.StochasticWeightAveraging.average_model_state"],
        ),
        (EMA, ["state_dict", "callbacks.EMA.ema_state_dict"]),
    ],
    ids=["EMAWeightAveraging", "StochasticWeightAveraging", "EMA"],
)
@pytest.mark.filterwarnings("ignore")
def test_lightning_averages(tmp_path: Path, callback: Any, names: list[str]) -> None:
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback(), Save(tmp_path / "w.ckpt")],
        default_root_dir=tmp_path,
    )
    trainer.fit(Lit(), data)
    message = refused(tmp_path / "w.ckpt", UsageError)
    assert all(name in message for name in names)
    two = [load(tmp_path / "w.ckpt", name) for name in names]
    for checkpoint in two:
        assert checkpoint.layout == "lightning"
        fit(Network(), checkpoint.tensors, "f")
    assert not torch.equal(*(c.tensors["net.head.weight"] for c in two))


class Save(Callback):
    """Saves while training goes on, as ModelCheckpoint does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(self.path)


def test_a_best_score_is_no_candidate(tmp_path: Path) -> None:
    state = {"best_model_score": torch.tensor(0.5), "monitor": "loss"}
    alone = {"best_model_score": torch.tensor(0.5)}
    content = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights(),
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": state, "Best": alone},
    }
    torch.save(content, tmp_path / "w")
    assert load(tmp_path / "w").weights == "state_dict"


# --- nnU-Net, VFIMamba, Mistral ------------------------------------------------------------------


def nnunet() -> dict[str, Any]:
    """`nnUNetTrainer.save_checkpoint`."""
    return {
        "network_weights": weights(),
        "optimizer_state": training_state()["optimizer"],
        "grad_scaler_state": training_state()["scaler"],
        "logging": {"ema_fg_dice": [np.float64(0.5)], "train_losses": [np.float32(1)]},
        "_best_ema": np.float64(0.5),
        "current_epoch": 7,
        "init_args": {
            "plans": {"configurations": {"2d": {"patch_size": [64, 64]}}},
            "configuration": "2d",
            "fold": 0,
            "dataset_json": {"labels": {"background": 0, "organ": 1}},
            "unpack_dataset": True,
            "device": torch.device("cuda"),
        },
        "trainer_name": "nnUNetTrainerUMambaBot",
        "inference_allowed_mirroring_axes": (0, 1),
    }


def test_nnunet(tmp_path: Path) -> None:
    torch.save(nnunet(), tmp_path / "checkpoint_final.pth")
    checkpoint = load(tmp_path / "checkpoint_final.pth")
    assert (checkpoint.layout, checkpoint.weights) == ("nnunet", "network_weights")
    assert_fits(checkpoint.tensors, weights())
    assert checkpoint.config == {
        "plans": {"configurations": {"2d": {"patch_size": [64, 64]}}},
        "configuration": "2d",
        "fold": 0,
        "dataset_json": {"labels": {"background": 0, "organ": 1}},
        "trainer_name": "nnUNetTrainerUMambaBot",
    }


def test_nnunet_without_weights(tmp_path: Path) -> None:
    torch.save(nnunet() | {"network_weights": {}}, tmp_path / "w")
    assert "network_weights" in refused(tmp_path / "w", CorruptInput)


@pytest.mark.parametrize("zipped", [True, False])
def test_vfimamba(tmp_path: Path, zipped: bool) -> None:
    state = OrderedDict((f"module.feature_bone.{name}", t) for name, t in weights().items())
    dropped = {
        "module.feature_bone.block.attn_mask": torch.ones(4, 4),
        "module.feature_bone.block.HW": torch.tensor([64]),
        "n_averaged": torch.tensor(3),
    }
    path = tmp_path / "VFIMamba.pkl"
    torch.save({**state, **dropped}, path, _use_new_zipfile_serialization=zipped)
    checkpoint = load(path)
    assert checkpoint.layout == "vfimamba"
    assert checkpoint.tensors.keys() == state.keys()
    assert any("attn_mask" in note and "(3)" in note for note in checkpoint.notes)
    assert_fits(checkpoint.tensors, weights())


PARAMS = {
    "dim": 64, "n_layers": 2, "vocab_size": 32, "n_groups": 8, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 1,
    "tie_embeddings": False, "model_type": "mamba",
}  # fmt: skip


def mistral(folder: Path, params: dict[str, Any]) -> Path:
    (folder / "params.json").write_text(json.dumps(params))
    tensors = {f"model.{name}": tensor for name, tensor in weights().items()}
    safetensors.torch.save_file(tensors, folder / "consolidated.safetensors")
    return folder


def test_codestral_mamba(tmp_path: Path) -> None:
    checkpoint = load(mistral(tmp_path, PARAMS))
    assert (checkpoint.layout, checkpoint.config) == ("mistral", PARAMS)
    assert_fits(checkpoint.tensors, weights())


def test_codestral_mamba_that_is_damaged(tmp_path: Path) -> None:
    mistral(tmp_path, {"dim": 64})
    assert "n_layers, vocab_size: absent" in refused(tmp_path, CorruptInput)
    (tmp_path / "params.json").write_text('{"dim": 1, "dim": 2}')
    assert "occurs twice" in refused(tmp_path, CorruptInput)
    (tmp_path / "params.json").unlink()
    assert "nearest is mistral" in refused(tmp_path, CorruptInput)


# --- settings in classes of packages -------------------------------------------------------------


def omegaconf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What OmegaConf pickles for {"width": 8, "sizes": [1, 2]}, without the package."""
    classes = {}
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    for name in ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode",
                 "base.Metadata", "base.ContainerMetadata"):  # fmt: skip
        module_name, _, class_name = name.rpartition(".")
        module = types.ModuleType(f"omegaconf.{module_name}")
        module = sys.modules.get(module.__name__, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        made = type(class_name, (), {"__module__": module.__name__})
        vars(module)[class_name] = classes[class_name] = made

    def make(kind: str, **attributes: Any) -> Any:
        value = classes[kind]()
        vars(value).update(attributes)
        return value

    metadata = make("ContainerMetadata", ref_type=Any, object_type=dict, key_type=str)
    root = make("DictConfig", _metadata=metadata, _parent=None, _content={})
    leaf = make("Metadata", ref_type=Any, object_type=int)
    sizes = make("ListConfig", _metadata=metadata, _parent=root, _content=[])
    sizes._content = [make("AnyNode", _metadata=leaf, _parent=sizes, _val=n) for n in (1, 2)]
    root._content["width"] = make("AnyNode", _metadata=leaf, _parent=root, _val=8)
    root._content["sizes"] = sizes
    return root


@pytest.mark.filterwarnings("ignore")
def test_settings_of_hydra_and_arrays_of_numpy_are_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hyper = {"cfg": omegaconf(monkeypatch), "mean": np.zeros((2, 3), np.float32)}
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": weights()}
    torch.save(content | {"hyper_parameters": hyper}, tmp_path / "w")
    monkeypatch.undo()
    config = load(tmp_path / "w").config
    assert config == {"cfg": {"width": 8, "sizes": [1, 2]}, "mean": "<numpy array (2, 3)>"}


@pytest.mark.parametrize("name", ["yacs.config.load_cfg", "omegaconf.OmegaConf", "builtins.type"])
def test_neighbours_of_inert_types_are_refused(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / "w").write_bytes(f"\x80\x02c{module}\n{attribute}\n.".encode("latin-1"))
    assert name in refused(tmp_path / "w", UnsafeInput)


@pytest.mark.parametrize("layouts", [registry.FILES, registry.FOLDERS], ids=["files", "folders"])
def test_what_a_layout_is_told_by_is_of_use(layouts: Mapping[str, Any]) -> None:
    signs = [layout.SIGNS for layout in layouts.values()]
    assert [len(s) for s in signs] == sorted((len(s) for s in signs), reverse=True)
    assert sum(not s for s in signs) <= 1, "one layout alone may take what no other recognises"


def test_a_state_dict_with_more_than_tensors(tmp_path: Path) -> None:
    """neuraloperator's models add `_metadata`, and drop it when they load."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "    def state_dict(self, *args, **kwargs):\n"
        "        return {**super().state_dict(*args, **kwargs), '_metadata': {'width': 4}}\n"
        "    def load_state_dict(self, state, *args, **kwargs):\n"
        "        state.pop('_metadata', None)\n"
        "        return super().load_state_dict(state, *args, **kwargs)\n"
    )
    plain = nn.Linear(4, 4).state_dict()
    for number, state in enumerate((plain, {**plain, "_metadata": {"width": 4}})):
        torch.save(state, tmp_path / "w.pth")
        bundle = api.export(
            tmp_path / "w.pth",
            tmp_path / f"b{number}",
            inputs=parse_inputs(["x:[batch,4]"]),
            format=("exported_program",),
            model=f"{tmp_path / 'net.py'}:Net",
        )
        assert safetensors.torch.load_file(bundle.weights).keys() == plain.keys()


def test_of_another_folder_the_files_in_it_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "last.ckpt")
    with pytest.raises(CorruptInput, match=r"the checkpoint file itself, as .*last\.ckpt$"):
        load(tmp_path)
    for name in ("manifest.json", "weights.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CorruptInput, match="a bundle, of an export: fuseport verify"):
        load(tmp_path)
