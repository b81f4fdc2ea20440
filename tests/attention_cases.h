// One table of attention problems, and the generators of their inputs. Every attention test draws from here.
// Knows nothing of precision plans: a case is a problem, not a way to solve it.
//
// Scores are controlled exactly where it matters. With N <= D and a power of two for the scale a, keys
// k_j = e_j / a (one-hot) make S_ij = q_ij, bit for bit, in any order of summation.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "numerics/random.h"
#include "numerics/rounding.h"
#include "sanitized.h"

namespace evenkeel::cases {

// What the inputs are made of. From `ties` to `offset` the scores are set exactly (one-hot keys).
enum class Fill {
  normal,       // everything normal, rounded to bf16
  fp32_normal,  // normal, all 24 bits
  one_signed,   // V in [1, 2], dO in [1/2, 1]
  subnormal,    // everything normal times 2^-130
  ties,         // 2 to 8 keys share the maximum, the rest 200 below: their probabilities are exactly 0
  ties_tail,    // the same, the rest 6 to 10 below
  ties_across,  // 2 keys share the maximum, one in each half of the keys; a tail
  sink,         // key 0 wins in every row by 4 to 6, its V is small
  max_zero,     // the maximum is exactly 0, in 1 to 4 keys
  max_tiny,     // all scores below 2^-9
  hundred,      // the maximum is +-100, in 2 keys
  huge,         // the maximum is +-2500, in 2 keys
  offset,       // scores 96 + a few steps of 1/2: ties everywhere
  pairs,  // 2 of the first half of the keys share the maximum, all other probabilities are exactly 0; their V
          // in [1, 2) in steps of bf16, so O is often exactly half-way between two of them; dO in [1/2, 1]
  pairs_tail,  // the same, with the second half of the keys 9 to 10 below and their V in [2, 4): O lies just
               // above half-way, and bf16 rounds it away from zero
};

enum class Layout { bhtd, bthd, packed };  // packed: one (B, T, 3, H, D) buffer holds q, k and v
enum class Hide { nothing, some, rows };   // the mask: one key in three; that and every third row wholly

struct Sizes {
  int64_t B, H, G, T, N, D;
};
struct Options {
  Fill fill = Fill::normal;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  bool ragged = false;  // sequences of different lengths, one of them with no key, one with no row
  Hide hide = Hide::nothing;
  float softcap = 0, scale = 0;
  int64_t tile_rows = 64, tile_keys = 64;
  Layout layout = Layout::bhtd;
};
struct Case : Sizes, Options {
  const char* name = "";

  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

// clang-format off
inline const Case kCases[] = {
  // B  H  G   T    N   D
  {{2, 2, 2,  64,  64, 64}, {}, "plain"},
  {{1, 2, 2,  64,  96, 32}, {.fill = Fill::fp32_normal}, "plain_fp32"},
  {{2, 3, 3,   1, 100, 16}, {}, "one_row"},
  {{1, 2, 1,   5,   1, 16}, {}, "one_key"},
  {{1, 1, 1,   1,   1,  1}, {}, "one_of_each"},
  {{1, 2, 2,  63,  63, 40}, {.causal = true}, "odd_63"},
  {{1, 2, 2,  65,  65, 40}, {.causal = true}, "odd_65"},
  {{1, 2, 1, 129, 129, 64}, {.causal = true, .layout = Layout::bthd}, "odd_129"},
  {{1, 2, 2,  33,  47,  1}, {}, "head_size_1"},
  {{1, 2, 2,  33,  47,  5}, {.tile_rows = 7, .tile_keys = 13}, "head_size_5"},
  {{1, 2, 2,  40, 150, 32}, {.causal = true, .tile_keys = 0}, "one_tile"},
  {{1, 2, 2,  19,  37, 32}, {.causal = true, .tile_rows = 3, .tile_keys = 2}, "tiny_tiles"},
  {{2, 6, 2,  33,  65, 32}, {.causal = true}, "grouped"},
  {{1, 4, 1,  20,  70, 32}, {}, "one_kv_head"},
  {{1, 2, 2,  90,  90, 32}, {.window_left = 20, .window_right = 3, .tile_keys = 16}, "window"},
  {{1, 2, 2,  90,  90, 32}, {.causal = true, .window_left = 10, .tile_keys = 16}, "window_causal"},
  {{1, 1, 1,  20,  20, 16}, {.window_left = 0, .window_right = 0, .tile_keys = 8}, "window_self"},
  {{1, 2, 2,  70,  30, 32}, {.causal = true, .tile_rows = 16, .tile_keys = 16}, "rows_over_keys"},
  {{1, 2, 2,  30,  70, 32}, {.causal = true, .tile_rows = 16, .tile_keys = 16}, "keys_over_rows"},
  {{5, 2, 1,  40,  50, 32}, {.causal = true, .ragged = true, .tile_rows = 16, .tile_keys = 16}, "ragged"},
  {{2, 2, 1,  40,  50, 32}, {.hide = Hide::some, .tile_keys = 16}, "masked"},
  {{2, 2, 2,  40,  50, 32}, {.causal = true, .hide = Hide::rows, .tile_keys = 16}, "masked_rows"},
  {{5, 2, 1,  24,  30, 16}, {.ragged = true, .hide = Hide::rows, .tile_keys = 8}, "masked_ragged"},
  {{1, 2, 2,  40,  50, 32}, {.causal = true, .softcap = 2}, "softcap"},
  {{1, 2, 2,  32,  32, 64}, {.fill = Fill::hundred, .softcap = 30}, "softcap_hard"},
  // Some of its slopes are 0, beside others that are not.
  {{1, 2, 2,  40,  50, 32}, {.causal = true, .softcap = 2, .scale = 1.5f}, "softcap_flat"},
  {{1, 2, 2,  40,  50, 48}, {.scale = 0.4f}, "scale"},
  {{1, 2, 2,  40,  50, 48}, {.scale = -0.2f}, "negative_scale"},
  {{2, 3, 3,  50,  50, 32}, {.causal = true, .layout = Layout::packed}, "packed"},
  {{1, 2, 2,  64,  64, 64}, {.fill = Fill::one_signed}, "one_signed"},
  {{1, 2, 2,  20,  30, 16}, {.fill = Fill::subnormal}, "subnormal"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::ties, .tile_keys = 16}, "ties"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::ties_tail, .tile_keys = 16}, "ties_tail"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::ties_tail, .tile_keys = 0}, "ties_one_tile"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::ties_across, .tile_keys = 16}, "ties_across"},
  {{2, 2, 2,  64,  48, 64}, {.fill = Fill::ties_tail, .hide = Hide::rows, .tile_keys = 16}, "ties_masked"},
  {{1, 2, 1,  48,  48, 64}, {.fill = Fill::ties_across, .causal = true, .tile_keys = 16}, "ties_causal"},
  {{1, 2, 2,  64,  64, 64}, {.fill = Fill::sink, .causal = true, .tile_keys = 16}, "sink"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::max_zero, .tile_keys = 16}, "max_zero"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::max_tiny, .tile_keys = 16}, "max_tiny"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::hundred, .tile_keys = 16}, "hundred"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::huge, .tile_keys = 16}, "huge"},
  {{1, 2, 2,  64,  48, 64}, {.fill = Fill::offset, .tile_keys = 16}, "offset"},
  {{1, 2, 2,  64,  16, 64}, {.fill = Fill::pairs}, "pairs"},
  {{1, 2, 2,  64,  16, 64}, {.fill = Fill::pairs_tail, .tile_keys = 8}, "pairs_tail"},
};
// clang-format on

inline const Case& find_case(std::string_view wanted) {
  for (const Case& c : kCases)
    if (c.name == wanted) return c;
  throw std::invalid_argument("no attention case '" + std::string(wanted) + "'");
}

inline float to_bf16(float x) { return round_to(Rounding{kBf16}, x); }

// A stream of random numbers by position, so that what is drawn first does not matter.
class Draw {
 public:
  Draw(uint64_t seed, uint32_t tensor) : key_{seed, 0, tensor} {}
  float unit() { return random_unit(key_, next_++); }  // in (0, 1)
  float between(float low, float high) { return low + (high - low) * unit(); }
  int64_t below(int64_t n) {
    return static_cast<int64_t>(random_bits(key_, next_++) % static_cast<uint64_t>(n));
  }
  float normal() {
    // Box and Muller.
    const double radius = std::sqrt(-2 * std::log(double{unit()}));
    return static_cast<float>(radius * std::cos(6.283185307179586 * double{unit()}));
  }

 private:
  RandomKey key_;
  uint64_t next_ = 0;
};

// One row of exactly set scores, each a bf16 number.
inline std::vector<float> score_row(Fill fill, int64_t N, Draw& draw) {
  std::vector<float> S(static_cast<size_t>(N));
  const auto fill_below = [&](float top, float low, float high) {
    for (float& s : S) s = to_bf16(top - draw.between(low, high));
  };
  const auto tie = [&](float top, int64_t count) {
    for (int64_t tied = 0; tied < std::min(count, N);) {
      float& s = S[static_cast<size_t>(draw.below(N))];
      tied += s != top;
      s = top;
    }
  };
  const float sign = draw.unit() < 0.5f ? -1.0f : 1.0f;
  const float top = to_bf16(draw.between(-3, 3));
  switch (fill) {
    case Fill::ties:
      fill_below(top, 200, 220), tie(top, 2 + draw.below(7));
      break;
    case Fill::ties_tail:
      fill_below(top, 6, 10), tie(top, 2 + draw.below(7));
      break;
    case Fill::ties_across:
      fill_below(top, 6, 10);
      S[static_cast<size_t>(draw.below(N / 2))] = S[static_cast<size_t>(N / 2 + draw.below(N - N / 2))] = top;
      break;
    case Fill::sink:
      fill_below(top, 4, 6), S[0] = top;
      break;
    case Fill::max_zero:
      fill_below(0, 0.5f, 4), tie(0, 1 + draw.below(4));
      break;
    case Fill::max_tiny:
      for (float& s : S) s = to_bf16(draw.between(-0x1p-10f, 0x1p-10f));
      break;
    case Fill::hundred:
      fill_below(100 * sign, 2, 12), tie(100 * sign, 2);
      break;
    case Fill::huge:
      fill_below(to_bf16(2500) * sign, 32, 200), tie(to_bf16(2500) * sign, 2);
      break;
    case Fill::offset:
      for (float& s : S) s = 96 + 0.5f * static_cast<float>(draw.below(8));
      break;
    case Fill::pairs:
    case Fill::pairs_tail: {
      fill_below(top, 200, 220);
      const int64_t half = N / 2, first = draw.below(half);
      S[static_cast<size_t>(first)] = S[static_cast<size_t>((first + 1 + draw.below(half - 1)) % half)] = top;
      if (fill == Fill::pairs_tail)
        for (int64_t j = half; j < N; ++j) S[static_cast<size_t>(j)] = to_bf16(top - draw.between(9, 10));
      break;
    }
    default:
      throw std::invalid_argument("this fill does not set scores");
  }
  return S;
}

constexpr bool sets_scores(Fill fill) { return fill >= Fill::ties; }

// A case with its memory. The views point into it: it moves, it does not copy.
struct Problem {
  Case shape;
  std::vector<float> q_memory, k_memory, v_memory, grad_memory;  // packed: all three in q_memory
  std::vector<int32_t> query_lengths, key_lengths;
  std::vector<uint8_t> visible;

  AttentionProblem config;  // plans empty
  AttentionInputs in;
  View<const float> grad_output;

  Problem() = default;
  Problem(Problem&&) = default;
  Problem& operator=(Problem&&) = default;

  View<float> q() { return writable(in.q); }
  View<float> k() { return writable(in.k); }
  View<float> v() { return writable(in.v); }
  View<float> grad() { return writable(grad_output); }
  AttentionProblem with(const PrecisionPlan& plan) const { return with(std::vector{plan}); }
  AttentionProblem with(const std::vector<PrecisionPlan>& plans) const {
    AttentionProblem result = config;
    result.plans = plans;
    return result;
  }

 private:
  static View<float> writable(View<const float> view) {
    return {const_cast<float*>(view.data), view.shape, view.stride};
  }
};

// A (B, H, T, D) view on memory laid out as (B, T, slots, D), from `slot` on.
inline View<const float> rows_first(const float* data, int64_t B, int64_t H, int64_t T, int64_t D,
                                    int64_t slots, int64_t slot) {
  return {data + slot * D, {B, H, T, D}, {T * slots * D, D, slots * D, 1}};
}

// Memory and views for the case's layout.
inline void lay_out(Problem& p) {
  const Case& c = p.shape;
  const int64_t B = c.B, H = c.H, G = c.G, T = c.T, N = c.N, D = c.D;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  p.grad_memory.resize(size(B * H * T * D));
  p.grad_output = c.layout == Layout::bhtd ? contiguous_view<const float>(p.grad_memory.data(), {B, H, T, D})
                                           : rows_first(p.grad_memory.data(), B, H, T, D, H, 0);
  if (c.layout == Layout::packed) {
    if (T != N || H != G) throw std::invalid_argument("a packed case needs T == N and H == G");
    p.q_memory.resize(size(B * T * 3 * H * D));
    p.in.q = rows_first(p.q_memory.data(), B, H, T, D, 3 * H, 0);
    p.in.k = rows_first(p.q_memory.data(), B, H, T, D, 3 * H, H);
    p.in.v = rows_first(p.q_memory.data(), B, H, T, D, 3 * H, 2 * H);
    return;
  }
  p.q_memory.resize(size(B * H * T * D));
  p.k_memory.resize(size(B * G * N * D));
  p.v_memory.resize(size(B * G * N * D));
  if (c.layout == Layout::bthd)
    p.in = {rows_first(p.q_memory.data(), B, H, T, D, H, 0), rows_first(p.k_memory.data(), B, G, N, D, G, 0),
            rows_first(p.v_memory.data(), B, G, N, D, G, 0)};
  else
    p.in = {contiguous_view<const float>(p.q_memory.data(), {B, H, T, D}),
            contiguous_view<const float>(p.k_memory.data(), {B, G, N, D}),
            contiguous_view<const float>(p.v_memory.data(), {B, G, N, D})};
}

// Every element of a view by value(b, h, row, d), in that order, so that the layout changes where values lie and not
// what they are.
template <class Value>
void fill_view(View<float> view, Value value) {
  for (int64_t b = 0; b < view.shape[0]; ++b)
    for (int64_t h = 0; h < view.shape[1]; ++h)
      for (int64_t row = 0; row < view.shape[2]; ++row)
        for (int64_t d = 0; d < view.shape[3]; ++d) *view.at(b, h, row, d) = value(b, h, row, d);
}

// Keys and queries whose scores are those of the fill.
inline void set_scores(Problem& p, uint64_t seed) {
  const Case& c = p.shape;
  const float a = c.scale != 0 ? c.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(c.D)));
  if (c.N > c.D || std::exp2(std::round(std::log2(a))) != a)
    throw std::invalid_argument("exact scores need N <= D and a power of two for the scale");
  fill_view(p.k(), [&](int64_t, int64_t, int64_t j, int64_t d) { return d == j ? 1 / a : 0.0f; });
  Draw draw(seed, 4);
  std::vector<float> S;
  fill_view(p.q(), [&](int64_t, int64_t, int64_t, int64_t d) {
    if (d == 0) S = score_row(c.fill, c.N, draw);
    return d < c.N ? S[static_cast<size_t>(d)] : 0.0f;
  });
}

inline void fill_inputs(Problem& p, uint64_t seed) {
  const Case& c = p.shape;
  const auto draw_all = [&](View<float> view, uint32_t tensor, auto value) {
    Draw draw(seed, tensor);
    fill_view(view, [&](int64_t, int64_t, int64_t, int64_t) { return value(draw); });
  };
  const auto normal = [&](Draw& draw) {
    if (c.fill == Fill::fp32_normal) return draw.normal();
    if (c.fill == Fill::subnormal) return draw.normal() * 0x1p-130f;
    return to_bf16(draw.normal());
  };
  const bool one_signed = c.fill == Fill::one_signed || c.fill == Fill::sink || c.fill >= Fill::pairs;
  draw_all(p.q(), 0, normal);
  draw_all(p.k(), 1, normal);
  draw_all(p.v(), 2, [&](Draw& draw) { return one_signed ? to_bf16(draw.between(1, 2)) : normal(draw); });
  draw_all(p.grad(), 3,
           [&](Draw& draw) { return one_signed ? to_bf16(draw.between(0.5f, 1)) : normal(draw); });
  if (sets_scores(c.fill)) set_scores(p, seed);
  if (c.fill == Fill::pairs || c.fill == Fill::pairs_tail) {
    Draw draw(seed, 6);
    fill_view(p.v(), [&](int64_t, int64_t, int64_t j, int64_t) {
      return (j < c.N / 2 ? 1.0f : 2.0f) * (1 + 0x1p-7f * static_cast<float>(draw.below(128)));
    });
  }
  if (c.fill == Fill::sink)  // the sink's own value is small, as trained models have it
    fill_view(p.v(), [&](int64_t b, int64_t g, int64_t j, int64_t d) {
      return *p.v().at(b, g, j, d) * (j == 0 ? 0x1p-4f : 1.0f);
    });
}

inline void set_mask(Problem& p, uint64_t seed) {
  const Case& c = p.shape;
  const int64_t B = c.B, H = c.H, T = c.T, N = c.N;
  AttentionMask& mask = p.config.mask;
  mask.causal = c.causal;
  mask.window_left = c.window_left;
  mask.window_right = c.window_right;
  if (c.ragged) {
    // All; shorter; more rows than keys; no key; no row.
    for (int64_t b = 0; b < B; ++b) {
      p.query_lengths.push_back(static_cast<int32_t>(b % 5 == 4   ? 0
                                                     : b % 5 == 1 ? T - T / 3
                                                     : b % 5 == 2 ? T - 1
                                                                  : T));
      p.key_lengths.push_back(static_cast<int32_t>(b % 5 == 3   ? 0
                                                   : b % 5 == 2 ? N / 4
                                                   : b % 5 == 1 ? N - 1
                                                                : N));
    }
    mask.query_lengths = p.query_lengths;
    mask.key_lengths = p.key_lengths;
  }
  if (c.hide != Hide::nothing) {
    // The same for every batch entry: broadcast by a stride of 0.
    Draw draw(seed, 5);
    p.visible.resize(static_cast<size_t>(H * T * N));
    for (int64_t n = 0; n < H * T * N; ++n) {
      const int64_t i = n / N % T;
      p.visible[static_cast<size_t>(n)] = draw.below(3) != 0 && !(c.hide == Hide::rows && i % 3 == 1);
    }
    mask.visible = {p.visible.data(), {B, H, T, N}, {0, T * N, N, 1}};
  }
}

inline Problem make_problem(const Case& c, uint64_t seed = 1) {
  Problem p;
  p.shape = c;
  lay_out(p);
  fill_inputs(p, seed);
  set_mask(p, seed);
  p.config.softcap = c.softcap;
  p.config.scale = c.scale;
  p.config.tile_rows = c.tile_rows;
  p.config.tile_keys = c.tile_keys;
  return p;
}

// Keys of D features and values of Dv, and the same problem filled up with zeros to the larger of both. What they have in
// common has the same bits wherever sums have a fixed order.
struct Narrowed : Case {
  int64_t narrow_D, narrow_Dv;

  Problem wide() const {
    Problem p = make_problem(*this);
    const auto fill_up = [](View<float> x, int64_t from) {
      fill_view(
          x, [&](int64_t b, int64_t h, int64_t i, int64_t d) { return d < from ? *x.at(b, h, i, d) : 0.0f; });
    };
    fill_up(p.q(), narrow_D), fill_up(p.k(), narrow_D);
    fill_up(p.v(), narrow_Dv), fill_up(p.grad(), narrow_Dv);
    return p;
  }
  Problem narrow() const {
    Problem p = wide();
    p.in.q.shape[3] = p.in.k.shape[3] = narrow_D;
    p.in.v.shape[3] = p.grad_output.shape[3] = narrow_Dv;
    return p;
  }
};
inline const Narrowed kNarrowed[] = {
    {{{1, 2, 1, 70, 90, 192}, {.causal = true, .scale = 0.0625f}, "192_128"}, 192, 128},
    {{{1, 1, 1, 40, 70, 256}, {.window_left = 30, .softcap = 3, .scale = 0.0625f}, "256_64"}, 256, 64},
    {{{1, 1, 1, 40, 50, 200}, {.hide = Hide::some, .scale = 0.125f}, "136_200"}, 136, 200},
    {{{3, 2, 2, 40, 50, 160}, {.ragged = true, .scale = 0.125f}, "40_160"}, 40, 160},
};

// Does row i of head h see key j? By the definition, and not by what the implementations share.
inline bool sees(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const AttentionMask& mask = p.config.mask;
  const int64_t rows = p.query_lengths.empty() ? p.shape.T : p.query_lengths[static_cast<size_t>(b)];
  const int64_t keys = p.key_lengths.empty() ? p.shape.N : p.key_lengths[static_cast<size_t>(b)];
  const int64_t position = i + keys - rows;
  if (i >= rows || j >= keys || (mask.causal && j > position)) return false;
  if (mask.window_left >= 0 && j < position - mask.window_left) return false;
  if (mask.window_right >= 0 && j > position + mask.window_right) return false;
  return !mask.visible.present() || *mask.visible.at(b, h, i, j) != 0;
}

}  // namespace evenkeel::cases
