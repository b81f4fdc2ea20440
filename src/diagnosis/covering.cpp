#include "diagnosis/covering.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "numerics/random.h"

namespace evenkeel {
namespace {

class Pairs {
 public:
  explicit Pairs(const std::vector<int>& levels) : levels_(levels), first_(levels.size() + 1) {
    for (size_t f = 0; f < levels.size(); ++f) first_[f + 1] = first_[f] + levels[f];
    const auto all = static_cast<size_t>(first_.back());
    open_.assign(all * all, 0);
    for (size_t f = 0; f < levels.size(); ++f)
      for (size_t g = 0; g < levels.size(); ++g)
        if (f != g)
          for (int x = 0; x < levels[f]; ++x)
            for (int y = 0; y < levels[g]; ++y) open_[at(f, x, g, y)] = 1;
    left_ = std::accumulate(open_.begin(), open_.end(), int64_t{0}) / 2;
  }
  int64_t left() const { return left_; }
  bool is_open(size_t f, int x, size_t g, int y) const { return open_[at(f, x, g, y)] != 0; }
  void close(const std::vector<int>& row) {
    for (size_t f = 0; f < row.size(); ++f)
      for (size_t g = f + 1; g < row.size(); ++g) {
        left_ -= open_[at(f, row[f], g, row[g])];
        open_[at(f, row[f], g, row[g])] = open_[at(g, row[g], f, row[f])] = 0;
      }
  }
  // Open pairs of this level with those of the factors that are set already (-1: not set).
  int64_t gain(size_t f, int x, const std::vector<int>& row) const {
    int64_t pairs = 0;
    for (size_t g = 0; g < row.size(); ++g)
      if (g != f && row[g] >= 0) pairs += open_[at(f, x, g, row[g])];
    return pairs;
  }
  // Sets the two factors of some open pair.
  void first_open(std::vector<int>& row) const {
    for (size_t f = 0; f < levels_.size(); ++f)
      for (size_t g = f + 1; g < levels_.size(); ++g)
        for (int x = 0; x < levels_[f]; ++x)
          for (int y = 0; y < levels_[g]; ++y)
            if (is_open(f, x, g, y)) {
              row[f] = x, row[g] = y;
              return;
            }
  }

 private:
  size_t at(size_t f, int x, size_t g, int y) const {
    return static_cast<size_t>(first_[f] + x) * static_cast<size_t>(first_.back()) +
           static_cast<size_t>(first_[g] + y);
  }
  std::vector<int> levels_, first_;
  std::vector<uint8_t> open_;
  int64_t left_ = 0;
};

}  // namespace

std::vector<std::vector<int>> covering_rows(const std::vector<int>& levels, uint64_t seed) {
  require(levels.size() >= 2 && std::ranges::all_of(levels, [](int n) { return n >= 1; }),
          "[covering] expected two factors at least, with a level each, got {} factors", levels.size());
  constexpr int kTries = 20;
  Pairs pairs(levels);
  RandomStream draw({seed, 0, 0});
  std::vector<std::vector<int>> rows;
  while (pairs.left() > 0) {
    std::vector<int> best;
    int64_t best_gain = -1;
    for (int n = 0; n < kTries; ++n) {
      std::vector<int> row(levels.size(), -1);
      pairs.first_open(row);  // so that every row closes one pair at least
      std::vector<size_t> order(levels.size());
      std::iota(order.begin(), order.end(), size_t{0});
      for (size_t f = order.size(); f > 1; --f)
        std::swap(order[f - 1], order[static_cast<size_t>(draw.below(static_cast<int64_t>(f)))]);
      int64_t gain = 1;
      for (size_t f : order) {
        if (row[f] >= 0) continue;
        int level = static_cast<int>(draw.below(levels[f]));
        int64_t most = pairs.gain(f, level, row);
        for (int x = 0; x < levels[f]; ++x)
          if (const int64_t pairs_of_x = pairs.gain(f, x, row); pairs_of_x > most)
            level = x, most = pairs_of_x;
        row[f] = level;
        gain += most;
      }
      if (gain > best_gain) best = row, best_gain = gain;
    }
    pairs.close(best);
    rows.push_back(best);
  }
  return rows;
}

}  // namespace evenkeel
