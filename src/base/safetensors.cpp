#include "base/safetensors.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "base/text.h"

namespace evenkeel {
namespace {

constexpr size_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kLongestHeader = 100'000'000;  // the limit of the format's own library
constexpr std::string_view kMetadata = "__metadata__";

const ElementType* find_type(std::string_view name) {
  const auto found = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                  [&](const ElementType& type) { return type.name == name; });
  return found == std::end(kElementTypes) ? nullptr : found;
}

std::string written(const std::vector<uint64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The file's own words may be long or strange; a message shows them safely.
std::string written(const TensorHeader& tensor) {
  return fmt::format("'{}' ({} {})", shown(tensor.name), tensor.type.name, shown(written(tensor.shape)));
}

struct PlacedTensor : TensorHeader {
  uint64_t begin, end;  // from the end of the header
};

// Takes the header's JSON piece by piece, as the parser meets it: nothing but what the format allows is ever
// stored, and nothing is nested deeper than it allows.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& file, std::vector<PlacedTensor>& tensors,
               std::map<std::string, std::string>& metadata)
      : file_(file), tensors_(tensors), metadata_(metadata) {}

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a truth value"); }
  bool number_integer(number_integer_t value) override {
    refuse(std::to_string(value));
  }  // only negative ones
  bool number_float(number_float_t, const string_t& text) override { refuse(shown(text)); }
  bool binary(binary_t&) override { refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::numbers) refuse(std::to_string(value));
    numbers_.push_back(value);
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::metadata) {
      metadata_.emplace(key_, std::move(text));
    } else {
      if (place_ != Place::tensor || key_ != "dtype") refuse(fmt::format("'{}'", shown(text)));
      type_ = find_type(text);
      require_data(type_ != nullptr, "{}: expected a known dtype of tensor '{}', found '{}'", file_,
                   shown(name_), shown(text));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::start) {
      place_ = Place::file;
    } else if (place_ == Place::file) {
      place_ = name_ == kMetadata ? Place::metadata : Place::tensor;
      type_ = nullptr;
      shape_.reset();
      offsets_.reset();
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(string_t& text) override {
    require_data(text.find('\0') == std::string::npos, "{}: expected names without NUL, found '{}'", file_,
                 shown(text));
    bool is_new = true;  // of the tensors' names, that is seen when they are sorted
    if (place_ == Place::file && text == kMetadata) is_new = !std::exchange(has_metadata_, true);
    if (place_ == Place::metadata) is_new = !metadata_.contains(text);
    if (place_ == Place::tensor) {
      is_new = text == "dtype" ? !type_ : text == "shape" ? !shape_ : !offsets_;
      require_data(text == "dtype" || text == "shape" || text == "data_offsets",
                   "{}: expected dtype, shape and data_offsets of tensor '{}', found '{}'", file_,
                   shown(name_), shown(text));
    }
    require_data(is_new, "{}: expected each name once, found '{}' twice", file_, shown(text));
    (place_ == Place::file ? name_ : key_) = std::move(text);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      const auto check = [&](bool present, const char* what) {
        require_data(present, "{}: expected {} of tensor '{}', found none", file_, what, shown(name_));
      };
      check(type_ != nullptr, "a dtype");
      check(shape_.has_value(), "a shape");
      check(offsets_.has_value(), "data_offsets");
      require_data(offsets_->size() == 2, "{}: expected 2 data_offsets of tensor '{}', found {}", file_,
                   shown(name_), offsets_->size());
      tensors_.push_back({{name_, *type_, std::move(*shape_)}, offsets_->at(0), offsets_->at(1)});
    }
    place_ = place_ == Place::file ? Place::start : Place::file;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") refuse("an array");
    place_ = Place::numbers;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    (key_ == "shape" ? shape_ : offsets_) = std::move(numbers_);
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) override {
    const std::string_view what = error.what();
    const size_t reason = what.find(": ");  // behind the library's own numbering
    throw DataError(fmt::format("{}: expected a header in JSON, found a fault at byte {} of it: {}", file_,
                                position, shown(what.substr(reason == what.npos ? 0 : reason + 2), 120)));
  }

 private:
  enum class Place { start, file, metadata, tensor, numbers };

  [[noreturn]] void refuse(const std::string& found) const {
    const std::string in = fmt::format("tensor '{}'", shown(name_));
    const std::string expected =
        place_ == Place::start      ? "an object for a header"
        : place_ == Place::file     ? fmt::format("an object for '{}'", shown(name_))
        : place_ == Place::metadata ? fmt::format("a string for '{}' in {}", shown(key_), kMetadata)
        : place_ == Place::numbers  ? fmt::format("whole numbers in the {} of {}", key_, in)
        : key_ == "dtype"           ? fmt::format("the name of a dtype of {}", in)
                                    : fmt::format("an array for the {} of {}", key_, in);
    throw DataError(fmt::format("{}: expected {}, found {}", file_, expected, found));
  }

  const std::string& file_;
  std::vector<PlacedTensor>& tensors_;
  std::map<std::string, std::string>& metadata_;

  Place place_ = Place::start;
  std::string name_, key_;  // of the tensor; within it
  bool has_metadata_ = false;
  const ElementType* type_ = nullptr;
  std::vector<uint64_t> numbers_;
  std::optional<std::vector<uint64_t>> shape_, offsets_;
};

// The tensors must follow one another without a gap and fill the rest of the file.
void check_places(const std::vector<PlacedTensor>& tensors, uint64_t data_bytes, const std::string& file) {
  uint64_t end = 0;
  for (const PlacedTensor& tensor : tensors) {
    require_data(
        tensor.begin == end,
        "{}: expected the tensors to follow one another without gap or overlap, found {} at {} where "
        "the one before ends at {}",
        file, written(tensor), tensor.begin, end);
    require_data(tensor.end >= tensor.begin && tensor.end <= data_bytes,
                 "{}: expected {} to end within the {} bytes behind the header, found it to go from {} to {}",
                 file, written(tensor), data_bytes, tensor.begin, tensor.end);
    uint64_t expected = 0;
    try {
      expected = byte_count(tensor);
    } catch (const DataError& error) {
      throw DataError(fmt::format("{}: {}", file, error.what()));
    }
    require_data(tensor.end - tensor.begin == expected, "{}: expected {} bytes for {}, found {}", file,
                 expected, written(tensor), tensor.end - tensor.begin);
    end = tensor.end;
  }
  require_data(end == data_bytes, "{}: expected tensors to the end, found {} bytes behind the last", file,
               data_bytes - end);
}

}  // namespace

ElementType element_type(std::string_view name) {
  const ElementType* type = find_type(name);
  require(type != nullptr, "[safetensors] expected a known dtype, found '{}'", shown(name));
  return *type;
}

uint64_t byte_count(const TensorHeader& tensor) {
  uint64_t bits = static_cast<uint64_t>(tensor.type.bits);
  for (const uint64_t size : tensor.shape)
    require_data(!__builtin_mul_overflow(bits, size, &bits),
                 "expected a tensor of a size below 2^61 bytes, found {}", written(tensor));
  require_data(bits % 8 == 0, "expected a tensor of whole bytes, found {}", written(tensor));
  return bits / 8;
}

Safetensors::Safetensors(const std::filesystem::path& path)
    : file_(path.string()), mapped_(std::make_unique<MappedFile>(path)) {
  parse(mapped_->bytes());
}

Safetensors::Safetensors(Bytes bytes, std::string file) : file_(std::move(file)) { parse(bytes); }

void Safetensors::parse(Bytes bytes) {
  require_data(bytes.size() >= kLengthBytes,
               "{}: expected a safetensors file, found {} bytes where the header's length alone takes {}",
               file_, bytes.size(), kLengthBytes);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  require_data(
      header_bytes <= kLongestHeader,
      "{}: expected a safetensors file, with a header of at most {} bytes, found one of {}: another kind of "
      "file?",
      file_, kLongestHeader, header_bytes);
  const Bytes rest = bytes.subspan(kLengthBytes);
  require_data(header_bytes <= rest.size(), "{}: expected a header of {} bytes, found the end after {}",
               file_, header_bytes, rest.size());
  const auto* header = reinterpret_cast<const char*>(rest.data());
  require_data(header_bytes > 0 && header[0] == '{', "{}: expected a header that begins with '{{', found {}",
               file_, header_bytes > 0 ? fmt::format("'{}'", shown({header, 1})) : "none");
  // The library takes one for the end of the text.
  const size_t nul = std::string_view(header, header_bytes).find('\0');
  require_data(nul == std::string_view::npos, "{}: expected a header without NUL bytes, found one at {}",
               file_, nul);

  std::vector<PlacedTensor> placed;
  HeaderReader reader(file_, placed, metadata_);
  nlohmann::json::sax_parse(header, header + header_bytes, &reader);
  std::sort(placed.begin(), placed.end(), [](const PlacedTensor& a, const PlacedTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  by_name_.resize(placed.size());
  std::iota(by_name_.begin(), by_name_.end(), size_t{0});
  const auto name_of = [&](size_t i) -> const std::string& { return placed[i].name; };
  std::sort(by_name_.begin(), by_name_.end(), [&](size_t a, size_t b) { return name_of(a) < name_of(b); });
  const auto twice = std::adjacent_find(by_name_.begin(), by_name_.end(),
                                        [&](size_t a, size_t b) { return name_of(a) == name_of(b); });
  require_data(twice == by_name_.end(), "{}: expected each name once, found '{}' twice", file_,
               twice == by_name_.end() ? "" : shown(name_of(*twice)));
  const Bytes data = rest.subspan(header_bytes);
  check_places(placed, data.size(), file_);

  tensors_.reserve(placed.size());
  for (PlacedTensor& tensor : placed) {
    const Bytes own = data.subspan(tensor.begin, tensor.end - tensor.begin);
    tensors_.push_back({std::move(tensor), own});
  }
}

const StoredTensor* Safetensors::find(std::string_view name) const {
  const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                      [&](size_t i, std::string_view key) { return tensors_[i].name < key; });
  return found != by_name_.end() && tensors_[*found].name == name ? &tensors_[*found] : nullptr;
}

const StoredTensor& Safetensors::at(const TensorHeader& expected) const {
  const StoredTensor* tensor = find(expected.name);
  require_data(tensor != nullptr, "{}: expected tensor {}, found none of that name among {}", file_,
               written(expected), tensors_.size());
  require_data(tensor->type == expected.type && tensor->shape == expected.shape,
               "{}: expected tensor {}, found {} {}", file_, written(expected), tensor->type.name,
               shown(written(tensor->shape)));
  return *tensor;
}

namespace {

// What the header says, in the order in which the tensors lie.
struct Layout {
  std::string header;  // with the length before it
  std::vector<std::pair<std::string, uint64_t>> sizes;
};

Layout layout_of(std::vector<TensorHeader> tensors, const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorHeader& a, const TensorHeader& b) {
    return std::tie(b.type.bits, a.name) < std::tie(a.type.bits, b.name);
  });
  const auto check_text = [](const std::string& text) {
    require(is_utf8(text) && text.find('\0') == std::string::npos,
            "[safetensors] expected names and metadata in UTF-8 without NUL, found '{}'", shown(text));
  };
  for (const auto& [key, value] : metadata) {
    check_text(key);
    require(is_utf8(value), "[safetensors] expected metadata in UTF-8, found '{}'", shown(value));
  }
  // By hand, object for object: an ordered_json would compare each new name with all before it.
  std::string text = "{";
  const auto add = [&](std::string_view name, const nlohmann::ordered_json& value) {
    text += (text.size() > 1 ? "," : "") + nlohmann::json(name).dump() + ":" + value.dump();
  };
  if (!metadata.empty()) add(kMetadata, metadata);
  Layout layout;
  uint64_t end = 0;
  std::set<std::string_view> names = {kMetadata};
  for (const TensorHeader& tensor : tensors) {
    check_text(tensor.name);
    require(names.insert(tensor.name).second, "[safetensors] expected each name once, found '{}' twice",
            shown(tensor.name));
    element_type(tensor.type.name);
    const uint64_t size = byte_count(tensor), begin = end;
    require(!__builtin_add_overflow(end, size, &end),
            "[safetensors] expected tensors of less than 2^64 bytes");
    add(tensor.name, {{"dtype", tensor.type.name}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}});
    layout.sizes.emplace_back(tensor.name, size);
  }
  text += "}";
  // Spaces, so that the tensors begin at a multiple of the largest element.
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  require(text.size() <= kLongestHeader, "[safetensors] expected a header of at most {} bytes, found {}",
          kLongestHeader, text.size());
  const uint64_t length = text.size();
  layout.header.assign(reinterpret_cast<const char*>(&length), kLengthBytes);
  layout.header += text;
  return layout;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorHeader> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path.string()), writer_(path) {
  const Layout layout = layout_of(std::move(tensors), metadata);
  writer_.append(layout.header);
  uint64_t end = layout.header.size();
  for (const auto& [name, size] : layout.sizes) {
    places_[name] = {end, end + size};
    end += size;
  }
}

void SafetensorsWriter::append(std::string_view name, Bytes bytes) {
  const auto place = places_.find(name);
  require(place != places_.end(), "{}: expected a tensor of the header, found '{}'", file_, shown(name));
  auto& [next, end] = place->second;
  require(bytes.size() <= end - next, "{}: expected at most {} more bytes of tensor '{}', found {}", file_,
          end - next, shown(name), bytes.size());
  writer_.write_at(next, bytes);
  next += bytes.size();
}

void SafetensorsWriter::commit() {
  for (const auto& [name, place] : places_)
    require(place.next == place.end, "{}: expected all of tensor '{}', found {} bytes missing", file_,
            shown(name), place.end - place.next);
  writer_.commit();
}

}  // namespace evenkeel
