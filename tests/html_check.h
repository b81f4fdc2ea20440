// A small check of an HTML document: elements close in order, attributes are quoted and come once, ids come once,
// references lead somewhere, '<' and '&' in text are escaped. Stricter than HTML, so that a browser has nothing to guess.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace evenkeel {

struct Document {
  std::vector<std::string> faults;
  std::set<std::string> ids;
  std::string text;  // between tags
};

class DocumentCheck {
 public:
  explicit DocumentCheck(const std::string& html) : html_(html) {}

  Document run() {
    while (at_ < html_.size() && !torn_) {
      if (html_[at_] != '<')
        take_text();
      else if (html_.compare(at_, 2, "<!") == 0)
        at_ = html_.find('>', at_) + 1;
      else
        take_tag();
    }
    if (torn_) return doc_;
    for (const std::string& name : open_) doc_.faults.push_back("not closed: " + name);
    for (const std::string& id : references_)
      if (!doc_.ids.contains(id)) doc_.faults.push_back("no such id: " + id);
    return doc_;
  }

 private:
  static bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == ':'; }

  void fault(const std::string& what, size_t at) {
    if (doc_.faults.size() < 10)
      doc_.faults.push_back(fmt::format("{} near '{}'", what, html_.substr(at, 60)));
  }
  void check_text(std::string_view text, size_t at) {
    for (size_t n = 0; n < text.size(); ++n)
      if (text[n] == '&') {
        const size_t end = text.find(';', n);
        if (end == std::string_view::npos || end - n > 8) fault("a bare &", at + n);
      }
  }
  std::string take_name(size_t& n) const {
    std::string name;
    while (n < html_.size() && is_name(html_[n])) name += html_[n++];
    return name;
  }

  void take_text() {
    const size_t end = std::min(html_.find('<', at_), html_.size());
    check_text(std::string_view(html_).substr(at_, end - at_), at_);
    doc_.text += html_.substr(at_, end - at_);
    at_ = end;
  }

  void take_tag() {
    const bool closes = html_.compare(at_, 2, "</") == 0;
    size_t n = at_ + (closes ? 2 : 1);
    const std::string name = take_name(n);
    if (name.empty()) {
      fault("a bare <", at_);
      ++at_;
      return;
    }
    std::set<std::string> seen;
    bool self = false;
    while (n < html_.size() && html_[n] != '>' && !torn_) {
      if (std::isspace(static_cast<unsigned char>(html_[n])))
        ++n;
      else if (html_[n] == '/')
        self = true, ++n;
      else
        take_attribute(n, seen);
    }
    if (torn_) return;
    ++n;
    if (closes)
      close(name);
    else if (!self)
      open(name, n);
    at_ = n;
  }

  void take_attribute(size_t& n, std::set<std::string>& seen) {
    const std::string key = take_name(n);
    std::string value;
    if (key.empty()) {
      fault("no attribute", n);
      ++n;
      return;
    }
    if (n < html_.size() && html_[n] == '=') {
      if (html_[n + 1] != '"') fault("an attribute without quotes", at_);
      const size_t end = html_.find('"', n + 2);
      if (end == std::string::npos) {
        fault("no end of an attribute", at_);
        torn_ = true;
        return;
      }
      value = html_.substr(n + 2, end - n - 2);
      if (value.find('<') != std::string::npos) fault("< in an attribute", at_);
      check_text(value, n);
      n = end + 1;
    }
    if (!seen.insert(key).second) fault("an attribute twice", at_);
    check_attribute(key, value);
  }

  void check_attribute(const std::string& key, const std::string& value) {
    if (key == "id" && !doc_.ids.insert(value).second) fault("the id " + value + " twice", at_);
    if (key.starts_with("on")) fault("a handler in an attribute", at_);
    if (key == "src" || (key == "href" && !value.starts_with('#') && value != "data:,"))
      fault("something from elsewhere", at_);
    if (key == "href" && value.starts_with('#')) references_.push_back(value.substr(1));
    if (key == "aria-labelledby" || key == "aria-describedby") {
      std::istringstream words(value);
      for (std::string word; words >> word;) references_.push_back(word);
    }
  }

  void close(const std::string& name) {
    if (open_.empty() || open_.back() != name)
      fault(fmt::format("</{}> where </{}> was due", name, open_.empty() ? "nothing" : open_.back()), at_);
    else
      open_.pop_back();
  }

  // n: behind the tag; then behind what is text to a browser.
  void open(const std::string& name, size_t& n) {
    static const std::set<std::string> kVoid = {"meta", "br", "link", "img", "hr", "input"};
    if (kVoid.contains(name)) return;
    open_.push_back(name);
    if (name != "script" && name != "style") return;
    const size_t end = html_.find("</" + name + ">", n);
    if (end == std::string::npos) fault("no end of " + name, at_);
    n = end;
  }

  const std::string& html_;
  size_t at_ = 0;
  bool torn_ = false;  // an attribute never ends: nothing after it can be read
  Document doc_;
  std::vector<std::string> open_, references_;
};

inline Document check(const std::string& html) { return DocumentCheck(html).run(); }

}  // namespace evenkeel
