#include "training/batch_record.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"
#include "training/token_file.h"

namespace evenkeel {
namespace {

constexpr std::string_view kMagic = "EKBATCH1";
constexpr uint64_t kHeaderBytes = kMagic.size() + 3 * sizeof(int64_t);

void append_integer(std::string& to, int64_t value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  to.append(bytes, sizeof value);
}
int64_t integer_at(std::string_view bytes, uint64_t offset) {
  int64_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

BatchShape shape_of(std::string_view header, const std::string& file) {
  require_data(header.size() >= kHeaderBytes && header.starts_with(kMagic),
               "{}: expected a record of batches ('{}' and {} bytes), found {} bytes of something else", file,
               kMagic, kHeaderBytes, header.size());
  const BatchShape shape{integer_at(header, kMagic.size()), integer_at(header, kMagic.size() + 8),
                         integer_at(header, kMagic.size() + 16)};
  require_data(
      shape.sequences > 0 && shape.sequences < (int64_t{1} << 32) && shape.tokens > 0 &&
          shape.source_size >= shape.tokens,
      "{}: expected sequences, tokens of each and tokens of the source, all above 0, found {}, {} and {}",
      file, shape.sequences, shape.tokens, shape.source_size);
  return shape;
}

uint64_t step_bytes(const BatchShape& shape) {
  return static_cast<uint64_t>(shape.sequences) * sizeof(int64_t);
}

}  // namespace

BatchRecord::BatchRecord(std::string_view bytes, std::string file) : file_(std::move(file)), bytes_(bytes) {
  shape_ = shape_of(bytes_.substr(0, kHeaderBytes), file_);
  // A killed writer may leave a part of a step: it is none.
  steps_ = static_cast<int64_t>((bytes_.size() - kHeaderBytes) / step_bytes(shape_));
}

BatchRecord::BatchRecord(const std::filesystem::path& path) {
  auto mapped = std::make_unique<MappedFile>(path);
  *this = BatchRecord(mapped->text(), path.string());
  mapped_ = std::move(mapped);
}

std::vector<int64_t> BatchRecord::offsets(int64_t step) const {
  require_data(step >= 0 && step < steps_, "{}: expected a step below {}, asked for {}", file_, steps_, step);
  std::vector<int64_t> offsets(static_cast<size_t>(shape_.sequences));
  std::memcpy(offsets.data(), bytes_.data() + kHeaderBytes + static_cast<uint64_t>(step) * step_bytes(shape_),
              step_bytes(shape_));
  for (int64_t offset : offsets)
    require_data(offset >= 0 && offset <= shape_.source_size - shape_.tokens,
                 "{}: step {}: expected offsets from 0 to {}, found {}", file_, step,
                 shape_.source_size - shape_.tokens, offset);
  return offsets;
}

void check_drawn(const BatchRecord& record, uint64_t seed, int64_t begin, int64_t end) {
  const BatchShape& shape = record.shape();
  std::vector<int64_t> drawn(static_cast<size_t>(shape.sequences));
  for (int64_t n = begin; n < end; ++n) {
    batch_offsets(seed, n, shape.sequences, shape.tokens, shape.source_size, drawn.data());
    const std::vector<int64_t> recorded = record.offsets(n);
    const auto [expected, found] = std::mismatch(drawn.begin(), drawn.end(), recorded.begin());
    if (expected != drawn.end())
      throw DataError(fmt::format(
          "{}: step {}: expected a sequence from token {}, as data.seed = {} of its config.toml "
          "draws it, found one from {}: one of the two files was damaged or changed after the step; "
          "put it back as it was, or make a new run of a checkpoint (evenkeel train --branch RUN@STEP)",
          record.file(), n, *expected, seed, *found));
  }
}

void copy_batches(const std::filesystem::path& from, const std::filesystem::path& to, int64_t steps) {
  std::filesystem::copy_file(from, to);
  BatchRecorder(to, BatchRecord(to).shape(), steps);  // which cuts off what lies behind
}

BatchRecorder::BatchRecorder(const std::filesystem::path& path, const BatchShape& shape, int64_t next_step)
    : file_(path), shape_(shape) {
  if (file_.size() < kHeaderBytes) {  // new, or killed at once
    require_data(next_step == 0, "{}: expected the batches of {} steps, found none", path.string(),
                 next_step);
    file_.truncate(0);
    std::string header(kMagic);
    for (int64_t value : {shape.sequences, shape.tokens, shape.source_size}) append_integer(header, value);
    file_.append(header);
    return;
  }
  const BatchShape found = shape_of(file_.read_at(0, kHeaderBytes), path.string());
  require_data(
      found == shape,
      "{}: expected {} sequences of {} tokens from {}, found {} of {} from {}: the run was made with other "
      "settings or tokens",
      path.string(), shape.sequences, shape.tokens, shape.source_size, found.sequences, found.tokens,
      found.source_size);
  const uint64_t end = kHeaderBytes + static_cast<uint64_t>(next_step) * step_bytes(shape);
  require_data(file_.size() >= end, "{}: expected the batches of {} steps, found {}", path.string(),
               next_step, (file_.size() - kHeaderBytes) / step_bytes(shape));
  file_.truncate(end);
}

void BatchRecorder::append(const std::vector<int64_t>& offsets) {
  require(static_cast<int64_t>(offsets.size()) == shape_.sequences, "[batches] expected {} offsets, got {}",
          shape_.sequences, offsets.size());
  std::string record;
  for (int64_t offset : offsets) append_integer(record, offset);
  file_.append(record);
}

}  // namespace evenkeel
