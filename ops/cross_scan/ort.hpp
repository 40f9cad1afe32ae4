// Walks over images as custom ops of ONNX Runtime, and their sums: the nodes that onnx.py of both
// ops writes, as their bindings on the CPU and on CUDA have them. All tensors are contiguous.
#pragma once

#include <vector>

#include "cross_scan/problem.hpp"
#include "native/ort.hpp"

namespace fuseport::cross_scan {

// What a binding gives: Passes::scan(context, problem, scan) and Passes::merge(context, problem,
// merge), on a Passes::Context.
template <class Passes, Dtype DTYPE>
void scan_node(const typename Passes::Context& context) {
  const ort::Tensor x = context.input(0);
  const auto& s = x.shape;
  context.require(s.size() == 4, "x", "(b, C, H, W)", ort::text(s));
  const Problem p{DTYPE, s[0], s[1], s[2], s[3]};
  void* out = context.output(0, {s[0], 4, s[1], s[2], s[3]});
  Passes::scan(context, p, Scan{x.data, s[1] * p.pixels(), p.pixels(), s[3], out});
}

template <class Passes, Dtype DTYPE>
void merge_node(const typename Passes::Context& context) {
  const ort::Tensor ys = context.input(0);
  const auto& s = ys.shape;
  context.require(s.size() == 5 && s[1] == 4, "ys", "(b, 4, C, H, W)", ort::text(s));
  const Problem p{DTYPE, s[0], s[2], s[3], s[4]};
  void* out = context.output(0, {s[0], s[2], s[3], s[4]});
  const int64_t walk = s[2] * p.pixels();
  Passes::merge(context, p, Merge{ys.data, 4 * walk, walk, p.pixels(), out});
}

// Adds an op's two nodes, for all dtypes.
template <class Passes>
bool add_nodes(const char* scan, const char* merge) {
  return ort::for_each_dtype([&]<Dtype DTYPE>(ort::Type stored, ort::Type) {
    const std::vector types{stored};
    ort::ops().emplace_back(scan, types, types, std::vector<const char*>{},
                            scan_node<Passes, DTYPE>);
    ort::ops().emplace_back(merge, types, types, std::vector<const char*>{"sum_type"},
                            merge_node<Passes, DTYPE>);
  });
}

}  // namespace fuseport::cross_scan
