// `evenkeel capture`: one layer's attention at one step of a run, into a file.
#include "diagnosis/capture.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/threads.h"
#include "cli/options.h"
#include "cli/replay_progress.h"
#include "diagnosis/capture_run.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int64_t> parse_heads(const std::string& text) {
  std::vector<int64_t> heads;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int64_t head = 0;
    const auto [last, error] = std::from_chars(text.data() + begin, text.data() + end, head);
    require(error == std::errc() && last == text.data() + end && head >= 0 &&
                (heads.empty() || heads.back() < head),
            "--heads '{}': expected numbers in ascending order, as in 0,3", text);
    heads.push_back(head);
    begin = end + 1;
  }
  return heads;
}

}  // namespace

int run_capture(int argc, char** argv) {
  std::vector<std::string> targets;
  std::string out, heads, backend;
  CaptureRequest request;
  request.layer = 0;
  request.sequences = 1;
  int64_t threads = 0;
  bool json = false;
  Options options(
      "capture RUN@STEP --layer L [--heads 0,3] -o FILE [options]",
      "Freezes what one layer's attention read at one step of a run: q, k, v, dO, x and the weights, in one\n"
      "safetensors file for `evenkeel probe`. The step is replayed from the nearest checkpoint. Captures of\n"
      "PyTorch models: python/capture_torch.py.",
      "capture runs/a@300 --layer 2 --heads 0,3 -o layer2.safetensors");
  options.words("RUN@STEP", targets, 1, 1);
  options.value("--layer", "L", "from 0 on", request.layer, 0, 4095);
  options.value("--heads", "LIST", "from 0 on, as in 0,3 (default: all)", heads);
  options.value("--sequences", "N", "the step's first N sequences", request.sequences, 1, 1 << 20);
  options.value("--rows", "N", "of each the first N rows; 0: all", request.rows, 0, 1 << 20);
  options.value("-o", "FILE", "where it goes", out);
  options.value("--backend", "NAME", "replay on cpu or cuda (default: where the run ran)", backend);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  if (threads > 0) set_thread_count(static_cast<int>(threads));
  require(!out.empty(), "expected -o FILE, got none");
  const auto at = parse_run_step(targets[0]);
  require(at.has_value(), "'{}': expected RUN@STEP, as in runs/a@300", targets[0]);
  request.heads = parse_heads(heads);
  if (!backend.empty()) request.backend = parse_backend(backend);
  ReplayProgress line;
  request.progress = [&](int64_t done, int64_t all) { line.show(done, all); };
  const Capture capture = capture_run(at->run, at->step, request).at(0);
  write_capture(out, capture);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(out));
  if (json)
    fmt::print("{}\n", Json{{"file", out},
                            {"bytes", bytes},
                            {"step", capture.step},
                            {"layer", capture.layer},
                            {"heads", capture.heads},
                            {"loss", capture.loss}}
                           .dump(2));
  else
    fmt::print("{}: layer {}, {} heads, {} sequences of {} rows at step {} (loss {:.4f}), {:.1f} KB\n", out,
               capture.layer, capture.heads.size(), capture.q.shape()[0], capture.q.shape()[2], capture.step,
               capture.loss, static_cast<double>(bytes) * 1e-3);
  return 0;
}

}  // namespace evenkeel::cli
