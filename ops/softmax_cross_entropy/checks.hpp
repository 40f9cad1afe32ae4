// What targets must be, as far as a host can read them: the check of shapes.py, with its message.
#pragma once

#include <cstdint>
#include <string>

#include "softmax_cross_entropy/kernel.hpp"

namespace fuseport::softmax_cross_entropy {

// The first that is neither a class nor ignored; null if there is none.
inline const int64_t* wrong_target(const Problem& p) {
  for (const int64_t* t = p.targets; t < p.targets + p.rows; ++t)
    if (*t != p.ignore_index && (*t < 0 || *t >= p.classes)) return t;
  return nullptr;
}

// `check` is of an op's inputs, whatever the host.
template <class Check>
void check_targets(const Check& check, const Problem& p) {
  const int64_t* const wrong = wrong_target(p);
  if (!wrong) return;
  check.require(false, "targets",
                "in 0 to " + std::to_string(p.classes - 1) +
                    ", or ignore_index = " + std::to_string(p.ignore_index),
                *wrong);
}

}  // namespace fuseport::softmax_cross_entropy
