"""`heedful verify`: checks of a saved model."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Exit, Option

from heedful.cli import options
from heedful.files import read_lines


def verify(
    model: options.Model,
    text: Annotated[list[str] | None, Option("--text", help="Sentence to test with; may be repeated.")] = None,
    data: Annotated[Path | None, Option("--data", help="File of sentences to test with, one per line.")] = None,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run custom code in the folder.")] = False,
    as_json: options.AsJson = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Number type to compute in.")] = "float32",
    device: options.Device = None,
) -> None:
    """Check a saved model (Heed or another encoder-decoder): batches, padding, cache, loss, saving, tokenizers."""
    from heedful.verification.verification import verify as verify_model

    texts = list(text or [])
    if data is not None:
        texts += filter(str.strip, read_lines(data, "--data"))
        if not texts:
            raise ValueError(f"`--data` must hold sentences, but {data} has none.")
    options.quieten()
    result = verify_model(model, texts, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    options.print_result(result.to_dict(), result.table(), as_json)
    if result.failed:
        raise Exit(1)
