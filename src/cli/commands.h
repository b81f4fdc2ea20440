// The table of commands: what `evenkeel --help`, completion, the manual page and docs/reference.md list.
#pragma once

#include <cstdio>

#include "cli/options.h"

namespace evenkeel::cli {

struct Command {
  const char *name, *summary;
  int (*run)(int, char**);
  const char* parts = "";  // subcommands with options of their own, separated by blanks
};

inline constexpr Command kCommands[] = {
    {"demo", "the whole job on this machine: trains, finds the guilty rounding, writes the report", run_demo},
    {"train", "train a model with a precision plan per layer and head", run_train},
    {"isolate", "which layer, heads and rounding made a run fail: found and proved by replays", run_isolate},
    {"verdict", "what is wrong with a run, from its records and the replays made so far", run_verdict},
    {"report", "everything that is known of some runs, on one page", run_report},
    {"watch", "the report's page, live in the browser", run_watch},
    {"probe", "figures of every head at one step of a run, or in a capture", run_probe},
    {"capture", "one layer's attention at one step of a run, into a file", run_capture},
    {"indicators", "when each indicator raised an alarm, and how long before the loss moved", run_indicators},
    {"forecast", "which heads drift, and when the run is expected to fail", run_forecast},
    {"explain", "one operation, or one tensor-core sum, bit by bit", run_explain},
    {"conform", "judge attention by the sign of its errors, on hard inputs", run_conform},
    {"data", "text to tokens: prepare, synth, inspect", run_data, "prepare synth inspect"},
    {"sample", "text from a checkpoint", run_sample},
    {"export", "a checkpoint as a folder that Hugging Face's transformers load", run_export},
    {"bench", "speed as ratios: round, attention, train, probes", run_bench},
    {"info", "version, CPU features, which kernels will run and why", run_info},
    {"help", "this list, or the options of a command; also as a manual page", run_help},
    {"completion", "completion of commands and options for a shell", run_completion},
};

void print_usage(std::FILE* to);

}  // namespace evenkeel::cli
