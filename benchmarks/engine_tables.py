"""The tables on real engines: their times in docs/results.md and the README, and their contract in docs/engines.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from result_files import Row

__all__ = ["contract", "live", "overview"]

ARMS = ("relevance", "frequency", "greedy", "context-index", "coaccess", "merge")
PUBLISHED = ("frequency", "greedy", "context-index")
TEXTS = {"stdlib": "standard library", "lihua": "lihua", "xquad": "xquad_squad"}
MODES = {
    "online": "online",
    "batch": "batch",
    "turns": "follow-ups in conversations",
    "control": "control, nothing in common",
}
MODELS = {"smollm2": "SmolLM2-135M", "wide": "random weights"}
"""Models by their shapes in `engine_ttft.csv`."""


def overview(rows: Sequence[Row]) -> str:
    """Return our gain in each run next to that of the best published order, as Markdown."""
    lines = ["| | median TTFT | median, ratio | mean, ratio | best published: median, mean |", "|---|---|---|---|---|"]
    for arms in runs(rows):
        by_name = {row["arm"]: row for row in arms}
        ours = by_name["merge" if "merge" in by_name else "coaccess"]
        published = [by_name[name] for name in PUBLISHED if name in by_name]
        best = max(published, key=lambda row: float(row["ratio_mean"]), default=None)
        cells = [
            title(ours),
            f"{by_name['relevance']['ttft_p50_ms']:.0f} → {ours['ttft_p50_ms']:.0f} ms",
            f"**{ours['ratio_p50']:.2f}**",
            f"**{ours['ratio_mean']:.2f}**",
            "-" if best is None else f"{best['ratio_p50']:.2f}, {best['ratio_mean']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Group the rows by run: those with real weights first."""

    def run(row: Row) -> tuple[object, ...]:
        return (
            [*MODELS].index(row["model_shape"]),
            not row["engine"].startswith("vllm"),
            [*MODES].index(row["mode"]),
            [*TEXTS].index(row["text"]),
            row["concurrency"],
            row["kv_tokens"] or 10**12,
            row["requests"],
            row["k"],
        )

    def arm(row: Row) -> int:
        return ARMS.index(row["arm"])

    for _, arms in groupby(sorted(rows, key=run), key=run):
        yield [over_seeds(list(measured)) for _, measured in groupby(sorted(arms, key=arm), key=arm)]


def over_seeds(rows: Sequence[Row]) -> Row:
    """Return the means of an arm's runs."""
    if len(rows) == 1:
        return rows[0]
    means = {
        name: statistics.fmean([row[name] for row in rows])
        for name, value in rows[0].items()
        if isinstance(value, float)
    }
    return {**rows[0], **means, "seeds": len(rows)}


def title(row: Row) -> str:
    cache = "" if row["kv_tokens"] is None else f", a cache of {row['kv_tokens']:,} tokens"
    at_once = "one at a time" if row["concurrency"] == 1 else f"{row['concurrency']} at a time"
    engine = "vLLM" if row["engine"].startswith("vllm") else "llama.cpp"
    what = f"{MODELS[row['model_shape']]} on {engine}, {MODES[row['mode']]}, {TEXTS[row['text']]}"
    seeds = f", {row['seeds']} seeds" if "seeds" in row else ""
    return f"{what}: {row['requests']} requests of {row['k']} blocks, {at_once}{cache}{seeds}"


LIVE_ENGINES = {
    "vllm": "vLLM",
    "vllm-sliding": "vLLM, sliding windows, block 128",
    "vllm-recurrent": "vLLM, recurrent layers, block 256",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp, 4 slots, host memory",
}
LIVE_ARMS = {
    "link": "link",
    "commit, report": "`commit`, then `report`",
    "1 prime": "1 prime",
    "named, 1 prime": "1 prime, profile named",
    "batch": "batch",
}


def live(rows: Sequence[Row]) -> str:
    """Return the prefill saved on live engines, by way of use, as Markdown."""
    found = {(row["engine"], row["arm"]): row for row in rows}
    lines = [
        f"| % of prefill saved | requests | {' | '.join(LIVE_ARMS.values())} |",
        "|---" * (len(LIVE_ARMS) + 2) + "|",
    ]
    for engine, name in LIVE_ENGINES.items():
        if (base := found.get((engine, "relevance"))) is None:
            continue
        shown = [found.get((engine, arm)) for arm in LIVE_ARMS]
        cells = ["-" if row is None else f"{row['saved_percent']:.1f}" for row in shown]
        lines.append(f"| {name} | {base['requests']} of {base['k']} blocks | {' | '.join(cells)} |")
    return "\n".join(lines)


ROUTES = ("chat", "completions", "responses", "messages")
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "warmprefix-emulator": "emulator"}
ROUTE_FACTS = {
    "usage": ("cached tokens in the usage", "yes"),
    "usage of streams": ("the same in streams", "yes"),
    "salt": ("`cache_salt` separates tenants", "separates"),
    "priority": ("requests with a `priority` are answered", "taken"),
}
"""The title of a row, and the value that stands for yes."""
ENGINE_FACTS = {
    "token ids: vllm": '`token_ids="vllm"`',
    "token ids: sglang": '`token_ids="sglang"`',
    "tokenizer": "`/tokenize` counts chats",
    "prime": "the prompt of a prime",
    "capacity": "size of the cache in `/metrics`",
    "feed": "KV events",
    "feed: tenants": "tenants in KV events",
    "feed: emptied cache": "an emptied cache in KV events",
}


def contract(rows: Sequence[Row]) -> str:
    """Return what each engine and version keeps of the contract, as Markdown."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        found.setdefault((row["engine"], row["version"]), {})[row["fact"]] = row["value"]
    engines = sorted(found, key=lambda kind: ([*ENGINE_NAMES].index(kind[0]), kind[1]))
    titles = [f"{ENGINE_NAMES[name]} {version}".removesuffix(" any") for name, version in engines]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(engines) + 1) + "|"]
    for fact, (title, yes) in ROUTE_FACTS.items():
        cells = [in_routes([route for route in ROUTES if found[kind][f"{fact}: {route}"] == yes]) for kind in engines]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for fact, title in ENGINE_FACTS.items():
        lines.append(f"| {title} | {' | '.join(found[kind][fact] for kind in engines)} |")
    return "\n".join(lines)


def in_routes(routes: Sequence[str]) -> str:
    return "all routes" if len(routes) == len(ROUTES) else ", ".join(routes) or "no route"
