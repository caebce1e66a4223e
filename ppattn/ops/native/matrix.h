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

// `steps` > 0 Newton steps V <- 2 V - V K V towards the inverse of each of `count` matrices K [m, m], from `start`. V
// before every step is kept in `iterates` [count, steps, m, m] unless null.
inline void newton(const float* matrix, const float* start, Index count, Index m, Index steps, float* iterates,
                   float* y) {
  const Index size = m * m;
  parallel(count, [&](Index first, Index last) {
    Buffer product(size), scratch(size);
    for (Index item = first; item < last; ++item) {
      const float* v = start + item * size;
      float* spare = steps % 2 ? y + item * size : scratch;  // the last step writes y
      for (Index i = 0; i < steps; ++i) {
        if (iterates) copy(v, size, iterates + (item * steps + i) * size);
        gemm('N', 'N', m, m, m, 1.f, v, m, matrix + item * size, m, 0.f, product, m);
        copy(v, size, spare);
        gemm('N', 'N', m, m, m, -1.f, product, m, v, m, 2.f, spare, m);
        v = spare;
        spare = v == scratch ? y + item * size : scratch;
      }
    }
  });
}

// Gradients of the matrix and of the start.
inline void newton_grad(const float* matrix, const float* iterates, const float* g, Index count, Index m, Index steps,
                        float* dmatrix, float* dstart) {
  const Index size = m * m;
  parallel(count, [&](Index first, Index last) {
    Buffer left(size), right(size);
    for (Index item = first; item < last; ++item) {
      const float* k = matrix + item * size;
      float *dk = dmatrix + item * size, *slope = dstart + item * size;
      copy(g + item * size, size, slope);
      fill_zero(dk, size);
      for (Index i = steps - 1; i >= 0; --i) {
        const float* v = iterates + (item * steps + i) * size;
        gemm('T', 'N', m, m, m, 1.f, v, m, slope, m, 0.f, left, m);
        gemm('N', 'T', m, m, m, 1.f, slope, m, v, m, 0.f, right, m);
        gemm('N', 'T', m, m, m, -1.f, left, m, v, m, 1.f, dk, m);
        gemm('N', 'T', m, m, m, -1.f, right, m, k, m, 2.f, slope, m);
        gemm('T', 'N', m, m, m, -1.f, k, m, left, m, 1.f, slope, m);
      }
    }
  });
}

}  // namespace ppattn
