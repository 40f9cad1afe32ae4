"""What PEFT writes into an adapter's folder, and what others might."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fuseport.exporter import checkpoint, models
from fuseport.exporter.errors import Missing
from fuseport.exporter.models import Model

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


def adapted(base: Path, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Model:
    folder.mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapter = checkpoint.load(folder)
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
