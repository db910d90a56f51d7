"""Tiny models and batches, pairs of options, and new processes for several test files."""

import ast
import copy
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.import_utils import is_peft_greater_or_equal

import heedful
from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.attending_heed import Call, attention_function
from heedful.data.tokenizer_training import train_tokenizers
from heedful.versions_heed import CHECKPOINTING
from heedful_lab.korean_english.pairs import korean_english_pairs
from memorised import saved_in

PAD, START = 0, 1
# Many end tokens, so that the sentences of a batch end at different steps.
ENDS = list(range(2, 14))
FIRST_WORD = 14
# Each is an option, or a combination of options, that changes what positions, masks or caches have to do.
VARIANTS = {
    "default": {},
    "modern": {"norm_placement": "pre", "norm_type": "rmsnorm", "activation_function": "swiglu"},
    "rotary": {"position_encoding": "rotary"},
    "learned": {"position_encoding": "learned"},
    "no_positions": {"position_encoding": "none"},
    "shaw": {"position_encoding": "shaw", "relative_attention_max_distance": 2},
    "t5": {"position_encoding": "t5", "relative_attention_max_distance": 17},
    "dot": {"attention_scoring": "dot", "sinusoid_layout": "concatenated"},
    "additive": {"attention_scoring": "additive", "attention_bias": True},
    "neighbourhoods": {"encoder_neighbourhood": 2, "decoder_neighbourhood": 3},
    "grouped": {"d_k": 6, "d_v": 10, "encoder_key_value_heads": 1, "decoder_key_value_heads": 2},
    "separate_vocabularies": {"decoder_vocab_size": 71, "share_encoder_decoder_embeddings": False},
    "bart": {"position_encoding": "learned", "embedding_norm": True, "output_bias": True, "attention_bias": True},
    "m2m100": {"sinusoid_layout": "tensor2tensor", "position_offset": 2, "norm_placement": "pre"},
    "shared_layers": {"share_layers": True, "decoder_layers": 3, "norm_placement": "pre"},
    "unequal_stacks": {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
}
SHARINGS = {
    "all_shared": {},
    "nothing_shared": {"tie_word_embeddings": False},
    "own_source": {"share_encoder_decoder_embeddings": False},
    "own_output": {"tie_output_embeddings": False},
    "own_source_and_output": {"share_encoder_decoder_embeddings": False, "tie_output_embeddings": False},
    "separate_vocabularies": VARIANTS["separate_vocabularies"],
    "separate_vocabularies_untied": {"decoder_vocab_size": 71, "tie_word_embeddings": False},
}
# The options that decide which positions and masks there are: what depends on these alone need not try all variants.
POSITIONS = ("default", "rotary", "learned", "shaw", "t5", "neighbourhoods")

CELLS = ("rnn", "lstm", "gru")
ATTENTIONS = ("dot", "scaled_dot", "general", "additive")
# The encoder's last state is all that the decoder gets.
SUTSKEVER = {"cell": "lstm", "attention": "none", "input_feeding": False, "bidirectional": False}
SUTSKEVER |= {"bridge": "copy", "reverse_source": True}
# The same for recurrent models: each changes what states, masks or caches have to do.
RECURRENT_VARIANTS = {
    "default": {},
    "rnn": {"cell": "rnn", "attention": "dot"},
    "lstm": {"cell": "lstm", "attention": "general"},
    "sutskever": SUTSKEVER,
    "cho": {"attention": "none"},  # which the decoder reads at every step
    "no_feeding": {"cell": "lstm", "attention": "scaled_dot", "input_feeding": False},
    "no_bridge": {"bridge": "none", "bidirectional": False},
    "equations": {"use_fused_cells": False},
    "unequal": {"encoder_layers": 3, "decoder_layers": 1},
    "more_decoder": {"encoder_layers": 1, "decoder_layers": 3, "input_feeding": False},
    "separate_vocabularies": VARIANTS["separate_vocabularies"],
}
FAMILIES = {
    "transformer": (HeedConfig, HeedForConditionalGeneration, VARIANTS),
    "recurrent": (HeedRNNConfig, HeedRNNForConditionalGeneration, RECURRENT_VARIANTS),
}
SIZES = {
    "transformer": {
        **{"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    },
    "recurrent": {"embedding_size": 12, "hidden_size": 16},
}


def tiny_config(family: str = "transformer", **changes) -> HeedConfig | HeedRNNConfig:
    """Return a config of two layers without dropout, so that training mode is deterministic too."""
    sizes = {"vocab_size": 99, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, **SIZES[family]}
    return FAMILIES[family][0](**{**sizes, **changes})


@torch.no_grad()
def shake(module: torch.nn.Module):
    """Draw every parameter anew, biases and norms included: fresh weights hide what is zero or one."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def tiny_model(config=None, seed: int = 0, attention: str | None = None, family: str = "transformer", **changes):
    """Return a tiny model in evaluation mode whose outputs depend on everything it reads.

    `attention` is the kernel of a Transformer, or the field of that name of a recurrent model's config.
    """
    if family == "recurrent" and attention is not None:
        changes["attention"] = attention
    torch.manual_seed(seed)
    config = config or tiny_config(family, **changes)
    if isinstance(config, HeedRNNConfig):
        model = HeedRNNForConditionalGeneration(config)
        shake(model)
    else:
        model = HeedForConditionalGeneration._from_config(config, attn_implementation=attention)
        shake(model)
        # The library's default embeddings: larger ones would drown the positions.
        torch.nn.init.normal_(model.model.encoder.embed_tokens.weight, std=config.d_model**-0.5)
        if not config.shares_source_and_target_embeddings:
            torch.nn.init.normal_(model.model.decoder.embed_tokens.weight, std=config.d_model**-0.5)
    model.generation_config.eos_token_id = [end for end in ENDS if end < config.target_vocab_size]
    # Untrained models like one token best; its successors depend on all that is read.
    model.generation_config.no_repeat_ngram_size = 1
    return model.eval()


def ending_model(**changes):
    """Return a tiny model whose sentences end at token 2, as those of a trained tokenizer do."""
    model = tiny_model(**changes)
    model.generation_config.eos_token_id = 2
    return model


tiny_rnn = functools.partial(tiny_model, family="recurrent")
tiny_rnn_config = functools.partial(tiny_config, "recurrent")


def dequantized(model):
    """Return a copy of a model with the int8 weights that a page computes with."""
    from heedful.export.page import quantize

    same = copy.deepcopy(model).float()
    for name, weight in same.named_parameters():
        if weight.dim() == 2 and "embed_positions" not in name:
            values, scales = quantize(weight.data)
            weight.data = values * scales[:, None]
    return same


def matrices_of(model) -> list[int]:
    """Return, for source, target and output embeddings, the first of them that is the same matrix."""
    weights = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
    return [next(i for i, first in enumerate(weights) if first is weight) for weight in weights]


def sentences(*lengths: int, vocab_size: int = 71) -> list[torch.Tensor]:
    """Return random token ids of the given lengths."""
    return [torch.randint(FIRST_WORD, vocab_size, (length,)) for length in lengths]


def empty_cache(model, kind: str, source_length: int, target_length: int) -> EncoderDecoderCache:
    """Return a cache that is `dynamic`, or `static` with room for so many tokens."""
    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    lengths = target_length, source_length
    return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in lengths))


def padded(rows: list[torch.Tensor], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows to `(batch, longest)` ids and the mask that is 0 at padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=PAD, padding_side=side)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids, mask


def masked_batch(sources: tuple[int, ...], targets: tuple[int, ...], side: str = "right", seed: int = 1) -> dict:
    """Return random sources padded on one side, and labels padded on the right, of the given lengths."""
    torch.manual_seed(seed)
    source, mask = padded(sentences(*sources), side)
    labels, tokens = padded(sentences(*targets))
    return {"input_ids": source, "attention_mask": mask, "labels": labels.masked_fill(tokens == 0, -100)}


def padded_batch(sources: tuple[int, ...], targets: tuple[int, ...], side: str = "right", seed: int = 1) -> dict:
    """Return random sources and targets of the given lengths, all padded on one side, with a mask of each."""
    torch.manual_seed(seed)
    found = {}
    for name, lengths in (("", sources), ("decoder_", targets)):
        found[f"{name}input_ids"], found[f"{name}attention_mask"] = padded(sentences(*lengths), side)
    return found


def uncompiled(kernel: str):
    """Return a context in which flex_attention runs without being compiled, which takes it a minute."""
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return torch.compiler.set_stance("force_eager") if kernel == "flex_attention" else nullcontext()


def checkpoint_activations(model, **how) -> None:
    """Let a model compute its layers again in the backward pass, by the name that the installed transformers has."""
    getattr(model, f"{CHECKPOINTING}_enable")(how or None)


def attend(attention, states: torch.Tensor, kernel: str = "eager", **parts):
    """Call an attention by itself, with the parts of a `Call`."""
    return attention(states, Call(attention_function(kernel, states.device), **parts))


def loss_and_gradients(model, batch: dict, **arguments) -> torch.Tensor:
    """Return the loss and all gradients as one vector, in float32."""
    model.zero_grad()
    loss = model(**batch, **arguments).loss
    loss.backward()
    gradients = [weight.grad.float().flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat([loss.detach()[None].float(), *gradients])


SOURCE, TARGET = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    """Return the logits of one pair in evaluation mode."""
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


def generated(model, rows: list[torch.Tensor], side: str = "right", **settings) -> list[list[int]]:
    """Return the tokens that a model generates for each sentence, up to its end: shorter hypotheses are filled up."""
    torch.manual_seed(5)
    ids, mask = padded(rows, side)
    tokens = model.generate(ids, attention_mask=mask, max_length=13, **settings).tolist()
    ends = [next((place for place, token in enumerate(row) if token in ENDS), len(row)) for row in tokens]
    return [row[: end + 1] for row, end in zip(tokens, ends, strict=True)]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5):
    """Compare to a tolerance relative to the largest number, and absolute below one."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, theirs.abs().max().item()))


def rounding(model: torch.nn.Module, tokens: int = 1) -> float:
    """Return how far rounding may move the outputs of a model in float32, as a share of the largest number.

    A sum of n products errs by some √n units in the last place, and hardly ever by 4√n. Here n counts the products of
    a token on its way through the model. Gradients are sums over tokens: for them it counts those of all tokens.
    """
    length = tokens * sum(module.in_features for module in model.modules() if isinstance(module, torch.nn.Linear))
    return 4 * torch.finfo(torch.float32).eps * length**0.5


def pairwise(*axes) -> list[tuple]:
    """Return few combinations of values of the axes that hold every pair of values of two, for `parametrize`.

    A fault nearly always depends on one option or on two of them; a full product tries each pair many times.
    """

    def pairs(values):
        return set(itertools.combinations(enumerate(values), 2))

    axes = [list(axis) for axis in axes]
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, chosen = set().union(*map(pairs, every)), set()
    while missing:
        best = max(every, key=lambda values: len(pairs(values) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return [tuple(axis[i] for axis, i in zip(axes, values, strict=True)) for values in sorted(chosen or every)]


def rows() -> list:
    """Return eight pairs of sentences of other lengths, with 38 target tokens."""
    torch.manual_seed(0)
    return list(zip(sentences(3, 9, 5, 2, 7, 4, 6, 8), sentences(6, 1, 9, 3, 2, 8, 4, 5), strict=True))


def collated(pairs, side="right", extra=0) -> dict:
    """Return model inputs; `extra` adds that much padding behind the longest row."""
    source, mask = padded([source for source, _ in pairs], side)
    target, tokens = padded([target for _, target in pairs])
    extend = torch.nn.functional.pad
    return {
        "input_ids": extend(source, (0, extra), value=PAD),
        "attention_mask": extend(mask, (0, extra)),
        "labels": extend(target.masked_fill(tokens == 0, -100), (0, extra), value=-100),
    }


def change_json(path: Path, **changes):
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def assert_error(message, call, *arguments, error=ValueError, **settings):
    """Call a function, which must raise an error with the message."""
    with pytest.raises(error, match=message):
        call(*arguments, **settings)


def assert_refused(cases, call, error=ValueError):
    """Call a function with each `(given, message)`; tell of all that raise no error or one without the message."""
    faults = []
    for given, message in cases:
        try:
            call(given)
        except error as raised:
            if not re.search(message, str(raised)):
                faults.append(f"{given}: {raised} does not say {message}")
        else:
            faults.append(f"{given} is accepted")
    assert not faults, "\n".join(faults)


def each_once(values, others, thorough=()) -> list[tuple]:
    """Return pairs for `pytest.mark.parametrize`: the others take turns, but the thorough values have all of them."""
    turns = itertools.cycle(others)
    return [(value, other) for value in values for other in (others if value in thorough else [next(turns)])]


def slow_but(quick, values) -> list:
    """Return values for `pytest.mark.parametrize`; those that are not among the quick ones have the mark `slow`."""
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in quick])
        for value in values
    ]


def load_script(path: str):
    """Return a script of the repository as a module of its own."""
    place = Path(__file__).parents[2] / path
    spec = importlib.util.spec_from_file_location(f"script_{place.stem}", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def untrained_folder(folder: Path, pairs: int = 200, **settings) -> Path:
    """Save an untrained model of one layer a side with tokenizers that know pairs of the built-in corpus."""
    known = list(korean_english_pairs("train", pairs))
    tokenizers = train_tokenizers([pair["ko"] for pair in known], [pair["en"] for pair in known], vocab_size=400)
    config = tiny_config(vocab_size=400, encoder_layers=1, decoder_layers=1, **tokenizers.special_ids())
    model = HeedForConditionalGeneration(config)
    model.generation_config.update(**settings)
    return saved_in(folder, model, tokenizers)


def closure_of(*files: str) -> set[str]:
    """Return the names of files of the package and of all their siblings that they import, and these in turn."""
    found, waiting = set(), [*files]
    while waiting:
        file = waiting.pop()
        found.add(file)
        tree = ast.parse((Path(heedful.__file__).parent / file).read_text())
        siblings = {f"{node.module}.py" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        waiting += siblings - found
    return found


# Loading adapters by transformers itself, and prefixes, which are in the cache.
needs_peft_of_transformers = pytest.mark.skipif(
    not is_peft_greater_or_equal(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)

# The files of code that are saved with a Transformer.
CODE = closure_of("modeling_heed.py")

# Makes every import of heedful fail, as where it is not installed.
WITHOUT_HEEDFUL = "import sys; sys.modules['heedful'] = None"
RUN_PIECES = """
import json, sys, traceback
first, pieces, values = json.load(open(sys.argv[1]))
exec(first)
raised = {}
for name, code in pieces.items():
    try:
        exec(compile(code, name, "exec"), dict(values))
    except BaseException:
        raised[name] = traceback.format_exc()
json.dump(raised, open(sys.argv[2], "w"))
"""


def run_python(*arguments, **environment: str) -> subprocess.CompletedProcess:
    """Run Python with arguments in a new process, which must end well, and return it with its output and errors."""
    command, variables = [sys.executable, *map(str, arguments)], {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def fresh_process(pieces: dict[str, str], values: dict, folder: Path, first: str = "") -> dict[str, str]:
    """Run named pieces of code in one new process, and return the traceback of each that raised, by its name.

    Before them runs `first`. All find the values, which have to fit into JSON, as their variables. The folder is the
    cache of the code in models' folders too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pieces.json").write_text(json.dumps([first, pieces, values]))
    arguments = "-c", RUN_PIECES, folder / "pieces.json", folder / "raised.json"
    run_python(*arguments, HF_MODULES_CACHE=str(folder / "modules"))
    return json.loads((folder / "raised.json").read_text())
