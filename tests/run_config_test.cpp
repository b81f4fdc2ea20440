// The one list of a run's settings: what config.toml, the command line and --help make of it.
#include "training/run_config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "base/error.h"

namespace evenkeel {
namespace {

std::string toml_of(const RunConfig& config) { return to_toml(to_toml_table(config)); }

// What set_run_setting says against a value; "" where it takes it.
std::string refusal(const std::string& key, const std::string& value) {
  RunConfig config;
  try {
    set_run_setting(config, key, value);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(RunConfig, every_key_of_the_file_is_a_setting_with_help_and_default) {
  std::set<std::string> listed, options, written;
  for (const Setting& setting : run_settings()) {
    EXPECT_TRUE(listed.insert(setting.key).second) << setting.key;
    EXPECT_FALSE(setting.help.empty()) << setting.key;
    EXPECT_FALSE(setting.expected.empty()) << setting.key;
    EXPECT_FALSE(setting.standard.empty()) << setting.key;
    if (!setting.option.empty()) {
      EXPECT_TRUE(setting.option.starts_with("--"));
      EXPECT_TRUE(options.insert(setting.option).second) << setting.option;
    }
  }
  const TomlTable table = to_toml_table(RunConfig());
  for (const auto& section : table.entries())
    for (const auto& entry : section->value.table().entries())
      written.insert(fmt::format("{}.{}", section->key, entry->key));
  written.insert("model.preset");  // read, and written as what it stands for
  EXPECT_EQ(listed, written);
}

TEST(RunConfig, a_default_that_is_set_changes_nothing) {
  const std::string before = toml_of(RunConfig());
  for (const Setting& setting : run_settings()) {
    if (setting.standard == "none") continue;
    RunConfig config;
    set_run_setting(config, setting.key, setting.standard);
    EXPECT_EQ(toml_of(config), before) << setting.key << " = " << setting.standard;
  }
}

TEST(RunConfig, values_are_taken_as_a_person_types_them) {
  RunConfig config;
  const std::pair<const char*, const char*> given[] = {{"model.preset", "micro"},
                                                       {"schedule.lr", "6e-3"},
                                                       {"optimizer.kind", "\"muon\""},
                                                       {"data.train", "my text.txt"},
                                                       {"data.batches", "'a b.bin'"},
                                                       {"model.qk_norm", "true"},
                                                       {"data.seed", "18446744073709551615"},
                                                       {"run.guard", "warn"},
                                                       {"attention.changes", "30 layer 1: keel=1e-3"},
                                                       {"attention.changes", "20 keel=1e-4"}};
  for (const auto& [key, value] : given) set_run_setting(config, key, value);
  EXPECT_EQ(config.model.layers, 3);
  EXPECT_TRUE(config.model.qk_norm);
  EXPECT_EQ(config.schedule.peak, 6e-3);
  EXPECT_EQ(config.optimizer.kind, OptimizerKind::muon);
  EXPECT_EQ(config.data, "my text.txt");
  EXPECT_EQ(config.batches, "a b.bin");
  EXPECT_EQ(config.seed, ~uint64_t{0});
  EXPECT_EQ(config.guard, GuardMode::warn);
  EXPECT_EQ(config.changes, (std::vector<PlanChange>{{20, "keel=1e-4"}, {30, "layer 1: keel=1e-3"}}));
  set_run_setting(config, "data.batches", "''");  // said, not left out
  EXPECT_EQ(config.batches, "");
}

TEST(RunConfig, a_bad_value_names_its_key_and_what_was_expected) {
  const struct {
    const char *key, *value, *expected;
  } table[] = {
      {"schedule.lr", "fast", "schedule.lr (--lr): expected a number, found 'fast'"},
      {"schedule.lr", "1e-3x", "a number"},
      {"schedule.lr", "nan", "a number"},
      {"schedule.lr", "inf", "a number"},
      {"schedule.lr", "0x10", "a number"},
      {"schedule.lr", " 1", "a number"},
      {"optimizer.beta1", "1e60", "optimizer.beta1: expected a number"},
      {"schedule.steps", "ten", "schedule.steps (--steps): expected a whole number of 1 or more"},
      {"schedule.steps", "0", "1 or more"},
      {"schedule.steps", "1.5", "a whole number"},
      {"schedule.steps", "9223372036854775808", "a whole number"},
      {"data.seed", "-1", "0 or more"},
      {"run.checkpoint_every", "-1", "0 or more"},
      {"run.checkpoints_kept", "0", "1 or more"},
      {"run.divergence", "-0.5", "0 or more"},
      {"model.bias", "yes", "true or false"},
      {"model.precision", "fp8", "one of fp32, bf16"},
      {"model.preset", "huge", "one of micro, nano"},
      {"optimizer.kind", "adam", "one of adamw, muon"},
      {"run.backend", "gpu", "one of auto, cpu, cuda"},
      {"run.guard", "maybe", "one of off, warn, act"},
      {"data.train", "'half", "text"},
      {"attention.changes", "layer 1: keel=1", "a step, a space and clauses"},
      {"attention.changes", "30", "a step, a space and clauses"},
      {"attention.changes", "30keel=1", "a step, a space and clauses"},
      {"attention.changes", "99999999999999999999 keel=1", "a step, a space and clauses"},
  };
  for (const auto& [key, value, expected] : table) {
    const std::string said = refusal(key, value);
    EXPECT_TRUE(has(said, key)) << key << " = " << value << ": " << said;
    EXPECT_TRUE(has(said, expected)) << key << " = " << value << ": " << said;
  }
  for (const Setting& setting : run_settings()) {
    const std::string said = refusal(setting.key, "");
    EXPECT_TRUE(has(said, setting.key) && has(said, "found nothing")) << setting.key << ": " << said;
  }
}

TEST(RunConfig, a_value_cannot_set_another_key) {
  for (const Setting& setting : run_settings())
    for (const char* value : {"1e-3\nmodel.layers = 7", "1\n[model]\nlayers = 7",
                              "a\"\nmodel.layers = 7\nx = \"", "true # \nmodel.layers = 7"}) {
      if (setting.key == "model.layers") continue;
      RunConfig config;
      try {
        set_run_setting(config, setting.key, value);
      } catch (const std::invalid_argument&) {
        continue;
      }
      EXPECT_EQ(config.model.layers, RunConfig().model.layers) << setting.key;
      // What was taken is text, and stays one value in the file.
      RunConfig back;
      read_run_config(parse_toml(toml_of(config), "config.toml"), back);
      EXPECT_EQ(toml_of(back), toml_of(config)) << setting.key;
    }
}

TEST(RunConfig, misspelt_keys_are_met_with_the_nearest) {
  EXPECT_TRUE(has(refusal("schedule.lrr", "1"), "did you mean schedule.lr?"));
  EXPECT_TRUE(has(refusal("model.hesds", "1"), "did you mean model.heads?"));
  EXPECT_TRUE(has(refusal("lr", "1"), "did you mean schedule.lr?"));
  EXPECT_TRUE(has(refusal("attention.plam", "1"), "did you mean attention.plan?"));
  EXPECT_FALSE(has(refusal("nonsense", "1"), "did you mean"));
  EXPECT_TRUE(has(refusal("nonsense", "1"), "unknown setting 'nonsense'"));
  RunConfig config;
  try {
    read_run_config(parse_toml("[model]\nhesds = 3\n", "x.toml"), config);
    ADD_FAILURE() << "expected a refusal";
  } catch (const DataError& error) {
    EXPECT_TRUE(has(error.what(), "'model.hesds' (did you mean model.heads?)")) << error.what();
  }
}

TEST(RunConfig, numbers_below_their_least_are_refused_wherever_they_come_from) {
  const auto said = [](auto change) -> std::string {
    RunConfig config;
    config.data = "x";
    change(config);
    try {
      validate(config);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(said([](RunConfig&) {}), "");
  EXPECT_TRUE(has(said([](RunConfig& c) { c.schedule.steps = 0; }), "schedule.steps (--steps): expected"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.sequences = 0; }), "data.sequences"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.accumulate = -1; }), "data.accumulate"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.accumulate = 3; }), "a multiple of the 3 parts"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.keep_every = -1; }), "run.keep_every"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.divergence = -1; }), "run.divergence"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.schedule.peak = 0; }), "lr: expected"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.optimizer.beta2 = 1; }), "beta2: expected"));
  EXPECT_TRUE(has(said([](RunConfig& c) { c.model.layers = 0; }), "layers"));
}

}  // namespace
}  // namespace evenkeel
