// Runs the same work on every variant of the kernels that this machine has and compares all bytes with its plain loops':
// a small decoder layer of each weight kind, KV type and activation, with a prompt of several spans, then single tokens;
// and draws. For machines where the Python tests cannot run, such as an emulated one. Exit code 0: all agree.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"

namespace {

constexpr int kKvHeads = 2, kHeadDim = 32, kVocab = 75, kRank = 16, kBlockSize = 16, kBlocks = 40, kMaxTokens = 300;
constexpr int kRawBlockBytes[] = {0, 0, 0, 18, 20, 34, 36, 36, 40, 84, 110, 144, 176, 210, 22, 0, 0, 0, 0, 17, 18};  // of 32 values, or 256, from TM_Q4_0 on

struct Draw {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  }
  float unit() { return static_cast<float>(next() % 20001) / 10000.0f - 1.0f; }
};

std::vector<float> floats(Draw* draw, int n, float scale, float middle) {
  std::vector<float> values(n);
  for (float& value : values) value = middle + scale * draw->unit();
  return values;
}

// Bytes that start at a multiple of 64.
class Bytes {
 public:
  explicit Bytes(int64_t size) : room_(size + 64), size_(size) {
    data_ = room_.data() + (64 - reinterpret_cast<uintptr_t>(room_.data()) % 64) % 64;
  }
  Bytes(const Bytes&) = delete;
  uint8_t* data() { return data_; }
  int64_t size() const { return size_; }

 private:
  std::vector<uint8_t> room_;
  int64_t size_;
  uint8_t* data_;
};

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, tm_last_error());
  std::exit(2);
}

bool is_dense(int32_t kind) { return kind <= TM_BF16 || kind == TM_BF16P; }
bool is_super(int32_t kind) { return kind >= TM_Q2_K && kind <= TM_Q6_K; }

std::vector<uint8_t> raw_matrix(Draw* draw, int32_t kind, int rows, int cols) {
  const int row_bytes = kind == TM_F32 ? cols * 4 : is_dense(kind) ? cols * 2 : cols / (is_super(kind) ? 256 : 32) * kRawBlockBytes[kind];
  std::vector<uint8_t> raw(static_cast<size_t>(rows) * row_bytes);
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(draw->next());
  const auto put = [&](size_t at, uint16_t bits) { std::memcpy(raw.data() + at, &bits, 2); };
  const auto some = [&](uint16_t kept, uint16_t exponent) { return static_cast<uint16_t>((draw->next() & kept) | exponent); };
  if (kind == TM_F32)
    for (size_t at = 0; at < raw.size(); at += 4) put(at + 2, some(0x807f, 0x3d80));
  else if (kind == TM_MXFP4)
    for (size_t at = 0; at < raw.size(); at += kRawBlockBytes[kind]) raw[at] = static_cast<uint8_t>(116 + raw[at] % 8);
  else if (is_dense(kind))
    for (size_t at = 0; at < raw.size(); at += 2) put(at, kind == TM_F16 ? some(0x83ff, 0x2c00) : kind == TM_BF16P && at % 384 == 0 ? some(0x9fff, 0x2000) : some(0x807f, 0x3d80));
  else {
    const bool has_minima = kind == TM_Q4_1 || kind == TM_Q8_M || kind == TM_Q8_HM || kind == TM_Q2_K || kind == TM_Q4_K || kind == TM_Q5_K;
    const bool has_halves = kind == TM_Q8_H || kind == TM_Q8_HM;
    const int halves = (has_minima ? 2 : 1) * (has_halves ? 2 : 1);
    for (size_t at = 0; at < raw.size(); at += kRawBlockBytes[kind])
      for (int i = 0; i < halves; i++) put(at + 2 * i, some(0x83ff, is_super(kind) ? 0x0400 : kind >= TM_Q8_0 ? 0x1000 : 0x2000));
  }
  return raw;
}

// Everything that one program over one model owns, and the outputs of its steps.
class Layer {
 public:
  Layer(tm_team* team, int32_t kind, int32_t kv_dtype, int32_t activation, int window, int whole, float cap)
      : team_(team), draw_{static_cast<uint64_t>(kind) + 1}, quantised_(!is_dense(kind)) {
    if (is_super(kind)) width_ = ffn_ = 256, heads_ = 8;
    qkv_ = (heads_ + 2 * kKvHeads) * kHeadDim;
    columns_[1] = width_;
    kv_ = {};
    const int value_bytes = kv_dtype == TM_KV_F32 ? 4 : kv_dtype == TM_KV_INT8 ? 1 : 2;
    const int scale_bytes = kv_dtype == TM_KV_INT8 ? 4 : 0;
    kv_.bytes_per_block = 2 * kKvHeads * kBlockSize * (value_bytes * kHeadDim + scale_bytes);
    pools_.push_back(&bytes_.emplace_back(kBlocks * kv_.bytes_per_block));
    kv_.pool = pools_[0]->data();
    kv_.num_blocks = kBlocks;
    kv_.num_layers = 1;
    kv_.num_kv_heads = kKvHeads;
    kv_.head_dim = kHeadDim;
    kv_.block_size = kBlockSize;
    kv_.dtype = kv_dtype;
    kv_.key_factors = vector(2 * kKvHeads * kHeadDim);

    const int x = buffer(width_), codes = buffer(width_, TM_FORM_QUANTISED), normed = buffer(width_), qkv = buffer(qkv_);
    const int turned = buffer(qkv_), mixed = buffer(heads_ * kHeadDim), mixed_codes = buffer(heads_ * kHeadDim, TM_FORM_QUANTISED);
    const int middle = buffer(width_), both = buffer(2 * ffn_), inner = buffer(ffn_), inner_codes = buffer(ffn_, TM_FORM_QUANTISED);
    const int narrow = buffer(kRank), last = buffer(width_, TM_FORM_F32, TM_ROWS_LOGITS);
    const int last_codes = buffer(width_, TM_FORM_QUANTISED, TM_ROWS_LOGITS);
    logits_ = buffer(kVocab, TM_FORM_F32, TM_ROWS_LOGITS);

    const tm_weight* table = weight(kind, kVocab, width_);
    op("embed", -1, x, width_).weight = table;
    if (!quantised_) {
      lora(kind == TM_F16 ? TM_F16 : TM_F32);
      change("lora_lookup", -1, narrow, &of_tokens_);
      change("lora_expand", narrow, x, &of_tokens_).in1 = x;
    }
    tm_op& norm = op("rms_norm", x, codes, width_);
    norm.vector = vector(width_);
    norm.vector_rows = width_;
    norm.value = 1e-5f;
    tm_op& layer_norm = op("layer_norm", x, normed, width_);
    layer_norm.vector = vector(width_);
    layer_norm.vector2 = vector(width_);
    layer_norm.vector_rows = layer_norm.vector2_rows = width_;
    layer_norm.value = 1e-5f;
    linear(normed, codes, -1, qkv, weight(kind, qkv_, width_));
    tm_op& bias = op("add_bias", qkv, qkv, qkv_);
    bias.vector = vector(qkv_);
    bias.vector_rows = qkv_;
    tm_op& norm_heads = op("norm_heads", qkv, qkv, 0);
    norm_heads.vector = vector(kHeadDim);
    norm_heads.vector2 = vector(kHeadDim);
    norm_heads.vector_rows = norm_heads.vector2_rows = kHeadDim;
    norm_heads.value = 1e-5f;
    tm_op& rope = op("rope", qkv, turned, 0);
    rope.num_turned = kHeadDim;
    rope.vector_rows = kMaxTokens * 2;
    rope.vector = vector(kMaxTokens * 2 * kHeadDim);
    rope.kv = &kv_;
    tm_op& attention = op("attention", turned, mixed, 0);
    attention.kv = &kv_;
    attention.value = 0.18f;
    attention.window = window;
    attention.whole = whole;
    attention.cap = cap;
    if (cap == 0.0f) {
      attention.vector = vector(heads_);
      attention.vector_rows = heads_;
    }
    op("scale", mixed, mixed, heads_ * kHeadDim).value = 0.7f;
    op("quantise", mixed, mixed_codes, heads_ * kHeadDim);
    linear(mixed, mixed_codes, x, middle, weight(kind, width_, heads_ * kHeadDim));
    op("quantise", middle, codes, width_);
    const tm_weight* gate_up = weight(kind, 2 * ffn_, width_);
    if (quantised_) {
      tm_op& gated = op("linear_gated", -1, inner_codes, ffn_);
      gated.in1 = codes;
      gated.weight = gate_up;
      gated.activation = activation;
    }
    linear(middle, codes, -1, both, gate_up);
    op("gated", both, inner, ffn_).activation = activation;
    if (!quantised_) op("quantise", inner, inner_codes, ffn_);
    op("activate", inner, inner, ffn_).activation = activation;
    linear(inner, inner_codes, middle, x, weight(kind, width_, ffn_));
    if (!quantised_) {
      change("lora_shrink", middle, narrow, &lora_);
      change("lora_expand", narrow, x, &lora_).in1 = x;
    }
    tm_op& sum = op("add", x, x, width_);
    sum.in1 = middle;
    for (const int decay : {TM_DECAY_BY_HEAD, TM_DECAY_BY_KEY, TM_DECAY_BY_VALUE}) states(middle, decay);
    op("activate", middle, middle, width_).activation = TM_RELU2;
    op("gather", x, last, width_).rows = TM_ROWS_LOGITS;
    op("quantise", last, last_codes, width_).rows = TM_ROWS_LOGITS;
    linear(last, last_codes, -1, logits_, table);
    ops_.back().rows = TM_ROWS_LOGITS;
    tm_op& soft_cap = op("soft_cap", logits_, logits_, kVocab);
    soft_cap.rows = TM_ROWS_LOGITS;
    soft_cap.cap = 30.0f;

    const tm_limits limits = {kMaxTokens, 2, kBlocks / 2, 8};
    scratch_ = &bytes_.emplace_back(1 << 18);
    program_ = tm_program_new(team, ops_.data(), static_cast<int32_t>(ops_.size()), buffers_.data(),
                              static_cast<int32_t>(buffers_.size()), &limits, scratch_->data(), scratch_->size());
    if (program_ == nullptr) give_up("tm_program_new");
  }

  ~Layer() { tm_program_free(program_); }

  // Rows of two sequences; what every buffer holds then goes to `seen`.
  void step(int rows0, int length0, int rows1, int length1, std::vector<uint8_t>* seen) {
    const int n = rows0 + rows1;
    std::vector<int32_t> tokens(n), positions(n), adapters(n), table(2 * kBlocks);
    for (int i = 0; i < n; i++) {
      tokens[i] = i * 7 % kVocab;
      positions[i] = i < rows0 ? length0 - rows0 + i : length1 - n + i;
      adapters[i] = i % 3 != 0;
    }
    for (int i = 0; i < kBlocks; i++) table[i] = (i * 11 + 3) % kBlocks;
    for (int i = 0; i < kBlocks; i++) table[kBlocks + i] = i % 3 == 1 && i % (kBlocks / 2) < 16 ? -1 : i;
    const int32_t starts[] = {0, rows0, n}, lengths[] = {length0, length1}, wanted[] = {0, rows0 - 1, n - 1};
    tm_call call = {};
    tm_step& step = call.step;
    call.program = program_;
    step.tokens = tokens.data();
    step.positions = positions.data();
    step.row_starts = starts;
    step.context_lens = lengths;
    step.block_tables = table.data();
    step.logit_rows = wanted;
    step.adapters = quantised_ ? nullptr : adapters.data();
    step.num_tokens = n;
    step.num_seqs = 2;
    step.table_width = kBlocks / 2;
    step.num_logit_rows = 3;
    tm_call_run(&call);
    if (call.error[0] != 0) give_up("tm_call_run");
    for (const tm_buffer& b : buffers_) {
      const uint8_t* data = static_cast<const uint8_t*>(b.data);
      seen->insert(seen->end(), data, data + b.num_bytes);
    }
    for (Bytes* pool : pools_) seen->insert(seen->end(), pool->data(), pool->data() + pool->size());
    sample(seen);
  }

 private:
  // A layer that keeps a state, of the first columns of `from`.
  void states(int from, int decay) {
    constexpr int kHeads = 2, kKeys = 16, kValues = 32, kWidth = 2 * kKeys + kHeads * kValues;
    const bool by_value = decay == TM_DECAY_BY_VALUE, by_head = decay == TM_DECAY_BY_HEAD;
    const int num_steps = kHeads * (by_head ? 1 : by_value ? kValues : kKeys), num_gates = by_value ? num_steps : num_steps + kHeads;
    const int num_skips = by_value ? num_steps : kHeads;
    tm_state& state = states_.emplace_back();
    state = {kWidth, 4, kHeads, 1, kKeys, kValues, quantised_, decay, 0.001f, 5.0f, nullptr, vector(num_steps), quantised_ ? nullptr : vector(num_skips)};
    const int num_rates = by_value ? kKeys * num_steps : num_steps;
    state.rates = vector(num_rates);
    for (int i = 0; i < num_rates; i++) const_cast<float*>(state.rates)[i] *= -0.1f;
    tm_kv& state_kv = state_kvs_.emplace_back();
    state_kv.bytes_per_block = 4 * (3 * kWidth + kHeads * kKeys * kValues);
    pools_.push_back(&bytes_.emplace_back(kBlocks * state_kv.bytes_per_block));
    state_kv.pool = pools_.back()->data();
    state_kv.num_blocks = kBlocks;
    state_kv.num_layers = state_kv.table = 1;
    state_kv.block_size = kBlockSize;
    const int wide = buffer(kWidth), mixed = buffer(kWidth), keys = buffer(2 * kKeys), values = buffer(kHeads * kValues);
    const int steps = buffer(num_steps), factors = buffer(kHeads), gates = buffer(num_gates), out = buffer(kHeads * kValues);
    const int normed = buffer(kHeads * kValues), product = buffer(kHeads * kValues), gated = buffer(kHeads * kValues);
    const auto cut = [&](int in, int to, int first, int count) { op("columns", in, to, count).window = first; };
    cut(from, wide, 0, kWidth);
    tm_op& conv = op("causal_conv", wide, mixed, kWidth);
    conv.kv = &state_kv;
    conv.state = &state;
    conv.vector = vector(4 * kWidth);
    conv.vector_rows = 4;
    conv.vector2 = vector(kWidth);
    conv.vector2_rows = kWidth;
    conv.whole = 1;
    cut(mixed, keys, 0, 2 * kKeys);
    cut(mixed, values, 2 * kKeys, kHeads * kValues);
    cut(from, steps, 1, num_steps);
    cut(from, factors, 5, kHeads);
    tm_op& made = op("scan_gates", steps, gates, num_gates);
    made.in1 = by_value || (by_head && !quantised_) ? -1 : factors;
    tm_state& of_gates = states_.emplace_back(state);
    if (by_value) of_gates.rates = nullptr;
    made.state = &of_gates;
    tm_op& scan = op("state_scan", keys, out, kHeads * kValues);
    scan.in1 = values;
    scan.in2 = gates;
    scan.kv = &state_kv;
    scan.state = &state;
    tm_op& norm = op("norm_groups", out, normed, kHeads * kValues);
    norm.vector = vector(kHeads * kValues);
    norm.vector_rows = kHeads * kValues;
    norm.head_dim = kValues;
    norm.value = 1e-5f;
    op("multiply", normed, product, kHeads * kValues).in1 = out;
    op("gate_rows", product, gated, kHeads * kValues).in1 = values;
  }

  void sample(std::vector<uint8_t>* seen) {
    const float temperature[] = {0.0f, 0.8f, 1.3f}, top_p[] = {1.0f, 0.9f, 1.0f}, min_p[] = {0.0f, 0.0f, 0.05f};
    const int32_t top_k[] = {0, 0, 20}, choice[] = {0, 0, 1}, position[] = {0, 5, 9};
    const uint64_t seed[] = {1, 2, 3};
    tm_sampling how = {};
    how.temperature = temperature;
    how.top_k = top_k;
    how.top_p = top_p;
    how.min_p = min_p;
    how.seed = seed;
    how.choice = choice;
    how.position = position;
    std::vector<uint8_t> scratch(tm_sample_scratch(kVocab) * 8);
    int32_t tokens[3], ranks[3], top[12];
    float logprobs[3], top_logprobs[12];
    const float* logits = static_cast<const float*>(buffers_[logits_].data);
    for (int i = 0; i < 3 * kVocab; i++)
      if (!std::isfinite(logits[i]) || logits[i] == logits[(i + 1) % (3 * kVocab)]) give_up("logits that say nothing");
    if (tm_sample(team_, logits, 3, kVocab, &how, tokens, scratch.data()) != 0) give_up("tm_sample");
    if (tm_token_logprobs(team_, logits, 3, kVocab, tokens, 4, logprobs, ranks, top, top_logprobs, scratch.data()) != 0)
      give_up("tm_token_logprobs");
    const auto add = [&](const void* data, size_t size) {
      seen->insert(seen->end(), static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + size);
    };
    add(tokens, sizeof tokens), add(ranks, sizeof ranks), add(top, sizeof top);
    add(logprobs, sizeof logprobs), add(top_logprobs, sizeof top_logprobs);
  }

  int buffer(int width, int32_t form = TM_FORM_F32, int32_t rows = TM_ROWS_TOKENS) {
    const int max_rows = rows == TM_ROWS_TOKENS ? kMaxTokens : 8;
    Bytes& data = bytes_.emplace_back(tm_buffer_bytes(form, max_rows, width));
    buffers_.push_back({data.data(), data.size(), rows, max_rows, width, form});
    return static_cast<int>(buffers_.size()) - 1;
  }

  tm_op& op(const char* kind, int in0, int out, int width) {
    tm_op made = {};
    made.kind = kind;
    made.in0 = in0;
    made.in1 = made.in2 = -1;
    made.out = out;
    made.width = width;
    made.num_heads = heads_;
    made.num_kv_heads = kKvHeads;
    made.head_dim = kHeadDim;
    ops_.push_back(made);
    return ops_.back();
  }

  void linear(int values, int codes, int residual, int out, const tm_weight* weight) {
    tm_op& made = op("linear", values, out, 0);
    made.in1 = codes;
    made.in2 = residual;
    made.weight = weight;
  }

  const float* vector(int n) {
    vectors_.push_back(floats(&draw_, n, 0.5f, 0.6f));
    return vectors_.back().data();
  }

  tm_part packed(int32_t kind, int rows, int cols) {
    const std::vector<uint8_t> raw = raw_matrix(&draw_, kind, rows, cols);
    Bytes& data = bytes_.emplace_back(tm_packed_bytes(kind, rows, cols));
    const uint8_t* from = raw.data();
    const int64_t num_rows = rows;
    if (tm_pack(team_, kind, cols, 1, &from, &num_rows, nullptr, data.data(), data.size()) != 0) give_up("tm_pack");
    return {kind, 0, rows, cols, data.data(), data.size()};
  }

  const tm_weight* weight(int32_t kind, int rows, int cols) {
    parts_.push_back(packed(kind, rows, cols));
    weights_.push_back({rows, cols, 1, 0, &parts_.back()});
    return &weights_.back();
  }

  void lora(int32_t kind) {
    changes_[0] = {5, 0.5f, packed(kind, 5, width_), packed(kind, width_, 5), vector(width_)};
    changes_[1] = {7, 0.5f, packed(kind, kVocab, 7), packed(kind, width_, 7), nullptr};
    lora_ = {1, 1, width_, kRank, 0, columns_, &changes_[0]};
    of_tokens_ = {1, 1, kVocab, kRank, 1, columns_, &changes_[1]};
  }

  tm_op& change(const char* kind, int in, int out, const tm_lora* table) {
    tm_op& made = op(kind, in, out, 0);
    made.lora = table;
    return made;
  }

  tm_team* team_;
  Draw draw_;
  bool quantised_;
  int width_ = 96, heads_ = 4, ffn_ = 64, qkv_;
  int logits_ = 0;
  tm_program* program_ = nullptr;
  tm_kv kv_;
  std::deque<tm_kv> state_kvs_;
  std::deque<tm_state> states_;
  tm_lora lora_ = {}, of_tokens_ = {};
  tm_low_rank changes_[2] = {};
  int32_t columns_[2] = {};
  std::deque<Bytes> bytes_;
  std::deque<std::vector<float>> vectors_;
  std::deque<tm_part> parts_;
  std::deque<tm_weight> weights_;
  std::vector<tm_op> ops_;
  std::vector<tm_buffer> buffers_;
  std::vector<Bytes*> pools_;
  Bytes* scratch_;
};

std::vector<uint8_t> run(const char* isa, int32_t kind) {
  tm_team* team = tm_team_new(2, isa);
  if (team == nullptr) give_up(isa);
  std::vector<uint8_t> seen;
  {
    Layer layer(team, kind, kind % 4, kind % 3, kind % 2 ? 100 : 0, kind % 5 < 2, kind % 4 ? 0.0f : 20.0f);
    layer.step(287, 287, 13, 13, &seen);
    layer.step(1, 288, 2, 15, &seen);
  }
  tm_team_free(team);
  return seen;
}

}  // namespace

int main() {
  int compared = 0, failed = 0;
  for (const char* isa : {"avx2", "avxvnni", "avx512", "avx512bf16", "amx", "neon", "neoni8mm"}) {
    if (!tm_isa_available(isa)) continue;
    const char* plain = std::strcmp(isa, "amx") == 0 ? "scalartiles" : "scalar";
    for (int32_t kind = TM_F32; kind <= TM_IQ4_NL; kind++) {
      if (kind >= TM_W4 && kind <= TM_W8) continue;  // made of others
      const bool agree = run(plain, kind) == run(isa, kind);
      compared++;
      failed += !agree;
      if (!agree) std::printf("%s differs from %s for weights of kind %d\n", isa, plain, kind);
    }
    std::printf("%s compared\n", isa);
  }
  return compared == 0 || failed > 0;
}
