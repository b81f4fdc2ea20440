// Attention run on the problems of attention_cases.h, for the tests of it: every output, compared by bits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention_cases.h"

namespace evenkeel::attention_runs {

using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr auto kStabilisers = [] {
  std::array<Stabiliser, kStabiliserTable.size()> all{};
  for (size_t n = 0; n < all.size(); ++n) all[n] = kStabiliserTable[n].stabiliser;
  return all;
}();

inline PrecisionPlan plan_of(std::string_view text, Stabiliser stabiliser) {
  PrecisionPlan plan = parse_plan(text);
  plan.stabiliser = stabiliser;
  return plan;
}

inline size_t size_of(int64_t n) { return static_cast<size_t>(n); }

// Every output is poisoned before the call: what is not written stays NaN (or the smallest number of ties).
inline AttentionBuffers poisoned_buffers(const AttentionInputs& in, bool with_facts = true) {
  AttentionBuffers buffers(in, with_facts);
  for (auto* t : {&buffers.o, &buffers.lse, &buffers.o_for_delta, &buffers.row_max, &buffers.row_sum,
                  &buffers.dq, &buffers.dk, &buffers.dv, &buffers.delta})
    std::fill(t->values().begin(), t->values().end(), kNan);
  std::fill(buffers.ties.values().begin(), buffers.ties.values().end(), INT32_MIN);
  for (auto* t : {&buffers.residual, &buffers.residual_floor})
    std::fill(t->values().begin(), t->values().end(), double{kNan});
  return buffers;
}

inline AttentionBuffers run(const AttentionProblem& config, const Problem& p,
                            SiteObserver* observer = nullptr) {
  AttentionBuffers buffers = poisoned_buffers(p.in);
  attention_forward(config, p.in, buffers.forward(), observer);
  attention_backward(config, p.in, p.grad_output, buffers.forward(), buffers.backward(), observer);
  return buffers;
}

struct NamedTensor {
  const char* name;
  const Tensor<float>* tensor;
};
inline std::array<NamedTensor, 9> tensors_of(const AttentionBuffers& b) {
  return {{{"o", &b.o},
           {"lse", &b.lse},
           {"o_for_delta", &b.o_for_delta},
           {"row_max", &b.row_max},
           {"row_sum", &b.row_sum},
           {"delta", &b.delta},
           {"dq", &b.dq},
           {"dk", &b.dk},
           {"dv", &b.dv}}};
}

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0);
}

inline void expect_same_bits(const AttentionBuffers& x, const AttentionBuffers& y) {
  const auto a = tensors_of(x), b = tensors_of(y);
  for (size_t n = 0; n < a.size(); ++n)
    EXPECT_TRUE(same_bits(a[n].tensor->values(), b[n].tensor->values())) << a[n].name << " differs";
  EXPECT_TRUE(same_bits(x.ties.values(), y.ties.values())) << "ties differ";
  EXPECT_TRUE(same_bits(x.residual.values(), y.residual.values())) << "residual differs";
  EXPECT_TRUE(same_bits(x.residual_floor.values(), y.residual_floor.values())) << "residual_floor differs";
}

// Of a problem and of the same filled up with zeros (cases::Narrowed): every output, of whatever kind of buffers.
template <class Buffers>
void expect_narrowed(const Buffers& wide, const Buffers& narrow, const std::string& name) {
  for (auto [tensor, member] : {std::pair{"o", &Buffers::o},
                                {"lse", &Buffers::lse},
                                {"delta", &Buffers::delta},
                                {"dq", &Buffers::dq},
                                {"dk", &Buffers::dk},
                                {"dv", &Buffers::dv}}) {
    const auto &x = wide.*member, &y = narrow.*member;
    const auto [B, H, rows, D] = x.shape();
    bool alike = y.shape()[3] <= D;
    for (int64_t b = 0; alike && b < B; ++b)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t d = 0; d < D; ++d)
            alike &= *x.view().at(b, h, i, d) == (d < y.shape()[3] ? *y.view().at(b, h, i, d) : 0);
    EXPECT_TRUE(alike) << name << ": " << tensor << " differs";
  }
}

// A batch entry or head of a tensor, as bits.
template <class T>
std::vector<T> part_of(const Tensor<T>& tensor, int64_t b, int64_t h, int64_t rows) {
  std::vector<T> part;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < tensor.shape()[3]; ++d) part.push_back(*tensor.view().at(b, h, row, d));
  return part;
}

// `paper` is left out where its published holes make it fail; centre_keys does not go with a soft cap.
inline bool fits(const Case& c, Stabiliser stabiliser) {
  if (stabiliser == Stabiliser::paper && (c.fill == Fill::huge || c.fill == Fill::offset)) return false;
  if (stabiliser == Stabiliser::paper && c.fill == Fill::hundred && c.softcap == 0) return false;
  return !(stabiliser == Stabiliser::centre_keys && c.softcap > 0);
}

// 20,480 rows: 40 heads of 512. With 64 keys a head has 496 pairs that may tie: few of its rows are alike.
inline Problem many_rows(Fill fill, int64_t tile_keys = 0) {
  return make_problem(
      {{1, 40, 40, kSanitized ? 64 : 512, 64, 64}, {.fill = fill, .tile_keys = tile_keys}, ""});
}

inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace evenkeel::attention_runs
