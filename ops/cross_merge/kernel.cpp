// The kernels for one instruction set, FUSEPORT_ISA; build.py compiles this file for each.
#include "cross_merge/kernel.hpp"

#include "cross_scan/walks.hpp"

namespace fuseport::cross_merge::FUSEPORT_ISA {

namespace {

void scan(const cross_scan::Problem& p, const cross_scan::Scan& s, int64_t unit) {
  cross_scan::FUSEPORT_ISA::scan_any(p, s, unit);
}

void merge(const cross_scan::Problem& p, const cross_scan::Merge& m, int64_t unit) {
  cross_scan::FUSEPORT_ISA::merge_any(p, m, unit);
}

}  // namespace

const Kernels table{scan, merge};

}  // namespace fuseport::cross_merge::FUSEPORT_ISA
