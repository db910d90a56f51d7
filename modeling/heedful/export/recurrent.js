// Recurrent encoder-decoders with attention: what the Transformer replaced (Bahdanau et al., 2015; Luong et al., 2015).

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const joined = (...vectors) => Float32Array.from(vectors.flatMap((vector) => [...vector]));

const PLAIN = { tanh: Math.tanh, relu: (x) => Math.max(0, x), sigmoid, linear: (x) => x };

/** The next state of each cell, [h] or [h, c], from what it reads, Wx + b, and what it keeps, Uh + d. */
const CELLS = {
  /** Elman, 1990. */
  rnn: (read, kept, _, activation) => [plus(read, kept).map((x) => PLAIN[activation](x))],

  /** Hochreiter and Schmidhuber, 1997; Gers et al., 2000. */
  lstm: (read, kept, [, c]) => {
    const gates = plus(read, kept), H = c.length;
    const cell = c.map((value, i) => sigmoid(gates[H + i]) * value + sigmoid(gates[i]) * Math.tanh(gates[2 * H + i]));
    return [cell.map((value, i) => sigmoid(gates[3 * H + i]) * Math.tanh(value)), cell];
  },

  /** Cho et al., 2014, with the reset gate behind the product. */
  gru: (read, kept, [h]) => {
    const H = h.length;
    return [h.map((value, i) => {
      const reset = sigmoid(read[i] + kept[i]), update = sigmoid(read[H + i] + kept[H + i]);
      return update * value + (1 - update) * Math.tanh(read[2 * H + i] + reset * kept[2 * H + i]);
    })];
  },
};

class Recurrent extends Model {
  cell(name, x, state) {
    const read = linear(this.weights[`${name}.weight_ih_l0`], this.weights[`${name}.bias_ih_l0`], x);
    const kept = linear(this.weights[`${name}.weight_hh_l0`], this.weights[`${name}.bias_hh_l0`], state[0]);
    return CELLS[this.config.cell](read, kept, state, this.config.activation_function);
  }

  zeros(width) {
    return Array.from({ length: this.config.cell === "lstm" ? 2 : 1 }, () => new Float32Array(width));
  }

  /** Read vectors from the first to the last, or backwards. Returns the output at each, and the last state. */
  read(name, inputs, isBackwards) {
    let state = this.zeros(this.weights[`${name}.weight_hh_l0`].columns);
    const outputs = new Array(inputs.length), places = [...inputs.keys()];
    for (const place of isBackwards ? places.reverse() : places) {
      state = this.cell(name, inputs[place], state);
      outputs[place] = state[0];
    }
    return { outputs, state };
  }

  /** Encode token ids. Returns the states of the uppermost layer, and the last state of each layer. */
  encode(ids) {
    const { encoder_layers, bidirectional, reverse_source } = this.config;
    let states = ids.map((id) => row(this.weights["encoder.embed_tokens.weight"], id));
    const final = [];
    for (let layer = 0; layer < encoder_layers; layer++) {
      const name = `encoder.layers.${layer}`, first = this.read(`${name}.first_cell`, states, reverse_source);
      if (!bidirectional) {
        states = first.outputs;
        final.push(first.state);
        continue;
      }
      const second = this.read(`${name}.second_cell`, states, !reverse_source);
      states = first.outputs.map((output, place) => joined(output, second.outputs[place]));
      final.push(first.state.map((part, i) => joined(part, second.state[i])));
    }
    return { states, final };
  }

  /** The source as the attention projects it. */
  remember({ states, final }) {
    const name = "decoder.cross_attn.k_proj";
    return { V: states, K: this.weights[`${name}.weight`] ? states.map((x) => this.linear(name, x)) : states, final };
  }

  /** The bridge: the decoder's first states, made of the encoder's last ones, the uppermost beside the uppermost. */
  begin({ final }) {
    const { decoder_layers, bridge, embedding_size, hidden_size } = this.config;
    const states = Array.from({ length: decoder_layers }, (_, layer) => {
      if (bridge === "none") return this.zeros(hidden_size);
      const beside = final[Math.max(0, final.length - decoder_layers + layer)];
      if (bridge === "copy") return beside;
      const parts = beside.map((part, i) => this.linear(`decoder.bridge.projections.${layer * beside.length + i}`, part));
      return [parts[0].map(Math.tanh), ...parts.slice(1)];
    });
    return { states, fed: new Float32Array(embedding_size) };
  }

  /** The scores of a query and all keys: qᵀk, qᵀWk, or vᵀtanh(Wq + Uk), where K holds Wk or Uk. */
  scores(q, K) {
    const v = this.weights["decoder.cross_attn.weight"];
    if (!v) return K.map((k) => k.reduce((sum, value, i) => sum + value * q[i], 0));
    const projected = this.linear("decoder.cross_attn.q_proj", q);
    return K.map((k) => k.reduce((sum, value, i) => sum + v[i] * Math.tanh(projected[i] + value), 0));
  }

  /** Read one more target token. Returns the next tokens' logits, the next past, and what was attended to. */
  step({ K, V }, { states, fed }, token) {
    const embedding = row(this.weights["decoder.embed_tokens.weight"], token);
    let x = this.config.input_feeding ? joined(embedding, fed) : embedding;
    const next = states.map((state, layer) => {
      const after = this.cell(`decoder.layers.${layer}`, x, state);
      x = after[0];
      return after;
    });
    const dots = this.scores(x, K), scale = this.config.attention === "scaled_dot" ? Math.sqrt(this.config.hidden_size) : 1;
    const scaled = dots.map((dot) => dot / scale), weights = softmax(scaled);
    const context = new Float32Array(V[0].length);
    V.forEach((v, place) => v.forEach((value, i) => { context[i] += weights[place] * value; }));
    const output = this.linear("decoder.out_proj", joined(x, context)).map(Math.tanh);  // tanh(W[h; c])
    const attention = { cross: [[{ dots, scaled, weights }]] };
    return { logits: this.linear("lm_head", output), past: { states: next, fed: output }, attention };
  }
}
