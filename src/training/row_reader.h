// The sequences of a batch, read in the background while the step before is computed: 32 rows of nano take 33
// microseconds to read, of a step of 4,600 on a GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/threads.h"
#include "model/model.h"
#include "training/token_file.h"

namespace evenkeel {

// Tokens of some sequences and their targets, which are the tokens one place later: (rows, T) each.
struct Rows {
  std::vector<int64_t> offsets;  // (rows) in the source
  int64_t T = 0;
  std::vector<int32_t> tokens, targets;

  void read(const TokenSource& source, std::span<const int64_t> from, int64_t tokens_per_row);
  Batch batch() const { return {static_cast<int64_t>(offsets.size()), T, tokens, targets}; }
};

class RowReader {
 public:
  // REQUIRES: `source` outlives the reader.
  RowReader(const TokenSource& source, int64_t T) : source_(source), T_(T) {}

  // The rows at `offsets`, those read ahead if they are the same ones; valid until the next call. Throws what reading
  // them threw.
  Batch take(std::span<const int64_t> offsets);
  // Begins to read these rows, for the next take().
  void read_ahead(std::vector<int64_t> offsets);

 private:
  const TokenSource& source_;
  int64_t T_;
  Rows taken_, ahead_;
  std::vector<int64_t> asked_;  // to be read ahead
  Background reading_;          // into ahead_
};

}  // namespace evenkeel
