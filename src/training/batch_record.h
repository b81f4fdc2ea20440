// batches.bin: where in the tokens every sequence of every step began. So this run, or another on the same tokens,
// can run any step again. The file is
//   "EKBATCH1", int64 sequences a step, int64 tokens a sequence (its target included), int64 tokens of the source.
//   Then come the offsets of step 0, 1, ...: int64 each. Little-endian.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/whole_file.h"

namespace evenkeel {

struct BatchShape {
  int64_t sequences, tokens, source_size;
  friend bool operator==(const BatchShape&, const BatchShape&) = default;
};

class BatchRecord {
 public:
  // Reads. DataError: what is wrong with the file.
  explicit BatchRecord(const std::filesystem::path& path);
  // The same for bytes that outlive this; `file` is for messages.
  BatchRecord(std::string_view bytes, std::string file);
  const std::string& file() const { return file_; }
  const BatchShape& shape() const { return shape_; }
  int64_t steps() const { return steps_; }
  std::vector<int64_t> offsets(int64_t step) const;  // DataError where the record has no such step

 private:
  std::string file_;
  std::unique_ptr<MappedFile> mapped_;
  std::string_view bytes_;
  BatchShape shape_{};
  int64_t steps_ = 0;
};

// DataError where the batches of steps [begin, end) are not those that the seed draws: the record is damaged, or of another
// seed. Before a branch's first step, a record has the batches of the run that it came from.
void check_drawn(const BatchRecord& record, uint64_t seed, int64_t begin, int64_t end);
// The first `steps` steps of a record, as a file of their own.
void copy_batches(const std::filesystem::path& from, const std::filesystem::path& to, int64_t steps);

// Writes, step after step, from `next_step` on; what lies behind it in an older file is cut off.
class BatchRecorder {
 public:
  BatchRecorder(const std::filesystem::path& path, const BatchShape& shape, int64_t next_step);
  void append(const std::vector<int64_t>& offsets);
  void sync() { file_.sync(); }

 private:
  AppendFile file_;
  BatchShape shape_;
};

}  // namespace evenkeel
