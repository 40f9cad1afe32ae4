// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "matmul_nbits/kernel.hpp"

#include "native/stored_units.hpp"
#include "matmul_nbits/weight.hpp"

namespace fuseport::matmul_nbits::FUSEPORT_ISA {

using namespace stored::FUSEPORT_ISA;

using Layer = Units<Weight, Problem>;
const Kernels table{Layer::scratch_bytes, Layer::forward, Layer::backward, Layer::sum_rows};

}  // namespace fuseport::matmul_nbits::FUSEPORT_ISA
