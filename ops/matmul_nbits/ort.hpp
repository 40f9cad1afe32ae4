// The layer as custom ops of ONNX Runtime: the nodes that onnx.py writes, as its bindings on the
// CPU and on CUDA have them.
#pragma once

#include <vector>

#include "matmul_nbits/kernel.hpp"
#include "native/stored_ort.hpp"

namespace fuseport::matmul_nbits {

// The problem of a node, whose inputs fit each other. ONNX Runtime itself checks dtypes.
struct Inputs {
  static constexpr int BIAS = 4;

  ort::Tensor first, packed, scales, zero_points;
  Problem problem;

  Inputs(const ort::Call& call, Dtype dtype) {
    first = call.input(0);
    packed = call.input(1);
    scales = call.input(2);
    zero_points = call.input(3);
    problem.dtype = dtype;
    problem.in = call.attributes[0];
  }

  void check(const ort::Call& call, const char* name, int64_t columns, int64_t out) {
    const int64_t bits = call.attributes[1], group = call.attributes[2];
    Problem& p = problem;
    stored::set_sizes(call, first, name, columns, out, p);
    call.require(bits == 2 || bits == 4 || bits == 8, "bits", "2, 4 or 8", bits);
    call.require(group >= 16 && group % 16 == 0, "group_size", "a multiple of 16", group);
    call.require(p.in >= 0, "in_features", "not negative", p.in);
    stored::product_of(call, "in_features", out, p.in, group);
    const int64_t groups = p.in / group + (p.in % group != 0);
    call.require_shape("packed", packed, "(out_features, groups, group_size*bits/8)",
                       {out, groups, group / 8 * bits});
    call.require_shape("scales", scales, "(out_features, groups)", {out, groups});
    call.require_shape("zero_points", zero_points, "(out_features, groups*bits/8)",
                       {out, (groups * bits + 7) / 8});
    p.bits = static_cast<int>(bits);
    p.group = group;
    p.groups = groups;
    p.packed = static_cast<const uint8_t*>(packed.data);
    p.scales = scales.data;
    p.zero_points = static_cast<const uint8_t*>(zero_points.data);
  }
};

// Adds the op's nodes, for all dtypes.
template <class Passes>
bool add_nodes() {
  return ort::for_each_dtype([]<Dtype DTYPE>(ort::Type stored, ort::Type wide) {
    constexpr ort::Type byte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    const std::vector<const char*> attributes{"in_features", "bits", "group_size"};
    ort::ops().emplace_back("matmul_nbits", std::vector{stored, byte, wide, byte, stored},
                            std::vector{stored}, attributes,
                            fuseport::stored::forward_node<Inputs, Passes, DTYPE>);
    ort::ops().emplace_back("matmul_nbits_backward", std::vector{stored, byte, wide, byte},
                            std::vector{stored, stored}, attributes,
                            fuseport::stored::backward_node<Inputs, Passes, DTYPE>);
  });
}

}  // namespace fuseport::matmul_nbits
