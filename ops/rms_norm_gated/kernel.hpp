// The kernels of the gated norm, whose interface is that of the plain one.
#pragma once

#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm_gated {
using rms_norm::Kernels;
FUSEPORT_CHOOSE_KERNELS()
}
