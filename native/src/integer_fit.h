// The unit in which values of 4-bit codes lie nearest to the integers of kW4 (integer_weights.inc).
#pragma once

namespace mill {

// A value is scale * integer; multipliers are made for `unit`.
struct IntegerFit {
  float unit, scale;
};

// For values steps[g] * code of groups g: integers are round(code * m / 8), m = nearest(8 * steps[g] / unit).
IntegerFit fit_products(const float* steps, int num_groups, float least_unit);

}  // namespace mill
