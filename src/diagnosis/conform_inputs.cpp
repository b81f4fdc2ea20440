// The families of hard inputs.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/threads.h"
#include "diagnosis/conform.h"
#include "diagnosis/input_stream.h"

namespace evenkeel {
namespace {

// Scores are set exactly by one-hot keys: with k_j = sqrt(D) e_j and a = 1 / sqrt(D), S_ij = q_ij. The last
// kOffsetFeatures features are the same in every key, so that q sets there what is common to a row's scores.
constexpr int64_t kHeadSize = 64, kOffsetFeatures = 16, kKeys = kHeadSize - kOffsetFeatures;

// round_to(bf16, x) for finite numbers.
float bf16(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

struct HeadInputs {
  float *q, *k, *v, *d_o;  // (T, D), (N, D), (N, D), (T, D)
  int64_t T, N, D;
};

void fill_normal(float* x, int64_t count, InputStream& draw, double scale) {
  for (int64_t n = 0; n < count; ++n) x[n] = bf16(scale * draw.normal());
}

// Which of the four a family sets by itself; the normal numbers they would have had are passed over.
bool sets_scores(std::string_view name) {
  constexpr std::string_view kNormal[] = {"random",      "one_signed_v", "subnormal_v", "loss_feedback",
                                          "masked_rows", "one_row",      "odd_rows"};
  return std::ranges::find(kNormal, name) == std::end(kNormal);
}
bool sets_values(std::string_view name) {
  constexpr std::string_view kNormal[] = {"random",  "tiny_scores", "subnormal_v",
                                          "one_row", "odd_rows",    "masked_rows"};
  return std::ranges::find(kNormal, name) == std::end(kNormal);
}

// V and dO as in the paper's guilty features: one sign throughout, so that delta has one sign and errors of O
// do too.
void fill_one_signed(HeadInputs h, InputStream& draw) {
  for (int64_t n = 0; n < h.N * h.D; ++n) h.v[n] = bf16(-(1.5 + 0.6 * std::fabs(draw.normal())));
  for (int64_t n = 0; n < h.T * h.D; ++n) h.d_o[n] = bf16(-0.1 * std::fabs(draw.normal()));
}

void fill_one_hot_keys(HeadInputs h) {
  const auto length = static_cast<float>(std::sqrt(static_cast<double>(h.D)));
  std::fill_n(h.k, h.N * h.D, 0.0f);
  for (int64_t j = 0; j < h.N; ++j) {
    h.k[j * h.D + j] = length;
    for (int64_t d = kKeys; d < h.D; ++d) h.k[j * h.D + d] = length / kOffsetFeatures;
  }
}

// The row's scores: score(j) for every key, plus an offset common to them all.
template <class Score>
void set_scores(HeadInputs h, int64_t row, Score score, double offset = 0) {
  for (int64_t j = 0; j < h.N; ++j) h.q[row * h.D + j] = bf16(score(j));
  for (int64_t d = kKeys; d < h.D; ++d) h.q[row * h.D + d] = bf16(offset);
}

// `ties` scores at `top`, the others a tail below it (none: so far below that they vanish).
void set_ties(HeadInputs h, int64_t row, InputStream& draw, int64_t ties, bool tail, double top,
              int64_t apart = 1) {
  std::vector<int64_t> chosen;
  while (static_cast<int64_t>(chosen.size()) < ties) {
    const int64_t key = draw.below(h.N);
    bool free = true;
    for (int64_t other : chosen) free &= apart > 1 ? key / apart != other / apart : key != other;
    if (free) chosen.push_back(key);
  }
  set_scores(h, row, [&](int64_t j) {
    const bool tied = std::find(chosen.begin(), chosen.end(), j) != chosen.end();
    return tied ? top : tail ? top - draw.between(10, 14) : top - 200;
  });
}

// Scores far from zero, and one key a row. The first 15 of the offset's features are as large as a key, so that queries of
// these rows stay within FP16's range. Scores that matter are whole numbers: FP32 has them exactly, in any order of sums.
void fill_far(const ConformCase& which, HeadInputs h, InputStream& draw) {
  constexpr double kOffsets[] = {2'000, 20'000, 80'000};
  constexpr int64_t kFar = kOffsetFeatures - 1;  // the last feature stays kKeyConstant
  fill_one_signed(h, draw);
  fill_one_hot_keys(h);
  for (int64_t j = 0; j < h.N; ++j) std::fill_n(h.k + j * h.D + kKeys, kFar, h.k[j * h.D + j]);
  for (int64_t row = 0; row < h.T; ++row) {
    const double size = kOffsets[draw.below(std::size(kOffsets))] * draw.between(0.8, 1.25),
                 offset = (draw.below(2) == 0 ? size : -size) / kFar;
    const int64_t top = draw.below(which.causal ? row + 1 : h.N);
    set_scores(
        h, row,
        [&](int64_t j) {
          if (which.one_visible) return draw.normal();
          return j == top ? 0 : -draw.between(which.one_key * 1.01, 8000);
        },
        offset);
    h.q[(row + 1) * h.D - 1] = 0;
  }
}

void fill_head(const ConformCase& which, HeadInputs h, InputStream draw) {
  const std::string_view name = which.name;
  const int64_t of_rows = h.T * h.D, of_keys = h.N * h.D;
  if (sets_scores(name)) {
    draw.skip_normals(of_rows + of_keys);
  } else {
    fill_normal(h.q, of_rows, draw, 1);
    fill_normal(h.k, of_keys, draw, 1);
  }
  if (sets_values(name)) {
    draw.skip_normals(of_keys + of_rows);
  } else {
    fill_normal(h.v, of_keys, draw, 1);
    fill_normal(h.d_o, of_rows, draw, 0.1);
  }
  const auto rows = [&](auto set_row) {
    fill_one_hot_keys(h);
    for (int64_t row = 0; row < h.T; ++row) set_row(row);
  };
  if (name == "loss_feedback") {
    fill_one_signed(h, draw);
  } else if (name.starts_with("ties_")) {
    const bool tail = name.ends_with("_tail"), across = name.find("across") != std::string_view::npos;
    const int64_t ties = across ? 2 : name[5] - '0';
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      set_ties(h, row, draw, ties, tail, draw.between(1, 6), across ? which.tile_keys : 1);
    });
  } else if (name == "one_signed_v") {
    fill_one_signed(h, draw);
  } else if (name == "sink") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      const double top = draw.between(4, 9);
      set_scores(h, row, [&](int64_t j) { return j == 0 ? top : draw.normal() - 2; });
    });
  } else if (name == "row_max_zero") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) { set_ties(h, row, draw, 2, /*tail=*/true, 0); });
  } else if (name == "tiny_scores") {
    rows([&](int64_t row) { set_scores(h, row, [&](int64_t) { return 1e-4 * draw.normal(); }); });
  } else if (name == "scores_100" || name == "scores_2500") {
    fill_one_signed(h, draw);
    const double size = name == "scores_100" ? 100 : 2500;
    rows([&](int64_t row) {
      const double centre = row % 2 == 0 ? size : -size;
      set_scores(h, row, [&](int64_t) { return centre + size / 100 * draw.normal(); });
    });
  } else if (name == "common_offset") {
    fill_one_signed(h, draw);
    rows([&](int64_t row) {
      set_scores(
          h, row, [&](int64_t) { return draw.normal(); }, draw.between(-300, 300));
    });
  } else if (name == "subnormal_v") {
    for (int64_t n = 0; n < h.N * h.D; ++n) h.v[n] = bf16(static_cast<double>(h.v[n]) * 0x1p-127);
    for (int64_t n = 0; n < h.T * h.D; ++n) h.d_o[n] *= 1024;  // so that dP is normal
  } else if (which.one_key > 0) {
    fill_far(which, h, draw);
  }
}

}  // namespace

const std::vector<ConformCase>& conform_cases() {
  constexpr int64_t T = 64, D = kHeadSize, N = kKeys;
  static const std::vector<ConformCase> cases = {
      {"random", "q, k, v, dO normal", T, 64, D},
      {"one_signed_v", "the same, V and dO of one sign", T, 64, D},
      {"ties_2", "two keys share the maximum, nothing else counts", T, N, D},
      {"ties_2_tail", "two keys share the maximum, the others hold about 0.1 %", T, N, D},
      {"ties_3", "three", T, N, D},
      {"ties_3_tail", "three, with a tail", T, N, D},
      {"ties_4", "four", T, N, D},
      {"ties_4_tail", "four, with a tail", T, N, D},
      {"ties_5", "five", T, N, D},
      {"ties_5_tail", "five, with a tail", T, N, D},
      {"ties_6", "six", T, N, D},
      {"ties_6_tail", "six, with a tail", T, N, D},
      {"ties_7", "seven", T, N, D},
      {"ties_7_tail", "seven, with a tail", T, N, D},
      {"ties_8", "eight", T, N, D},
      {"ties_8_tail", "eight, with a tail", T, N, D},
      {"ties_across_tail", "two, in different tiles of 16 keys, with a tail", T, N, D, false, 16},
      {"sink", "key 0 holds nearly all of every row", T, N, D},
      {"row_max_zero", "two tied at a score of exactly 0, with a tail", T, N, D},
      {"tiny_scores", "scores near 1e-4", T, N, D},
      {"scores_100", "scores near +-100", T, N, D},
      {"scores_2500", "scores near +-2500", T, N, D},
      {"common_offset", "normal scores plus up to +-300 common to the row", T, N, D},
      {"subnormal_v", "values of V and O below 2^-126", T, 64, D},
      {"loss_feedback", "one-signed V; dO from a loss that saw this kernel's O", T, 64, D, false, 64, false,
       1, true},
      {"masked_rows", "a quarter of the rows see no key", T, 64, D, false, 64, true, 8},
      {"one_row", "T = 1", 1, 16, D, false, 64, false, 8},
      {"odd_rows", "T = 65, causal, tiles of 16 keys", 65, 65, D, true, 16, false, 8},
      {"far_one_key", "scores near +-2,000, 20,000, 80,000; one key far above the others; causal", N, N, D,
       true, 64, false, 32, false, 3000},
      {"far_padding", "scores as far away; a mask leaves one key", T, N, D, false, 64, false, 32, false,
       HUGE_VAL, true},
  };
  return cases;
}

ConformInputs::ConformInputs(const ConformCase& c, int64_t heads, uint64_t seed, bool constant_feature)
    : which(&c),
      q({1, heads, c.rows_per_head, c.head_size}),
      k({1, heads, c.keys, c.head_size}),
      v(k.shape()),
      d_o(q.shape()) {
  if (c.masked_rows) visible = Tensor<uint8_t>({1, heads, c.rows_per_head, 1});
  if (c.one_visible) visible = Tensor<uint8_t>({1, heads, 1, c.keys});
  // A head's numbers depend on its own stream alone.
  parallel_for(heads, [&](int64_t h, int) {
    const HeadInputs head{q.view().at(0, h, 0), k.view().at(0, h, 0),
                          v.view().at(0, h, 0), d_o.view().at(0, h, 0),
                          c.rows_per_head,      c.keys,
                          c.head_size};
    fill_head(c, head, InputStream(RandomKey{seed, 0, static_cast<uint32_t>(h)}));
    for (int64_t j = 0; constant_feature && j < c.keys; ++j)
      *k.view().at(0, h, j, c.head_size - 1) = kKeyConstant;
    if (c.masked_rows)
      for (int64_t i = 0; i < c.rows_per_head; ++i) *visible.view().at(0, h, i) = i % 4 != 0;
    if (c.one_visible) *visible.view().at(0, h, 0, h % c.keys) = 1;
  });
}

std::vector<ConformCase> cases_named(const std::vector<std::string>& names) {
  std::vector<ConformCase> cases;
  for (const std::string& name : names) {
    std::string known;
    for (const ConformCase& c : conform_cases()) {
      if (c.name == name) cases.push_back(c);
      known += (known.empty() ? "" : ", ") + std::string(c.name);
    }
    require(!cases.empty() && cases.back().name == name, "unknown family of inputs '{}': expected one of {}",
            name, known);
  }
  return cases;
}

AttentionInputs ConformInputs::inputs() const { return {q.view(), k.view(), v.view()}; }
View<const float> ConformInputs::grad_output() const { return d_o.view(); }
AttentionMask ConformInputs::mask() const {
  AttentionMask mask;
  mask.causal = which->causal;
  if (which->masked()) {
    const size_t repeated = which->masked_rows ? 3 : 2;
    mask.visible = visible.view();
    mask.visible.shape = {1, q.shape()[1], which->rows_per_head, which->keys};
    mask.visible.stride[repeated] = 0;
  }
  return mask;
}

void ConformInputs::set_feedback(const Tensor<float>& o, const Tensor<double>& exact_o, uint64_t seed) {
  // Noise of 1/8 beside values of about 2: a model that predicts well, and errors of O (2^-9 of it) well
  // below that.
  const auto heads = o.shape()[1], each = static_cast<int64_t>(o.values().size()) / heads;
  parallel_for(heads, [&](int64_t h, int) {
    InputStream draw({seed, 1, 0});
    draw.skip_normals(h * each);
    for (int64_t i = h * each; i < (h + 1) * each; ++i) {
      const auto n = static_cast<size_t>(i);
      d_o.values()[n] = bf16(o.values()[n] - (exact_o.values()[n] + 0.125 * draw.normal()));
    }
  });
}

}  // namespace evenkeel
