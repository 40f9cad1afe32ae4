// The passes of the chunked scan on CUDA, in the order that their kernels and products go, for any
// host: scratch(bytes) is device memory on whose data() what has been started may work on when it
// is given back, multiply(problem, product) starts a product, started(error) takes what starting a
// kernel returned, and stream() is the stream. The problem is not empty.
#pragma once

#include <list>

#include "ssd_chunk_scan/cuda.hpp"

namespace fuseport::ssd_chunk_scan::cuda {

// Matrices in a batch, real and contiguous, or the transposes of such.
struct Matrices {
  void* data = nullptr;
  int64_t batches = 0, rows = 0, columns = 0;
  bool transposed = false;

  Matrices t() const { return {data, batches, columns, rows, !transposed}; }
};

// What is found first: the steps.
template <class Host>
struct Pass {
  const Host& host;
  const Problem& p;
  const int64_t chunks = p.batches * p.chunks(), real = real_bytes(p.dtype);
  std::list<typename Host::Scratch> scratch;
  Steps steps;

  Pass(const Host& host, const Problem& p) : host(host), p(p) {
    const int64_t count = chunks * CHUNK * p.heads;
    steps = {reals(count), reals(count), reals(count),
             static_cast<int32_t*>(memory(chunks * CHUNK * sizeof(int32_t)))};
    start(find_steps, steps);
  }

  void* memory(int64_t bytes) {
    scratch.emplace_back(host, bytes);
    return scratch.back().data();
  }
  void* reals(int64_t count) { return memory(count * real); }
  double* doubles(int64_t count) {
    return static_cast<double*>(memory(count * static_cast<int64_t>(sizeof(double))));
  }

  // Of each chunk and head, or group.
  Matrices heads(int64_t rows, int64_t columns) {
    return {reals(chunks * p.heads * rows * columns), chunks * p.heads, rows, columns};
  }
  Matrices groups(int64_t rows, int64_t columns) {
    return {reals(chunks * p.groups * rows * columns), chunks * p.groups, rows, columns};
  }
  // The columns of the heads of a group, beside each other.
  int64_t together() const { return p.heads_per_group() * p.width; }

  template <class... Parameters, class... Arguments>
  void start(const char* (*run)(const Problem&, Parameters...), const Arguments&... arguments) {
    host.started(run(p, arguments..., host.stream()));
  }

  // a·b to where it may be added to what is there.
  void multiply(const Matrices& a, const Matrices& b, const Matrices& to, bool add = false) {
    host.multiply(p, {a.data, b.data, to.data, a.batches, a.rows, a.columns, b.columns,
                      a.transposed, b.transposed, add});
  }

  // Where there are kernels for it.
  void walk(Walk walk) {
    const Segments of_time = segments(p);
    if (of_time.count > 1) {
      Walk before = walk;
      before.segments = walk.segments =
          reals(p.batches * of_time.count * p.heads * p.width * p.states);
      before.end = nullptr;  // the last segment's is not known yet
      start(add_up, steps, of_time, before);
      start(carry, steps, of_time, before);
    }
    start(cuda::walk, steps, of_time, walk);
  }
};

// What a pass of products needs besides.
template <class Host>
struct Work : Pass<Host> {
  using Pass<Host>::p;
  Matrices x, weighted, B, C, CB, M, states;
  Forward forward;

  Work(const Host& host, const Problem& p) : Pass<Host>(host, p) {
    x = this->heads(CHUNK, p.width);
    weighted = this->groups(CHUNK, this->together());
    B = this->groups(CHUNK, p.states);
    C = this->groups(CHUNK, p.states);
    forward.x = x.data;
    forward.weighted = weighted.data;
    forward.B = B.data;
    forward.C = C.data;
    this->start(spread, this->steps, forward);
  }

  // The states before the chunks, and after the last.
  void carry(void* final_states) {
    states = this->groups(this->together(), p.states);
    this->multiply(weighted.t(), B, states);
    forward.states = states.data;
    Walk walk;
    walk.start = p.initial_states;
    walk.end = final_states;
    walk.segments = states.data;
    this->start(cuda::carry, this->steps, Segments{1, p.chunks()}, walk);
    const Matrices across = this->groups(CHUNK, this->together());
    this->multiply(C, states.t(), across);
    forward.across = across.data;
    CB = this->groups(CHUNK, CHUNK);
    this->multiply(C, B.t(), CB);
    forward.CB = CB.data;
  }

  // What the steps of a chunk read of each other.
  void mix() {
    M = this->heads(CHUNK, CHUNK);
    forward.M = M.data;
    this->start(cuda::mix, this->steps, forward);
    const Matrices within = this->heads(CHUNK, p.width);
    this->multiply(M, x, within);
    forward.within = within.data;
  }
};

template <class Host>
void run_forward(const Host& host, const Problem& p, const ssd_chunk_scan::Forward& forward) {
  if (walks(p)) {
    Walk walk;
    walk.start = p.initial_states;
    walk.end = forward.final_states;
    walk.out = forward.out;
    Pass<Host>(host, p).walk(walk);
    return;
  }
  Work<Host> work(host, p);
  work.forward.out = forward.out;
  work.carry(forward.final_states);
  work.mix();
  work.start(finish, work.steps, work.forward);
}

// dB and dC by kernels that have the products inside.
template <class Host>
void run_gradients(Pass<Host>& pass, Backward& b, Walk& back, const Totals& totals) {
  const Problem& p = pass.p;
  Walk forth;
  forth.start = p.initial_states;
  forth.kept = b.forward.states = pass.heads(p.width, p.states).data;
  if (p.z.data) {
    const int64_t row = p.heads * p.width;
    forth.dout = b.dout;
    forth.dy = pass.reals(p.batches * p.length * row);
    forth.dz = b.dz;
    b.dout = back.dout = {forth.dy, p.length * row, row, p.width, 1};
  }
  pass.walk(forth);
  back.kept = b.dstates = pass.heads(p.width, p.states).data;
  pass.walk(back);
  const int64_t sums = sums_of_heads(p);
  b.dB = pass.groups(sums * CHUNK, p.states).data;
  b.dC = pass.groups(sums * CHUNK, p.states).data;
  pass.start(gradients, pass.steps, b);
  pass.start(join, b.dB, sums, totals.dB);
  pass.start(join, b.dC, sums, totals.dC);
}

// dB and dC by products.
template <class Host>
void run_products(Work<Host>& work, Backward& b, Walk& back, const Totals& totals) {
  const Problem& p = work.p;
  work.carry(nullptr);
  if (p.z.data) work.mix();
  const Matrices dy = work.heads(CHUNK, p.width), outer = work.groups(CHUNK, work.together());
  b.forward = work.forward;
  b.dy = dy.data;
  b.dy_outer = outer.data;
  work.start(spread_back, work.steps, b);

  const Matrices dstates = work.groups(work.together(), p.states);
  work.multiply(outer.t(), work.C, dstates);
  b.dstates = back.segments = dstates.data;
  work.start(carry, work.steps, Segments{1, p.chunks()}, back);

  const Matrices dM = work.heads(CHUNK, CHUNK);
  work.multiply(dy, work.x.t(), dM);
  b.dM = dM.data;
  b.Q = work.groups(parts(p) * CHUNK, CHUNK).data;
  b.row_excess = work.doubles(work.chunks * p.heads * CHUNK);
  b.column_sums = work.heads(CHUNK, 1).data;
  work.start(mix_back, work.steps, b);

  const Matrices gB = work.groups(CHUNK, work.together()), dx = work.heads(CHUNK, p.width);
  work.multiply(work.B, dstates.t(), gB);
  work.multiply(dM.t(), dy, dx);  // where M is now
  b.gB = gB.data;
  b.dx_within = dx.data;
  work.start(finish_back, work.steps, b);

  const Matrices Q = work.groups(CHUNK, CHUNK), whole = work.groups(CHUNK, p.states);
  work.start(sum_of_Q, b, Q.data);
  work.multiply(outer, work.states, whole);
  work.multiply(Q, work.B, whole, true);
  work.start(join, whole.data, int64_t{1}, totals.dC);
  work.multiply(work.weighted, dstates, whole);
  work.multiply(Q.t(), work.C, whole, true);
  work.start(join, whole.data, int64_t{1}, totals.dB);
}

template <class Host>
void run_backward(const Host& host, const Problem& p, const ssd_chunk_scan::Backward& backward,
                  const Totals& totals) {
  Backward b;
  b.dout = backward.dout;
  b.dx = backward.dx;
  b.ddt = backward.ddt;
  b.dlog_decay = backward.dlog_decay;
  b.dz = backward.dz;
  Walk back;
  back.back = true;
  back.start = backward.dfinal_states;
  back.end = backward.dinitial_states;
  back.dout = b.dout;
  const auto run = [&](auto&& pass, const auto& gradients) {
    b.dA = pass.doubles(pass.chunks * p.heads);
    b.ddt_bias = pass.doubles(pass.chunks * p.heads);
    b.dD = pass.doubles(pass.chunks * p.heads * p.width);
    gradients(pass, b, back, totals);
    if (totals.dA) pass.start(sum_of_chunks, b.dA, p.heads, totals.dA);
    if (totals.ddt_bias) pass.start(sum_of_chunks, b.ddt_bias, p.heads, totals.ddt_bias);
    pass.start(sum_of_chunks, b.dD, p.heads * p.width, totals.dD);
  };
  if (has_gradients(p)) run(Pass<Host>(host, p), run_gradients<Host>);
  else run(Work<Host>(host, p), run_products<Host>);
}

}  // namespace fuseport::ssd_chunk_scan::cuda
