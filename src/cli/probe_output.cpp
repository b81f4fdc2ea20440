#include "cli/probe_output.h"
#include "base/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "diagnosis/rotary_pairs.h"

namespace evenkeel::cli {
namespace {

using Json = nlohmann::ordered_json;

// --- JSON: NaN and infinities become null

Json to_json(const SumTrace& t) {
  Json guilty = Json::array();
  for (const SumTrace::Guilty& g : t.guilty)
    guilty.push_back({{"key", g.key}, {"jump", g.jump}, {"explanation", parse_json(to_json(g.explanation))}});
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
    {"leak", &HeadProbe::residual_share, "{:.1e}"},
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

// Which pairs make the offset of the head at hand; nothing where positions are not rotary.
void print_rotary_pairs(const Capture& c, int64_t head, bool colour) {
  if (!c.is_rotary()) return;
  const RotaryShares shares = rotary_shares(c, head);
  fmt::print("\n{}\n  {:>4} {:>14} {:>12} {:>12}\n",
             emphasised(fmt::format("rotary pairs of head {}: offset {:.4g}, seen by softmax {:.3g}",
                                    c.heads[static_cast<size_t>(head)], shares.offset, shares.visible),
                        colour),
             "pair", "places a turn", "offset", "seen");
  for (size_t p = 0; p < shares.pairs.size(); ++p)
    fmt::print("  {:>4} {:>14.4g} {:>12.4g} {:>12.3g}\n", p, 2 * std::numbers::pi / shares.pairs[p].turn,
               shares.pairs[p].offset, shares.pairs[p].visible);
  fmt::print(
      "  offset: the pair's part of the row mean where that is largest, which softmax cannot see. seen: "
      "deviation of "
      "its part of\n  the scores along a row.\n");
}

}  // namespace

void print_json(const Probed& probed) {
  Json out = {{"schema", 1}, {"captures", Json::array()}};
  for (size_t n = 0; n < probed.captures.size(); ++n)
    out["captures"].push_back(to_json(probed.captures[n], probed.probes[n]));
  const Capture& worst = probed.captures[probed.capture];
  const auto h = static_cast<size_t>(probed.head);
  out["worst"] = {{"capture", probed.capture},
                  {"head", worst.heads[h]},
                  {"words", in_words(probed.probes[probed.capture][h],
                                     fmt::format("layer {} head {}", worst.layer, worst.heads[h]))}};
  out["analysis"] = to_json(probed.analysis, worst);
  if (const Capture& at_hand = probed.captures[probed.capture]; at_hand.is_rotary()) {
    const RotaryShares shares = rotary_shares(at_hand, probed.head);
    Json pairs = Json::array();
    for (const PairShare& pair : shares.pairs)
      pairs.push_back({{"turn", pair.turn}, {"offset", pair.offset}, {"visible", pair.visible}});
    out["rotary"] = {{"offset", shares.offset}, {"visible", shares.visible}, {"pairs", pairs}};
  }
  out["across"] = Json::array();
  for (const DirectionPair& p : probed.pairs)
    out["across"].push_back({{"layer", probed.captures[p.a].layer},
                             {"head", p.head},
                             {"steps", {probed.captures[p.a].step, probed.captures[p.b].step}},
                             {"cosine", p.cosine}});
  out["histories"] = Json::array();
  for (const auto& [run, history] : probed.histories)
    out["histories"].push_back({{"run", run}, {"history", to_json(history)}});
  if (!probed.next_command.empty()) out["next"] = probed.next_command;
  fmt::print("{}\n", out.dump(2));
}

void print_text(const Probed& probed, bool colour) {
  for (size_t n = 0; n < probed.captures.size(); ++n)
    print_table(probed.captures[n], probed.probes[n], colour);
  fmt::print(
      "\noffset: largest |mean of a row's scores|; spread: deviation around it. leak: sum of a row of dS "
      "(0 in exact arithmetic),\n"
      "root mean square, in units of delta; z: its mean over its standard error. sum d-err: sum of delta "
      "less "
      "delta in FP64.\n"
      "error %: rounding error in W_Q's gradient; leak %: the part of the gradient that leaks make, which "
      "drifts; rank 1 %:\n"
      "of the error. alike: mean cosine of (PK)^T X between rows; adds up: 1 where the leaks of all rows add "
      "up.\n");
  print_analysis(probed.captures[probed.capture], probed.analysis, colour);
  print_rotary_pairs(probed.captures[probed.capture], probed.head, colour);
  if (!probed.pairs.empty()) {
    fmt::print(
        "\n{}\n",
        emphasised("directions of the errors, mean (PK)^T X, across captures (Fig. 4): cosines", colour));
    for (const DirectionPair& p : probed.pairs)
      fmt::print("  layer {} head {}: steps {} and {}: {:.2f}\n", probed.captures[p.a].layer, p.head,
                 probed.captures[p.a].step, probed.captures[p.b].step, p.cosine);
  }
  for (const auto& [run, history] : probed.histories) print_history(history, colour);
  if (!probed.next_command.empty()) fmt::print("\nnext: {}\n", probed.next_command);
}

}  // namespace evenkeel::cli
