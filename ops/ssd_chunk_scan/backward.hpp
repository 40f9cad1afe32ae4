// Backward: one unit is a batch entry and a block of heads of a group, whose parts of dB and dC are
// added up here. It computes the states before all chunks again, then goes back through them; the
// formulas are those of reference.py. Compiled once per instruction set.
#pragma once

#include "ssd_chunk_scan/chunk.hpp"

namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA {

template <class F>
struct BackwardScratch {
  using Real = typename F::Real;
  Real *states, *cotangents;  // of each head: before each chunk; after the chunk that is at work
  Real *x, *dy, *z, *y, *dx, *gB, *weighted;             // (64, padded P)
  Real *x_transposed, *state_transposed, *g_transposed;  // (P, 64), (P, padded N)
  Real *M, *dM, *Q;                                      // (64, 64); Q is of all heads
  Real *read, *dB, *dC;                                  // (64, padded N); the last two likewise
  Real* D;
  double *dA, *dbias, *dD;  // of each head
  Decays<F>* decays;
  Scratch scratch;
  OwnPrepared<F> prepared;
  int64_t bytes;

  BackwardScratch(const Problem& p, void* base) : scratch{(char*)base}, prepared(p, scratch) {
    const int64_t width = padded<F>(p.width), states_ = padded<F>(p.states), heads = p.block();
    scratch.take(heads * p.chunks() * p.states * width, &states);
    scratch.take(heads * p.states * width, &cotangents);
    scratch.take(CHUNK * width, &x, &dy, &z, &y, &dx, &gB, &weighted);
    scratch.take(width * CHUNK, &x_transposed);
    scratch.take(width * states_, &state_transposed, &g_transposed);
    scratch.take(CHUNK * CHUNK, &M, &dM, &Q);
    scratch.take(CHUNK * states_, &read, &dB, &dC);
    scratch.take(width, &D);
    scratch.take(heads, &dA, &dbias);
    scratch.take(heads * width, &dD);
    scratch.take(1, &decays);
    bytes = scratch.used;
  }
};

template <class F>
static typename F::Real dot(const typename F::Real* a, const typename F::Real* b, int64_t count) {
  constexpr int LANES = F::LANES;
  typename F::Vector sums[4] = {};  // a sum waits for the one before it
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += load<F>(a + i + j * LANES) * load<F>(b + i + j * LANES);
  for (; i < count; i += LANES) sums[0] += load<F>(a + i) * load<F>(b + i);
  typename F::Real lanes[LANES], total = 0;
  store<F>(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
  return total;
}

// Turns the cotangent of out, in s.dy, into that of y; writes dz to s.z. s.y holds y.
template <class F>
static void gate_backward(int rows, int64_t width, const BackwardScratch<F>& s) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  for (int t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < width; i += F::LANES) {
      const int64_t at = t * width + i;
      const Vector y = load<F>(s.y + at) + load<F>(s.D + i) * load<F>(s.x + at);
      const Vector z = load<F>(s.z + at), dout = load<F>(s.dy + at), sigmoid = logistic<F>(z);
      store<F>(s.z + at, dout * y * (sigmoid * ((Real)1 + z * ((Real)1 - sigmoid))));
      store<F>(s.dy + at, dout * (z * sigmoid));
    }
  }
}

// What the matrices of a chunk, M, dM, K and Q, give: s.M; added to s.Q; and of K without its
// diagonal, which cancels in dc, Σ_s K_ts δ_s in rows and Σ_t K_ts in columns. Sums of dc over steps
// are differences of these: in double the same K cancels in them, however it was rounded.
template <class F>
static void matrices_backward(const BackwardScratch<F>& s, const typename F::Real* CB, int rows,
                              double* row_sums, double* column_sums) {
  using Real = typename F::Real;
  using Vector = typename F::Vector;
  using Wide = typename F::Wide;
  const Decays<F>& k = *s.decays;
  memset(s.M, 0, sizeof(Real) * rows * CHUNK);
  memset(row_sums, 0, sizeof(double) * CHUNK);
  memset(column_sums, 0, sizeof(double) * CHUNK);
  for (int t = 0; t < rows; ++t) {
    Wide row{};
    for (int c = k.begin(t); c <= t; c += F::LANES) {
      const int64_t at = t * CHUNK + c;
      const Vector between = k.between(t, c), step = load<F>(k.step + c);
      const Vector d = first_lanes<F>(load<F>(s.dM + at), t + 1 - c);
      const Vector products = first_lanes<F>(load<F>(CB + at), t + 1 - c) * between;
      const Vector K = d * products;
      const Wide past = __builtin_convertvector(first_lanes<F>(K, t - c), Wide);
      row += past * __builtin_convertvector(step, Wide);
      Wide column;
      memcpy(&column, column_sums + c, sizeof column);
      column += past;
      memcpy(column_sums + c, &column, sizeof column);
      store<F>(s.M + at, products * step);
      store<F>(s.Q + at, load<F>(s.Q + at) + d * between * step);
    }
    for (int i = 0; i < F::LANES; ++i) row_sums[t] += row[i];
  }
}

// dc of each step becomes the sum of its own, of those of later steps of its sequence, and, in the last
// one, of `last`: the gradient of δA.
template <class F>
static void add_later(const Decays<F>& k, const Steps& steps, double last, double* dc) {
  double later = last;
  for (int t = steps.count - 1; t >= 0; --t) {
    dc[t] = later += dc[t];
    if (k.first[t] == t) later = 0;
  }
}

// The gradient of each step, from that of δA and its own; it leaves ddt, and adds to dA and dbias.
template <class F, class Stored>
static void steps_backward(const Problem& p, const Backward& to, const BackwardScratch<F>& s,
                           int64_t batch, int64_t head, int64_t in_block, const Steps& steps,
                           const double* dexponent, const typename F::Real* dstep) {
  using Real = typename F::Real;
  const Decays<F>& k = *s.decays;
  const double A = ((const Real*)p.A)[head];
  const Real* limit = (const Real*)p.dt_limit;
  alignas(64) Real slope[CHUNK];
  for (int t = 0; t < CHUNK; t += F::LANES) {
    const typename F::Vector raw = load<F>(k.raw + t);
    store<F>(slope + t, raw > (Real)20 ? splat<F>(1) : logistic<F>(raw));
  }
  Stored* ddt = (Stored*)to.ddt + (batch * p.length + steps.start) * p.heads + head;
  for (int t = steps.count - 1; t >= 0; --t) {
    s.dA[in_block] += dexponent[t] * (double)k.step[t];
    double d = (double)dstep[t] + A * dexponent[t];
    if (!(k.smooth[t] >= limit[0] && k.smooth[t] <= limit[1])) d = 0;
    if (p.softplus) d *= (double)slope[t];
    s.dbias[in_block] += d;
    from_real((Real)d, ddt + t * p.heads);
  }
}

// The same of given decays.
template <class F>
static void decays_backward(const Problem& p, const Backward& to, int64_t batch, int64_t head,
                            const Steps& steps, const double* dexponent) {
  using Real = typename F::Real;
  Real* dlog_decay = (Real*)to.dlog_decay + (batch * p.length + steps.start) * p.heads + head;
  for (int t = 0; t < steps.count; ++t) dlog_decay[t * p.heads] = (Real)dexponent[t];
}

template <class F, class Stored>
static void head_backward(const Problem& p, const Backward& to, const BackwardScratch<F>& s,
                          const Prepared<F>& of, int64_t batch, int64_t head, int64_t in_block,
                          const Steps& steps, const typename F::Real* state,
                          typename F::Real* g) {
  using Real = typename F::Real;
  const Decays<F>& k = *s.decays;
  const int64_t width = padded<F>(p.width), states = padded<F>(p.states);
  const int rows = steps.rows, columns = (int)width;
  s.decays->template load<Stored>(p, batch, head, steps);
  load_D<F>(p, head, s.D);
  load_steps<F, Stored>(p.x, batch, head, steps, p.width, width, s.x);
  load_steps<F, Stored>(to.dout, batch, head, steps, p.width, width, s.dy);
  if (p.z.data) {
    load_steps<F, Stored>(p.z, batch, head, steps, p.width, width, s.z);
    outputs<F>(p, k, of, steps, s.x, state, s.M, s.y);
    gate_backward<F>(rows, width, s);
    store_steps<F, Stored>(p, s.z, batch, head, steps, to.dz);
  }

  memset(s.x_transposed, 0, sizeof(Real) * p.width * CHUNK);
  load_block<F>(s.x, 1, width, (int)p.width, rows, s.x_transposed, (int)CHUNK);
  multiply<F>({{s.dy, width, 1}, s.x_transposed, CHUNK, s.dM, CHUNK, rows, (int)CHUNK,
               (int)p.width},
              Zeros::none, true);
  alignas(64) double row_sums[CHUNK], column_sums[CHUNK];
  alignas(64) Real dstep[CHUNK];
  matrices_backward<F>(s, of.CB, rows, row_sums, column_sums);

  multiply<F>({{of.B, states, 1}, g, width, s.gB, width, rows, columns, (int)p.states});
  multiply<F>({{s.M, 1, CHUNK}, s.dy, width, s.dx, width, rows, columns, rows}, Zeros::below);

  // Transposed, so that states are what vectors hold.
  memset(s.state_transposed, 0, sizeof(Real) * p.width * states);
  memset(s.g_transposed, 0, sizeof(Real) * p.width * states);
  load_block<F>(state, 1, width, (int)p.width, (int)p.states, s.state_transposed, (int)states);
  load_block<F>(g, 1, width, (int)p.width, (int)p.states, s.g_transposed, (int)states);
  Product<F> read{{s.dy, width, 1}, s.state_transposed, states, s.read, states, rows, (int)states,
                  (int)p.width};
  read.scale = k.outer;
  multiply<F>(read);
  Product<F> dB{{s.x, width, 1}, s.g_transposed, states, s.dB, states, rows, (int)states,
                (int)p.width};
  dB.keep = 1;
  dB.scale = k.weight;
  multiply<F>(dB);

  double dc[CHUNK], last = 0;
  for (int t = 0; t < rows; ++t) {
    const Real* gB = s.gB + t * width;
    const Real dw = dot<F>(gB, s.x + t * width, width);
    const double weighted = (double)k.weight[t] * (double)dw;
    dc[t] = row_sums[t] - (double)k.step[t] * column_sums[t] - weighted;
    dc[t] += (double)dot<F>(s.read + t * states, of.C + t * states, states);
    last += weighted;
    const Real diagonal = s.dM[t * CHUNK + t] * of.CB[t * CHUNK + t];  // of K
    dstep[t] = (Real)column_sums[t] + diagonal + k.remaining[t] * dw;
    for (int64_t i = 0; i < states; i += F::LANES)
      store<F>(s.dC + t * states + i,
               load<F>(s.dC + t * states + i) + load<F>(s.read + t * states + i));
    for (int64_t i = 0; i < width; i += F::LANES) {
      const int64_t at = t * width + i;
      const auto dx = load<F>(s.dx + at) + load<F>(gB + i) * k.weight[t];
      store<F>(s.dx + at, dx + load<F>(s.D + i) * load<F>(s.dy + at));
    }
  }
  store_steps<F, Stored>(p, s.dx, batch, head, steps, to.dx);
  last += (double)k.decay * (double)dot<F>(g, state, p.states * width);
  add_later<F>(k, steps, last, dc);
  if (p.log_decay.data) decays_backward<F>(p, to, batch, head, steps, dc);
  else steps_backward<F, Stored>(p, to, s, batch, head, in_block, steps, dc, dstep);

  for (int64_t i = 0; i < width; i += F::LANES) {
    typename F::Vector sum{};
    for (int t = 0; t < rows; ++t)
      sum += load<F>(s.dy + t * width + i) * load<F>(s.x + t * width + i);
    for (int lane = 0; lane < F::LANES; ++lane) s.dD[in_block * width + i + lane] += sum[lane];
  }

  scale_rows<F>(s.dy, k.outer, rows, width, s.weighted);
  Product<F> dstate{{of.C, 1, states}, s.weighted, width, g, width, (int)p.states, columns,
                    steps.count};
  dstate.keep = k.decay;
  multiply<F>(dstate);
}

template <class F, class Stored>
static void backward_unit(const Problem& p, const Backward& to, int64_t unit, void* scratch) {
  using Real = typename F::Real;
  const BackwardScratch<F> s(p, scratch);
  const int64_t batch = unit / p.blocks(), block = unit % p.blocks();
  const int64_t group = block / p.blocks_per_group(), within = block % p.blocks_per_group();
  const int64_t first = group * p.heads_per_group() + within * p.block();
  const int64_t end = (group + 1) * p.heads_per_group();
  const int64_t heads = end - first < p.block() ? end - first : p.block();
  const int64_t width = padded<F>(p.width), states = padded<F>(p.states);
  const int64_t size = p.states * width;

  for (int64_t h = 0; h < heads; ++h) {
    Real* state = s.states + h * p.chunks() * size;
    load_state<F>(p, p.initial_states, batch, first + h, state);
    for (int64_t chunk = 0; chunk + 1 < p.chunks(); ++chunk) {
      const Steps steps(p, chunk);
      s.decays->template load<Stored>(p, batch, first + h, steps);
      load_steps<F, Stored>(p.x, batch, first + h, steps, p.width, width, s.x);
      memcpy(state + size, state, sizeof(Real) * size);
      state += size;
      advance<F>(p, *s.decays, s.prepared.template of_B<Stored>(p, batch, chunk, group), steps,
                 s.x, s.weighted, state);
    }
    load_state<F>(p, to.dfinal_states, batch, first + h, s.cotangents + h * size);
  }
  memset(s.dA, 0, sizeof(double) * heads);
  memset(s.dbias, 0, sizeof(double) * heads);
  memset(s.dD, 0, sizeof(double) * heads * width);

  for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk) {
    const Steps steps(p, chunk);
    const Prepared<F> of = s.prepared.template of<Stored>(p, batch, chunk, group);
    memset(s.Q, 0, sizeof(Real) * CHUNK * CHUNK);
    memset(s.dB, 0, sizeof(Real) * CHUNK * states);
    memset(s.dC, 0, sizeof(Real) * CHUNK * states);
    for (int64_t h = 0; h < heads; ++h)
      head_backward<F, Stored>(p, to, s, of, batch, first + h, h, steps,
                               s.states + (h * p.chunks() + chunk) * size, s.cotangents + h * size);
    Product<F> dC{{s.Q, CHUNK, 1}, of.B, states, s.dC, states, steps.rows, (int)states, steps.rows};
    Product<F> dB{{s.Q, 1, CHUNK}, of.C, states, s.dB, states, steps.rows, (int)states, steps.rows};
    dC.keep = dB.keep = 1;
    multiply<F>(dC, Zeros::above);
    multiply<F>(dB, Zeros::below);
    const int64_t at = ((batch * p.length + steps.start) * p.blocks() + block) * p.states;
    const int64_t row = p.blocks() * p.states;
    store_block<F>(s.dB, (int)states, steps.count, (int)p.states, (Real*)to.dB + at, row, 1);
    store_block<F>(s.dC, (int)states, steps.count, (int)p.states, (Real*)to.dC + at, row, 1);
  }

  for (int64_t h = 0; h < heads; ++h) {
    const int64_t at = batch * p.heads + first + h;
    store_state<F>(p, s.cotangents + h * size, batch, first + h, to.dinitial_states);
    to.dA[at] = s.dA[h];
    to.ddt_bias[at] = s.dbias[h];
    memcpy(to.dD + at * p.width, s.dD + h * width, sizeof(double) * p.width);
  }
}

// One step's dB or dC, summed over the blocks of each group.
template <class F, class Stored>
static void sum_unit(const Problem& p, const Sum& k, int64_t unit) {
  using Real = typename F::Real;
  const int64_t blocks = p.blocks_per_group();
  for (int64_t group = 0; group < p.groups; ++group) {
    const Real* from = (const Real*)k.parts + (unit * p.groups + group) * blocks * p.states;
    Stored* to = (Stored*)k.total + (unit * p.groups + group) * p.states;
    int64_t n = 0;
    for (; n + F::LANES <= p.states; n += F::LANES) {
      typename F::Vector sum = load<F>(from + n);
      for (int64_t i = 1; i < blocks; ++i) sum += load<F>(from + i * p.states + n);
      store_reals<F>(sum, to + n);
    }
    for (; n < p.states; ++n) {
      Real sum = from[n];
      for (int64_t i = 1; i < blocks; ++i) sum += from[i * p.states + n];
      from_real(sum, to + n);
    }
  }
}

}  // namespace fuseport::ssd_chunk_scan::FUSEPORT_ISA
