// Decoding in `evenkeel bench attention --gpu --forms`: one query row for each head against many keys. It is bound by reading K and V
// once, so what is printed is their bytes by the time of the forward pass, beside PyTorch's best (python/bench_decoding.py).
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/attention_on_device.h"
#include "cli/bench.h"
#include "cli/python_script.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlan = "flash2,stabiliser=wide_output";

struct DecodingShape {
  int64_t B, H, G, T, N, D;
  double bytes() const { return 2.0 * 2 * static_cast<double>(B * G * N * D); }  // of K and V in 16 bits
};
constexpr DecodingShape kDecoding[] = {{16, 32, 8, 1, 16384, 128},
                                       {1, 32, 8, 1, 131072, 128},
                                       {64, 32, 32, 1, 4096, 128},
                                       {1, 8, 1, 1, 65536, 64}};

// Seconds of our forward pass and of PyTorch's, a round each, in turns.
Json measure(const DecodingShape& shape, int64_t rounds, PythonScript* script) {
  Json found = {{"shape", {shape.B, shape.H, shape.G, shape.T, shape.N, shape.D}}, {"bytes", shape.bytes()}};
  AttentionProblem p = causal_problem(shape.B, shape.H, shape.T, shape.D);
  p.G = shape.G;
  p.N = shape.N;
  p.plans = {parse_plan(kPlan)};
  std::vector<double> own, rival;
  try {
    const AttentionOnDevice attention(p);
    found["kernel"] = attention.choice().kernel;
    attention.forward(nullptr);
    device_wait();
    for (int64_t round = 0; round < rounds; ++round) {
      own.push_back(forward_seconds(attention));
      if (!script || found.contains("rival_error")) continue;
      const Json question = {{"shape", found["shape"]}}, answer = script->ask(question);
      if (answer.contains("error")) {
        found["rival_error"] = answer["error"];
      } else {
        rival.push_back(answer.at("seconds").get<double>());
        found["rival"] = answer.at("backend");
      }
    }
    found["seconds"] = median(own);
    if (!rival.empty()) found["rival_seconds"] = median(rival);
  } catch (const std::exception& error) {
    found["error"] = error.what();
  }
  return found;
}

void print_row(const Json& row) {
  std::string shape;
  for (const Json& size : row["shape"]) shape += (shape.empty() ? "" : ",") + size.dump();
  if (row.contains("error"))
    return fmt::print("  {:<32}failed: {}\n", shape, row["error"].get<std::string>());
  const auto speed = [&](const char* seconds) {
    return row.contains(seconds)
               ? fmt::format("{:.0f}", row["bytes"].get<double>() / row[seconds].get<double>() * 1e-9)
               : std::string("-");
  };
  fmt::print("  {:<32}{:>8}{:>12}  {} beside {}\n", shape, speed("seconds"), speed("rival_seconds"),
             row["kernel"].get<std::string>(),
             row.value("rival", row.value("rival_error", std::string("nothing"))));
}

}  // namespace

Json bench_decoding(int64_t rounds, bool quiet) {
  const PythonScript::Start rival = PythonScript::start("bench_decoding.py", {});
  if (!quiet)
    fmt::print(
        "\ndecoding (B,H,G,T,N,D), {}: GB/s of K and V, medians of {} rounds; PyTorch's best: "
        "{}\n{:<34}{:>8}{:>12}\n",
        kPlan, rounds, rival.script ? rival.greeting.value("torch", "?") : rival.why_not, "", "ours",
        "PyTorch's");
  Json list = Json::array();
  for (const DecodingShape& shape : kDecoding) {
    list.push_back(measure(shape, rounds, rival.script.get()));
    if (!quiet) print_row(list.back());
  }
  return list;
}

}  // namespace evenkeel::cli
