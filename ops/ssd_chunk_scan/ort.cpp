// The chunked scan as custom ops of ONNX Runtime, on the CPU.
#include "ssd_chunk_scan/ort.hpp"

#include "ssd_chunk_scan/binding.hpp"

namespace fuseport::ssd_chunk_scan {
namespace {

struct Passes {
  using Context = ort::Context;

  static void forward(const Context& context, const Problem& p, const Forward& forward) {
    run_forward(context, p, forward);
  }

  static void backward(const Context& context, const Problem& p, const Backward& backward,
                       const Totals& totals) {
    run_backward(context, p, backward, totals);
  }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::ssd_chunk_scan
