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

// Rows that go through several steps at a time: half a megabyte of `width` floats per row, so that they stay in the L2
// cache, or, if every chunk adds to `sums` floats, at least as much as these.
inline Index chunk_rows(Index width, Index sums = 0) {
  return std::clamp<Index>(std::max<Index>(131072, sums) / width / 32 * 32, 64, sums ? 256 : 512);
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

#ifdef __AVX512F__
constexpr int lanes = 16, most_vectors = 4;  // of a row of sums, so that four such rows fit the registers
#else
constexpr int lanes = 8, most_vectors = 3;
#endif

// A square matrix of up to a few hundred rows in rows of `ld` floats, so that whole vectors can be read: zero beyond its
// m x m numbers. Small products in this form are faster than calls of a library.
struct Square {
  explicit Square(Index size) : m(size), ld((size + lanes - 1) / lanes * lanes), data((size + 3) / 4 * 4 * ld, true) {}

  void read(const float* x) const {
    for (Index i = 0; i < m; ++i) copy(x + i * m, m, data + i * ld);
  }

  void read_transposed(const float* x) const {
    for (Index i = 0; i < m; ++i)
      for (Index j = 0; j < m; ++j) data[j * ld + i] = x[i * m + j];
  }

  void write(float* y) const {
    for (Index i = 0; i < m; ++i) copy(data + i * ld, m, y + i * m);
  }

  // this = sign * a b + factor * this; a and b are other matrices of the same size.
  void product(float sign, const Square& a, const Square& b, float factor) const {
    for (Index j = 0; j < ld;) {
      const Index left = (ld - j) / lanes, vectors = left == most_vectors + 1 ? (left + 1) / 2 : left;
      if (vectors >= 4 && most_vectors >= 4)
        j += columns<std::min(4, most_vectors)>(j, sign, a, b, factor);
      else if (vectors >= 3)
        j += columns<3>(j, sign, a, b, factor);
      else if (vectors == 2)
        j += columns<2>(j, sign, a, b, factor);
      else
        j += columns<1>(j, sign, a, b, factor);
    }
  }

  const Index m, ld;
  const Buffer data;

 private:
  typedef float Vector __attribute__((vector_size(4 * lanes)));

  // `L` vectors of every row from column j on; their width.
  template <int L>
  Index columns(Index j, float sign, const Square& a, const Square& b, float factor) const {
    for (Index i = 0; i < m; i += 4) {
      Vector sum[4][L] = {};
      for (Index k = 0; k < m; ++k)
        for (int l = 0; l < L; ++l) {
          const Vector row = *reinterpret_cast<const Vector*>(b.data + k * ld + j + lanes * l);
          for (int r = 0; r < 4; ++r) sum[r][l] += a.data[(i + r) * ld + k] * row;
        }
      for (int r = 0; r < 4; ++r)
        for (int l = 0; l < L; ++l) {
          Vector& y = *reinterpret_cast<Vector*>(data + (i + r) * ld + j + lanes * l);
          y = sign * sum[r][l] + factor * y;
        }
    }
    return L * lanes;
  }
};

// `steps` > 0 Newton steps V <- 2 V - V K V towards the inverse of each of `count` matrices K [m, m], from `start`. V
// before every step is kept in `iterates` [count, steps, m, m] unless null.
inline void newton(const float* matrix, const float* start, Index count, Index m, Index steps, float* iterates,
                   float* y) {
  const Index size = m * m;
  parallel(count, [&](Index first, Index last) {
    const Square k(m), product(m), even(m), odd(m);
    for (Index item = first; item < last; ++item) {
      k.read(matrix + item * size);
      even.read(start + item * size);
      for (Index i = 0; i < steps; ++i) {
        const Square &v = i % 2 ? odd : even, &next = i % 2 ? even : odd;
        if (iterates) v.write(iterates + (item * steps + i) * size);
        product.product(1.f, v, k, 0.f);
        copy(v.data, m * v.ld, next.data);
        next.product(-1.f, product, v, 2.f);
      }
      (steps % 2 ? odd : even).write(y + item * size);
    }
  });
}

// Gradients of the matrix and of the start.
inline void newton_grad(const float* matrix, const float* iterates, const float* g, Index count, Index m, Index steps,
                        float* dmatrix, float* dstart) {
  const Index size = m * m;
  parallel(count, [&](Index first, Index last) {
    const Square k(m), v(m), left(m), right(m), dk(m), slope(m);  // k and v transposed
    for (Index item = first; item < last; ++item) {
      k.read_transposed(matrix + item * size);
      slope.read(g + item * size);
      fill_zero(dk.data, m * dk.ld);
      for (Index i = steps - 1; i >= 0; --i) {
        v.read_transposed(iterates + (item * steps + i) * size);
        left.product(1.f, v, slope, 0.f);
        right.product(1.f, slope, v, 0.f);
        dk.product(-1.f, left, v, 1.f);
        slope.product(-1.f, right, k, 2.f);
        slope.product(-1.f, k, left, 1.f);
      }
      dk.write(dmatrix + item * size);
      slope.write(dstart + item * size);
    }
  });
}

}  // namespace ppattn
