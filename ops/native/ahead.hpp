// Memory that is needed soon, asked for a little at a time among other work, so that by then it is in
// the cache. What a processor foresees by itself ends with a page, and rows of a large tensor are pages
// apart. Compiled once per instruction set, as vector.hpp is.
#pragma once

#include <cstdint>

#include "native/vector.hpp"

namespace fuseport::FUSEPORT_ISA {

class Ahead {
 public:
  // Where one is; a variable of its own, or else stores might change it.
  struct Place {
    const char* at;
    int pair = 0, row = 0, block = 0;
  };

  // `rows` rows of `bytes` each, `stride` bytes apart. At most MOST times.
  void add(const void* first, int64_t stride, int64_t rows, int64_t bytes) {
    const int64_t lines = ((int64_t)((uintptr_t)first % LINE) + bytes + LINE - 1) / LINE;
    blocks_[count_++] = {(const char*)first, stride, (int)rows, (int)(lines + 1) / 2};
    total_ += rows * ((lines + 1) / 2);
  }

  // All is asked for in so many calls of `some`; there may be none.
  void share(int64_t calls) { at_once_ = calls ? (int)((total_ + calls - 1) / calls) : 0; }

  Place begin() const { return {blocks_[0].first}; }

  inline __attribute__((always_inline)) void some(Place& place) const {
    for (int i = 0; i < at_once_ && place.block < count_; ++i) {
      __builtin_prefetch(place.at);
      __builtin_prefetch(place.at + LINE);
      place.at += 2 * LINE;
      const Block& block = blocks_[place.block];
      if (++place.pair < block.pairs) continue;
      place.pair = 0;
      if (++place.row == block.rows) {
        place.row = 0;
        ++place.block;
      }
      place.at = blocks_[place.block].first + place.row * blocks_[place.block].stride;
    }
  }

 private:
  static constexpr int64_t LINE = 64;
  static constexpr int MOST = 8;
  struct Block {
    const char* first;
    int64_t stride;
    int rows, pairs;  // of lines
  };
  Block blocks_[MOST + 1] = {};  // and one that is empty
  int count_ = 0, at_once_ = 0;
  int64_t total_ = 0;  // pairs
};

}  // namespace fuseport::FUSEPORT_ISA
