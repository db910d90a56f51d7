// The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), its search, and a tokenizer.
// The letters are the paper's: Q, K, V, d_k, h heads, d_model, PE. A vector is a Float32Array.

// Matrices and vectors

/** The tensors of a model: `tensors[name]` says where in `bytes` a matrix of int8 or a vector of float32 lies. */
function readTensors(tensors, bytes) {
  const read = ([name, { rows, columns, at, scales }]) => {
    if (rows === undefined) return [name, new Float32Array(bytes, at, columns)];
    return [name, { rows, columns, values: new Int8Array(bytes, at, rows * columns), scales: new Float32Array(bytes, scales, rows) }];
  };
  return Object.fromEntries(Object.entries(tensors).map(read));
}

/** Wx + b. Each row of W is int8 × its scale. Four rows at a time read x once; some are left at the end. */
function linear({ rows, columns, values, scales }, b, x) {
  const y = new Float32Array(rows), whole = rows - (rows % 4);
  for (let i = 0, at = 0; i < whole; i += 4, at += 4 * columns) {
    let p = 0, q = 0, r = 0, s = 0;
    for (let j = 0; j < columns; j++) {
      const value = x[j];
      p += values[at + j] * value;
      q += values[at + columns + j] * value;
      r += values[at + 2 * columns + j] * value;
      s += values[at + 3 * columns + j] * value;
    }
    y[i] = p;
    y[i + 1] = q;
    y[i + 2] = r;
    y[i + 3] = s;
  }
  for (let i = whole; i < rows; i++) for (let j = 0; j < columns; j++) y[i] += values[i * columns + j] * x[j];
  for (let i = 0; i < rows; i++) y[i] = y[i] * scales[i] + (b ? b[i] : 0);
  return y;
}

const row = ({ columns, values, scales }, i) => Float32Array.from(values.subarray(i * columns, (i + 1) * columns), (v) => v * scales[i]);
const plus = (x, y) => x.map((value, i) => value + y[i]);

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = scores.map((score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

function logSoftmax(scores) {
  let largest = -Infinity, sum = 0;
  for (const score of scores) if (score > largest) largest = score;
  for (const score of scores) sum += Math.exp(score - largest);
  const whole = largest + Math.log(sum);
  return scores.map((score) => score - whole);
}

const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  silu: (x) => x / (1 + Math.exp(-x)),
  tanh: Math.tanh,
};

/** Abramowitz and Stegun, 7.1.5 for small x and the continued fraction 7.1.14 for large: both to the last digits. */
function erf(x) {
  if (Math.abs(x) > 3) {
    let fraction = 0;
    for (let k = 60; k > 0; k--) fraction = k / 2 / (Math.abs(x) + fraction);
    return Math.sign(x) * (1 - Math.exp(-x * x) / (Math.abs(x) + fraction) / Math.sqrt(Math.PI));
  }
  let term = x, sum = x;
  for (let n = 1; n < 80; n++) sum += (term *= (-x * x) / n) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * sum;
}

// The model

class Model {
  constructor({ config, tensors }, bytes) {
    this.config = config;
    this.weights = readTensors(tensors, bytes);
  }

  linear(name, x) {
    return linear(this.weights[`${name}.weight`], this.weights[`${name}.bias`], x);
  }
}

class Transformer extends Model {
  /** LayerNorm(x); x itself where the model has no such norm. */
  norm(name, x) {
    const gain = this.weights[`${name}.weight`], bias = this.weights[`${name}.bias`];
    if (!gain) return x;
    let mean = 0, variance = 0;
    for (const value of x) mean += value / x.length;
    for (const value of x) variance += (value - mean) ** 2 / x.length;
    const deviation = Math.sqrt(variance + this.config.layer_norm_eps);
    return x.map((value, i) => ((value - mean) / deviation) * gain[i] + bias[i]);
  }

  /** LayerNorm(x + Sublayer(x)) (section 3.1), or x + Sublayer(LayerNorm(x)). */
  residual(name, x, sublayer) {
    if (this.config.norm_placement === "post") return this.norm(`${name}.norm`, plus(x, sublayer(x)));
    return plus(x, sublayer(this.norm(`${name}.norm`, x)));
  }

  /** PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(…) (section 3.5). */
  positionalEncoding(stack, position) {
    const { d_model, position_encoding, sinusoid_layout, position_offset } = this.config;
    if (position_encoding === "learned") return this.weights[`${stack}.embed_positions`].subarray(position * d_model, (position + 1) * d_model);
    const PE = new Float32Array(d_model), half = d_model / 2;
    const span = sinusoid_layout === "tensor2tensor" ? d_model - 2 : d_model;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(Math.fround(position + position_offset) * Math.fround(Math.exp(Math.fround(2 * i * Math.fround(-Math.log(10000) / span)))));
      const [sine, cosine] = sinusoid_layout === "interleaved" ? [2 * i, 2 * i + 1] : [i, half + i];
      PE[sine] = Math.sin(angle);
      PE[cosine] = Math.cos(angle);
    }
    return PE;
  }

  /** √d_model times the token's embedding, plus its position (sections 3.4 and 3.5). */
  embed(stack, token, position) {
    const scale = this.config.scale_embedding ? Math.sqrt(this.config.d_model) : 1;
    const x = row(this.weights[`${stack}.embed_tokens.weight`], token).map((value) => value * scale);
    return this.norm(`${stack}.embedding_norm`, plus(x, this.positionalEncoding(stack, position)));
  }

  /** FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (equation 2). */
  feedForward(name, x) {
    return this.linear(`${name}.fc2`, this.linear(`${name}.fc1`, x).map(ACTIVATIONS[this.config.activation_function]));
  }

  /**
   * softmax(QKᵀ/√d_k)V of one query in each of h heads (equation 1, section 3.2.2).
   * K and V are lists of vectors; `seen` collects the scores q·k, the scaled ones and the weights of each head.
   */
  attention(name, h, q, K, V, seen) {
    const d_k = q.length / h, joined = new Float32Array(q.length);
    for (let head = 0; head < h; head++) {
      const begin = head * d_k, end = begin + d_k;
      const dots = K.map((k) => {
        let dot = 0;
        for (let i = begin; i < end; i++) dot += q[i] * k[i];
        return dot;
      });
      const scaled = dots.map((dot) => dot / Math.sqrt(d_k)), weights = softmax(scaled);
      V.forEach((v, place) => {
        for (let i = begin; i < end; i++) joined[i] += weights[place] * v[i];
      });
      seen.push({ dots, scaled, weights });
    }
    return this.linear(`${name}.out_proj`, joined);
  }

  /** Encode token ids. Returns the states, and what each position of each layer attended to. */
  encode(ids) {
    const { encoder_layers, encoder_attention_heads: h } = this.config;
    let states = ids.map((id, position) => this.embed("encoder", id, position));
    const attention = [];
    for (let layer = 0; layer < encoder_layers; layer++) {
      const name = `encoder.layers.${layer}`;
      const read = this.config.norm_placement === "post" ? states : states.map((x) => this.norm(`${name}.self_attn_residual.norm`, x));
      const K = read.map((x) => this.linear(`${name}.self_attn.k_proj`, x));
      const V = read.map((x) => this.linear(`${name}.self_attn.v_proj`, x));
      const seen = [];
      states = states.map((state) => {
        const heads = [];
        seen.push(heads);
        const attended = this.residual(`${name}.self_attn_residual`, state, (x) =>
          this.attention(`${name}.self_attn`, h, this.linear(`${name}.self_attn.q_proj`, x), K, V, heads));
        return this.residual(`${name}.feed_forward_residual`, attended, (x) => this.feedForward(`${name}.feed_forward`, x));
      });
      attention.push(seen);
    }
    return { states: states.map((x) => this.norm("encoder.norm", x)), attention };
  }

  /** Keys and values of the source, which every step of the decoder reads. */
  remember({ states }) {
    return Array.from({ length: this.config.decoder_layers }, (_, layer) => {
      const name = `decoder.layers.${layer}.cross_attn`;
      return { K: states.map((x) => this.linear(`${name}.k_proj`, x)), V: states.map((x) => this.linear(`${name}.v_proj`, x)) };
    });
  }

  /** What the decoder holds before the first token: no keys and values of its own. */
  begin() {
    return Array.from({ length: this.config.decoder_layers }, () => ({ K: [], V: [] }));
  }

  /** Read one more target token. Returns the next tokens' logits, the longer past, and what was attended to. */
  step(source, past, token) {
    const { decoder_attention_heads: h } = this.config;
    let state = this.embed("decoder", token, past[0].K.length);
    const attention = { decoder: [], cross: [] };
    const longer = past.map(({ K, V }, layer) => {
      const name = `decoder.layers.${layer}`, own = [], cross = [];
      const now = {};
      state = this.residual(`${name}.self_attn_residual`, state, (x) => {
        now.K = [...K, this.linear(`${name}.self_attn.k_proj`, x)];
        now.V = [...V, this.linear(`${name}.self_attn.v_proj`, x)];
        return this.attention(`${name}.self_attn`, h, this.linear(`${name}.self_attn.q_proj`, x), now.K, now.V, own);
      });
      state = this.residual(`${name}.cross_attn_residual`, state, (x) =>
        this.attention(`${name}.cross_attn`, h, this.linear(`${name}.cross_attn.q_proj`, x), source[layer].K, source[layer].V, cross));
      state = this.residual(`${name}.feed_forward_residual`, state, (x) => this.feedForward(`${name}.feed_forward`, x));
      attention.decoder.push(own);
      attention.cross.push(cross);
      return now;
    });
    return { logits: this.linear("lm_head", this.norm("decoder.norm", state)), past: longer, attention };
  }
}

// Search

/** The scores of the next token behind what was read, start included, with the settings of `generate()` that forbid or force tokens. */
function allowed(scores, read, settings) {
  const { repetition_penalty, no_repeat_ngram_size: n, bad_words_ids = [], suppress_tokens = [], begin_suppress_tokens = [] } = settings;
  const { forced_bos_token_id: first, forced_eos_token_id: last, min_length, min_new_tokens, max_new_tokens, ends } = settings;
  const left = Float32Array.from(scores), ban = (id) => { left[id] = -Infinity; };
  const isBehind = (tokens) => tokens.every((token, i) => token === read[read.length - tokens.length + i]);
  const force = (ids) => { left.fill(-Infinity); for (const id of ids) left[id] = 0; };
  if (repetition_penalty) for (const id of new Set(read)) left[id] = left[id] < 0 ? left[id] * repetition_penalty : left[id] / repetition_penalty;
  if (n) for (let i = 0; i + n <= read.length; i++) if (isBehind(read.slice(i, i + n - 1))) ban(read[i + n - 1]);
  for (const word of bad_words_ids) {
    if (word.length === 1 ? !ends.includes(word[0]) : word.length <= read.length && isBehind(word.slice(0, -1))) ban(word.at(-1));
  }
  if (read.length < min_length || read.length <= min_new_tokens) ends.forEach(ban);
  if (first !== undefined && read.length === 1) force([first]);
  if (last !== undefined && read.length === max_new_tokens) force([last].flat());
  suppress_tokens.forEach(ban);
  if (read.length === (first === undefined ? 1 : 2)) begin_suppress_tokens.forEach(ban);
  return left;
}

/**
 * Generate from token ids with K beams, as transformers does; K = 1 is greedy search. The settings have the names of its
 * generation config. Returns hypotheses, best first: `tokens` with the end, `score`, and `steps`, what each token was chosen from.
 */
function search(model, ids, settings) {
  const { num_beams: beams, early_stopping, length_penalty = 1, length_penalty_form, tokens_beyond_source: beyond, start, ends } = settings;
  // Of a text that nobody can see, nothing is made up; for one that is too long there are no positions.
  if (ids.length < 2 || ids.length > settings.positions) return { hypotheses: [] };
  const longest = Math.min(settings.longest, ids.length + (beyond ?? Infinity));
  // Heedful's own search, of these two settings, has log-probabilities with one beam too.
  const isGreedy = beams === 1 && !length_penalty_form && beyond === undefined;
  // Of Wu et al. (2016), equation 14, where the form is GNMT's.
  const penalty = (length) => (length_penalty_form === "gnmt" ? (5 + length) / 6 : length) ** length_penalty;
  const isPatient = early_stopping === "never" && length_penalty > 0, count = Math.max(2, 1 + ends.length) * beams;
  const encoded = model.encode(ids), source = model.remember(encoded);
  let running = [{ tokens: [], sum: 0, past: model.begin(source), steps: [] }];
  let finished = [];
  for (let length = 1; length <= longest && running.length; length++) {
    const candidates = [];
    for (const hypothesis of running) {
      const { logits, past, attention } = model.step(source, hypothesis.past, hypothesis.tokens.at(-1) ?? start);
      const logProbabilities = logSoftmax(logits);
      const scores = allowed(isGreedy ? logits : logProbabilities, [start, ...hypothesis.tokens], settings);
      const step = { logProbabilities, attention };
      for (const token of best(scores, count)) {
        const sum = hypothesis.sum + (isGreedy ? logProbabilities : scores)[token];
        if (scores[token] > -Infinity) candidates.push({ hypothesis, past, step, token, sum, rank: isGreedy ? scores[token] : sum });
      }
    }
    candidates.sort((a, b) => b.rank - a.rank);
    const extended = candidates.slice(0, count).map(({ hypothesis, past, step, token, sum }) => (
      { tokens: [...hypothesis.tokens, token], sum, past, steps: [...hypothesis.steps, step], ends: ends.includes(token) || length === longest }));
    for (const each of extended.slice(0, beams)) if (each.ends) finished.push({ ...each, score: each.sum / penalty(length) });
    finished = finished.sort((a, b) => b.score - a.score).slice(0, beams);
    running = extended.filter((each) => !each.ends).slice(0, beams);
    const isFull = finished.length === beams, hoped = running.length && running[0].sum / penalty(isPatient ? longest : length);
    if (isFull && (early_stopping === true || beams === 1 || hoped <= finished.at(-1).score)) break;
  }
  return { encoded, hypotheses: finished };
}

/** The places of the `count` largest values, the largest first. */
function best(values, count) {
  const places = [];
  values.forEach((value, place) => {
    if (places.length === count && value <= values[places.at(-1)]) return;
    let at = places.length;
    while (at && values[places[at - 1]] < value) at--;
    places.splice(at, 0, place);
    if (places.length > count) places.pop();
  });
  return places;
}

// Tokenizer: byte-level BPE (Radford et al., 2019; Sennrich et al., 2016)

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

// What leaves a mark: no control, format such as a zero width space, space, or filler of Hangul.
const SEEN = /[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}\u115f\u1160\u3164\uffa0]/u;

class Tokenizer {
  constructor({ vocabulary, merges, special, end }) {
    this.tokens = vocabulary;
    this.ids = new Map(vocabulary.map((token, id) => [token, id]));
    this.ranks = new Map(merges.map((pair, rank) => [pair, rank]));
    this.special = new Set(special);
    this.end = end;
    // Printable bytes stand for themselves, the others for letters from Ā on.
    const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    let next = 256;
    this.letters = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
  }

  encode(text) {
    const words = (SEEN.test(text) && text.normalize("NFC").trim().match(WORDS)) || [];
    return [...words.flatMap((word) => this.word(word)), this.end];
  }

  /** Merge the bytes of a word pair by pair, the pair that was learned first coming first. */
  word(word) {
    const parts = Array.from(new TextEncoder().encode(word), (byte) => this.letters[byte]);
    for (;;) {
      let first = Infinity, at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < first) [first, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.ids.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  /** Turn ids back into text, without control tokens. */
  decode(ids) {
    const letters = ids.filter((id) => !this.special.has(id)).map((id) => this.tokens[id]).join("");
    return new TextDecoder().decode(Uint8Array.from(letters, (letter) => this.bytes.get(letter)));
  }
}
