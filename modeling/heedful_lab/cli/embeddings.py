"""`heedful embeddings`: a word's nearest neighbours."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options
from heedful.files import check_writable, import_extra


def embeddings(
    model: options.AnyModel,
    words: Annotated[list[str], Argument(metavar="WORD…", help="Source words, or beginnings of words.")],
    sentence: Annotated[str | None, Option(help="Source sentence. Default: each word by itself.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Picture to draw (.png, .svg, .pdf).")] = None,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """List the tokens nearest to a word's embedding, and to its state after each encoder layer in a sentence."""
    from heedful.attention.drawing import PICTURE_SUFFIXES
    from heedful_lab.course import embeddings as module

    if output is not None:
        check_writable(output, PICTURE_SUFFIXES, "--output")
        import_extra("matplotlib", "plots")
    translator = options.load_translator(model, device, revision)
    tokenizers = translator.tokenizers
    followed = [module.word_states(translator, tokenizers, word, sentence, to) for word in dict.fromkeys(words)]
    found = module.neighbourhoods(translator, tokenizers, followed)
    for word, near in zip(followed, found, strict=True):
        print(word.word if len(word.pieces) == 1 else f"{word.word} = {' + '.join(word.pieces)}")
        for name, each in zip(module.layer_names(len(near)), near, strict=True):
            tokens = "  ".join(f"{token.text} {token.cosine:.2f}" for token in each.tokens)
            print(f"  {name:<11}itself {each.own:5.2f}  {tokens}")
    if output is not None:
        module.draw_neighbourhoods(followed, found, output)
        print(output)
