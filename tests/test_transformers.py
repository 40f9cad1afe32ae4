"""Folders of other models of transformers: any class that it has, with the ops in their places."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from fuseport.cli import main
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.exporter.models import huggingface
from fuseport.exporter.models.fresh import fresh
from fuseport.exporter.models.model import Model

TEXT = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
HEADS = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
WIDTHS = {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic",
          "out_features": ["stage1", "stage2"]}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lfm2ForCausalLM": ("Lfm2Config", {**TEXT, "num_hidden_layers": 2, "full_attn_idxs": [1]}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {
        **TEXT, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 4,
        "linear_value_head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    "BailingHybridForCausalLM": ("BailingHybridConfig", {
        **TEXT, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}),
    "GPT2LMHeadModel": ("GPT2Config", {
        "vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}),
    "JambaForSequenceClassification": ("JambaConfig", {
        **TEXT, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 4, "num_experts": 1}),
    "ViTForImageClassification": ("ViTConfig", {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3,
        "intermediate_size": 24, "image_size": [16, 24], "patch_size": 8}),
    "DeformableDetrForObjectDetection": ("DeformableDetrConfig", {
        "backbone_config": {"model_type": "resnet", **RESNET}, "num_queries": 3, "d_model": 32,
        "encoder_layers": 1, "decoder_layers": 2, "num_feature_levels": 3, **HEADS, **WIDTHS}),
    "CLIPModel": ("CLIPConfig", {
        "text_config": {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 16},
        "vision_config": {**TEXT, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}}),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {
        "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2}),
    "ASTForAudioClassification": ("ASTConfig", {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 16,
        "intermediate_size": 24, "max_length": 32, "num_labels": 3}),
    "DFineForObjectDetection": ("DFineConfig", {
        "backbone_config": {
            "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 8],
            "depths": [1, 1], "layer_type": "basic", "out_features": ["stage1", "stage2"]},
        "encoder_in_channels": [8, 8], "feat_strides": [4, 8], "encoder_hidden_dim": 16,
        "decoder_in_channels": [16, 16], "d_model": 16, "encode_proj_layers": [1],
        "num_feature_levels": 2, "decoder_n_points": [1, 2], "num_queries": 4, "num_labels": 3,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_layers": 2, "num_denoising": 0,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2}),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [1, 1], "decoder_hidden_size": 8, "num_labels": 3}),
    "T5ForConditionalGeneration": ("T5Config", {
        "vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
}  # fmt: skip


SAVED = [n for n in SETTINGS if not n.startswith(("T5", "CLIP", "AST")) and "Detr" not in n]


def saved(name: str, folder: Path) -> Any:
    """A small model, random but for no parameter at a special value."""
    torch.manual_seed(0)
    settings, given = SETTINGS[name]
    module = getattr(transformers, name)(getattr(transformers, settings)(**given)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    module.config.use_cache = False
    return module


def loaded(folder: Path) -> Model:
    model, _ = models.from_checkpoint(checkpoint.load(folder))
    assert model.architecture == "huggingface"
    return model


@pytest.mark.parametrize("name", SAVED)
def test_the_model_is_the_one_saved(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    model = loaded(tmp_path)
    assert type(model.module) is type(theirs)
    given = models.model.examples(model, torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = model.module(*given.values()), theirs(*given.values())
    # Experts are summed in another order.
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)


def test_hidden_states_are_collected_once_in_every_call(tmp_path: Path) -> None:
    """By hooks that transformers adds at the first call, and knows of by an attribute."""
    theirs = saved("SegformerForSemanticSegmentation", tmp_path)
    model = loaded(tmp_path)
    (forward,) = api.capture(model, ["forward"])
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = theirs(x).logits
        torch.testing.assert_close(model.module(x).logits, expected)
        torch.testing.assert_close(fresh(model.module)(x).logits, expected)
        torch.testing.assert_close(forward.exported.module()(x), expected, rtol=1e-4, atol=1e-5)


def test_pictures_have_the_size_of_the_config(tmp_path: Path) -> None:
    saved("ViTForImageClassification", tmp_path)
    (spec,) = loaded(tmp_path).inputs
    assert (spec.name, spec.dtype, spec.dims) == ("pixel_values", "float32", ("batch", 3, 16, 24))


def test_a_text_and_a_picture_are_compared(tmp_path: Path) -> None:
    saved("CLIPModel", tmp_path)
    text, picture = loaded(tmp_path).inputs
    assert (text.name, text.dims, text.high) == ("input_ids", ("batch", "length"), 30)
    assert (picture.name, picture.dims) == ("pixel_values", ("batch", 3, 16, 16))


def test_sound_is_samples(tmp_path: Path) -> None:
    saved("Wav2Vec2ForCTC", tmp_path)
    model = loaded(tmp_path)
    (sound,) = model.inputs
    assert (sound.name, sound.dims) == ("input_values", ("batch", "samples"))
    assert model.module(torch.randn(2, model.sizes["samples"])).logits.shape[0] == 2


def test_a_spectrogram_is_no_samples(tmp_path: Path) -> None:
    saved("ASTForAudioClassification", tmp_path)
    with pytest.raises(Missing, match="what ASTForAudioClassification is to take of input_values"):
        loaded(tmp_path)


def test_a_short_convolution_is_the_op_and_verifies(tmp_path: Path) -> None:
    saved("Lfm2ForCausalLM", tmp_path / "saved")
    bundle = api.export(tmp_path / "saved", tmp_path / "b", format="onnx")
    assert any(name.startswith("fuseport::causal_conv1d") for name in bundle.manifest["ops"])
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == {"forward", "gradient"}


@pytest.mark.parametrize(
    ("name", "rules"), [("Qwen3NextForCausalLM", 1), ("BailingHybridForCausalLM", 2)]
)
def test_a_delta_rule_is_the_op_at_any_length(name: str, rules: int, tmp_path: Path) -> None:
    """Decays of heads, as Gated DeltaNet has them, and of key channels, as Kimi Linear."""
    saved(name, tmp_path)
    model = loaded(tmp_path)
    (forward,) = api.capture(model, ["forward"])
    called = [str(node.target) for node in forward.exported.graph.nodes]
    assert called.count("fuseport.gated_delta_rule.default") == rules
    run = forward.exported.module(check_guards=False)
    for length in (1, 70):
        ids = torch.randint(0, 30, (1, length))
        with torch.no_grad():
            expected, found = model.module(ids).logits, run(ids)
        found = found["logits"] if isinstance(found, dict) else found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_attention_at_learned_places_is_the_op_at_any_size(tmp_path: Path) -> None:
    """Its code makes tensors of lists of sizes, and as many numbers as a map is high."""
    saved("DeformableDetrForObjectDetection", tmp_path)
    model = loaded(tmp_path)
    (forward,) = api.capture(model, ["forward"])
    called = [str(node.target) for node in forward.exported.graph.nodes]
    assert called.count("fuseport.ms_deform_attn.default") == 3
    run = forward.exported.module(check_guards=False)
    for height, width in ((64, 64), (40, 75)):
        x = torch.randn(1, 3, height, width)
        with torch.no_grad():
            expected, found = model.module(x), run(x)
        for name in ("logits", "pred_boxes"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", ["oneformer", "mask2former"])
def test_attention_over_a_list_of_maps_is_the_op(file: str) -> None:
    """Models with it want packages of their own for their losses."""
    name = f"transformers.models.{file}.modeling_{file}"
    module = importlib.import_module(name)
    shapes, queries, heads, points = [(3, 4), (2, 2)], 5, 2, 3
    value = torch.randn(2, 16, heads, 4)
    locations = torch.rand(2, queries, heads, len(shapes), points, 2)
    weights = torch.rand(2, queries, heads, len(shapes), points)
    given = (value, shapes, locations, weights)
    expected = module.multi_scale_deformable_attention(*given)
    with huggingface.fused([name]), torch.profiler.profile() as seen:
        for sizes in (shapes, torch.tensor(shapes)):
            found = module.multi_scale_deformable_attention(value, sizes, locations, weights)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert any("fuseport::ms_deform_attn" in event.key for event in seen.key_averages())


@pytest.mark.parametrize("points", [[2, 2], [1, 3]])
@pytest.mark.parametrize("file", ["rt_detr_v2", "d_fine", "deimv2"])
def test_attention_with_points_of_each_map_is_the_op(file: str, points: list[int]) -> None:
    name = f"transformers.models.{file}.modeling_{file}"
    module = importlib.import_module(name)
    shapes, queries, heads = [(3, 4), (2, 2)], 5, 2
    torch.manual_seed(0)
    given = [
        torch.randn(2, 16, heads, 4, requires_grad=True),
        torch.rand(2, queries, heads, sum(points), 2, requires_grad=True),
        torch.rand(2, queries, heads, sum(points), requires_grad=True),
    ]

    def run(method: str = "default") -> list[Tensor]:
        value, locations, weights = given
        call = module.multi_scale_deformable_attention_v2
        y = call(value, shapes, locations, weights, points, method)
        return [y, *torch.autograd.grad(y.sin().sum(), given, allow_unused=True)]

    expected, nearest = run(), run("discrete")
    with huggingface.fused([name]), torch.profiler.profile() as seen:
        found = run()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert any("fuseport::ms_deform_attn" in event.key for event in seen.key_averages())
    with huggingface.fused([name]):
        torch.testing.assert_close(run("discrete"), nearest)


def test_a_function_that_a_layer_keeps_is_the_op(tmp_path: Path) -> None:
    """D-FINE's layers keep theirs from their construction on."""
    saved("DFineForObjectDetection", tmp_path)
    model = loaded(tmp_path)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model.module(x).logits
        with model.fused(), torch.profiler.profile() as seen:
            found = model.module(x).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert any("fuseport::ms_deform_attn" in event.key for event in seen.key_averages())


def test_what_it_takes_can_be_said(tmp_path: Path) -> None:
    saved("T5ForConditionalGeneration", tmp_path / "saved")
    with pytest.raises(Missing, match=r"what T5For.* is to take of input_ids \(optional\), .*say"):
        api.export(tmp_path / "saved", tmp_path / "b")
    inputs = ["input_ids:int64[batch,length]<30", "decoder_input_ids:int64[batch,steps]<30"]
    bundle = api.export(
        tmp_path / "saved", tmp_path / "b", inputs=inputs, format="onnx", programs="gradient"
    )
    report = api.verify(bundle.folder, runtime=["eager", "onnxruntime"])
    assert report.exit_code() == 0, report.failures()
    assert "grad/decoder.block.0.layer.0.SelfAttention.q.weight" in {
        row.tensor for row in report.results if row.runtime == "onnxruntime"
    }


def test_tensors_tell_what_it_takes(tmp_path: Path) -> None:
    saved("ViTForImageClassification", tmp_path / "saved")
    given = {"pixel_values": torch.randn(2, 3, 16, 24)}
    bundle = api.export(
        tmp_path / "saved", tmp_path / "b", given=given, programs="forward", dtype="bfloat16",
        format="exported_program",
    )  # fmt: skip
    (spec,) = bundle.manifest["programs"]["forward"]["inputs"]
    assert (spec["dtype"], spec["dims"]) == ("bfloat16", ["batch", 3, 16, 24])
    report = api.verify(bundle.folder, runtime=["eager", "exported_program"])
    assert report.exit_code() == 0, report.failures()


def test_a_language_model_that_scans_takes_a_mask(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "huggingface"
    inputs = ["input_ids:int64[batch,length]<256", "attention_mask:int64[batch,length]<2"]
    bundle = api.export(fixture, tmp_path / "b", inputs=inputs, format="torchscript")
    assert any(name.startswith("fuseport::selective_scan") for name in bundle.manifest["ops"])
    report = api.verify(bundle.folder, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()


def test_architectures_with_inputs_of_their_own_take_no_others(tmp_path: Path) -> None:
    checkpoint_of_text = Path(__file__).parents[1] / "fixtures" / "lightning" / "mamba-kjv.ckpt"
    with pytest.raises(UsageError, match="the architecture mamba has its own: input_ids:"):
        api.export(checkpoint_of_text, tmp_path / "b", inputs=["x:[batch]"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lfm99"}, r"has no Lfm2ForCausalLM of the model_type lfm99 \("),
        ({"architectures": ["Lfm2Tokenizer"]}, r"has no Lfm2Tokenizer of the model_type lfm2 \("),
        ({"architectures": ["Lfm2Config"]}, r"Lfm2Config is no model\)"),
        ({"architectures": ["Lfm2Model", "Lfm2ForCausalLM"]}, "names no architecture, or several"),
        ({"architectures": None}, r"names no architecture, or several \(None\): write the one"),
        ({"num_attention_heads": "two"}, r"refuses the config\.json of this lfm2: "),
        ({"hidden_size": 24}, "the weights do not fit Lfm2ForCausalLM: mis-shaped: "),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"model_type lfm2, and its class GPT2LMHeadModel is of gpt2: write both",
        ),
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel: no name of theirs is one of its, so that config\.json is of another",
        ),
    ],
)
def test_what_is_not_there_is_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("Lfm2ForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(Missing, match=said) as raised:
        loaded(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_config_names_no_code_and_no_way_to_attend(tmp_path: Path) -> None:
    """Real ones say flash_attention_2, which needs a GPU, or a repository of a hub."""
    saved("Lfm2ForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("flash_attention_2", "somebody/kernel"):
        changed = {"attn_implementation": name, "_attn_implementation": name}
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        assert loaded(tmp_path).module.config._attn_implementation == "sdpa"


def test_weights_that_cannot_be_read_here_are_one_line(tmp_path: Path) -> None:
    saved("Qwen3NextForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    way = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config | way))
    with pytest.raises(Missing, match="transformers cannot read the weights of this Qwen3Next"):
        loaded(tmp_path)


def test_a_prefix_of_all_names_is_stripped(tmp_path: Path) -> None:
    """transformers leaves out what ends in attn.bias of GPT-2, which under a prefix is c_attn's."""
    theirs = saved("GPT2LMHeadModel", tmp_path)
    named = {f"base_model.model.{name}": t.clone() for name, t in theirs.state_dict().items()}
    del named["base_model.model.lm_head.weight"]  # tied
    save_file(named, tmp_path / "model.safetensors")
    _, notes = models.from_checkpoint(checkpoint.load(tmp_path))
    assert any("the prefix base_model.model. was stripped" in note for note in notes)


def test_what_is_no_configuration_is_corrupt() -> None:
    with pytest.raises(CorruptInput, match="no configuration of a Hugging Face model: model_type"):
        models.build("huggingface", {"model_type": "lfm2"})


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    saved("Lfm2ForCausalLM", tmp_path)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "huggingface, by config:model_type=lfm2\n" in done.output
    assert "causal_conv1d × 1: registered" in done.output
