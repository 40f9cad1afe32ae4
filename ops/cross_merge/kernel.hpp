// The kernels of sums of walks, whose interface is that of the walks.
#pragma once

#include "cross_scan/problem.hpp"

namespace fuseport::cross_merge {
FUSEPORT_WALKS_KERNELS
}
