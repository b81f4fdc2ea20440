#include "training/run_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "base/whole_file.h"
#include "numerics/names.h"
#include "records/run_records.h"

namespace evenkeel {
namespace {

constexpr double kAny = -std::numeric_limits<double>::infinity();

// What is to be said about a key besides its name and its variable.
struct About {
  const char* help;
  const char *option = "", *placeholder = "";  // of the command line; no option: --set alone reaches the key
  double least = kAny;                         // of a number
  const char* alone = "";                      // what the option means without a value
  bool resumable = false;                      // may differ where a run is resumed
};

// One list of the keys, walked by the reader, the writer, the check, --help and the command line: they cannot disagree.
// Limits of the model, the optimiser and the learning rate are those of their own validate().
template <class Walker>
void walk_model(Walker& w, RunConfig& c) {
  w.table("model");
  w.preset("preset", c.model, {"sizes and precision of a known model", "--preset", "NAME"});
  w.key("weights", c.weights,
        {"start with the model in a folder of Hugging Face's transformers: its sizes and its weights",
         "--weights", "FOLDER"});
  w.key("layers", c.model.layers, {"blocks"});
  w.key("heads", c.model.heads, {"attention heads of a block"});
  w.key("key_heads", c.model.key_heads,
        {"key and value heads, each read by as many heads; 0: as many as heads"});
  w.key("head_size", c.model.head_features, {"features of a head; 0: the width over the heads"});
  w.key("width", c.model.width, {"features of the residual stream"});
  w.key("hidden", c.model.hidden, {"features within the MLP; 0: four times the width"});
  w.key("context", c.model.context, {"tokens of a sequence"});
  w.key("vocabulary", c.model.vocabulary, {"tokens that there are"});
  w.key("norm", c.model.norm, kNormNames, {"of the residual stream"});
  w.key("norm_epsilon", c.model.norm_epsilon, {"added to the mean square by RMS norms"});
  w.key("positions", c.model.positions, kPositionNames, {"how a token's place reaches attention"});
  w.key("rotary_base", c.model.rotary_base, {"pair p of D / 2 turns by base^(-2 p / D) a place"});
  w.key("mlp", c.model.mlp, kMlpNames, {"what lies between the MLP's linear layers"});
  w.key("bias", c.model.bias, {"linear layers have a bias"});
  w.key("norm_bias", c.model.norm_bias, {"LayerNorms have a bias"});
  w.key("tied_embeddings", c.model.tied_embeddings, {"the output layer is the token embedding"});
  w.key("qk_norm", c.model.qk_norm, {"q and k are normalised per head"});
  w.key("sinks", c.model.sinks, {"each head has one more score, learnt, that has no value"});
  w.key("gated_attention", c.model.gated_attention, {"the output of attention is gated"});
  w.key("softcap", c.model.softcap, {"scores become c tanh(S / c); 0: off"});
  w.key("qk_clip", c.model.qk_clip, {"largest score left to a head by scaling W_Q and W_K; 0: off"});
  w.key("tile_keys", c.model.tile_keys, {"keys between two roundings of pv and row_sum; 0: all"});
  w.key("precision", c.model.precision, std::array<std::string_view, 2>{"fp32", "bf16"},
        {"of the linear layers"});
}

template <class Walker>
void walk(Walker& w, RunConfig& c) {
  walk_model(w, c);
  w.table("data");
  w.key("train", c.data, {"token file, shards, text file or folder of text", "--data", "PATH"});
  w.key("digest", c.data_digest, {"of the tokens: others are refused; none: not checked, and recorded"});
  w.key("validation", c.validation,
        {"the same for validation; none: the validation files beside the data", "--validation", "PATH"});
  w.key("validation_digest", c.validation_digest, {"of the validation tokens, likewise"});
  w.key("batches", c.batches,
        {"another run's batches.bin: the same batches again; none: drawn by the seed", "--batches", "FILE"});
  w.key("sequences", c.sequences, {"sequences a step", "--sequences", "N", 1});
  w.key("accumulate", c.accumulate,
        {"parts in which a step is computed, by all ranks together", "--accumulate", "N", 1});
  w.key("seed", c.seed, {"of weights and batches", "--seed", "N"});
  w.table("optimizer");
  w.key("kind", c.optimizer.kind, kOptimizerNames, {"the optimiser", "--optimizer", "NAME"});
  w.key("beta1", c.optimizer.beta1, {"AdamW: decay of the mean gradient"});
  w.key("beta2", c.optimizer.beta2, {"AdamW: decay of the mean squared gradient"});
  w.key("epsilon", c.optimizer.epsilon, {"AdamW: added to the root of the mean square"});
  w.key("weight_decay", c.optimizer.weight_decay, {"of matrices: w -= lr weight_decay w"});
  w.key("momentum", c.optimizer.momentum, {"Muon's"});
  w.key("clip", c.optimizer.clip, {"largest norm of the whole gradient; 0: never clipped"});
  w.table("schedule");
  w.key("course", c.schedule.course, kCourseNames,
        {"of the learning rate after the warm-up", "--schedule", "COURSE"});
  w.key("lr", c.schedule.peak, {"largest learning rate", "--lr", "RATE"});
  w.key("last_lr", c.schedule.floor, {"where a falling course ends"});
  w.key("warmup", c.schedule.warmup, {"steps of the warm-up", "--warmup", "N"});
  w.key("steps", c.schedule.steps,
        {.help = "of the whole run", .option = "--steps", .placeholder = "N", .least = 1, .resumable = true});
  w.key("decay_share", c.schedule.decay_share, {"wsd: share of all steps in which the rate falls"});
  w.table("attention");
  w.key("plan", c.plan, {"precision plan, by layer and head if wanted", "--plan", "PLAN"});
  w.changes("changes", c.changes,
            {"clauses added to the plan from this step on: '3000 layer 1: stabiliser=zero_sum'", "--at",
             "'STEP CLAUSES'"});
  w.key("keel_ramp", c.keel_ramp,
        {"steps over which keel rises to what the plan says; 0: at once", "--keel-ramp", "N", 0});
  w.table("run");
  w.key("backend", c.backend, kBackendNames,
        {.help = "auto is the GPU, if there is one",
         .option = "--backend",
         .placeholder = "NAME",
         .resumable = true});
  w.key("trainer", c.trainer,
        {"in a run's folder: the program that trained it; none: evenkeel, which alone can resume it"});
  w.key("checkpoint_every", c.checkpoint_every,
        {"steps between checkpoints; 0: only at the end", "--checkpoint-every", "N", 0});
  w.key("checkpoints_kept", c.checkpoints_kept, {.help = "the newest so many", .least = 1});
  w.key("keep_every", c.keep_every,
        {.help = "checkpoints of every so many steps stay for good; 0: none", .least = 0});
  w.key("validate_every", c.validate_every,
        {"steps between validations; 0: never", "--validate-every", "N", 0});
  w.key("validation_batches", c.validation_batches, {.help = "batches of a validation", .least = 1});
  w.key("facts_every", c.facts_every,
        {"steps between records of scores by head; 0: never", "--facts-every", "N", 0});
  w.key("probe_every", c.probe_every,
        {"steps between full sets of probes; the cheap ones are then recorded every step; 0: none",
         "--probe-every", "N", 0});
  w.key("guard", c.guard, kGuardModeNames,
        {.help = "watch for drift; act: remedy the heads that drift, warn: only say so",
         .option = "--guard",
         .placeholder = "[=act|warn]",
         .alone = "act"});
  w.key("divergence", c.divergence,
        {.help = "a loss so far above its best (means of 20 steps) ends the run; 0: never", .least = 0});
  w.key("shard_optimizer", c.shard_optimizer,
        {"each rank holds only its slice of the optimiser's states (ZeRO-1; AdamW)", "--shard-optimizer"});
}

template <class T>
std::string expected_of(const About& about) {
  const std::string limit = about.least == kAny ? "" : fmt::format(" of {} or more", about.least);
  if constexpr (std::is_same_v<T, uint64_t>)
    return "a whole number of 0 or more";
  else if constexpr (std::is_same_v<T, int64_t>)
    return "a whole number" + limit;
  else if constexpr (std::is_same_v<T, bool>)
    return "true or false";
  else if constexpr (std::is_same_v<T, std::string>)
    return "text";
  else
    return "a number" + limit;
}
template <class Names>
std::string one_of(const Names& names) {
  return fmt::format("one of {}", fmt::join(names, ", "));
}
constexpr const char* kExpectedChange =
    "a step, a space and clauses of a plan, as in '3000 layer 1: stabiliser=zero_sum'";

class Reader {
 public:
  explicit Reader(const TomlTable& root) : root_(root) {}

  void table(std::string_view name) {
    const TomlValue* found = root_.find(name);
    table_ = found ? &found->table() : nullptr;
  }
  void preset(std::string_view name, ModelConfig& to, const About&) {
    if (const TomlValue* v = find(name)) to = model_preset(v->string());
  }
  void key(std::string_view name, int64_t& to, const About&) {
    if (const TomlValue* v = find(name)) to = v->integer();
  }
  void key(std::string_view name, uint64_t& to, const About& about) {
    if (const TomlValue* v = find(name)) {
      if (v->integer() < 0) v->refuse(expected_of<uint64_t>(about));
      to = static_cast<uint64_t>(v->integer());
    }
  }
  void key(std::string_view name, bool& to, const About&) {
    if (const TomlValue* v = find(name)) to = v->boolean();
  }
  void key(std::string_view name, double& to, const About&) {
    if (const TomlValue* v = find(name)) to = v->number();
  }
  void key(std::string_view name, float& to, const About&) {
    if (const TomlValue* v = find(name)) to = static_cast<float>(v->number());
  }
  void key(std::string_view name, std::string& to, const About&) {
    if (const TomlValue* v = find(name)) to = v->string();
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum& to, const Names& names, const About&) {
    const TomlValue* v = find(name);
    if (!v) return;
    const auto value = value_named<Enum>(v->string(), names);
    if (!value) v->refuse(one_of(names));
    to = *value;
  }
  void changes(std::string_view name, std::vector<PlanChange>& to, const About&) {
    const TomlValue* v = find(name);
    if (!v) return;
    to.clear();
    for (const TomlValue& entry : v->array()) {
      const TomlValue *step = entry.table().find("step"), *clauses = entry.table().find("plan");
      if (!step || !clauses) entry.refuse("a table with step and plan");
      to.push_back({step->integer(), clauses->string()});
    }
  }

 private:
  const TomlValue* find(std::string_view name) const { return table_ ? table_->find(name) : nullptr; }
  const TomlTable& root_;
  const TomlTable* table_ = nullptr;
};

class Writer {
 public:
  void table(std::string_view name) {
    finish_table();
    name_ = name;
  }
  void preset(std::string_view, const ModelConfig&, const About&) {}  // the keys below say it all
  template <class T>
  void key(std::string_view name, const T& value, const About&) {
    if constexpr (std::is_same_v<T, uint64_t>)
      add(name, static_cast<int64_t>(value));
    else if constexpr (std::is_same_v<T, float>)  // the shortest text of the float, not of its double
      add(name, std::stod(fmt::format("{}", value)));
    else
      add(name, value);
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum value, const Names& names, const About&) {
    add(name, std::string(names[static_cast<size_t>(value)]));
  }
  void changes(std::string_view name, const std::vector<PlanChange>& changes, const About&) {
    TomlValue::Array array;
    for (const PlanChange& change : changes) {
      TomlTable entry;
      entry.add("step", change.step);
      entry.add("plan", change.clauses);
      array.emplace_back(std::move(entry));
    }
    add(name, std::move(array));
  }
  TomlTable finish() {
    finish_table();
    return std::move(root_);
  }

 private:
  void add(std::string_view name, TomlValue value) { table_.add(std::string(name), std::move(value)); }
  void finish_table() {
    if (!name_.empty()) root_.add(name_, std::exchange(table_, TomlTable()));
  }
  TomlTable root_, table_;
  std::string name_;  // of the table at hand
};

// "run.keep_every" or, where it has an option, "schedule.lr (--lr)".
std::string named(std::string_view table, std::string_view name, const About& about) {
  return fmt::format("{}.{}{}", table, name,
                     about.option[0] ? fmt::format(" ({})", about.option) : std::string());
}

// Numbers below their least.
class Checker {
 public:
  void table(std::string_view name) { table_ = name; }
  void preset(std::string_view, const ModelConfig&, const About&) {}
  template <class T>
  void key(std::string_view name, const T& value, const About& about) {
    if constexpr (!std::is_same_v<T, std::string>)
      require(about.least == kAny || static_cast<double>(value) >= about.least,
              "[train] {}: expected {}, found {}", named(table_, name, about), expected_of<T>(about), value);
  }
  template <class Enum, class Names>
  void key(std::string_view, Enum, const Names&, const About&) {}
  void changes(std::string_view, const std::vector<PlanChange>&, const About&) {}

 private:
  std::string_view table_;
};

class Lister {
 public:
  void table(std::string_view name) { table_ = name; }
  void preset(std::string_view name, const ModelConfig&, const About& about) {
    add(name, about, one_of(kModelPresets), std::string(kDefaultPreset));
  }
  template <class T>
  void key(std::string_view name, const T& value, const About& about) {
    add(name, about, expected_of<T>(about), fmt::format("{}", value));
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum value, const Names& names, const About& about) {
    add(name, about, one_of(names), std::string(names[static_cast<size_t>(value)]));
  }
  void changes(std::string_view name, const std::vector<PlanChange>&, const About& about) {
    add(name, about, kExpectedChange, "");
    settings.back().repeats = true;
  }
  std::vector<Setting> settings;

 private:
  void add(std::string_view name, const About& about, std::string expected, std::string standard) {
    settings.push_back({.key = fmt::format("{}.{}", table_, name),
                        .option = about.option,
                        .placeholder = about.placeholder,
                        .alone = about.alone,
                        .help = about.help,
                        .expected = std::move(expected),
                        .standard = standard.empty() ? "none" : std::move(standard),
                        .resumable = about.resumable});
  }
  std::string_view table_;
};

// Text in quotes, without them. Escapes are not for the command line.
std::optional<std::string_view> unquoted(std::string_view text) {
  if (text.empty() || (text[0] != '"' && text[0] != '\'')) return text;
  if (text.size() < 2 || text.back() != text[0]) return {};
  const std::string_view inner = text.substr(1, text.size() - 2);
  if (inner.find(text[0]) != std::string_view::npos) return {};
  return inner;
}

template <class T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return {};
  return value;
}

// Sets the one key that is asked for from text.
class Setter {
 public:
  Setter(std::string_view key, std::string_view text) : wanted_(key), text_(text) {}
  bool found() const { return found_; }

  void table(std::string_view name) { table_ = name; }
  void preset(std::string_view name, ModelConfig& to, const About& about) {
    if (!is_wanted(name, one_of(kModelPresets), about)) return;
    const std::string_view text = plain_text();
    if (std::find(std::begin(kModelPresets), std::end(kModelPresets), text) == std::end(kModelPresets))
      refuse();
    to = model_preset(text);
  }
  template <class T>
  void key(std::string_view name, T& to, const About& about) {
    if (!is_wanted(name, expected_of<T>(about), about)) return;
    if constexpr (std::is_same_v<T, std::string>) {
      to = plain_text();
    } else if constexpr (std::is_same_v<T, bool>) {
      if (text_ != "true" && text_ != "false") refuse();
      to = text_ == "true";
    } else {
      const std::optional<T> value = parse_whole<T>(text_);
      if (!value || !std::isfinite(static_cast<double>(*value)) ||
          (about.least != kAny && static_cast<double>(*value) < about.least))
        refuse();
      to = *value;
    }
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum& to, const Names& names, const About& about) {
    if (!is_wanted(name, one_of(names), about)) return;
    const auto value = value_named<Enum>(plain_text(), names);
    if (!value) refuse();
    to = *value;
  }
  void changes(std::string_view name, std::vector<PlanChange>& to, const About& about) {
    if (!is_wanted(name, kExpectedChange, about)) return;
    const std::string_view text = plain_text();
    const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const size_t clauses = text.find_first_not_of(' ', digits);
    const std::optional<int64_t> step = parse_whole<int64_t>(text.substr(0, digits));
    if (!step || clauses == std::string_view::npos || clauses == digits) refuse();
    const auto later =
        std::find_if(to.begin(), to.end(), [&](const PlanChange& change) { return change.step > *step; });
    to.insert(later, {*step, std::string(text.substr(clauses))});
  }

 private:
  bool is_wanted(std::string_view name, std::string expected, const About& about) {
    if (fmt::format("{}.{}", table_, name) != wanted_) return false;
    found_ = true;
    expected_ = std::move(expected);
    shown_name_ = named(table_, name, about);
    if (text_.empty()) refuse();
    return true;
  }
  std::string_view plain_text() const {
    const auto inner = unquoted(text_);
    if (!inner) refuse();
    return *inner;
  }
  [[noreturn]] void refuse() const {
    throw std::invalid_argument(
        fmt::format("{}: expected {}, found {}", shown_name_, expected_,
                    text_.empty() ? "nothing" : fmt::format("'{}'", shown(text_, kShown))));
  }

  static constexpr size_t kShown = 80;
  const std::string_view wanted_, text_;
  std::string_view table_;
  std::string shown_name_, expected_;
  bool found_ = false;
};

// " (did you mean schedule.lr?)" where a known key is near; a key without its table is near, too.
std::string suggestion_for(std::string_view key) {
  std::vector<std::string_view> names;
  for (const Setting& setting : run_settings()) names.push_back(setting.key);
  const std::string_view last = key.substr(key.rfind('.') + 1);
  for (const std::string_view name : names)
    if (name.substr(name.find('.') + 1) == last) return fmt::format(" (did you mean {}?)", name);
  const std::string_view near = nearest_name(key, names);
  return near.empty() ? "" : fmt::format(" (did you mean {}?)", near);
}

// A head's keel over the steps: a straight line from where it was to where a plan wants it, and flat from there on.
struct KeelLine {
  float from = 0, to = 0;
  int64_t start = 0;

  float at(int64_t step, int64_t ramp) const {
    const double done = std::min(1.0, static_cast<double>(step - start + 1) / static_cast<double>(ramp));
    return done == 1 ? to : static_cast<float>(from + (static_cast<double>(to) - from) * done);
  }
};

// Clauses that put the heads' keels where they are at this step. One clause for all where all are alike.
std::string keel_clauses(const RunConfig& c, int64_t step) {
  std::vector<KeelLine> lines(static_cast<size_t>(c.model.layers * c.model.heads));  // (L, H)
  const auto follow = [&](const std::string& text, int64_t since) {
    const ScopedPlan plan = ScopedPlan::parse(text);
    for (size_t n = 0; n < lines.size(); ++n) {
      const auto heads = static_cast<size_t>(c.model.heads);
      const float keel = plan.at(static_cast<int>(n / heads), static_cast<int>(n % heads)).keel;
      if (keel != lines[n].to) lines[n] = {since == 0 ? 0 : lines[n].at(since - 1, c.keel_ramp), keel, since};
    }
  };
  std::string text = c.plan;
  follow(text, 0);
  for (const PlanChange& change : c.changes) {
    if (change.step > step) break;
    follow(text += "; " + change.clauses, change.step);
  }
  std::vector<float> keels;
  bool moving = false;
  for (const KeelLine& line : lines) {
    keels.push_back(line.at(step, c.keel_ramp));
    moving |= keels.back() != line.to;
  }
  if (!moving) return "";
  if (std::equal(keels.begin() + 1, keels.end(), keels.begin())) return fmt::format("; keel={}", keels[0]);
  std::string clauses;
  for (size_t n = 0; n < keels.size(); ++n)
    clauses += fmt::format("; layer {} head {}: keel={}", n / static_cast<size_t>(c.model.heads),
                           n % static_cast<size_t>(c.model.heads), keels[n]);
  return clauses;
}

}  // namespace

std::string RunConfig::plan_at(int64_t step) const {
  std::string text = plan;
  for (const PlanChange& change : changes)
    if (change.step <= step) text += "; " + change.clauses;
  return keel_ramp > 0 ? text + keel_clauses(*this, step) : text;
}

void validate(const RunConfig& c) {
  validate(c.model);
  validate(c.optimizer);
  validate(c.schedule);
  require(!c.data.empty(), "[train] expected a path of tokens or text (--data), got none");
  Checker checker;
  RunConfig copy = c;
  walk(checker, copy);
  require(
      c.sequences % c.accumulate == 0,
      "[train] data.sequences (--sequences): expected a multiple of the {} parts of a step (--accumulate), "
      "found {}",
      c.accumulate, c.sequences);
  require(!c.shard_optimizer || c.optimizer.kind == OptimizerKind::adamw,
          "[train] shard_optimizer: expected adamw, got {}", name(c.optimizer.kind));
  require(c.model.qk_clip == 0 || c.facts_every == 1,
          "[train] qk_clip needs the scores of every step: expected facts_every = 1, got {}", c.facts_every);
  for (size_t n = 0; n < c.changes.size(); ++n)
    require(c.changes[n].step >= 0 && (n == 0 || c.changes[n].step >= c.changes[n - 1].step),
            "[train] expected changes of the plan in ascending order of steps from 0 on, got step {} as "
            "number {}",
            c.changes[n].step, n + 1);
  ScopedPlan::parse(c.plan).check_scopes(c.model.layers, c.model.heads);
  for (const PlanChange& change : c.changes)
    ScopedPlan::parse(c.plan_at(change.step)).check_scopes(c.model.layers, c.model.heads);
}

const std::vector<Setting>& run_settings() {
  static const std::vector<Setting> settings = [] {
    Lister lister;
    RunConfig defaults;
    walk(lister, defaults);
    return std::move(lister.settings);
  }();
  return settings;
}

void set_run_setting(RunConfig& config, std::string_view key, std::string_view value) {
  // Digests are of what was named before.
  if (key == "data.train") config.data_digest.clear();
  if (key == "data.train" || key == "data.validation") config.validation_digest.clear();
  Setter setter(key, value);
  walk(setter, config);
  require(setter.found(), "unknown setting '{}'{}: expected one that `evenkeel train --help` lists",
          shown(key), suggestion_for(key));
}

void read_run_config(const TomlTable& table, RunConfig& config) {
  if (const TomlValue* data = table.find("data")) {  // digests are of what was named before
    const bool other = data->table().find("train");
    if (other) config.data_digest.clear();
    if (other || data->table().find("validation")) config.validation_digest.clear();
  }
  Reader reader(table);
  walk(reader, config);
  std::string unknown;
  for (const std::string& place : unused_keys(table)) {  // FILE:LINE:COLUMN: 'model.hesds'
    const size_t quote = place.find('\'', place.rfind(": ") + 1), end = place.rfind('\'');
    unknown += (unknown.empty() ? "" : ", ") + place;
    if (quote < end) unknown += suggestion_for(std::string_view(place).substr(quote + 1, end - quote - 1));
  }
  require_data(unknown.empty(), "unknown key {}: expected one that `evenkeel train --help` names", unknown);
}

void read_run_config(const std::filesystem::path& file, RunConfig& config) {
  constexpr size_t kLargest = 1 << 20;  // bytes
  read_run_config(parse_toml(read_regular_file(file, kLargest), file.string()), config);
}

TomlTable to_toml_table(const RunConfig& config) {
  Writer writer;
  RunConfig copy = config;
  walk(writer, copy);
  return writer.finish();
}

RunConfig config_of_run(const std::filesystem::path& folder) {
  RunConfig config;
  read_run_config(parse_toml(read_config_text(folder), record_path(folder, RecordFile::config).string()),
                  config);
  return config;
}

RunConfig config_of_own_run(const std::filesystem::path& folder) {
  const RunConfig config = config_of_run(folder);
  require_data(
      config.trainer.empty(),
      "{}: expected a run of `evenkeel train`, found one recorded by another trainer ({}), which has no "
      "checkpoints of ours: its own program goes on with it",
      folder.string(), shown(config.trainer));
  try {
    validate(config);
  } catch (const std::invalid_argument& problem) {
    throw DataError(fmt::format("{}: {}", record_path(folder, RecordFile::config).string(), problem.what()));
  }
  return config;
}

void write_config_of_run(const std::filesystem::path& folder, const RunConfig& config) {
  write_config_text(folder, to_toml(to_toml_table(config)));
}

}  // namespace evenkeel
