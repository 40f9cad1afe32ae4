"""What PEFT writes into an adapter's folder, and what others might."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fuseport.exporter import checkpoint, models
from fuseport.exporter.checkpoint import Checkpoint
from fuseport.exporter.errors import CorruptInput, Missing
from fuseport.exporter.models import Model, weights
from fuseport.exporter.models._quantized import lora as adapters

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings = LlamaConfig(
        **sizes, num_attention_heads=2, attention_bias=True, tie_word_embeddings=True
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


def lora(path: str = Q, inner: int = 16, outer: int = 16, **named: str) -> dict[str, Tensor]:
    a, b = named.get("a", "lora_A"), named.get("b", "lora_B")
    return {f"{path}.{a}.weight": torch.randn(2, inner), f"{path}.{b}.weight": torch.ones(outer, 2)}


def written(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return checkpoint.load(folder)


def adapted(base: Path, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Model:
    adapter = written(folder, tensors, **settings)
    return models.from_checkpoint(checkpoint.load(base), adapter=adapter)[0]


def test_a_layer_with_an_adapter_may_bring_what_is_its_own(llama: Path, tmp_path: Path) -> None:
    head = models.from_checkpoint(checkpoint.load(llama))[0].module.get_parameter("lm_head.weight")
    tensors = {
        **lora(),
        **lora("lm_head", outer=32),
        f"{Q}.base_layer.bias": torch.full((16,), 3.0),  # of bias="all"
        "lm_head.base_layer.weight": head.detach().clone(),  # PEFT saves it, and trains it not
    }
    module = adapted(llama, tmp_path / "a", tensors).module
    assert torch.equal(module.get_parameter(f"{Q}.bias"), torch.full((16,), 3.0))
    assert module.get_parameter(f"{Q}.bias").requires_grad
    shared = module.get_parameter("lm_head.weight")
    assert shared is module.get_parameter("model.embed_tokens.weight")
    assert not shared.requires_grad


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4.* merge it"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set, .* merge it"),
        ({"use_dora": True}, "use_dora is set, .* merge it"),
    ],
)
def test_what_computes_something_else_is_refused(
    llama: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(Missing, match=said):
        adapted(llama, tmp_path / "a", lora(), **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora_alpha": "12"}, "lora_alpha is '?12'?, and the rank 2"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .*q_proj.*, and no object"),
        ({"alpha_pattern": {"q_proj(": 3}}, r"alpha_pattern: q_proj\(: missing"),
        ({"alpha_pattern": {"((._?)+)+x": 3}}, "for ever to match: write the layers' names"),
        ({"alpha_pattern": {".*.*.*.*.*.*x": 3}}, "for ever to match"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    llama: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((CorruptInput, Missing), match=said):
        adapted(llama, tmp_path / "a", lora(), **settings)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{Q}.lora_A.weight": torch.tensor(1.0)}, "its adapter is"),
        ({name: t.to(torch.int8) for name, t in lora().items()}, r"lora_A.weight is of int8"),
        ({**lora(), **lora(a="lora_A.two", b="lora_B.two")}, "q_proj has several adapters"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(
    llama: Path, tmp_path: Path, tensors: dict[str, Tensor], said: str
) -> None:
    with pytest.raises((CorruptInput, Missing), match=said):
        adapted(llama, tmp_path / "a", tensors)


def test_patterns_are_names_or_expressions(llama: Path, tmp_path: Path) -> None:
    said = {"k_proj": 1, r".*\.0\.self_attn\.(q|v)_proj": 6, "q_proj": 8}
    model = adapted(llama, tmp_path / "a", lora(), alpha_pattern=said)
    assert model.config["lora"]["layers"] == {Q: [2, 3.0]}


@pytest.mark.parametrize(
    "said",
    [
        {"saved": [], "layers": {Q: [10**15, 1.0]}},
        {"saved": [], "layers": {Q: [10**30, 1.0]}},
        {"saved": [], "layers": {Q: [-1, 1.0]}},
        {"saved": [], "layers": {Q: [2, 10**400]}},
        {"saved": [], "layers": {"model": [2, 1.0]}},
        {"saved": ["model"], "layers": {}},
        {"saved": 3, "layers": {}},
        [],
    ],
)
def test_what_a_manifest_says_of_adapters_is_looked_at(
    llama: Path, tmp_path: Path, said: Any
) -> None:
    model = adapted(llama, tmp_path / "a", lora())
    save_file(weights.once(model.module), tmp_path / "w.safetensors")
    architecture = {"name": "huggingface", "config": {**model.config, "lora": said}}
    with pytest.raises((CorruptInput, Missing)):
        models.rebuild(architecture, tmp_path / "w.safetensors")


class Shared(nn.Module):
    """A layer, and a block, under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Linear(4, 4)
        self.block = self.again = nn.Sequential(nn.Linear(4, 4))


def test_a_block_used_twice_has_one_adapter(tmp_path: Path) -> None:
    pair = lora("block.0", 4, 4)
    twice = {**pair, **{name.replace("block", "again"): t.clone() for name, t in pair.items()}}
    model = Model(Shared(), "user", {}, (), {})
    model, _ = adapters.adapted(model, written(tmp_path / "a", twice))
    x = torch.randn(3, 4)
    layer: Any = model.module.get_submodule("again.0")
    a, b = pair.values()
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias + x @ a.T @ b.T * 2)


def test_a_layer_of_two_names_is_not_adapted_under_both(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="one has other names in the model"):
        adapters.adapted(
            Model(Shared(), "user", {}, (), {}), written(tmp_path / "a", lora("one", 4, 4))
        )


@pytest.mark.parametrize(
    ("name", "told"), [("org/base", "own model, which it calls org/base, or"), (None, "model, or")]
)
def test_an_adapter_of_another_model_says_whose(
    llama: Path, tmp_path: Path, name: str | None, told: str
) -> None:
    with pytest.raises(Missing, match=told):
        adapted(llama, tmp_path / "a", lora("h.0.attn"), base_model_name_or_path=name)
