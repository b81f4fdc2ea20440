#include "attention/precision_plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include "numerics/names.h"

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
  if (const auto value = value_named<Enum>(text, names)) return *value;
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

void apply_changes(PrecisionPlan& plan, std::string_view text);

const PrecisionPlan& named_plan(std::string_view plan_name) {
  // A row may begin with a row before it: read in their order.
  static std::array<PrecisionPlan, kPlanNames.size()> plans;
  static const bool read = [] {
    for (size_t n = 0; n < plans.size(); ++n) {
      std::string_view text = kNamedPlans[n].text;
      const size_t comma = text.find(',');
      for (size_t before = 0; before < n; ++before)
        if (text.substr(0, comma) == kPlanNames[before]) {
          plans[n] = plans[before];
          text = text.substr(comma + 1);
          break;
        }
      if (!text.empty()) apply_changes(plans[n], text);
    }
    return true;
  }();
  for (size_t n = 0; read && n < plans.size(); ++n)
    if (kPlanNames[n] == plan_name) return plans[n];
  throw std::invalid_argument("unknown plan '" + std::string(plan_name) + "': expected one of " +
                              list_of(kPlanNames) + ", or SITE=FORMAT, stabiliser=NAME, keel=Z");
}

// CHIP[/BLOCKS], fp32_sequential, or tensor_core for the default chip's.
void set_accumulate(PrecisionPlan& plan, std::string_view text) {
  plan.accumulate = Accumulate::tensor_core;
  plan.chip = kDefaultChip;
  plan.promote = 0;
  if (text == name(Accumulate::tensor_core)) return;
  if (text == name(Accumulate::fp32_sequential)) {
    plan.accumulate = Accumulate::fp32_sequential;
    return;
  }
  const size_t slash = text.find('/');
  bool known = false;
  for (const TensorCoreModel& model : kTensorCoreModels)
    if (model.chip == text.substr(0, slash)) {
      plan.chip = model.chip;
      known = true;
    }
  if (!known)
    throw std::invalid_argument("unknown accumulate '" + std::string(text) +
                                "': expected fp32_sequential, tensor_core or a chip of " +
                                tensor_core_chips() + ", as in h200 or h200/4");
  if (slash != std::string_view::npos)
    plan.promote =
        parse_number<int>("accumulate", text.substr(slash + 1), 1, 1 << 20,
                          "a whole number of blocks from 1 to 1048576 after the chip, as in h200/4");
}

std::string accumulate_text(const PrecisionPlan& plan) {
  if (plan.accumulate == Accumulate::fp32_sequential) return std::string(name(plan.accumulate));
  return std::string(plan.chip) + (plan.promote > 0 ? "/" + std::to_string(plan.promote) : "");
}

void check_shared_scale(Site site, const Rounding& r) {
  if (r.shared == SharedScale{}) return;
  if (!is_operand(site))
    throw std::invalid_argument(
        std::string(name(site)) + "=" + to_string(r) +
        ": expected a format without a shared scale: only operands of products have one (q, k, "
        "v, grad_output, their second readings, probs, probs_bwd, dscores)");
  if (is_made_by_tile(site) && std::max(r.shared.group, r.shared.outer) > ScaleGroup::tile)
    throw std::invalid_argument(std::string(name(site)) + "=" + to_string(r) +
                                ": expected a scale that a block, a row, a column or a tile shares: " +
                                std::string(name(site)) + " is made tile by tile");
}

void set_site(PrecisionPlan& plan, std::string_view item, std::string_view key, std::string_view value,
              std::array<bool, kSiteCount>& set_by_itself) {
  Site site;
  try {
    site = parse_site(key);
  } catch (const std::invalid_argument&) {
    throw std::invalid_argument(
        "unknown key '" + std::string(key) + "' in '" + std::string(item) + "': expected a site (" +
        list_of(kSiteNames) +
        ") or stabiliser, accumulate, keys, queries, keel, beta, cap, tie_tolerance, seed");
  }
  const Rounding rounding = parse_rounding(value);
  check_shared_scale(site, rounding);
  plan.at(site) = rounding;
  set_by_itself[static_cast<size_t>(site)] = true;
  for (const SecondReading& row : kSecondReadings)
    if (row.first == site && !set_by_itself[static_cast<size_t>(row.site)]) plan.at(row.site) = rounding;
}

// Applies `text` (a comma-separated list as in parse_plan) to the plan.
void apply_changes(PrecisionPlan& plan, std::string_view text) {
  std::array<bool, kSiteCount> set_by_itself{};
  for (std::string_view item : split(text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      // A name gives every site its format, has its own rule for keys if any, and leaves the rest as it is.
      const PrecisionPlan& named = named_plan(item);
      plan.rounding = named.rounding;
      if (named.keys != KeyRule::given) plan.keys = named.keys;
      set_by_itself = {};
      continue;
    }
    const std::string_view key = trim(item.substr(0, equals)), value = trim(item.substr(equals + 1));
    if (key == "stabiliser") {
      plan.stabiliser = parse_stabiliser(value);
    } else if (key == "accumulate") {
      set_accumulate(plan, value);
    } else if (key == "keys") {
      plan.keys = parse_name<KeyRule>(value, kKeyRuleNames, "rule for keys");
    } else if (key == "queries") {
      plan.queries = parse_name<QueryRule>(value, kQueryRuleNames, "rule for queries");
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
      set_site(plan, item, key, value, set_by_itself);
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
  // The named plan with the fewest changes.
  std::string best;
  int best_changes = kSiteCount + 2;
  for (std::string_view plan_name : kPlanNames) {
    const PrecisionPlan& base = named_plan(plan_name);
    std::string text(plan_name);
    int changes = 0;
    for (int i = 0; i < kSiteCount; ++i) {
      const Site site = static_cast<Site>(i), first = first_reading(site);
      // Setting the first reading sets the second too: what it would be then decides whether it must be written.
      const bool follows = first != site && !(plan.at(first) == base.at(first));
      if (plan.at(site) == (follows ? plan.at(first) : base.at(site))) continue;
      ++changes;
      text += "," + std::string(name(site)) + "=" + to_string(plan.at(site));
    }
    if (plan.keys != base.keys) {
      ++changes;
      text += ",keys=" + std::string(name(plan.keys));
    }
    if (changes < best_changes) {
      best = text;
      best_changes = changes;
    }
  }
  const PrecisionPlan fallback;
  if (plan.queries != fallback.queries) best += ",queries=" + std::string(name(plan.queries));
  if (plan.stabiliser != fallback.stabiliser) best += ",stabiliser=" + std::string(name(plan.stabiliser));
  if (plan.accumulate != fallback.accumulate) best += ",accumulate=" + accumulate_text(plan);
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
