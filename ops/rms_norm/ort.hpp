// Norms as custom ops of ONNX Runtime, with a gate or without: what the ort.cpp of both ops is
// written with. The nodes are those of onnx.py; all tensors are contiguous.
#pragma once

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "native/ort.hpp"
#include "rms_norm/binding.hpp"

namespace fuseport::rms_norm {

using ort::Context;
using ort::Shape;
using ort::text;

template <Dtype DTYPE>
using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;

// The inputs of a norm, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty: then no size in it is bounded by memory.
struct NodeInputs {
  ort::Tensor x, z, weight;
  bool empty;
  Problem problem;

  NodeInputs(const Context& context, size_t first, bool gated, Dtype dtype) {
    x = context.input(first++);
    if (gated) z = context.input(first++);
    weight = context.input(first);
    const int64_t mantissa = context.attributes[0], exponent = context.attributes[1];
    const int64_t group = context.attributes[2];
    context.require(!x.shape.empty(), "x", "(..., d)", text(x.shape));
    const int64_t d = x.shape.back();
    if (gated) context.require_shape("z", z, "x's shape", x.shape);
    context.require_shape("weight", weight, "(d,)", {d});
    context.require(mantissa >= 0, "eps_mantissa", "not negative", mantissa);
    context.require(exponent >= -1200 && exponent <= 960, "eps_exponent", "in -1200 to 960",
                    exponent);
    context.require(group >= 1 && d % group == 0, "group_size",
                    "a divisor of " + std::to_string(d) + " channels", group);
    empty = ort::elements(x.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.weight_dtype = dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
    p.mode = !gated                     ? Mode::plain
             : context.attributes[3] != 0 ? Mode::norm_first
                                          : Mode::gate_first;
    p.channels = d;
    p.rows = p.inner = ort::elements(x.shape) / d;
    p.group = group;
    p.eps = std::ldexp(static_cast<double>(mantissa), static_cast<int>(exponent));
    p.x = rows(x);
    if (gated) p.z = rows(z);
    p.weight = weight.data;
  }

  Rows rows(const ort::Tensor& t) const { return {t.data, 0, problem.channels, 1}; }
};

template <Dtype DTYPE, bool GATED, auto KERNELS>
void forward_node(const Context& context) {
  const NodeInputs inputs(context, 0, GATED, DTYPE);
  const Problem& p = inputs.problem;
  void* out = context.output(0, inputs.x.shape);
  if (inputs.empty) return;
  const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
  const Forward forward{out, rstd.data()};
  const Kernels& k = KERNELS();
  for_each_unit(context, k, p,
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
}

template <Dtype DTYPE, bool GATED, auto KERNELS>
void backward_node(const Context& context) {
  const ort::Tensor dout = context.input(0);
  const NodeInputs inputs(context, 1, GATED, DTYPE);
  const Problem& p = inputs.problem;
  context.require_shape("dout", dout, "x's shape", inputs.x.shape);
  void* dx = context.output(0, inputs.x.shape);
  void* dz = GATED ? context.output(1, inputs.x.shape) : nullptr;
  void* dweight = context.output(GATED ? 2 : 1, inputs.weight.shape);
  if (inputs.empty) return ort::clear(dweight, inputs.weight.shape, sizeof(Real<DTYPE>));

  const auto rstd = context.allocate<Real<DTYPE>>({p.rows, p.groups()});
  const auto parts = context.allocate<double>({p.units(), p.channels});
  // The node has no rstd to start from: each unit computes its own again.
  const Forward again{nullptr, rstd.data()};
  const Backward backward{inputs.rows(dout), rstd.data(), dx, dz, parts.data()};
  const Kernels& k = KERNELS();
  for_each_unit(context, k, p, [&](int64_t unit, void* scratch) {
    k.forward(p, again, unit, scratch);
    k.backward(p, backward, unit, scratch);
  });
  sum_weight_gradient(context, k, p, {parts.data(), dweight});
}

template <Dtype DTYPE, bool GATED, auto KERNELS>
void add_nodes(ort::Type stored, ort::Type real, const char* name, const char* backward_name) {
  std::vector<ort::Type> inputs(GATED ? 2 : 1, stored);
  inputs.push_back(real);
  std::vector<ort::Type> backward_inputs{stored};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  std::vector<const char*> attributes{"eps_mantissa", "eps_exponent", "group_size"};
  if (GATED) attributes.push_back("norm_before_gate");
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored}, attributes,
                   forward_node<DTYPE, GATED, KERNELS>);
  ops.emplace_back(backward_name, backward_inputs, inputs, attributes,
                   backward_node<DTYPE, GATED, KERNELS>);
}

// Adds an op's two nodes, for all dtypes. KERNELS is its function kernels().
template <bool GATED, auto KERNELS>
bool add_nodes(const char* name, const char* backward_name) {
  constexpr ort::Type single = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  constexpr ort::Type twice = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
  constexpr ort::Type half = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  constexpr ort::Type brain = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
  add_nodes<Dtype::float32, GATED, KERNELS>(single, single, name, backward_name);
  add_nodes<Dtype::float64, GATED, KERNELS>(twice, twice, name, backward_name);
  add_nodes<Dtype::float16, GATED, KERNELS>(half, single, name, backward_name);
  add_nodes<Dtype::bfloat16, GATED, KERNELS>(brain, single, name, backward_name);
  return true;
}

}  // namespace fuseport::rms_norm
