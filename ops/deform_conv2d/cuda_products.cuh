// The products of the convolution on CUDA. Of each, a unit of work is a tile of the result of one batch
// entry and group; or, of the gradient of the weight, of one part of all outputs, which are summed
// up in their order.
//
// The weight is in the order of terms: (o, taps, c/g). Each product has rows, columns, and steps in
// the inner dimension; how many results there are; and what brings a step's tiles and puts numbers.
#pragma once

#include "deform_conv2d/cuda_samples.cuh"
#include "native/cuda_products.cuh"

namespace fuseport::deform_conv2d::cuda {

inline int64_t steps_of(int64_t inner, int step) { return (inner + step - 1) / step; }

// V numbers from `from` on to a row of reals or of Stored, of which the first `count` are there.
template <int WIDTH, class Stored>
FUSEPORT_DEVICE void put_row(const Real<Stored>* from, Stored* to, int count) {
  const bool whole = count == WIDTH && (uintptr_t)to % (WIDTH * sizeof(Stored)) == 0;
  store_line<WIDTH>(from, to, count, whole);
}

// Outputs: rows are output channels of a group, columns places, the inner dimension terms.
template <class Stored>
struct Convolved {
  static constexpr bool BACK = false;
  Problem p;
  Table<Stored> table;
  const Stored* weight;
  Stored* out;
  bool whole;  // whether the weight is read in packs

  int64_t rows() const { return p.outputs_of_group(); }
  int64_t columns() const { return p.places(); }
  int64_t results() const { return p.batches * p.groups; }
  int64_t steps(int step) const { return steps_of(p.terms(), step); }
  int64_t parts() const { return 1; }

  template <class Tiles>
  FUSEPORT_DEVICE void bring_step(int64_t result, int64_t step, int64_t row, int64_t column,
                                  Stored* x, Stored* w) const {
    const int64_t batch = result / p.groups, group = result % p.groups, inner = step * Tiles::STEP;
    const int64_t terms = p.terms();
    const Matrix<Stored> m{weight + group * p.outputs_of_group() * terms, p.outputs_of_group(),
                           terms, terms, 1, whole};
    bring<Tiles::SIDE, Tiles::STEP, Tiles::X_ROW>(m, row, inner, x);
    bring_samples<Tiles::SIDE, Tiles::STEP>(p, table, batch, group, column, inner, w,
                                            Tiles::place(1, 0),
                                            [](int i, int j) { return Tiles::place(j, i); });
  }

  template <int WIDTH>
  FUSEPORT_DEVICE void put(int64_t result, int64_t, int64_t row, int64_t column,
                           const Real<Stored>* numbers, int count) const {
    const int64_t output = result % p.groups * p.outputs_of_group() + row;
    const Real<Stored> bias = to_real(((const Stored*)p.bias)[output]);
    Real<Stored> sums[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[i] = numbers[i] + bias;
    put_row<WIDTH>(sums, out + (result / p.groups * p.outputs + output) * p.places() + column, count);
  }
};

// Cotangents of samples before the mask, (batches, places, taps, c), as reals: rows are places,
// columns terms, the inner dimension output channels of a group.
template <class Stored>
struct Differentiated {
  static constexpr bool BACK = true;
  Problem p;
  int64_t first, batches;  // some of them all
  const Stored *dout, *weight;
  Real<Stored>* to;
  bool whole;

  int64_t rows() const { return p.places(); }
  int64_t columns() const { return p.terms(); }
  int64_t results() const { return batches * p.groups; }
  int64_t steps(int step) const { return steps_of(p.outputs_of_group(), step); }
  int64_t parts() const { return 1; }

  template <class Tiles>
  FUSEPORT_DEVICE void bring_step(int64_t result, int64_t step, int64_t row, int64_t column,
                                  Stored* x, Stored* w) const {
    const int64_t batch = first + result / p.groups, each = p.outputs_of_group();
    const int64_t output = result % p.groups * each, terms = p.terms();
    const int64_t inner = step * Tiles::STEP;
    const Matrix<Stored> g{dout + (batch * p.outputs + output) * p.places(), p.places(), each, 1,
                           p.places(), false};
    const Matrix<Stored> m{weight + output * terms, each, terms, terms, 1, whole};
    bring<Tiles::SIDE, Tiles::STEP, Tiles::X_ROW>(g, row, inner, x);
    bring<Tiles::STEP, Tiles::SIDE, Tiles::W_ROW>(m, inner, column, w);
  }

  template <int WIDTH>
  FUSEPORT_DEVICE void put(int64_t result, int64_t, int64_t row, int64_t column,
                           const Real<Stored>* numbers, int count) const {
    const int64_t batch = result / p.groups, group = result % p.groups;
    Real<Stored>* const of_place = to + (batch * p.places() + row) * p.taps() * p.channels;
    const Term term(p, group, column);
    if (p.of_group() % WIDTH == 0)
      return put_row<WIDTH>(numbers, of_place + term.tap * p.channels + term.channel, count);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      if (i >= count) break;
      const Term other(p, group, column + i);
      of_place[other.tap * p.channels + other.channel] = numbers[i];
    }
  }
};

// The gradient of the weight in the order of terms, (parts, o, terms), as reals: rows are output
// channels of a group, columns terms, the inner dimension places of all batch entries.
template <class Stored>
struct Filtered {
  static constexpr bool BACK = true;
  Problem p;
  Table<Stored> table;
  const Stored* dout;
  Real<Stored>* to;
  bool whole;
  int64_t cut;  // into so many parts

  int64_t rows() const { return p.outputs_of_group(); }
  int64_t columns() const { return p.terms(); }
  int64_t results() const { return p.groups; }
  int64_t steps(int step) const { return p.batches * steps_of(p.places(), step); }
  int64_t parts() const { return cut; }

  template <class Tiles>
  FUSEPORT_DEVICE void bring_step(int64_t group, int64_t step, int64_t row, int64_t column,
                                  Stored* x, Stored* w) const {
    const int64_t of_batch = (p.places() + Tiles::STEP - 1) / Tiles::STEP;
    const int64_t batch = step / of_batch, place = step % of_batch * Tiles::STEP;
    const int64_t each = p.outputs_of_group();
    const Matrix<Stored> g{dout + (batch * p.outputs + group * each) * p.places(), each,
                           p.places(), p.places(), 1, whole};
    bring<Tiles::SIDE, Tiles::STEP, Tiles::X_ROW>(g, row, place, x);
    bring_samples<Tiles::STEP, Tiles::SIDE>(p, table, batch, group, place, column, w,
                                            Tiles::place(0, 1),
                                            [](int i, int j) { return Tiles::place(i, j); });
  }

  template <int WIDTH>
  FUSEPORT_DEVICE void put(int64_t group, int64_t part, int64_t row, int64_t column,
                           const Real<Stored>* numbers, int count) const {
    const int64_t terms = p.terms();
    const int64_t output = group * p.outputs_of_group() + row;
    put_row<WIDTH>(numbers, to + (part * p.outputs + output) * terms + column, count);
  }
};

// How the steps of a result are cut into parts, and tiles into blocks.
struct Plan {
  int64_t rows, columns, down, across, results, steps, span, parts;
};

template <class Tiling, class Product>
Plan plan_of(const Product& m) {
  constexpr int64_t SIDE = Tiling::SIDE;
  Plan plan{m.rows(), m.columns(), (m.rows() + SIDE - 1) / SIDE, (m.columns() + SIDE - 1) / SIDE,
            m.results(), m.steps(Tiling::STEP), 0, m.parts()};
  plan.span = (plan.steps + plan.parts - 1) / plan.parts;
  return plan;
}

template <class Tiling, class Product>
__global__ void __launch_bounds__(Tiling::THREADS, Tiling::BLOCKS)
    product_kernel(Product m, Plan plan) {
  using Tiles = cuda::Tiles<Tiling, Product::BACK>;
  using Sums = SumsOf<Tiling, Product::BACK>;
  constexpr int SIDE = Tiling::SIDE, WIDTH = Sums::WIDTH;
  FUSEPORT_SHARED(memory);
  Tiles& tiles = *(Tiles*)memory;
  const int64_t units = plan.results * plan.parts * plan.down * plan.across;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t line = unit / plan.across, number = line / plan.down;
    const int64_t column = unit % plan.across * SIDE, row = line % plan.down * SIDE;
    const int64_t result = number % plan.results, part = number / plan.results;
    const int64_t first = part * plan.span, end = first + plan.span;
    const int64_t last = end < plan.steps ? end : plan.steps;
    Sums sums(plan.rows - row, plan.columns - column);
    __syncthreads();  // the unit before has read all
    if (first < last)
      m.template bring_step<Tiles>(result, first, row, column, tiles.x[0], tiles.w[0]);
    for (int64_t step = first; step < last; ++step) {
      const int turn = (int)(step - first) % 2, other = turn ^ 1;
      wait_for_copies();
      __syncthreads();
      if (step + 1 < last)
        m.template bring_step<Tiles>(result, step + 1, row, column, tiles.x[other], tiles.w[other]);
      sums.add(tiles.x[turn], tiles.w[turn]);
    }
    sums.each([&](int r, int c, const auto* numbers) {
      const int64_t left = plan.columns - column - c;
      if (row + r < plan.rows && left > 0)
        m.template put<WIDTH>(result, part, row + r, column + c, numbers,
                              left < WIDTH ? (int)left : WIDTH);
    });
  }
}

template <class Tiling, class Product>
const char* run_tiles(const Product& m, void* stream) {
  const Plan plan = plan_of<Tiling>(m);
  const int64_t units = plan.results * plan.parts * plan.down * plan.across;
  if (units == 0) return nullptr;
  return launch(product_kernel<Tiling, Product>, units, Tiling::THREADS,
                (int64_t)sizeof(Tiles<Tiling, Product::BACK>), stream, m, plan);
}

template <class Stored, class Product>
const char* run_product(const Product& m, void* stream) {
  using All = Tilings<Stored>;
  const bool large = in_large_tiles<Stored>(m.rows(), m.columns() * m.results() * m.parts());
  return large ? run_tiles<typename All::Large>(m, stream)
               : run_tiles<typename All::Small>(m, stream);
}

// Into how many parts the places are cut for the gradient of the weight: two blocks for a
// multiprocessor, of some steps each.
template <class Stored>
int64_t parts_of(const Problem& p) {
  using Small = typename Tilings<Stored>::Small;
  constexpr int64_t STEPS = 8;
  const int64_t tiles =
      p.groups * tiles_of<Small>(p.outputs_of_group(), p.terms());
  const int64_t steps = p.batches * steps_of(p.places(), Small::STEP);
  const int64_t fitting = tiles ? 2 * multiprocessors() / tiles : 1;
  const int64_t most = fitting < steps / STEPS ? fitting : steps / STEPS;
  return most > 1 ? most : 1;
}

}  // namespace fuseport::deform_conv2d::cuda
