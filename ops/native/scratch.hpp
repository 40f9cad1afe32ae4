// A unit's own memory, in parts. Compiled once per instruction set.
#pragma once

#include <cstdint>

namespace fuseport::FUSEPORT_ISA {

// Hands out parts of a scratch buffer, each on a cache line of its own.
struct Scratch {
  char* base;
  int64_t used = 0;

  template <class... Number>
  void take(int64_t count, Number**... parts) {
    ((*parts = (Number*)(base + used),
      used += (count * (int64_t)sizeof(Number) + 63) / 64 * 64), ...);
  }
};

}  // namespace fuseport::FUSEPORT_ISA
