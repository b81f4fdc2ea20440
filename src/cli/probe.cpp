// `evenkeel probe`: heads under the microscope, in a run or in a capture. `evenkeel capture`: one step of a run into a file.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/progress.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli/options.h"
#include "diagnosis/head_analysis.h"
#include "diagnosis/probe_recorder.h"
#include "training/replay.h"

namespace evenkeel::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// --- Where captures come from

struct Wanted {
  int64_t layer = -1;  // -1: all
  std::vector<int64_t> heads;
  int64_t sequences = 4, rows = 0;  // rows 0: all
  std::optional<Backend> backend;
};

// Asks for captures at one step and takes them.
class Taker : public StepWatcher {
 public:
  Taker(const RunStep& from, const Wanted& wanted) : from_(from), wanted_(wanted) {}
  void prepare(int64_t step, StepContext& context) override {
    if (step != from_.step) return;
    context.capture_sequences = wanted_.sequences;
    context.capture_rows = wanted_.rows;
    context.capture_layer = wanted_.layer;
  }
  void see(int64_t step, double loss, Gpt2& model, nlohmann::json&) override {
    if (step != from_.step) return;
    std::vector<float> parameters(static_cast<size_t>(model.table().size()));
    model.read_parameters(parameters);
    for (int64_t l = 0; l < model.config().layers; ++l) {
      if (wanted_.layer >= 0 && l != wanted_.layer) continue;
      taken.push_back(
          capture_of(model.captured(l), model.config(), model.table(), parameters, l, wanted_.heads));
      taken.back().source = from_.run.filename().string();
      taken.back().step = step;
      taken.back().loss = loss;
    }
  }
  std::vector<Capture> taken;

 private:
  const RunStep& from_;
  const Wanted& wanted_;
};

std::vector<Capture> replay_captures(const RunStep& from, const Wanted& wanted) {
  Replay replay(from.run, from.step, wanted.backend);
  const Gpt2Config& model = replay.trainer().config().model;
  require(wanted.layer < model.layers, "--layer: expected a layer from 0 to {}, got {}", model.layers - 1,
          wanted.layer);
  for (const int64_t h : wanted.heads)
    require(h < model.heads, "--heads: expected heads from 0 to {}, got {}", model.heads - 1, h);
  Taker taker(from, wanted);
  const ScopedWatcher watched(replay.trainer(), taker);
  Progress progress("replay", from.step + 1 - replay.trainer().next_step());
  replay.run_to(from.step + 1, [&] { progress.advance(); });
  return std::move(taker.taken);
}

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

// --- JSON: NaN and infinities become null

Json to_json(const SumTrace& t) {
  Json guilty = Json::array();
  for (const SumTrace::Guilty& g : t.guilty)
    guilty.push_back(
        {{"key", g.key}, {"jump", g.jump}, {"explanation", Json::parse(to_json(g.explanation))}});
  return {{"site", name(t.site)}, {"rounding", to_string(t.rounding)},
          {"feature", t.feature}, {"probability", t.probability},
          {"factor", t.factor},   {"sum", t.sum},
          {"error", t.error},     {"guilty", guilty}};
}

Json to_json(const HeadAnalysis& a, const Capture& c) {
  return {{"layer", c.layer},
          {"head", c.heads[static_cast<size_t>(a.head)]},
          {"sequence", a.sequence},
          {"row", a.row},
          {"tokens", a.tokens},
          {"pk", a.pk},
          {"x", a.x},
          {"similarity", a.similarity},
          {"column_share", a.column_share},
          {"delta_error", a.delta_error},
          {"d_o", a.d_o},
          {"output_error", a.output_error},
          {"product", a.product},
          {"sign_agreement", a.sign_agreement},
          {"ties", a.ties},
          {"trace", a.trace ? to_json(*a.trace) : Json(nullptr)}};
}

Json to_json(const Capture& c, const std::vector<HeadProbe>& probes) {
  Json heads = Json::array();
  for (size_t n = 0; n < probes.size(); ++n) {
    Json head = {{"head", c.heads[n]}, {"plan", to_string(c.plans[n])}};
    for (const ProbeField& field : kProbeFields) head[std::string(field.name)] = probes[n].*field.value;
    heads.push_back(std::move(head));
  }
  return {{"source", c.source},
          {"model", c.model},
          {"step", c.step},
          {"loss", c.loss},
          {"layer", c.layer},
          {"sequences", c.q.shape()[0]},
          {"rows", c.q.shape()[0] * c.q.shape()[2]},
          {"heads", heads}};
}

// Figs. 11 and 13: (steps, L, H) each.
Json to_json(const ProbeHistory& history) {
  Json fields = Json::object();
  for (const ProbeField& field : kProbeFields) {
    Json steps = Json::array();
    for (const std::vector<HeadProbe>& probes : history.probes) {
      Json layers = Json::array();
      for (int64_t l = 0; l < history.layers; ++l) {
        Json heads = Json::array();
        for (int64_t h = 0; h < history.heads; ++h)
          heads.push_back(probes[static_cast<size_t>(l * history.heads + h)].*field.value);
        layers.push_back(std::move(heads));
      }
      steps.push_back(std::move(layers));
    }
    fields[std::string(field.name)] = std::move(steps);
  }
  return {{"steps", history.steps}, {"loss", history.loss}, {"probes", fields}, {"norms", history.norms}};
}

// --- Text

std::string emphasised(const std::string& text, bool colour) {
  return colour ? fmt::format("\033[1m{}\033[0m", text) : text;
}

struct Column {
  const char* title;
  double HeadProbe::*value;
  const char* format;
  double factor = 1;
};
constexpr Column kColumns[] = {
    {"max score", &HeadProbe::largest_score, "{:.4g}"},
    {"offset", &HeadProbe::largest_row_mean, "{:.4g}"},
    {"spread", &HeadProbe::row_spread, "{:.3g}"},
    {"LSE", &HeadProbe::mean_lse, "{:.4g}"},
    {"entropy", &HeadProbe::entropy, "{:.2f}"},
    {"sink %", &HeadProbe::sink_mass, "{:.1f}", 100},
    {"ties %", &HeadProbe::tied_rows, "{:.1f}", 100},
    {"residual", &HeadProbe::residual_share, "{:.1e}"},
    {"z", &HeadProbe::residual_z, "{:+.1f}"},
    {"sum d-err", &HeadProbe::delta_error_sum, "{:+.1e}"},
    {"|W_Q|", &HeadProbe::norm_q, "{:.3g}"},
    {"|W_K|", &HeadProbe::norm_k, "{:.3g}"},
    {"|W_V|", &HeadProbe::norm_v, "{:.3g}"},
    {"QK entr.", &HeadProbe::score_entropy, "{:.2f}"},
    {"V sign", &HeadProbe::one_signed, "{:.2f}"},
    {"error %", &HeadProbe::gradient_share, "{:.3g}", 100},
    {"leak %", &HeadProbe::leak_share, "{:.3g}", 100},
    {"rank 1 %", &HeadProbe::gradient_rank_1, "{:.0f}", 100},
    {"alike", &HeadProbe::similarity, "{:.2f}"},
    {"adds up", &HeadProbe::coherence, "{:.2f}"},
};

void print_table(const Capture& c, const std::vector<HeadProbe>& probes, bool colour) {
  fmt::print("\n{}\n", emphasised(fmt::format("layer {}, step {} of {}, loss {:.4f}: {} rows of {} sequences",
                                              c.layer, c.step, c.source.empty() ? "?" : c.source, c.loss,
                                              c.q.shape()[0] * c.q.shape()[2], c.q.shape()[0]),
                                  colour));
  fmt::print("  head");
  for (const Column& column : kColumns) fmt::print(" {:>9}", column.title);
  fmt::print("\n");
  const int64_t worst = worst_head(probes);
  for (size_t n = 0; n < probes.size(); ++n) {
    const bool marked = static_cast<int64_t>(n) == worst;
    std::string line = fmt::format("{} {:>4}", marked ? '*' : ' ', c.heads[n]);
    for (const Column& column : kColumns) {
      const double value = probes[n].*column.value * column.factor;
      line +=
          fmt::format(" {:>9}", std::isnan(value) ? "-" : fmt::format(fmt::runtime(column.format), value));
    }
    fmt::print("{}\n", marked ? emphasised(line, colour) : line);
  }
  if (worst >= 0)
    fmt::print("* {}\n", in_words(probes[static_cast<size_t>(worst)],
                                  fmt::format("head {}", c.heads[static_cast<size_t>(worst)])));
}

// Heights on a linear scale from 0 to the largest.
std::string bars(const std::vector<double>& values, size_t width) {
  static constexpr const char* kBars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> cells(std::min(width, values.size()), 0.0);  // the largest of each stretch
  double largest = 0;
  for (size_t n = 0; n < values.size(); ++n) {
    double& cell = cells[n * cells.size() / values.size()];
    cell = std::max(cell, std::isfinite(values[n]) ? std::fabs(values[n]) : 0.0);
    largest = std::max(largest, cell);
  }
  std::string line;
  for (const double cell : cells)
    line += kBars[largest == 0 ? 0 : std::clamp(static_cast<int>(cell / largest * 8), 0, 7)];
  return line;
}

// The largest few of |values|, as "feature 20 (-1.2e-03)".
std::string largest_few(const std::vector<double>& values, const char* format) {
  std::vector<size_t> order(values.size());
  for (size_t n = 0; n < order.size(); ++n) order[n] = n;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::fabs(values[a]) > std::fabs(values[b]); });
  std::string text;
  for (size_t n = 0; n < std::min<size_t>(4, order.size()); ++n)
    text += fmt::format("{}{} ({})", n == 0 ? "" : ", ", order[n],
                        fmt::format(fmt::runtime(format), values[order[n]]));
  return text;
}

void print_analysis(const Capture& c, const HeadAnalysis& a, bool colour) {
  constexpr size_t kWidth = 64;
  fmt::print("\n{}\n",
             emphasised(fmt::format("layer {} head {}: the paper's analyses, sequence {}, row {}", c.layer,
                                    c.heads[static_cast<size_t>(a.head)], a.sequence, a.row),
                        colour));
  if (!a.similarity.empty()) {
    double sum = 0;
    const auto n = static_cast<double>(a.tokens.size());
    for (size_t s = 0; s < a.tokens.size(); ++s)
      for (size_t t = 0; t < a.tokens.size(); ++t)
        if (s != t) sum += a.similarity[s][t];
    fmt::print(
        "(PK)^T X of {} tokens (Figs. 4, 8): mean cosine {:.2f}; common input features, share of the "
        "squares: {}\n",
        a.tokens.size(), n > 1 ? sum / (n * (n - 1)) : 1.0, largest_few(a.column_share, "{:.2f}"));
  }
  double running = 0;
  for (const double e : a.delta_error) running += e;
  fmt::print("errors of delta along the sequence (Fig. 5a): sum {:+.2e}, at this row {:+.2e}\n  {}\n",
             running, a.delta_error[static_cast<size_t>(a.row)], bars(a.delta_error, kWidth));
  fmt::print(
      "dO against the error of O (Figs. 5b, 5c): of one sign in {:.0f} % of the features; product by "
      "feature: {}\n",
      100 * a.sign_agreement, largest_few(a.product, "{:+.1e}"));
  const std::vector<double> ties(a.ties.begin(), a.ties.end());
  const auto tied = std::count_if(ties.begin(), ties.end(), [](double n) { return n > 1; });
  fmt::print("ties (Fig. 9): in {} of {} rows, at most {:.0f} scores\n  {}\n", tied, ties.size(),
             *std::max_element(ties.begin(), ties.end()), bars(ties, kWidth));
  if (!a.trace) return;
  const SumTrace& t = *a.trace;
  fmt::print(
      "{} along the row, were it rounded to {} behind each key (Figs. 6b, 6c){}: error {:+.3e} in the end\n  "
      "{}\n",
      name(t.site), to_string(t.rounding), t.feature < 0 ? "" : fmt::format(", feature {}", t.feature),
      t.error.back(), bars(t.error, kWidth));
  for (const SumTrace::Guilty& g : t.guilty)
    fmt::print("  key {:>4}: Pb {:.6g}, the error goes by {:+.3e}\n", g.key,
               t.probability[static_cast<size_t>(g.key)], g.jump);
  if (!t.guilty.empty())
    fmt::print("\nthe first of these, bit by bit\n{}", to_text(t.guilty[0].explanation, colour));
}

// Fig. 11 and Fig. 13 in short: one line a layer.
void print_history(const ProbeHistory& history, bool colour) {
  fmt::print("\n{}\n",
             emphasised(fmt::format("{} probes, steps {} to {}: worst head of each layer, first to last",
                                    history.steps.size(), history.steps.front(), history.steps.back()),
                        colour));
  const auto line = [&](const std::string& title, const std::vector<double>& values) {
    fmt::print("  {:<24} {:>10.4g} {} {:.4g}\n", title, values.front(), bars(values, 48), values.back());
  };
  line("loss", history.loss);
  const auto worst = [&](double HeadProbe::*value, int64_t l) {
    std::vector<double> values;
    for (const std::vector<HeadProbe>& probes : history.probes) {
      double largest = 0;
      for (int64_t h = 0; h < history.heads; ++h)
        largest = std::max(largest, std::fabs(probes[static_cast<size_t>(l * history.heads + h)].*value));
      values.push_back(largest);
    }
    return values;
  };
  for (const auto& [title, value] : {std::pair{"|W_Q|", &HeadProbe::norm_q},
                                     {"offset", &HeadProbe::largest_row_mean},
                                     {"ties", &HeadProbe::tied_rows},
                                     {"leak / gradient", &HeadProbe::leak_share}})
    for (int64_t l = 0; l < history.layers; ++l) line(fmt::format("layer {} {}", l, title), worst(value, l));
}

}  // namespace

int run_probe(int argc, char** argv) {
  std::vector<std::string> targets;
  std::string backend, site;
  int64_t layer = -1, head = -1, row = -1, sequences = 4, threads = 0;
  bool json = false;
  Options options(
      "probe RUN@STEP | CAPTURE ... [options]",
      "Every head of a step under the microscope: scores and their common part, ties, the zero-sum "
      "residual,\n"
      "spectra, and how much of W_Q's gradient is rounding error; then the paper's analyses of the worst "
      "head,\n"
      "down to the addition. RUN@STEP is replayed from the nearest checkpoint; nothing in the run's folder\n"
      "changes. With several targets, also how alike their errors' directions are.",
      "probe runs/a@300 --layer 2");
  options.words("RUN@STEP | CAPTURE", targets, 1, 16);
  options.value("--layer", "L", "of a run: only this layer, from 0 on (default: all)", layer, 0, 4095);
  options.value("--head", "H", "the head for the paper's analyses (default: the worst)", head, 0, 4095);
  options.value("--row", "T", "the row for them (default: where delta's error is largest)", row, 0, 1 << 24);
  options.value("--site", "SITE",
                "the sum to follow: row_sum, pv or output_for_delta (default: the first rounded)", site);
  options.value("--sequences", "N", "of a run: the step's first N sequences", sequences, 1, 1 << 20);
  options.value("--backend", "NAME", "of a run: replay on cpu or cuda (default: where it ran)", backend);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--json", "the result as JSON, with every array", json);
  if (!options.parse(argc, argv)) return 0;
  if (threads > 0) set_thread_count(static_cast<int>(threads));

  Wanted wanted;
  wanted.layer = layer;
  wanted.sequences = sequences;
  if (!backend.empty()) wanted.backend = parse_backend(backend);
  std::vector<Capture> captures;
  Json histories = Json::array();
  std::vector<ProbeHistory> shown_histories;
  for (const std::string& target : targets) {
    std::error_code error;
    if (fs::is_regular_file(target, error)) {
      captures.push_back(read_capture(target));
      continue;
    }
    const auto run_step = parse_run_step(target);
    require(run_step.has_value(),
            "'{}': expected a capture's file or RUN@STEP, as in runs/a@300; found neither", target);
    for (Capture& capture : replay_captures(*run_step, wanted)) captures.push_back(std::move(capture));
    ProbeHistory history = read_probe_history(run_step->run);
    if (history.steps.size() > 1) {
      if (json)
        histories.push_back({{"run", run_step->run.filename().string()}, {"history", to_json(history)}});
      shown_histories.push_back(std::move(history));
    }
  }

  std::vector<std::vector<HeadProbe>> probes;
  for (const Capture& capture : captures) probes.push_back(probe(capture));
  // The worst head of all captures, unless one is named.
  size_t chosen = 0;
  int64_t chosen_head = -1;
  std::vector<HeadProbe> candidates;
  std::vector<std::pair<size_t, int64_t>> places;
  for (size_t n = 0; n < captures.size(); ++n)
    for (size_t h = 0; h < captures[n].heads.size(); ++h) {
      if (head >= 0 && captures[n].heads[h] != head) continue;
      candidates.push_back(probes[n][h]);
      places.emplace_back(n, static_cast<int64_t>(h));
    }
  const int64_t worst = worst_head(candidates);
  require(worst >= 0, "--head: expected a head that was captured, got {}", head);
  std::tie(chosen, chosen_head) = places[static_cast<size_t>(worst)];
  require(row < captures[chosen].q.shape()[2], "--row: expected a row from 0 to {}, got {}",
          captures[chosen].q.shape()[2] - 1, row);
  Look look;
  look.row = row;
  if (!site.empty()) look.site = parse_site(site);
  const HeadAnalysis analysis = analyse_head(captures[chosen], chosen_head, look);

  // Across steps (or layers' captures of several files): the same head of the same layer.
  struct Pair {
    size_t a, b;
    int64_t head;
    double cosine;
  };
  std::vector<Pair> pairs;
  for (size_t a = 0; a < captures.size(); ++a)
    for (size_t b = a + 1; b < captures.size(); ++b) {
      const Capture &left = captures[a], &right = captures[b];
      if (left.layer != right.layer || left.x.values().empty() || left.x.shape()[3] != right.x.shape()[3] ||
          left.q.shape()[3] != right.q.shape()[3])
        continue;
      for (size_t h = 0; h < left.heads.size(); ++h) {
        const auto other = std::find(right.heads.begin(), right.heads.end(), left.heads[h]);
        if (other == right.heads.end()) continue;
        pairs.push_back(
            {a, b, left.heads[h],
             direction_similarity(left, static_cast<int64_t>(h), right, other - right.heads.begin())});
      }
    }

  if (json) {
    Json out = {{"schema", 1}, {"captures", Json::array()}};
    for (size_t n = 0; n < captures.size(); ++n) out["captures"].push_back(to_json(captures[n], probes[n]));
    out["worst"] = {
        {"capture", chosen},
        {"head", captures[chosen].heads[static_cast<size_t>(chosen_head)]},
        {"words", in_words(probes[chosen][static_cast<size_t>(chosen_head)],
                           fmt::format("layer {} head {}", captures[chosen].layer,
                                       captures[chosen].heads[static_cast<size_t>(chosen_head)]))}};
    out["analysis"] = to_json(analysis, captures[chosen]);
    out["across"] = Json::array();
    for (const Pair& p : pairs)
      out["across"].push_back({{"layer", captures[p.a].layer},
                               {"head", p.head},
                               {"steps", {captures[p.a].step, captures[p.b].step}},
                               {"cosine", p.cosine}});
    out["histories"] = histories;
    fmt::print("{}\n", out.dump(2));
    return 0;
  }
  const bool colour = use_colour();
  for (size_t n = 0; n < captures.size(); ++n) print_table(captures[n], probes[n], colour);
  fmt::print(
      "\noffset: largest |mean of a row's scores|; spread: deviation around it. residual: what is left of "
      "the rows' sum of dS\n"
      "(0 in exact arithmetic), in units of delta; z: its mean over its standard error. sum d-err: of delta "
      "less delta in FP64.\n"
      "error %: of W_Q's gradient; leak %: the part of it that rows make which do not sum to zero: that part "
      "drifts.\n"
      "rank 1 %: of the error. alike: mean cosine of (PK)^T X between rows; adds up: 1 where the leaks of "
      "all rows do.\n");
  print_analysis(captures[chosen], analysis, colour);
  if (!pairs.empty()) {
    fmt::print(
        "\n{}\n",
        emphasised("directions of the errors, mean (PK)^T X, across captures (Fig. 4): cosines", colour));
    for (const Pair& p : pairs)
      fmt::print("  layer {} head {}: steps {} and {}: {:.2f}\n", captures[p.a].layer, p.head,
                 captures[p.a].step, captures[p.b].step, p.cosine);
  }
  for (const ProbeHistory& history : shown_histories) print_history(history, colour);
  return 0;
}

int run_capture(int argc, char** argv) {
  std::vector<std::string> targets;
  std::string out, heads, backend;
  int64_t layer = 0, sequences = 1, rows = 0, threads = 0;
  bool json = false;
  Options options(
      "capture RUN@STEP --layer L [--heads 0,3] -o FILE [options]",
      "Freezes what one layer's attention read at one step of a run: q, k, v, dO, x and the weights, in one\n"
      "safetensors file for `evenkeel probe`. The step is replayed from the nearest checkpoint. Captures of\n"
      "PyTorch models: python/capture_torch.py.",
      "capture runs/a@300 --layer 2 --heads 0,3 -o layer2.safetensors");
  options.words("RUN@STEP", targets, 1, 1);
  options.value("--layer", "L", "from 0 on (default 0)", layer, 0, 4095);
  options.value("--heads", "LIST", "from 0 on, as in 0,3 (default: all)", heads);
  options.value("--sequences", "N", "the step's first N sequences", sequences, 1, 1 << 20);
  options.value("--rows", "N", "of each the first N rows; 0: all", rows, 0, 1 << 20);
  options.value("-o", "FILE", "where it goes", out);
  options.value("--backend", "NAME", "replay on cpu or cuda (default: where the run ran)", backend);
  options.value("--threads", "N", "of the CPU; 0: all", threads, 0, 4096);
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  if (threads > 0) set_thread_count(static_cast<int>(threads));
  require(!out.empty(), "expected -o FILE, got none");
  const auto run_step = parse_run_step(targets[0]);
  require(run_step.has_value(), "'{}': expected RUN@STEP, as in runs/a@300", targets[0]);
  Wanted wanted;
  wanted.layer = layer;
  wanted.heads = parse_heads(heads);
  wanted.sequences = sequences;
  wanted.rows = rows;
  if (!backend.empty()) wanted.backend = parse_backend(backend);
  const Capture capture = replay_captures(*run_step, wanted).at(0);
  write_capture(out, capture);
  const auto bytes = static_cast<int64_t>(fs::file_size(out));
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
