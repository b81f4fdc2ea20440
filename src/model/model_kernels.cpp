#include "model/model_kernels.h"

#include <math.h>

#include "numerics/simd.h"

namespace evenkeel::EVENKEEL_TARGET {
namespace {

// --- Products
constexpr int64_t kPanel = kProductVectors * kLanes;
constexpr int64_t kAhead =
    12;  // steps between asking for a line of memory that no hardware foresees, and its use

// Not inlined: alone, the compiler keeps all accumulators in registers. `out` is c, or a tile of kPanel
// columns.
template <int kRows, int kVectors>
__attribute__((noinline)) void block_product(int64_t depth, const float* __restrict__ a, int64_t a_row,
                                             int64_t a_column, const float* __restrict__ panel,
                                             const float* bias, const float* base, int64_t base_stride,
                                             float* out, int64_t out_stride) {
  Float sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sum[m][n] = Float{};
  for (int64_t k = 0; k < depth; ++k) {
    Float row[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) row[n] = load(panel + k * kPanel + n * kLanes);
    __builtin_prefetch(a + (k + kAhead) * a_column);  // of a transposed A, every column is another line
    add_outer_product(sum, a + k * a_column, a_row, row);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      if (bias) sum[m][n] += load(bias + n * kLanes);
      if (base) sum[m][n] += load(base + m * base_stride + n * kLanes);
      store(out + m * out_stride + n * kLanes, sum[m][n]);
    }
}

// Rows [m, m + kRows) of a panel that fills whole vectors, or goes through a tile of its own.
template <int kRows, int kVectors>
EK_INLINE void block_rows(const PanelProduct& p, int64_t m) {
  const float* a = p.a + m * p.a_row;
  float* c = p.c + m * p.c_stride;
  const float* base = p.base ? p.base + m * p.base_stride : nullptr;
  if (p.columns == kVectors * kLanes) {
    block_product<kRows, kVectors>(p.depth, a, p.a_row, p.a_column, p.panel, p.bias, base, p.base_stride, c,
                                   p.c_stride);
    return;
  }
  float tile[kRows * kPanel] = {};
  block_product<kRows, kVectors>(p.depth, a, p.a_row, p.a_column, p.panel, nullptr, nullptr, 0, tile, kPanel);
  for (int m2 = 0; m2 < kRows; ++m2)
    for (int64_t n = 0; n < p.columns; ++n) {
      float sum = tile[m2 * kPanel + n];
      if (p.bias) sum += p.bias[n];
      if (base) sum += base[m2 * p.base_stride + n];
      c[m2 * p.c_stride + n] = sum;
    }
}

template <int kVectors>
void multiply_vectors(const PanelProduct& p) {
  for_each_block(p.rows, [&]<int kRows>(int64_t m) { block_rows<kRows, kVectors>(p, m); });
}

void multiply_panel(const PanelProduct& p) {
  const int64_t vectors = (p.columns + kLanes - 1) / kLanes;
  if constexpr (kProductVectors > 2) {
    if (vectors == 4) return multiply_vectors<4>(p);
    if (vectors == 3) return multiply_vectors<3>(p);
  }
  if (vectors == 2) return multiply_vectors<2>(p);
  multiply_vectors<1>(p);
}

void pack_panel(float* panel, const float* b, int64_t b_row, int64_t b_column, int64_t depth,
                int64_t columns) {
  if (columns < kPanel)
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = columns; n < kPanel; ++n) panel[k * kPanel + n] = 0;
  if (b_column != 1) return transpose(panel, kPanel, b, b_column, columns, depth);
  for (int64_t k = 0; k < depth; ++k) {
    const float* from = b + k * b_row;
    float* to = panel + k * kPanel;
    __builtin_prefetch(from + kAhead * b_row);
    if constexpr (kPanel == 64) {
      __builtin_prefetch(from + kAhead * b_row + 16);
      __builtin_prefetch(from + kAhead * b_row + 32);
      __builtin_prefetch(from + kAhead * b_row + 48);
    }
    if (columns == kPanel)
      for (int n = 0; n < kProductVectors; ++n) store(to + n * kLanes, load(from + n * kLanes));
    else
      for (int64_t n = 0; n < columns; ++n) to[n] = from[n];
  }
}

EK_INLINE Float sigmoid(Float x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// --- Passes over rows
// kSumLanes values at a time, whatever the vector width.
constexpr int kVectorsOfSum = kSumLanes / kLanes;
struct Group {
  Float part[kVectorsOfSum];
};

EK_INLINE Group load_group(const float* p) {
  Group g;
  for (int v = 0; v < kVectorsOfSum; ++v) g.part[v] = load(p + v * kLanes);
  return g;
}
EK_INLINE Group load_some(const float* p, int64_t count, float filler) {
  float padded[kSumLanes];
  for (int64_t n = 0; n < kSumLanes; ++n) padded[n] = n < count ? p[n] : filler;
  return load_group(padded);
}

// body(group of inputs' offset, number of values) over a row, whole groups first.
template <class Body>
EK_INLINE void for_each_group(int64_t columns, Body body) {
  int64_t n = 0;
  for (; n + kSumLanes <= columns; n += kSumLanes) body(n, int64_t{kSumLanes});
  if (n < columns) body(n, columns - n);
}
EK_INLINE Group load_at(const float* p, int64_t n, int64_t count, float filler = 0) {
  return count == kSumLanes ? load_group(p + n) : load_some(p + n, count, filler);
}
EK_INLINE void store_at(float* p, int64_t n, int64_t count, const Group& g) {
  if (count == kSumLanes) {
    for (int v = 0; v < kVectorsOfSum; ++v) store(p + n + v * kLanes, g.part[v]);
    return;
  }
  float values[kSumLanes];
  for (int v = 0; v < kVectorsOfSum; ++v) store(values + v * kLanes, g.part[v]);
  for (int64_t i = 0; i < count; ++i) p[n + i] = values[i];
}

EK_INLINE float tree_sum(const Group& g) {
  float values[kSumLanes];
  for (int v = 0; v < kVectorsOfSum; ++v) store(values + v * kLanes, g.part[v]);
  for (int half = kSumLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}
EK_INLINE float largest(const Group& g) {
  float values[kSumLanes];
  for (int v = 0; v < kVectorsOfSum; ++v) store(values + v * kLanes, g.part[v]);
  float best = values[0];
  for (int i = 1; i < kSumLanes; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

// z[n] = f(x[n], ...) lane by lane; f takes and gives vectors.
template <class F>
EK_INLINE Group map(F f, const Group& x) {
  Group out;
  for (int v = 0; v < kVectorsOfSum; ++v) out.part[v] = f(x.part[v]);
  return out;
}
template <class F>
EK_INLINE Group map(F f, const Group& x, const Group& y) {
  Group out;
  for (int v = 0; v < kVectorsOfSum; ++v) out.part[v] = f(x.part[v], y.part[v]);
  return out;
}
template <class F>
EK_INLINE Group map(F f, const Group& x, const Group& y, const Group& z) {
  Group out;
  for (int v = 0; v < kVectorsOfSum; ++v) out.part[v] = f(x.part[v], y.part[v], z.part[v]);
  return out;
}

void layernorm_forward(const float* x, const float* gain, const float* bias, int64_t rows, int64_t columns,
                       float* y, float* mean, float* rstd) {
  const float count = static_cast<float>(columns);
  for (int64_t m = 0; m < rows; ++m, x += columns, y += columns) {
    Group total{};
    for_each_group(columns, [&](int64_t n, int64_t some) {
      total = map([](Float t, Float v) { return t + v; }, total, load_at(x, n, some));
    });
    const float mu = tree_sum(total) / count;
    Group squares{};
    for_each_group(columns, [&](int64_t n, int64_t some) {
      squares = map(
          [mu](Float s, Float v) {
            const Float d = v - splat(mu);
            return fma(d, d, s);
          },
          squares, load_at(x, n, some, mu));
    });
    const float r = 1.0f / sqrtf(tree_sum(squares) / count + kLayerNormEpsilon);
    for_each_group(columns, [&](int64_t n, int64_t some) {
      Group out = map([mu, r](Float v, Float g) { return (v - splat(mu)) * splat(r) * g; },
                      load_at(x, n, some), load_at(gain, n, some));
      if (bias) out = map([](Float v, Float b) { return v + b; }, out, load_at(bias, n, some));
      store_at(y, n, some, out);
    });
    mean[m] = mu;
    rstd[m] = r;
  }
}

void layernorm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                        const float* rstd, int64_t rows, int64_t columns, float* dx, float* dgain,
                        float* dbias) {
  const float count = static_cast<float>(columns);
  for (int64_t m = 0; m < rows; ++m, x += columns, dy += columns, dx += columns) {
    const float mu = mean[m], r = rstd[m];
    const auto normalised = [mu, r](Float v) { return (v - splat(mu)) * splat(r); };
    // The mean of dy gain, and of dy gain xhat.
    Group sum{}, dot{};
    for_each_group(columns, [&](int64_t n, int64_t some) {
      const Group d = load_at(dy, n, some), xhat = map(normalised, load_at(x, n, some, mu));
      const Group dxhat = map([](Float v, Float g) { return v * g; }, d, load_at(gain, n, some));
      sum = map([](Float s, Float v) { return s + v; }, sum, dxhat);
      dot = map([](Float s, Float v, Float h) { return fma(v, h, s); }, dot, dxhat, xhat);
      store_at(dgain, n, some,
               map([](Float t, Float v, Float h) { return fma(v, h, t); }, load_at(dgain, n, some), d, xhat));
      if (dbias)
        store_at(dbias, n, some, map([](Float t, Float v) { return t + v; }, load_at(dbias, n, some), d));
    });
    const float mean_dxhat = tree_sum(sum) / count, mean_dot = tree_sum(dot) / count;
    for_each_group(columns, [&](int64_t n, int64_t some) {
      const Group xhat = map(normalised, load_at(x, n, some, mu));
      const Group dxhat =
          map([](Float v, Float g) { return v * g; }, load_at(dy, n, some), load_at(gain, n, some));
      const Group change =
          map([=](Float v, Float h) { return (v - splat(mean_dxhat) - h * splat(mean_dot)) * splat(r); },
              dxhat, xhat);
      store_at(dx, n, some, map([](Float t, Float v) { return t + v; }, load_at(dx, n, some), change));
    });
  }
}

void rms_norm_forward(const float* x, const float* gain, float epsilon, int64_t rows, int64_t columns,
                      float* y, float* rstd) {
  for (int64_t m = 0; m < rows; ++m, x += columns, y += columns) {
    Group squares{};
    for_each_group(columns, [&](int64_t n, int64_t some) {
      squares = map([](Float s, Float v) { return fma(v, v, s); }, squares, load_at(x, n, some));
    });
    const float r = 1.0f / sqrtf(tree_sum(squares) / static_cast<float>(columns) + epsilon);
    for_each_group(columns, [&](int64_t n, int64_t some) {
      store_at(y, n, some,
               map([r](Float v, Float g) { return v * splat(r) * g; }, load_at(x, n, some),
                   load_at(gain, n, some)));
    });
    rstd[m] = r;
  }
}

void rms_norm_backward(const float* dy, const float* x, const float* gain, const float* rstd, int64_t rows,
                       int64_t columns, float* dx, float* dgain) {
  for (int64_t m = 0; m < rows; ++m, x += columns, dy += columns, dx += columns) {
    const float r = rstd[m];
    Group dot{};  // of dy gain and xhat
    for_each_group(columns, [&](int64_t n, int64_t some) {
      const Group d = load_at(dy, n, some),
                  xhat = map([r](Float v) { return v * splat(r); }, load_at(x, n, some));
      const Group dxhat = map([](Float v, Float g) { return v * g; }, d, load_at(gain, n, some));
      dot = map([](Float s, Float v, Float h) { return fma(v, h, s); }, dot, dxhat, xhat);
      store_at(dgain, n, some,
               map([](Float t, Float v, Float h) { return fma(v, h, t); }, load_at(dgain, n, some), d, xhat));
    });
    const float mean_dot = tree_sum(dot) / static_cast<float>(columns);
    for_each_group(columns, [&](int64_t n, int64_t some) {
      const Group dxhat =
          map([](Float v, Float g) { return v * g; }, load_at(dy, n, some), load_at(gain, n, some));
      const Group change =
          map([=](Float v, Float h) { return (v - h * splat(r) * splat(mean_dot)) * splat(r); }, dxhat,
              load_at(x, n, some));
      store_at(dx, n, some, map([](Float t, Float v) { return t + v; }, load_at(dx, n, some), change));
    });
  }
}

constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

EK_INLINE Float gelu_sigmoid(Float x) {
  const Float u = splat(kGeluScale) * x * fma(splat(kGeluCubic) * x, x, splat(1.0f));
  return sigmoid(u + u);
}

void gelu_forward(const float* x, float* y, float* slope, int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    const Group in = load_at(x, n, some), s = map([](Float v) { return gelu_sigmoid(v); }, in);
    store_at(y, n, some, map([](Float v, Float open) { return v * open; }, in, s));
    const auto derivative = [](Float v, Float open) {
      v = clamp(v, splat(-64.0f),
                splat(64.0f));  // the slope is 0 or 1 long before; beyond 2^64 a square would be Inf
      const Float du = splat(kGeluScale) * fma(splat(3 * kGeluCubic) * v, v, splat(1.0f));
      // d (x s) / dx = s + x s' with s' = 2 du s (1 - s).
      return fma(v * open * (splat(1.0f) - open), du + du, open);
    };
    store_at(slope, n, some, map(derivative, in, s));
  });
}

void swiglu_forward(const float* gate, const float* up, float* y, int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    store_at(y, n, some,
             map([](Float g, Float u) { return g * sigmoid(g) * u; }, load_at(gate, n, some),
                 load_at(up, n, some)));
  });
}

void swiglu_backward(const float* gate, const float* up, const float* dy, float* dgate, float* dup,
                     int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    const Group g = load_at(gate, n, some), d = load_at(dy, n, some);
    const Group s = map([](Float v) { return sigmoid(v); }, g);
    store_at(dup, n, some, map([](Float v, Float open, Float dv) { return dv * (v * open); }, g, s, d));
    // d (g s) / dg = s + g s (1 - s).
    const Group slope =
        map([](Float v, Float open) { return fma(v * open, splat(1.0f) - open, open); }, g, s);
    store_at(dgate, n, some,
             map([](Float slope_of, Float u, Float dv) { return dv * u * slope_of; }, slope,
                 load_at(up, n, some), d));
  });
}

void gate_forward(const float* x, const float* gate, float* y, int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    store_at(
        y, n, some,
        map([](Float v, Float g) { return v * sigmoid(g); }, load_at(x, n, some), load_at(gate, n, some)));
  });
}

void gate_backward(const float* x, const float* gate, const float* dy, float* dx, float* dgate,
                   int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    const Group s = map([](Float g) { return sigmoid(g); }, load_at(gate, n, some)), d = load_at(dy, n, some);
    const auto slope = [](Float open, Float v, Float dv) { return dv * v * open * (splat(1.0f) - open); };
    store_at(dgate, n, some, map(slope, s, load_at(x, n, some), d));
    store_at(dx, n, some, map([](Float open, Float dv) { return dv * open; }, s, d));
  });
}

float cross_entropy(float* logits, int64_t columns, int64_t target, float scale) {
  const float lowest = -__builtin_inff();
  Group best;
  for (int v = 0; v < kVectorsOfSum; ++v) best.part[v] = splat(lowest);
  for_each_group(columns, [&](int64_t n, int64_t some) {
    best = map([](Float b, Float v) { return max(v, b); }, best, load_at(logits, n, some, lowest));
  });
  const float m = largest(best), at_target = logits[target];
  Group total{};
  for_each_group(columns, [&](int64_t n, int64_t some) {
    const Group p = map([m](Float v) { return exp(v - splat(m)); }, load_at(logits, n, some, lowest));
    total = map([](Float t, Float v) { return t + v; }, total, p);
    store_at(logits, n, some, p);
  });
  const float sum = tree_sum(total), factor = scale / sum;
  for_each_group(columns, [&](int64_t n, int64_t some) {
    store_at(logits, n, some, map([factor](Float p) { return p * splat(factor); }, load_at(logits, n, some)));
  });
  logits[target] -= scale;
  return logf(sum) + (m - at_target);
}

void column_sums(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sums) {
  for_each_group(columns, [&](int64_t n, int64_t some) {
    Group total = load_at(sums, n, some);
    for (int64_t m = 0; m < rows; ++m)
      total = map([](Float t, Float v) { return t + v; }, total, load_at(x + m * stride, n, some));
    store_at(sums, n, some, total);
  });
}

void scale(float* x, const float* y, int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    store_at(x, n, some,
             map([](Float a, Float b) { return a * b; }, load_at(x, n, some), load_at(y, n, some)));
  });
}

void add(float* x, const float* y, int64_t count) {
  for_each_group(count, [&](int64_t n, int64_t some) {
    store_at(x, n, some,
             map([](Float a, Float b) { return a + b; }, load_at(x, n, some), load_at(y, n, some)));
  });
}

}  // namespace

extern const ModelKernels kModelKernels;
const ModelKernels kModelKernels = {kPanel,
                                    pack_panel,
                                    multiply_panel,
                                    layernorm_forward,
                                    layernorm_backward,
                                    rms_norm_forward,
                                    rms_norm_backward,
                                    gelu_forward,
                                    swiglu_forward,
                                    swiglu_backward,
                                    gate_forward,
                                    gate_backward,
                                    cross_entropy,
                                    column_sums,
                                    add,
                                    scale};

}  // namespace evenkeel::EVENKEEL_TARGET
