#include "integer_fit.h"

#include <cmath>
#include <cstdlib>

namespace mill {

namespace {

// Units tried: the least, which uses all of the integers' range, and some up to a tenth above it. Where most of a row's steps
// are near to eighths of a unit, and the largest to whole ones, little is rounded.
constexpr int kUnits = 16;
float unit_at(float least, int i) { return least / (1 - 0.1f / kUnits * static_cast<float>(i)); }

// How often codes of a size occur, about, where weights are normally distributed.
constexpr double kOften[9] = {1, 0.964, 0.862, 0.717, 0.553, 0.396, 0.264, 0.163, 0.093};

// Means over codes of w * w and w * code, w being code * m / 8 rounded, halves up.
struct Products {
  float squares[128], with_code[128];
  Products() {
    for (int m = 0; m < 128; m++) {
      double square = 0, product = 0, all = 0;
      for (int code = -8; code < 8; code++) {
        const double often = kOften[std::abs(code)], w = std::floor(code * m / 8.0 + 0.5);
        square += often * w * w;
        product += often * w * code;
        all += often;
      }
      squares[m] = static_cast<float>(square / all);
      with_code[m] = static_cast<float>(product / all);
    }
  }
};

}  // namespace

// Of a group's values x = step * code and integers w, scale * w misses x by least squares where scale = sum(x w) / sum(w w),
// and then by sum(x x) - sum(x w)^2 / sum(w w).
IntegerFit fit_products(const float* steps, int num_groups, float least_unit) {
  static const Products products;
  IntegerFit best = {least_unit, least_unit};
  float most = 0;
  for (int i = 0; i < kUnits; i++) {
    const float unit = unit_at(least_unit, i), multipliers = 8 / unit;
    float squares = 0, with_value = 0;
    for (int g = 0; g < num_groups; g++) {
      const float step = std::fabs(steps[g]);
      const int m = static_cast<int>(step * multipliers + 0.5f);
      squares += products.squares[m];
      with_value += step * products.with_code[m];
    }
    if (with_value * with_value <= most * squares) continue;
    most = with_value * with_value / squares;
    best = {unit, with_value / squares};
  }
  return best;
}

}  // namespace mill
