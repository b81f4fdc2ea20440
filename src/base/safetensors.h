// Safetensors files: 8 bytes with the length of a header, the header (JSON: each tensor's element type, shape
// and place), the tensors' bytes. Reading trusts nothing and copies nothing; writing never holds a tensor.
// Little-endian machines only, as the format is.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/whole_file.h"

namespace evenkeel {

static_assert(std::endian::native == std::endian::little);

struct ElementType {
  std::string_view name;  // as the header spells it
  int bits;

  friend bool operator==(const ElementType& a, const ElementType& b) { return a.name == b.name; }
};

inline constexpr ElementType kElementTypes[] = {
    {"F64", 64},        {"I64", 64},    {"U64", 64},    {"C64", 64},    {"F32", 32},    {"I32", 32},
    {"U32", 32},        {"F16", 16},    {"BF16", 16},   {"I16", 16},    {"U16", 16},    {"I8", 8},
    {"U8", 8},          {"BOOL", 8},    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
};

// REQUIRES: a name of kElementTypes; std::invalid_argument otherwise.
ElementType element_type(std::string_view name);

struct TensorHeader {
  std::string name;
  ElementType type;
  std::vector<uint64_t> shape;  // outermost first; none for a single number
};

// What a tensor's shape and type take. DataError where that is beyond 64 bits or no whole number of bytes.
uint64_t byte_count(const TensorHeader& tensor);

struct StoredTensor : TensorHeader {
  Bytes bytes;  // not aligned to anything in files of others

  // Copies the elements. REQUIRES: T has the size of the elements; count is their number.
  template <class T>
  void copy_to(T* out, size_t count) const {
    static_assert(std::is_trivially_copyable_v<T>);
    require(sizeof(T) * 8 == static_cast<size_t>(type.bits) && bytes.size() == count * sizeof(T),
            "[safetensors] expected {} numbers of {} bytes in {}, found {} bytes of {}", count, sizeof(T),
            name, bytes.size(), type.name);
    if (count > 0) std::memcpy(out, bytes.data(), bytes.size());
  }
};

// Movable; the tensors' bytes stay where they are.
class Safetensors {
 public:
  // Maps the file. Every fault is a DataError that names the file, what was expected and what was found.
  explicit Safetensors(const std::filesystem::path& path);
  // The same for bytes that outlive this; `file` is for messages.
  Safetensors(Bytes bytes, std::string file);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // as they lie in the file
  const StoredTensor* find(std::string_view name) const;                 // nullptr: there is none
  // The tensor of that name, type and shape; a DataError says which of them is not so.
  const StoredTensor& at(const TensorHeader& expected) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  void parse(Bytes bytes);

  std::string file_;
  std::unique_ptr<MappedFile> mapped_;
  std::vector<StoredTensor> tensors_;
  std::vector<size_t> by_name_;  // indices of tensors_
  std::map<std::string, std::string> metadata_;
};

// Writes a file whole or not at all. The header is written at once; each tensor's bytes then come in pieces,
// the tensors in any order. What lies where depends on the headers alone: large elements first, so that each
// tensor is aligned to its elements, then by name.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorHeader> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  // The next bytes of that tensor.
  void append(std::string_view name, Bytes bytes);
  // REQUIRES: every tensor is complete.
  void commit();

 private:
  struct Place {
    uint64_t next, end;  // in the file
  };
  std::string file_;
  std::map<std::string, Place, std::less<>> places_;
  WholeFileWriter writer_;
};

}  // namespace evenkeel
