// Matrix products by the MKL that Paddle has loaded, and sums over the rows of a matrix.
#pragma once

#include "parallel.h"

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);

namespace ppattn {

// c[m, n] = alpha * op(a) op(b) + beta * c, row-major; operands marked 'T' are stored transposed.
inline void gemm(char ta, char tb, Index m, Index n, Index k, float alpha, const float* a, Index lda, const float* b,
                 Index ldb, float beta, float* c, Index ldc) {
  const auto whole = [](Index i) { return static_cast<int>(i); };
  cblas_sgemm(101, ta == 'T' ? 112 : 111, tb == 'T' ? 112 : 111, whole(m), whole(n), whole(k), alpha, a, whole(lda), b,
              whole(ldb), beta, c, whole(ldc));
}

// Rows that go through several steps at a time, so that they stay in the L2 cache: about half a megabyte of `width`
// floats per row; whole images of `tokens` rows where that is not 0.
inline Index chunk_rows(Index width, Index tokens = 0) {
  const Index rows = std::clamp<Index>(131072 / width / 32 * 32, 64, 512);
  return tokens ? std::max<Index>(1, rows / tokens) * tokens : rows;
}

inline Index chunks_of(Index rows, Index step) { return (rows + step - 1) / step; }

inline void add_to_rows(const float* row, Index rows, Index n, float* x) {
  for (Index r = 0; r < rows; ++r) add(row, n, x + r * n);
}

// sum[n] += column sums of x, whose rows are `ld` floats apart; `part` is scratch of n floats: summing in two levels
// keeps the rounding error small.
inline void add_column_sums(const float* x, Index ld, Index rows, Index n, float* part, float* sum) {
  for (Index first = 0; first < rows; first += 32) {
    fill_zero(part, n);
    for (Index r = first; r < std::min(rows, first + 32); ++r) add(x + r * ld, n, part);
    add(part, n, sum);
  }
}

// mean[n] over `rows` rows that are `ld` floats apart; `part` is scratch of n floats.
inline void column_mean(const float* x, Index ld, Index rows, Index n, float* part, float* mean) {
  fill_zero(mean, n);
  add_column_sums(x, ld, rows, n, part, mean);
  for (Index i = 0; i < n; ++i) mean[i] /= static_cast<float>(rows);
}

}  // namespace ppattn
