"""The report on transformers' common tests: counts, failures, skips with their reasons, and faults."""

import json
from collections import Counter
from pathlib import Path

# Test class, name in the report.
SUBJECTS = {
    "HeedTest": "Heed",
    "HeedRNNTest": "HeedRNN",
    "MarianTest": "MarianMTModel",
    "BartTest": "BartForConditionalGeneration",
    "T5Test": "T5ForConditionalGeneration",
    "HeedTokenizerTest": "Heed's tokenizer",
    "PlainTokenizerTest": "a plain byte-level tokenizer",
}
# Our classes, and the classes that they are compared with.
YARDSTICKS = {"Heed": "MarianMTModel", "Heed's tokenizer": "a plain byte-level tokenizer"}
# Compared with no other model: its skips are listed, and each failure is a fault.
RECURRENT = "HeedRNN"
OUTCOMES = ("passed", "failed", "skipped")
LONGEST_REASON = 150
CLEAN = "Heed fails no test, and skips none that Marian runs. Its tokenizer passes every test that a plain one passes."

PARTIAL = "Heed fails none of the tests that were run. Some were run without the model to compare with."

# Subject, test, then `outcome` and `reason`.
Outcomes = dict[str, dict[str, dict[str, str]]]


def read_outcomes(file: Path) -> Outcomes:
    """Return the outcomes that `suite/conftest.py` wrote, by subject."""
    by_subject: Outcomes = {}
    for name, outcome in json.loads(file.read_text(encoding="utf-8")).items():
        test_class, test = name.split("::")
        by_subject.setdefault(SUBJECTS[test_class], {})[test] = outcome
    return {subject: by_subject[subject] for subject in SUBJECTS.values() if subject in by_subject}


def tests_with(outcome: str, tests: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the tests with an outcome, each with one line of its reason."""
    return {name: one_line(test["reason"]) for name, test in tests.items() if test["outcome"] == outcome}


def one_line(reason: str) -> str:
    """Return a reason's first line that does not end in a colon, shortened and without Markdown."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    line = next((line for line in lines if not line.endswith(":")), "no reason given")
    line = line.replace("|", "/").replace("<", "‹").replace(">", "›").replace("`", "'")
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def faults(outcomes: Outcomes) -> list[str]:
    """Return failures, and skips of tests that the compared model runs.

    A failure that the plain tokenizer shares comes from transformers' class.
    """
    found = [f"{RECURRENT}: {name} failed" for name in tests_with("failed", outcomes.get(RECURRENT, {}))]
    for subject, yardstick in YARDSTICKS.items():
        ours, theirs = outcomes.get(subject, {}), outcomes.get(yardstick, {})
        shared = tests_with("failed", theirs) if subject == "Heed's tokenizer" else {}
        found += [f"{subject}: {name} failed" for name in tests_with("failed", ours) if name not in shared]
        if theirs:
            skipped = tests_with("skipped", theirs)
            found += [
                f"{subject}: only ours skips {name}" for name in tests_with("skipped", ours) if name not in skipped
            ]
    return found


def counts_table(outcomes: Outcomes) -> str:
    """Return the Markdown table of counts."""
    lines = ["| | passed | failed | skipped | tests |", "|---|---|---|---|---|"]
    for subject, tests in outcomes.items():
        counts = Counter(test["outcome"] for test in tests.values())
        numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {subject} | {numbers} | {len(tests)} |")
    return "\n".join(lines)


def failures_list(outcomes: Outcomes) -> str:
    """Return all failures with their reasons."""
    lines = [
        f"- {subject}: `{name}`: {reason}"
        for subject, tests in outcomes.items()
        for name, reason in sorted(tests_with("failed", tests).items())
    ]
    return "\n".join(lines) or "None."


def skips_table(outcomes: Outcomes, subject: str) -> str:
    """Return a subject's skips by reason; a column marks those that Marian shares.

    The recurrent model's table leaves out the skips that it shares with Heed.
    """
    has_yardstick = "MarianMTModel" in outcomes
    theirs = tests_with("skipped", outcomes.get("MarianMTModel", {}))
    listed_before = tests_with("skipped", outcomes.get("Heed", {})) if subject == RECURRENT else {}
    by_reason: dict[str, list[str]] = {}
    for name, reason in tests_with("skipped", outcomes.get(subject, {})).items():
        if name not in listed_before:
            by_reason.setdefault(reason, []).append(name)
    lines = ["| tests | reason | Marian too | names |", "|---|---|---|---|"]
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        too = sum(name in theirs for name in names)
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        share = ("yes" if too == len(names) else f"**{too}**") if has_yardstick else "not run"
        lines.append(f"| {len(names)} | {reason} | {share} | {listed} |")
    return "\n".join(lines)


def report(outcomes: Outcomes, versions: dict[str, str], origin: str) -> str:
    """Return the report in Markdown; `origin` is the source of the generation and export tests."""
    measured = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = faults(outcomes)
    is_measured = "Heed" in outcomes and all(
        theirs in outcomes for ours, theirs in YARDSTICKS.items() if ours in outcomes
    )
    verdict = "Faults:" if found else CLEAN if is_measured else PARTIAL
    parts = [
        f"Measured with {measured}. Generation and export tests: {origin}.",
        counts_table(outcomes),
        "\n".join([f"**{verdict}**", *(f"- {fault}" for fault in found)]),
        f"### Failures\n\n{failures_list(outcomes)}",
    ]
    for name, heading in (("Heed", "Tests that Heed skips"), (RECURRENT, f"Other tests that {RECURRENT} skips")):
        parts += [f"### {heading}\n\n{skips_table(outcomes, name)}"] if name in outcomes else []
    return "\n\n".join(parts)
