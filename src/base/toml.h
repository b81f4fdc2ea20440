// TOML 1.0 without dates and times: configuration files. A value remembers where it stands, so that whoever
// refuses it can say so. A table remembers which of its keys were asked for, so that a misspelt one is found.
// Every fault in a file is a DataError of the form FILE:LINE:COLUMN: expected ..., found ...
// In one point the standard leaves open this is strict: after [a.b.c], a dotted key below [a] adds nothing to
// b (write [a.b]).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace evenkeel {

class TomlValue;

// Keys in the order in which they came.
class TomlTable {
 public:
  TomlTable();
  TomlTable(const TomlTable& other);
  TomlTable(TomlTable&& other) noexcept;
  TomlTable& operator=(TomlTable other) noexcept;
  ~TomlTable();

  size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  // Counts as used. nullptr: there is none. One key, not a dotted path.
  const TomlValue* find(std::string_view key) const;
  // REQUIRES: the key is new.
  TomlValue& add(std::string key, TomlValue value);
  struct Entry;  // of key and value
  // In order; does not count as use.
  const std::vector<std::unique_ptr<const Entry>>& entries() const { return entries_; }

 private:
  friend class TomlParser;
  friend bool same(const TomlTable& a, const TomlTable& b);
  TomlValue* get(std::string_view key) const;  // does not count as use

  std::vector<std::unique_ptr<const Entry>> entries_;
  std::map<std::string_view, TomlValue*> by_key_;  // into entries_
};

class TomlValue {
 public:
  using Array = std::vector<TomlValue>;
  struct Place {
    std::shared_ptr<const std::string> file;
    int line = 0, column = 0;  // from 1; the column counts characters. 0: from no file
  };

  TomlValue(bool value) : value_(value) {}                      // NOLINT: a value is what it holds
  TomlValue(int value) : value_(int64_t{value}) {}              // NOLINT
  TomlValue(int64_t value) : value_(value) {}                   // NOLINT
  TomlValue(double value) : value_(value) {}                    // NOLINT
  TomlValue(std::string value) : value_(std::move(value)) {}    // NOLINT
  TomlValue(const char* value) : value_(std::string(value)) {}  // NOLINT
  TomlValue(Array value) : value_(std::move(value)) {}          // NOLINT
  TomlValue(TomlTable value) : value_(std::move(value)) {}      // NOLINT

  // The value as that type, else a DataError that says where it stands and what it is instead.
  bool boolean() const;
  int64_t integer() const;
  double number() const;  // an integer, too
  const std::string& string() const;
  const Array& array() const;
  const TomlTable& table() const;

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  // "the integer 3", "an array": for messages.
  std::string described() const;
  // A DataError about this value: FILE:LINE:COLUMN: expected {expected}, found {described()}.
  [[noreturn]] void refuse(std::string_view expected) const;

  const Place& place() const { return place_; }
  void set_place(Place place) { place_ = std::move(place); }
  bool used() const { return used_; }

 private:
  friend class TomlTable;
  friend class TomlParser;
  std::variant<bool, int64_t, double, std::string, Array, TomlTable> value_;
  Place place_;
  // How a file came by it, which decides what may still be added: to `{...}` and `[...]` nothing.
  enum class Origin : uint8_t { value, header_path, dotted_key, header } origin_ = Origin::value;
  bool used_ = false;  // found by name
};

struct TomlTable::Entry {
  const std::string key;
  TomlValue value;
};

// Refuses what is nested more than 64 deep. Time and memory grow as the text does.
TomlTable parse_toml(std::string_view text, std::string_view file);

// One for each key that nobody asked for, as "FILE:LINE:COLUMN: 'model.hesds'"; a table nobody asked for is
// named once, not key by key.
std::vector<std::string> unused_keys(const TomlTable& table);

// Parses to the same table: values, then tables as [headers].
std::string to_toml(const TomlTable& table);

// The same keys with the same values, in any order; every NaN is like any other.
bool same(const TomlTable& a, const TomlTable& b);

}  // namespace evenkeel
