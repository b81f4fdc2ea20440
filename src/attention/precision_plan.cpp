#include "attention/precision_plan.h"

#include <charconv>
#include <cmath>
#include <stdexcept>

namespace evenkeel {
namespace {

template <size_t Count>
std::string list_of(const std::array<std::string_view, Count>& names) {
  std::string text;
  for (std::string_view known : names) text += (text.empty() ? "" : ", ") + std::string(known);
  return text;
}

template <class Enum, size_t Count>
Enum parse_name(std::string_view text, const std::array<std::string_view, Count>& names, const char* kind) {
  for (size_t i = 0; i < Count; ++i)
    if (names[i] == text) return static_cast<Enum>(i);
  throw std::invalid_argument("unknown " + std::string(kind) + " '" + std::string(text) +
                              "': expected one of " + list_of(names));
}

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t start = 0;;) {
    const size_t end = text.find(separator, start);
    parts.push_back(trim(text.substr(start, end == std::string_view::npos ? end : end - start)));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

template <class T>
T parse_number(std::string_view key, std::string_view text, T low, T high, const char* expected) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high))
    throw std::invalid_argument(std::string(key) + "=" + std::string(text) + ": expected " + expected);
  return value;
}

std::string shortest(float value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

PrecisionPlan named_plan(std::string_view plan_name) {
  PrecisionPlan plan;
  const auto set = [&plan](std::initializer_list<Site> sites, const Rounding& rounding) {
    for (Site site : sites) plan.at(site) = rounding;
  };
  const Rounding bf16{kBf16}, e4m3{kE4m3, RoundingMode::nearest_even, /*saturate=*/true};
  const Rounding e4m3_probs{kE4m3, RoundingMode::nearest_even, /*saturate=*/true, /*scale_exponent=*/8};
  if (plan_name == "fp32") return plan;
  set({Site::probs, Site::output, Site::output_for_delta, Site::probs_bwd, Site::dscores, Site::dq, Site::dk,
       Site::dv},
      bf16);
  if (plan_name == "bf16_all")
    set({Site::scores, Site::shifted, Site::row_sum, Site::pv, Site::dprobs}, bf16);
  if (plan_name == "fp8") {
    set({Site::q, Site::k, Site::v}, e4m3);
    set({Site::probs}, e4m3_probs);
    set({Site::grad_output}, bf16);
  }
  return plan;
}

// Applies `text` (a comma-separated list as in parse_plan) to the plan.
void apply_changes(PrecisionPlan& plan, std::string_view text) {
  bool output_for_delta_set = false;
  for (std::string_view item : split(text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      bool known = false;
      for (std::string_view plan_name : kPlanNames) known |= item == plan_name;
      if (!known)
        throw std::invalid_argument("unknown plan '" + std::string(item) + "': expected one of " +
                                    list_of(kPlanNames) + ", or SITE=FORMAT, stabiliser=NAME, keel=Z");
      // A name gives every site its format and leaves the other keys as they are.
      plan.rounding = named_plan(item).rounding;
      output_for_delta_set = false;
      continue;
    }
    const std::string_view key = trim(item.substr(0, equals)), value = trim(item.substr(equals + 1));
    if (key == "stabiliser") {
      plan.stabiliser = parse_stabiliser(value);
    } else if (key == "accumulate") {
      plan.accumulate = parse_name<Accumulate>(value, kAccumulateNames, "accumulate");
    } else if (key == "keel") {
      plan.keel = parse_number<float>(key, value, 0, 1e6f, "a number from 0 to 1e6");
    } else if (key == "beta") {
      plan.beta = parse_number<float>(key, value, 1, 1e3f, "a number from 1 to 1000");
    } else if (key == "cap") {
      plan.cap = parse_number<float>(key, value, 0.01f, 80, "a number from 0.01 to 80 (nats)");
    } else if (key == "tie_tolerance") {
      plan.tie_tolerance = parse_number<float>(key, value, 0, 1e3f, "a number from 0 to 1000");
    } else if (key == "seed") {
      plan.seed = parse_number<uint64_t>(key, value, 0, UINT64_MAX, "a whole number from 0 to 2^64 - 1");
    } else {
      Site site;
      try {
        site = parse_site(key);
      } catch (const std::invalid_argument&) {
        throw std::invalid_argument("unknown key '" + std::string(key) + "' in '" + std::string(item) +
                                    "': expected a site (" + list_of(kSiteNames) +
                                    ") or stabiliser, accumulate, keel, beta, cap, tie_tolerance, seed");
      }
      plan.at(site) = parse_rounding(value);
      output_for_delta_set |= site == Site::output_for_delta;
      if (site == Site::output && !output_for_delta_set) plan.at(Site::output_for_delta) = plan.at(site);
    }
  }
}

std::vector<std::pair<int, int>> parse_ranges(std::string_view text, std::string_view scope) {
  std::vector<std::pair<int, int>> ranges;
  constexpr int kMost = 1 << 20;
  for (std::string_view item : split(text, ',')) {
    const auto number = [&](std::string_view digits) {
      int value = -1;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
      if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || value < 0 ||
          value > kMost)
        throw std::invalid_argument("bad scope '" + std::string(scope) +
                                    "': expected numbers from 0 and ranges, as in layer 1 head 0,2-4");
      return value;
    };
    const size_t dash = item.find('-');
    const int low = number(trim(item.substr(0, dash)));
    const int high = dash == std::string_view::npos ? low : number(trim(item.substr(dash + 1)));
    if (high < low)
      throw std::invalid_argument("bad range '" + std::string(item) + "' in scope '" + std::string(scope) +
                                  "': expected the smaller number first");
    ranges.emplace_back(low, high);
  }
  return ranges;
}

bool contains(const std::vector<std::pair<int, int>>& ranges, int value) {
  if (ranges.empty()) return true;
  for (auto [low, high] : ranges)
    if (value >= low && value <= high) return true;
  return false;
}

}  // namespace

Site parse_site(std::string_view text) { return parse_name<Site>(text, kSiteNames, "site"); }
Stabiliser parse_stabiliser(std::string_view text) {
  return parse_name<Stabiliser>(text, kStabiliserNames, "stabiliser");
}

PrecisionPlan parse_plan(std::string_view text) {
  PrecisionPlan plan;
  apply_changes(plan, text);
  return plan;
}

std::string to_string(const PrecisionPlan& plan) {
  // The named plan with the fewest sites to change.
  std::string best;
  int best_changes = kSiteCount + 1;
  for (std::string_view plan_name : kPlanNames) {
    const PrecisionPlan base = named_plan(plan_name);
    std::string text(plan_name);
    int changes = 0;
    for (int i = 0; i < kSiteCount; ++i) {
      const Site site = static_cast<Site>(i);
      // Setting output sets output_for_delta too: what it would be then decides whether it must be written.
      const bool follows =
          site == Site::output_for_delta && !(plan.at(Site::output) == base.at(Site::output));
      if (plan.at(site) == (follows ? plan.at(Site::output) : base.at(site))) continue;
      ++changes;
      text += "," + std::string(name(site)) + "=" + to_string(plan.at(site));
    }
    if (changes < best_changes) {
      best = text;
      best_changes = changes;
    }
  }
  const PrecisionPlan fallback;
  if (plan.stabiliser != fallback.stabiliser) best += ",stabiliser=" + std::string(name(plan.stabiliser));
  if (plan.accumulate != fallback.accumulate) best += ",accumulate=" + std::string(name(plan.accumulate));
  if (plan.keel != fallback.keel) best += ",keel=" + shortest(plan.keel);
  if (plan.beta != fallback.beta) best += ",beta=" + shortest(plan.beta);
  if (plan.cap != fallback.cap) best += ",cap=" + shortest(plan.cap);
  if (plan.tie_tolerance != fallback.tie_tolerance) best += ",tie_tolerance=" + shortest(plan.tie_tolerance);
  if (plan.seed != fallback.seed) best += ",seed=" + std::to_string(plan.seed);
  return best;
}

ScopedPlan ScopedPlan::parse(std::string_view text) {
  ScopedPlan result;
  for (std::string_view clause : split(text, ';')) {
    const size_t colon = clause.find(':');
    Clause parsed;
    std::string_view changes = clause;
    if (colon != std::string_view::npos) {
      const std::string_view scope = trim(clause.substr(0, colon));
      changes = trim(clause.substr(colon + 1));
      // `layer LIST` then `head LIST`, each at most once.
      std::string_view rest = scope;
      const size_t head_at = rest.find("head");
      std::string_view layers = trim(rest.substr(0, head_at));
      if (!layers.empty()) {
        if (layers.substr(0, 5) != "layer")
          throw std::invalid_argument("bad scope '" + std::string(scope) +
                                      "': expected 'layer LIST', 'head LIST' or 'layer LIST head LIST'");
        parsed.layers = parse_ranges(trim(layers.substr(5)), scope);
      }
      if (head_at != std::string_view::npos)
        parsed.heads = parse_ranges(trim(rest.substr(head_at + 4)), scope);
      if (parsed.layers.empty() && parsed.heads.empty())
        throw std::invalid_argument("empty scope in '" + std::string(clause) +
                                    "': expected 'layer LIST', 'head LIST' or both before the ':'");
    }
    PrecisionPlan check;
    apply_changes(check, changes);  // an error shows now, not at the layer it is meant for
    parsed.changes = std::string(changes);
    if (parsed.layers.empty() && parsed.heads.empty() && result.clauses_.empty())
      apply_changes(result.base_, changes);
    else
      result.clauses_.push_back(std::move(parsed));
  }
  return result;
}

void ScopedPlan::check_scopes(int64_t layers, int64_t heads) const {
  const auto check = [](const char* what, const std::vector<std::pair<int, int>>& ranges, int64_t count) {
    for (auto [low, high] : ranges)
      if (high >= count)
        throw std::invalid_argument("plan for " + std::string(what) + " " + std::to_string(high) +
                                    ": expected numbers from 0 to " + std::to_string(count - 1) +
                                    ", as the model has " + std::to_string(count));
  };
  for (const Clause& clause : clauses_) {
    check("layer", clause.layers, layers);
    check("head", clause.heads, heads);
  }
}

PrecisionPlan ScopedPlan::at(int layer, int head) const {
  PrecisionPlan plan = base_;
  for (const Clause& clause : clauses_)
    if (contains(clause.layers, layer) && contains(clause.heads, head)) apply_changes(plan, clause.changes);
  return plan;
}

}  // namespace evenkeel
