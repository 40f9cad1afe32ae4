// The selective scan as custom ops of ONNX Runtime: the nodes that onnx.py writes, on the CPU.
// B and C are (b, G, N, l), of one G; all tensors are contiguous.
#include "native/ort.hpp"
#include "selective_scan/binding.hpp"
#include "selective_scan/kernel.hpp"

namespace fuseport::selective_scan {
namespace {

using ort::Context;
using ort::Shape;
using ort::Tensor;
using ort::text;

// The inputs of a scan, which begin at a node's input `first`; they fit each other. The problem can
// be run unless it is empty: then no size in it is bounded by memory.
struct Inputs {
  Tensor u, delta, A, B, C, D, z, delta_bias;
  bool empty;
  int64_t groups = 1;
  Problem problem;

  Inputs(const Context& context, size_t first, bool gated, Dtype dtype) {
    for (Tensor* t : {&u, &delta, &A, &B, &C, &D}) *t = context.input(first++);
    if (gated) z = context.input(first++);
    delta_bias = context.input(first);
    check(context, gated);
    empty = ort::elements(u.shape) == 0;
    if (empty) return;

    Problem& p = problem;
    p.dtype = dtype;
    p.batches = u.shape[0];
    p.channels = u.shape[1];
    p.length = u.shape[2];
    p.states = A.shape[1];
    p.span = span_of(p.channels, groups, groups);
    p.softplus = context.attributes[0] != 0;
    p.u = sequence(u);
    p.delta = sequence(delta);
    if (gated) p.z = sequence(z);
    p.A = A.data;
    p.D = D.data;
    p.delta_bias = delta_bias.data;
    p.B = coefficient(B);
    p.C = coefficient(C);
  }

  Sequence sequence(const Tensor& t) const {
    return {t.data, problem.channels * problem.length, problem.length, 1};
  }

  MutableSequence mutable_sequence(void* data) const {
    return {data, problem.channels * problem.length, problem.length, 1};
  }

 private:
  Coefficient coefficient(const Tensor& t) const {
    const int64_t group = problem.states * problem.length;
    return {t.data,         true,  problem.channels / groups,
            groups * group, group, problem.length, 1};
  }

  // The checks of shapes.py that are of shapes: ONNX Runtime itself checks dtypes.
  void check(const Context& context, bool gated) {
    context.require(u.shape.size() == 3, "u", "(b, d, l)", text(u.shape));
    const int64_t b = u.shape[0], d = u.shape[1], l = u.shape[2];
    context.require_shape("delta", delta, "u's shape", u.shape);
    context.require(A.shape.size() == 2, "A", "(d, N)", text(A.shape));
    const int64_t states = A.shape[1];
    context.require_shape("A", A, "(d, N)", {d, states});
    context.require(B.shape.size() == 4, "B", "(b, G, N, l)", text(B.shape));
    groups = B.shape[1];
    context.require(groups >= 1 && d % groups == 0, "B",
                    "of groups that divide " + std::to_string(d) + " channels", groups);
    context.require_shape("B", B, "(b, G, N, l)", {b, groups, states, l});
    context.require_shape("C", C, "of B's shape (b, G, N, l)", B.shape);
    context.require_shape("D", D, "(d,)", {d});
    if (gated) context.require_shape("z", z, "u's shape", u.shape);
    context.require_shape("delta_bias", delta_bias, "(d,)", {d});

  }
};

template <Dtype DTYPE>
using Real = std::conditional_t<DTYPE == Dtype::float64, double, float>;

template <Dtype DTYPE, bool GATED>
void forward(const Context& context) {
  const Inputs inputs(context, 0, GATED, DTYPE);
  const Problem& p = inputs.problem;
  const Shape states{inputs.u.shape[0], inputs.u.shape[1], inputs.A.shape[1]};
  void* out = context.output(0, inputs.u.shape);
  void* last_state = context.output(1, states);
  if (inputs.empty) return ort::clear(last_state, states, sizeof(Real<DTYPE>));
  const auto saved = context.allocate<Real<DTYPE>>({p.batches, p.saved(), p.states, p.channels});
  const Forward forward{inputs.mutable_sequence(out), last_state, saved.data()};
  const Kernels& k = kernels();
  for_each_unit(context, p, k.forward_scratch(p),
                [&](int64_t unit, void* scratch) { k.forward(p, forward, unit, scratch); });
}

// Adds up the units' parts of dB or dC.
void sum_coefficient(const Context& context, const Inputs& inputs, const void* parts, void* total) {
  const Problem& p = inputs.problem;
  const SumUnits sum{parts, total, inputs.groups};
  const int64_t units = sum.units(p);
  const int64_t threads = context.threads_for(units, p.batches * p.blocks() * p.states * p.length);
  context.parallel(units, threads,
                   [&](int64_t unit, int64_t) { kernels().sum_units(p, sum, unit); });
}

template <Dtype DTYPE, bool GATED>
void backward(const Context& context) {
  const Tensor dout = context.input(0), dlast_state = context.input(1);
  const Inputs inputs(context, 2, GATED, DTYPE);
  const Problem& p = inputs.problem;
  context.require_shape("dout", dout, "u's shape", inputs.u.shape);
  context.require_shape("dlast_state", dlast_state, "(b, d, N)",
                        {inputs.u.shape[0], inputs.u.shape[1], inputs.A.shape[1]});

  // Gradients come in the order of the inputs that they belong to.
  constexpr size_t STORED = DTYPE == Dtype::float64 ? 8 : DTYPE == Dtype::float32 ? 4 : 2;
  size_t index = 0;
  const auto gradient = [&](const Tensor& of, size_t bytes) {
    void* data = context.output(index++, of.shape);
    if (inputs.empty) ort::clear(data, of.shape, bytes);
    return data;
  };
  const auto wide_gradient = [&](const Tensor& of) {
    return static_cast<Real<DTYPE>*>(gradient(of, sizeof(Real<DTYPE>)));
  };
  void* du = gradient(inputs.u, STORED);
  void* ddelta = gradient(inputs.delta, STORED);
  Real<DTYPE>* dA = wide_gradient(inputs.A);
  void* dB = gradient(inputs.B, STORED);
  void* dC = gradient(inputs.C, STORED);
  Real<DTYPE>* dD = wide_gradient(inputs.D);
  void* dz = GATED ? gradient(inputs.z, STORED) : nullptr;
  Real<DTYPE>* dbias = wide_gradient(inputs.delta_bias);
  if (inputs.empty) return;

  const int64_t b = p.batches, d = p.channels, N = p.states;
  const auto saved = context.allocate<Real<DTYPE>>({b, p.saved(), N, d});
  const auto dA_parts = context.allocate<double>({b, d, N});
  const auto dD_parts = context.allocate<double>({b, d});
  const auto dbias_parts = context.allocate<double>({b, d});
  const auto dB_parts = context.allocate<Real<DTYPE>>({b, p.blocks(), N, p.length});
  const auto dC_parts = context.allocate<Real<DTYPE>>({b, p.blocks(), N, p.length});

  // The node has no chunk states to start from: each unit computes its own again.
  const Forward again{{}, nullptr, saved.data()};
  Backward backward;
  backward.dout = inputs.sequence(dout);
  backward.dlast_state = dlast_state.data;
  backward.chunk_states = saved.data();
  backward.du = inputs.mutable_sequence(du);
  backward.ddelta = inputs.mutable_sequence(ddelta);
  if (GATED) backward.dz = inputs.mutable_sequence(dz);
  backward.dA = dA_parts.data();
  backward.dD = dD_parts.data();
  backward.ddelta_bias = dbias_parts.data();
  backward.dB = dB_parts.data();
  backward.dC = dC_parts.data();
  const Kernels& k = kernels();
  for_each_unit(context, p, std::max(k.forward_scratch(p), k.backward_scratch(p)),
                [&](int64_t unit, void* scratch) {
                  k.forward(p, again, unit, scratch);
                  k.backward(p, backward, unit, scratch);
                });

  sum_batches(dA_parts.data(), b, d * N, dA);
  sum_batches(dD_parts.data(), b, d, dD);
  sum_batches(dbias_parts.data(), b, d, dbias);
  sum_coefficient(context, inputs, dB_parts.data(), dB);
  sum_coefficient(context, inputs, dC_parts.data(), dC);
}

template <Dtype DTYPE, bool GATED>
void add(ort::Type stored, ort::Type state, const char* name, const char* backward_name) {
  std::vector<ort::Type> inputs{stored, stored, state, stored, stored, state};
  if (GATED) inputs.push_back(stored);
  inputs.push_back(state);
  std::vector<ort::Type> backward_inputs{stored, state};
  backward_inputs.insert(backward_inputs.end(), inputs.begin(), inputs.end());
  const std::vector<const char*> attributes{"delta_softplus"};
  auto& ops = ort::ops();
  ops.emplace_back(name, inputs, std::vector{stored, state}, attributes, forward<DTYPE, GATED>);
  ops.emplace_back(backward_name, backward_inputs, inputs, attributes, backward<DTYPE, GATED>);
}

template <Dtype DTYPE>
void add(ort::Type stored, ort::Type state) {
  add<DTYPE, false>(stored, state, "selective_scan", "selective_scan_backward");
  add<DTYPE, true>(stored, state, "selective_scan_gated", "selective_scan_gated_backward");
}

[[maybe_unused]] const bool added = ort::for_each_dtype(
    []<Dtype DTYPE>(ort::Type stored, ort::Type wide) { add<DTYPE>(stored, wide); });

}  // namespace
}  // namespace fuseport::selective_scan
