#include "training/row_reader.h"

#include <algorithm>
#include <utility>

namespace evenkeel {

void Rows::read(const TokenSource& source, std::span<const int64_t> from, int64_t tokens_per_row) {
  offsets.clear();  // names no rows if reading fails
  T = tokens_per_row;
  tokens.resize(from.size() * static_cast<size_t>(T));
  targets.resize(tokens.size());
  std::vector<int32_t> row(static_cast<size_t>(T + 1));
  for (size_t n = 0; n < from.size(); ++n) {
    source.read(from[n], T + 1, row.data());
    std::copy_n(row.begin(), T, tokens.begin() + static_cast<std::ptrdiff_t>(n) * T);
    std::copy_n(row.begin() + 1, T, targets.begin() + static_cast<std::ptrdiff_t>(n) * T);
  }
  offsets.assign(from.begin(), from.end());
}

Batch RowReader::take(std::span<const int64_t> offsets) {
  const bool expected = std::ranges::equal(offsets, asked_);
  try {
    reading_.wait();
  } catch (...) {
    if (expected) throw;  // other rows: nobody needs them any more
  }
  if (expected && std::ranges::equal(offsets, ahead_.offsets))
    std::swap(taken_, ahead_);
  else
    taken_.read(source_, offsets, T_);
  return taken_.batch();
}

void RowReader::read_ahead(std::vector<int64_t> offsets) {
  asked_ = offsets;
  reading_.start([this, offsets = std::move(offsets)] { ahead_.read(source_, offsets, T_); });
}

}  // namespace evenkeel
