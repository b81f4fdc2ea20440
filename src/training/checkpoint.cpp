#include "training/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <span>

#include "base/digest.h"
#include "base/error.h"
#include "base/random_access_file.h"
#include "base/safetensors.h"
#include "base/text.h"
#include "base/whole_file.h"
#include "model/model_folder.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolderPrefix = "step-";

fs::path folder_of(const fs::path& folder, int64_t step) { return folder / fmt::format("step-{:08}", step); }

TensorHeader header_of(const std::string& name, const ParameterTensor& tensor) {
  return {name, element_type("F32"), {tensor.shape.begin(), tensor.shape.end()}};
}

Bytes bytes_of_tensor(const std::vector<float>& buffer, const ParameterTensor& tensor) {
  return std::as_bytes(
      std::span(buffer).subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.count())));
}

// One file with every tensor of the table in each of the buffers; names are prefix + name.
struct NamedBuffer {
  std::string prefix;
  const std::vector<float>& values;  // (table.size())
};
void write_buffers(const fs::path& file, const ParameterTable& table, const std::vector<NamedBuffer>& buffers,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<TensorHeader> headers;
  for (const NamedBuffer& buffer : buffers)
    for (const ParameterTensor& tensor : table.tensors())
      headers.push_back(header_of(buffer.prefix + tensor.name, tensor));
  SafetensorsWriter writer(file, headers, metadata);
  for (const NamedBuffer& buffer : buffers)
    for (const ParameterTensor& tensor : table.tensors())
      writer.append(buffer.prefix + tensor.name, bytes_of_tensor(buffer.values, tensor));
  writer.commit();
}

void read_buffer(const Safetensors& file, const ParameterTable& table, const std::string& prefix,
                 std::vector<float>& values) {
  values.assign(static_cast<size_t>(table.size()), 0.0f);
  for (const ParameterTensor& tensor : table.tensors())
    file.at(header_of(prefix + tensor.name, tensor))
        .copy_to(values.data() + tensor.offset, static_cast<size_t>(tensor.count()));
}

int64_t read_integer(const Safetensors& file, const fs::path& path, const std::string& key) {
  const auto found = file.metadata().find(key);
  require_data(found != file.metadata().end(), "{}: expected '{}' in the metadata, found none", path.string(),
               key);
  int64_t value = 0;
  const std::string& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require_data(error == std::errc() && end == text.data() + text.size() && value >= 0,
               "{}: expected a number of steps as '{}' in the metadata, found '{}'", path.string(), key,
               text);
  return value;
}

constexpr const char* kChecksums = "checksums.txt";
constexpr size_t kDigits = 2 * sizeof(Digest);  // of a checksum, in hexadecimal

std::string checksum_of(const fs::path& path) {
  const RandomAccessFile file(path);
  return to_hex(digest_in_blocks(
      file.size(), [&](uint64_t offset, size_t count, std::byte* to) { file.read_at(offset, count, to); }));
}

// The checksums beside a file, by name. Nothing where there is no such file, as in checkpoints of older versions; one that
// says nothing, as a power cut may leave it, or something else is an error.
std::optional<std::map<std::string, std::string>> read_checksums(const fs::path& folder) {
  const fs::path path = folder / kChecksums;
  std::error_code error;
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found) return {};
  const std::string text = read_regular_file(path, 1 << 16);
  std::map<std::string, std::string> found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    const bool is_digest = line.find_first_not_of("0123456789abcdef") == kDigits;
    require_data(
        end != text.npos && is_digest && line.substr(kDigits, 2) == "  " && line.size() > kDigits + 2,
        "{}: expected lines of a checksum of {} digits and a name, found '{}': the checkpoint was damaged "
        "or changed after it was written; an older one may be whole",
        path.string(), kDigits, shown(line));
    found[line.substr(kDigits + 2)] = line.substr(0, kDigits);
    begin = end + 1;
  }
  return found;
}

// False: nothing says what it should be.
bool verify(const fs::path& path) {
  const auto checksums = read_checksums(path.parent_path());
  if (!checksums) return false;
  const auto expected = checksums->find(path.filename().string());
  require_data(
      expected != checksums->end(),
      "{}: expected a line for it in {}, found none: the checkpoint was damaged or changed after it was "
      "written; an older one may be whole",
      path.string(), kChecksums);
  const std::string found = checksum_of(path);
  require_data(
      found == expected->second,
      "{}: expected the checksum {:.16}... that {} holds, found {:.16}...: the file was damaged or changed "
      "after it was written; an older checkpoint may be whole",
      path.string(), expected->second, kChecksums, found);
  return true;
}

}  // namespace

std::vector<Checkpoint> find_checkpoints(const fs::path& folder) {
  std::vector<Checkpoint> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kFolderPrefix)) continue;
    int64_t step = 0;
    const char *begin = name.data() + kFolderPrefix.size(), *end = name.data() + name.size();
    const auto [last, failed] = std::from_chars(begin, end, step);
    if (failed == std::errc() && last == end && step >= 0) found.push_back({step, entry.path()});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

void save_checkpoint(const fs::path& folder, int64_t step, const ParameterTable& table,
                     const TrainingState& state) {
  const fs::path to = folder_of(folder, step);
  refuse_link(to, "a folder");
  WholeFolderWriter writer(to);
  const std::string step_text = fmt::format("{}", step);
  write_buffers(writer.folder() / "model.safetensors", table, {{"", state.parameters}},
                {{"format", "pt"}, {"step", step_text}});
  write_buffers(writer.folder() / "optimizer.safetensors", table,
                {{"first.", state.first}, {"second.", state.second}},
                {{"step", step_text}, {"applied", fmt::format("{}", state.applied)}});
  std::string checksums;
  for (const char* name : {"model.safetensors", "optimizer.safetensors"})
    checksums += fmt::format("{}  {}\n", checksum_of(writer.folder() / name), name);
  write_whole_file(writer.folder() / kChecksums, checksums);
  writer.commit();
}

TrainingState load_checkpoint(const Checkpoint& checkpoint, const ParameterTable& table) {
  const fs::path weights = checkpoint.folder / "model.safetensors",
                 states = checkpoint.folder / "optimizer.safetensors";
  const Safetensors weights_file(weights), states_file(states);
  for (const auto& [file, path] : {std::pair{&weights_file, &weights}, {&states_file, &states}})
    require_data(read_integer(*file, *path, "step") == checkpoint.step, "{}: expected step {}, found {}",
                 path->string(), checkpoint.step, read_integer(*file, *path, "step"));
  TrainingState state;
  state.verified = verify(weights) && verify(states);
  read_buffer(weights_file, table, "", state.parameters);
  read_buffer(states_file, table, "first.", state.first);
  read_buffer(states_file, table, "second.", state.second);
  state.applied = read_integer(states_file, states, "applied");
  return state;
}

bool load_weights(const fs::path& path, Model& model) {
  const Safetensors file(path);
  const bool verified = verify(path);
  std::vector<float> parameters(static_cast<size_t>(model.table().size()));
  for (const ParameterTensor& tensor : model.table().tensors()) {
    const StoredTensor* stored = file.find(tensor.name);
    if (!stored) stored = file.find("transformer." + tensor.name);
    require_data(stored, "{}: expected a tensor {} (or transformer.{}), found none", path.string(),
                 tensor.name, tensor.name);
    require_data(
        std::equal(tensor.shape.begin(), tensor.shape.end(), stored->shape.begin(), stored->shape.end(),
                   [](int64_t a, uint64_t b) { return static_cast<uint64_t>(a) == b; }),
        "{}: {}: expected the shape ({}), found ({})", path.string(), stored->name,
        fmt::join(tensor.shape, ", "), fmt::join(stored->shape, ", "));
    read_floats(*stored, path.string(),
                std::span(parameters)
                    .subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.count())));
  }
  model.write_parameters(parameters);
  return verified;
}

void save_weights(const fs::path& path, const Model& model) {
  std::vector<float> values(static_cast<size_t>(model.table().size()));
  model.read_parameters(values);
  write_buffers(path, model.table(), {{"", values}}, {{"format", "pt"}});
}

}  // namespace evenkeel
