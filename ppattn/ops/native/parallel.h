// Threads of the OpenMP runtime that Paddle has loaded, scratch memory, and sums over threads in a fixed order.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>

#include "paddle/common/enforce.h"

extern "C" int mkl_get_max_threads();

namespace ppattn {

using Index = int64_t;

inline int threads_for(Index items) {
  return static_cast<int>(std::clamp<Index>(mkl_get_max_threads(), 1, std::max<Index>(1, items)));
}

// Threads for work with partial sums of `floats` per thread, which may take 256 MB in all.
inline int threads_for(Index items, Index floats) {
  return static_cast<int>(std::min<Index>(threads_for(items), std::max<Index>(1, (64 << 20) / floats)));
}

class NoDenormals {  // while it lives, results and operands of this thread below 1e-38 count as zero: they are slow
 public:
  NoDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~NoDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
};

// body(first, last, share) on `threads` contiguous shares of `items`, also where fewer threads are granted. An
// exception of a thread, such as a failed allocation, is thrown again behind the loop.
template <class Body>
void parallel(Index items, int threads, Body body) {
  std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
  for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) try {
      const NoDenormals inside;
      body(items * t / threads, items * (t + 1) / threads, t);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  if (failure) std::rethrow_exception(failure);
}

template <class Body>
void parallel(Index items, Body body) {
  parallel(items, threads_for(items), [&](Index first, Index last, int) { body(first, last); });
}

class Buffer {  // scratch memory of `floats`, uninitialised unless asked for, aligned to cache lines
 public:
  explicit Buffer(Index floats, bool zero = false) : bytes_((static_cast<size_t>(floats) / 16 + 1) * 64) {
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes_)));
    if (!data_)
      PADDLE_THROW(common::errors::ResourceExhausted("The CPU kernels need %d more bytes of memory.", bytes_));
    if (zero) std::memset(data_.get(), 0, bytes_);
  }
  operator float*() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  size_t bytes_;
  std::unique_ptr<float, Free> data_;
};

inline void fill_zero(float* x, Index n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

inline void copy(const float* x, Index n, float* y) { std::memcpy(y, x, static_cast<size_t>(n) * sizeof(float)); }

inline void add(const float* x, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] += x[i];
}

// Sum over threads, in thread order, of partial sums that lie `stride` floats apart; nothing where `out` is null.
inline void reduce(const float* partial, int threads, Index stride, Index n, float* out) {
  if (!out) return;
  parallel(n, threads_for(n / 8192), [&](Index first, Index last, int) {
    copy(partial + first, last - first, out + first);
    for (int t = 1; t < threads; ++t) add(partial + t * stride + first, last - first, out + first);
  });
}

}  // namespace ppattn
