r"""What references to repeated tool results save in recorded agent sessions, and whether each can be undone.

    git clone --depth 1 https://github.com/sierra-research/tau-bench
    git clone --depth 1 https://github.com/lgetter/swe-agent-trajectory-analysis
    git clone --depth 1 https://github.com/piyushhhxyz/vorflux-swe-benchmarks
    git clone --depth 1 https://github.com/gruckion/mini-swe-agent
    python benchmarks/agent_sessions.py tau-bench/historical_trajectories swe-agent-trajectory-analysis/trajs \
        vorflux-swe-benchmarks/evaluation mini-swe-agent/swebench_results

Each session is the last request of a recorded agent, as a body of chat completions; where the agent wrote its actions
into its text, an action is a call and an observation its result. `saved` is in UTF-8 bytes of all messages, net of the
references; `worst` is the session that saves least. Every body is restored, and compared with what it was; the output
for a beginning of each session must be the beginning of the output for all of it. The recordings are not part of this
project. Only what was given is read; the results are printed, and written with `--write`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import percentile, print_table, write_rows
from warmprefix.dedup import restored, rewrite

HEADER = ["recordings", "sessions", "results", "references", "saved %", "worst %", "wrong", "µs per 4 kB"]
Messages = list[dict[str, Any]]


def sessions_of(path: Path) -> Iterator[Messages]:
    """Yield the sessions of one file."""
    try:
        recorded: Any = json.loads(path.read_text("utf-8"))
    except ValueError:  # a pointer to a large file
        return
    for session in recorded if isinstance(recorded, list) else [recorded]:
        if not isinstance(session, dict):
            continue
        if isinstance(session.get("traj"), list):
            yield [dict(message) for message in session["traj"]]
        elif isinstance(session.get("history"), list):
            yield list(acted(session["history"], "action"))
        elif isinstance(session.get("messages"), list):
            yield list(acted(session["messages"], "content"))
        elif isinstance(session.get("trajectory"), list):
            yield list(called(session["trajectory"]))


def acted(messages: Sequence[Mapping[str, Any]], action: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of an agent that writes its actions; what the user's side answers is a result."""
    waiting: str | None = None
    for number, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "assistant" and message.get(action):
            waiting = f"call_{number}"
            yield call(waiting, "bash", str(message[action]), content)
        elif waiting is not None and isinstance(content, str) and message.get("role") in ("user", "tool"):
            yield {"role": "tool", "tool_call_id": waiting, "content": content}
            waiting = None
        elif isinstance(content, str):
            yield {"role": str(message.get("role")), "content": content}


def called(entries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a list of tool calls with their results."""
    for number, entry in enumerate(entries):
        if entry.get("type") == "tool_call":
            arguments = json.dumps(entry.get("arguments"))
            yield call(f"call_{number}", str(entry.get("tool")), arguments, None)
            result = entry.get("result")
            text = result if isinstance(result, str) else json.dumps(result)
            yield {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def call(id: str, name: str, arguments: str, content: Any) -> dict[str, Any]:
    made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [made]}


def size(messages: Sequence[Mapping[str, Any]]) -> int:
    return len(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for folder in options.folders:
        before = after = results = references = wrong = sessions = 0
        shares: list[float] = []
        times: list[float] = []
        for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.traj")]):
            for messages in sessions_of(path):
                made = sum(message.get("role") == "tool" for message in messages)
                if not made:
                    continue
                body = {"messages": messages}
                began = time.perf_counter()
                rewritten = rewrite("chat", body)
                spent = time.perf_counter() - began
                sent: Messages = rewritten.body["messages"]
                one, other = size(messages), size(sent)
                times.append(spent * 1e6 * 4_096 / one)
                half = len(messages) // 2
                part = rewrite("chat", {"messages": messages[:half]}).body["messages"]
                wrong += restored("chat", rewritten.body) != body or sent[:half] != part
                sessions, results, references = sessions + 1, results + made, references + rewritten.references
                before, after = before + one, after + other
                shares.append(100 * (1 - other / one))
        if sessions:
            rows.append(
                {
                    "recordings": folder.name if folder.parent == Path() else f"{folder.parent.name}/{folder.name}",
                    "sessions": sessions,
                    "results": results,
                    "references": references,
                    "saved_percent": round(100 * (1 - after / before), 2),
                    "worst_percent": round(min(shares), 2),
                    "wrong": wrong,
                    "us_per_4kb": round(percentile(times, 50), 1),
                }
            )
    print_table(HEADER, [list(row.values()) for row in rows])
    if options.write:
        write_rows("agent_sessions", rows, ["recordings"])


if __name__ == "__main__":
    main()
