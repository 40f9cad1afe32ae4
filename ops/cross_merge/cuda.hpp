// The CUDA kernels of sums of walks, whose interface is that of the walks.
#pragma once

#include "cross_scan/cuda.hpp"

namespace fuseport::cross_merge::cuda {
FUSEPORT_WALKS_ON_CUDA
}
