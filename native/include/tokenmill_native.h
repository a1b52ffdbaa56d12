/* The C border of the native kernels. Plain data, no exceptions, no Python objects.
 *
 * The caller owns every byte: weights, buffers, KV pools and scratch are allocated by it (64-byte aligned) and must
 * outlive what refers to them. Teams and programs are opaque handles. Functions that can fail return 0 for success;
 * otherwise tm_last_error() has one sentence, valid until this thread's next call.
 */
#ifndef TOKENMILL_NATIVE_H
#define TOKENMILL_NATIVE_H
#include <stdint.h>

#include "sampling_columns.h" /* made of core/sampling.py by the build */

#if defined(_WIN32)
#define TM_API __declspec(dllexport)
#else
#define TM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TM_ABI_VERSION 22

#define TM_NOT_FINITE (-1) /* in place of a token: the logits are not finite */
#define TM_MASK_LATE (-2)  /* the mask has not come in time */

enum tm_kind {
  TM_F32 = 0, TM_F16 = 1, TM_BF16 = 2, TM_Q4_0 = 3, TM_Q4_1 = 4, TM_Q8_0 = 5,
  TM_Q8_M = 6,  /* 8-bit codes, a scale and a minimum for 32 */
  TM_Q8_H = 7,  /* 8-bit codes, a scale for each 16 */
  TM_Q8_HM = 8, /* 8-bit codes, a scale and a minimum for each 16 */
  TM_Q2_K = 9,  /* super-blocks of 256: 2-bit codes, factors of a scale and of a minimum for each 16 */
  TM_Q3_K = 10, /* super-blocks of 256: 3-bit codes, a factor of a scale for each 16 */
  TM_Q4_K = 11, /* super-blocks of 256: 4-bit codes, factors of a scale and of a minimum for each 32 */
  TM_Q5_K = 12, /* the same with 5-bit codes */
  TM_Q6_K = 13, /* super-blocks of 256: 6-bit codes, a factor of a scale for each 16 */
  TM_Q5_0 = 14, /* 5-bit codes, a scale for 32 */
  TM_W4 = 15,   /* packed from q4_0: integers, with one scale for a row; for variants with tiles only */
  TM_W4M = 16,  /* the same from q4_1 */
  TM_W8 = 17,   /* the same from q8_0 */
  TM_BF16P = 18, /* packed from bf16 in 12 bits a value, without loss; for variants without tiles only */
  TM_MXFP4 = 19, /* 4-bit floats, the exponent of a power of two for 32 */
  TM_IQ4_NL = 20 /* 4-bit codes of a table, a scale for 32 */
};

/* TM_SWIGLU: of experts alone, with limit and alpha. TM_RELU2: max(x, 0)^2, where nothing is gated. */
enum tm_activation { TM_SILU = 0, TM_GELU = 1, TM_GELU_ERF = 2, TM_SWIGLU = 3, TM_RELU2 = 4 };
enum tm_decay { TM_DECAY_BY_HEAD = 0, TM_DECAY_BY_KEY = 1, TM_DECAY_BY_VALUE = 2 }; /* ops/api.py, StateGeometry */

enum tm_score { TM_SCORE_SOFTMAX = 0, TM_SCORE_SOFTMAX_CHOSEN = 1, TM_SCORE_SIGMOID = 2, TM_SCORE_SPARSE_MIXER = 3 };

enum tm_rows { TM_ROWS_TOKENS = 0, TM_ROWS_LOGITS = 1 };
enum tm_form { TM_FORM_F32 = 0, TM_FORM_QUANTISED = 1, TM_FORM_WIDE = 2 }; /* wide: what integer kinds multiply */

typedef struct {
  int32_t kind, column0, num_rows, num_cols;
  const uint8_t* data;
  int64_t num_bytes;
} tm_part;

/* Packed weights in a file, of which a part is in memory at a time: see native/src/expert_store.h and weight_ring.h. */
typedef struct tm_store tm_store;

/* A range of that file and its tm_range_sum. Offsets and sizes are multiples of 4096. */
typedef struct {
  int64_t offset, num_bytes;
  uint64_t sum;
} tm_extent;

typedef struct {
  int32_t num_rows, num_cols, num_parts;
  int32_t place; /* of one that is read as it is needed: in the store's order */
  const tm_part* parts;
  tm_store* store; /* null: it is in memory */
} tm_weight;

/* Packed matrices of one kind and shape, `stride` bytes from one to the next; or, where `data` is null, each in the store. */
typedef struct {
  int32_t kind, num_matrices, num_rows, num_cols;
  const uint8_t* data;
  int64_t stride;
  tm_store* store;
  const tm_extent* extents; /* of each matrix, in the store's file */
} tm_stack;

/* How a KV pool stores values; int8 codes have a scale for each token and head.
 * key_factors: of int8, what keys are multiplied by before they are stored, and then what queries are, [2][num_layers][num_kv_heads]
 * [head_dim]; null: 1. */
enum tm_kv_type { TM_KV_F32 = 0, TM_KV_F16 = 1, TM_KV_BF16 = 2, TM_KV_INT8 = 3 };

typedef struct {
  uint8_t* pool;
  int64_t num_blocks, bytes_per_block;
  int32_t num_layers, num_kv_heads, head_dim, block_size;
  int32_t dtype, table; /* table: which of a sequence's block tables names blocks of this pool */
  int32_t value_dim, reserved; /* of latents: channels of a key that are the value too; 0: values are apart */
  const float* key_factors;
} tm_kv;

/* Room for max_rows rows of `width` values. */
typedef struct {
  void* data;
  int64_t num_bytes;
  int32_t rows, max_rows, width, form;
} tm_buffer;

/* scale * B A, both packed, f32 or f16: A is rank x inputs (by tokens: inputs x rank), B outputs x rank. Rank 0: no change.
 * factors: null, or for each output what the sum of the linear and the change is multiplied by. */
typedef struct {
  int32_t rank;
  float scale;
  tm_part a, b;
  const float* factors;
} tm_low_rank;

/* Changes of a linear made of stacked matrices. Those of slot s lie at changes[(s - 1) * num_matrices]; the caller may
 * exchange them between steps. columns: first output of each matrix, and the end. max_rank: a multiple of 16. by_token: the
 * linear is the token embedding, one matrix whose num_cols inputs are the vocabulary. */
typedef struct {
  int32_t num_slots, num_matrices, num_cols, max_rank, by_token;
  const int32_t* columns;
  const tm_low_rank* changes;
} tm_lora;

/* How rows choose their experts (moe_route), and what experts do (moe_ffn): see ops/api.py, Routing and Experts. */
typedef struct {
  int32_t num_experts, top_k, score, num_groups, top_groups, group_score, normalise, reserved;
  float floor, scale, min_share;
  float limit, alpha; /* of TM_SWIGLU */
  float margin;       /* of TM_SCORE_SPARSE_MIXER */
  const float* bias;         /* [num_experts], of the choice; null for none */
  const float* gate_up_bias; /* [num_experts][2 * FFN width]; null for none, as where nothing is gated */
  const float* down_bias;    /* [num_experts][width]; null for none */
  int64_t* tally;            /* [num_experts]: rows computed are added; null where nobody counts */
} tm_moe;

/* Multi-head latent attention: see ops/api.py, LatentGeometry. */
typedef struct {
  int32_t num_heads, nope_dim, rope_dim, latent_dim, value_dim;
} tm_latent;

/* Layers that keep a state: see ops/api.py, StateGeometry. A block of such a pool is, for each layer in turn, float32
 * [taps - 1][conv_width] inputs and then [num_heads][key_dim][value_dim]; num_kv_heads is 0. */
typedef struct {
  int32_t conv_width, taps, num_heads, num_key_heads, key_dim, value_dim, is_delta, decay;
  float low, high; /* of steps */
  const float* rates;   /* one for each decay; by value of state_scan: [key_dim][num_heads][value_dim] */
  const float* dt_bias; /* one for each step */
  const float* skip;    /* [num_heads], by value [num_heads][value_dim]; null for none */
} tm_state;

/* An operation of a program. `kind` is its name in the tables of native/src/op_*.cpp, which say what each takes: in0, in1 and
 * in2 are buffers, -1 for none. */
typedef struct {
  const char* kind;
  int32_t rows, in0, in1, in2, out;
  int32_t width, layer, num_heads, num_kv_heads, head_dim;
  int32_t activation, window, num_turned; /* window: positions a query sees, 0 for all; of a whole one, to each side */
  int32_t by_place, whole; /* rows are looked up by the step's places; queries see all of their sequence */
  float value, cap;                       /* cap: of scores, 0 for off */
  const tm_weight* weight;
  const float* vector;
  int64_t vector_rows;
  const float* vector2;
  int64_t vector2_rows;
  const tm_kv* kv;
  const tm_lora* lora;
  const int32_t* order; /* [width] */
  const tm_stack* stack;  /* of experts: gate rows, where they are gated, then up rows */
  const tm_stack* stack2; /* of experts: down */
  const tm_moe* moe;
  const tm_latent* latent;
  const tm_state* state;
} tm_op;

typedef struct {
  int32_t max_tokens, max_seqs, max_blocks_per_seq, max_logit_rows;
} tm_limits;

typedef struct {
  const int32_t* tokens;
  const int32_t* positions;
  const int32_t* row_starts;
  const int32_t* context_lens;
  const int32_t* block_tables; /* [table][num_seqs][table_width], of as many tables as KV pools ask for */
  const int32_t* logit_rows;
  const int32_t* adapters; /* LoRA slot of each token, 0 for none; null: no token has one */
  const int32_t* places; /* null where no operation looks rows up by them */
  const int32_t* state_blocks; /* of each token, a further block in which the state behind it stays, -1 for none; null: no token has one */
  int32_t num_tokens, num_seqs, table_width, num_logit_rows;
} tm_step;

/* How each row draws: a column of every setting (TM_SAMPLING_COLUMNS), in the order of the table. A filter's is null where
 * no row has one. */
typedef struct {
#define TM_COLUMN(type, name, off) const type* name;
  TM_SAMPLING_COLUMNS(TM_COLUMN)
#undef TM_COLUMN
} tm_sampling;

/* What is done to a row's logits before its draw; see adjust.cpp. Token ids are in the vocabulary, those of `history`
 * may be beyond it. */
typedef struct {
  int32_t* history; /* the prompt, then the output, to which the draw appends: room for as many as there will be */
  int32_t num_prompt, min_tokens;
#define TM_MEMBER(type, name, off) type name;
  TM_SAMPLING_PENALTIES(TM_MEMBER)
#undef TM_MEMBER
  int32_t num_dry_breakers, num_bias, num_held_back, num_bad_words, mask_wait_us;
  const int32_t* dry_breakers; /* in rising order */
  const int32_t* bias_ids;
  const float* bias;
  const uint32_t* mask;      /* a bit for each token that may be drawn; null: all may */
  /* The mask is that of output positions below this; by tm_publish, maybe while the step runs. A draw beyond it waits, for
   * mask_wait_us at most, and then gives TM_MASK_LATE. */
  const int32_t* mask_until;
  const int32_t* held_back;  /* not drawn before min_tokens, unless nothing else is left */
  const int32_t* bad_tokens; /* words one after the other: those of word w begin at bad_starts[w] */
  const int32_t* bad_starts;
} tm_adjustment;

/* Tokens to draw from the last num_rows rows of buffer `logits` once a step is computed. A token id of the step below 0,
 * ~s, stands for drawn[s] as the step begins; row i's token goes to tokens[i] and drawn[slots[i]].
 * scratch: (num_threads + 1) * tm_sample_scratch(width of the buffer) bytes of zeros that the program uses from then on.
 * adjustments: null, or one for each row, null for none. num_top: null, or how many alternatives each row tells beside the
 * log probability and rank of its token, at most top_width; -1: nothing. Of row i they begin at [i * top_width]. */
typedef struct {
  tm_sampling how;
  const tm_adjustment* const* adjustments;
  const int32_t* num_top;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
  const int32_t* slots;
  int32_t* tokens;
  int32_t* drawn;
  void* scratch;
  int32_t num_rows, num_slots, logits, top_width;
} tm_draws;

enum { TM_ERROR_BYTES = 200 };

typedef struct tm_team tm_team;
typedef struct tm_program tm_program;
typedef struct tm_queue tm_queue;

/* A program's call for one step, and how it went. Whoever made it keeps it, and all it points to, until it has ended.
 * Times are of the steady clock; `error` is empty where it has run.
 * In a queue: program is null for what the host does itself, and `tells` is whether its end is a byte in the pipe. */
typedef struct tm_call {
  tm_step step;
  tm_draws draws;
  int32_t has_draws, tells;
  int64_t began_ns, ended_ns;
  tm_program* program;
  struct tm_call* next; /* the queue's own */
  char error[TM_ERROR_BYTES];
} tm_call;

TM_API int32_t tm_abi_version(void);
/* The members of tm_sampling, and the settings in tm_adjustment, as this library knows them: "type name;" of each. */
TM_API const char* tm_sampling_layout(void);
TM_API const char* tm_adjustment_layout(void);
/* Writes a tm_adjustment's mask_until: a draw that sees it sees what was written before. */
TM_API void tm_publish(int32_t* until, int32_t value);
TM_API const char* tm_last_error(void);

/* 1 where the variant ("scalar", "avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "neoni8mm", "scalartiles")
 * can run here. */
TM_API int32_t tm_isa_available(const char* isa);

/* A team of threads with one instruction set ("auto": the widest). Null on failure. */
TM_API tm_team* tm_team_new(int32_t num_threads, const char* isa);
TM_API void tm_team_free(tm_team* team);
/* Steps of at most most_rows[i] rows, rising, are done by the first num_threads[i] threads; those of more rows by all. The
 * others sleep meanwhile. No result depends on it. Not while a step is under way. */
TM_API int32_t tm_team_limit(tm_team* team, int32_t num_limits, const int32_t* most_rows, const int32_t* num_threads);

/* Let a thread of the team, from 1 on, run on these processors alone, as the system numbers them; nothing where it cannot be
 * told so. Thread 0 is the caller's own. */
TM_API void tm_team_place(tm_team* team, int32_t thread, const int32_t* processors, int32_t num_processors);

TM_API const char* tm_team_isa(const tm_team* team);

/* A number that changes with every unit of work that a thread of the team takes up. From any thread. */
TM_API uint64_t tm_team_progress(const tm_team* team);

/* Bytes of a packed matrix; -1 for a kind or size that cannot be packed. */
TM_API int64_t tm_packed_bytes(int32_t kind, int64_t num_rows, int64_t num_cols);

/* How some values of a row become integers: what one stands for, and the unit of what makes them. */
typedef struct {
  float unit, scale;
} tm_integer_fit;

/* Fits of a row of an integer kind. */
TM_API int64_t tm_integer_fits(int32_t kind, int64_t num_cols);

/* Pack matrices of one kind, stacked along their rows, into `out`. fits: those of all rows from tm_fits_integer; null: of
 * an integer kind they are made once more. */
TM_API int32_t tm_pack(tm_team* team, int32_t kind, int64_t num_cols, int32_t num_matrices,
                       const uint8_t* const* data, const int64_t* num_rows, const tm_integer_fit* fits, uint8_t* out,
                       int64_t out_bytes);

/* 1 where the team computes this kind and it holds these matrices well: an integer kind their scales, then `fits` has all
 * fits; TM_BF16P their exponents, few of which may be rare, and fits is null. */
TM_API int32_t tm_fits_integer(tm_team* team, int32_t kind, int64_t num_cols, int32_t num_matrices,
                               const uint8_t* const* data, const int64_t* num_rows, tm_integer_fit* fits);

/* Rows of a dense kind as rows of another kind: f16, bf16, q8_0, q4_0 or q4_1. The caller sizes `out`. */
TM_API int32_t tm_quantise(tm_team* team, int32_t from_kind, int32_t to_kind, int64_t num_rows, int64_t num_cols,
                           const uint8_t* data, uint8_t* out);

/* Block formats of checkpoints that can be recoded, and the kind that each becomes, or either of two. */
enum tm_stored {
  TM_STORED_Q5_0 = 0,   /* q5_0 */
  TM_STORED_Q5_1 = 1,   /* q8_m */
  TM_STORED_Q8_1 = 2,   /* q8_0 */
  TM_STORED_Q2_K = 3,   /* q2_k */
  TM_STORED_Q3_K = 4,   /* q3_k */
  TM_STORED_Q4_K = 5,   /* q4_k, q4_1 */
  TM_STORED_Q5_K = 6,   /* q5_k */
  TM_STORED_Q6_K = 7,   /* q6_k */
  TM_STORED_Q8_K = 8,   /* q8_0 */
  TM_STORED_IQ4_NL = 9, /* iq4_nl or q8_0 */
  TM_STORED_IQ4_XS = 10,/* iq4_nl or q8_0 */
  TM_STORED_MXFP4 = 11, /* mxfp4 */
  TM_STORED_TQ2_0 = 12, /* q4_0 */
  TM_STORED_TQ1_0 = 13, /* q4_0 */
  TM_STORED_NVFP4 = 14, /* q8_h */
  /* With a book: int8 rows of 8 codes, of 4 for iq3. */
  TM_STORED_IQ1_S = 15,   /* q8_0 */
  TM_STORED_IQ1_M = 16,   /* q8_h */
  TM_STORED_IQ2_XXS = 17, /* q8_0 */
  TM_STORED_IQ2_XS = 18,  /* q8_h */
  TM_STORED_IQ2_S = 19,   /* q8_h */
  TM_STORED_IQ3_XXS = 20, /* q8_0 */
  TM_STORED_IQ3_S = 21    /* q8_0 */
};

/* Blocks of a stored format as blocks of `to_kind`. *fits becomes 0 where rounding scales or minima to float16 loses more
 * than float16's own precision of the largest of them; out is of no use then. book: of a format that has one. */
TM_API int32_t tm_recode(tm_team* team, int32_t stored, int32_t to_kind, const uint8_t* data, int64_t num_bytes,
                         uint8_t* out, int64_t out_bytes, int32_t* fits, const int8_t* book, int64_t book_bytes);

/* Integer codes of a matrix [num_rows, num_cols] as other tools pack them: 2, 4 or 8 bits each, lowest first, in lines of
 * 32-bit words, none in two of them. */
enum tm_codes_layout {
  TM_CODES_BY_ROW = 0,    /* a line is a row: codes of neighbouring columns in a word */
  TM_CODES_BY_COLUMN = 1, /* a line holds one word for each row: codes of neighbouring columns */
  TM_CODES_AWQ = 2        /* a line is a column: a word holds rows 0 2 4 6 1 3 5 7 of eight; 4 bits */
};

typedef struct {
  const uint32_t* words;
  const int32_t* order; /* null, or where each column of the matrix lies among those that are stored */
  int64_t line_words, num_words;
  int32_t layout, bits, minus; /* minus: what is taken from each code */
  int32_t num_rows, num_cols;
  int32_t group_size; /* columns that share a scale, a multiple of 16 */
  const uint16_t* scales; /* float16 [num_rows, num_cols / group_size] */
  const uint16_t* minima; /* likewise; of kinds that have them */
} tm_codes;

/* That matrix as blocks of a quantised kind. */
TM_API int32_t tm_recode_integers(tm_team* team, const tm_codes* from, int32_t to_kind, uint8_t* out, int64_t out_bytes);

/* Bytes of a buffer of that form. */
TM_API int64_t tm_buffer_bytes(int32_t form, int64_t max_rows, int64_t width);

/* A program over buffers. `scratch` holds partial attention of long contexts; more lets more of them be split. */
TM_API tm_program* tm_program_new(tm_team* team, const tm_op* ops, int32_t num_ops, const tm_buffer* buffers,
                                  int32_t num_buffers, const tm_limits* limits, void* scratch, int64_t scratch_bytes);
TM_API void tm_program_free(tm_program* program);

/* Run one step, and draw. A step that is refused writes nothing. */
TM_API void tm_call_run(tm_call* call);

/* Add the nanoseconds of operation i to ns[i] in every step from now on, each from its planning to its last unit, and
 * those of drawing to the entry after the last operation; null stops. */
TM_API void tm_program_time(tm_program* program, int64_t* ns);

/* A unit of work that was done: of which operation (draws: the entry after the last), in which phase of the step, from 0; -1:
 * by whoever prepared the next phase, as it was too little to hand out. Times are processor time of the caller's thread. */
typedef struct {
  int32_t place, phase;
  int64_t began_ns, ended_ns;
} tm_unit;

/* From now on cut each step as for so many threads, but do its units one after the other on the caller's, and write them to
 * `units`, those of the latest step, as far as there is room. Null stops. */
TM_API int32_t tm_program_record(tm_program* program, int32_t num_threads, tm_unit* units, int64_t capacity);
/* Units of the latest step. */
TM_API int64_t tm_program_recorded(const tm_program* program);

/* Calls, done one at a time in the order of pushing by the thread that is in tm_queue_run. */
TM_API tm_queue* tm_queue_new(void);
TM_API void tm_queue_push(tm_queue* queue, tm_call* call); /* from any thread */

/* Make calls until one is the host's own, which is returned: it has ended when the thread comes back. Null once the queue is
 * closed, and, once after each piece of work, where nothing has come for rest_ns. For each call that tells, one byte goes to
 * `wake_fd`, a pipe, once the next one has begun (at once where there is none): whoever wakes by it may take this thread's
 * processor. */
TM_API tm_call* tm_queue_run(tm_queue* queue, int32_t wake_fd, int64_t rest_ns);
TM_API int32_t tm_queue_is_empty(tm_queue* queue);
TM_API void tm_queue_wait(tm_queue* queue, const tm_call* call); /* until a call that was pushed has ended */

/* What has not begun ends now, with an error. The thread that runs the queue returns once its call has ended. */
TM_API void tm_queue_close(tm_queue* queue);
TM_API void tm_queue_free(tm_queue* queue); /* once that thread is out */

/* What is read, in the order in which a step takes it, and where to. `stays`: read once. */
typedef struct {
  tm_extent extent;
  uint8_t* to;
  int64_t stays;
} tm_ring_item;

/* Experts asked for that were in memory or were not, each counted once a layer and step; those read ahead by a guess, and of
 * these, asked for later; bytes of experts and of other weights read; how long threads waited for them, added
 * up. damaged: what was read is not what was written, or could not be read. */
typedef struct {
  int64_t num_slots, slot_bytes, hits, misses, guesses_read, guess_hits, bytes_read, waited_ns, damaged;
} tm_store_facts;

/* file: open for reading, and the caller's to close after the store. memory: for experts, at a multiple of 4096. Null on
 * failure. */
TM_API tm_store* tm_store_new(int32_t file, int32_t num_threads, uint8_t* memory, int64_t memory_bytes);
/* Weights for tm_weight.place; before the first step that uses them. */
TM_API int32_t tm_store_set_ring(tm_store* store, const tm_ring_item* items, int32_t num_items);
TM_API void tm_store_facts_of(const tm_store* store, tm_store_facts* facts); /* from any thread */
TM_API void tm_store_free(tm_store* store); /* after the programs that use it */

/* A checksum of memory, num_bytes a multiple of 8. */
TM_API uint64_t tm_range_sum(const uint8_t* data, int64_t num_bytes);

/* One layer of experts alone, as an operation would use it: ask for experts, in rising order, for so many rows each, and copy
 * what is read to `out`, the bytes of gate_up and down of one expert after the other. Layers are known by gate_up's offsets. */
TM_API int32_t tm_store_fetch(tm_store* store, const tm_extent* gate_up, const tm_extent* down, int32_t num_layer_experts,
                              const int32_t* experts, const int32_t* rows, int32_t num_experts, int32_t total_rows, uint8_t* out);
/* One use of the weight at a place of the ring. */
TM_API int32_t tm_store_use(tm_store* store, int32_t place);

/* How many of the experts that a trace asks for would have been in memory, `num_slots` of which are in all layers together.
 * ids: [num_steps][num_layers][top_k] experts of a layer, rising. */
TM_API int64_t tm_replay_experts(const int32_t* ids, int64_t num_steps, int32_t num_layers, int32_t top_k,
                                 int32_t num_experts, int32_t num_slots);

enum tm_probe_kind { TM_PROBE_READ = 0, TM_PROBE_INT8 = 1, TM_PROBE_F32 = 2, TM_PROBE_BF16 = 3, TM_PROBE_PHASE = 4 };

/* What the threads of the team that do steps of one row reach together, per second, repeating `rounds` times: bytes read of
 * `data` (64-byte aligned, a byte of each page written first), byte dot-product operations, float32 and bf16 operations, phases of a step that have nothing
 * to do. 0 where the instruction set has none; negative on failure. */
TM_API double tm_probe(tm_team* team, int32_t kind, uint8_t* data, int64_t num_bytes, int64_t rounds);

/* Draw one token per row of logits [num_rows, num_cols]. scratch: num_threads * tm_sample_scratch(num_cols) bytes. */
TM_API int64_t tm_sample_scratch(int64_t num_cols);
TM_API int32_t tm_sample(tm_team* team, const float* logits, int64_t num_rows, int64_t num_cols,
                         const tm_sampling* how, int32_t* tokens, void* scratch);

/* Log probability and rank of one token per row, and the num_top best with theirs. Scratch as above. */
TM_API int32_t tm_token_logprobs(tm_team* team, const float* logits, int64_t num_rows, int64_t num_cols,
                                 const int32_t* tokens, int32_t num_top, float* logprobs, int32_t* ranks,
                                 int32_t* top_ids, float* top_logprobs, void* scratch);

/* Drafters without a model: what they are is in drafter.cpp. One thread uses a drafter. */
typedef struct tm_drafter tm_drafter;

enum tm_draft_source { TM_DRAFT_NGRAM = 0, TM_DRAFT_SUFFIX = 1, TM_DRAFT_CORPUS = 2 }; /* of a corpus: suffix, too */

typedef struct {
  int32_t vocab_size;
  int32_t ngram_min, ngram_max;       /* 0: no n-grams are looked up */
  int32_t suffix_depth;               /* most tokens of a match; 0: no suffixes are */
  int32_t suffix_first;               /* of the two, suffixes are looked up first */
  int32_t suffix_texts;               /* most outputs of ended sequences; 0: none is kept */
  float suffix_factor, suffix_chance; /* most tokens drafted for each that matches; least chance of all of a draft together */
  int64_t output_bytes;               /* for outputs of ended sequences */
} tm_drafter_settings;

TM_API tm_drafter* tm_drafter_new(const tm_drafter_settings* settings); /* null on failure */
TM_API void tm_drafter_free(tm_drafter* drafter);
/* The arrays of a corpus (formats/corpus_index.py), checked, which outlive the drafter. The first one has number 0. */
TM_API int32_t tm_drafter_add_corpus(tm_drafter* drafter, const int32_t* tokens, const int32_t* places, int32_t num_places);
/* A sequence, forgotten first where it is known, whose tokens come with tm_drafter_propose; about `expected` soon. Those from
 * num_before on are its output. */
TM_API int32_t tm_drafter_begin(tm_drafter* drafter, int64_t sequence, const char* scope, int32_t expected, int32_t num_before);
/* It is drafted for from these corpora, too. */
TM_API int32_t tm_drafter_use_corpora(tm_drafter* drafter, int64_t sequence, const int32_t* corpora, int32_t count);
/* Its output may be drafted for others of its scope from now on. An unknown one is nothing. */
TM_API int32_t tm_drafter_end(tm_drafter* drafter, int64_t sequence);
/* To sequence i come tokens[starts[i]] .. tokens[starts[i + 1]]; then at most most[i] tokens are drafted for it, counts[i], at
 * [i * width] of drafts and chances. */
TM_API int32_t tm_drafter_propose(tm_drafter* drafter, int32_t num_sequences, const int64_t* sequences, const int32_t* starts,
                                  const int32_t* tokens, const int32_t* most, int32_t width, int32_t* counts,
                                  int32_t* sources, int32_t* drafts, float* chances);

#ifdef __cplusplus
}
#endif
#endif
