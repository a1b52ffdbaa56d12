// Packed weights of which not all are in memory: one file, its reader, and the two ways in which they are used.
#pragma once
#include "expert_store.h"
#include "weight_ring.h"

struct tm_store {
  tm_store(int file, int num_threads, uint8_t* memory, int64_t memory_bytes)
      : reader(file, num_threads), experts(&reader, memory, memory_bytes), ring(&reader) {}

  mill::DiskReader reader;  // goes last
  mill::ExpertStore experts;
  mill::WeightRing ring;
};
