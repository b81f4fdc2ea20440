// A test's own folder, with some text to train on, gone when the test ends.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "training/run_config.h"

namespace evenkeel {

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    static int count = 0;
    folder = std::filesystem::temp_directory_path() / fmt::format("evenkeel-test-{}-{}", getpid(), count++);
    std::filesystem::create_directories(folder);
    std::ofstream text(folder / "text.txt");
    for (int n = 0; n < 400; ++n)
      text << "the " << (n % 7 == 0 ? "keel" : "sail") << " is " << n % 10 << ".\n";
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  // One layer, two heads, a dozen steps: the least that has everything.
  RunConfig tiny() const {
    RunConfig c;
    c.model = model_preset("micro");
    c.model.layers = 1;
    c.model.heads = 2;
    c.model.width = 16;
    c.model.context = 12;
    c.data = (folder / "text.txt").string();
    c.sequences = 4;
    c.plan = "fp32";
    c.schedule.peak = 1e-2;
    c.schedule.steps = 12;
    c.checkpoint_every = 4;
    c.facts_every = 3;
    return c;
  }

  std::filesystem::path folder;
};

}  // namespace evenkeel
