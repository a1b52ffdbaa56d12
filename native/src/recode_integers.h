// Matrices of integer codes that other tools packed into words -> blocks of the kinds that the kernels take.
#pragma once
#include "team.h"
#include "../include/tokenmill_native.h"

namespace mill {

// What is wrong with a description, or null.
const char* wrong_codes(const tm_codes& from, int32_t to_kind);

// Codes are moved; scales and minima stand as they come. Threads over rows.
void recode_integers(Team* team, const tm_codes& from, int32_t to_kind, uint8_t* out);

}  // namespace mill
