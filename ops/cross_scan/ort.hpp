// Walks over images as custom ops of ONNX Runtime, and their sums: what the ort.cpp of both ops is
// written with. The nodes are those of onnx.py; all tensors are contiguous.
#pragma once

#include "cross_scan/binding.hpp"
#include "native/ort.hpp"

namespace fuseport::cross_scan {

template <Dtype DTYPE, auto KERNELS>
void scan_node(const ort::Context& context) {
  const ort::Tensor x = context.input(0);
  const auto& s = x.shape;
  context.require(s.size() == 4, "x", "(b, C, H, W)", ort::text(s));
  const Problem p{DTYPE, s[0], s[1], s[2], s[3]};
  void* out = context.output(0, {s[0], 4, s[1], s[2], s[3]});
  const Scan scan{x.data, s[1] * p.pixels(), p.pixels(), s[3], out};
  const Kernels& k = KERNELS();
  for_each_unit(context, p, [&](int64_t unit) { k.scan(p, scan, unit); });
}

template <Dtype DTYPE, auto KERNELS>
void merge_node(const ort::Context& context) {
  const ort::Tensor ys = context.input(0);
  const auto& s = ys.shape;
  context.require(s.size() == 5 && s[1] == 4, "ys", "(b, 4, C, H, W)", ort::text(s));
  const Problem p{DTYPE, s[0], s[2], s[3], s[4]};
  void* out = context.output(0, {s[0], s[2], s[3], s[4]});
  const int64_t walk = s[2] * p.pixels();
  const Merge merge{ys.data, 4 * walk, walk, p.pixels(), out};
  const Kernels& k = KERNELS();
  for_each_unit(context, p, [&](int64_t unit) { k.merge(p, merge, unit); });
}

// Adds an op's two nodes, for all dtypes. KERNELS is its function kernels().
template <auto KERNELS>
bool add_nodes(const char* scan, const char* merge) {
  return ort::for_each_dtype([&]<Dtype DTYPE>(ort::Type stored, ort::Type) {
    const std::vector types{stored};
    ort::ops().emplace_back(scan, types, types, std::vector<const char*>{},
                            scan_node<DTYPE, KERNELS>);
    ort::ops().emplace_back(merge, types, types, std::vector<const char*>{"sum_type"},
                            merge_node<DTYPE, KERNELS>);
  });
}

}  // namespace fuseport::cross_scan
