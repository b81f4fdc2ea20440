// TensorBoard event files: records (length, data, a checksum of each) that hold Event messages in protocol
// buffer encoding. Scalars only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/whole_file.h"

namespace evenkeel {

struct Scalar {
  std::string tag;  // UTF-8; TensorBoard groups by what stands before the first '/'
  float value;
};

// A new file events.out.tfevents.SECONDS.HOST.PID.COUNT in the folder. A killed writer leaves whole events
// and at most one torn one at the end, which TensorBoard passes over.
class TensorboardWriter {
 public:
  // A run that goes on from a checkpoint says at which step: TensorBoard then forgets what an earlier file of
  // the folder has from there on. Makes the folder if there is none.
  explicit TensorboardWriter(const std::filesystem::path& folder, std::optional<int64_t> restart_step = {});

  const std::filesystem::path& path() const { return file_.path(); }
  // One event. NaN and infinities are values as others. wall_time: seconds since 1970. REQUIRES: step >= 0,
  // tags in UTF-8.
  void write(int64_t step, std::span<const Scalar> scalars, double wall_time);
  void write(int64_t step, std::span<const Scalar> scalars);  // now
  void sync() { file_.sync(); }

 private:
  AppendFile file_;
};

struct TensorboardEvent {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version;  // of the first event; empty in others
  bool restarts = false;     // forget earlier events from this step on
  std::vector<Scalar> scalars;
  size_t other_values = 0;  // images, histograms and what else is no plain scalar
};

struct TensorboardResult {
  size_t events = 0;
  size_t torn_bytes = 0;  // of a record without its end: what a killed writer left; never read
};

// Calls back for every event in order. A DataError where a checksum is wrong or a message is none, with the
// offset in the file.
TensorboardResult read_tensorboard(const std::filesystem::path& path,
                                   const std::function<void(const TensorboardEvent&)>& take);
TensorboardResult parse_tensorboard(std::string_view bytes, const std::string& file,
                                    const std::function<void(const TensorboardEvent&)>& take);

// CRC-32C (Castagnoli) by the processor's instruction where it has one, else by table; the same number.
uint32_t crc32c(std::string_view bytes);
uint32_t crc32c_by_table(std::string_view bytes);
// What the records hold in its place, so that a checksum of data with checksums in it stays a good one.
constexpr uint32_t masked_crc(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; }

// The pieces of the file, for who wants to look at the bytes.
std::string encode_record(std::string_view data);
std::string encode_event(const TensorboardEvent& event);

}  // namespace evenkeel
