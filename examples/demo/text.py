"""Real English: sentences to embed, and half a megabyte of prose to train on."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

PROSE = "\n".join(topics.values())
ALPHABET = sorted(set(PROSE))


def sentences(count: int) -> list[str]:
    """The sentences of sentences.txt, then further ones from the manual of Python."""
    lines = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    for paragraph in re.split(r"\n\s*\n", PROSE):
        for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", " ".join(paragraph.split())):
            # No markup, no code, neither a heading nor a whole list.
            if re.fullmatch(r"[A-Z][^\n*|=<>{}\[\]_`\"]{30,300}\.", sentence):
                found.append(sentence)
    return list(dict.fromkeys(found))[:count]
