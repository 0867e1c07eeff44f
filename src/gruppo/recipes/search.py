"""A tool: the model learns to search a corpus, and to read the answer out of what it finds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from gruppo.config.schema import Config
from gruppo.data.source import hash_unit
from gruppo.recipes.calculator import tool_calculator, with_one_call

NAMES = (
    "Amber Ash Barley Birch Bishop Cedar Clover Copper Crane Falcon Fern Flint Fox Hazel Heron "
    "Iron Ivy Juniper "
    "Lark Maple Marble Mint Otter Pearl Pine Quarry Raven River Rose Salt Silver Swan Thistle "
    "Tiger Willow Wolf"
)
KINDS = "Bridge Castle Lighthouse Mill Museum Station Theater Tower"
TOWNS = "Arden Brack Corley Dunmore Elden Farrow Gorse Holt Kirby Lisk Marne Norby"
FIRST = "Ada Bruno Clara David Emma Felix Greta Hugo Irene Jonas Karin Leo"
LAST = "Adler Berg Cole Dahl Evans Frank Gray Hall Keller Lund Moss Quill"
WORD = re.compile(r"\w+")
QUESTIONS = {
    "year": ("When was {name} built?", "In which year was {name} built?"),
    "town": ("Where is {name}?", "In which town is {name}?"),
    "architect": ("Who designed {name}?", "Who was the architect of {name}?"),
}


def tool_search() -> Config:
    """SmolLM2-135M-Instruct learns to answer questions about 288 invented buildings by searching
    texts on them.

    As tool-calculator, with a tool that returns the two best of 288 texts (BM25); every fact is
    asked once, so that held-out answers can only be read. One of 2 CPU cores, beside other jobs: 9
    minutes of processor time. Held out, played greedily, of 48: none before, 13, 15 and 21 at step
    10, 31, 30 and 36 at step 20 (seeds 0, 1, 2). Sampled reward, of 32: 0.09, 0.03 and 0.22 at step
    4, 0.66, 0.53 and 0.66 at step 20. Without the tool: none.
    """
    recipe = tool_calculator()
    return replace(
        recipe,
        data=f"{__file__}:questions",
        steps=20,
        environment=replace(recipe.environment, tools=("gruppo.recipes.search:search",)),
    )


class BM25:
    """Okapi BM25 over texts: how well each matches the words of a query.

    score = sum over the query's words of idf * f (k1 + 1) / (f + k1 (1 - b + b L / mean L)), with f
    the word's count in a text of L words, and idf = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word in
    n of N texts, as in Lucene. Robertson and Zaragoza 2009, "The Probabilistic Relevance
    Framework", eq. 3.15.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.counts = [Counter(WORD.findall(text.lower())) for text in texts]
        lengths = [count.total() for count in self.counts]
        mean = sum(lengths) / len(lengths)
        # The part of a text's score that depends on its length alone.
        self.k1, self.norms = k1, [k1 * (1 - b + b * length / mean) for length in lengths]
        found = Counter(word for count in self.counts for word in count)
        self.idf = {
            word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found.items()
        }

    def scores(self, query: str) -> list[float]:
        known = [(word, self.idf[word]) for word in WORD.findall(query.lower()) if word in self.idf]
        return [
            sum(idf * count[word] * (self.k1 + 1) / (count[word] + norm) for word, idf in known)
            for count, norm in zip(self.counts, self.norms, strict=True)
        ]

    def best(self, query: str, count: int) -> list[int]:
        """Indices of the texts that match best, best first, without those that match no word."""
        scores = self.scores(query)
        order = sorted(range(len(scores)), key=lambda n: -scores[n])  # equal ones in their order
        return [n for n in order[:count] if scores[n] > 0]


def buildings() -> list[dict[str, str]]:
    """Facts that no model has read: 36 names times 8 kinds of building, so that a name alone finds
    several."""
    rows = []
    for name in (f"{first} {kind}" for first in NAMES.split() for kind in KINDS.split()):
        # By hashes of the name, as in products(): no order of building or Python changes them.
        lists = {"town": TOWNS.split(), "first": FIRST.split(), "last": LAST.split()}
        town, first, last = (
            values[int(len(values) * hash_unit(f"{name} {key}"))] for key, values in lists.items()
        )
        year = str(1500 + int(500 * hash_unit(f"{name} year")))
        rows.append({"name": name, "year": year, "town": town, "architect": f"{first} {last}"})
    return rows


@cache
def corpus() -> tuple[list[str], BM25]:
    """A text on each building, and their index."""
    form = "{name} in {town} was built in {year}. Its architect was {architect}."
    texts = [form.format(**building) for building in buildings()]
    return texts, BM25(texts)


def search(query: str) -> str:
    """Searches texts on buildings.

    Args:
        query: Words to find.
    """
    texts, index = corpus()
    return "\n".join(texts[n] for n in index.best(query, 2)) or "nothing found"


def questions() -> list[dict[str, Any]]:
    """A question on each fact, with a demonstration of the tool."""
    rows = []
    for number, building in enumerate(buildings()):
        for fact, phrasings in QUESTIONS.items():
            name, question = (
                building["name"],
                phrasings[number % len(phrasings)].format(name=building["name"]),
            )
            row = with_one_call(question, "search", {"query": name}, search(name), building[fact])
            # in this order: the rows' text is what a resumed run compares
            rows.append({"prompt": row["prompt"], "answer": row["answer"], "fact": fact} | row)
    return rows
