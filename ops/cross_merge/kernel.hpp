// The kernels of sums of walks, whose interface is that of the walks.
#pragma once

#include "cross_scan/problem.hpp"

namespace fuseport::cross_merge {
using cross_scan::Kernels;
FUSEPORT_CHOOSE_KERNELS()
}
