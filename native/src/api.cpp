// The C border: sizes are checked here, exceptions end here.
#include <cstring>
#include <memory>
#include <string>

#include "../include/tokenmill_native.h"
#include "cpu.h"
#include "fail.h"
#include "kernels.h"
#include "pack.h"
#include "probe.h"
#include "program.h"
#include "queue.h"
#include "recode.h"
#include "recode_integers.h"
#include "sample.h"
#include "team.h"

static_assert(sizeof(tm_integer_fit) == sizeof(mill::IntegerFit));

struct tm_team {
  const mill::Kernels* kernels;
  mill::Team team;
};

thread_local std::string mill::last_error;

using mill::fail;
using mill::guarded;

extern "C" {

int32_t tm_abi_version(void) { return TM_ABI_VERSION; }

#define TM_MEMBER(type, name, off) #type " " #name ";"
const char* tm_sampling_layout(void) { return TM_SAMPLING_COLUMNS(TM_MEMBER); }

const char* tm_adjustment_layout(void) { return TM_SAMPLING_PENALTIES(TM_MEMBER); }
#undef TM_MEMBER

void tm_publish(int32_t* until, int32_t value) { __atomic_store_n(until, value, __ATOMIC_RELEASE); }

const char* tm_last_error(void) { return mill::last_error.c_str(); }

int32_t tm_isa_available(const char* isa) { return mill::find_kernels(isa) != nullptr; }

tm_team* tm_team_new(int32_t num_threads, const char* isa) {
  tm_team* made = nullptr;
  guarded([&] {
    const mill::Kernels* kernels = mill::find_kernels(isa);
    if (kernels == nullptr) return fail(std::string("the instruction set ") + isa + " is unknown or cannot run here");
    if (num_threads < 1 || num_threads > 1024) return fail("num_threads must be between 1 and 1024");
    made = new tm_team{kernels, mill::Team(num_threads, kernels->rest)};
    return 0;
  });
  return made;
}

void tm_team_free(tm_team* team) { delete team; }

int32_t tm_team_limit(tm_team* team, int32_t num_limits, const int32_t* most_rows, const int32_t* num_threads) {
  return guarded([&] {
    std::vector<mill::Team::Limit> limits;
    for (int i = 0; i < num_limits; i++) {
      if (num_threads[i] < 1 || num_threads[i] > team->team.num_threads()) return fail("the team has fewer threads");
      if (i > 0 && most_rows[i] <= most_rows[i - 1]) return fail("rows must rise");
      limits.push_back({most_rows[i], num_threads[i]});
    }
    team->team.limit(std::move(limits));
    return 0;
  });
}

void tm_team_place(tm_team* team, int32_t thread, const int32_t* processors, int32_t num_processors) {
  team->team.place(thread, processors, num_processors);
}

const char* tm_team_isa(const tm_team* team) { return team->kernels->name; }

uint64_t tm_team_progress(const tm_team* team) { return team->team.progress(); }

int64_t tm_packed_bytes(int32_t kind, int64_t num_rows, int64_t num_cols) {
  if (kind < 0 || kind >= mill::kNumKinds || num_rows < 1 || num_cols < 1) return -1;
  if (num_rows > INT32_MAX - 64 || num_cols > INT32_MAX - 64) return -1;
  if (mill::is_quantised(kind) && num_cols % mill::block_values(kind) != 0) return -1;
  return mill::tile_bytes(kind, num_cols) * ((num_rows + mill::kLanes - 1) / mill::kLanes);
}

int32_t tm_pack(tm_team* team, int32_t kind, int64_t num_cols, int32_t num_matrices, const uint8_t* const* data,
                const int64_t* num_rows, const tm_integer_fit* fits, uint8_t* out, int64_t out_bytes) {
  return guarded([&] {
    int64_t total = 0;
    for (int i = 0; i < num_matrices; i++) total += num_rows[i];
    const int64_t need = tm_packed_bytes(kind, total, num_cols);
    if (need < 0) return fail("this kind or size of matrix cannot be packed");
    if (out_bytes < need) return fail("the packed matrix needs " + std::to_string(need) + " bytes");
    const mill::Part part = {kind, 0, static_cast<int32_t>(total), static_cast<int32_t>(num_cols), out, need};
    mill::pack(&team->team, {data, num_rows, num_matrices}, part, reinterpret_cast<const mill::IntegerFit*>(fits), out);
    return 0;
  });
}

int64_t tm_integer_fits(int32_t kind, int64_t num_cols) {
  return mill::is_integer(kind) && num_cols % mill::kGroup == 0 ? mill::integer_blocks(num_cols, kind) : 0;
}

int32_t tm_fits_integer(tm_team* team, int32_t kind, int64_t num_cols, int32_t num_matrices, const uint8_t* const* data,
                        const int64_t* num_rows, tm_integer_fit* fits) {
  if (kind == mill::kBF16P) return !team->kernels->has_tiles && mill::fits_packed(&team->team, {data, num_rows, num_matrices}, num_cols);
  if (!team->kernels->has_tiles || tm_integer_fits(kind, num_cols) == 0) return 0;
  return mill::fits_integer(&team->team, kind, {data, num_rows, num_matrices}, num_cols, reinterpret_cast<mill::IntegerFit*>(fits));
}

int32_t tm_quantise(tm_team* team, int32_t from_kind, int32_t to_kind, int64_t num_rows, int64_t num_cols,
                    const uint8_t* data, uint8_t* out) {
  return guarded([&] {
    const bool to_blocks = to_kind >= mill::kQ4_0 && to_kind <= mill::kQ8_0;
    if (from_kind < mill::kF32 || from_kind > mill::kBF16) return fail("only dense rows can be quantised");
    if (!to_blocks && to_kind != mill::kF16 && to_kind != mill::kBF16) return fail("rows cannot become this kind");
    if (num_rows < 0 || num_cols < 1 || (to_blocks && num_cols % mill::kGroup != 0)) return fail("bad matrix size");
    mill::quantise_rows(&team->team, from_kind, to_kind, num_rows, num_cols, data, out);
    return 0;
  });
}

int32_t tm_recode(tm_team* team, int32_t stored, int32_t to_kind, const uint8_t* data, int64_t num_bytes,
                  uint8_t* out, int64_t out_bytes, int32_t* fits, const int8_t* book, int64_t book_bytes) {
  return guarded([&] {
    if (stored < 0 || stored >= mill::kNumStored) return fail("unknown block format");
    if (!mill::becomes(stored, to_kind)) return fail("the format becomes another kind");
    const int64_t num_blocks = num_bytes / mill::stored_bytes(stored);
    if (num_bytes < 0 || num_bytes % mill::stored_bytes(stored) != 0) return fail("not whole blocks");
    if (out_bytes != num_blocks * mill::raw_row_bytes(to_kind, mill::stored_values(stored))) return fail("bad size");
    const int needed = mill::book_bytes(stored);
    if (needed != 0 && (book == nullptr || book_bytes != needed)) return fail("the format's book has another size");
    *fits = mill::recode(&team->team, stored, to_kind, book, num_blocks, data, out);
    return 0;
  });
}

int32_t tm_recode_integers(tm_team* team, const tm_codes* from, int32_t to_kind, uint8_t* out, int64_t out_bytes) {
  return guarded([&] {
    if (const char* wrong = mill::wrong_codes(*from, to_kind)) return fail(wrong);
    if (out_bytes != from->num_rows * mill::raw_row_bytes(to_kind, from->num_cols)) return fail("bad size");
    mill::recode_integers(&team->team, *from, to_kind, out);
    return 0;
  });
}

int64_t tm_buffer_bytes(int32_t form, int64_t max_rows, int64_t width) {
  if (form == TM_FORM_F32) return max_rows * width * 4;
  if (form == TM_FORM_WIDE) return mill::wide_bytes(max_rows, width);
  const int64_t slots = (max_rows + mill::kPanel - 1) / mill::kPanel * mill::kPanel * (width / mill::kGroup);
  return slots * (mill::kGroup + sizeof(mill::GroupFacts) + 4);
}

tm_program* tm_program_new(tm_team* team, const tm_op* ops, int32_t num_ops, const tm_buffer* buffers,
                           int32_t num_buffers, const tm_limits* limits, void* scratch, int64_t scratch_bytes) {
  tm_program* made = nullptr;
  guarded([&] {
    std::string error;
    auto program = std::make_unique<mill::Program>(&team->team, team->kernels, ops, num_ops, buffers, num_buffers,
                                                 *limits, scratch, scratch_bytes, &error);
    if (!error.empty()) return fail(error);
    made = new tm_program{std::move(program)};
    return 0;
  });
  return made;
}

void tm_program_free(tm_program* program) { delete program; }

void tm_call_run(tm_call* call) {
  mill::run_call(call, nullptr);
  call->ended_ns = mill::now_ns();
}

void tm_program_time(tm_program* program, int64_t* ns) { program->program->time(ns); }

int32_t tm_program_record(tm_program* program, int32_t num_threads, tm_unit* units, int64_t capacity) {
  return guarded([&] {
    if (units != nullptr && (num_threads < 1 || num_threads > 1024)) return fail("num_threads must be between 1 and 1024");
    program->program->record(num_threads, units, capacity);
    return 0;
  });
}

int64_t tm_program_recorded(const tm_program* program) { return program->program->num_recorded(); }

tm_queue* tm_queue_new(void) { return new tm_queue; }

void tm_queue_push(tm_queue* queue, tm_call* call) { queue->push(call); }

tm_call* tm_queue_run(tm_queue* queue, int32_t wake_fd, int64_t rest_ns) { return queue->run(wake_fd, rest_ns); }

int32_t tm_queue_is_empty(tm_queue* queue) { return queue->is_empty(); }

void tm_queue_wait(tm_queue* queue, const tm_call* call) { queue->wait(call); }

void tm_queue_close(tm_queue* queue) { queue->close(); }

void tm_queue_free(tm_queue* queue) { delete queue; }

double tm_probe(tm_team* team, int32_t kind, uint8_t* data, int64_t num_bytes, int64_t rounds) {
  double found = -1;
  guarded([&] {
    if (kind < 0 || kind >= mill::kNumProbes) return fail("unknown probe");
    if (kind == mill::kProbeRead && (data == nullptr || reinterpret_cast<uintptr_t>(data) % 64 != 0))
      return fail("the bytes to read must be aligned to 64");
    if (num_bytes < 0 || rounds < 1) return fail("nothing to probe");
    found = mill::probe(&team->team, team->kernels, kind, data, num_bytes, rounds);
    return 0;
  });
  return found;
}

int64_t tm_sample_scratch(int64_t num_cols) { return mill::sample_scratch_bytes(num_cols); }

int32_t tm_sample(tm_team* team, const float* logits, int64_t num_rows, int64_t num_cols, const tm_sampling* how,
                  int32_t* tokens, void* scratch) {
  return guarded([&] {
    if (num_cols < 1 || num_cols > INT32_MAX - 64) return fail("bad number of logits");
    const int64_t scratch_bytes = mill::sample_scratch_bytes(num_cols);
    team->team.for_each(static_cast<int>(num_rows), [&](int row, int thread) {
      const mill::SamplingRow one = mill::sampling_row(*how, row);
      tokens[row] = mill::sample_row(team->kernels, logits + row * num_cols, static_cast<int>(num_cols), one,
                                   static_cast<char*>(scratch) + thread * scratch_bytes);
    });
    return 0;
  });
}

int32_t tm_token_logprobs(tm_team* team, const float* logits, int64_t num_rows, int64_t num_cols,
                          const int32_t* tokens, int32_t num_top, float* logprobs, int32_t* ranks, int32_t* top_ids,
                          float* top_logprobs, void* scratch) {
  return guarded([&] {
    if (num_cols < 1 || num_cols > INT32_MAX - 64) return fail("bad number of logits");
    if (num_top < 0 || num_top > num_cols) return fail("num_top is out of range");
    for (int64_t row = 0; row < num_rows; row++)
      if (tokens[row] < 0 || tokens[row] >= num_cols) return fail("token id out of range");
    const int64_t scratch_bytes = mill::sample_scratch_bytes(num_cols);
    team->team.for_each(static_cast<int>(num_rows), [&](int row, int thread) {
      mill::logprobs_row(team->kernels, logits + row * num_cols, static_cast<int>(num_cols), tokens[row], num_top,
                       logprobs + row, ranks + row, top_ids + row * num_top, top_logprobs + row * num_top,
                       static_cast<char*>(scratch) + thread * scratch_bytes);
    });
    return 0;
  });
}

}  // extern "C"
