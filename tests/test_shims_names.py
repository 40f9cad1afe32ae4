"""Stand-ins have what models import of them."""

import importlib

import pytest

from fuseport.exporter import shims
from fuseport.tests.test_shims import ALL

# What models in the wild import, by what of.
IMPORTED = {
    "selective_scan_cuda": "fwd bwd",
    "selective_scan_cuda_oflex": "fwd bwd",
    "selective_scan_cuda_oflex_rh": "fwd bwd",
    "selective_scan_cuda_core": "fwd bwd",
    "selective_scan": "selective_scan_fn selective_scan_ref SelectiveScanFn",
    "rotary_emb": "apply_rotary",
    "dropout_layer_norm": "dropout_add_ln_fwd dropout_add_ln_bwd "
    "dropout_add_ln_parallel_residual_fwd dropout_add_ln_parallel_residual_bwd",
    "xentropy_cuda_lib": "forward backward",
    "v2dmamba_scan": "fwd bwd",
    "Dwconv.dwconv_layer": "DepthwiseFunction DwConv2d",
    "pointnet2_ops": "pointnet2_utils pointnet2_modules",
    "pointnet2_ops._ext": "furthest_point_sampling ball_query group_points three_nn",
    "pointnet2_ops.pointnet2_utils": "furthest_point_sample gather_operation grouping_operation "
    "three_nn three_interpolate ball_query QueryAndGroup GroupAll FurthestPointSampling",
    "pointnet2_ops.pointnet2_modules": "PointnetSAModule PointnetSAModuleMSG PointnetFPModule "
    "build_shared_mlp",
    "pointnet2_batch_cuda": "furthest_point_sampling_wrapper ball_query_wrapper three_nn_wrapper",
    "pointnet2_cuda": "group_points_wrapper gather_points_wrapper three_interpolate_wrapper",
    "upfirdn2d_ext": "upfirdn2d",
    "fast_hadamard_transform": "hadamard_transform",
    "fast_hadamard_transform.fast_hadamard_transform_interface": "hadamard_transform "
    "hadamard_transform_12N hadamard_transform_20N hadamard_transform_28N hadamard_transform_40N "
    "hadamard_transform_ref HadamardTransformFn HadamardTransform12NFn",
    "fast_hadamard_transform_cuda": "fast_hadamard_transform fast_hadamard_transform_12N "
    "fast_hadamard_transform_20N fast_hadamard_transform_28N fast_hadamard_transform_40N",
    "anti_alias_activation_cuda": "forward",
    "fftconv": "fftconv_fwd fftconv_bwd",
    **dict.fromkeys(
        ("cauchy_mult", "structured_kernels"),
        "cauchy_mult_sym_fwd cauchy_mult_sym_bwd vand_log_mult_sym_fwd vand_log_mult_sym_bwd",
    ),
    "k2": "swoosh_l swoosh_r swoosh_l_forward swoosh_r_forward swoosh_l_forward_and_deriv "
    "swoosh_r_forward_and_deriv RaggedTensor Fsa rnnt_loss_pruned",
    "k2.version": "__name__",
    "scaled_softmax_cuda": "forward backward",
    "scaled_masked_softmax_cuda": "forward backward get_batch_per_block",
    "scaled_upper_triang_masked_softmax_cuda": "forward backward",
    "generic_scaled_masked_softmax_cuda": "forward backward",
    "attn_core_inplace_cuda": "forward_ backward_",
    "lightconv_cuda": "forward backward",
    "dynamicconv_cuda": "forward backward",
    "causal_product_cpu": "causal_dot_product causal_dot_backward",
    "causal_product_cuda": "causal_dot_product causal_dot_backward",
    "local_product_cpu": "local_dot_product local_dot_backward local_weighted_average "
    "local_weighted_average_backward",
    "local_product_cuda": "local_dot_product local_dot_backward local_weighted_average "
    "local_weighted_average_backward",
    "fused_act_ext": "fused_bias_act",
    "knn_cuda": "KNN knn",
    "chamfer": "forward backward",
    "_ext": "dcn_v2_forward dcn_v2_backward dcn_v2_psroi_pooling_forward "
    "dcn_v2_psroi_pooling_backward",
    "DCNv3": "dcnv3_forward dcnv3_backward",
    "DCNv4": "DCNv4 FlashDeformAttn DCNv4Function FlashDeformAttnFunction ext",
    "DCNv4.ext": "dcnv4_forward dcnv4_backward flash_deform_attn_forward "
    "flash_deform_attn_backward",
    "DCNv4.functions.dcnv4_func": "DCNv4Function",
    "DCNv4.functions.flash_deform_attn_func": "FlashDeformAttnFunction",
    "DCNv4.modules.dcnv4": "DCNv4 CenterFeatureScaleModule",
    "DCNv4.modules.flash_deform_attn": "FlashDeformAttn",
    "pkg_resources": "get_distribution require parse_version resource_filename",
    "deform_conv_cuda": "deform_conv_forward_cuda deform_conv_backward_input_cuda "
    "deform_conv_backward_parameters_cuda modulated_deform_conv_cuda_forward "
    "modulated_deform_conv_cuda_backward",
    "deform_conv_ext": "deform_conv_forward deform_conv_backward_input "
    "deform_conv_backward_parameters modulated_deform_conv_forward modulated_deform_conv_backward",
    "deform_pool_cuda": "deform_psroi_pooling_cuda_forward deform_psroi_pooling_cuda_backward",
    "deform_pool_ext": "deform_psroi_pooling_forward deform_psroi_pooling_backward",
    "MultiScaleDeformableAttention": "ms_deform_attn_forward ms_deform_attn_backward",
    "spatial_correlation_sampler": "SpatialCorrelationSampler spatial_correlation_sample",
    "spatial_correlation_sampler_backend": "forward backward",
    "correlation_cuda": "forward backward",
    "correlation_package.correlation": "Correlation",
    "correlation_package.functions.corr": "correlation correlation1d",
    "correlation_package.modules.corr": "Correlation Correlation1d",
    "resample2d_cuda": "forward backward",
    "channelnorm_cuda": "forward backward",
    "alt_cuda_corr": "forward backward",
    "corr_sampler": "forward backward",
    "causal_conv1d_cuda": "causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update",
    "causal_conv1d": "causal_conv1d_fn causal_conv1d_update",
    "causal_conv1d.causal_conv1d_interface": "causal_conv1d_fn causal_conv1d_ref CausalConv1dFn",
    "causal_conv1d.causal_conv1d_varlen": "causal_conv1d_varlen_states",
    "causal_conv1d.cpp_functions": "causal_conv1d_fwd_function causal_conv1d_bwd_function",
    "mamba_ssm": "Mamba Mamba2 Mamba3 MambaLMHeadModel selective_scan_fn mamba_inner_fn",
    "mamba_ssm.ops.selective_scan_interface": "selective_scan_fn selective_scan_ref "
    "mamba_inner_fn mamba_inner_ref bimamba_inner_fn mamba_inner_fn_no_out_proj",
    "mamba_ssm.ops.triton.selective_state_update": "selective_state_update",
    "mamba_ssm.ops.triton.ssd_combined": "mamba_chunk_scan_combined "
    "mamba_split_conv1d_scan_combined _mamba_chunk_scan_combined_fwd",
    "mamba_ssm.ops.triton.layer_norm": "RMSNorm layer_norm_fn rms_norm_fn",
    "mamba_ssm.ops.triton.layernorm": "RMSNorm layer_norm_fn rms_norm_fn",
    "mamba_ssm.ops.triton.layernorm_gated": "RMSNorm LayerNorm",
    "mamba_ssm.modules.mamba_simple": "Mamba Block",
    "mamba_ssm.modules.mamba2": "Mamba2",
    "mamba_ssm.modules.mamba2_simple": "Mamba2Simple",
    "mamba_ssm.modules.mamba3": "Mamba3 heavy_tail_activation",
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": "mamba3_siso_combined Mamba3Output",
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_step": "mamba3_siso_step",
    "mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step": "apply_rotary_qk_inference_fwd",
    "mamba_ssm.ops.triton.mamba3.angle_dt": "angle_dt_fwd",
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo": "mamba3_mimo",
    "mamba_ssm.ops.cute.mamba3.mamba3_step_fn": "mamba3_step_fn",
    "mamba_ssm.modules.mha": "MHA",
    "mamba_ssm.modules.block": "Block",
    "mamba_ssm.modules.mlp": "GatedMLP",
    "mamba_ssm.models.mixer_seq_simple": "MambaLMHeadModel create_block _init_weights",
    "mamba_ssm.models.config_mamba": "MambaConfig",
    "mamba_ssm.utils.generation": "GenerationMixin InferenceParams",
    "mamba_ssm.utils.hf": "load_config_hf load_state_dict_hf",
    "cupy": "RawKernel RawModule memoize int32 float32 ndarray asnumpy",
    "cupy.cuda": "compile_with_cache get_cuda_path Stream",
    "cupy.util": "memoize",
    "triton": "jit autotune heuristics Config cdiv next_power_of_2",
    "triton.language": "constexpr float32 load",
    "triton.language.extra.libdevice": "rsqrt",
    "triton.runtime.driver": "active",
    "flash_attn": "flash_attn_func flash_attn_qkvpacked_func flash_attn_kvpacked_func "
    "flash_attn_varlen_func flash_attn_varlen_qkvpacked_func flash_attn_varlen_kvpacked_func "
    "flash_attn_with_kvcache __version__",
    "flash_attn.flash_attn_interface": "flash_attn_func _flash_attn_varlen_forward",
    "flash_attn.bert_padding": "unpad_input pad_input index_first_axis",
    "flash_attn.layers.rotary": "apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_qkv_ "
    "apply_rotary_emb_kv_ RotaryEmbedding",
    "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
    "flash_attn.modules.mha": "MHA SelfAttention CrossAttention FlashSelfAttention "
    "FlashCrossAttention ParallelMHA _update_kv_cache",
    "flash_attn.modules.mlp": "Mlp GatedMlp FusedMLP ParallelMLP",
    "flash_attn.ops.activations": "swiglu sqrelu_fwd gelu_bwd",
    "flash_attn.ops.fused_dense": "FusedDense FusedMLP ColumnParallelLinear RowParallelLinear "
    "fused_dense_func",
    "flash_attn.ops.layer_norm": "dropout_add_layer_norm DropoutAddLayerNorm",
    "flash_attn.ops.rms_norm": "rms_norm RMSNorm dropout_add_rms_norm",
    "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn rms_norm_fn RMSNorm",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn.utils.generation": "GenerationMixin InferenceParams",
    "apex": "amp normalization optimizers parallel",
    "apex.amp": "float_function half_function initialize scale_loss",
    "apex.contrib.layer_norm": "FastLayerNorm",
    "apex.contrib.layer_norm.layer_norm": "FastLayerNorm FastLayerNormFN _fast_layer_norm",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": "FusedLayerNorm FusedLayerNormAffineFunction "
    "fused_layer_norm_affine fused_layer_norm fused_rms_norm_affine fused_rms_norm",
    "apex.optimizers": "FusedAdam FusedLAMB FusedSGD",
    "apex.parallel": "DistributedDataParallel SyncBatchNorm convert_syncbn_model",
    "fused_layer_norm_cuda": "forward_affine backward_affine rms_forward_affine "
    "rms_backward_affine",
    "natten": "NeighborhoodAttention1D NeighborhoodAttention2D NeighborhoodAttention3D na1d na2d "
    "na3d functional context __version__ has_fused_na use_fused_na use_autotuner has_half "
    "use_gemm_na attention merge_attentions HAS_LIBNATTEN use_kv_parallelism_in_fused_na "
    "set_memory_usage_preference is_fna_enabled disable_tf32 allow_flex_compile",
    "natten.context": "is_fna_enabled should_use_flex_attention",
    "natten.experimental": "na2d",
    "natten.flops": "add_natten_handle get_flops",
    "natten.functional": "na1d na2d na2d_qk na2d_av na2d_qk_with_bias na3d_qk natten1dav "
    "natten1dqkrpb natten2dav natten2dqk natten2dqkrpb natten3dqkrpb attention merge_attentions "
    "neighborhood_attention_generic",
    "natten.natten1d": "NeighborhoodAttention1D",
    "natten.types": "CausalArg1DTypeOrDed Dimension1DTypeOrDed Dimension2DTypeOrDed",
    "natten.utils": "check_all_args log",
    "natten.utils.checks": "check_all_args",
    "bev_pool_ext": "bev_pool_forward",
    "ingroup_inds_cuda": "forward",
    "iou3d_nms_cuda": "boxes_iou_bev_cpu nms_gpu nms_normal_gpu",
    "pointnet2_stack_cuda": "ball_query_wrapper voxel_query_wrapper",
    "roiaware_pool3d_cuda": "points_in_boxes_gpu forward",
    "roipoint_pool3d_cuda": "forward",
    "MinkowskiEngine": "SparseTensor TensorField MinkowskiConvolution MinkowskiReLU cat utils sum "
    "MinkowskiConvolutionTranspose MinkowskiBatchNorm MinkowskiLinear MinkowskiNetwork RegionType "
    "SparseTensorQuantizationMode KernelGenerator MinkowskiFunctional CoordinateManager",
    "MinkowskiEngine.MinkowskiFunctional": "relu leaky_relu softmax normalize dropout",
    "MinkowskiEngine.MinkowskiOps": "cat to_sparse MinkowskiLinear",
    "MinkowskiEngine.MinkowskiPooling": "MinkowskiAvgPooling MinkowskiGlobalPooling",
    "MinkowskiEngine.MinkowskiSparseTensor": "SparseTensor",
    "MinkowskiEngine.modules.resnet_block": "BasicBlock Bottleneck",
    "MinkowskiEngine.modules.senet_block": "SELayer SEBasicBlock SEBottleneck",
    "MinkowskiEngine.utils": "batched_coordinates sparse_collate sparse_quantize SparseCollation",
    "spconv": "constants ConvAlgo __version__ SPCONV_VERSION_NUMBERS",
    "spconv.core": "ConvAlgo AlgoHint",
    "spconv.constants": "SPCONV_USE_DIRECT_TABLE SPCONV_ALLOW_TF32 FILTER_HWIO",
    "spconv.cppconstants": "CPU_ONLY_BUILD",
    "spconv.pytorch": "SparseConvTensor SparseModule SparseSequential SubMConv2d SubMConv3d "
    "SparseConv2d SparseConv3d SparseInverseConv2d SparseInverseConv3d SparseConvTranspose3d "
    "SparseMaxPool2d SparseMaxPool3d SparseAvgPool3d SparseGlobalMaxPool ToDense SparseBatchNorm "
    "SparseReLU SparseIdentity RemoveGrid AddTable JoinTable ConcatTable ConvAlgo functional ops "
    "conv modules pool core Identity assign_name_for_sparse_modules",
    "spconv.pytorch.conv": "SparseConvolution SubMConv3d",
    "spconv.pytorch.core": "SparseConvTensor IndiceData ImplicitGemmIndiceData expand_nd",
    "spconv.pytorch.functional": "sparse_add sparse_add_hash_based implicit_gemm",
    "spconv.pytorch.hash": "HashTable",
    "spconv.pytorch.modules": "SparseModule SparseBatchNorm SparseReLU is_spconv_module",
    "spconv.pytorch.ops": "get_conv_output_size get_indice_pairs ConvAlgo",
    "spconv.pytorch.pool": "SparseMaxPool SparseAvgPool",
    "spconv.pytorch.tables": "AddTable AddTableMisaligned",
    "spconv.pytorch.utils": "PointToVoxel gather_features_by_pc_voxel_id",
    "spconv.utils": "Point2VoxelCPU3d Point2VoxelGPU3d rbbox_iou nullcontext",
    "torch_scatter": "scatter scatter_sum scatter_add scatter_mul scatter_mean scatter_min "
    "scatter_max segment_coo segment_csr gather_coo gather_csr scatter_softmax "
    "scatter_log_softmax scatter_logsumexp scatter_std segment_mean_csr segment_max_coo",
    "torch_scatter.composite": "scatter_softmax scatter_log_softmax scatter_std",
    "torch_scatter.utils": "broadcast",
    "torchsparse": "SparseTensor PointTensor cat nn utils backend backends tune",
    "torchsparse.backend": "GPUHashTable hash_cuda",
    "torchsparse.nn": "Conv3d BatchNorm ReLU LeakyReLU GlobalAvgPool GroupNorm functional",
    "torchsparse.nn.functional": "sphash sphashquery spcount spvoxelize spdevoxelize conv3d "
    "calc_ti_weights set_kmap_mode set_downsample_mode conv_config Dataflow spdownsample",
    "torchsparse.nn.functional.devoxelize": "calc_ti_weights",
    "torchsparse.nn.utils": "fapply get_kernel_offsets",
    "torchsparse.tensor": "SparseTensor PointTensor",
    "torchsparse.utils": "make_ntuple make_tensor to_dense",
    "torchsparse.utils.collate": "sparse_collate sparse_collate_fn",
    "torchsparse.utils.quantize": "sparse_quantize",
    "torchsparse.utils.tensor_cache": "TensorCache",
    "transformer_engine": "pytorch common __version__",
    "transformer_engine.common.recipe": "Format DelayedScaling MXFP8BlockScaling Recipe "
    "Float8CurrentScaling Float8BlockScaling NVFP4BlockScaling CustomRecipe",
    "transformer_engine.pytorch": "Linear LayerNorm RMSNorm LayerNormLinear LayerNormMLP "
    "DotProductAttention MultiheadAttention TransformerLayer GroupedLinear InferenceParams "
    "RotaryPositionEmbedding fp8_autocast autocast fp8_model_init quantized_model_init checkpoint "
    "onnx_export is_fp8_available is_bf16_available CudaRNGStatesTracker attention",
    "transformer_engine.pytorch.attention": "DotProductAttention MultiheadAttention "
    "RotaryPositionEmbedding apply_rotary_pos_emb InferenceParams",
    "transformer_engine.pytorch.attention.dot_product_attention": "DotProductAttention",
    "transformer_engine.pytorch.attention.inference": "InferenceParams PagedKVCacheManager",
    "transformer_engine.pytorch.attention.multi_head_attention": "MultiheadAttention",
    "transformer_engine.pytorch.attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb "
    "apply_fused_qkv_rotary_pos_emb",
    "transformer_engine.pytorch.distributed": "checkpoint CudaRNGStatesTracker",
    "transformer_engine.pytorch.export": "onnx_export te_translation_table",
    "transformer_engine.pytorch.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init "
    "check_fp8_support",
    "transformer_engine.pytorch.module": "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm",
    "transformer_engine.pytorch.module.base": "TransformerEngineBaseModule",
    "transformer_engine.pytorch.optimizers": "FusedAdam FusedSGD",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager autocast",
    "transformer_engine.pytorch.transformer": "TransformerLayer",
    "xformers": "ops __version__",
    "xformers.ops": "fmha memory_efficient_attention unbind SwiGLU LowerTriangularMask RMSNorm "
    "index_select_cat scaled_index_add swiglu MemoryEfficientAttentionFlashAttentionOp "
    "MemoryEfficientAttentionCutlassOp AttentionBias AttentionOp",
    "xformers.ops.fmha": "BlockDiagonalMask attn_bias memory_efficient_attention_forward",
    "xformers.ops.fmha.attn_bias": "BlockDiagonalMask BlockDiagonalCausalMask AttentionBias "
    "LowerTriangularMask LowerTriangularMaskWithTensorBias "
    "BlockDiagonalCausalWithOffsetPaddedKeysMask LowerTriangularFromBottomRightMask",
    "xformers.ops.rmsnorm": "RMSNorm rms_norm rms_norm_add",
    "xformers.ops.swiglu_op": "SwiGLU swiglu",
}


@pytest.mark.parametrize("name", IMPORTED)
def test_what_models_import_is_there(name: str) -> None:
    with shims.installed(ALL) as used:
        module = importlib.import_module(name)
        missing = [part for part in IMPORTED[name].split() if not hasattr(module, part)]
    assert missing == []
    assert used == [shims.called(name)]


def test_every_stand_in_is_tried_here() -> None:
    # tests/test_shims_deform.py, tests/test_shims_fast_transformers.py
    inside_a_package = {name for name in shims.SHIMS if "." in name}
    assert {shims.called(name) for name in IMPORTED} == set(shims.SHIMS) - inside_a_package
