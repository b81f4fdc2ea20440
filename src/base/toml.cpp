#include "base/toml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <tuple>

#include "base/error.h"
#include "base/text.h"

namespace evenkeel {

TomlTable::TomlTable() = default;
TomlTable::TomlTable(const TomlTable& other) {
  for (const auto& entry : other.entries_) add(entry->key, entry->value);
}
TomlTable::TomlTable(TomlTable&& other) noexcept = default;
TomlTable& TomlTable::operator=(TomlTable other) noexcept {
  entries_.swap(other.entries_);
  by_key_.swap(other.by_key_);
  return *this;
}
TomlTable::~TomlTable() = default;

TomlValue* TomlTable::get(std::string_view key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

const TomlValue* TomlTable::find(std::string_view key) const {
  TomlValue* value = get(key);
  if (value != nullptr) value->used_ = true;
  return value;
}

TomlValue& TomlTable::add(std::string key, TomlValue value) {
  auto entry = std::unique_ptr<Entry>(new Entry{std::move(key), std::move(value)});
  TomlValue* const added = &entry->value;
  require(by_key_.emplace(entry->key, added).second, "[toml] expected each key once, found '{}' twice",
          shown(entry->key));
  entries_.push_back(std::move(entry));
  return *added;
}

std::string TomlValue::described() const {
  if (const auto* value = get_if<bool>()) return *value ? "true" : "false";
  if (const auto* value = get_if<int64_t>()) return fmt::format("the integer {}", *value);
  if (const auto* value = get_if<double>()) return fmt::format("the number {}", *value);
  if (const auto* value = get_if<std::string>()) return fmt::format("the string \"{}\"", shown(*value));
  return get_if<Array>() ? "an array" : "a table";
}

void TomlValue::refuse(std::string_view expected) const {
  const std::string where =
      place_.file ? fmt::format("{}:{}:{}: ", *place_.file, place_.line, place_.column) : "";
  throw DataError(fmt::format("{}expected {}, found {}", where, expected, described()));
}

bool TomlValue::boolean() const {
  if (const auto* value = get_if<bool>()) return *value;
  refuse("true or false");
}
int64_t TomlValue::integer() const {
  if (const auto* value = get_if<int64_t>()) return *value;
  refuse("an integer");
}
double TomlValue::number() const {
  if (const auto* value = get_if<int64_t>()) return static_cast<double>(*value);
  if (const auto* value = get_if<double>()) return *value;
  refuse("a number");
}
const std::string& TomlValue::string() const {
  if (const auto* value = get_if<std::string>()) return *value;
  refuse("a string");
}
const TomlValue::Array& TomlValue::array() const {
  if (const auto* value = get_if<Array>()) return *value;
  refuse("an array");
}
const TomlTable& TomlValue::table() const {
  if (const auto* value = get_if<TomlTable>()) return *value;
  refuse("a table");
}

namespace {

constexpr int kDeepest = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_bare(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
}
bool is_forbidden(char c) { return (c >= 0 && c < ' ' && c != '\t') || c == 0x7F; }  // control characters

// The digits with the underscores between them taken out; nothing if one stands elsewhere.
std::optional<std::string> without_underscores(std::string_view digits, bool (*is_of_base)(char)) {
  std::string plain;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (digits[i] != '_') {
      plain += digits[i];
    } else if (i == 0 || i + 1 == digits.size() || !is_of_base(digits[i - 1]) || !is_of_base(digits[i + 1])) {
      return {};
    }
  }
  return plain;
}

}  // namespace

class TomlParser {
 public:
  TomlParser(std::string_view text, std::string_view file)
      : text_(text), file_(std::make_shared<const std::string>(file)) {}

  TomlTable parse() {
    const size_t not_utf8 = find_not_utf8(text_);
    if (not_utf8 != std::string_view::npos) {
      count_lines(not_utf8);
      fail_at(not_utf8, "text in UTF-8",
              fmt::format("the byte 0x{:02x}", static_cast<uint8_t>(text_[not_utf8])));
    }
    skip("\xEF\xBB\xBF");  // some editors mark UTF-8 so
    TomlTable root;
    TomlTable* table = &root;
    for (skip_blank_lines(); !at_end(); skip_blank_lines()) {
      if (peek() == '[')
        table = parse_header(root);
      else
        parse_entry(*table);
      end_line();
    }
    return root;
  }

 private:
  struct Key {
    std::string name;
    TomlValue::Place place;
  };

  // --- Text ---

  bool at_end() const { return position_ == text_.size(); }
  char peek(size_t ahead = 0) const {  // NUL at the end, which is no character of TOML
    return position_ + ahead < text_.size() ? text_[position_ + ahead] : '\0';
  }
  bool skip(std::string_view word) {
    if (!text_.substr(position_).starts_with(word)) return false;
    position_ += word.size();
    return true;
  }
  void skip_blanks() {
    while (peek() == ' ' || peek() == '\t') ++position_;
  }
  bool skip_newline() {
    const bool found = skip("\n") || skip("\r\n");
    if (found) start_line(position_);
    return found;
  }
  void skip_comment() {
    if (!skip("#")) return;
    while (!at_end() && !is_forbidden(peek())) ++position_;
    if (!at_end() && peek() != '\n' && !text_.substr(position_).starts_with("\r\n"))
      fail("a comment without control characters");
  }
  void skip_blank_lines() {
    do {
      skip_blanks();
      skip_comment();
    } while (skip_newline());
  }
  void end_line() {
    skip_blanks();
    skip_comment();
    if (!at_end() && !skip_newline()) fail("the end of the line");
  }
  void start_line(size_t position) {
    ++line_;
    known_position_ = position;
    known_column_ = 1;
  }
  void count_lines(size_t end) {
    for (size_t i = 0; i < end; ++i)
      if (text_[i] == '\n') start_line(i + 1);
  }

  // REQUIRES: a position on this line.
  TomlValue::Place place_of(size_t position) const {
    const auto starts_in = [this](size_t begin, size_t end) {  // characters, by their first bytes
      const std::string_view text = text_.substr(begin, end - begin);
      return static_cast<int>(
          std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
    };
    if (position >= known_position_) {
      known_column_ += starts_in(known_position_, position);
    } else {
      known_column_ -= starts_in(position, known_position_);
    }
    known_position_ = position;
    return {file_, line_, known_column_};
  }

  [[noreturn]] void fail_at(const TomlValue::Place& place, std::string_view expected,
                            std::string_view found) const {
    throw DataError(
        fmt::format("{}:{}:{}: expected {}, found {}", *file_, place.line, place.column, expected, found));
  }
  [[noreturn]] void fail_at(size_t position, std::string_view expected, std::string_view found) const {
    fail_at(place_of(position), expected, found);
  }
  [[noreturn]] void fail(std::string_view expected) const {
    const char c = peek();
    fail_at(position_, expected,
            at_end()                                      ? "the end of the file"
            : c == '\n' || (c == '\r' && peek(1) == '\n') ? "the end of the line"
            : is_forbidden(c) ? fmt::format("the control character 0x{:02x}", static_cast<uint8_t>(c))
                              : fmt::format("'{}'", shown(line_from(position_))));
  }
  // A word or so, for messages.
  std::string_view line_from(size_t position) const {
    const std::string_view rest = text_.substr(position);
    return rest.substr(0, std::max<size_t>(1, std::min(rest.find_first_of(" \t\r\n,]}#="), rest.size())));
  }

  // --- Keys and tables ---

  Key parse_simple_key() {
    Key key{"", place_of(position_)};
    if (peek() == '"' || peek() == '\'') {
      if (text_.substr(position_, 3) == "\"\"\"" || text_.substr(position_, 3) == "'''")
        fail("a key on one line");
      key.name = parse_string();
    } else {
      while (is_bare(peek())) key.name += text_[position_++];
      if (key.name.empty()) fail("a key");
    }
    return key;
  }
  std::vector<Key> parse_key() {
    std::vector<Key> keys;
    do {
      skip_blanks();
      keys.push_back(parse_simple_key());
      if (keys.size() >= kDeepest)
        fail_at(keys.back().place, fmt::format("fewer than {} parts of a key", kDeepest), "more");
      skip_blanks();
    } while (skip("."));
    return keys;
  }

  using Origin = TomlValue::Origin;

  TomlTable& add_table(TomlTable& parent, const Key& key, Origin origin) {
    TomlValue& value = parent.add(key.name, TomlTable());
    value.place_ = key.place;
    value.origin_ = origin;
    return std::get<TomlTable>(value.value_);
  }

  [[noreturn]] void fail_taken(const Key& key, std::string_view expected, const TomlValue& old) const {
    fail_at(
        key.place, expected,
        fmt::format("'{}', which is {} since line {}", shown(key.name), old.described(), old.place().line));
  }

  // [a.b] or [[a.b]]: the table that the lines below it fill.
  TomlTable* parse_header(TomlTable& root) {
    const bool is_array = skip("[[");
    if (!is_array) skip("[");
    const std::vector<Key> keys = parse_key();
    if (!skip(is_array ? "]]" : "]")) fail(is_array ? "']]'" : "']'");
    depth_ = static_cast<int>(keys.size());
    TomlTable* table = &root;
    for (const Key& key : std::span(keys).first(keys.size() - 1)) {
      TomlValue* old = table->get(key.name);
      if (old == nullptr) {
        table = &add_table(*table, key, Origin::header_path);
        continue;
      }
      auto* array = std::get_if<TomlValue::Array>(&old->value_);
      if (array != nullptr && old->origin_ == Origin::header) old = &array->back();
      table = std::get_if<TomlTable>(&old->value_);
      if (table == nullptr || old->origin_ == Origin::value) fail_taken(key, "a table that can grow", *old);
    }
    const Key& key = keys.back();
    TomlValue* old = table->get(key.name);
    if (is_array) return &append_table(*table, key, old);
    if (old == nullptr) return &add_table(*table, key, Origin::header);
    if (old->origin_ != Origin::header_path) fail_taken(key, "a new table", *old);
    old->origin_ = Origin::header;
    old->place_ = key.place;
    return &std::get<TomlTable>(old->value_);
  }

  TomlTable& append_table(TomlTable& parent, const Key& key, TomlValue* old) {
    if (old == nullptr) {
      old = &parent.add(key.name, TomlValue::Array());
      old->place_ = key.place;
      old->origin_ = Origin::header;
    }
    auto* array = std::get_if<TomlValue::Array>(&old->value_);
    if (array == nullptr || old->origin_ != Origin::header) fail_taken(key, "an array of tables", *old);
    TomlValue& value = array->emplace_back(TomlTable());
    value.place_ = key.place;
    value.origin_ = Origin::header;
    return std::get<TomlTable>(value.value_);
  }

  // key = value, or a.b.key = value.
  void parse_entry(TomlTable& in) {
    const std::vector<Key> keys = parse_key();
    if (!skip("=")) fail("'=' and a value");
    TomlTable* table = &in;
    for (const Key& key : std::span(keys).first(keys.size() - 1)) {
      TomlValue* old = table->get(key.name);
      if (old != nullptr && old->origin_ != Origin::dotted_key) fail_taken(key, "a new key", *old);
      table = old ? &std::get<TomlTable>(old->value_) : &add_table(*table, key, Origin::dotted_key);
    }
    const Key& key = keys.back();
    if (const TomlValue* old = table->get(key.name)) fail_taken(key, "a new key", *old);
    skip_blanks();
    const int depth = depth_;
    depth_ += static_cast<int>(keys.size()) - 1;
    table->add(key.name, parse_value());
    depth_ = depth;
  }

  // --- Values ---

  TomlValue parse_value() {
    const TomlValue::Place place = place_of(position_);
    if (++depth_ > kDeepest) fail_at(place, fmt::format("nesting of at most {}", kDeepest), "more");
    TomlValue value = parse_bare_value();
    --depth_;
    value.place_ = place;
    return value;
  }

  TomlValue parse_bare_value() {
    const char c = peek();
    if (c == '"' || c == '\'') return parse_string();
    if (c == '[') return parse_array();
    if (c == '{') return parse_inline_table();
    if (c == 't' || c == 'f' || c == 'i' || c == 'n' || c == '+' || c == '-' || is_digit(c))
      return parse_word();
    fail("a value (a string, a number, true, false, an array or a table)");
  }

  // true, false and every kind of number.
  TomlValue parse_word() {
    const size_t start = position_;
    while (is_bare(peek()) || peek() == '.' || peek() == '+' || peek() == ':') ++position_;
    const std::string_view word = text_.substr(start, position_ - start);
    if (word == "true") return true;
    if (word == "false") return false;
    const bool is_signed = word.starts_with('+') || word.starts_with('-');
    const bool is_negative = word.starts_with('-');
    const std::string_view number = word.substr(is_signed ? 1 : 0);
    if (number == "inf" || number == "nan") {
      const double value = number == "inf" ? std::numeric_limits<double>::infinity()
                                           : std::numeric_limits<double>::quiet_NaN();
      return is_negative ? -value : value;
    }
    const auto refuse = [&](std::string_view expected) {
      fail_at(start, expected, fmt::format("'{}'", shown(word)));
    };
    const std::string_view year = number.substr(0, 4);
    if ((number.size() > 4 && number[4] == '-' && std::all_of(year.begin(), year.end(), is_digit)) ||
        number.find(':') != std::string_view::npos)
      refuse("a number (dates and times are not read)");

    if (number.size() > 1 && number[0] == '0' && !is_signed)
      for (const auto& [letter, base, is_of_base] :
           {std::tuple{
                'x', 16,
                +[](char d) { return is_digit(d) || (d >= 'a' && d <= 'f') || (d >= 'A' && d <= 'F'); }},
            std::tuple{'o', 8, +[](char d) { return d >= '0' && d <= '7'; }},
            std::tuple{'b', 2, +[](char d) { return d == '0' || d == '1'; }}})
        if (number[1] == letter) {
          const auto digits = without_underscores(number.substr(2), is_of_base);
          if (!digits || digits->empty() || !std::all_of(digits->begin(), digits->end(), is_of_base))
            refuse(fmt::format("an integer of base {}", base));
          return integer_of(*digits, base, refuse);
        }

    const auto plain = without_underscores(number, is_digit);
    // digits [. digits] [e [sign] digits], no needless zero in front
    size_t i = 0;
    const auto skip_digits = [&] {
      const size_t first = i;
      while (plain && i < plain->size() && is_digit((*plain)[i])) ++i;
      return i > first;
    };
    bool is_good = plain && skip_digits() && (i == 1 || (*plain)[0] != '0'), is_float = false;
    if (is_good && i < plain->size() && (*plain)[i] == '.') {
      ++i;
      is_float = true;
      is_good = skip_digits();
    }
    if (is_good && i < plain->size() && ((*plain)[i] == 'e' || (*plain)[i] == 'E')) {
      ++i;
      is_float = true;
      if (i < plain->size() && ((*plain)[i] == '+' || (*plain)[i] == '-')) ++i;
      is_good = skip_digits();
    }
    if (!is_good || i != plain->size()) refuse("a value (a string, a number, true or false)");
    const std::string text = (is_negative ? "-" : "") + *plain;
    if (!is_float) return integer_of(text, 10, refuse);
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) refuse("a number that a double holds");
    return value;
  }

  template <class Refuse>
  TomlValue integer_of(const std::string& digits, int base, const Refuse& refuse) const {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (error != std::errc() || end != digits.data() + digits.size()) refuse("an integer of 64 bits");
    return value;
  }

  TomlValue parse_array() {
    skip("[");
    TomlValue::Array array;
    for (;;) {
      skip_blank_lines();
      if (skip("]")) return array;
      array.push_back(parse_value());
      skip_blank_lines();
      if (peek() != ']' && !skip(",")) fail("',' or ']'");
    }
  }

  TomlValue parse_inline_table() {
    skip("{");
    TomlTable table;
    skip_blanks();
    if (!skip("}"))
      for (;;) {
        skip_blanks();
        parse_entry(table);
        skip_blanks();
        if (skip("}")) break;
        if (!skip(",")) fail("',' or '}'");
      }
    return table;
  }

  std::string parse_string() {
    const char quote = peek();
    const bool is_long = text_.substr(position_, 3) == std::string(3, quote);
    const std::string_view end = text_.substr(position_, is_long ? 3 : 1);
    const TomlValue::Place start = place_of(position_);
    position_ += end.size();
    if (is_long) skip_newline();  // the one right behind the quotes is no part of it
    std::string value;
    while (!skip(end)) {
      if (at_end() || (!is_long && (peek() == '\n' || text_.substr(position_).starts_with("\r\n"))))
        fail(fmt::format("{} to end the string of {}:{}", end, start.line, start.column));
      if (peek() == '\\' && quote == '"') {
        parse_escape(value, is_long);
      } else if (is_long && skip_newline()) {
        value += '\n';  // the same on every system
      } else {
        if (is_forbidden(peek())) fail("a string without control characters (escape them)");
        value += text_[position_++];
      }
    }
    // Up to two quotes may stand before the three that end it.
    for (int more = 0; is_long && more < 2 && peek() == quote; ++more) value += text_[position_++];
    return value;
  }

  void parse_escape(std::string& value, bool is_long) {
    const size_t start = position_++;
    static constexpr std::pair<char, char> kShort[] = {{'b', '\b'}, {'t', '\t'}, {'n', '\n'}, {'f', '\f'},
                                                       {'r', '\r'}, {'"', '"'},  {'\\', '\\'}};
    for (const auto& [letter, meaning] : kShort)
      if (peek() == letter) {
        ++position_;
        value += meaning;
        return;
      }
    if (peek() == 'u' || peek() == 'U') {
      const size_t digits = text_[position_++] == 'u' ? 4 : 8;
      const std::string_view hex = text_.substr(position_, digits);
      uint32_t point = 0;
      const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), point, 16);
      if (hex.size() != digits || error != std::errc() || end != hex.data() + digits || point > 0x10FFFF ||
          (point >= 0xD800 && point <= 0xDFFF))
        fail_at(start, fmt::format("a character by {} hexadecimal digits", digits),
                fmt::format("'{}'", shown(text_.substr(start, digits + 2))));
      position_ += digits;
      append_utf8(value, point);
      return;
    }
    if (is_long) {  // at the end of a line: it and all blanks up to the next word are left out
      skip_blanks();
      if (skip_newline()) {
        do skip_blanks();
        while (skip_newline());
        return;
      }
    }
    fail_at(start, "an escape (\\b \\t \\n \\f \\r \\\" \\\\ \\uXXXX \\UXXXXXXXX)",
            fmt::format("'{}'", shown(text_.substr(start, 2))));
  }

  std::string_view text_;
  std::shared_ptr<const std::string> file_;
  size_t position_ = 0;
  int line_ = 1;
  int depth_ = 0;  // tables and arrays around what is being read
  // The last column worked out, so that a long line is not counted from its start for each value.
  mutable size_t known_position_ = 0;
  mutable int known_column_ = 1;
};

TomlTable parse_toml(std::string_view text, std::string_view file) { return TomlParser(text, file).parse(); }

namespace {

std::string quoted(std::string_view text) {
  require(is_utf8(text), "[toml] expected text in UTF-8, found '{}'", shown(text));
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (c == '\n')
      out += "\\n";
    else if (is_forbidden(c))
      out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
    else
      out += c;
  }
  return out + '"';
}

std::string key_of(const std::string& key) {
  return !key.empty() && std::all_of(key.begin(), key.end(), is_bare) ? key : quoted(key);
}

bool is_table_array(const TomlValue& value) {
  const auto* array = value.get_if<TomlValue::Array>();
  return array && !array->empty() &&
         std::all_of(array->begin(), array->end(), [](const TomlValue& v) { return v.get_if<TomlTable>(); });
}

void write_value(std::string& out, const TomlValue& value) {
  if (const auto* truth = value.get_if<bool>()) {
    out += *truth ? "true" : "false";
  } else if (const auto* integer = value.get_if<int64_t>()) {
    out += fmt::format("{}", *integer);
  } else if (const auto* number = value.get_if<double>()) {
    const std::string text = fmt::format("{}", *number);  // the shortest that reads back the same
    out += text;
    if (text.find_first_of(".en") == std::string::npos) out += ".0";  // 3.0 is no integer
  } else if (const auto* string = value.get_if<std::string>()) {
    out += quoted(*string);
  } else if (const auto* array = value.get_if<TomlValue::Array>()) {
    const char* separator = "";
    out += "[";
    for (const TomlValue& element : *array) {
      out += std::exchange(separator, ", ");
      write_value(out, element);
    }
    out += "]";
  } else {
    const char* separator = " ";
    out += "{";
    for (const auto& entry : value.table().entries()) {
      out += std::exchange(separator, ", ") + key_of(entry->key) + " = ";
      write_value(out, entry->value);
    }
    out += " }";
  }
}

void write_table(std::string& out, const TomlTable& table, const std::string& path) {
  for (const auto& entry : table.entries()) {
    if (entry->value.get_if<TomlTable>() || is_table_array(entry->value)) continue;
    out += key_of(entry->key) + " = ";
    write_value(out, entry->value);
    out += "\n";
  }
  for (const auto& entry : table.entries()) {
    const std::string name = path + (path.empty() ? "" : ".") + key_of(entry->key);
    const auto write_headed = [&](const TomlTable& inner, const char* open, const char* close) {
      out += (out.empty() ? "" : "\n") + (open + name) + close + "\n";
      write_table(out, inner, name);
    };
    if (const auto* inner = entry->value.get_if<TomlTable>()) {
      write_headed(*inner, "[", "]");
    } else if (is_table_array(entry->value)) {
      for (const TomlValue& element : entry->value.array()) write_headed(element.table(), "[[", "]]");
    }
  }
}

void add_unused(std::vector<std::string>& found, const TomlTable& table, const std::string& path) {
  for (const auto& entry : table.entries()) {
    const TomlValue& value = entry->value;
    const std::string name = path + (path.empty() ? "" : ".") + shown(entry->key);
    if (!value.used()) {
      const auto& [file, line, column] = value.place();
      found.push_back(file ? fmt::format("{}:{}:{}: '{}'", *file, line, column, name)
                           : fmt::format("'{}'", name));
    } else if (const auto* inner = value.get_if<TomlTable>()) {
      add_unused(found, *inner, name);
    } else if (const auto* array = value.get_if<TomlValue::Array>()) {
      for (const TomlValue& element : *array)
        if (const auto* in_array = element.get_if<TomlTable>()) add_unused(found, *in_array, name);
    }
  }
}

bool same_value(const TomlValue& a, const TomlValue& b) {
  if (const auto* x = a.get_if<double>()) {
    const auto* y = b.get_if<double>();
    return y && (*x == *y ? std::signbit(*x) == std::signbit(*y) : std::isnan(*x) && std::isnan(*y));
  }
  if (const auto* x = a.get_if<TomlValue::Array>()) {
    const auto* y = b.get_if<TomlValue::Array>();
    return y && std::equal(x->begin(), x->end(), y->begin(), y->end(), same_value);
  }
  if (const auto* x = a.get_if<TomlTable>()) return b.get_if<TomlTable>() && same(*x, b.table());
  const auto equal = [&]<class T>(const T* x) {
    const T* y = b.get_if<T>();
    return x && y && *x == *y;
  };
  return equal(a.get_if<bool>()) || equal(a.get_if<int64_t>()) || equal(a.get_if<std::string>());
}

}  // namespace

std::vector<std::string> unused_keys(const TomlTable& table) {
  std::vector<std::string> found;
  add_unused(found, table, "");
  return found;
}

std::string to_toml(const TomlTable& table) {
  std::string out;
  write_table(out, table, "");
  return out;
}

bool same(const TomlTable& a, const TomlTable& b) {
  const auto is_in_b = [&](const auto& entry) {
    const TomlValue* value = b.get(entry->key);
    return value != nullptr && same_value(entry->value, *value);
  };
  return a.size() == b.size() && std::all_of(a.entries().begin(), a.entries().end(), is_in_b);
}

}  // namespace evenkeel
