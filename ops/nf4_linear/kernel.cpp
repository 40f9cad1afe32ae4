// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "nf4_linear/kernel.hpp"

#include "native/stored_units.hpp"
#include "nf4_linear/weight.hpp"

namespace fuseport::nf4_linear::FUSEPORT_ISA {

using namespace stored::FUSEPORT_ISA;

using Layer = Units<Weight, Problem>;
const Kernels table{Layer::scratch_bytes, Layer::forward, Layer::backward, Layer::sum_rows};

}  // namespace fuseport::nf4_linear::FUSEPORT_ISA
