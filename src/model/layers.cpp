#include "model/layers.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "base/sizes.h"
#include "base/threads.h"
#include "model/matrix_product.h"
#include "model/model_kernels.h"
#include "numerics/round_array.h"

namespace evenkeel {
namespace {

// Sums over rows are made in blocks of so many rows, which are then added up in order. The number of blocks
// depends on the rows alone, and so does every bit.
constexpr int64_t kRowBlock = 64;
static_assert(kProductBlock % kRowBlock == 0, "parts of a batch are whole blocks of both: layers.h");

// body(first row, rows, block) for every block of rows.
template <class Body>
void for_each_row_block(int64_t rows, Body body) {
  parallel_for(divide_up(rows, kRowBlock), [&](int64_t block, int) {
    body(block * kRowBlock, std::min(kRowBlock, rows - block * kRowBlock), block);
  });
}

// body(first, count) for parts of an array that no thread shares.
template <class Body>
void for_each_part(int64_t count, Body body) {
  constexpr int64_t kPart = 1 << 14;
  parallel_for(divide_up(count, kPart),
               [&](int64_t part, int) { body(part * kPart, std::min(kPart, count - part * kPart)); });
}

// What blocks of rows add to one vector: a vector for each block, all zero.
class BlockSums {
 public:
  BlockSums(int64_t rows, int64_t columns)
      : columns_(columns), sums_(at(divide_up(rows, kRowBlock) * columns)) {}
  float* of(int64_t block) { return sums_.data() + block * columns_; }
  void add_to(float* total) const {
    for (size_t n = 0; n < sums_.size(); n += at(columns_))
      model_kernels().add(total, sums_.data() + n, columns_);
  }

 private:
  int64_t columns_;
  std::vector<float> sums_;  // (blocks, columns)
};

}  // namespace

void embedding_forward(const int32_t* tokens, const float* wte, const float* wpe, int64_t B, int64_t T,
                       int64_t C, float* x) {
  for_each_row_block(B * T, [&](int64_t first, int64_t rows, int64_t) {
    for (int64_t n = first; n < first + rows; ++n) {
      std::copy_n(wte + tokens[n] * C, C, x + n * C);
      if (wpe) model_kernels().add(x + n * C, wpe + n % T * C, C);
    }
  });
}

void embedding_backward(const int32_t* tokens, const float* dx, int64_t B, int64_t T, int64_t C, int64_t V,
                        float* dwte, float* dwpe) {
  const int64_t N = B * T;
  // Places sorted by token, ascending within one (a counting sort): a token's row belongs to one thread.
  std::vector<int64_t> end(at(V)), places(at(N));
  for (int64_t n = 0; n < N; ++n) ++end[at(tokens[n])];
  std::partial_sum(end.begin(), end.end(), end.begin());
  std::vector<int64_t> next(end);
  for (int64_t n = N; n-- > 0;) places[at(--next[at(tokens[n])])] = n;
  const auto& kernels = model_kernels();
  constexpr int64_t kTokens = 16;
  parallel_for(divide_up(V, kTokens), [&](int64_t part, int) {
    std::vector<float> sum(at(C));
    for (int64_t token = part * kTokens; token < std::min(V, (part + 1) * kTokens); ++token) {
      const int64_t first = next[at(token)], last = end[at(token)];
      if (first == last) continue;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t place = first; place < last; ++place)
        kernels.add(sum.data(), dx + places[at(place)] * C, C);
      kernels.add(dwte + token * C, sum.data(), C);
    }
  });
  if (!dwpe) return;
  parallel_for(divide_up(T, kTokens), [&](int64_t part, int) {
    std::vector<float> sum(at(C));
    for (int64_t t = part * kTokens; t < std::min(T, (part + 1) * kTokens); ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      kernels.column_sums(dx + t * C, B, C, T * C, sum.data());
      kernels.add(dwpe + t * C, sum.data(), C);
    }
  });
}

void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t N, int64_t C, float* y,
                       float* mean, float* rstd) {
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    model_kernels().layernorm_forward(x + first * C, gain, bias, rows, C, y + first * C, mean + first,
                                      rstd + first);
  });
}

void layernorm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                        const float* rstd, int64_t N, int64_t C, float* dx, float* dgain, float* dbias) {
  BlockSums gains(N, C), biases(dbias ? N : 0, C);
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t block) {
    model_kernels().layernorm_backward(dy + first * C, x + first * C, gain, mean + first, rstd + first, rows,
                                       C, dx + first * C, gains.of(block),
                                       dbias ? biases.of(block) : nullptr);
  });
  gains.add_to(dgain);
  if (dbias) biases.add_to(dbias);
}

void rms_norm_forward(const float* x, const float* gain, float epsilon, int64_t N, int64_t C, float* y,
                      float* rstd) {
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    model_kernels().rms_norm_forward(x + first * C, gain, epsilon, rows, C, y + first * C, rstd + first);
  });
}

void rms_norm_backward(const float* dy, const float* x, const float* gain, const float* rstd, int64_t N,
                       int64_t C, float* dx, float* dgain) {
  BlockSums gains(N, C);
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t block) {
    model_kernels().rms_norm_backward(dy + first * C, x + first * C, gain, rstd + first, rows, C,
                                      dx + first * C, gains.of(block));
  });
  gains.add_to(dgain);
}

void head_norm_forward(const float* x, int64_t x_stride, const float* gain, float epsilon, int64_t N,
                       int64_t H, int64_t D, float* y, int64_t y_stride, float* rstd) {
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    for (int64_t n = first; n < first + rows; ++n)
      for (int64_t h = 0; h < H; ++h) {
        const float* from = x + n * x_stride + h * D;
        float* to = y + n * y_stride + h * D;
        float squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += from[d] * from[d];
        const float r = 1 / std::sqrt(squares / static_cast<float>(D) + epsilon);
        for (int64_t d = 0; d < D; ++d) to[d] = from[d] * r * gain[d];
        rstd[n * H + h] = r;
      }
  });
}

void head_norm_backward(const float* dy, int64_t dy_stride, const float* x, int64_t x_stride,
                        const float* gain, const float* rstd, int64_t N, int64_t H, int64_t D, float* dx,
                        int64_t dx_stride, float* dgain) {
  BlockSums gains(N, D);
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t block) {
    float* gain_sums = gains.of(block);
    for (int64_t n = first; n < first + rows; ++n)
      for (int64_t h = 0; h < H; ++h) {
        const float *from = x + n * x_stride + h * D, *d_to = dy + n * dy_stride + h * D;
        float* d_from = dx + n * dx_stride + h * D;
        const float r = rstd[n * H + h];
        float dot = 0;  // of dy gain and xhat
        for (int64_t d = 0; d < D; ++d) {
          dot += d_to[d] * gain[d] * from[d] * r;
          gain_sums[d] += d_to[d] * from[d] * r;
        }
        const float mean = dot / static_cast<float>(D);
        for (int64_t d = 0; d < D; ++d) d_from[d] = (d_to[d] * gain[d] - from[d] * r * mean) * r;
      }
  });
  gains.add_to(dgain);
}

std::vector<float> rotary_turns(float base, int64_t T, int64_t D) {
  std::vector<float> turns(at(T * D));
  for (int64_t t = 0; t < T; ++t)
    for (int64_t p = 0; p < D / 2; ++p) {
      const double angle =
          static_cast<double>(t) *
          std::pow(static_cast<double>(base), -2.0 * static_cast<double>(p) / static_cast<double>(D));
      turns[at(t * D + 2 * p)] = static_cast<float>(std::cos(angle));
      turns[at(t * D + 2 * p + 1)] = static_cast<float>(std::sin(angle));
    }
  return turns;
}

namespace {

// sign: 1 turns forward, -1 back.
void turn_pairs(const float* x, int64_t x_stride, const float* turns, bool neighbours, int64_t N, int64_t T,
                int64_t H, int64_t D, float sign, float* y, int64_t y_stride) {
  const int64_t step = neighbours ? 2 : 1, apart = neighbours ? 1 : D / 2;
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    for (int64_t n = first; n < first + rows; ++n) {
      const float* turn = turns + n % T * D;
      for (int64_t h = 0; h < H; ++h) {
        const float* from = x + n * x_stride + h * D;
        float* to = y + n * y_stride + h * D;
        for (int64_t p = 0; p < D / 2; ++p) {
          const float a = from[p * step], b = from[p * step + apart];
          const float cosine = turn[2 * p], sine = sign * turn[2 * p + 1];
          to[p * step] = a * cosine - b * sine;
          to[p * step + apart] = a * sine + b * cosine;
        }
      }
    }
  });
}

}  // namespace

void rotary_forward(const float* x, int64_t x_stride, const float* turns, bool neighbours, int64_t N,
                    int64_t T, int64_t H, int64_t D, float* y, int64_t y_stride) {
  turn_pairs(x, x_stride, turns, neighbours, N, T, H, D, 1, y, y_stride);
}

void rotary_backward(float* dy, int64_t stride, const float* turns, bool neighbours, int64_t N, int64_t T,
                     int64_t H, int64_t D) {
  turn_pairs(dy, stride, turns, neighbours, N, T, H, D, -1, dy, stride);
}

void linear_forward(const float* x, const float* w, const float* bias, const float* residual, int64_t N,
                    int64_t in, int64_t out, float* y) {
  multiply({N, out, in, Matrix::rows_of(x, in), Matrix::rows_of(w, out), y, out, bias, residual});
}

void linear_backward(const float* dy, const float* x, const float* w, int64_t N, int64_t in, int64_t out,
                     float* dx, float* dw, float* dbias, bool add_dx) {
  if (dx)
    multiply({N, in, out, Matrix::rows_of(dy, out), Matrix::transposed(w, out), dx, in, nullptr,
              add_dx ? dx : nullptr});
  multiply({in, out, N, Matrix::transposed(x, in), Matrix::rows_of(dy, out), dw, out, nullptr, dw});
  if (!dbias) return;
  BlockSums sums(N, out);
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t block) {
    model_kernels().column_sums(dy + first * out, rows, out, out, sums.of(block));
  });
  sums.add_to(dbias);
}

void gelu_forward(const float* x, float* y, float* slope, int64_t count) {
  for_each_part(
      count, [&](int64_t n, int64_t some) { model_kernels().gelu_forward(x + n, y + n, slope + n, some); });
}

void gelu_backward(const float* slope, float* dy, int64_t count) {
  for_each_part(count, [&](int64_t n, int64_t some) { model_kernels().scale(dy + n, slope + n, some); });
}

void swiglu_forward(const float* x, int64_t N, int64_t F, float* y) {
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    for (int64_t n = first; n < first + rows; ++n)
      model_kernels().swiglu_forward(x + n * 2 * F, x + n * 2 * F + F, y + n * F, F);
  });
}

void swiglu_backward(const float* x, const float* dy, int64_t N, int64_t F, float* dx) {
  for_each_row_block(N, [&](int64_t first, int64_t rows, int64_t) {
    for (int64_t n = first; n < first + rows; ++n)
      model_kernels().swiglu_backward(x + n * 2 * F, x + n * 2 * F + F, dy + n * F, dx + n * 2 * F,
                                      dx + n * 2 * F + F, F);
  });
}

void gate_forward(const float* x, const float* gate, float* y, int64_t count) {
  for_each_part(count,
                [&](int64_t n, int64_t some) { model_kernels().gate_forward(x + n, gate + n, y + n, some); });
}

void gate_backward(const float* x, const float* gate, const float* dy, float* dx, float* dgate,
                   int64_t count) {
  for_each_part(count, [&](int64_t n, int64_t some) {
    model_kernels().gate_backward(x + n, gate + n, dy + n, dx + n, dgate + n, some);
  });
}

void classifier(const Classifier& c) {
  // Whole blocks of a product's sum, so that the rows at a time change no bit of dw; 16 M logits are 64 MiB.
  constexpr int64_t kLogits = 1 << 24;
  const int64_t step = std::min(c.N, std::max<int64_t>(1, kLogits / c.V / kProductBlock) * kProductBlock);
  const auto logits = std::make_unique_for_overwrite<float[]>(at(step * c.V));
  for (int64_t first = 0; first < c.N; first += step) {
    const int64_t rows = std::min(step, c.N - first);
    const float* x = c.x + first * c.C;
    multiply({rows, c.V, c.C, Matrix::rows_of(x, c.C), Matrix::transposed(c.w, c.C), logits.get(), c.V});
    parallel_for(divide_up(rows, 8), [&](int64_t part, int) {
      for (int64_t n = part * 8; n < std::min(rows, (part + 1) * 8); ++n)
        c.losses[first + n] = model_kernels().cross_entropy(logits.get() + n * c.V, c.V, c.targets[first + n],
                                                            c.gradient_scale);
    });
    if (!c.dx) continue;
    round_operand(c.operands, logits.get(), rows * c.V);
    multiply({rows, c.C, c.V, Matrix::rows_of(logits.get(), c.V), Matrix::rows_of(c.w, c.C),
              c.dx + first * c.C, c.C});
    multiply({c.V, c.C, rows, Matrix::transposed(logits.get(), c.V), Matrix::rows_of(x, c.C), c.dw, c.C,
              nullptr, c.dw});
  }
}

void round_operand(const Rounding& rounding, float* x, int64_t count) {
  round_operand(rounding, x, x, count);
}

void round_operand(const Rounding& rounding, float* target, const float* source, int64_t count) {
  if (target == source && is_identity(rounding)) return;
  for_each_part(count,
                [&](int64_t n, int64_t some) { round_array(rounding, target + n, source + n, at(some)); });
}

}  // namespace evenkeel
