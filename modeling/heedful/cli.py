"""The `heedful` command: train, evaluate, translate, look, check, study, publish.

Everything heavy is imported by the command that needs it, so that `heedful --help` answers at once.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="heedful",
    help="Encoder-decoder models for Hugging Face users: raw sentence pairs in, a published model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

export = typer.Typer(name="export", help="Write a model for an engine outside Python.", no_args_is_help=True)
app.add_typer(export)

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU where there is one.")]
Beams = Annotated[int | None, typer.Option("--num-beams", help="Beam width; 1 is greedy. Default: the model's own.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest translation in tokens. Default: the model's own.")]
TargetLanguage = Annotated[str | None, typer.Option("--to", help="Target language, of a model that knows several.")]
Kind = Literal["cross", "encoder", "decoder"]
EngineOption = Annotated[
    Literal["auto", "native", "generate", "ctranslate2"],
    typer.Option(help="What decodes: `native` is Heed's own decoder for the CPU; `auto` takes it where it can do it."),
]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16"],
    typer.Option(help="Of the native decoder's weights (float32, bfloat16, int8), or of CTranslate2's (any)."),
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model.")]
AnyModel = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a saved model, or its id on the Hub.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Such as optimization.max_updates=500.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell sizes, first batch, memory and time, and train nothing.")
    ] = False,
):
    """Train a model by a recipe, test it, and save it with its tokenizer and card."""
    from heedful.publishing.run_card import write_run_card
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides)
    if dry_run:
        from heedful.diagnosis.estimate import dry_run as estimate

        _quieten()
        estimated = estimate(settings)
        if int(os.environ.get("RANK", "0")) == 0:
            print(estimated)
        return
    from heedful.training.run import train as run_recipe

    _quieten()
    result = run_recipe(settings)
    if int(os.environ.get("RANK", "0")) == 0:
        card = write_run_card(result)
        for name, values in result.metrics.items():
            told = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
            print(f"{name}: {told}")
        minutes = result.progress.seconds / 60
        print(
            f"{result.progress.update:,} updates, {result.progress.target_tokens:,} target tokens, {minutes:.1f} min"
        )
        print(f"model: {result.folder}\ncard: {card}")


@app.command()
def doctor(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Such as optimization.max_updates=500.")
    ] = None,
    pairs: Annotated[int, typer.Option("--pairs", help="Training pairs to look at, the first ones.")] = 100_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
):
    """Check a recipe before it is trained: data, tokenizer, model, schedule. Exit code 1 if it would be ruined."""
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides)
    from heedful.diagnosis.doctor import diagnose

    _quieten()
    diagnosis = diagnose(settings, pairs)
    print(json.dumps(diagnosis.to_dict(), indent=2, ensure_ascii=False) if as_json else diagnosis)
    if diagnosis.has_errors:
        sys.exit(1)


@app.command()
def evaluate(
    model: AnyModel,
    data: Annotated[
        list[str], typer.Option("--data", help="File, Hub dataset or builtin:SPLIT:COUNT; twice for two text files.")
    ],
    source: Annotated[str, typer.Option(help="Source language or column.")] = "source",
    target: Annotated[str, typer.Option(help="Target language or column.")] = "target",
    num_beams: Beams = None,
    max_new_tokens: MaxNewTokens = None,
    to: TargetLanguage = None,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU's tokenizer for BLEU.")] = "13a",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    bootstrap: Annotated[int, typer.Option(help="Resamples behind the 95 % intervals; 0 for none.")] = 1000,
    token_budget: Annotated[int, typer.Option(help="Padded source tokens times beams in one batch.")] = 8192,
    predictions: Annotated[Path | None, typer.Option(help="Write the translations here, one a line.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    revision: Revision = None,
    device: Device = None,
):
    """Translate a test set and score it: BLEU and chrF with their signatures, TER, exact match.

    Started by torchrun or accelerate launch, the processes share the sentences.
    """
    from heedful.data.sources import read_pairs
    from heedful.evaluation.metrics import score_translations

    pairs = list(read_pairs(data[0] if len(data) == 1 else data, source=source, target=target, split="test"))
    _quieten()
    search = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "target_language": to}
    sources = [pair["source"] for pair in pairs]
    texts = _translate_all((model, revision), sources, device, token_budget=token_budget, **search)
    if texts is None:
        return
    if predictions is not None:
        predictions.write_text("".join(text.replace("\n", " ") + "\n" for text in texts), encoding="utf-8")
    references = [pair["target"] for pair in pairs]
    scores = score_translations(texts, references, tokenize=tokenize, lowercase=lowercase, bootstrap=bootstrap)
    if as_json:
        print(json.dumps(scores, indent=2, ensure_ascii=False))
        return
    print(f"{scores['count']} pairs")
    for name, title in {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match"}.items():
        interval = scores.get(f"{name}_interval")
        spread = f"  (95 %: {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        unit = " %" if name == "exact_match" else ""
        print(f"{title:<12}{scores[name]:6.2f}{unit}{spread}  {scores.get(f'{name}_signature', '')}".rstrip())


@app.command()
def translate(
    model: AnyModel,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]…", help="Sentences; else standard input.")
    ] = None,
    num_beams: Beams = None,
    n_best: Annotated[int, typer.Option("--n-best", help="Translations of each sentence, best first.")] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Print each translation's score before it.")] = False,
    max_new_tokens: MaxNewTokens = None,
    to: TargetLanguage = None,
    token_budget: Annotated[int, typer.Option(help="Padded source tokens times beams in one batch.")] = 8192,
    engine: EngineOption = "auto",
    precision: PrecisionOption = "float32",
    revision: Revision = None,
    device: Device = None,
):
    """Translate sentences, or standard input line by line; the order is kept."""
    from heedful.inference.translation import Translator

    _quieten()
    translator = Translator.from_pretrained(model, device, revision, engine, precision)
    lines = text if text else io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="\n")
    for translations in translator.translate_lines(
        lines,
        num_beams=num_beams,
        num_return_sequences=n_best,
        max_new_tokens=max_new_tokens,
        target_language=to,
        token_budget=token_budget,
    ):
        for translation in translations:
            score = f"{translation.score:.4f}\t" if scores and translation.score is not None else ""
            print(score + translation.text.replace("\n", " "))


@app.command()
def attention(
    model: AnyModel,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The source sentence; else --data.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Picture (.png, .svg, .pdf) or page to hover over (.html).")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Its translation. Default: the model's own.")] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="In place of TEXT: file of pairs; twice for two text files.")
    ] = None,
    source_column: Annotated[str | None, typer.Option(help="Source language or column of --data.")] = None,
    target_column: Annotated[str | None, typer.Option(help="Target language or column of --data.")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer, from 0; -1, the default, is the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Head, from 0. Default: the mean over all heads.")] = None,
    kind: Annotated[Kind | None, typer.Option(help="Whose attention. Default: cross.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Draw all heads of all layers, or of --layer.")] = False,
    rollout: Annotated[bool, typer.Option("--rollout", help="Follow attention through the layers.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Print linked words: 0-0 1-2, source first.")] = False,
    gold: Annotated[Path | None, typer.Option(help="Compare with given links: a file, one line a pair: AER.")] = None,
    entropy: Annotated[bool, typer.Option("--entropy", help="Print how widely each head looks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it, with the weights, as JSON.")] = False,
    to: TargetLanguage = None,
    revision: Revision = None,
    device: Device = None,
):
    """See which tokens a model looks at: pictures, a page to hover over, alignments, entropy."""
    from heedful.inference.attention.requests import View, Wanted, answer_request, check_request
    from heedful.inference.translation import Translator

    pairs = _pairs_to_look_at(text, target, data, (source_column, target_column))
    view = View(kind, layer, head, grid, rollout)
    wanted = Wanted(output, alignment, gold, entropy, as_json)
    given = check_request(view, wanted, pairs, is_corpus=data is not None)
    _quieten()
    translator = Translator.from_pretrained(model, device=device, revision=revision)
    found = answer_request(translator, pairs, view, wanted, given, to)
    print(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else "\n".join(found.lines()))


def _pairs_to_look_at(
    text: str | None, target: str | None, data: list[str] | None, columns: tuple[str | None, str | None]
) -> list[tuple[str, str | None]]:
    """Return the sentence of the command line, or the pairs of its files."""
    if (text is None) == (data is None):
        raise ValueError("Either TEXT or --data must be given, and not both.")
    if text is not None:
        if any(columns):
            raise ValueError("`--source-column` and `--target-column` must come with --data, whose columns they name.")
        return [(text, target)]
    if target is not None:
        raise ValueError("`--target` must come with TEXT: the pairs of --data have targets.")
    from heedful.data.sources import read_pairs

    places = data or []
    source, target = columns[0] or "source", columns[1] or "target"
    pairs = list(read_pairs(places[0] if len(places) == 1 else places, source=source, target=target, split="test"))
    if not pairs:
        raise ValueError("`--data` must hold pairs, but has none.")
    return [(pair["source"], pair["target"]) for pair in pairs]


@app.command()
def verify(
    model: Model,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Sentence to try the model with; repeatable.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Text file of such sentences, one a line.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code in the folder even where it is not Heed's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="To compute in; float32 is the strictest.")
    ] = "float32",
    device: Device = None,
):
    """Check a saved model, Heed's or any encoder-decoder: batches, padding, cache, loss, saving, tokenizers."""
    from heedful.diagnosis.verification import verify as verify_model

    texts = list(text or [])
    if data is not None:
        lines = data.read_text(encoding="utf-8").split("\n")  # and at nothing else that Unicode calls a line's end
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise ValueError(f"`--data` must hold sentences, but {data} has none.")
    _quieten()
    result = verify_model(model, texts, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if as_json else result.table())
    if result.failed:
        raise typer.Exit(1)


@app.command()
def study(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Without it, the studies are listed.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="New folder for the results. Default: runs/studies/NAME.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and everything drawn.")] = 1,
    updates: Annotated[int | None, typer.Option(help="Of each training. Default: the study's own.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Other data, where the study can use it: builtin:train:COUNT, or a folder.")
    ] = None,
):
    """Run one of the paper's arguments as an experiment: tables, figures and findings in a folder.

    Trained models are kept in the folder `trainings` beside the output, and found there the next time.
    """
    from heedful.studies.catalogue import NAMES, find_study
    from heedful.studies.study import Lab, run_study

    if name is None:
        if (output, seed, updates, data) != (None, 1, None, None):
            raise ValueError("The name of a study must be given where there are options, but is missing.")
        for known in NAMES:
            print(f"{known:<12}{find_study(known).question}")
        return
    folder = output or Path("runs/studies") / name
    lab = Lab(find_study(name), seed, updates, data, folder.parent / "trainings")
    _quieten()
    print(run_study(lab, folder) / "report.md")


@app.command()
def complexity(
    d_model: Annotated[int, typer.Option(help="Width d of every layer.")] = 512,
    heads: Annotated[int, typer.Option(help="Of self-attention.")] = 8,
    neighbourhood: Annotated[int, typer.Option(help="Positions that a restricted query sees each way, r.")] = 32,
    kernel_width: Annotated[int, typer.Option(help="Of a convolution, k; odd.")] = 3,
    cell: Annotated[Literal["rnn", "gru", "lstm"], typer.Option(help="Of the recurrent layer.")] = "lstm",
    lengths: Annotated[str, typer.Option(help="Numbers of positions n to time.")] = "64,128,256,512,1024,2048,4096",
    reach_lengths: Annotated[
        str, typer.Option(help="Numbers of positions to look for paths in, up to 256.")
    ] = "16,32,64,128",
    rounds: Annotated[int, typer.Option(help="How often each layer is timed, in turns.")] = 5,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="New folder for figure, tables and JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
):
    """Measure Table 1 of the paper here: operations, steps, paths, time and memory of attention and its rivals."""
    from heedful.complexity.settings import ComplexitySettings, numbers_of

    sizes = {"d_model": d_model, "heads": heads, "neighbourhood": neighbourhood, "kernel_width": kernel_width}
    settings = ComplexitySettings(
        **sizes,
        cell=cell,
        lengths=numbers_of("lengths", lengths),
        reach_lengths=numbers_of("reach_lengths", reach_lengths),
        rounds=rounds,
        seed=seed,
    )
    from heedful.complexity.report import as_json as written
    from heedful.complexity.report import make_report, tables, write_report

    _quieten()
    report = make_report(settings) if output is None else write_report(settings, output)
    print(written(report) if as_json else tables(report))


@app.command()
def push(
    model: Model,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Its id on the Hub, such as name/model.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. Default: its owner's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, made if it is not there.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
):
    """Push a model to the Hub, with its code, tokenizers and card, in one commit."""
    from heedful.publishing.hub import push as push_folder

    _quieten()
    pushed = push_folder(model, repository, private=private, revision=revision, message=message)
    print(f"{pushed.repository} at revision {pushed.commit}\n{pushed.url}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of a saved model, or its name on the Hub.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; it must not exist.")],
    source_language: Annotated[
        str | None, typer.Option(help="Source language of mBART, M2M100, NLLB, as the tokenizer calls it: eng_Latn.")
    ] = None,
    target_language: Annotated[str | None, typer.Option(help="Language to translate into, likewise.")] = None,
):
    """Turn a saved Marian, BART, mBART, M2M100 or NLLB model into a Heed model that computes the same."""
    from heedful.publishing.conversion import convert as convert_folder

    _quieten()
    result = convert_folder(source, target, source_language, target_language)
    for note in result.notes:
        print(note)
    print(f"{result.model_type}: {result.parameters:,} parameters, logits differ by {result.difference:.1e} at most")
    print(f"model: {result.folder}")


@export.command("onnx")
def export_to_onnx(
    model: AnyModel,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    quantization: Annotated[Literal["float32", "int8"], typer.Option(help="Type of the weights.")] = "float32",
    sentences: Annotated[
        Path | None,
        typer.Option(help="Text file in the source language, one sentence a line. Default: built-in ones."),
    ] = None,
    count: Annotated[int, typer.Option(help="Sentences to compare on, the first ones.")] = 500,
):
    """Write a model as ONNX files, after onnxruntime has given the same translations as `generate()`."""
    from heedful.publishing.export_check import sentences_to_compare
    from heedful.publishing.export_onnx import export_onnx

    compared = sentences_to_compare(sentences, count)
    _quieten()
    result = export_onnx(model, target, compared, quantization)
    for search, comparison in result.comparisons.items():
        print(f"{search}: {len(comparison.differences)} of {comparison.sentences} sentences differ from generate()'s")
    if result.difference is not None:
        print(f"logits differ by {result.difference:.1e} at most")
    print(f"{result.size / 1e6:,.1f} MB in {quantization}\nmodel: {result.folder}")


@export.command("ctranslate2")
def export_to_ctranslate2(
    model: AnyModel,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    quantization: Annotated[
        Literal["float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"],
        typer.Option(help="Type of the weights, as CTranslate2 calls it; one that the device can compute with."),
    ] = "float32",
    sentences: Annotated[
        Path | None,
        typer.Option(help="Text file in the source language, one sentence a line. Default: built-in ones."),
    ] = None,
    count: Annotated[int, typer.Option(help="Sentences to compare on, the first ones.")] = 500,
    device: Device = None,
):
    """Write a model for CTranslate2, after it has given the same translations as `generate()`."""
    from heedful.publishing.export_check import sentences_to_compare
    from heedful.publishing.export_ctranslate2 import export_ctranslate2

    compared = sentences_to_compare(sentences, count)
    _quieten()
    result = export_ctranslate2(model, target, compared, quantization, device)
    for search, comparison in result.comparisons.items():
        print(f"{search}: {len(comparison.differences)} of {comparison.sentences} sentences differ from generate()'s")
    print(f"{result.size / 1e6:,.1f} MB in {result.quantization}\nmodel: {result.folder}")


@app.command()
def version():
    """Print the versions of Heedful and of what it stands on."""
    from importlib.metadata import version as version_of

    for name in ("heedful", "transformers", "torch", "tokenizers", "datasets", "accelerate"):
        print(f"{name} {version_of(name)}")


def _translate_all(
    place: tuple[str, str | None], sources: list[str], device: str | None, **settings
) -> list[str] | None:
    """Return the best translation of each source; where processes share the work, in the main one only."""
    from heedful.inference.translation import Translator

    model, revision = place
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        translator = Translator.from_pretrained(model, device=device, revision=revision)
        return [best.text for best, *_ in translator.translate(sources, **settings)]
    from heedful.training.loop.validation import translate_on_ranks
    from heedful.training.processes.devices import join_processes

    accelerator = join_processes(device)
    translator = Translator.from_pretrained(model, device=accelerator.device, revision=revision)
    texts = translate_on_ranks(translator, sources, accelerator, **settings)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return texts if is_main else None


def _quieten():
    """Leave the terminal to this program: no progress bars of transformers, no warnings about its own insides."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main():
    """Run the `heedful` command."""
    run(app)


def run(command: Callable[[], object]):
    """Run a command line; a user's mistake ends it with one line on standard error and exit code 2."""
    is_main_process = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("heedful").setLevel(logging.INFO if is_main_process else logging.ERROR)
    try:
        command()
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"heedful: {error}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is not ours: 2 for a mistake, 1 for bad luck, 130 for an interruption."""
    if isinstance(error, ValueError | OSError | ImportError):
        return 2
    from huggingface_hub.errors import StrictDataclassError

    if isinstance(error, StrictDataclassError):
        return 2
    if isinstance(error, FloatingPointError | MemoryError):
        return 1
    # By name, because to import them costs seconds.
    return {"TrainingInterrupted": 130, "ProcessLostError": 1}.get(type(error).__name__)


if __name__ == "__main__":
    main()
