// The kernels of the plain norm.
#pragma once

#include "rms_norm/problem.hpp"

namespace fuseport::rms_norm {
FUSEPORT_CHOOSE_KERNELS()
}
