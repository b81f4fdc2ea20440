#include "attention/row_tile.h"

#include <algorithm>
#include <cmath>

#include "numerics/round_array.h"
#include "numerics/tensor_core.h"

namespace evenkeel {
namespace {

// The model for operands of a site: of its format; what the chip has no row for is added as BF16 is, by the default chip if
// need be. Under a shared scale the operands are the scaled numbers, so that the products align as the scaled ones do, and
// the format's least exponent has no meaning.
TensorCoreModel tensor_core_of(const PrecisionPlan& plan, Site operand) {
  const Rounding& rounding = plan.at(operand);
  const TensorCoreModel* found = nullptr;
  for (const Format format : {rounding.format, kBf16})
    for (const TensorCoreModel& model : kTensorCoreModels)
      if (!found && model.chip == plan.chip && model.operand == format) found = &model;
  TensorCoreModel model = found ? *found : find_tensor_core_model(kBf16);
  if (rounding.shared != SharedScale{}) model.operand.exponent_bits = kFp32.exponent_bits;
  return model;
}

}  // namespace

RowTile::RowTile(const Call& call)
    : call_(call),
      kernels_(call.kernels),
      observer_(call.observer),
      D_(call.problem.D),
      Dv_(call.problem.Dv),
      width_(call.tile_rows()),
      depth_(call.operands.stride()) {
  const size_t rows = at(width_);
  first_key_.resize(rows);
  last_key_.resize(rows);
  tile_.resize(at(call.tile_keys() * width_));
  zeros_.resize(rows);
  unused_.resize(rows);
  counts_.resize(rows);
}

void RowTile::start(int64_t b, int64_t h, int64_t first_row) {
  b_ = b;
  h_ = h;
  row_ = first_row;
  head_ = &call_.plans[at(h)];
  rows_ = std::min(width_, call_.problem.rows(b) - first_row);
  columns_ = round_up(rows_, kColumnStep);
  for (int64_t i = 0; i < columns_; ++i) {
    const auto [first, last] =
        i < rows_ ? call_.problem.key_range(b, row_ + i) : std::pair<int64_t, int64_t>{0, 0};
    first_key_[at(i)] = first;
    last_key_[at(i)] = last;
  }
}

void RowTile::pack(View<const float> from, Site site, std::vector<float>& rows,
                   std::vector<float>& transposed) {
  const int64_t size = from.shape[3];
  rows.assign(at(width_ * depth_), 0.0f);
  transposed.resize(at(size * width_));
  const bool is_query = first_reading(site) == Site::q;
  if (is_query) mean_query_.assign(at((width_ + kScaleTileRows - 1) / kScaleTileRows * depth_), 0.0f);
  pack_rows(from, b_, h_, row_, rows_, rows.data(), depth_,
            is_query && head_->centres_queries ? mean_query_.data() : nullptr);
  const Rounding& rounding = plan().at(site);
  if (!is_identity(rounding) || observer_) {
    if (observer_) exact_ = rows;
    round_rows(rounding, rows.data(), rows_, size, depth_, call_.operands.largest(site, b_, h_),
               stream_key(call_.problem, plan(), static_cast<uint32_t>(first_reading(site))),
               static_cast<uint64_t>((random_head() * call_.problem.T + row_) * size));
    if (observer_)
      observer_->observe({site, b_, h_, row_, 0, rows_, size, depth_, 1, exact_.data(), rows.data()});
  }
  kernels_.transpose(transposed.data(), width_, rows.data(), depth_, columns_, size);
}

void RowTile::pack_plain(View<const float> from, std::vector<float>& transposed) {
  const int64_t size = from.shape[3];
  transposed.assign(at(size * width_), 0.0f);
  if (from.stride[3] == 1) {
    kernels_.transpose(transposed.data(), width_, from.at(b_, h_, row_), from.stride[2], rows_, size);
    return;
  }
  for (int64_t i = 0; i < rows_; ++i)
    for (int64_t d = 0; d < size; ++d) transposed[at(d * width_ + i)] = *from.at(b_, h_, row_ + i, d);
}

void RowTile::unpack(const View<float>& to, const std::vector<float>& transposed) {
  const int64_t size = to.shape[3];
  if (to.stride[3] == 1) {
    kernels_.transpose(to.at(b_, h_, row_), to.stride[2], transposed.data(), width_, size, rows_);
    return;
  }
  for (int64_t i = 0; i < rows_; ++i)
    for (int64_t d = 0; d < size; ++d) *to.at(b_, h_, row_ + i, d) = transposed[at(d * width_ + i)];
}

void RowTile::unpack_row_values(const View<float>& to, const std::vector<float>& values) {
  for (int64_t i = 0; i < rows_; ++i) *to.at(b_, h_, row_ + i) = values[at(i)];
}

void RowTile::round_lines(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines,
                          int64_t column) {
  if (is_identity(plan().at(site)) && !observer_) return;
  if (observer_) exact_.assign(block, block + lines * width_);
  round_only(site, block, lines, first_line, all_lines);
  if (observer_) show(site, block, lines, column);
}

void RowTile::round_only(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines) {
  const Rounding& rounding = plan().at(site);
  if (is_identity(rounding)) return;
  if (rounding.shared != SharedScale{})
    round_shared(site, block, lines, first_line, all_lines);
  else
    round_elements(rounding, site, block, lines, first_line, all_lines);
}

void RowTile::round_shared(Site site, float* block, int64_t lines, int64_t first_line, int64_t all_lines) {
  const Rounding& rounding = plan().at(site);
  const SharedScale& shared = rounding.shared;
  scales_.clear();
  for (int64_t i = 0; i < rows_; i += kScaleTileRows) {
    const ScaledMatrix m{block + i, std::min<int64_t>(kScaleTileRows, rows_ - i), lines, 1, width_};
    const std::vector<float> scales = find_scales(rounding, m);
    scales_.insert(scales_.end(), scales.begin(), scales.end());
  }
  const ScaledMatrix all{block, rows_, lines, 1, width_};
  divide_by_scales(shared, all, scales_);
  round_elements(element_rounding(rounding), site, block, lines, first_line, all_lines);
  multiply_by_scales(shared, all, scales_);
}

void RowTile::round_elements(const Rounding& rounding, Site site, float* block, int64_t lines,
                             int64_t first_line, int64_t all_lines) {
  if (columns_ == width_ && rounding.mode != RoundingMode::stochastic) {
    round_array(rounding, block, block, at(lines * width_));
    return;
  }
  // T is padded to the random numbers' group, so that tiles of 64 rows start at a group.
  const int64_t pitch = round_up(call_.problem.T, static_cast<int64_t>(kRandomGroup));
  for (int64_t line = 0; line < lines; ++line)
    round_array(rounding, block + line * width_, block + line * width_, at(columns_),
                stream_key(call_.problem, plan(), static_cast<uint32_t>(first_reading(site))),
                static_cast<uint64_t>((random_head() * all_lines + first_line + line) * pitch + row_));
}

void RowTile::show(Site site, const float* block, int64_t lines, int64_t column) {
  observer_->observe({site, b_, h_, row_, column, rows_, lines, 1, width_, exact_.data(), block});
}

void RowTile::multiply(Site operand, int64_t rows, int64_t columns, int64_t depth, const float* a,
                       int64_t a_row, int64_t a_column, const float* b, int64_t b_stride, float* c,
                       int64_t c_stride, bool accumulate, float scale) const {
  if (plan().accumulate == Accumulate::fp32_sequential) {
    kernels_.multiply(rows, columns, depth, a, a_row, a_column, b, b_stride, c, c_stride, accumulate, scale);
    return;
  }
  const TensorCoreModel model = tensor_core_of(plan(), operand);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; ++n) {
      float& result = c[m * c_stride + n];
      const float sum = tensor_core_dot_promoted(model, a + m * a_row, a_column, b + n, b_stride,
                                                 static_cast<size_t>(depth), accumulate ? result : 0.0f,
                                                 static_cast<size_t>(plan().promote));
      result = accumulate ? sum : sum * scale;
    }
}

void RowTile::score_tile(int64_t key, int64_t keys) {
  const Site operand = call_.operands.pass() == Pass::forward ? Site::k : Site::k_bwd;
  multiply(operand, keys, columns_, D_, call_.operands.k(b_, h_, key), depth_, 1, qt_.data(), width_,
           tile_.data(), width_, /*accumulate=*/false, call_.problem.scale);
  if (head_->centres_queries) add_mean_queries(key, keys);
  if (const float cap = call_.problem.softcap; cap > 0)
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < rows_; ++i) {
        float& s = tile_[at(j * width_ + i)];
        s = cap * std::tanh(s / cap);
      }
  if (!call_.problem.slopes.empty()) {
    const float slope = call_.problem.slopes[at(h_)];
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < rows_; ++i)
        tile_[at(j * width_ + i)] -=
            slope * static_cast<float>(std::abs(call_.problem.position(b_, row_ + i) - key - j));
  }
  if (observer_) exact_.assign(tile_.begin(), tile_.begin() + keys * width_);
  round_only(Site::scores, tile_.data(), keys, key, call_.problem.N);
  mask_tile(tile_.data(), key, keys);
  if (observer_) {
    mask_tile(exact_.data(), key, keys);
    show(Site::scores, tile_.data(), keys, key);
  }
}

// What the queries' means take from the scores, given back: a mean . k_j with k_j before its rounding.
void RowTile::add_mean_queries(int64_t key, int64_t keys) {
  const View<const float>& k = call_.in.k;
  const float* const mean_key = call_.operands.mean_key(b_, h_);
  const int64_t g = h_ / (call_.problem.H / call_.problem.G);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t first = 0; first < rows_; first += kScaleTileRows) {
      double dot = 0;
      for (int64_t d = 0; d < D_; ++d)
        dot += static_cast<double>(mean_query(first)[d]) * (*k.at(b_, g, key + j, d) - mean_key[d]);
      const float part = call_.problem.scale * static_cast<float>(dot);
      for (int64_t i = first; i < std::min(first + kScaleTileRows, rows_); ++i)
        tile_[at(j * width_ + i)] += part;
    }
}

void RowTile::mask_tile(float* scores, int64_t key, int64_t keys) const {
  bool whole = true;
  for (int64_t i = 0; i < columns_; ++i) whole &= first_key_[at(i)] <= key && last_key_[at(i)] >= key + keys;
  if (!whole)
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < columns_; ++i) {
        const bool seen = first_key_[at(i)] <= key + j && key + j < last_key_[at(i)];
        float& s = scores[j * width_ + i];
        s = seen ? s : RowShift::kNone;
      }
  if (const auto& visible = call_.problem.mask.visible; visible.present())
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < rows_; ++i)
        if (*visible.at(b_, h_, row_ + i, key + j) == 0) scores[j * width_ + i] = RowShift::kNone;
}

void RowTile::count_at_least(const std::vector<float>& threshold, int64_t keys) {
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < columns_; ++i) counts_[at(i)] += tile_[at(j * width_ + i)] >= threshold[at(i)];
}

}  // namespace evenkeel
