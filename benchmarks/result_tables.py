"""The tables of README.md and of pages in docs/, created from the files in `results/`.

    python benchmarks/result_tables.py

writes them where the pages have their marks, `<!-- table: NAME -->` to `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from engine_tables import contract, live, overview
from result_files import Row, read_rows

__all__ = ["PAGES", "tables", "with_tables"]

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("results", "batch", "engines", "gateway", "frameworks", "quality")),
)
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Return each table as Markdown, by the name in its marks."""
    online = read_rows("online_hit_ratio")
    return {
        "readme": readme(online, read_rows("engine_ttft")),
        "net": net(read_rows("net_gain")),
        "means": means(online),
        "retention": retention(read_rows("retention_means")),
        "choice": choice(read_rows("choice_means")),
        "engine": overview(read_rows("engine_ttft")),
        "live": live(read_rows("live_savings")),
        "contract": contract(read_rows("engine_contract")),
        "costs": costs(),
        "batches": batches(read_rows("batch_quality_traces")),
        "windows": windows(read_rows("window_quality")),
        "gateway": gateway(read_rows("gateway_replicas")),
        "steady": steady(read_rows("steady_tools")),
        "forks": forks(read_rows("steady_tools")),
        "clients": clients(read_rows("agent_clients")),
        "plugins": plugins(read_rows("plugin_hit_ratio")),
        "recorded": recorded(read_rows("recorded_conversations_counts"), read_rows("recorded_conversations_turns")),
        "models": models(read_rows("models")),
        "model-sets": model_sets(read_rows("models")),
        "model-places": model_places(read_rows("models")),
    }


def with_tables(page: str) -> str:
    """Return a page with its tables as the results have them."""
    current = tables()
    return MARKED.sub(lambda mark: f"{mark[1]}\n{current[mark[2]]}\n{mark[3]}", page)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


# -- one request at a time -------------------------------------------------------------------------------------------

ORDERS = {
    "relevance": "relevance order",
    "contextpilot": "ContextPilot",
    "frequency": "CRAFT",
    "greedy": "CacheWeaver",
    "oracle": "best permutation",
    "coaccess": "**warmprefix**",
}
"""Orders by their names in `online_hit_ratio.csv`."""
ENGINE_ARMS = {"contextpilot": "context-index"}
"""Names in `engine_ttft.csv` that differ."""


def readme(online: Sequence[Row], engine: Sequence[Row]) -> str:
    """Return hit ratios over all traces, and savings over the runs on vLLM in which all orders took part."""
    runs: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in engine:
        run = tuple(row[key] for key in ("engine", "mode", "text", "requests", "k", "seed", "concurrency", "kv_tokens"))
        runs.setdefault((row["model_shape"], *run), {})[row["arm"]] = row
    orders = {name: ENGINE_ARMS.get(name, name) for name in ORDERS if name != "oracle"}
    complete = {run: arms for run, arms in runs.items() if arms.keys() >= {*orders.values()}}
    real, random = ([arms for run, arms in complete.items() if run[0] == shape] for shape in ("smollm2", "wide"))
    hits = {name: fmean(row["hit_percent"][name]["100000"] for row in online) for name in orders}
    rows = []
    for name, arm in orders.items():
        saved = fmean(run[arm]["saved_percent"] for run in random)
        times = [fmean(run[arm]["ratio_mean"] for run in measured) for measured in (real, random)]
        cells = [f"{hits[name]:.1f} %", f"{hits[name] / hits['relevance']:.1f}", f"{saved:.1f} %"]
        cells += [f"{ratio:.2f}" for ratio in times]
        rows.append([ORDERS[name], *([f"**{cell}**" for cell in cells] if name == "coaccess" else cells)])
    header = ["order of the passages", "hit ratio", "times that of relevance order", "prefill saved, net"]
    return table([*header, "TTFT, times shorter: SmolLM2", "random weights"], rows)


def net(rows: Sequence[Row]) -> str:
    def shown(cache: str, arm: str, tokenizer: str) -> str:
        found = [row["net_percent"] for row in rows if kind(row) == (cache, arm, tokenizer)]
        return f"{fmean(found):+.1f} ({min(found):.1f})"

    def kind(row: Row) -> tuple[str, str, str]:
        return row["cache"], row["arm"], row["tokenizer"]

    lines = []
    for cache in ("30000", "100000", "500000", "unbounded"):
        hit = fmean(row["hit_percent"] for row in rows if kind(row) == (cache, "default", "cl100k"))
        published, default = (shown(cache, arm, "cl100k") for arm in ("published", "default"))
        size = f"{int(cache):,}" if cache.isdigit() else cache
        lines.append([size, f"{hit:.1f}", published, f"**{default}**", shown(cache, "default, 8 waiting", "estimate")])
    header = ["cache, tokens", "hit ratio", "net, labels and a note with all of them", "**net, as shipped**"]
    return table([*header, "net, with 8 requests in sight"], lines)


def means(rows: Sequence[Row]) -> str:
    def cells(name: str) -> list[str]:
        hits = [[row["hit_percent"][name][cache] for row in rows] for cache in ("unbounded", "500000", "100000")]
        return [ORDERS[name], *(f"{fmean(hit):.1f}" for hit in hits)]

    return table(["order", "unbounded", "500,000", "100,000"], map(cells, ORDERS))


def retention(rows: Sequence[Row]) -> str:
    cells = {(row["arm"], row["cache"]): row for row in rows}
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [cells[arm, cache] for cache in ("100000", "30000")]
        hits = " / ".join(f"{row['hit_percent']:.1f}" for row in own)
        nets = " / ".join(f"{row['net_percent']:+.1f}" for row in own)
        least = " / ".join(f"{row['least_net_over_base']:+.1f}" for row in own)
        lines.append([arm, hits, nets, least])
    return table(["at 100,000 / 30,000 tokens", "hit ratio", "net", "net over *base*, least trace"], lines)


def choice(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["arm"] in ("choice", "chance", "extra", "choice, extra"):
            size = f"{int(row['cache']):,} tokens" if row["cache"].isdigit() else row["cache"]
            change = f"{row['change_percent']:+.1f} ({row['worst_change_percent']:+.1f})"
            gold = f"{row['gold_over_relevance']:+.2f} ({row['least_gold_over_relevance']:+.2f})"
            chance = f"{row['gold_over_chance']:+.2f}" if "gold_over_chance" in row else ""
            lines.append([f"{row['arm']}, {size}", change, gold, chance])
    return table(["", "computed tokens (worst)", "gold, points (least)", "gold over chance"], lines)


def plugins(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["text"] == "standard library":
            without, plugin = row["without"], row["with"]
            saved = 1 - plugin["prefilled_tokens"] / without["prefilled_tokens"]
            what = row["what"].replace("the same, ", "ContextReuseRetriever with ")
            lines.append([what, f"{without['hit_percent']} → {plugin['hit_percent']}", f"{saved:.0%}"])
    return table(["", "hit ratio, %, without → with", "prefill saved"], lines)


# -- batches and the gateway -----------------------------------------------------------------------------------------


def batches(rows: Sequence[Row]) -> str:
    """Return the means over whole traces; some are in the file in part as well."""
    whole = [row for row in rows if ", first" not in row["trace"]]
    planners = {
        "as it comes": "relevance order, as given",
        "frequency": "CRAFT",
        "top-down": "top-down, as GGR",
        "contextpilot": "ContextPilot",
        "merge": "**warmprefix**, `merge`",
    }
    lines = []
    for name, title in planners.items():
        hits = [[row["hit_percent"][name][cache] for row in whole] for cache in ("unbounded", "30000")]
        seconds = sum(row["seconds"].get(name, 0) for row in whole)
        lines.append([title, *(f"{fmean(hit):.1f}" for hit in hits), f"{seconds:.1f} s"])
    lines.append(["upper bound", f"{fmean(row['bound_percent'] for row in whole):.1f}", "", ""])
    return table(["planner", "unbounded cache", "30,000 tokens", "planning, all traces"], lines)


def windows(rows: Sequence[Row]) -> str:
    sizes = ("2", "8", "32", "200")
    lines = []
    for cache, title in (("30000", "30,000"), ("100000", "100,000"), ("unbounded", "unbounded")):
        found = [row for row in rows if row["cache"] == cache]
        alone = [row["one_by_one_percent"] for row in found]
        gains = [fmean(row["window_percent"][size] for row in found) - fmean(alone) for size in sizes]
        lines.append([title, f"{fmean(alone):.1f}", *(f"{gain:+.1f}" for gain in gains)])
    return table(["cache, tokens", "one by one", *(f"windows of {size}" for size in sizes)], lines)


def clients(rows: Sequence[Row]) -> str:
    engines = ("direct", "gateway", "plugin", "round_robin_3", "gateway_3", "plugin_3")
    lines = []
    for row in rows:
        counts = ["-" if row[name] is None else f"{row[name]:,}" for name in engines]
        lines.append([row["client"], *counts, f"{-row['saved_percent']:.1f} %", str(row["references"])])
    header = "agent|direct|gateway|plugin|3 engines in turn|3, gateway|3, plugin|gateway, one engine|references"
    return table(header.split("|"), lines)


def gateway(rows: Sequence[Row]) -> str:
    shown: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        shown.setdefault((row["recordings"], row["engine"].split()[0]), {})[row["placement"]] = row
    lines = []
    for (recordings, engine), arms in shown.items():
        cells = [f"{arms[way]['computed_percent']:.1f}" for way in ("random", "gateway", "one replica")]
        lines.append([f"{recordings}, {engine}", str(arms["gateway"]["replicas"]), *cells])
    return table(["sessions, engine", "replicas", "random placement", "gateway", "one replica"], lines)


def steady(rows: Sequence[Row]) -> str:
    shown: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "tools":
            shown.setdefault((row["case"], row["engine"].partition(",")[0]), {})[row["mode"]] = row
    lines = []
    for (case, engine), modes in sorted(shown.items()):
        cells = [f"{modes[mode]['cached_percent']:.1f}" if mode in modes else "" for mode in _MODES]
        lines.append([case, engine, *cells, f"{modes['off']['best_percent']:.1f}"])
    return table(["the tools are", "engine", *[f"`{mode}`" for mode in _MODES], "best"], lines)


_MODES = ("off", "order", "keep", "behind")


def forks(rows: Sequence[Row]) -> str:
    lines = [
        [row["case"].replace("fork prompt", "`fork`"), row["engine"].partition(",")[0], f"{row['cached_percent']:.1f}"]
        for row in rows
        if row["part"] == "sub-agents"
    ]
    return table(["prompt, placement", "engine", "cached"], lines)


# -- what it costs ---------------------------------------------------------------------------------------------------


RECORDED = {
    "planner-branch": "the planner, a branch",
    "planner-name": "the planner, a name",
    "langchain-branch": "LangChain chain, a branch",
    "langchain-thread": "LangChain chain, a thread's name",
    "langchain-responses": "LangChain chain, history on a server",
    "langgraph": "LangGraph, its checkpoints",
    "langgraph-branch": "LangGraph, a branch",
    "llamaindex-workflow": "LlamaIndex workflow, a branch",
    "llamaindex-chat": "LlamaIndex chat engine, a name",
    "mem0-branch": "Mem0, a branch",
    "mem0-name": "Mem0, a name",
    "agents": "Chain-of-Agents, a branch per agent",
    "responses": "`EngineLink`, history on a server",
    "gateway": "two gateways, history on a server",
}
"""Applications by their names in `recorded_conversations_counts.csv`."""
RECORDED_TRACES = {
    "standard_library": "standard library",
    "generated_conversations": "generated",
    "mtrag_elser_questions": "mtrag",
    "lihua_bm25_k20": "memories",
}


def recorded(counts: Sequence[Row], turns: Sequence[Row]) -> str:
    """Return the computed tokens of each application, to those without warmprefix, and what the checker found."""
    checked = {row["application"]: row for row in turns}
    lines: list[list[str]] = []
    for name, shown in RECORDED.items():
        rows = {row["trace"]: row for row in counts if row["application"] == name}
        ratios = [
            f"{100 * rows[trace]['record_to_without']:.1f} %" if trace in rows else "-" for trace in RECORDED_TRACES
        ]
        to_shown = [row["record_to_shown_net_of_labels"] for row in rows.values() if "shown" in row]
        random, found = checked.get(name), "-"
        if random is not None:
            found = str(sum(random[kind] for kind in ("dangling", "lost", "ambiguous", "crossed")))
        lines.append(
            [
                shown,
                *ratios,
                f"{100 * max(to_shown):.1f} %" if to_shown else "-",
                *([f"{random['turns']:,}", f"{random['references']:,}"] if random else ["-", "-"]),
                found,
            ]
        )
    header = ["", *RECORDED_TRACES.values(), "to the shown history", "random turns", "references", "wrong"]
    return table(header, lines)


def costs() -> str:
    planning = {(row["what"], row["earlier_requests"]): row for row in read_rows("plan_overhead")}
    asked = [
        ("`plan()`, 15 blocks, after 100 earlier requests", "plan(), coaccess", 100),
        ("`plan()`, 15 blocks, after 100,000", "plan(), coaccess", 100_000),
        (
            "blocks of 4 kB texts, `plan()`, `render()`, `commit()`",
            "blocks + plan() + render() + commit(), plain text",
            100,
        ),
        ("`plan()` and `commit()`, after 1,000", "plan() + commit(), coaccess", 1_000),
        ("`contextpilot` 0.5.0, `reorder()`, after 1,000", "contextpilot reorder()", 1_000),
    ]
    lines = [
        [title, *microseconds(planning[what, earlier], "p50_us", "p99_us"), "`benchmarks/plan_overhead.py`"]
        for title, what, earlier in asked
    ]
    for row in read_rows("plugin_overhead"):
        if row["kilobytes"] == 4:
            framework, _, call = row["what"].partition(": ")
            times = microseconds(row, "overhead_p50_us", "overhead_p99_us")
            lines.append([f"{framework}: `{call}`", *times, "`benchmarks/plugin_overhead.py`"])
    return table(["", "median", "99 %", "script"], lines)


def microseconds(row: Row, *keys: str) -> list[str]:
    return [f"{row[key]:,.0f} µs" for key in keys]


# -- answers of models -------------------------------------------------------------------------------------------------

_RULE_QUESTIONS, _RULE_SETS = 1000, 2
_ANNOTATIONS = {"planned": "none", "labels": "labels", "both": "both"}


def models(rows: Sequence[Row]) -> str:
    """Return what each arm changed, model by model, and the annotations that follow from it."""
    cells = [
        [
            row["model"],
            f"`{row['set']}`",
            f"`{row['arm']}`",
            f"{row['questions']:,}",
            _difference(row["comparisons"]["contains"]),
            row["verdict"],
            _difference(row["comparisons"]["f1"]),
            f"{100 * row['flips']:.1f} %",
            "unknown" if row["saved"] is None else f"{100 * row['saved']:.1f} %",
        ]
        for row in rows
        if row["arm"] != row["baseline"] and not _place(row)
    ]
    header = ("model", "set", "arm", "questions", "points", "verdict", "F1 points", "flips", "prefill saved")
    unknown = ["any other model", *["unknown"] * (len(header) - 1)]
    chosen = ", ".join([f"{model}: `{value}`" for model, value in other_defaults(rows).items()])
    return f"{table(header, [*cells, unknown])}\n\nOther defaults by the rule below: {chosen or 'none'}."


def other_defaults(rows: Sequence[Row]) -> dict[str, str]:
    """Return by model the annotation that `annotate="auto"` should use in place of the note.

    The note is worse, and another annotation is not, in each of two sets or more with 1,000 questions or more.
    """
    verdicts: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["questions"] >= _RULE_QUESTIONS and row["measure"] == "contains":
            verdicts.setdefault(row["model"], {}).setdefault(row["set"], {})[row["arm"]] = row["verdict"]
    found: dict[str, str] = {}
    for model, sets in verdicts.items():
        compared = [arms for arms in sets.values() if "note" in arms]
        if len(compared) < _RULE_SETS or any(arms["note"] != "worse" for arms in compared):
            continue
        for arm, value in _ANNOTATIONS.items():
            if all(arms.get(arm) in ("not worse", "better") for arms in compared):
                found.setdefault(model, value)
    return found


def model_sets(rows: Sequence[Row]) -> str:
    """Return how difficult each set is for each model."""
    return table(
        ("model", "set", "passages", "questions", "tokens per prompt", "right", "F1", "by chance"),
        [
            [
                row["model"],
                f"`{row['set']}`",
                str(row["passages"]),
                f"{row['questions']:,}",
                f"{row['tokens_per_prompt']:.0f}",
                f"{100 * row['scores']['contains']:.1f} %",
                f"{100 * row['scores']['f1']:.1f} %",
                "unknown" if row["chance"] is None else f"{100 * row['chance']:.0f} %",
            ]
            for row in rows
            if row["arm"] == "relevance" and "positions" not in row
        ],
    )


def model_places(rows: Sequence[Row]) -> str:
    """Return the right answers by the place of the passage with the answer."""
    profiles = {(row["model"], row["set"]): row["positions"] for row in rows if "positions" in row}
    most = max([profile["passages"] for profile in profiles.values()], default=0)
    if not most:
        return "Not measured yet."
    return table(
        ("model", "set", "questions", *[f"place {place}" for place in range(1, most + 1)]),
        [
            [
                model,
                f"`{name}`",
                f"{min(profile['questions']):,}",
                *[f"{100 * share:.1f} %" for share in profile["right"]],
            ]
            for (model, name), profile in profiles.items()
        ],
    )


def _difference(compared: Row) -> str:
    difference, low, high = (100 * compared[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f} ({low:+.1f} to {high:+.1f})"


def _place(row: Row) -> bool:
    return str(row["arm"]).startswith("gold-")


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
