// The work of a warpgroup of Hopper's forward pass, step by step. Included by hopper_forward_block.cuh alone.
#pragma once

#include "attention/cuda/hopper_forward_rows.cuh"
#include "attention/cuda/hopper_forward_tiles.cuh"

namespace evenkeel::hopper::forward {

// kForms: with windows, soft caps, slopes, masks and sinks. kFacts: finds the largest score and row mean too.
template <class Pairs, class Tiles, Shift kShift, bool kForms, bool kFacts>
struct Worker : WarpgroupThread {
  static_assert(!(kForms && kFacts), "what softmax sees are no longer the scores");
  static constexpr bool kFp16 = std::is_same_v<Pairs, Fp16Pairs>;
  using T = Tiles;
  static constexpr int kHeadSize = T::kHeadBoxes * kBoxFeatures, kValueSize = T::kValueBoxes * kBoxFeatures;
  using Shared = typename T::Shared;
  // Two warpgroups take turns at the tensor cores; four get out of step by themselves.
  static constexpr bool kTurns = T::kWarpgroups == 2;
  // consistent with head size 64: l is one more feature of O, the product with a V of ones. To unpack and add the
  // rounded probabilities would take two instructions for each.
  static constexpr bool kOnes = kShift == Shift::consistent && kHeadSize == 64;
  static constexpr int kOutputs = kValueSize / 2 + (kOnes ? 4 : 0);                      // a thread's
  static constexpr int kNextBarrier = 1, kStoreBarrier = kNextBarrier + T::kWarpgroups;  // named barriers
  static constexpr int kScores = T::kKeys / 2, kPairs = kScores / 2;                     // a thread's

  Shared& shared;
  const ForwardArguments& a;
  const CUtensorMap& o_map;

  int count = 0;  // of query tiles so far: names Q's stage and the item
  Ring<T::kStages> k, v;
  int row;        // this warpgroup's first row in the query tile at hand
  int j;          // key tile whose scores are next (or just computed)
  int first = 0;  // the last one that this warpgroup sees of its query tile, which is the first of the keys
  bool half;      // only the first half of that tile is seen
  float s[kScores];    // of 64 rows x kKeys keys
  uint32_t p[kPairs];  // probabilities
  float o[kOutputs];
  Rows<kShift> state;
  bool far = false;  // a row of this warp has a residue
  // kFacts, of the two rows: this thread's part of the sum of their scores, in powers of two; their largest, as it comes.
  float total[2], largest[2];

  EK_DEVICE Worker(Shared& shared_, const ForwardArguments& a_, const CUtensorMap& o_map_, int group_)
      : WarpgroupThread(group_), shared(shared_), a(a_), o_map(o_map_) {}

  EK_DEVICE void wait_turn() {
    if (kTurns) named_sync(kNextBarrier + group, 2 * kWarpgroup);
  }
  EK_DEVICE void pass_turn() {
    if (kTurns) named_arrive(kNextBarrier + (group + 1 == T::kWarpgroups ? 0 : group + 1), 2 * kWarpgroup);
  }

  // Which 64 rows of a query tile: in turn from both ends, so that with a causal mask all do the same work in
  // the end. Within a window all do the same work anyhow. Taking the same rows of each tile, a warpgroup then leaves out as
  // many key tiles between one and the next as any other, and few enough to follow at once.
  EK_DEVICE int block_of(int item) const {
    const bool alternates = T::kStages > 3 && !(kForms && a.left < a.sequences.N);
    return alternates && item % 2 ? T::kWarpgroups - 1 - group : group;
  }
  EK_DEVICE const Item& item() const { return shared.items[count % T::kItems]; }
  // The query tile `count`: its key tiles (< 0: no more work), how many of them this warpgroup sees, and how many come
  // before those.
  EK_DEVICE int look(int& own, int& ahead) {
    barrier_wait(&shared.q_full[count % T::kQueryStages][query_part()], count / T::kQueryStages & 1);
    const Item& item = this->item();
    row = item.row + block_of(count) * kWarpgroupRows;
    int limit = 0;
    if (row < item.rows)
      limit = max(0, key_limit(a.right, min(row + kWarpgroupRows, item.rows) - 1, item.rows, item.keys));
    const int end = (limit + T::kKeys - 1) / T::kKeys;
    if constexpr (kForms) first = first_key(a.left, row, item.rows, item.keys) / T::kKeys;
    own = end - first;
    ahead = own > 0 ? item.first_tile + item.tiles - end : item.tiles;
    half = T::kHalves && end * T::kKeys - limit >= T::kHalf;
    j = end - 1;
    return item.tiles;
  }
  // Lanes leave a wait one by one: a tile is passed on when the last one has, or that one waits for a later load for ever.
  EK_DEVICE void skip_keys(int tiles) {
    for (; tiles > 0; --tiles) {
      wait_turn();
      pass_turn();
      barrier_wait(&shared.k_full[k.stage], k.parity);
      __syncwarp();
      release(&shared.k_empty[k.stage]);
      k.next();
    }
  }
  EK_DEVICE void skip_values(int tiles) {
    for (; tiles > 0; --tiles) {
      barrier_wait(&shared.v_full[v.stage], v.parity);
      __syncwarp();
      release_values();
    }
  }
  EK_DEVICE void skip_tiles(int tiles) {
    for (; tiles > 0; --tiles) skip_keys(1), skip_values(1);
  }
  // Stands before the first key tile of the next query tile whose rows see a key. False: no more work.
  EK_DEVICE bool seek_item() {
    while (true) {
      int own, ahead;
      if (look(own, ahead) < 0) return false;
      skip_tiles(ahead);
      if (own > 0) return true;
      __syncwarp();
      release_query(count);
      write_empty_rows(item());
      ++count;
    }
  }
  // Is the next query tile near enough for its first scores to go with this one's last product? Further ahead, V would not
  // follow. `left_over`: key tiles of this one that only others see; `skipped`: those, and the next one's.
  EK_DEVICE bool follows(int left_over, int& skipped) {
    if (T::kQueryStages == 1) return false;  // its Q comes when this one's O has left
    if (left_over > T::kStages - 2) return false;
    int own, ahead;
    const int tiles = look(own, ahead);
    skipped = left_over + ahead;
    return tiles >= 0 && own > 0 && skipped <= T::kStages - 2;
  }
  EK_DEVICE int query_part() const { return T::kLarge ? group : 0; }
  EK_DEVICE void release_query(int tile) { release(&shared.q_empty[tile % T::kQueryStages][query_part()]); }

  EK_DEVICE void wait_keys() { barrier_wait(&shared.k_full[k.stage], k.parity); }
  EK_DEVICE void wait_values() { barrier_wait(&shared.v_full[v.stage], v.parity); }
  EK_DEVICE void issue_scores() {
    const uint64_t query = operand(shared.q[count % T::kQueryStages][query_part()][0] +
                                   (T::kLarge ? 0 : block_of(count)) * kWarpgroupRows * kRowBytes);
    const uint64_t key = operand(shared.k[k.stage][0]);
    begin_product<kHeadSize, T::kQueryBox, T::kKeyBox, kFp16>(s, query, key);
  }
  EK_DEVICE void release_keys() {
    settle(s);
    release(&shared.k_empty[k.stage]);
    k.next();
  }
  EK_DEVICE void issue_values() {
    // The ones stand where the box of the next 64 features would: nearer from step to step.
    const uint64_t value =
        operand(shared.v[v.stage][0], kOnes ? shared.ones - shared.v[v.stage][0] : T::kKeyBox);
    constexpr uint32_t kStepBytes = 16 * kRowBytes, kNearer = kOnes ? (kStepBytes >> 4) << 16 : 0;
    products_begin();
#pragma unroll
    for (int step = 0; step < T::kKeys / 16; ++step)
      Wgmma<kValueSize + (kOnes ? 8 : 0), kFp16>::template rs<true>(
          o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
          advance(value, step * kStepBytes) - step * kNearer, true);
    products_commit();
  }
  EK_DEVICE void release_values() {
    release(&shared.v_empty[v.stage]);
    v.next();
  }
  // Rows behind the sequence's last key may hold anything, NaN too; their probability is 0. Every warpgroup
  // clears them for itself: doing it twice does no harm.
  EK_DEVICE void clear_values() {
    const int here = item().keys - j * T::kKeys;
    if (here >= T::kKeys || !a.sequences.key_lengths) return;
    wait_values();
#pragma unroll
    for (int box = 0; box < T::kValueBoxes; ++box)
      for (int at = here * kRowBytes + thread * 16; at < T::kKeyBox; at += kWarpgroup * 16)
        *reinterpret_cast<uint4*>(shared.v[v.stage][box] + at) = uint4{0, 0, 0, 0};
    store_fence();
    named_sync(kStoreBarrier + group, kWarpgroup);
  }

  // f(index, which of the two rows) over a thread's scores, or the first half of them.
  template <class F>
  EK_DEVICE void each_score(F f) {
#pragma unroll
    for (int i = 0; i < (T::kHalves ? kScores / 2 : kScores); ++i) f(i, i / 2 % 2);
    if (T::kHalves && !half) {
#pragma unroll
      for (int i = kScores / 2; i < kScores; ++i) f(i, i / 2 % 2);
    }
  }
  // Scores as softmax sees them. `clear`, `clear_from`: key tiles [clear_from, clear) are seen whole by all rows.
  EK_DEVICE void shape_scores(int clear, int clear_from) {
    if (kForms && a.shaped) {
      if (a.softcap > 0) {
        const float factor = a.scale / a.softcap;
        each_score([&](int i, int) { s[i] = tanh_of(s[i] * factor); });
      }
      if (a.slopes) slope();
      if (a.visible) hide();
    }
    // One edge of the band at a time: a tile that holds both is rare.
    if (j >= clear) mask_behind();
    if (kForms && j < clear_from) mask_before();
  }
  EK_DEVICE void mask_behind() {
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + lane_row + 8 * r, here = j * T::kKeys + lane_column;
      limit[r] = key_limit(a.right, own, item().rows, item().keys) - here;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = kMinusInfinity;
  }
  EK_DEVICE void mask_before() {
    int from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = row + lane_row + 8 * r, here = j * T::kKeys + lane_column;
      from[r] = first_key(a.left, own, item().rows, item().keys) - here;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = kMinusInfinity;
  }
  EK_DEVICE void slope() {
    const float slope = slope_of(a, item().h);
    const int distance = row + lane_row + item().keys - item().rows - j * T::kKeys - lane_column;
    each_score([&](int i, int r) {
      s[i] = fmaf(-slope, fabsf(static_cast<float>(distance + 8 * r - (i / 4 * 8 + i % 2))), s[i]);
    });
  }
  EK_DEVICE void hide() {
    const Visible visible(a, item().head / a.H, item().h);
    each_score([&](int i, int r) {
      const int own = row + lane_row + 8 * r, key = j * T::kKeys + lane_column + i / 4 * 8 + i % 2;
      if (own < item().rows && key < item().keys && !visible(own, key)) s[i] = kMinusInfinity;
    });
  }

  // Adds up what the rows see of this tile, unless they see all of it.
  EK_DEVICE void note_masked(int clear) {
    if (j >= clear)
      each_score([&](int i, int r) {
        total[r] = fmaf(s[i] == kMinusInfinity ? 0.0f : s[i], a.score_log2, total[r]);
      });
  }
  // The facts of the warp's rows of a query tile that is done.
  EK_DEVICE void write_score_facts(const Item& done, int done_row) {
    float score = kMinusInfinity, mean = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(total[r]);
      const int i = done_row + lane_row + 8 * r, keys = key_limit(a.right, i, done.rows, done.keys);
      if (i >= done.rows || keys <= 0) continue;
      score = fmaxf(score, largest[r] * a.scale);
      // A score of +infinity makes the sum NaN (it is its own shift), which a maximum leaves out.
      mean = fmaxf(mean, largest[r] == -kMinusInfinity ? -kMinusInfinity
                                                       : fabsf(sum * kLn2 / static_cast<float>(keys)));
    }
    score = warp_max(score);
    mean = warp_max(mean);
    if (thread % kWarp != 0) return;
    raise(a.largest_score + done.h, score);
    raise(a.largest_row_mean + done.h, mean);
  }

  // s: scores to p: probabilities; moves the rows' shifts, and O with them (after the product in flight).
  template <bool kInFlight>
  EK_DEVICE void softmax(int clear) {
    float most[2];
    find_largest(most);
    if constexpr (kFacts) largest[0] = fmaxf(largest[0], most[0]), largest[1] = fmaxf(largest[1], most[1]);
    int ties[2] = {0, 0};
    if constexpr (kShift == Shift::paper_capped) count_ties(most, ties);
    float before[2], used[2];
    const bool moves = move_shift(most, ties, before, used);
    if constexpr (kInFlight) {
      hold(fabsf(used[0]) + fabsf(used[1]), a.below_all);
      products_wait<0>();
      settle(o);
      if (__any_sync(~0u, moves)) rescale(most, before, used);
    } else if constexpr (Rows<kShift>::kHasResidue) {
      float unused[2];
      move_residues(most, before, used, unused);
    }
    float subtracted[2] = {used[0], used[1]}, exponents[2] = {0, 0};
    if (Rows<kShift>::kHasResidue && far) subtract_largest(subtracted);
    exponentiate(subtracted, exponents);
    if (kFacts && j < clear) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        total[r] += fmaf(static_cast<float>(kScores / 2), used[r] + state.residue(r), exponents[r]);
    }
  }
  EK_DEVICE void find_largest(float (&most)[2]) {
    // Two chains a row: a maximum takes its unit two cycles, but four until it can be used.
    float chain[4] = {s[0], s[1], s[2], s[3]};
    each_score([&](int i, int) {
      if (i >= 4) chain[i % 4] = fmaxf(chain[i % 4], s[i]);
    });
    most[0] = quad_max(fmaxf(chain[0], chain[1]));
    most[1] = quad_max(fmaxf(chain[2], chain[3]));
  }
  // Scores that tie with the rows' largest ones.
  EK_DEVICE void count_ties(const float (&most)[2], int (&ties)[2]) {
    float threshold[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      threshold[r] = fmaxf(state.max[r], most[r] * a.score_unit) - a.rules.tie_tolerance;
    each_score([&](int i, int r) { ties[r] += s[i] * a.score_unit >= threshold[r]; });
#pragma unroll
    for (int r = 0; r < 2; ++r) ties[r] = quad_sum(ties[r]);
  }
  // before, used: the shifts until now, and those that hold for this tile (0 without a key). True: some shift moves.
  EK_DEVICE bool move_shift(const float (&most)[2], const int (&ties)[2], float (&before)[2],
                            float (&used)[2]) {
    bool moves = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      before[r] = state.shift[r];
      const float moved = state.moved(a, r, most[r], ties[r]);
      if (moved > before[r] + a.rules.slack) {
        state.shift[r] = moved;
        moves = true;
      }
      used[r] = state.shift[r] == kMinusInfinity ? 0.0f : state.shift[r];
    }
    return moves;
  }
  EK_DEVICE void move_residues(const float (&most)[2], const float (&before)[2], const float (&used)[2],
                               float (&fallen)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) fallen[r] = state.move_residue(a, r, most[r], before[r], used[r]);
    far = __any_sync(~0u, state.unit[0] != 0 || state.unit[1] != 0);
  }
  // O and l under the new shift.
  EK_DEVICE void rescale(const float (&most)[2], float (&before)[2], const float (&used)[2]) {
    float fallen[2];
    if constexpr (Rows<kShift>::kHasResidue) move_residues(most, before, used, fallen);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      before[r] -= used[r];
      if constexpr (Rows<kShift>::kHasResidue) before[r] += fallen[r];
      before[r] = exp2_approx(before[r]);
      state.sum[r] *= before[r];
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= before[i / 2 % 2];
  }
  // Scores less the row's largest one, in rows with a residue. It is exact where they are near it, and gives the largest one an
  // exponent of zero. What the exponents have to lose after that: nothing in these rows, the shift in others.
  EK_DEVICE void subtract_largest(float (&left)[2]) {
    float taken[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool has_residue = state.unit[r] != 0;
      taken[r] = has_residue ? state.max[r] : 0.0f;
      if (has_residue) left[r] = 0;
    }
    each_score([&](int i, int r) { s[i] -= taken[r]; });
  }
  // s to p, and l. kFacts: adds the exponents up, too. Here the units for exponentials are waited for, and it costs little.
  EK_DEVICE void exponentiate(const float (&used)[2], float (&exponents)[2]) {
    each_score([&](int i, int r) {
      const float exponent = fmaf(s[i], a.score_log2, -used[r]);
      if constexpr (kFacts) exponents[r] += exponent;
      s[i] = exp2_approx(exponent);
      if (kShift != Shift::consistent) state.sum[r] += s[i];
      if (i % 2 == 0) return;
      p[i / 2] = Pairs::pack(s[i - 1], s[i]);
      if (kShift == Shift::consistent && !kOnes) {
        state.sum[r] += Pairs::low(p[i / 2]);
        state.sum[r] += Pairs::high(p[i / 2]);
      }
    });
    if (T::kHalves && half) {
#pragma unroll
      for (int pair = kPairs / 2; pair < kPairs; ++pair) p[pair] = 0;
    }
  }

  // O / l, L and what backward needs, of a query tile that is done.
  EK_DEVICE void write(const Item& done, int done_row) {
    float of_keys[2], sum[2], factor[2];
    const float sink = kForms ? sink_log2(a, done.h) : kMinusInfinity;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = of_keys[r] = kOnes ? o[kOutputs - 4 + 2 * r] : quad_sum(state.sum[r]);
      // A sink that leaves the keys nothing makes the sum infinite: O = 0, and so is P.
      if (kForms && sum[r] != 0) sum[r] += exp2_approx(sink - state.shift[r] - state.residue(r));
      factor[r] = sum[r] == 0 ? 0.0f : __fdividef(1.0f, sum[r]);  // no key in sight: O = 0
    }
#pragma unroll
    for (int i = 0; i < kValueSize / 2; ++i) o[i] *= factor[(i / 2) % 2];
    if (done_row + kWarpgroupRows > done.rows) {  // rows that do not exist may hold anything
#pragma unroll
      for (int i = 0; i < kValueSize / 2; ++i)
        if (done_row + lane_row + i / 2 % 2 * 8 >= done.rows) o[i] = 0;
    }
    uint32_t packed[kValueSize / 4];
#pragma unroll
    for (int pair = 0; pair < kValueSize / 4; ++pair)
      packed[pair] = Pairs::pack(o[2 * pair], o[2 * pair + 1]);
    if (a.sequences.query_offsets && done_row + kWarpgroupRows > done.rows)
      store_single_rows(done, done_row, packed);
    else
      store_boxes(done, done_row, packed);
    if (T::kLarge) {  // the next Q comes to where O left from
      if (thread % 32 == 0) store_wait_read<0>();
      release_query(count - 1);
    }
    if (a.saved.residue) write_residue(done, done_row, packed);
    write_row_facts(done, done_row, of_keys, sum, sink);
    if constexpr (kFacts) write_score_facts(done, done_row);
  }
  // The last rows of a packed sequence: the next sequence's rows follow at once.
  EK_DEVICE void store_single_rows(const Item& done, int done_row, const uint32_t (&packed)[kValueSize / 4]) {
#pragma unroll
    for (int pair = 0; pair < kValueSize / 4; ++pair) {
      const int i = done_row + lane_row + pair % 2 * 8, feature = pair / 2 * 8 + lane_column;
      if (i < done.rows && feature < a.Dv)
        *reinterpret_cast<uint32_t*>(a.o + done.h * a.o_stride[1] +
                                     (static_cast<int64_t>(done.first_row) + i) * a.o_stride[2] + feature) =
            packed[pair];
    }
  }
  EK_DEVICE void store_boxes(const Item& done, int done_row, const uint32_t (&packed)[kValueSize / 4]) {
    const int lane = thread % 32, warp_row = thread / 32 * 16, box_row = warp_row + lane % 16;
    if (lane == 0 && !T::kLarge) store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kValueSize / 16; ++block)  // 16 rows x 16 features a warp
      store_matrices(output_box(block / 4) + swizzled(box_row, block % 4 * 2 + lane / 16), packed[4 * block],
                     packed[4 * block + 1], packed[4 * block + 2], packed[4 * block + 3]);
    store_fence();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < T::kValueBoxes; ++box)
        store_box(o_map, output_box(box) + warp_row * kRowBytes, box * kBoxFeatures,
                  done.first_row + done_row + warp_row, done.h, done.query_batch);
      store_commit();
    }
  }
  // Where a box of O stands before it leaves: with large heads in the warpgroup's part of Q, which nobody reads any more.
  EK_DEVICE uint8_t* output_box(int box) {
    if constexpr (T::kLarge)
      return shared.q[0][group][box];
    else
      return shared.o[group][box];
  }
  // L, and consistent's m and l.
  EK_DEVICE void write_row_facts(const Item& done, int done_row, const float (&of_keys)[2],
                                 const float (&sum)[2], float sink) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = done_row + lane_row + 8 * r;
      if (lane_column != 0 || i >= a.sequences.T) continue;
      const bool exists = i < done.rows;
      const size_t at = static_cast<size_t>(done.head) * a.sequences.T + i;
      if constexpr (kShift == Shift::plain)
        if (a.far_rows && exists && is_far(state.shift[r])) store_relaxed(a.far_rows, 1u);
      const float residue = state.residue(r);
      float keys = of_keys[r], log_of_sum = kForms ? 0.0f : __logf(sum[r]);
      // A residue is at most half an ulp of its shift. Beyond 64, where 2^residue would soon leave FP32, what is cut off is
      // less than that of L.
      if (residue != 0) {
        keys *= exp2_approx(fminf(fmaxf(residue, -64.0f), 64.0f));
        log_of_sum = fmaf(residue, kLn2, log_of_sum);
      }
      const float lse = kForms ? log_sum(state.shift[r], keys, sink) : fmaf(state.shift[r], kLn2, log_of_sum);
      a.lse[at] = exists ? lse : kMinusInfinity;
      if (kShift == Shift::consistent) {
        a.saved.row_max[at] = exists ? state.shift[r] : kMinusInfinity;
        a.saved.row_sum[at] = exists ? sum[r] : 0.0f;
      }
    }
  }

  // A row's bytes lie two by two with the four lanes of a quad; after a transposition each lane has 16 in
  // order.
  EK_DEVICE void write_residue(const Item& done, int done_row, const uint32_t (&packed)[kValueSize / 4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = done_row + lane_row + 8 * r;
      const size_t at = static_cast<size_t>(done.head) * a.sequences.T + i;
      int8_t* const to = a.saved.residue + at * a.Dv;
      RandomKey key = a.random;
      if (a.device_step) key.step = *a.device_step;
      // Every feature's noise is uniform; those of a row lie sixteen steps apart, so that errors of features whose
      // gradients have one sign do not add up.
      const uint32_t start = row_noise(key, static_cast<uint32_t>(at)) + thread % 4 * 0x1000u;
      uint32_t noise[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) noise[n] = (start + n * 0x4000u) & 0xffffu;
#pragma unroll
      for (int box = 0; box < T::kValueBoxes; ++box) {
        uint32_t word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int pair = box * 16 + w * 4 + r;  // and the one of the next 8 features
          word[w] = __byte_perm(
              Pairs::residues(o[2 * pair], o[2 * pair + 1], packed[pair], noise[0], noise[1]),
              Pairs::residues(o[2 * pair + 4], o[2 * pair + 5], packed[pair + 2], noise[2], noise[3]),
              0x5410);
        }
        quad_transpose(word);
        const int feature = box * kBoxFeatures + thread % 4 * 16;
        const uint2 low{__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410)};
        const uint2 high{__byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632)};
        if (i >= a.sequences.T) continue;
        if (a.Dv % 16 == 0) {
          if (feature < a.Dv) *reinterpret_cast<uint4*>(to + feature) = uint4{low.x, low.y, high.x, high.y};
        } else {
          if (feature < a.Dv) *reinterpret_cast<uint2*>(to + feature) = low;
          if (feature + 8 < a.Dv) *reinterpret_cast<uint2*>(to + feature + 8) = high;
        }
      }
    }
  }

  // A warpgroup whose rows see no key.
  EK_DEVICE void write_empty_rows(const Item& empty) {
    const bool is_packed = a.sequences.query_offsets;
    const int end = min(row + kWarpgroupRows, a.sequences.T);
    for (int i = row + thread / 2; i < end; i += kWarpgroup / 2) {
      const size_t at = static_cast<size_t>(empty.head) * a.sequences.T + i;
      if (thread % 2 == 0) {
        // A row that sees no key sees its sink.
        a.lse[at] = kForms && a.sinks && i < empty.rows ? a.sinks[empty.h] : kMinusInfinity;
        if (kShift == Shift::consistent) {
          a.saved.row_max[at] = kMinusInfinity;
          a.saved.row_sum[at] = 0;
        }
      }
      uint16_t* const to = a.o + empty.query_batch * a.o_stride[0] + empty.h * a.o_stride[1] +
                           (static_cast<int64_t>(empty.first_row) + i) * a.o_stride[2];
      for (int feature = thread % 2 * 8; feature < a.Dv; feature += 16) {
        if (!is_packed || i < empty.rows) *reinterpret_cast<uint4*>(to + feature) = uint4{0, 0, 0, 0};
        if (a.saved.residue) *reinterpret_cast<uint2*>(a.saved.residue + at * a.Dv + feature) = uint2{0, 0};
      }
    }
  }

  // The scores of key tile j and the product of the one before, together.
  EK_DEVICE void issue_both() {
    wait_keys();
    wait_values();
    wait_turn();
    issue_scores();
    issue_values();
    pass_turn();
  }
  EK_DEVICE void step(int clear, int clear_from) {
    --j;
    half = false;
    issue_both();
    products_wait<1>();
    release_keys();
    shape_scores(clear, clear_from);
    if constexpr (kFacts) note_masked(clear);
    softmax<true>(clear);
    release_values();
  }

  EK_DEVICE void run() {
    if (group + 1 == T::kWarpgroups) pass_turn();
    while (seek_item()) {
      wait_keys();
      wait_turn();
      issue_scores();
      pass_turn();
      products_wait<0>();
      release_keys();
      for (bool chained = true; chained;) {
        state.start(a, item().head, row + lane_row);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] = 0;
        // Key tiles that all of the rows see whole.
        const int clear = max(0, key_limit(a.right, row, item().rows, item().keys)) / T::kKeys;
        const int clear_from =
            kForms ? (first_key(a.left, row + kWarpgroupRows - 1, item().rows, item().keys) + T::kKeys - 1) /
                         T::kKeys
                   : 0;
        shape_scores(clear, clear_from);
        if constexpr (kFacts) {
          total[0] = total[1] = 0;
          largest[0] = largest[1] = kMinusInfinity;
          note_masked(clear);
        }
        softmax<false>(clear);
        clear_values();
        while (j > first) step(clear, clear_from);
        if (!T::kLarge) release_query(count);
        const Item& done = item();
        const int done_row = row, left_over = first - done.first_tile;
        ++count;
        int skipped = 0;
        chained = follows(kForms ? left_over : 0, skipped);
        if (chained) {
          skip_keys(skipped);
          issue_both();
          products_wait<0>();
          release_keys();
        } else {
          wait_values();
          issue_values();
          products_wait<0>();
        }
        settle(o);
        release_values();
        if (kForms && !chained) skip_tiles(left_over);
        write(done, done_row);
        if (chained) skip_values(skipped);
      }
    }
    if (thread % 32 == 0) store_wait<0>();
  }
};

}  // namespace evenkeel::hopper::forward
