// Matrix products, and a whole step of the paper's decoder (section 3), for the registers of one processor.
//
// kernels.py compiles it where it runs. Letters in comments: R rows, which are hypotheses, D = d_model, H heads,
// N sentences, K hypotheses of each, V target tokens. Tensors are dense, row by row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

// Numbers of a register, and how many registers of weights are multiplied beside each other.
#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;
#else
constexpr int LANES = 8, VECTORS = 2;
#endif
constexpr int PANEL = LANES * VECTORS;  // output features that are computed together
constexpr int MOST_ROWS = 6;            // rows that are: with a panel, their sums fill the registers
constexpr int CHUNK = 64;               // target tokens of which the best is looked at first
constexpr int64_t WORTH_SHARING = 1 << 18;  // multiplications: with fewer, threads wait longer than they compute
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4)));

// x W^T + b. Of each PANEL of output features the weights lie as (in, PANEL) floats or, for inputs of 8 bits, as
// (in / 4, PANEL, 4) numbers from -127 to 127; zeros fill up the last panel and the last four inputs.
struct Linear {
    const void* weight;
    const float* bias;       // (out), or null
    const float* scale;      // of 8 bits: (panels, PANEL), what a weight of 1 stands for; else null
    const int32_t* offset;   // of 8 bits: (panels, PANEL), 128 times the sum of the feature's weights
    int32_t in, out;
};

struct Norm {
    const float* weight;  // null where there is no norm
    const float* bias;
    float epsilon;
};

struct Layer {
    Linear query_key_value, self_output, query, cross_output, inner, outer;
    Norm self_attn_norm, cross_attn_norm, feed_forward_norm;
    float* target;        // (slots, 2 D), keys and values of target tokens
    const float* source;  // (source tokens, 2 D)
};

struct Model {
    int32_t layers, width, heads, inner, is_post_norm;
    Norm norm;  // behind the last layer
    Linear output;
    const float* embedding;  // (V, D)
    float embedding_scale;
};

namespace {

// Inputs of 8 bits, filled up to whole fours.
int whole(int in) { return (in + 3) / 4 * 4; }

Floats loaded(const float* place) { return *reinterpret_cast<const Floats*>(place); }

float largest_of(const float* row, int count) {
    float largest = row[0];
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; ++i) largest = std::max(largest, row[i]);
    return largest;
}

// The sums of ROWS rows over a panel.
template <int ROWS>
void multiply(const Linear& linear, const float* input, int panel, Floats (&sums)[ROWS][VECTORS]) {
    const float* weight = static_cast<const float*>(linear.weight) + int64_t(panel) * linear.in * PANEL;
    Floats local[ROWS][VECTORS] = {};  // in registers
    for (int k = 0; k < linear.in; ++k, weight += PANEL) {
        Floats column[VECTORS];
        for (int v = 0; v < VECTORS; ++v) column[v] = loaded(weight + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            float number = input[int64_t(r) * linear.in + k];
            for (int v = 0; v < VECTORS; ++v) local[r][v] += column[v] * number;
        }
    }
    std::memcpy(sums, local, sizeof local);
}

#ifdef __AVX512VNNI__
// The same of rows in 8 bits, in which 128 stands for 0 and a step of 1 for `steps`.
template <int ROWS>
void multiply(const Linear& linear, const uint8_t* input, const float* steps, int panel,
              Floats (&sums)[ROWS][VECTORS]) {
    int width = whole(linear.in);
    const int8_t* weight = static_cast<const int8_t*>(linear.weight) + int64_t(panel) * width * PANEL;
    Integers counts[ROWS][VECTORS] = {};
    for (int k = 0; k < width; k += 4, weight += 4 * PANEL)
        for (int v = 0; v < VECTORS; ++v) {
            __m512i column = _mm512_loadu_si512(weight + v * 4 * LANES);
            for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, input + int64_t(r) * width + k, 4);
                counts[r][v] = (Integers)_mm512_dpbusd_epi32((__m512i)counts[r][v], _mm512_set1_epi32(four), column);
            }
        }
    for (int v = 0; v < VECTORS; ++v) {
        int place = panel * PANEL + v * LANES;
        Integers offset = *reinterpret_cast<const Integers*>(linear.offset + place);
        for (int r = 0; r < ROWS; ++r)
            sums[r][v] = __builtin_convertvector(counts[r][v] - offset, Floats) * loaded(linear.scale + place) * steps[r];
    }
}
#endif

struct Bytes {
    std::vector<uint8_t> numbers;
    std::vector<float> steps;  // of each row
};

template <int ROWS>
void compute_panel(const Linear& linear, const float* input, const Bytes& bytes, int row, int panel, float* output,
                   bool is_relu) {
    Floats sums[ROWS][VECTORS];
    if (!linear.scale) multiply<ROWS>(linear, input + int64_t(row) * linear.in, panel, sums);
#ifdef __AVX512VNNI__
    else
        multiply<ROWS>(linear, bytes.numbers.data() + int64_t(row) * whole(linear.in), bytes.steps.data() + row, panel,
                       sums);
#endif
    int first = panel * PANEL, count = std::min(PANEL, linear.out - first);
    for (int r = 0; r < ROWS; ++r) {
        const float* sum = reinterpret_cast<const float*>(sums[r]);
        float* place = output + int64_t(row + r) * linear.out + first;
        for (int o = 0; o < count; ++o) {
            float value = linear.bias ? sum[o] + linear.bias[first + o] : sum[o];
            place[o] = is_relu ? std::max(value, 0.0f) : value;
        }
    }
}

void quantize(const float* input, int rows, int in, Bytes& bytes) {
    bytes.numbers.assign(size_t(rows) * whole(in), 128);
    bytes.steps.resize(rows);
    for (int r = 0; r < rows; ++r, input += in) {
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int k = 0; k < in; ++k) largest = std::max(largest, std::fabs(input[k]));
        float inverse = largest > 0 ? 127 / largest : 0;
        bytes.steps[r] = largest / 127.0f;
        uint8_t* row = bytes.numbers.data() + int64_t(r) * whole(in);
        for (int k = 0; k < in; ++k) row[k] = uint8_t(int(std::nearbyint(input[k] * inverse)) + 128);
    }
}

// From (rows, in) to (rows, out).
void apply(const Linear& linear, const float* input, int rows, float* output, bool is_relu, int threads) {
    static const decltype(&compute_panel<1>) of_rows[MOST_ROWS] = {
        compute_panel<1>, compute_panel<2>, compute_panel<3>, compute_panel<4>, compute_panel<5>, compute_panel<6>};
    static thread_local Bytes kept;
    Bytes& bytes = kept;  // that of the calling thread, in all threads
    if (linear.scale) quantize(input, rows, linear.in, bytes);
    int panels = (linear.out + PANEL - 1) / PANEL;
    bool is_shared = threads > 1 && int64_t(rows) * linear.in * linear.out >= WORTH_SHARING;
#pragma omp parallel for num_threads(threads) if (is_shared)
    for (int panel = 0; panel < panels; ++panel)
        for (int row = 0; row < rows; row += MOST_ROWS)
            of_rows[std::min(rows - row, MOST_ROWS) - 1](linear, input, bytes, row, panel, output, is_relu);
}

// e^x of x up to 0, to 2e-7, in operations that wide registers have.
float exponential(float x) {
    x = std::max(x, -87.0f);
    float n = std::nearbyint(x * 1.44269504f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float power = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r / 720)))));
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return power * scale;
}

void normalise(const Norm& norm, float* rows, int count, int width, float* output) {
    for (int r = 0; r < count; ++r, rows += width, output += width) {
        float sum = 0, squares = 0;
        for (int i = 0; i < width; ++i) sum += rows[i];
        float mean = sum / width;
        for (int i = 0; i < width; ++i) squares += (rows[i] - mean) * (rows[i] - mean);
        float scale = 1 / std::sqrt(squares / width + norm.epsilon);
        for (int i = 0; i < width; ++i) output[i] = (rows[i] - mean) * scale * norm.weight[i] + norm.bias[i];
    }
}

// Where keys, and behind them values, of what a row sees lie: `stride` numbers apart, in `slots` or one after the other.
struct Seen {
    const float* states;
    int64_t stride;
    const int32_t* slots;
    int count;

    const float* key(int t) const { return states + (slots ? slots[t] : t) * stride; }
};

// Equation 1 for one row.
void attend(const float* query, const Seen& seen, int width, int heads, float* output) {
    static thread_local std::vector<float> scores;  // (H, count)
    int d = width / heads, count = seen.count;
    scores.resize(size_t(heads) * count);
    for (int t = 0; t < count; ++t) {
        const float* key = seen.key(t);
        for (int h = 0; h < heads; ++h) {
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int i = h * d; i < (h + 1) * d; ++i) score += query[i] * key[i];
            scores[h * count + t] = score;
        }
    }
    for (int h = 0; h < heads; ++h) {
        float *row = scores.data() + h * count, largest = largest_of(row, count), total = 0;
        for (int t = 0; t < count; ++t) row[t] = exponential(row[t] - largest);
        for (int t = 0; t < count; ++t) total += row[t];
        for (int t = 0; t < count; ++t) row[t] /= total;
        int i = h * d, last = i + d;
        for (; i + LANES <= last; i += LANES) {
            Floats sums = {};
            for (int t = 0; t < count; ++t) sums += row[t] * loaded(seen.key(t) + width + i);
            *reinterpret_cast<Floats*>(output + i) = sums;
        }
        for (; i < last; ++i) {
            output[i] = 0;
            for (int t = 0; t < count; ++t) output[i] += row[t] * seen.key(t)[width + i];
        }
    }
}

struct Candidate {
    float score;
    int32_t parent, token;
};

}  // namespace

extern "C" {

int panel_width() { return PANEL; }

void linear(const Linear* weights, const float* input, int rows, float* output, int is_relu, int threads) {
    apply(*weights, input, rows, output, is_relu, threads);
}

// Read the newest tokens of R rows, and write the (R, V) logits of the next ones.
//
// slots (R, room) says where keys and values of a row's tokens lie, up to the newest one's at `length`; starts and
// counts (R) where its source begins and of how many tokens it is. position is what the embedding is added to, or null.
// Nothing is read and 1 returned if a token is not of the vocabulary, a source has none, or `length` lies outside.
int step(const Model* model, const Layer* layers, int rows, int length, int room, const int64_t* tokens,
         const int32_t* slots, const int32_t* starts, const int32_t* counts, const float* position, float* logits,
         int threads) {
    for (int r = 0; r < rows; ++r)
        if (tokens[r] < 0 || tokens[r] >= model->output.out || counts[r] < 1 || length < 0 || length >= room) return 1;
    int width = model->width;
    std::vector<float> embedded(size_t(rows) * width), found(embedded.size()), context(embedded.size());
    std::vector<float> wider(size_t(rows) * std::max(3 * width, model->inner));
    float *states = embedded.data(), *other = found.data(), *wide = wider.data();
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < width; ++i) {
            float value = model->embedding[tokens[r] * width + i] * model->embedding_scale;
            states[int64_t(r) * width + i] = position ? value + position[i] : value;
        }
    // Section 3.1, or with the norm before the sub-layer, which leaves its output in `other`.
    auto connect = [&](const Norm& norm, auto sublayer) {
        if (!model->is_post_norm) normalise(norm, states, rows, width, other);
        sublayer(model->is_post_norm ? states : other);
        for (size_t i = 0; i < embedded.size(); ++i) states[i] += other[i];
        if (model->is_post_norm) normalise(norm, states, rows, width, states);
    };
    // Attend from the queries in `wide`, and project what was found.
    auto attend_from = [&](int stride, const Linear& projection, auto seen_by) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int r = 0; r < rows; ++r)
            attend(wide + int64_t(r) * stride, seen_by(r), width, model->heads, context.data() + int64_t(r) * width);
        apply(projection, context.data(), rows, other, false, threads);
    };
    for (int number = 0; number < model->layers; ++number) {
        const Layer& layer = layers[number];
        connect(layer.self_attn_norm, [&](const float* input) {
            apply(layer.query_key_value, input, rows, wide, false, threads);
            for (int r = 0; r < rows; ++r) {
                const float* newest = wide + (int64_t(r) * 3 + 1) * width;
                std::copy_n(newest, 2 * width, layer.target + int64_t(slots[int64_t(r) * room + length]) * 2 * width);
            }
            attend_from(3 * width, layer.self_output, [&](int r) {
                return Seen{layer.target, 2 * width, slots + int64_t(r) * room, length + 1};
            });
        });
        connect(layer.cross_attn_norm, [&](const float* input) {
            apply(layer.query, input, rows, wide, false, threads);
            attend_from(width, layer.cross_output, [&](int r) {
                return Seen{layer.source + int64_t(starts[r]) * 2 * width, 2 * width, nullptr, counts[r]};
            });
        });
        connect(layer.feed_forward_norm, [&](const float* input) {
            apply(layer.inner, input, rows, wide, true, threads);
            apply(layer.outer, wide, rows, other, false, threads);
        });
    }
    if (model->norm.weight) normalise(model->norm, states, rows, width, states);
    apply(model->output, states, rows, logits, false, threads);
    return 0;
}

// The `count` likeliest continuations of each of N sentences, best first: (N, count) scores, hypotheses and tokens from
// the (N·K, V) logits of the next token and the (N, K) log-probabilities of the hypotheses.
void continuations(const float* logits, const float* scores, int sentences, int beams, int vocabulary, int count,
                   float* best_scores, int64_t* best_parents, int64_t* best_tokens, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int n = 0; n < sentences; ++n) {
        const float none = -INFINITY;
        std::vector<Candidate> best(count, Candidate{none, 0, 0});
        for (int k = 0; k < beams; ++k) {
            const float *row = logits + (int64_t(n) * beams + k) * vocabulary, score = scores[n * beams + k];
            if (!(score > none)) continue;
            float largest = largest_of(row, vocabulary), total = 0;
            for (int v = 0; v < vocabulary; ++v) total += exponential(row[v] - largest);
            float normaliser = std::log(total);
            for (int first = 0; first < vocabulary; first += CHUNK) {
                int last = std::min(first + CHUNK, vocabulary);
                if (!(largest_of(row + first, last - first) - largest - normaliser + score > best.back().score)) continue;
                for (int v = first; v < last; ++v) {
                    float sum = row[v] - largest - normaliser + score;
                    if (!(sum > best.back().score)) continue;
                    int place = count - 1;
                    for (; place > 0 && sum > best[place - 1].score; --place) best[place] = best[place - 1];
                    best[place] = Candidate{sum, k, v};
                }
            }
        }
        for (int c = 0; c < count; ++c) {
            best_scores[n * count + c] = best[c].score;
            best_parents[n * count + c] = best[c].parent;
            best_tokens[n * count + c] = best[c].token;
        }
    }
}

}  // extern "C"
