#include "report/capture_view.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "diagnosis/capture.h"
#include "diagnosis/probes.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// Probing every head takes about this times ten operations; beyond it (some seconds) only one head is looked at.
constexpr double kProbeLimit = 5e8;

double cost_of(const Capture& c) {
  const auto& s = c.q.shape();
  return static_cast<double>(s[0]) * static_cast<double>(s[1]) * static_cast<double>(s[2]) *
         static_cast<double>(s[2]) * static_cast<double>(s[3]);
}

CaptureView view_of(const Capture& c, const std::string& file, int64_t n, const HeadProbe& probe) {
  CaptureView view;
  view.file = file, view.source = c.source;
  view.step = c.step, view.layer = c.layer, view.head = c.heads[static_cast<size_t>(n)];
  view.plan = to_string(c.plans[static_cast<size_t>(n)]);
  view.probe = probe;
  view.words = in_words(probe, fmt::format("layer {} head {}", view.layer, view.head));
  view.analysis = analyse_head(c, n);
  const int64_t T = c.v.shape()[2], D = c.v.shape()[3];
  const auto v = c.v.view();
  view.v.assign(static_cast<size_t>(D), std::vector<double>(static_cast<size_t>(T)));
  for (int64_t d = 0; d < D; ++d) {
    double sum = 0, sizes = 0;
    for (int64_t t = 0; t < T; ++t) {
      const auto value = static_cast<double>(v.at(view.analysis.sequence, c.group_of(n), t)[d]);
      view.v[static_cast<size_t>(d)][static_cast<size_t>(t)] = value;
      sum += value, sizes += std::fabs(value);
    }
    view.v_sign.push_back(sizes > 0 ? sum / sizes : 0);
  }
  return view;
}

std::optional<CaptureView> find_view(std::span<const fs::path> files, int64_t layer, int64_t head,
                                     std::vector<std::string>& notes) {
  struct Candidate {
    Capture capture;
    std::string file;
    int64_t head;
    HeadProbe probe;
    double leak;
  };
  std::optional<Candidate> best;
  for (const fs::path& file : files) {
    try {
      Capture c = read_capture(file);
      int64_t n = -1;
      double leak = 0;
      HeadProbe probe_of;
      const auto wanted = std::find(c.heads.begin(), c.heads.end(), head);
      const bool named = c.layer == layer && wanted != c.heads.end();
      if (cost_of(c) <= kProbeLimit) {
        const std::vector<HeadProbe> probes = probe(c);
        n = named ? wanted - c.heads.begin() : std::max<int64_t>(0, worst_head(probes));
        probe_of = probes[static_cast<size_t>(n)];
        leak = std::isnan(probe_of.leak_share) ? probe_of.residual_share : probe_of.leak_share;
      } else {
        n = named ? wanted - c.heads.begin() : 0;
      }
      if (named) leak = std::numeric_limits<double>::infinity();
      if (!best || leak > best->leak)
        best = Candidate{std::move(c), file.filename().string(), n, probe_of, leak};
    } catch (const std::exception& fault) {
      notes.push_back(fmt::format("a capture cannot be read: {}", fault.what()));
    }
  }
  if (!best) return {};
  try {
    return view_of(best->capture, best->file, best->head, best->probe);
  } catch (const std::exception& fault) {
    notes.push_back(fmt::format("{} cannot be analysed: {}", best->file, fault.what()));
    return {};
  }
}

}  // namespace

std::shared_ptr<const CaptureView> look_at(std::span<const fs::path> captures, int64_t layer, int64_t head,
                                           std::vector<std::string>& notes) {
  if (captures.empty()) return nullptr;
  std::string key = fmt::format("{} {}", layer, head);
  for (const fs::path& file : captures) {
    std::error_code error;
    const auto time = fs::last_write_time(file, error).time_since_epoch().count();
    key += fmt::format("\n{} {} {}", file.string(), time, fs::file_size(file, error));
  }
  struct Kept {
    std::shared_ptr<const CaptureView> view;
    std::vector<std::string> notes;
  };
  static std::mutex mutex;
  static std::map<std::string, Kept> kept;
  constexpr size_t kMost = 8;  // pages at once
  const std::lock_guard lock(mutex);
  auto found = kept.find(key);
  if (found == kept.end()) {
    if (kept.size() >= kMost) kept.clear();
    Kept fresh;
    if (auto view = find_view(captures, layer, head, fresh.notes))
      fresh.view = std::make_shared<const CaptureView>(std::move(*view));
    found = kept.emplace(key, std::move(fresh)).first;
  }
  notes.insert(notes.end(), found->second.notes.begin(), found->second.notes.end());
  return found->second.view;
}

}  // namespace evenkeel
