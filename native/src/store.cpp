// The C border of stores, and the replay of a trace on the bookkeeping alone.
#include "store.h"

#include <cstring>

#include "fail.h"

namespace {

constexpr int64_t kPage = 4096;

std::string check_extent(const tm_extent& extent) {
  const bool is_good = extent.offset >= 0 && extent.num_bytes > 0 && extent.offset % kPage == 0 && extent.num_bytes % kPage == 0;
  return is_good ? "" : "a range of the file is not of whole pages";
}

}  // namespace

extern "C" {

tm_store* tm_store_new(int32_t file, int32_t num_threads, uint8_t* memory, int64_t memory_bytes) {
  tm_store* made = nullptr;
  mill::guarded([&] {
    if (file < 0 || num_threads < 1 || num_threads > 64 || memory_bytes < 0) return mill::fail("a store of no file, or with no threads");
    made = new tm_store(file, num_threads, memory, memory_bytes);
    return 0;
  });
  return made;
}

int32_t tm_store_set_ring(tm_store* store, const tm_ring_item* items, int32_t num_items) {
  return mill::guarded([&] {
    if (num_items < 1) return mill::fail("a ring of no weights");
    for (int i = 0; i < num_items; i++) {
      const std::string wrong = check_extent(items[i].extent);
      if (!wrong.empty()) return mill::fail(wrong);
    }
    store->ring.set(items, num_items);
    return 0;
  });
}

void tm_store_facts_of(const tm_store* store, tm_store_facts* facts) {
  *facts = store->experts.facts();
  facts->bytes_read = store->reader.bytes_read();
  facts->waited_ns = store->reader.waited_ns();
  facts->damaged = store->reader.has_failed();
}

void tm_store_free(tm_store* store) { delete store; }

uint64_t tm_range_sum(const uint8_t* data, int64_t num_bytes) { return mill::range_sum(data, num_bytes); }

int32_t tm_store_fetch(tm_store* store, const tm_extent* gate_up, const tm_extent* down, int32_t num_layer_experts,
                       const int32_t* experts, const int32_t* rows, int32_t num_experts, int32_t total_rows, uint8_t* out) {
  return mill::guarded([&] {
    const int layer = store->experts.add_layer(gate_up, down, num_layer_experts);
    const std::string wrong = store->experts.prepare();
    if (!wrong.empty()) return mill::fail(wrong);
    store->experts.begin(layer, experts, rows, num_experts, total_rows);
    const int64_t size = gate_up->num_bytes + down->num_bytes;
    for (;;) {
      const std::vector<int>& wave = store->experts.next_wave();
      if (wave.empty()) break;
      for (int expert : wave) {
        int at = 0;
        while (experts[at] != expert) at++;
        std::memcpy(out + at * size, store->experts.gate_up(layer, expert), static_cast<size_t>(gate_up->num_bytes));
        std::memcpy(out + at * size + gate_up->num_bytes, store->experts.down(layer, expert), static_cast<size_t>(down->num_bytes));
      }
    }
    return store->reader.has_failed() ? mill::fail(store->reader.failure()) : 0;
  });
}

int32_t tm_store_use(tm_store* store, int32_t place) {
  return mill::guarded([&] {
    if (place < 0 || place >= store->ring.num_items()) return mill::fail("no such weight in the ring");
    store->ring.need(place);
    store->ring.done(place);
    return store->reader.has_failed() ? mill::fail(store->reader.failure()) : 0;
  });
}

int64_t tm_replay_experts(const int32_t* ids, int64_t num_steps, int32_t num_layers, int32_t top_k, int32_t num_experts,
                          int32_t num_slots) {
  mill::ExpertSlots slots;
  for (int layer = 0; layer < num_layers; layer++) slots.add_layer(num_experts);
  slots.resize(num_slots);
  const std::vector<int> rows(top_k, 1);
  int64_t hits = 0;
  for (int64_t step = 0; step < num_steps; step++)
    for (int layer = 0; layer < num_layers; layer++, ids += top_k) {
      slots.count(layer, ids, rows.data(), top_k, 1);
      const int first = slots.first_of(layer);
      for (int i = 0; i < top_k; i++)
        if (slots.slot_of(first + ids[i]) >= 0) {
          slots.hold(first + ids[i]);
          hits++;
        }
      for (int i = 0; i < top_k; i++) {
        if (slots.slot_of(first + ids[i]) >= 0 || slots.take(first + ids[i]) < 0) continue;
        slots.hold(first + ids[i]);
      }
      for (int i = 0; i < top_k; i++) slots.let_go(first + ids[i]);
    }
  return hits;
}

}  // extern "C"
