// The kernels of walks over an image.
#pragma once

#include "cross_scan/problem.hpp"

namespace fuseport::cross_scan {
FUSEPORT_CHOOSE_KERNELS()
}
