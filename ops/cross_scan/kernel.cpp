// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "cross_scan/kernel.hpp"

#include "cross_scan/walks.hpp"

namespace fuseport::cross_scan::FUSEPORT_ISA {

namespace {

void scan(const Problem& p, const Scan& s, int64_t unit) { scan_any(p, s, unit); }

void merge(const Problem& p, const Merge& m, int64_t unit) { merge_any(p, m, unit); }

}  // namespace

const Kernels table{scan, merge};

}  // namespace fuseport::cross_scan::FUSEPORT_ISA
