// The benches behind `evenkeel bench`. Each prints its table (or JSON) and returns the exit code: with
// `check`, 1 where a ratio misses its target.
#pragma once

namespace evenkeel::cli {

int bench_round(bool check, bool json);
int bench_attention(bool check, bool json);

}  // namespace evenkeel::cli
