// All tables of operations, family by family; an entry without a name ends each.
#include <cstring>

#include "op.h"

namespace mill {

extern const OpKind kRowOps[], kHeadOps[], kLinearOps[], kLoraOps[], kAttentionOps[], kStackOps[], kLatentOps[], kMoeOps[], kStateOps[];

const OpKind* find_op(const char* name) {
  for (const OpKind* table : {kRowOps, kHeadOps, kLinearOps, kLoraOps, kAttentionOps, kStackOps, kLatentOps, kMoeOps, kStateOps})
    for (const OpKind* kind = table; kind->name != nullptr; kind++)
      if (std::strcmp(kind->name, name) == 0) return kind;
  return nullptr;
}

}  // namespace mill
