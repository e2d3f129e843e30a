r"""What references to repeated tool results save in recorded agent sessions, and whether each can be undone.

    git clone --depth 1 https://github.com/sierra-research/tau-bench
    git clone --depth 1 https://github.com/lgetter/swe-agent-trajectory-analysis
    git clone --depth 1 https://github.com/piyushhhxyz/vorflux-swe-benchmarks
    git clone --depth 1 https://github.com/gruckion/mini-swe-agent
    git clone --depth 1 https://github.com/EfficientContext/ClawTasks
    python benchmarks/agent_sessions.py tau-bench/historical_trajectories swe-agent-trajectory-analysis/trajs \
        vorflux-swe-benchmarks/evaluation mini-swe-agent/swebench_results ClawTasks/claw-tasks

Each session is the last request of a recorded agent, as a body of chat completions; where the agent wrote its actions
into its text, an action is a call and an observation its result. ClawTasks has questions and documents, no sessions:
there the agent reads each document that a question names. `saved` is in UTF-8 bytes of all messages, net of the
references; `worst` is the session that saves least. Every body is restored, and compared with what it was: `wrong`
counts those that differ, and those where the output for a beginning of the session is not the beginning of the output
for all of it. `edits` counts the edits whose old text stood in one of the results, `lost` those for which no result
holds it any more. The same is counted for the published package contextpilot if it is installed; its references name no
end, so that nothing can be restored. The recordings are not part of this project. Only what was given is read; the
results are printed, and written with `--write`.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import percentile, print_table
from result_files import write_rows
from warmprefix_requests import restored, rewrite

try:
    from contextpilot.dedup import dedup_chat_completions  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    dedup_chat_completions = None

HEADER = [
    "recordings", "references", "sessions", "results", "replaced", "saved %", "worst %", "wrong", "edits", "lost",
    "µs per 4 kB",
]  # fmt: skip
Messages = list[dict[str, Any]]
Rewriter = Callable[[Messages], tuple[Messages, int]]
"""Returns messages with references, and the number of these."""


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
        elif isinstance(session.get("turns"), list):
            yield list(asked(session["turns"], path.parents[2] / "data" / "workspace"))


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


def asked(questions: Sequence[str], documents: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages of an agent that reads the documents which each question names."""
    for turn, question in enumerate(questions):
        yield {"role": "user", "content": question}
        for number, name in enumerate(re.findall(r"[\w/.]+\.(?:txt|py)\b", question)):
            id = f"call_{turn}_{number}"
            yield call(id, "read", json.dumps({"path": name}), None)
            yield {"role": "tool", "tool_call_id": id, "content": (documents / Path(name).name).read_text("utf-8")}
        yield {"role": "assistant", "content": "Done."}


def call(id: str, name: str, arguments: str, content: Any) -> dict[str, Any]:
    made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [made]}


def size(messages: Sequence[Mapping[str, Any]]) -> int:
    return len(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def warmprefix(messages: Messages) -> tuple[Messages, int]:
    result = rewrite("chat", {"messages": messages})
    return result.body["messages"], result.references


def passages(messages: Messages) -> tuple[Messages, int]:
    result = rewrite("chat", {"messages": messages}, passages=True)
    return result.body["messages"], result.references


def contextpilot(messages: Messages) -> tuple[Messages, int]:
    if dedup_chat_completions is None:
        raise RuntimeError("contextpilot is not installed")
    body = {"messages": copy.deepcopy(messages)}
    return body["messages"], dedup_chat_completions(body).blocks_deduped


@dataclass
class Row:
    """What one way to write references does to the sessions of one folder."""

    sessions: int = 0
    results: int = 0
    replaced: int = 0
    before: int = 0
    after: int = 0
    wrong: int | None = 0
    edits: int = 0
    lost: int = 0
    shares: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, messages: Messages, rewriter: Rewriter) -> None:
        began = time.perf_counter()
        sent, replaced = rewriter(messages)
        spent = time.perf_counter() - began
        one, other = size(messages), size(sent)
        self.sessions += 1
        self.results += sum(message.get("role") == "tool" for message in messages)
        self.replaced += replaced
        self.before += one
        self.after += other
        self.shares.append(100 * (1 - other / one))
        self.times.append(spent * 1e6 * 4_096 / one)
        edits = list(quoted_edits(messages, messages))
        self.edits += len(edits)
        self.lost += len(edits) - len(list(quoted_edits(messages, sent)))
        if rewriter is contextpilot:
            self.wrong = None
        elif self.wrong is not None:
            half = messages[: len(messages) // 2]
            is_restored = restored("chat", {"messages": sent}) == {"messages": messages}
            self.wrong += not is_restored or sent[: len(half)] != rewriter(half)[0]

    def shown(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "results": self.results,
            "replaced": self.replaced,
            "saved_percent": round(100 * (1 - self.after / self.before), 2),
            "worst_percent": round(min(self.shares), 2),
            "wrong": self.wrong,
            "edits": self.edits,
            "lost": self.lost,
            "us_per_4kb": round(percentile(self.times, 50), 1),
        }


def quoted_edits(messages: Messages, sent: Messages) -> Iterator[str]:
    """Yield the old texts of edits that stand in an earlier message, as it is sent."""
    for number, message in enumerate(messages):
        for made in message.get("tool_calls") or ():
            try:
                arguments = json.loads(made["function"]["arguments"])
            except ValueError:
                continue
            old = arguments.get("old_string") if isinstance(arguments, dict) else None
            if isinstance(old, str) and any(old in str(earlier.get("content")) for earlier in sent[:number]):
                yield old


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    rewriters: dict[str, Rewriter] = {"warmprefix": warmprefix, "warmprefix, passages": passages}
    if dedup_chat_completions is not None:
        rewriters["contextpilot"] = contextpilot
    rows: list[dict[str, object]] = []
    for folder in options.folders:
        found: dict[str, Row] = defaultdict(Row)
        for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.traj")]):
            for messages in sessions_of(path):
                if any(message.get("role") == "tool" for message in messages):
                    for name, rewriter in rewriters.items():
                        found[name].add(messages, rewriter)
        recordings = folder.name if folder.parent == Path() else f"{folder.parent.name}/{folder.name}"
        rows += [{"recordings": recordings, "by": name, **row.shown()} for name, row in found.items()]
    print_table(HEADER, [list(row.values()) for row in rows])
    if options.write:
        write_rows("agent_sessions", rows, ["recordings", "by"])


if __name__ == "__main__":
    main()
