// Which rotary pairs of a head's features make its offset, and which of them softmax can see.
//
// With rotary positions, pair p of a head adds the term a Re(q_p k_p* e^(i w_p (i - j))) to the score of row i and key j.
// It turns with the distance, w_p radians a place. The term of a fast pair swings around zero along a row.
// Its mean vanishes, and softmax sees the swing. Only a pair that turns by little over a whole row can add
// the same number to all of a row's scores, which softmax does not see. An offset can drift in these pairs alone.
#pragma once

#include <vector>

#include "diagnosis/capture.h"

namespace evenkeel {

struct PairShare {
  double turn;     // w_p: radians a place
  double offset;   // its part of the row mean, with its sign, in the row whose mean is largest in size
  double visible;  // root mean square over rows of the standard deviation of its terms along the row
};

struct RotaryShares {
  double offset;                 // the largest row mean, with its sign: the sum of the pairs' parts
  double visible;                // as a pair's, of whole scores
  std::vector<PairShare> pairs;  // (D / 2): the fastest first
};

// Of head `head` among the capture's. O(B T^2 D) in FP64. std::invalid_argument where the capture's positions are not
// rotary.
RotaryShares rotary_shares(const Capture& capture, int64_t head);

}  // namespace evenkeel
