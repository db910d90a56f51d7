"""Splitting texts in any script into sentences, with markup between and within them."""

import re

# A sentence ends at these; closing quotation marks and brackets belong to it ...
SENTENCE_END = re.compile(r"""(?<![.!?…])[.!?…]+["'”’»)\]]*(?=\s)|[。！？｡]+["'”’»」』）)\]]*""")
# ... unless the full stop belongs to one of these, to an initial, a list's number, or a Korean date ...
ABBREVIATION = re.compile(
    r"(?:^\d{1,3}|(?:^|[\s(\"'“‘])(?:[A-ZА-ЯΑ-Ω]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|approx|No|Nr|Fig|Eq|cf|Inc|Ltd|Co|ca|"
    r"bzw|usw|Mme|Mlle|pp|vol|(?:[A-Za-z]\.)+[A-Za-z])|\d{4}\. ?\d{1,2}(?:\. ?\d{1,2})?)\.$"
)
# ... or the sentence goes on: with a date's next number, or after a Korean quotation.
KOREAN_PARTICLE = re.compile(r"이?라[고며는]|하[고며]")
SEEN = re.compile(r"\S")
FULL_WIDTH_END = tuple("。！？｡」』）")
LINE_BREAK = re.compile(r"(\r?\n|\r)")
# The beginnings of list items, headings and quotations; and lines without text: tags, rules, code fences, subtitle
# times, link definitions, formulas.
MARKER = re.compile(
    r"\s*(?:(?:[-*+•·▪◦]|#{1,6}|>|\(?\d{1,3}[.)]|\[[ xX]\]|\[\^\w+\]:|[A-Za-z]\)|"
    r"[가나다라마바사아자차카타파하]\.)\s+|[①-⑳]\s*)+"
)
MARKUP = re.compile(
    r"\s*(?:(?:</?[A-Za-z!][^<>]*>\s*)+|`{3,}[^`]*|~{3,}.*|(?:[-=*_|:+#]\s*){3,}|WEBVTT.*|[\d:.,]+ --> .*|"
    r"\[[^\]]{1,99}\]:\s+<?(?:\w+://|[./#]).*|\$\$.*\$\$\s*|\\\[.*\\\]\s*)$"
)
# Parts of a line that are not text: images, link targets, addresses.
KEPT = (
    r"!\[[^\]]{0,300}\]\([^()]{0,2000}\)|"
    r"(?<=\])\([^()\s]{1,2000}(?:\([^()\s]*\)[^()\s]*)?(?:\s+\"[^\"]{0,300}\")?\)|"
    r"<?(?:https?|ftp)://[^\s<>|]*[^\s<>|.,;:!?)\]}\"']>?|\bwww\.[^\s<>|]*\w|(?<![\w.+-])(?:mailto:)?[\w.+-]+@[\w-]+(?:\.\w+)+"
)
BEHIND = re.compile(r"[\s.,;:!?)\]}]*")  # the end of a sentence or bracket
BARS = r"|(?<=\s)\|(?=\s|$)", r"|(?<!\\)\|"  # between a table's cells, and in a line that begins with a bar
TAGS = "|</?[A-Za-z][^<>]{0,500}>"


def split_sentences(line: str, keeps_markup: bool = False) -> list[tuple[str, str]]:
    """Split a text in linear time into pairs, each a sentence and the white space after it; joined, they are the text.

    White space at the beginning is a pair with an empty sentence. So is markup, if kept: parts without letters, a
    list's bullets or numbers, tags, rules, bars between a table's cells, images, link targets, addresses.
    """
    if not keeps_markup:
        return _sentences(line, len(line) - len(line.lstrip()))
    if MARKUP.match(line):
        return [("", line)]
    pieces, start = [], 0
    kept = KEPT + BARS[line.lstrip().startswith("|")] + TAGS * ("</" in line)
    for end, behind in [*(each.span() for each in re.finditer(kept, line)), (len(line), len(line))]:
        part = line[start:end]
        found = MARKER.match(part) or (BEHIND.match(part) if start else None)
        text = found.end() if found else len(part) - len(part.lstrip())
        has_letters = any(map(str.isalpha, part[text:]))
        pieces += _sentences(part, text) if has_letters else [("", part)] * bool(part)
        pieces += [("", line[end:behind])] * (behind > end)
        start = behind
    return pieces


def _sentences(line: str, start: int) -> list[tuple[str, str]]:
    """Split the text from `start` on; the text before it is the first pair."""
    pieces = [("", line[:start])] * bool(start)
    for match in SENTENCE_END.finditer(line, start):
        end = match.end()
        follower = len(line) if (found := SEEN.search(line, end)) is None else found.start()
        last = line[max(start, end - 40) : end]  # longer than any abbreviation
        if ABBREVIATION.search(last) or _goes_on(last, line[follower : follower + 4]):
            continue
        pieces.append((line[start:end], line[end:follower]))
        start = follower
    if start < len(line):
        sentence = line[start:].rstrip()
        pieces.append((sentence, line[start + len(sentence) :]))
    return pieces


def _goes_on(last: str, behind: str) -> bool:
    is_date = behind[:1].isdigit() and last[-2:-1].isdigit() and last.endswith(".")
    is_quoted = last[-1:] in "\"'”’»」』" and KOREAN_PARTICLE.match(behind) is not None
    return behind[:1].islower() or is_date or is_quoted


def joined_sentences(text: str, more: str, between: str = "") -> str:
    """Join sentences, with a space if the target's script needs one; `text` ends with the source's `between`."""
    if between.strip():
        return text + more
    if text.endswith(tuple(f"{end} " for end in FULL_WIDTH_END)):
        return text[:-1] + more
    needs_space = text and more and not text[-1].isspace() and not text.endswith(FULL_WIDTH_END)
    return f"{text} {more}" if needs_space else text + more
