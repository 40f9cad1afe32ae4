// The layer as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the
// CPU and on CUDA have them.
#pragma once

#include <vector>

#include "native/stored_ort.hpp"
#include "nf4_linear/binding.hpp"

namespace fuseport::nf4_linear {

// The problem of a node, whose inputs fit each other. ONNX Runtime itself checks dtypes.
struct Inputs {
  static constexpr int BIAS = 3;

  ort::Tensor first, packed, absmax;
  Problem problem;

  Inputs(const ort::Call& call, Dtype dtype) {
    first = call.input(0);
    packed = call.input(1);
    absmax = call.input(2);
    problem.dtype = dtype;
    problem.in = call.attributes[0];
  }

  void check(const ort::Call& call, const char* name, int64_t columns, int64_t out) {
    const int64_t block = call.attributes[1], quant_type = call.attributes[2];
    Problem& p = problem;
    stored::set_sizes(call, first, name, columns, out, p);
    const bool power = block >= 16 && (block & (block - 1)) == 0;
    call.require(power, "block_size", "a power of two from 16 up", block);
    const bool known = quant_type == 0 || quant_type == 1;
    call.require(known, "quant_type", "0 (FP4) or 1 (NF4)", quant_type);
    call.require(p.in >= 0, "in_features", "not negative", p.in);
    const int64_t values = stored::product_of(call, "in_features", out, p.in, block);
    call.require_shape("packed", packed, "(out_features*in_features/2,)", {(values + 1) / 2});
    call.require_shape("absmax", absmax, "(out_features*in_features/block_size,)",
                       {(values + block - 1) / block});
    p.block_shift = shift_of(block);
    p.quant_type = static_cast<int>(quant_type);
    p.packed = static_cast<const uint8_t*>(packed.data);
    p.absmax = absmax.data;
  }
};

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    constexpr ort::Type byte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    const std::vector<const char*> attributes{"in_features", "block_size", "quant_type"};
    const std::vector<int64_t> defaults{1};
    ort::ops().emplace_back("nf4_linear", std::vector{stored, byte, wide, stored},
                            std::vector{stored}, attributes,
                            fuseport::stored::forward_node<Inputs, Passes, DTYPE>, defaults);
    ort::ops().emplace_back("nf4_linear_backward", std::vector{stored, byte, wide},
                            std::vector{stored, stored}, attributes,
                            fuseport::stored::backward_node<Inputs, Passes, DTYPE>, defaults);
  });
}

}  // namespace fuseport::nf4_linear
