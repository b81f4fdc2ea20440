#include "training/run_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/whole_file.h"
#include "records/run_records.h"

namespace evenkeel {
namespace {

// One list of the keys, walked by the reader and by the writer: they cannot disagree.
template <class Walker>
void walk(Walker& w, RunConfig& c) {
  w.table("model");
  w.key("layers", c.model.layers);
  w.key("heads", c.model.heads);
  w.key("width", c.model.width);
  w.key("context", c.model.context);
  w.key("vocabulary", c.model.vocabulary);
  w.key("bias", c.model.bias);
  w.key("norm_bias", c.model.norm_bias);
  w.key("tied_embeddings", c.model.tied_embeddings);
  w.key("qk_norm", c.model.qk_norm);
  w.key("gated_attention", c.model.gated_attention);
  w.key("softcap", c.model.softcap);
  w.key("qk_clip", c.model.qk_clip);
  w.key("tile_keys", c.model.tile_keys);
  w.key("precision", c.model.precision, std::array<std::string_view, 2>{"fp32", "bf16"});
  w.table("data");
  w.key("train", c.data);
  w.key("digest", c.data_digest);
  w.key("validation", c.validation);
  w.key("batches", c.batches);
  w.key("sequences", c.sequences);
  w.key("accumulate", c.accumulate);
  w.key("seed", c.seed);
  w.table("optimizer");
  w.key("kind", c.optimizer.kind, kOptimizerNames);
  w.key("beta1", c.optimizer.beta1);
  w.key("beta2", c.optimizer.beta2);
  w.key("epsilon", c.optimizer.epsilon);
  w.key("weight_decay", c.optimizer.weight_decay);
  w.key("momentum", c.optimizer.momentum);
  w.key("clip", c.optimizer.clip);
  w.table("schedule");
  w.key("course", c.schedule.course, kCourseNames);
  w.key("lr", c.schedule.peak);
  w.key("last_lr", c.schedule.floor);
  w.key("warmup", c.schedule.warmup);
  w.key("steps", c.schedule.steps);
  w.key("decay_share", c.schedule.decay_share);
  w.table("attention");
  w.key("plan", c.plan);
  w.changes("changes", c.changes);
  w.key("keel_ramp", c.keel_ramp);
  w.table("run");
  w.key("backend", c.backend, kBackendNames);
  w.key("checkpoint_every", c.checkpoint_every);
  w.key("checkpoints_kept", c.checkpoints_kept);
  w.key("keep_every", c.keep_every);
  w.key("validate_every", c.validate_every);
  w.key("validation_batches", c.validation_batches);
  w.key("facts_every", c.facts_every);
  w.key("probe_every", c.probe_every);
  w.key("guard", c.guard, kGuardModeNames);
  w.key("divergence", c.divergence);
  w.key("shard_optimizer", c.shard_optimizer);
}

class Reader {
 public:
  explicit Reader(const TomlTable& root) : root_(root) {}

  void table(std::string_view name) {
    const TomlValue* found = root_.find(name);
    table_ = found ? &found->table() : nullptr;
  }
  void key(std::string_view name, int64_t& to) {
    if (const TomlValue* v = find(name)) to = v->integer();
  }
  void key(std::string_view name, uint64_t& to) {
    if (const TomlValue* v = find(name)) {
      if (v->integer() < 0) v->refuse("an integer of 0 or more");
      to = static_cast<uint64_t>(v->integer());
    }
  }
  void key(std::string_view name, bool& to) {
    if (const TomlValue* v = find(name)) to = v->boolean();
  }
  void key(std::string_view name, double& to) {
    if (const TomlValue* v = find(name)) to = v->number();
  }
  void key(std::string_view name, float& to) {
    if (const TomlValue* v = find(name)) to = static_cast<float>(v->number());
  }
  void key(std::string_view name, std::string& to) {
    if (const TomlValue* v = find(name)) to = v->string();
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum& to, const Names& names) {
    const TomlValue* v = find(name);
    if (!v) return;
    for (size_t n = 0; n < std::size(names); ++n)
      if (v->string() == names[n]) {
        to = static_cast<Enum>(n);
        return;
      }
    v->refuse(fmt::format("one of {}", fmt::join(names, ", ")));
  }
  void changes(std::string_view name, std::vector<PlanChange>& to) {
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
  template <class T>
  void key(std::string_view name, const T& value) {
    if constexpr (std::is_same_v<T, uint64_t>)
      add(name, static_cast<int64_t>(value));
    else if constexpr (std::is_same_v<T, float>)  // the shortest text of the float, not of its double
      add(name, std::stod(fmt::format("{}", value)));
    else
      add(name, value);
  }
  template <class Enum, class Names>
  void key(std::string_view name, Enum value, const Names& names) {
    add(name, std::string(names[static_cast<size_t>(value)]));
  }
  void changes(std::string_view name, const std::vector<PlanChange>& changes) {
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

}  // namespace

namespace {

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

GuardMode parse_guard_mode(std::string_view text) {
  for (size_t n = 0; n < std::size(kGuardModeNames); ++n)
    if (text == kGuardModeNames[n]) return static_cast<GuardMode>(n);
  throw std::invalid_argument(
      fmt::format("guard '{}': expected one of {}", text, fmt::join(kGuardModeNames, ", ")));
}

void validate(const RunConfig& c) {
  validate(c.model);
  validate(c.optimizer);
  validate(c.schedule);
  require(!c.data.empty(), "[train] expected a path of tokens or text (--data), got none");
  require(c.schedule.steps > 0, "[train] expected at least one step, got {}", c.schedule.steps);
  require(c.sequences > 0 && c.accumulate > 0 && c.sequences % c.accumulate == 0,
          "[train] expected sequences a step in whole parts, got {} sequences in {} parts", c.sequences,
          c.accumulate);
  require(c.checkpoint_every >= 0 && c.keep_every >= 0 && c.validate_every >= 0 && c.facts_every >= 0,
          "[train] expected 0 (never) or more steps between checkpoints ({}), kept ones ({}), validations "
          "({}) and "
          "facts ({})",
          c.checkpoint_every, c.keep_every, c.validate_every, c.facts_every);
  require(c.probe_every >= 0, "[train] expected 0 (never) or more steps between probes, got {}",
          c.probe_every);
  require(c.checkpoints_kept >= 1, "[train] expected to keep at least one checkpoint, got {}",
          c.checkpoints_kept);
  require(c.validation_batches >= 1, "[train] expected at least one batch for validation, got {}",
          c.validation_batches);
  require(c.divergence >= 0,
          "[train] expected 0 (never) or more for the rise of the loss that ends a run, got {}",
          c.divergence);
  require(!c.shard_optimizer || c.optimizer.kind == OptimizerKind::adamw,
          "[train] shard_optimizer: expected adamw, got {}", name(c.optimizer.kind));
  require(c.model.qk_clip == 0 || c.facts_every == 1,
          "[train] qk_clip needs the scores of every step: expected facts_every = 1, got {}", c.facts_every);
  for (size_t n = 0; n < c.changes.size(); ++n)
    require(c.changes[n].step >= 0 && (n == 0 || c.changes[n].step >= c.changes[n - 1].step),
            "[train] expected changes of the plan in ascending order of steps from 0 on, got step {} as "
            "number {}",
            c.changes[n].step, n + 1);
  require(c.keel_ramp >= 0, "[train] expected 0 (at once) or more steps for keel's ramp, got {}",
          c.keel_ramp);
  ScopedPlan::parse(c.plan).check_scopes(c.model.layers, c.model.heads);
  for (const PlanChange& change : c.changes)
    ScopedPlan::parse(c.plan_at(change.step)).check_scopes(c.model.layers, c.model.heads);
}

void read_run_config(const TomlTable& table, RunConfig& config) {
  if (const TomlValue* model = table.find("model"))
    if (const TomlValue* preset = model->table().find("preset")) config.model = gpt2_preset(preset->string());
  if (const TomlValue* data = table.find("data"); data && data->table().find("train"))
    config.data_digest.clear();  // which is of what was named before
  Reader reader(table);
  walk(reader, config);
  const std::vector<std::string> unknown = unused_keys(table);
  require_data(unknown.empty(), "unknown key {}: expected one that `evenkeel train --help` names",
               fmt::join(unknown, ", "));
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

void write_config_of_run(const std::filesystem::path& folder, const RunConfig& config) {
  write_config_text(folder, to_toml(to_toml_table(config)));
}

}  // namespace evenkeel
