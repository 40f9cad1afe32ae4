// The steps of a chunk of one head, as rows of reals. Compiled once per instruction set.
#pragma once

#include "dplr_delta_rule/kernel.hpp"
#include "native/rule_tiles.hpp"

namespace fuseport::dplr_delta_rule::FUSEPORT_ISA {

using namespace fuseport::FUSEPORT_ISA;

// Steps of a head from `start` on.
struct Chunk {
  int64_t batch, head, start;
  int count;
  bool more;  // whether a step follows

  FUSEPORT_INLINE int count_of(const Problem& p, int64_t start) {
    return (int)(p.length - start < CHUNK ? p.length - start : CHUNK);
  }

  FUSEPORT_INLINED Chunk(const Problem& p, int64_t batch, int64_t head, int64_t start)
      : batch(batch), head(head), start(start), count(count_of(p, start)),
        more(start + count < p.length) {}
};

// Rows of keys, of `row` numbers each.
template <class F, class Stored>
FUSEPORT_INLINE void load_keys(const Problem& p, const Chunk& c, const Strided& s, int64_t row,
                               typename F::Real* tile) {
  load_steps<F, Stored>(s, c.batch, c.head, c.start, c.count, 0, (int)p.keys, row, tile);
}

// The same with a row more: that of the step that follows, or zeros.
template <class F, class Stored>
FUSEPORT_INLINE void load_keys_and_next(const Problem& p, const Chunk& c, const Strided& s,
                                        int64_t row, typename F::Real* tile) {
  load_steps<F, Stored>(s, c.batch, c.head, c.start, c.count + c.more, 0, (int)p.keys, row, tile);
  if (!c.more) memset(tile + c.count * row, 0, sizeof *tile * row);
}

template <class F>
FUSEPORT_INLINE void load_decays(const Problem& p, const Chunk& c, int64_t row,
                                 typename F::Real* tile) {
  load_channel_decays<F>(p.log_decay, c.batch, c.head, c.start, c.count, p.keys, row, tile);
}

}  // namespace fuseport::dplr_delta_rule::FUSEPORT_ISA
