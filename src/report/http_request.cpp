#include "report/http_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/text.h"

namespace evenkeel {
namespace {

constexpr std::string_view kEndOfLine = "\r\n", kEndOfHead = "\r\n\r\n";

struct Refusal {
  int status;
  std::string why;
};

template <class... Args>
void demand(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) throw Refusal{400, fmt::format(message, std::forward<Args>(args)...)};
}

bool is_token(std::string_view text) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           kOthers.find(c) != std::string_view::npos;
  });
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t";
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

std::optional<int> hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return {};
}

std::string decoded_path(std::string_view target) {
  demand(target.starts_with('/'), "expected a path that begins with '/', found '{}'", shown(target));
  const std::string_view raw = target.substr(0, target.find('?'));
  std::string path;
  for (size_t n = 0; n < raw.size(); ++n) {
    char c = raw[n];
    if (c == '%') {
      const auto high = n + 2 < raw.size() ? hex_digit(raw[n + 1]) : std::nullopt,
                 low = n + 2 < raw.size() ? hex_digit(raw[n + 2]) : std::nullopt;
      demand(high && low, "expected two hexadecimal digits behind '%', found '{}'", shown(raw.substr(n, 3)));
      c = static_cast<char>(*high * 16 + *low);
      demand(c != '/', "expected '/' as itself, found it as %2f");
      n += 2;
    }
    demand(!is_control(c) && c != '\\',
           "expected a path without control characters and backslashes, found '{}'", shown(raw));
    path += c;
  }
  demand(is_utf8(path), "expected a path in UTF-8, found '{}'", shown(raw));
  for (size_t begin = 1; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view segment = std::string_view(path).substr(begin, end - begin);
    demand(segment != "." && segment != ".." && (!segment.empty() || end == path.size()),
           "expected a path without '.', '..' and empty segments, found '{}'", shown(path));
    begin = end + 1;
  }
  return path;
}

// "localhost:80" and "[::1]:80" without the port.
std::string host_of(std::string_view value) {
  const size_t bracket = value.starts_with('[') ? value.find(']') : 0;
  demand(bracket != std::string_view::npos && !value.empty() &&
             std::none_of(value.begin(), value.end(),
                          [](char c) { return c == ' ' || is_control(c) || c == '/'; }),
         "expected a host, found '{}'", shown(value));
  return lower(value.substr(0, value.find(':', bracket)));
}

HttpRequest parse_head(std::string_view head) {  // with the end of its last line
  HttpRequest request;
  const auto next_line = [&] {
    const size_t end = head.find(kEndOfLine);
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(end + kEndOfLine.size());
    demand(std::none_of(line.begin(), line.end(), [](char c) { return is_control(c) && c != '\t'; }),
           "expected lines that end in CR LF, without other control characters, found '{}'", shown(line));
    return line;
  };

  const std::string_view line = next_line();
  const size_t first = line.find(' '), last = line.rfind(' ');
  demand(first != std::string_view::npos && last > first, "expected METHOD PATH HTTP/1.1, found '{}'",
         shown(line));
  const std::string_view target = line.substr(first + 1, last - first - 1), version = line.substr(last + 1);
  request.method = line.substr(0, first);
  demand(is_token(request.method) && target.find_first_of(" \t#") == std::string_view::npos,
         "expected METHOD PATH HTTP/1.1, found '{}'", shown(line));
  demand(version.starts_with("HTTP/"), "expected HTTP/1.1, found '{}'", shown(version));
  if (version != "HTTP/1.1" && version != "HTTP/1.0")
    throw Refusal{505, fmt::format("expected HTTP/1.1 or HTTP/1.0, found '{}'", shown(version))};
  request.path = decoded_path(target);
  request.keep_alive = version == "HTTP/1.1";

  while (!head.empty()) {
    const std::string_view field = next_line();
    const size_t colon = field.find(':');
    demand(colon != std::string_view::npos && is_token(field.substr(0, colon)),
           "expected NAME: VALUE, found '{}'", shown(field));
    const std::string name = lower(field.substr(0, colon));
    const std::string_view value = trimmed(field.substr(colon + 1));
    if (name == "host") {
      demand(request.host.empty(), "expected one Host, found two");
      request.host = host_of(value);
    } else if (name == "connection") {
      const std::string wish = lower(value);
      if (wish.find("close") != std::string::npos)
        request.keep_alive = false;
      else if (wish.find("keep-alive") != std::string::npos)
        request.keep_alive = true;
    } else if (name == "if-none-match") {
      request.if_none_match = value;
    } else {
      demand(name != "transfer-encoding" && (name != "content-length" || value == "0"),
             "expected a request without a body, found {}: {}", name, shown(value));
    }
  }
  demand(version == "HTTP/1.0" || !request.host.empty(), "expected a Host, found none");
  return request;
}

}  // namespace

HttpParse parse_http_request(std::string_view bytes, size_t longest_head) {
  HttpParse parse;
  const std::string_view allowed = bytes.substr(0, longest_head);
  const size_t end = allowed.find(kEndOfHead);
  try {
    if (end == std::string_view::npos) {
      // What can no longer become a request is refused at once: a client of another protocol may wait for ever.
      const size_t blank = allowed.find(' ');
      demand(blank == std::string_view::npos ? allowed.empty() || is_token(allowed)
                                             : is_token(allowed.substr(0, blank)),
             "expected METHOD PATH HTTP/1.1, found '{}'", shown(allowed));
      if (bytes.size() >= longest_head)
        throw Refusal{
            431, fmt::format("expected at most {} bytes before the empty line, found more", longest_head)};
      return parse;
    }
    parse.request = parse_head(allowed.substr(0, end + kEndOfLine.size()));
    parse.taken = end + kEndOfHead.size();
    parse.status = 200;
  } catch (const Refusal& refusal) {
    parse.status = refusal.status;
    parse.why = refusal.why;
  }
  return parse;
}

}  // namespace evenkeel
