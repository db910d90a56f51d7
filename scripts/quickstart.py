"""Watch an encoder-decoder learn Korean to English on the built-in corpus, then use it: `make quickstart`.

Each step is a command in a new process, and is printed before it runs.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from heedful_lab.korean_english.pairs import korean_english_pairs

RECIPE = "quickstart"
RUN = Path("runs/quickstart")
MODEL = RUN / "model"
SENTENCES = 5


def heedful(*arguments: str, may_fail: bool = False) -> str:
    """Run a `heedful` command with its progress and errors shown, and return its output."""
    print(f"\n$ heedful {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "heedful", *arguments]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    if finished.returncode and not may_fail:
        sys.exit(finished.returncode)
    return finished.stdout.strip()


def main():
    """Train, evaluate, translate, draw."""
    if len(sys.argv) > 1:
        sys.exit(f"{__doc__}\nIt takes no arguments, and writes {RUN} anew.")
    print(heedful("train", RECIPE, f"output={RUN}", "overwrite=true"))

    # The test scores cover the first 1,000 test sentences; these follow them.
    unseen = list(korean_english_pairs("test", 1000 + SENTENCES))[-SENTENCES:]
    translations = heedful("translate", str(MODEL), *(pair["ko"] for pair in unseen)).splitlines()
    for pair, translation in zip(unseen, translations, strict=True):
        mark = "=" if translation == pair["en"] else "≠"
        print(f"  {pair['ko']}\n    → {translation}\n    {mark} {pair['en']}")

    picture = str(RUN / "attention.png")
    heat_map = heedful("attention", str(MODEL), unseen[0]["ko"], "-o", picture, may_fail=True) or "none, see above"

    metrics = json.loads((MODEL / "metrics.json").read_text(encoding="utf-8"))
    print("\nExact match on 1,000 unseen sentences each:")
    print(f"  test           {metrics['test']['exact_match']:5.1f} %")
    print(f"  compositional  {metrics['compositional']['exact_match']:5.1f} %  (words never seen together)")
    print(f"\nmodel      {MODEL}/  (AutoModelForSeq2SeqLM.from_pretrained loads it)")
    print(f"card       {MODEL}/README.md, with the learning curve\nheat map   {heat_map}")
    print(f"run        {RUN}/  (log.jsonl, checkpoints)")
    if "ended" in metrics:
        print(f"\n{metrics['ended']['message']}")


if __name__ == "__main__":
    main()
