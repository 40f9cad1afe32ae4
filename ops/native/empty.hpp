// Memory for what a kernel writes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fuseport {

// From this size on glibc asks the kernel for fresh memory, and gives it back, each time
// (DEFAULT_MMAP_THRESHOLD_MAX): a page fault for each 4 KiB takes longer than a kernel's arithmetic.
constexpr uintptr_t FRESH_BYTES = 32 << 20;
constexpr uintptr_t HUGE_PAGE_BYTES = 2 << 20;

// An uninitialised tensor. Whole huge pages that lie inside a large one on the CPU are asked for as
// such (madvise(2)), where the system leaves that to programs, as Linux distributions do; a system
// that has none says no, and all stays as it is.
inline at::Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
#ifdef MADV_HUGEPAGE
  const uintptr_t bytes = tensor.nbytes();
  if (bytes >= FRESH_BYTES && tensor.is_cpu()) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    const uintptr_t first = (begin + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const uintptr_t end = (begin + bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

}  // namespace fuseport
