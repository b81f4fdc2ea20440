#include "diagnosis/isolate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/json_text.h"
#include "diagnosis/bad_sequences.h"
#include "diagnosis/head_analysis.h"
#include "records/record_json.h"

namespace evenkeel {
namespace {

// Most suspect first: what was found to drift (docs/experiments.md), then the way of a row from scores to gradients.
constexpr std::array kSuspects = {Site::row_sum,
                                  Site::pv,
                                  Site::output_for_delta,
                                  Site::output,
                                  Site::delta,
                                  Site::shifted,
                                  Site::scores,
                                  Site::probs,
                                  Site::dprobs,
                                  Site::dscores,
                                  Site::q,
                                  Site::k,
                                  Site::v,
                                  Site::dq,
                                  Site::dk,
                                  Site::grad_output,
                                  Site::dv,
                                  Site::probs_bwd,
                                  Site::q_bwd,
                                  Site::k_bwd,
                                  Site::v_bwd,
                                  Site::grad_output_for_dprobs};
static_assert(kSuspects.size() == kSiteCount);
constexpr size_t kWindowsTried = 3;
constexpr double kDeviations = 5;
// Harmless, and other bits in any trainer: a GPU's BF16 tensors round dv to nearest whatever its format is here.
constexpr const char* kStochasticDv = "dv=bf16/stochastic";
constexpr double kInexact = 0.01;  // of the loss, between kernels of the same precision

class Search {
 public:
  Search(Replays& replays, const IsolateOptions& options)
      : replays_(replays),
        options_(options),
        record_(read_run_record(replays.run())),
        H_(replays.config().model.heads),
        L_(replays.config().model.layers) {}

  Isolation run() {
    Isolation found;
    try {
      search();
    } catch (const BudgetSpent&) {
      e_.budget_spent = true;
    }
    if (e_.measure == Evidence::Measure::offset && !e_.guilty.empty() && !e_.sites.empty())
      found.bits = bits();
    found.evidence = e_;
    found.verdict = judge(e_, replays_.run(), replays_.config());
    return found;
  }

 private:
  void tell(const std::string& words) const {
    if (options_.tell) options_.tell(words);
  }
  const Trial& trial(std::string what, std::string clauses, double lr_factor = 1) {
    return replays_.trial({std::move(what), std::move(clauses), lr_factor}, e_.window);
  }

  void search() {
    e_.symptom = find_symptom(record_);
    e_.mended = record_.mended;
    e_.notes = record_.notes;
    if (e_.symptom.kind == Symptom::Kind::none) return;
    tell("symptom: " + e_.symptom.words);
    std::vector<Window> windows = candidates();
    if (std::none_of(windows.begin(), windows.end(), [&](const Window& w) { return shows(w); }))
      return look_without_symptom(windows[0]);
    std::erase_if(windows, [&](const Window& w) { return !shows(w); });
    Window grown;  // where FP32 goes furthest, for the learning rate's trial
    double furthest = -std::numeric_limits<double>::infinity();
    for (size_t n = 0; n < std::min(windows.size(), kWindowsTried); ++n)
      for (const Window& window : {windows[n], first_half(windows[n])}) {
        if (!shows(window)) break;
        look_at(window);
        if (e_.not_repeated) return;
        if (window == windows[0] && comes_from_data()) return;
        if (e_.measure != Evidence::Measure::none && !e_.chaotic) {
          find_heads();
          find_sites();
          if (!e_.chaotic) return try_predictions();
        }
        if (!(e_.growth(*e_.control) <= furthest)) grown = window, furthest = e_.growth(*e_.control);
        if (!e_.chaotic) break;  // chance does less in a shorter stretch: courses part as they go on
      }
    look_at(grown);                                      // kept trials: no replay
    e_.chaotic = e_.measure != Evidence::Measure::none;  // or it would have been searched
    e_.slower = &trial("FP32 at a quarter of the learning rate", "fp32", 0.25);
  }

  // Where a replay can start, best first: from a checkpoint (or the beginning) through at most options_.steps steps. First
  // the earliest in which the symptom grows at least half as far as anywhere, and so far that it can be seen (look_at).
  // Then the next such one, and so on. Then the others, by how far. Early ones are worth more: once the drift has spread,
  // everything acts on everything.
  std::vector<Window> candidates() const {
    const int64_t end = static_cast<int64_t>(record_.loss.size());
    std::vector<int64_t> begins = {0};
    for (const int64_t step : replays_.checkpoints())
      if (step > 0 && step < end) begins.push_back(step);
    if (options_.begin >= 0) {
      require(std::find(begins.begin(), begins.end(), options_.begin) != begins.end(),
              "--from: expected 0 or the step of a checkpoint before step {}, got {}", end, options_.begin);
      begins = {options_.begin};
    }
    std::vector<std::pair<double, Window>> ranked;
    for (const int64_t begin : begins) {
      const Window window{begin, std::min(end, begin + options_.steps)};
      double growth = 0;
      if (e_.symptom.kind == Symptom::Kind::offset)
        growth = offset_in(last_quarter(window)) - offset_in(first_quarter(window));
      else if (e_.symptom.kind == Symptom::Kind::loss)
        growth = loss_before(window.end) - loss_before(begin + kMeanOf);
      else
        growth = static_cast<double>(
            std::count_if(e_.symptom.spikes.begin(), e_.symptom.spikes.end(),
                          [&](int64_t step) { return step >= window.begin && step < window.end; }));
      if (std::isnan(growth)) growth = std::numeric_limits<double>::infinity();  // to where it ended
      ranked.emplace_back(growth, window);
    }
    double most = -std::numeric_limits<double>::infinity();
    for (const auto& [growth, window] : ranked) most = std::max(most, growth);
    const auto far = std::stable_partition(ranked.begin(), ranked.end(), [&](const auto& one) {
      return one.first >= most / 2 && shows_clearly(one.second);
    });
    std::stable_sort(far, ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Window> windows;
    for (const auto& [growth, window] : ranked) windows.push_back(window);
    return windows;
  }

  // Beyond the limit by a factor of two, so that a control within it differs by as much.
  bool shows_clearly(const Window& window) const {
    return e_.symptom.kind != Symptom::Kind::offset ||
           offset_in(last_quarter(window)) > std::log(2 * e_.symptom.limit.limit);
  }
  // By the records, which an unchanged replay repeats: does the stretch show the symptom? Of a drift, the head's offset
  // over the last quarter is beyond the limit. Of a rising loss, the end is half way from its best to where it ended. Of a
  // spike, a step of the stretch jumps.
  bool shows(const Window& window) const {
    const Symptom& symptom = e_.symptom;
    if (symptom.kind == Symptom::Kind::offset)
      return symptom_offset_in(last_quarter(window)) > std::log(symptom.limit.limit);
    if (symptom.kind == Symptom::Kind::loss)
      return window.end > symptom.since &&
             !(loss_before(window.end) <= (symptom.best_loss + symptom.loss) / 2);  // NaN is beyond
    return std::any_of(symptom.spikes.begin(), symptom.spikes.end(),
                       [&](int64_t step) { return step >= window.begin && step < window.end; });
  }

  // Only whether the run repeats and whether the data explains it; then what is missing.
  void look_without_symptom(const Window& window) {
    replay_as_recorded(window);
    if (e_.not_repeated || comes_from_data()) return;
    e_.shows_symptom = false;
    tell(fmt::format("steps {} to {} do not show the symptom, which is there from step {} on", window.begin,
                     window.end, e_.symptom.since));
    const auto end = static_cast<int64_t>(record_.loss.size());
    const int64_t every = std::max<int64_t>(1, options_.steps / 2);
    for (int64_t begin = 0; begin < end && e_.missing_checkpoint < 0; begin += every)
      if (shows({begin, std::min(end, begin + options_.steps)})) e_.missing_checkpoint = begin;
    for (const int64_t step : replays_.checkpoints())
      if (step <= e_.missing_checkpoint) e_.earlier_checkpoint = std::max(e_.earlier_checkpoint, step);
  }

  static Window first_half(const Window& w) { return {w.begin, w.begin + (w.end - w.begin + 1) / 2}; }
  static Window first_quarter(const Window& w) { return {w.begin, w.begin + (w.end - w.begin + 3) / 4}; }
  static Window last_quarter(const Window& w) { return {w.end - (w.end - w.begin + 3) / 4, w.end}; }
  // Mean of the recorded logarithms of the largest offset over heads; what a healthy head has counts as nothing. Of one head
  // alone, or at one step, it would be mostly noise. Where nothing is recorded there: as before.
  double offset_in(const Window& window) const {
    double sum = 0, count = 0;
    for (size_t n = 0; n < record_.fact_steps.size(); ++n)
      if (record_.fact_steps[n] >= window.begin && record_.fact_steps[n] < window.end)
        sum += std::log(std::max(recorded_offset(record_.fact_steps[n]), kScoreUnit)), ++count;
    return count > 0 ? sum / count : std::log(std::max(recorded_offset(window.begin), kScoreUnit));
  }
  // The same of the symptom's head alone, where the latest record is taken if the window has none.
  double symptom_offset_in(const Window& window) const {
    const auto head = static_cast<size_t>(e_.symptom.layer * H_ + e_.symptom.head);
    const auto log_at = [&](size_t n) {
      const double offset = head < record_.offset[n].size() ? record_.offset[n][head] : 0;
      return std::isnan(offset) ? HUGE_VAL : std::log(std::max(offset, kScoreUnit));
    };
    double sum = 0, count = 0, latest = 0;
    for (size_t n = 0; n < record_.fact_steps.size() && record_.fact_steps[n] < window.end; ++n) {
      latest = log_at(n);
      if (record_.fact_steps[n] >= window.begin) sum += latest, ++count;
    }
    return count > 0 ? sum / count : latest;
  }
  static constexpr int64_t kMeanOf = 10;
  double loss_before(int64_t step) const {
    const auto end = std::clamp<int64_t>(step, 1, static_cast<int64_t>(record_.loss.size()));
    const auto begin = std::max<int64_t>(0, end - kMeanOf);
    return std::accumulate(record_.loss.begin() + begin, record_.loss.begin() + end, 0.0) /
           static_cast<double>(end - begin);
  }

  // The stretch as it was: does it repeat?
  void replay_as_recorded(const Window& window) {
    e_.window = window;
    e_.control = e_.placebo = e_.control_placebo = e_.cured = nullptr;
    e_.more_placebos.clear();
    e_.layers.clear(), e_.guilty.clear(), e_.sites.clear(), e_.alone.clear();
    e_.measure = Evidence::Measure::none;
    e_.chaotic = false;
    e_.begin_offset = recorded_offset(window.begin);
    e_.recorded = &trial("as recorded", "");
    tell(fmt::format("steps {} to {} as recorded: offset {:.4g}, loss {:.4f}", window.begin, window.end,
                     e_.recorded->health.offset, e_.recorded->health.loss));
    for (size_t n = 0; n < e_.recorded->health.step_loss.size(); ++n) {
      const double replayed = e_.recorded->health.step_loss[n],
                   recorded = record_.loss[static_cast<size_t>(window.begin) + n];
      if (replayed == recorded || (std::isnan(replayed) && std::isnan(recorded))) continue;
      // Another trainer may not repeat to the bit. Its first step has the same weights and the same batch: only roundings
      // differ there.
      if (!replays_.is_exact() && (n > 0 || std::fabs(replayed - recorded) <= kInexact * std::fabs(recorded)))
        continue;
      e_.not_repeated = window.begin + static_cast<int64_t>(n);
      e_.recorded_loss = recorded;
      return;
    }
  }

  // The stretch as recorded and in FP32: does it repeat, and does rounding make the difference?
  void look_at(const Window& window) {
    replay_as_recorded(window);
    if (e_.not_repeated) return;
    e_.control = &trial("control: all in FP32", "fp32");
    e_.limit = limit_from_control(e_.control->health.head_offset);
    tell(fmt::format("control, all in FP32: offset {:.4g}, loss {:.4f}; {}", e_.control->health.offset,
                     e_.control->health.loss, in_words(e_.limit)));
    const double steps = std::max(1.0, static_cast<double>(window.end - window.begin) / 4);
    e_.loss_tolerance = std::max(0.01 * std::fabs(e_.control->health.loss),
                                 kDeviations * loss_noise(record_.loss) * std::sqrt(2 / steps));
    const Health &bad = e_.recorded->health, &good = e_.control->health;
    if (bad.offset > e_.limit.limit && e_.growth(*e_.control) < e_.growth(*e_.recorded) / 2)
      e_.measure = Evidence::Measure::offset;
    else if (bad.loss > good.loss + e_.loss_tolerance)
      e_.measure = Evidence::Measure::loss;
    if (e_.measure == Evidence::Measure::none) return;
    const bool wide = is_identity(plan_of(0).at(Site::dv));
    e_.placebo = &trial("placebo: another format of dv", wide ? "dv=bf16" : "dv=fp32");
    e_.more_placebos = {&trial("placebo: dv rounded stochastically", kStochasticDv),
                        &trial("placebo: dv of six bits", "dv=e8m6")};
    e_.control_placebo =
        &trial("placebo: the control, dv rounded stochastically", fmt::format("fp32; {}", kStochasticDv));
    // Where chance takes a course as far as to the control, no trial says anything.
    for (const Trial* course : {e_.control, e_.control_placebo}) e_.chaotic |= !e_.heals(*course);
    if (e_.chaotic)
      tell("placebo: changes that cannot matter do nearly as much as FP32: the stretch is chaotic");
  }

  // The largest over heads at or before a step.
  double recorded_offset(int64_t step) const {
    const auto next = std::upper_bound(record_.fact_steps.begin(), record_.fact_steps.end(), step);
    if (next == record_.fact_steps.begin()) return 0;
    const std::vector<double>& heads =
        record_.offset[static_cast<size_t>(next - record_.fact_steps.begin() - 1)];
    return *std::max_element(heads.begin(), heads.end());
  }

  // Steps whose loss jumps hold a sequence that is hard for the model.
  bool comes_from_data() {
    return !replays_.is_elsewhere() && !e_.symptom.spikes.empty() &&
           from_data(e_.data.emplace(find_bad_sequences(replays_, record_, e_.symptom, e_.window.begin)));
  }

  // --- Heads and sites

  PrecisionPlan plan_of(int64_t head) const {
    return replays_.plan_at(e_.window.begin).at(static_cast<int>(head / H_), static_cast<int>(head % H_));
  }
  // One clause for each layer's heads that change alike. heads: l H + h.
  template <class Change>
  std::string clauses_for(std::vector<int64_t> heads, Change change) const {
    std::sort(heads.begin(), heads.end());
    std::map<std::pair<int64_t, std::string>, std::string> lists;  // (layer, change) -> heads
    for (const int64_t head : heads) {
      std::string& list = lists[{head / H_, change(head)}];
      list += (list.empty() ? "" : ",") + std::to_string(head % H_);
    }
    std::string text;
    for (const auto& [place, list] : lists)
      text +=
          fmt::format("{}layer {} head {}: {}", text.empty() ? "" : "; ", place.first, list, place.second);
    return text;
  }
  std::string same_for(const std::vector<int64_t>& heads, const std::string& change) const {
    return clauses_for(heads, [&](int64_t) { return change; });
  }
  // Setting a site takes its second reading along, unless that is set too.
  template <class Value>
  static std::string second_readings(const std::vector<Site>& sites, Value value) {
    std::string text;
    for (const SecondReading& row : kSecondReadings)
      if (row.first == Site::output || std::find(sites.begin(), sites.end(), row.first) != sites.end())
        text += fmt::format("{}{}={}", text.empty() ? "" : ",", name(row.site), to_string(value(row.site)));
    return text;
  }
  // The sites of a head's plan changed to what `rounding` makes of them.
  template <class Change>
  std::string site_changes(const PrecisionPlan& plan, const std::vector<Site>& sites, Change rounding) const {
    std::string text = second_readings(sites, [&](Site site) { return plan.at(site); });
    for (const Site site : sites)
      text += fmt::format(",{}={}", name(site), to_string(rounding(plan.at(site))));
    return text;
  }
  std::string sites_to_fp32(const std::vector<Site>& sites) const {
    return clauses_for(e_.guilty, [&](int64_t head) {
      return site_changes(plan_of(head), sites, [](const Rounding&) { return Rounding{}; });
    });
  }

  bool rounds(int64_t head) const {
    const PrecisionPlan plan = plan_of(head);
    return std::any_of(plan.rounding.begin(), plan.rounding.end(),
                       [](const Rounding& r) { return !is_identity(r); });
  }
  // How much further a head went than in FP32.
  double excess(int64_t head) const {
    const auto n = static_cast<size_t>(head);
    const double ratio = std::log(e_.recorded->health.head_offset[n] / e_.control->health.head_offset[n]);
    return std::isnan(ratio) ? 0 : ratio;
  }

  // Heals, and not by chance: where a replay heals by little, one more with a harmless change on top must heal, too.
  bool surely_heals(const std::string& what, const std::string& clauses) {
    const Trial& first = trial(what, clauses);
    if (!e_.heals(first)) return false;
    return !e_.heals_barely(first) ||
           e_.heals(trial(what + ", again with dv rounded stochastically", clauses + "; " + kStochasticDv));
  }

  void find_heads() {
    std::map<int64_t, double> by_layer;
    std::vector<int64_t> heads;
    for (int64_t head = 0; head < L_ * H_; ++head) {
      if (!rounds(head)) continue;
      heads.push_back(head);
      const auto [place, fresh] = by_layer.emplace(head / H_, excess(head));
      place->second = std::max(place->second, excess(head));
    }
    std::vector<int64_t> layers;
    for (const auto& [layer, value] : by_layer) layers.push_back(layer);
    std::stable_sort(layers.begin(), layers.end(),
                     [&](int64_t a, int64_t b) { return by_layer[a] > by_layer[b]; });
    const auto heads_of = [&](const std::vector<int64_t>& of_layers) {
      std::vector<int64_t> some;
      for (const int64_t head : heads)
        if (std::find(of_layers.begin(), of_layers.end(), head / H_) != of_layers.end()) some.push_back(head);
      return some;
    };
    const auto heals_in = [&](const std::vector<int64_t>& some) {
      const bool healed = surely_heals(heads_in_words(sorted(some), H_) + " in FP32", same_for(some, "fp32"));
      tell(fmt::format("{} in FP32: {}", heads_in_words(sorted(some), H_),
                       healed ? "heals" : "does not heal"));
      return healed;
    };
    e_.layers = sorted(smallest_cure(layers, [&](const auto& some) { return heals_in(heads_of(some)); }));
    std::vector<int64_t> suspects = heads_of(e_.layers);
    std::stable_sort(suspects.begin(), suspects.end(),
                     [&](int64_t a, int64_t b) { return excess(a) > excess(b); });
    e_.guilty = sorted(smallest_cure(suspects, heals_in));
  }

  void find_sites() {
    std::vector<Site> rounded;
    for (const Site site : kSuspects)
      if (std::any_of(e_.guilty.begin(), e_.guilty.end(),
                      [&](int64_t head) { return !is_identity(plan_of(head).at(site)); }))
        rounded.push_back(site);
    const auto heals_with = [&](const std::vector<Site>& sites) {
      std::string words;
      for (const Site site : sites) words += (words.empty() ? "" : ", ") + std::string(name(site));
      const std::string what = words + " of the guilty heads in FP32", clauses = sites_to_fp32(sites);
      const bool healed = surely_heals(what, clauses);
      const double outcome = e_.outcome(trial(what, clauses));
      tell(fmt::format("{} in FP32: {}: {}", words,
                       e_.measure == Evidence::Measure::offset
                           ? fmt::format("offset {:.4g}", std::exp(outcome))
                           : fmt::format("loss {:.4f}", outcome),
                       healed ? "heals" : "does not heal"));
      return healed;
    };
    if (rounded.size() == 1) {
      e_.alone = rounded;  // as its heads in FP32
    } else {
      for (const Site site : rounded)
        if (heals_with({site})) e_.alone.push_back(site);
    }
    // One site is to blame, or two that only work together; not most of them.
    e_.chaotic = rounded.size() > 3 && 2 * e_.alone.size() > rounded.size();
    if (e_.chaotic) return;
    if (!e_.alone.empty()) {
      e_.sites = {*std::min_element(e_.alone.begin(), e_.alone.end(),
                                    [&](Site a, Site b) { return outcome_with(a) < outcome_with(b); })};
    } else {
      std::vector<int64_t> units(rounded.size());
      std::iota(units.begin(), units.end(), 0);
      for (const int64_t unit : smallest_cure(units, [&](const std::vector<int64_t>& some) {
             std::vector<Site> sites;
             for (const int64_t n : some) sites.push_back(rounded[static_cast<size_t>(n)]);
             return heals_with(sites);
           }))
        e_.sites.push_back(rounded[static_cast<size_t>(unit)]);
    }
    e_.cured = &trial("the guilty sites in FP32", sites_to_fp32(e_.sites));
  }
  // Of the sites that heal, the one that heals best is named.
  double outcome_with(Site site) { return e_.outcome(trial("", sites_to_fp32({site}))); }

  // O is rounded once and read twice, by the loss and by delta, and harms where both have seen the error: to undo either
  // heals, and only both together drift.
  static std::vector<Site> rounding_of(std::vector<Site> sites) {
    const bool output = std::any_of(sites.begin(), sites.end(), [](Site site) {
      return site == Site::output || site == Site::output_for_delta;
    });
    if (output) {
      std::erase(sites, Site::output);
      std::erase(sites, Site::output_for_delta);
      sites.insert(sites.end(), {Site::output_for_delta, Site::output});
    }
    return sites;
  }

  // What must be true if the answer is.
  void try_predictions() {
    const auto with_stabiliser = [&](const char* stabiliser) -> const Trial* {
      return &trial(fmt::format("{} on the guilty heads", stabiliser),
                    same_for(e_.guilty, fmt::format("stabiliser={}", stabiliser)));
    };
    e_.zero_sum = with_stabiliser("zero_sum");
    if (e_.measure == Evidence::Measure::offset && !e_.heals(*e_.zero_sum))
      e_.zero_sum_all = &trial("zero_sum on all heads", "stabiliser=zero_sum");
    e_.alone_guilty = &trial("the guilty sites alone rounded, all else FP32",
                             "fp32; " + clauses_for(e_.guilty, [&](int64_t head) {
                               const PrecisionPlan plan = plan_of(head);
                               const std::vector<Site> sites = rounding_of(e_.sites);
                               std::string text = second_readings(sites, [](Site) { return Rounding{}; });
                               for (const Site site : sites)
                                 text += fmt::format(",{}={}", name(site), to_string(plan.at(site)));
                               return text;
                             }));
    const auto stochastic = [](Rounding r) {
      if (!is_identity(r)) r.mode = RoundingMode::stochastic;
      return r;
    };
    const std::string unbiased = clauses_for(
        e_.guilty, [&](int64_t head) { return site_changes(plan_of(head), e_.sites, stochastic); });
    const bool is_stochastic = std::all_of(e_.guilty.begin(), e_.guilty.end(), [&](int64_t head) {
      return std::all_of(e_.sites.begin(), e_.sites.end(),
                         [&](Site site) { return plan_of(head).at(site).mode == RoundingMode::stochastic; });
    });
    if (!is_stochastic) e_.unbiased = &trial("the guilty sites rounded stochastically", unbiased);
    e_.wide_output = with_stabiliser("wide_output");
    e_.consistent = with_stabiliser("consistent");
    e_.wide_pv = &trial("PV of the guilty heads in FP32", same_for(e_.guilty, "pv=fp32"));
  }

  // One addition of the first guilty head, taken apart. Nothing where the backend has no captures.
  std::optional<Explanation> bits() const {
    if (replays_.is_elsewhere()) return {};
    class Taker : public StepWatcher {
     public:
      Taker(int64_t layer, int64_t head) : layer_(layer), head_(head) {}
      void prepare(int64_t, StepContext& context) override {
        context.capture_sequences = 4;
        context.capture_layer = layer_;
      }
      void see(int64_t, double, Model& model, nlohmann::json&) override {
        taken = capture_of(model, layer_, {head_});
      }
      std::optional<Capture> taken;

     private:
      const int64_t layer_, head_;
    };
    try {
      const std::unique_ptr<Replay> replay = replays_.at(e_.window.begin);
      Taker taker(e_.guilty[0] / H_, e_.guilty[0] % H_);
      {
        const ScopedWatcher watched(replay->trainer(), taker);
        replay->trainer().step();
      }
      Look look;
      for (const Site site : e_.sites)
        if (site == Site::row_sum || site == Site::pv || site == Site::output_for_delta) look.site = site;
      const HeadAnalysis analysis = analyse_head(*taker.taken, 0, look);
      if (analysis.trace && !analysis.trace->guilty.empty()) return analysis.trace->guilty[0].explanation;
    } catch (const DataError&) {
    }
    return {};
  }

  static std::vector<int64_t> sorted(std::vector<int64_t> values) {
    std::sort(values.begin(), values.end());
    return values;
  }

  Replays& replays_;
  const IsolateOptions& options_;
  const RunRecord record_;
  const int64_t H_, L_;
  Evidence e_;
};

}  // namespace

std::vector<int64_t> smallest_cure(const std::vector<int64_t>& units,
                                   const std::function<bool(const std::vector<int64_t>&)>& heals) {
  if (units.size() < 2) return units;
  if (heals({units[0]})) return {units[0]};
  std::vector<int64_t> current = units;
  size_t parts = 2;
  while (current.size() >= 2) {
    const auto part = [&](size_t n, bool inside) {
      std::vector<int64_t> some;
      for (size_t i = 0; i < current.size(); ++i)
        if ((i * parts / current.size() == n) == inside) some.push_back(current[i]);
      return some;
    };
    bool smaller = false;
    for (size_t n = 0; n < parts && !smaller; ++n)
      if (std::vector<int64_t> some = part(n, true); heals(some))
        current = std::move(some), parts = 2, smaller = true;
    for (size_t n = 0; parts > 2 && n < parts && !smaller; ++n)
      if (std::vector<int64_t> some = part(n, false); heals(some))
        current = std::move(some), parts = std::max<size_t>(2, parts - 1), smaller = true;
    if (smaller) continue;
    if (parts >= current.size()) break;
    parts = std::min(2 * parts, current.size());
  }
  return current;
}

std::string isolate_will_lack(const RunConfig& c) {
  if (c.schedule.steps <= kReplaySteps) return "";
  if (c.facts_every == 0 && c.guard == GuardMode::off && c.probe_every == 0)
    return "isolate will see no offsets of this run: --facts-every 10 records them";
  const bool kept = c.keep_every > 0 && c.keep_every <= kReplaySteps;
  const bool dense = c.checkpoint_every > 0 && c.checkpoint_every <= kReplaySteps &&
                     c.schedule.steps <= c.checkpoint_every * c.checkpoints_kept;
  if (kept || dense) return "";
  return fmt::format(
      "isolate may not be able to explain this run: {}; --set run.keep_every={} keeps enough",
      c.checkpoint_every == 0 && c.keep_every == 0 ? std::string("no checkpoint is written before the end")
      : c.keep_every > 0 ? fmt::format("checkpoints that stay are {} steps apart, a replay has {}",
                                       c.keep_every, kReplaySteps)
                         : fmt::format("only the newest {} checkpoints stay, {} steps apart",
                                       c.checkpoints_kept, c.checkpoint_every),
      kReplaySteps / 2);
}

Isolation isolate(Replays& replays, const IsolateOptions& options) {
  require(options.steps >= 4, "[isolate] expected replays of 4 steps or more, got {}", options.steps);
  return Search(replays, options).run();
}

nlohmann::json to_json(const Isolation& found, const Replays& replays) {
  using Json = nlohmann::json;
  const Evidence& e = found.evidence;
  const int64_t H = replays.config().model.heads;
  Json heads = Json::array(), sites = Json::array(), alone = Json::array(), formats = Json::array();
  for (const int64_t head : e.guilty) heads.push_back({{"layer", head / H}, {"head", head % H}});
  for (const Site site : e.sites) sites.push_back(name(site));
  for (const Site site : e.alone) alone.push_back(name(site));
  if (!e.guilty.empty()) {
    const PrecisionPlan plan = replays.plan_at(e.window.begin)
                                   .at(static_cast<int>(e.guilty[0] / H), static_cast<int>(e.guilty[0] % H));
    for (const Site site : e.sites) formats.push_back(to_string(plan.at(site)));
  }
  // The limit that the verdict goes by: the control's, or the run's own where none was replayed.
  const bool has_limit = e.control || e.symptom.kind == Symptom::Kind::offset;
  const DriftLimit& limit = e.control ? e.limit : e.symptom.limit;
  // Each part a trial plays in the argument, and whether it healed.
  Json parts = Json::array(), trials = Json::array();
  for (size_t n = 0; n < kVerdictPartCount; ++n) {
    const Trial* const trial = trial_of(e, static_cast<VerdictPart>(n));
    if (!trial) continue;
    Json json = to_json(*trial);
    for (const char* long_one : {"head_offset", "leak_size", "leak_bias", "step_loss"}) json.erase(long_one);
    json["part"] = kVerdictParts[n].name;
    if (e.measure != Evidence::Measure::none && e.control) json["heals"] = e.heals(*trial);
    parts.push_back(std::move(json));
  }
  for (const Trial& trial : replays.trials()) trials.push_back(to_json(trial));
  return json_with_words({{"schema", kRecordSchema},
                          {"run", replays.run().string()},
                          {"cause", name(found.verdict.cause)},
                          {"words", found.verdict.words},
                          {"certainty", found.verdict.certainty},
                          {"next_command", found.verdict.next_command},
                          {"evidence", found.verdict.evidence},
                          {"symptom", e.symptom.words},
                          {"since", e.symptom.since},
                          {"limit", has_limit ? Json(limit.limit) : Json(nullptr)},
                          {"limit_words", has_limit ? in_words(limit) : ""},
                          {"shows_symptom", e.shows_symptom},
                          {"begin", e.window.begin},
                          {"end", e.window.end},
                          {"heads", heads},
                          {"sites", sites},
                          {"formats", formats},
                          {"sites_alone", alone},
                          {"parts", parts},
                          {"bits", found.bits ? parse_json(to_json(*found.bits)) : Json(nullptr)},
                          {"replays", replays.trials().size()},
                          {"trials", trials}});
}

void write_verdict(const Isolation& found, const Replays& replays) {
  nlohmann::json kept = to_json(found, replays);
  kept.erase("trials");  // isolate.json has them
  write_json_record(replays.run(), RecordFile::verdict, kept);
}

}  // namespace evenkeel
