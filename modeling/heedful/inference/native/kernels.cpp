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

constexpr int LANES = 16;  // numbers of a register, or of two or four where they are narrower
#ifdef __AVX512F__
constexpr int VECTORS = 4;  // registers of weights beside each other
#else
constexpr int VECTORS = 1;
#endif
constexpr int PANEL = LANES * VECTORS;  // output features that are computed together
constexpr int MOST_ROWS = 6;            // rows that are: with a panel, their sums fill the registers
constexpr int CHUNK = 64;               // target tokens of which the best is looked at first
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4)));

// x W^T + b. Of each PANEL of output features the weights lie as (in, PANEL) floats or, for inputs of 8 bits, as
// (in / 4, PANEL, 4) numbers from -127 to 127; zeros fill up the last panel.
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
    Norm self_norm, cross_norm, feed_forward_norm;
    float* target;        // (slots, 2 D), keys and values of target tokens
    const float* source;  // (source tokens, 2 D)
};

struct Model {
    const Layer* layers;
    Linear output;
    Norm norm;               // behind the last layer
    const float* embedding;  // (V, D)
    float embedding_scale;
    int32_t number_of_layers, width, heads, inner, is_post_norm;
};

namespace {

Floats loaded(const float* place) { return *reinterpret_cast<const Floats*>(place); }

// The sums of ROWS rows over a panel.
template <int ROWS>
void multiply(const Linear& linear, const float* input, int panel, Floats (&sums)[ROWS][VECTORS]) {
    const float* weight = static_cast<const float*>(linear.weight) + int64_t(panel) * linear.in * PANEL;
    for (int k = 0; k < linear.in; ++k, weight += PANEL)
        for (int v = 0; v < VECTORS; ++v) {
            Floats column = loaded(weight + v * LANES);
            for (int r = 0; r < ROWS; ++r) sums[r][v] += column * input[int64_t(r) * linear.in + k];
        }
}

#ifdef __AVX512VNNI__
// The same of rows in 8 bits, in which 128 stands for 0 and a step of 1 for `steps`.
template <int ROWS>
void multiply(const Linear& linear, const uint8_t* input, const float* steps, int panel,
              Floats (&sums)[ROWS][VECTORS]) {
    const int8_t* weight = static_cast<const int8_t*>(linear.weight) + int64_t(panel) * linear.in * PANEL;
    Integers counts[ROWS][VECTORS] = {};
    for (int k = 0; k < linear.in; k += 4, weight += 4 * PANEL)
        for (int v = 0; v < VECTORS; ++v) {
            __m512i column = _mm512_loadu_si512(weight + v * 4 * LANES);
            for (int r = 0; r < ROWS; ++r) {
                int32_t four;
                std::memcpy(&four, input + int64_t(r) * linear.in + k, 4);
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
    Floats sums[ROWS][VECTORS] = {};
    if (!linear.scale) multiply<ROWS>(linear, input + int64_t(row) * linear.in, panel, sums);
#ifdef __AVX512VNNI__
    else
        multiply<ROWS>(linear, bytes.numbers.data() + int64_t(row) * linear.in, bytes.steps.data() + row, panel, sums);
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
    bytes.numbers.resize(size_t(rows) * in);
    bytes.steps.resize(rows);
    for (int r = 0; r < rows; ++r, input += in) {
        float largest = 0.0f;
        for (int k = 0; k < in; ++k) largest = std::max(largest, std::fabs(input[k]));
        float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        bytes.steps[r] = largest / 127.0f;
        uint8_t* row = bytes.numbers.data() + int64_t(r) * in;
        for (int k = 0; k < in; ++k) row[k] = uint8_t(int(std::nearbyint(input[k] * inverse)) + 128);
    }
}

// From (rows, in) to (rows, out).
void apply(const Linear& linear, const float* input, int rows, float* output, bool is_relu, int threads) {
    static thread_local Bytes kept;
    Bytes& bytes = kept;  // that of the calling thread, in all threads
    if (linear.scale) quantize(input, rows, linear.in, bytes);
    int panels = (linear.out + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int panel = 0; panel < panels; ++panel)
        for (int row = 0; row < rows; row += MOST_ROWS) {
            auto compute = compute_panel<MOST_ROWS>;
            switch (rows - row) {
                case 1: compute = compute_panel<1>; break;
                case 2: compute = compute_panel<2>; break;
                case 3: compute = compute_panel<3>; break;
                case 4: compute = compute_panel<4>; break;
                case 5: compute = compute_panel<5>; break;
            }
            compute(linear, input, bytes, row, panel, output, is_relu);
        }
}

// e^x of x up to 0, to 2e-7, in operations that wide registers have.
float exponential(float x) {
    x = std::max(x, -87.0f);
    float n = std::nearbyint(x * 1.44269504f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float power = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r / 720)))));
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return power * scale;
}

float largest_of(const float* row, int count) {
    float largest = row[0];
    int i = 0;
    if (count >= LANES) {
        Floats most = loaded(row);
        for (i = LANES; i + LANES <= count; i += LANES) {
            Floats next = loaded(row + i);
            most = next > most ? next : most;
        }
        for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
    }
    for (; i < count; ++i) largest = std::max(largest, row[i]);
    return largest;
}

void normalise(const Norm& norm, float* rows, int count, int width, float* output) {
    for (int r = 0; r < count; ++r, rows += width, output += width) {
        if (!norm.weight) {
            if (output != rows) std::copy(rows, rows + width, output);
            continue;
        }
        float sum = 0, squares = 0;
        for (int i = 0; i < width; ++i) sum += rows[i];
        float mean = sum / width;
        for (int i = 0; i < width; ++i) squares += (rows[i] - mean) * (rows[i] - mean);
        float scale = 1 / std::sqrt(squares / width + norm.epsilon);
        for (int i = 0; i < width; ++i) output[i] = (rows[i] - mean) * scale * norm.weight[i] + norm.bias[i];
    }
}

// Equation 1 for the newest token of a row: it sees `count` keys and values, those in `slots` or the first ones.
void attend(const float* query, const float* states, const int32_t* slots, int count, int width, int heads,
            float* output) {
    static thread_local std::vector<float> scores;  // (H, count)
    scores.resize(size_t(heads) * count);
    int d = width / heads;
    for (int t = 0; t < count; ++t) {
        const float* key = states + int64_t(slots ? slots[t] : t) * 2 * width;
        for (int h = 0; h < heads; ++h) {
            float sum = 0;
            for (int i = h * d; i < (h + 1) * d; ++i) sum += query[i] * key[i];
            scores[h * count + t] = sum;
        }
    }
    for (int h = 0; h < heads; ++h) {
        float *row = scores.data() + h * count, largest = largest_of(row, count), total = 0;
        for (int t = 0; t < count; ++t) row[t] = exponential(row[t] - largest);
        for (int t = 0; t < count; ++t) total += row[t];
        for (int t = 0; t < count; ++t) row[t] /= total;
    }
    std::fill(output, output + width, 0.0f);
    for (int t = 0; t < count; ++t) {
        const float* value = states + (int64_t(slots ? slots[t] : t) * 2 + 1) * width;
        for (int h = 0; h < heads; ++h)
            for (int i = h * d; i < (h + 1) * d; ++i) output[i] += scores[h * count + t] * value[i];
    }
}

struct Candidate {
    float score;
    int32_t parent, token;
};

}  // namespace

extern "C" {

int panel_width() { return PANEL; }

int has_bytes() {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

void linear(const Linear* weights, const float* input, int rows, float* output, int is_relu, int threads) {
    apply(*weights, input, rows, output, is_relu, threads);
}

// Read the newest tokens of R rows, and write the (R, V) logits of the next ones.
//
// slots (R, room) says where keys and values of a row's tokens lie, up to the newest one's at `length`; starts and
// counts (R) where its source begins and of how many tokens it is. position is what the embedding is added to, or null.
void step(const Model* model, int rows, int length, int room, const int64_t* tokens, const int32_t* slots,
          const int32_t* starts, const int32_t* counts, const float* position, float* logits, int threads) {
    static thread_local std::vector<float> kept_states, kept_other, kept_wide, kept_context;
    int width = model->width;
    kept_states.resize(size_t(rows) * width);
    kept_other.resize(size_t(rows) * width);
    kept_context.resize(size_t(rows) * width);
    kept_wide.resize(size_t(rows) * std::max(3 * width, model->inner));
    float *states = kept_states.data(), *other = kept_other.data();
    float *wide = kept_wide.data(), *context = kept_context.data();
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < width; ++i) {
            float value = model->embedding[tokens[r] * width + i] * model->embedding_scale;
            states[r * width + i] = position ? value + position[i] : value;
        }

    auto connect = [&](const Norm& norm, auto sublayer) {  // section 3.1; or with the norm before the sub-layer
        if (model->is_post_norm) {
            sublayer(states);
            for (int i = 0; i < rows * width; ++i) states[i] += other[i];
            normalise(norm, states, rows, width, states);
        } else {
            normalise(norm, states, rows, width, other);
            sublayer(other);
            for (int i = 0; i < rows * width; ++i) states[i] += other[i];
        }
    };
    auto attend_from = [&](int stride, const float* seen, bool is_source) {  // from the queries in `wide`
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int r = 0; r < rows; ++r) {
            const float* first = is_source ? seen + int64_t(starts[r]) * 2 * width : seen;
            attend(wide + int64_t(r) * stride, first, is_source ? nullptr : slots + int64_t(r) * room,
                   is_source ? counts[r] : length + 1, width, model->heads, context + int64_t(r) * width);
        }
    };
    for (int number = 0; number < model->number_of_layers; ++number) {
        const Layer& layer = model->layers[number];
        connect(layer.self_norm, [&](const float* input) {
            apply(layer.query_key_value, input, rows, wide, false, threads);
            for (int r = 0; r < rows; ++r) {
                const float* newest = wide + (int64_t(r) * 3 + 1) * width;
                std::copy(newest, newest + 2 * width, layer.target + int64_t(slots[int64_t(r) * room + length]) * 2 * width);
            }
            attend_from(3 * width, layer.target, false);
            apply(layer.self_output, context, rows, other, false, threads);
        });
        connect(layer.cross_norm, [&](const float* input) {
            apply(layer.query, input, rows, wide, false, threads);
            attend_from(width, layer.source, true);
            apply(layer.cross_output, context, rows, other, false, threads);
        });
        connect(layer.feed_forward_norm, [&](const float* input) {
            apply(layer.inner, input, rows, wide, true, threads);
            apply(layer.outer, wide, rows, other, false, threads);
        });
    }
    normalise(model->norm, states, rows, width, states);
    apply(model->output, states, rows, logits, false, threads);
}

// The likeliest token of each of (rows, V) logits, the first of equal ones.
void likeliest(const float* logits, int rows, int vocabulary, int64_t* tokens) {
    for (int r = 0; r < rows; ++r, logits += vocabulary)
        tokens[r] = std::find(logits, logits + vocabulary, largest_of(logits, vocabulary)) - logits;
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
