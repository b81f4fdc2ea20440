// Everything an observer of attention's sites is shown, put back together.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention_cases.h"
#include "attention_runs.h"

namespace evenkeel::attention_runs {

// Everything an observer is shown, put back together. Every site, batch entry and head has a matrix of what was
// before the rounding and after it, and how often each element came. Several observations of one element
// (row_sum and pv, after each tile): the last stays.
class Recorder : public SiteObserver {
 public:
  struct Field {
    int64_t rows = 0, columns = 0;
    std::vector<float> exact, rounded;
    std::vector<int32_t> times;

    size_t at(int64_t row, int64_t column) const { return size_of(row * columns + column); }
    float before(int64_t row, int64_t column = 0) const { return exact[at(row, column)]; }
    float after(int64_t row, int64_t column = 0) const { return rounded[at(row, column)]; }
  };

  explicit Recorder(const Problem& p) : shape_(p.shape) {}

  void observe(const SiteBlock& block) override {
    std::lock_guard lock(mutex_);
    ++blocks_;
    Field& field = fields_[{block.site, block.batch, block.head}];
    if (field.exact.empty()) {
      const bool by_key = is_of_keys(block.site);
      field.rows = by_key ? shape_.N : shape_.T;
      field.columns = columns_of(block.site);
      field.exact.assign(size_of(field.rows * field.columns), kNan);
      field.rounded = field.exact;
      field.times.assign(field.exact.size(), 0);
    }
    ASSERT_GE(block.row, 0);
    ASSERT_GE(block.column, 0);
    ASSERT_LE(block.row + block.rows, field.rows) << name(block.site);
    ASSERT_LE(block.column + block.columns, field.columns) << name(block.site);
    for (int64_t i = 0; i < block.rows; ++i)
      for (int64_t j = 0; j < block.columns; ++j) {
        const int64_t from = i * block.row_stride + j * block.column_stride;
        const size_t to = field.at(block.row + i, block.column + j);
        field.exact[to] = block.exact[from];
        field.rounded[to] = block.rounded[from];
        ++field.times[to];
      }
  }

  const Field& field(Site site, int64_t b, int64_t h) const { return fields_.at({site, b, h}); }
  bool has(Site site, int64_t b, int64_t h) const { return fields_.contains({site, b, h}); }
  const auto& fields() const { return fields_; }
  int64_t blocks() const { return blocks_; }

 private:
  int64_t columns_of(Site site) const {
    switch (site) {
      case Site::scores:
      case Site::shifted:
      case Site::probs:
      case Site::probs_bwd:
      case Site::dprobs:
      case Site::dscores:
        return shape_.N;
      case Site::row_sum:
      case Site::delta:
        return 1;
      default:
        return shape_.D;
    }
  }

  Case shape_;
  std::mutex mutex_;
  std::map<std::tuple<Site, int64_t, int64_t>, Field> fields_;
  int64_t blocks_ = 0;
};

// How many elements at the site were changed by the rounding, and how many are not what round_to makes of
// them. Masked scores, -inf, must stay what they are.
struct SiteCount {
  int64_t seen = 0, changed = 0, wrong = 0;
};
inline SiteCount count_site(const Recorder& recorder, Site site, const Rounding& expected) {
  SiteCount count;
  for (const auto& [key, field] : recorder.fields()) {
    if (std::get<0>(key) != site) continue;
    for (size_t n = 0; n < field.exact.size(); ++n) {
      if (field.times[n] == 0) continue;
      const float before = field.exact[n], after = field.rounded[n];
      const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
      ++count.seen;
      count.changed += bits(before) != bits(after);
      if (before == -kInfinity) {
        count.wrong += after != -kInfinity;
      } else if (expected.mode == RoundingMode::stochastic) {
        const float low = round_to(expected, before, UINT32_MAX), high = round_to(expected, before, 0);
        count.wrong += bits(after) != bits(low) && bits(after) != bits(high);
      } else {
        count.wrong += bits(after) != bits(round_to(expected, before));
      }
    }
  }
  return count;
}

inline float fma_chain(int64_t count, auto x, auto y, float start = 0) {
  float sum = start;
  for (int64_t n = 0; n < count; ++n) sum = std::fma(x(n), y(n), sum);
  return sum;
}

inline int64_t ulps(float a, float b) { return std::llabs(ulp_distance(kFp32, a, b)); }

}  // namespace evenkeel::attention_runs
