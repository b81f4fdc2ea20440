// Fewer points of a curve, none of its peaks lost; means over stretches with their bands.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "report/chart.h"

namespace evenkeel {

std::vector<size_t> thinned(std::span<const double> y, size_t most) {
  std::vector<size_t> kept;
  const size_t stretches = std::max<size_t>(1, most / 4);
  if (y.size() <= most) {
    for (size_t n = 0; n < y.size(); ++n) kept.push_back(n);
    return kept;
  }
  for (size_t s = 0; s < stretches; ++s) {
    const size_t begin = s * y.size() / stretches, end = (s + 1) * y.size() / stretches;
    size_t least = begin, largest = begin, bad = end;
    for (size_t n = begin; n < end; ++n) {
      if (!std::isfinite(y[n])) {
        bad = std::min(bad, n);
        continue;
      }
      if (!(y[n] >= y[least])) least = n;
      if (!(y[n] <= y[largest])) largest = n;
    }
    std::array<size_t, 5> some = {begin, least, largest, end - 1, bad < end ? bad : begin};
    std::sort(some.begin(), some.end());
    for (const size_t n : some)
      if (kept.empty() || n > kept.back()) kept.push_back(n);
  }
  return kept;
}

Line thin(const Line& line, size_t most) {
  if (line.y.size() <= most) return line;
  Line out = line;
  out.x.clear(), out.y.clear(), out.low.clear(), out.high.clear();
  for (const size_t n : thinned(line.y, most)) {
    out.x.push_back(line.x[n]), out.y.push_back(line.y[n]);
    if (!line.low.empty()) out.low.push_back(line.low[n]), out.high.push_back(line.high[n]);
  }
  return out;
}

Line binned_logarithms(const Line& line, size_t bins) {
  Line logarithms = line;
  for (double& y : logarithms.y) y = y > 0 ? std::log10(y) : std::numeric_limits<double>::quiet_NaN();
  Line out = binned(logarithms, {}, bins);
  for (std::vector<double>* values : {&out.y, &out.low, &out.high})
    for (double& value : *values) value = std::pow(10.0, value);
  return out;
}

Line binned(const Line& line, std::span<const double> error, size_t bins) {
  constexpr double kBand = 1.96;  // standard errors: 95 of 100 normal numbers
  Line out = line;
  out.x.clear(), out.y.clear(), out.low.clear(), out.high.clear();
  const size_t count_of = std::min(bins, line.y.size());
  for (size_t b = 0; b < count_of; ++b) {
    const size_t begin = b * line.y.size() / count_of, end = (b + 1) * line.y.size() / count_of;
    double sum = 0, squares = 0, variance = 0, place = 0;
    size_t n = 0;
    for (size_t k = begin; k < end; ++k) {
      if (!std::isfinite(line.y[k])) continue;
      sum += line.y[k], squares += line.y[k] * line.y[k], place += line.x[k], ++n;
      if (!error.empty() && std::isfinite(error[k])) variance += error[k] * error[k];
    }
    if (n == 0) continue;
    const auto m = static_cast<double>(n);
    const double mean = sum / m;
    const double of_rows = std::sqrt(variance) / m,
                 of_scatter = n > 1 ? std::sqrt(std::max(0.0, squares / m - mean * mean) / (m - 1)) : 0;
    const double half = kBand * (error.empty() ? of_scatter : std::max(of_rows, of_scatter));
    out.x.push_back(std::round(place / m)), out.y.push_back(mean);
    out.low.push_back(mean - half), out.high.push_back(mean + half);
  }
  return out;
}

}  // namespace evenkeel
