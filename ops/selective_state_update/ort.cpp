// The state update as custom ops of ONNX Runtime, on the CPU.
#include "selective_state_update/ort.hpp"

namespace fuseport::selective_state_update {
namespace {

struct Passes {
  using Context = ort::Context;

  static void update(const Context& context, const Problem& p) { run(context, p); }
};

[[maybe_unused]] const bool added = add_nodes<Passes>();

}  // namespace
}  // namespace fuseport::selective_state_update
