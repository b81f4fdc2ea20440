// Every layer against a slow, obvious FP64 version and its finite differences; products against their
// definition, bit for bit; all CPU targets and thread counts against each other.
#include "model/layers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <functional>

#include "base/threads.h"
#include "model/matrix_product.h"
#include "model/model_kernels.h"
#include "numerics/cpu.h"
#include "numerics/random.h"
#include "numerics/round_array.h"

namespace evenkeel {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

size_t at(int64_t n) { return static_cast<size_t>(n); }

Floats random_values(int64_t count, uint32_t tensor, double scale = 1) {
  RandomStream stream({7, 0, tensor});
  Floats values(at(count));
  for (float& value : values) value = static_cast<float>(scale * stream.normal());
  return values;
}
Doubles wide(const Floats& x) { return {x.begin(), x.end()}; }

double dot(const Doubles& x, const Floats& y) {
  double sum = 0;
  for (size_t n = 0; n < x.size(); ++n) sum += x[n] * static_cast<double>(y[n]);
  return sum;
}

// Central differences of f at x, one value at a time.
Doubles slopes(const std::function<double(const Doubles&)>& f, Doubles x) {
  constexpr double kStep = 1e-5;
  Doubles out;
  for (double& value : x) {
    const double kept = value;
    value = kept + kStep;
    const double above = f(x);
    value = kept - kStep;
    out.push_back((above - f(x)) / (2 * kStep));
    value = kept;
  }
  return out;
}

// Within `tolerance` of the largest expected value.
void expect_close(const Floats& found, const Doubles& expected, double tolerance, const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double largest = 0;
  for (double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t n = 0; n < found.size(); ++n)
    ASSERT_NEAR(found[n], expected[n], tolerance * largest) << what << ", value " << n;
}

void expect_same_bits(const Floats& found, const Floats& expected, const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t n = 0; n < found.size(); ++n)
    ASSERT_EQ(std::bit_cast<uint32_t>(found[n]), std::bit_cast<uint32_t>(expected[n]))
        << what << ", value " << n;
}

// Some roundings of FP32 in a row.
constexpr double kTolerance = 2e-6;

// --- Products

// The definition, word by word.
Floats product_by_definition(const MatrixProduct& p) {
  Floats out(at(p.rows * p.columns));
  for (int64_t m = 0; m < p.rows; ++m)
    for (int64_t n = 0; n < p.columns; ++n) {
      float total = 0;
      for (int64_t k = 0; k == 0 || k < p.depth; k += kProductBlock) {
        float sum = 0;
        for (int64_t j = k; j < std::min(p.depth, k + kProductBlock); ++j)
          sum = std::fma(p.a.data[m * p.a.row + j * p.a.column], p.b.data[j * p.b.row + n * p.b.column], sum);
        if (k == 0 && p.bias) sum += p.bias[n];
        if (k == 0 && p.base) sum += p.base[m * p.c_stride + n];
        total = k == 0 ? sum : sum + total;
      }
      out[at(m * p.columns + n)] = total;
    }
  return out;
}

TEST(MatrixProduct, is_its_definition_to_the_bit) {
  const int64_t kShapes[][3] = {{1, 1, 1},    {7, 65, 3},     {6, 64, 256},  {13, 17, 257}, {50, 130, 70},
                                {2, 48, 513}, {100, 33, 300}, {128, 16, 31}, {5, 80, 0}};
  for (const auto& [M, N, K] : kShapes)
    for (int form = 0; form < 16; ++form) {
      const bool a_transposed = form & 1, b_transposed = form & 2, with_bias = form & 4, with_base = form & 8;
      const Floats a = random_values(M * K, 1), b = random_values(K * N, 2), bias = random_values(N, 3);
      const int64_t stride = N + 3;
      const Floats base = random_values(M * stride, 4);
      Floats c(base);
      MatrixProduct p{M,
                      N,
                      K,
                      a_transposed ? Matrix::transposed(a.data(), M) : Matrix::rows_of(a.data(), K),
                      b_transposed ? Matrix::transposed(b.data(), K) : Matrix::rows_of(b.data(), N),
                      c.data(),
                      stride};
      if (with_bias) p.bias = bias.data();
      if (with_base) p.base = base.data();
      const Floats expected = product_by_definition(p);
      if (with_base) p.base = c.data();  // in place
      multiply(p);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < stride; ++n) {
          const float meant = n < N ? expected[at(m * N + n)] : base[at(m * stride + n)];
          ASSERT_EQ(std::bit_cast<uint32_t>(c[at(m * stride + n)]), std::bit_cast<uint32_t>(meant))
              << M << " x " << N << " x " << K << " form " << form << " at " << m << ", " << n;
        }
    }
}

// BF16 operands: each is off by at most 2^-8 of itself, so a product by 2 * 2^-8 + 2^-16; and the errors have
// no sign.
TEST(MatrixProduct, bf16_operands_stay_within_their_bound_and_without_bias) {
  const int64_t M = 64, N = 96, K = 200;
  const Floats a = random_values(M * K, 1), b = random_values(K * N, 2);
  Floats ar(a), br(b), exact(at(M * N)), rounded(at(M * N));
  round_operand({kBf16}, ar.data(), M * K);
  round_operand({kBf16}, br.data(), K * N);
  linear_forward(a.data(), b.data(), nullptr, nullptr, M, K, N, exact.data());
  linear_forward(ar.data(), br.data(), nullptr, nullptr, M, K, N, rounded.data());
  double sum = 0, squares = 0, largest = 0;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double size = 0;
      for (int64_t k = 0; k < K; ++k) size += std::fabs(double{a[at(m * K + k)]} * double{b[at(k * N + n)]});
      const double error = double{rounded[at(m * N + n)]} - double{exact[at(m * N + n)]};
      const double in_fp32 = 2 * static_cast<double>(K) * 0x1p-24 * size;
      ASSERT_LE(std::fabs(error), (2 * 0x1p-8 + 0x1p-16) * size + in_fp32);
      sum += error;
      squares += error * error;
      largest = std::max(largest, std::fabs(error));
    }
  const double count = static_cast<double>(M * N);
  EXPECT_LT(std::fabs(sum), 4 * std::sqrt(squares)) << "mean error " << sum / count;
  EXPECT_GT(largest, 1e-3) << "nothing was rounded";
}

// --- Layers

struct NormCase {
  int64_t N, C;
};
const NormCase kNormCases[] = {{1, 1}, {3, 5}, {2, 16}, {4, 37}, {70, 20}};

// y of LayerNorm in FP64.
Doubles layernorm(const Doubles& x, const Doubles& gain, const Doubles& bias, int64_t N, int64_t C) {
  Doubles y(x.size());
  for (int64_t n = 0; n < N; ++n) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; ++c) mean += x[at(n * C + c)] / static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) variance += std::pow(x[at(n * C + c)] - mean, 2) / static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c)
      y[at(n * C + c)] = (x[at(n * C + c)] - mean) / std::sqrt(variance + 1e-5) * gain[at(c)] + bias[at(c)];
  }
  return y;
}

TEST(Layers, layernorm) {
  for (const auto& sizes : kNormCases) {
    const auto N = sizes.N, C = sizes.C;
    const Floats x = random_values(N * C, 1, 2), gain = random_values(C, 2), bias = random_values(C, 3),
                 dy = random_values(N * C, 4), before = random_values(N * C, 5);
    Floats y(at(N * C)), mean(at(N)), rstd(at(N)), dx(before), dgain(at(C)), dbias(at(C));
    layernorm_forward(x.data(), gain.data(), bias.data(), N, C, y.data(), mean.data(), rstd.data());
    expect_close(y, layernorm(wide(x), wide(gain), wide(bias), N, C), kTolerance, "y");
    layernorm_backward(dy.data(), x.data(), gain.data(), mean.data(), rstd.data(), N, C, dx.data(),
                       dgain.data(), dbias.data());
    Doubles expected = slopes(
        [&](const Doubles& v) { return dot(layernorm(v, wide(gain), wide(bias), N, C), dy); }, wide(x));
    for (size_t n = 0; n < expected.size(); ++n) expected[n] += before[n];  // it adds
    expect_close(dx, expected, 2e-5, "dx");
    expect_close(dgain,
                 slopes([&](const Doubles& v) { return dot(layernorm(wide(x), v, wide(bias), N, C), dy); },
                        wide(gain)),
                 1e-5, "dgain");
    expect_close(dbias,
                 slopes([&](const Doubles& v) { return dot(layernorm(wide(x), wide(gain), v, N, C), dy); },
                        wide(bias)),
                 1e-5, "dbias");
    Floats plain(at(N * C));
    layernorm_forward(x.data(), gain.data(), nullptr, N, C, plain.data(), mean.data(), rstd.data());
    expect_close(plain, layernorm(wide(x), wide(gain), Doubles(at(C)), N, C), kTolerance, "y without bias");
  }
}

// A mean a thousand times the deviation: a sum of squares minus the squared mean would have lost all digits.
TEST(Layers, layernorm_keeps_its_digits_far_from_zero) {
  const int64_t C = 64;
  Floats x = random_values(C, 1), y(at(C));
  for (float& value : x) value += 1000;
  float mean, rstd;
  const Floats ones(at(C), 1.0f);
  layernorm_forward(x.data(), ones.data(), nullptr, 1, C, y.data(), &mean, &rstd);
  expect_close(y, layernorm(wide(x), wide(ones), Doubles(at(C)), 1, C), 1e-4, "y");
}

TEST(Layers, rms_norm) {
  for (const int64_t C : {1, 7, 16, 37, 64}) {
    const int64_t N = 70;  // more than one block of rows
    const float epsilon = 1e-3f;
    const Floats x = random_values(N * C, 1, 2), gain = random_values(C, 2), dy = random_values(N * C, 3);
    const auto slow = [&](const Doubles& in, const Doubles& g) {
      Doubles out(in.size());
      for (int64_t n = 0; n < N; ++n) {
        double squares = 0;
        for (int64_t c = 0; c < C; ++c) squares += std::pow(in[at(n * C + c)], 2);
        for (int64_t c = 0; c < C; ++c)
          out[at(n * C + c)] =
              in[at(n * C + c)] / std::sqrt(squares / static_cast<double>(C) + epsilon) * g[at(c)];
      }
      return out;
    };
    Floats y(at(N * C)), rstd(at(N)), dx(at(N * C), 1.0f), dgain(at(C), 2.0f);
    rms_norm_forward(x.data(), gain.data(), epsilon, N, C, y.data(), rstd.data());
    expect_close(y, slow(wide(x), wide(gain)), kTolerance, "y");
    rms_norm_backward(dy.data(), x.data(), gain.data(), rstd.data(), N, C, dx.data(), dgain.data());
    Doubles slope_x = slopes([&](const Doubles& v) { return dot(slow(v, wide(gain)), dy); }, wide(x));
    Doubles slope_gain = slopes([&](const Doubles& v) { return dot(slow(wide(x), v), dy); }, wide(gain));
    for (double& value : slope_x) value += 1;  // added to what was there
    for (double& value : slope_gain) value += 2;
    expect_close(dx, slope_x, 1e-5, "dx");
    expect_close(dgain, slope_gain, 1e-5, "dgain");
  }
}

// A head as D / 2 complex numbers: place t turns number p by t base^(-2 p / D). Turned back, it is what it was; the dot
// product of two turned heads depends on how far apart they are alone.
TEST(Layers, rotary) {
  const int64_t N = 10, T = 5, H = 3, D = 6, stride = H * D + 4;
  const float base = 50;
  const Floats turns = rotary_turns(base, T, D), x = random_values(N * stride, 1);
  for (const bool neighbours : {false, true}) {
    const auto first = [&](int64_t p) { return neighbours ? 2 * p : p; };
    const auto second = [&](int64_t p) { return neighbours ? 2 * p + 1 : p + D / 2; };
    Doubles expected = wide(x);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t p = 0; p < D / 2; ++p) {
          const size_t a = at(n * stride + h * D + first(p)), b = at(n * stride + h * D + second(p));
          const auto turned =
              std::complex<double>(x[a], x[b]) *
              std::polar(1.0, static_cast<double>(n % T) * std::pow(50.0, -2.0 * static_cast<double>(p) / 6));
          expected[a] = turned.real(), expected[b] = turned.imag();
        }
    Floats y(x);
    rotary_forward(x.data(), stride, turns.data(), neighbours, N, T, H, D, y.data(), stride);
    expect_close(y, expected, kTolerance, "y");
    Floats back(y);
    rotary_backward(back.data(), stride, turns.data(), neighbours, N, T, H, D);
    expect_close(back, wide(x), kTolerance, "turned back");
    Floats in_place(x);
    rotary_forward(in_place.data(), stride, turns.data(), neighbours, N, T, H, D, in_place.data(), stride);
    expect_same_bits(in_place, y, "in place");
    // The gradient is the transpose: <R x, dy> = <x, R' dy>.
    const Floats dy = random_values(N * stride, 2);
    Floats dx(dy);
    rotary_backward(dx.data(), stride, turns.data(), neighbours, N, T, H, D);
    EXPECT_NEAR(dot(wide(y), dy), dot(wide(x), dx), 1e-4);
    // Equal heads at all places: the score is a matter of the distance.
    Floats same(at(T * D));
    for (int64_t n = 0; n < T * D; ++n) same[at(n)] = x[at(n % D)];
    rotary_forward(same.data(), D, turns.data(), neighbours, T, T, 1, D, same.data(), D);
    const auto score = [&](int64_t i, int64_t j) {
      double sum = 0;
      for (int64_t d = 0; d < D; ++d) sum += double{same[at(i * D + d)]} * same[at(j * D + d)];
      return sum;
    };
    EXPECT_NEAR(score(1, 0), score(4, 3), 1e-5);
    EXPECT_NEAR(score(3, 0), score(4, 1), 1e-5);
    EXPECT_GT(std::fabs(score(3, 0) - score(1, 0)), 1e-3);
  }
}

TEST(Layers, swiglu) {
  for (const int64_t F : {1, 16, 37}) {
    const int64_t N = 5;
    const Floats x = random_values(N * 2 * F, 1, 2), dy = random_values(N * F, 2);
    const auto slow = [&](const Doubles& in) {
      Doubles out(at(N * F));
      for (int64_t n = 0; n < N; ++n)
        for (int64_t f = 0; f < F; ++f) {
          const double gate = in[at(n * 2 * F + f)], up = in[at(n * 2 * F + F + f)];
          out[at(n * F + f)] = gate / (1 + std::exp(-gate)) * up;
        }
      return out;
    };
    Floats y(at(N * F)), dx(x.size());
    swiglu_forward(x.data(), N, F, y.data());
    expect_close(y, slow(wide(x)), kTolerance, "y");
    swiglu_backward(x.data(), dy.data(), N, F, dx.data());
    expect_close(dx, slopes([&](const Doubles& v) { return dot(slow(v), dy); }, wide(x)), 1e-5, "dx");
  }
}

TEST(Layers, rms_norm_of_heads) {
  const int64_t N = 5, H = 3, D = 7, stride = 3 * H * D;
  const Floats x = random_values(N * stride, 1, 2), gain = random_values(D, 2),
               dy = random_values(N * stride, 3);
  const auto slow = [&](const Doubles& in, const Doubles& g) {
    Doubles out(in.size());
    for (int64_t n = 0; n < N; ++n)
      for (int64_t h = 0; h < H; ++h) {
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += std::pow(in[at(n * stride + h * D + d)], 2);
        for (int64_t d = 0; d < D; ++d)
          out[at(n * stride + h * D + d)] =
              in[at(n * stride + h * D + d)] / std::sqrt(squares / static_cast<double>(D) + 1e-5) * g[at(d)];
      }
    return out;
  };
  Floats y(at(N * stride)), rstd(at(N * H)), dx(dy), dgain(at(D));
  head_norm_forward(x.data(), stride, gain.data(), 1e-5f, N, H, D, y.data(), stride, rstd.data());
  expect_close(y, slow(wide(x), wide(gain)), kTolerance, "y");
  head_norm_backward(dx.data(), stride, x.data(), stride, gain.data(), rstd.data(), N, H, D, dx.data(),
                     stride, dgain.data());
  Doubles expected = slopes([&](const Doubles& v) { return dot(slow(v, wide(gain)), dy); }, wide(x));
  for (int64_t n = 0; n < N; ++n)  // in place: what is no head's stays
    for (int64_t c = H * D; c < stride; ++c) expected[at(n * stride + c)] = dy[at(n * stride + c)];
  expect_close(dx, expected, 1e-5, "dx");
  expect_close(dgain, slopes([&](const Doubles& v) { return dot(slow(wide(x), v), dy); }, wide(gain)), 1e-5,
               "dgain");
}

TEST(Layers, linear) {
  const int64_t N = 9, in = 7, out = 5;
  const Floats x = random_values(N * in, 1), w = random_values(in * out, 2), bias = random_values(out, 3),
               residual = random_values(N * out, 4), dy = random_values(N * out, 5);
  const auto slow = [&](const Doubles& xs, const Doubles& ws, const Doubles& bs) {
    Doubles y = wide(residual);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t o = 0; o < out; ++o) {
        y[at(n * out + o)] += bs[at(o)];
        for (int64_t i = 0; i < in; ++i) y[at(n * out + o)] += xs[at(n * in + i)] * ws[at(i * out + o)];
      }
    return y;
  };
  Floats y(at(N * out)), dx(at(N * in)), dw(at(in * out), 1.0f), dbias(at(out), 1.0f);
  linear_forward(x.data(), w.data(), bias.data(), residual.data(), N, in, out, y.data());
  expect_close(y, slow(wide(x), wide(w), wide(bias)), kTolerance, "y");
  linear_backward(dy.data(), x.data(), w.data(), N, in, out, dx.data(), dw.data(), dbias.data());
  const Doubles slope_x =
      slopes([&](const Doubles& v) { return dot(slow(v, wide(w), wide(bias)), dy); }, wide(x));
  Doubles slope_w = slopes([&](const Doubles& v) { return dot(slow(wide(x), v, wide(bias)), dy); }, wide(w));
  Doubles slope_b = slopes([&](const Doubles& v) { return dot(slow(wide(x), wide(w), v), dy); }, wide(bias));
  for (double& value : slope_w) value += 1;  // it adds
  for (double& value : slope_b) value += 1;
  expect_close(dx, slope_x, 1e-5, "dx");
  expect_close(dw, slope_w, 1e-5, "dw");
  expect_close(dbias, slope_b, 1e-5, "dbias");
  Floats twice(dx);
  linear_backward(dy.data(), x.data(), w.data(), N, in, out, twice.data(), dw.data(), nullptr,
                  /*add_dx=*/true);
  for (size_t n = 0; n < dx.size(); ++n) EXPECT_FLOAT_EQ(twice[n], 2 * dx[n]);
}

TEST(Layers, gelu) {
  Floats x;
  for (float value = -12; value <= 12; value += 0.0371f) x.push_back(value);
  x.insert(x.end(), {0.0f, -0.0f, 1e-30f, -1e-30f, 100.0f, -100.0f, 3e38f, -3e38f});
  const auto slow = [](double v) {
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
  };
  const int64_t count = static_cast<int64_t>(x.size());
  const Floats dy = random_values(count, 1);
  Floats y(x.size()), kept(x), dx(dy);
  gelu_forward(kept.data(), y.data(), kept.data(), count);
  gelu_backward(kept.data(), dx.data(), count);
  for (size_t n = 0; n < x.size(); ++n) {
    EXPECT_NEAR(y[n], slow(x[n]), 2e-6 * std::max(1.0, std::fabs(double{x[n]}))) << x[n];
    const double step = 1e-5, slope = std::fabs(x[n]) > 20
                                          ? (x[n] > 0)
                                          : (slow(x[n] + step) - slow(x[n] - step)) / (2 * step);
    EXPECT_NEAR(dx[n], slope * dy[n], 3e-6 * std::max(1.0f, std::fabs(dy[n]))) << x[n];
  }
}

TEST(Layers, gate) {
  const int64_t count = 45;
  const Floats x = random_values(count, 1), gate = random_values(count, 2, 3), dy = random_values(count, 3);
  const auto slow = [](const Doubles& xs, const Doubles& gs) {
    Doubles y(xs.size());
    for (size_t n = 0; n < y.size(); ++n) y[n] = xs[n] / (1 + std::exp(-gs[n]));
    return y;
  };
  Floats y(at(count)), dx(dy), dgate(at(count));
  gate_forward(x.data(), gate.data(), y.data(), count);
  expect_close(y, slow(wide(x), wide(gate)), kTolerance, "y");
  gate_backward(x.data(), gate.data(), dx.data(), dx.data(), dgate.data(), count);
  expect_close(dx, slopes([&](const Doubles& v) { return dot(slow(v, wide(gate)), dy); }, wide(x)), 1e-5,
               "dx");
  expect_close(dgate, slopes([&](const Doubles& v) { return dot(slow(wide(x), v), dy); }, wide(gate)), 1e-5,
               "dgate");
}

TEST(Layers, embedding) {
  const int64_t B = 3, T = 4, C = 5, V = 6;
  const std::vector<int32_t> tokens = {2, 2, 5, 2, 0, 5, 2, 1, 1, 1, 1, 1};  // 3 and 4 never
  const Floats wte = random_values(V * C, 1), wpe = random_values(T * C, 2), dx = random_values(B * T * C, 3);
  Floats x(at(B * T * C)), dwte(at(V * C), 1.0f), dwpe(at(T * C), 2.0f);
  embedding_forward(tokens.data(), wte.data(), wpe.data(), B, T, C, x.data());
  Doubles expected_wte(at(V * C), 1.0), expected_wpe(at(T * C), 2.0);
  for (int64_t n = 0; n < B * T; ++n)
    for (int64_t c = 0; c < C; ++c) {
      EXPECT_EQ(x[at(n * C + c)], wte[at(tokens[at(n)] * C + c)] + wpe[at(n % T * C + c)]);
      expected_wte[at(tokens[at(n)] * C + c)] += dx[at(n * C + c)];
      expected_wpe[at(n % T * C + c)] += dx[at(n * C + c)];
    }
  embedding_backward(tokens.data(), dx.data(), B, T, C, V, dwte.data(), dwpe.data());
  expect_close(dwte, expected_wte, kTolerance, "dwte");
  expect_close(dwpe, expected_wpe, kTolerance, "dwpe");
  for (int64_t c = 3 * C; c < 5 * C; ++c) EXPECT_EQ(dwte[at(c)], 1.0f);
}

double mean_cross_entropy(const Doubles& x, const Doubles& w, const std::vector<int32_t>& targets,
                          int64_t C) {
  const size_t N = targets.size(), V = w.size() / at(C);
  double total = 0;
  for (size_t n = 0; n < N; ++n) {
    Doubles logits(V);
    double largest = -INFINITY, sum = 0;
    for (size_t v = 0; v < V; ++v) {
      for (size_t c = 0; c < at(C); ++c) logits[v] += x[n * at(C) + c] * w[v * at(C) + c];
      largest = std::max(largest, logits[v]);
    }
    for (double logit : logits) sum += std::exp(logit - largest);
    total += largest + std::log(sum) - logits[at(targets[n])];
  }
  return total / static_cast<double>(N);
}

double mean_loss(Classifier c) {
  Floats losses(at(c.N));
  c.losses = losses.data();
  classifier(c);
  double sum = 0;
  for (float loss : losses) sum += loss;
  return sum / static_cast<double>(c.N);
}

TEST(Layers, classifier) {
  for (const int64_t V : {1, 7, 33}) {
    const int64_t C = 6;
    const std::vector<int32_t> targets = {0, static_cast<int32_t>(V - 1), static_cast<int32_t>(V / 2), 0};
    const int64_t N = static_cast<int64_t>(targets.size());
    const Floats x = random_values(N * C, 1), w = random_values(V * C, 2, 2);
    Floats dx(at(N * C)), dw(at(V * C), 1.0f);
    Classifier c{
        x.data(),  w.data(), targets.data(), nullptr, N, C, V, 3.0f / static_cast<float>(N), dx.data(),
        dw.data(), {}};
    const double expected = mean_cross_entropy(wide(x), wide(w), targets, C);
    EXPECT_NEAR(mean_loss(c), expected, 1e-6 * std::max(1.0, expected));
    Doubles slope_x =
        slopes([&](const Doubles& v) { return 3 * mean_cross_entropy(v, wide(w), targets, C); }, wide(x));
    Doubles slope_w =
        slopes([&](const Doubles& v) { return 3 * mean_cross_entropy(wide(x), v, targets, C); }, wide(w));
    for (double& value : slope_w) value += 1;
    for (size_t n = 0; n < dx.size(); ++n) EXPECT_NEAR(dx[n], slope_x[n], 1e-5);
    for (size_t n = 0; n < dw.size(); ++n) EXPECT_NEAR(dw[n], slope_w[n], 1e-5);
    c.dx = c.dw = nullptr;
    EXPECT_NEAR(mean_loss(c), expected, 1e-6 * std::max(1.0, expected));
  }
}

TEST(Layers, classifier_survives_huge_logits) {
  const Floats x = {1000.0f}, w = {1.0f, -1.0f, 0.5f};
  const std::vector<int32_t> targets = {1};
  Floats dx(1), dw(3);
  const double loss =
      mean_loss({x.data(), w.data(), targets.data(), nullptr, 1, 1, 3, 1, dx.data(), dw.data(), {}});
  EXPECT_EQ(loss, 2000);
  EXPECT_EQ(dx[0], 2);
  EXPECT_EQ(dw, (Floats{1000, -1000, 0}));
}

// More logits than are held at a time: the same bits as all at once.
TEST(Layers, classifier_in_parts_is_the_whole) {
  const int64_t V = 60000, N = 300, C = 3;  // parts of 256 rows
  std::vector<int32_t> targets(at(N));
  for (int64_t n = 0; n < N; ++n) targets[at(n)] = static_cast<int32_t>((n * 7919) % V);
  const Floats x = random_values(N * C, 1), w = random_values(V * C, 2);
  Floats dx(at(N * C)), dw(at(V * C)), logits(at(N * V)), dx_whole(at(N * C)), dw_whole(at(V * C));
  const double loss = mean_loss({x.data(),
                                 w.data(),
                                 targets.data(),
                                 nullptr,
                                 N,
                                 C,
                                 V,
                                 1 / static_cast<float>(N),
                                 dx.data(),
                                 dw.data(),
                                 {}});
  multiply({N, V, C, Matrix::rows_of(x.data(), C), Matrix::transposed(w.data(), C), logits.data(), V});
  double total = 0;
  for (int64_t n = 0; n < N; ++n)
    total +=
        model_kernels().cross_entropy(logits.data() + n * V, V, targets[at(n)], 1 / static_cast<float>(N));
  multiply({N, C, V, Matrix::rows_of(logits.data(), V), Matrix::rows_of(w.data(), C), dx_whole.data(), C});
  multiply({V, C, N, Matrix::transposed(logits.data(), V), Matrix::rows_of(x.data(), C), dw_whole.data(), C});
  EXPECT_EQ(loss, total / static_cast<double>(N));
  expect_same_bits(dx, dx_whole, "dx");
  expect_same_bits(dw, dw_whole, "dw");
}

// --- The same bits everywhere

// Everything the kernels of one target make of one set of inputs, one behind the other.
Floats results_of(const ModelKernels& kernels) {
  const int64_t rows = 11, C = 150;
  const Floats a = random_values(rows * C, 1), b = random_values(C * C, 2), gain = random_values(C, 3);
  Floats out;
  const auto keep = [&](const Floats& x) { out.insert(out.end(), x.begin(), x.end()); };
  Floats panel(at(C * kernels.panel_columns)), c(at(rows * C));
  for (const bool transposed : {false, true}) {
    for (int64_t n = 0; n < C; n += kernels.panel_columns) {
      const int64_t columns = std::min(kernels.panel_columns, C - n);
      kernels.pack_panel(panel.data(), b.data() + (transposed ? n * C : n), transposed ? 1 : C,
                         transposed ? C : 1, C, columns);
      kernels.multiply_panel({rows, columns, C, a.data(), C, 1, panel.data(), c.data() + n, C,
                              gain.data() + n, a.data() + n, C});
    }
    keep(c);
  }
  Floats y(at(rows * C)), mean(at(rows)), rstd(at(rows)), dx(a), dgain(at(C)), dbias(at(C));
  kernels.layernorm_forward(a.data(), gain.data(), gain.data(), rows, C, y.data(), mean.data(), rstd.data());
  kernels.layernorm_backward(c.data(), a.data(), gain.data(), mean.data(), rstd.data(), rows, C, dx.data(),
                             dgain.data(), dbias.data());
  for (const Floats* x : {&y, &mean, &rstd, &dx, &dgain, &dbias}) keep(*x);
  kernels.gelu_forward(c.data(), y.data(), dx.data(), rows * C);
  keep(y);
  kernels.scale(y.data(), dx.data(), rows * C);
  keep(y);
  kernels.rms_norm_forward(a.data(), gain.data(), 1e-5f, rows, C, y.data(), rstd.data());
  kernels.rms_norm_backward(c.data(), a.data(), gain.data(), rstd.data(), rows, C, dx.data(), dgain.data());
  for (const Floats* x : {&y, &rstd, &dx, &dgain}) keep(*x);
  kernels.swiglu_forward(c.data(), a.data(), y.data(), rows * C);
  keep(y);
  kernels.swiglu_backward(c.data(), a.data(), a.data(), y.data(), dx.data(), rows * C);
  keep(y);
  keep(dx);
  kernels.gate_forward(a.data(), c.data(), y.data(), rows * C);
  keep(y);
  kernels.gate_backward(a.data(), c.data(), a.data(), y.data(), dx.data(), rows * C);
  keep(y);
  keep(dx);
  y = c;
  out.push_back(kernels.cross_entropy(y.data(), rows * C - 5, 77, 0.25f));
  keep(y);
  kernels.column_sums(a.data(), rows, C, C, dgain.data());
  kernels.add(dbias.data(), gain.data(), C);
  keep(dgain);
  keep(dbias);
  return out;
}

TEST(ModelKernels, every_target_gives_the_same_bits) {
  std::vector<std::pair<const char*, const ModelKernels*>> targets = {{"baseline", &baseline::kModelKernels}};
#if defined(__x86_64__)
  if (cpu_target() >= CpuTarget::avx2) targets.emplace_back("avx2", &avx2::kModelKernels);
  if (cpu_target() >= CpuTarget::avx512) targets.emplace_back("avx512", &avx512::kModelKernels);
#endif
  const Floats expected = results_of(*targets[0].second);
  for (const auto& [name, kernels] : targets) expect_same_bits(results_of(*kernels), expected, name);
}

TEST(Layers, the_number_of_threads_changes_no_bit) {
  const int64_t B = 5, T = 61, N = B * T, C = 40, V = 130;
  std::vector<int32_t> tokens(at(N));
  for (int64_t n = 0; n < N; ++n) tokens[at(n)] = static_cast<int32_t>((n * n) % V);
  const auto run = [&] {
    const Floats wte = random_values(V * C, 1), wpe = random_values(T * C, 2), gain = random_values(C, 3),
                 w = random_values(C * 3 * C, 4), dy = random_values(N * 3 * C, 5);
    Floats out, x(at(N * C)), ln(at(N * C)), mean(at(N)), rstd(at(N)), y(at(N * 3 * C)), dx(at(N * C)),
        dw(at(C * 3 * C)), dbias(at(3 * C)), dwte(at(V * C)), dwpe(at(T * C)), dgain(at(C)), dnorm(at(C));
    embedding_forward(tokens.data(), wte.data(), wpe.data(), B, T, C, x.data());
    layernorm_forward(x.data(), gain.data(), gain.data(), N, C, ln.data(), mean.data(), rstd.data());
    linear_forward(ln.data(), w.data(), nullptr, nullptr, N, C, 3 * C, y.data());
    linear_backward(dy.data(), ln.data(), w.data(), N, C, 3 * C, dx.data(), dw.data(), dbias.data());
    layernorm_backward(dx.data(), x.data(), gain.data(), mean.data(), rstd.data(), N, C, x.data(),
                       dgain.data(), dnorm.data());
    embedding_backward(tokens.data(), x.data(), B, T, C, V, dwte.data(), dwpe.data());
    out.push_back(static_cast<float>(
        mean_loss({ln.data(), wte.data(), tokens.data(), nullptr, N, C, V, 1, dx.data(), dwte.data(), {}})));
    for (const Floats* values : {&x, &ln, &y, &dx, &dw, &dbias, &dwte, &dwpe, &dgain, &dnorm})
      out.insert(out.end(), values->begin(), values->end());
    return out;
  };
  set_thread_count(1);
  const Floats expected = run();
  for (const int threads : {2, 5}) {
    set_thread_count(threads);
    expect_same_bits(run(), expected, "threads");
  }
}

}  // namespace
}  // namespace evenkeel
