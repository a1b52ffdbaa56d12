// Where the kernels find the keys and values of a span.
#pragma once
#include "workspace.h"

namespace mill {

// Point at the keys and values of a span, in chunks of 16 tokens. Blocks of a multiple of 16 tokens are used in place;
// from other block sizes the chunks are gathered first.
void fill_keys(const Workspace& w, const Op& op, int sequence, int kv_head, int span, int num_keys, float* gather,
               SpanArgs* args);

// Point at the keys of a span, or of what a pass sees of it, that will be wanted next.
void point_ahead(const Workspace& w, const Op& op, const Pass& pass, int kv_head, int span, SpanArgs* args);

}  // namespace mill
