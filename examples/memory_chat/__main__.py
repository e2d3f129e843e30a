"""The command: `python -m examples.memory_chat`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from openai import OpenAI, OpenAIError

from warmprefix_tools.emulator import EmulatorServer

from . import history
from .conversation import Conversation
from .memories import open_memories


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the end of the input, and return the exit status."""
    parser = argparse.ArgumentParser(prog="memory_chat", description="Chat with a model that remembers you.")
    parser.add_argument("--user", default="ann", help="whose memories to use")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep this chat here, and continue it")
    parser.add_argument("--memories", type=Path, metavar="FOLDER", help="keep the memories of all chats here")
    parser.add_argument("--remember", action="append", default=[], metavar="TEXT", help="add a memory; repeatable")
    parser.add_argument("--stats", action="store_true", help="show the prompt's tokens and the cached ones")
    options = parser.parse_args(arguments)
    logging.getLogger("mem0").setLevel(logging.ERROR)  # it warns of optional packages that are not installed
    if options.memories is not None:
        options.memories.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        base_url = os.environ.get("OPENAI_BASE_URL") or stack.enter_context(EmulatorServer()).base_url
        model = os.environ.get("MODEL", "warmprefix-emulator")
        key = os.environ.get("OPENAI_API_KEY", "none")
        client = stack.enter_context(OpenAI(base_url=base_url, api_key=key))
        memory = stack.enter_context(open_memories(options.memories))
        chat = Conversation(client, model, memory, options.user, history.load(options.history))
        for text in options.remember:
            chat.remember(text)
        for text in _lines():
            try:
                _print_answer(chat, text, with_stats=options.stats)
            except OpenAIError as error:
                print(f"\nThe engine did not answer: {error}", file=sys.stderr)
            history.save(options.history, chat.messages)
    return 0


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until Ctrl-D or Ctrl-C."""
    prompt = "you: " if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(prompt).strip():
                yield line


def _print_answer(chat: Conversation, text: str, *, with_stats: bool) -> None:
    print("assistant: ", end="")
    for piece in chat.ask(text):
        if isinstance(piece, str):
            print(piece, end="", flush=True)
        elif with_stats:
            print(f"\n  {piece.cached_tokens} of {piece.prompt_tokens} prompt tokens were cached", end="")
    print()


if __name__ == "__main__":
    sys.exit(main())
