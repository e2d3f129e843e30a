"""The replay's cache model against the emulator, token by token, on real text.

The same orders are served twice: as whole blocks in the model, and as tokens of real prompts in the emulator's
`PrefixCache`, which chains hashes as vLLM does and has no notion of blocks of text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
from openai import OpenAI

from warmprefix import ContextBlock
from warmprefix.annotate import Annotate, Templates
from warmprefix.labels import lasting_labels
from warmprefix.plan import Placement
from warmprefix.tokens import order_note
from warmprefix_tools.demo.session import DemoTurn
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer, PrefixCache, render_chat
from warmprefix_tools.emulator.tokenizer import MESSAGE_END, encode
from warmprefix_tools.replay.arrange import ContextOrder
from warmprefix_tools.replay.results import ReplayResult
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.traces.trace import Trace, TraceRequest, stand_in

POLICIES = ["relevance", "sorted", "frequency", "greedy", "coaccess"]
TEMPLATES = Templates()
INSTRUCTIONS = "You answer questions about the Python standard library. Rely on the context."
ANSWER = "It depends on the arguments; the documentation lists them."

Message = dict[str, str]


def chat(history: Sequence[Message], context: str, question: str) -> list[Message]:
    asked = {"role": "user", "content": f"{context}\n\nQuestion: {question}"}
    return [{"role": "system", "content": INSTRUCTIONS}, *history, asked]


def piece(turn: DemoTurn, i: int) -> str:
    """Return a block as it stands in a prompt without labels; more text always follows it."""
    return f"{turn.blocks[i].text}\n\n"


def labelled(turn: DemoTurn, i: int) -> str:
    """Return a block as it stands in a prompt with labels; more text always follows it."""
    return f"{TEMPLATES.block(lasting(turn)[i], turn.blocks[i].text)}\n\n"


def lasting(turn: DemoTurn) -> list[str]:
    """Return the labels of the blocks in a replay, where each block's text is its id."""
    return lasting_labels([ContextBlock(stand_in(json.dumps(block.id)), id=block.id) for block in turn.blocks])


def tokens_of(messages: Sequence[Message], *, ask: bool = True) -> list[int]:
    shown = [ChatMessage(message["role"], message["content"]) for message in messages]
    return render_chat(shown, add_generation_prompt=ask)


def length(text: str) -> int:
    return len(encode(text))


def note_length(text: str) -> int:
    """Return the tokens that a note adds to a prompt; the space of a label belongs to the word behind it."""
    return length(text.rstrip()) if text.startswith("[") else length(f"{text}\n\n")


PREAMBLE = tokens_of([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": ""}], ask=False)[:-2]
"""Tokens before the first block: the system prompt, and the head of the user's message."""

BEHIND_QUESTION = len(tokens_of([])) + 2
"""From the end of a question to its answer: `<|im_end|>`, a newline, the head of the assistant's message."""

BEHIND_ANSWER = len(tokens_of([{"role": "user", "content": ""}], ask=False)[:-2]) + 2


def recorded(turns: Sequence[DemoTurn]) -> Trace:
    """Return the retrievals as a trace whose lengths are the emulator's own."""
    return Trace(
        "standard-library",
        tuple(
            TraceRequest(
                request=number,
                blocks=tuple(str(block.id) for block in turn.blocks),
                conversation=turn.question.conversation,
                turn=turn.question.turn,
                query_tokens=length(f"Question: {turn.question.text}") + BEHIND_QUESTION,
            )
            for number, turn in enumerate(turns)
        ),
        {str(block.id): length(piece(turn, i)) for turn in turns for i, block in enumerate(turn.blocks)},
    )


@dataclass
class Replayed:
    result: ReplayResult
    arranged: list[ContextOrder]

    @property
    def saved(self) -> list[int]:
        """Saved tokens of each request."""
        assert len(self.result.over_time) == self.result.requests
        return [point.saved_tokens for point in self.result.over_time]


def replay(turns: Sequence[DemoTurn], policy: str, capacity: int | None, placement: Placement = "head") -> Replayed:
    answer_tokens = length(ANSWER) if placement == "tail" else 0
    arranged: list[ContextOrder] = []

    def note(request: ReplayRequest, served: ContextOrder) -> None:
        arranged.append(served)

    annotate: Annotate = "both" if placement == "tail" else "auto"  # so that each block in full has a label
    simulated = Replay(Workload(recorded(turns)), placement, answer_tokens, annotate=annotate, tokenizer=note_length)
    run = simulated.run(policy, capacity, observe=note)
    return Replayed(run, arranged)


def serve(cache: PrefixCache, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
    """Prefill one prompt, and decode its answer; return the cached tokens of the prompt."""
    sequence = cache.allocate(prompt, room_for=len(answer))
    assert sequence is not None
    cache.store(sequence)
    for token in answer:
        cache.append(sequence, token)
    cache.free(sequence)
    return sequence.cached_tokens


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def real_chat(turn: DemoTurn, arranged: ContextOrder) -> list[Message]:
    """Return the messages of an application, note and question included."""
    context = "".join(piece(turn, i) for i in arranged.order)
    note = order_note(
        TEMPLATES, "note", arranged.order, [], [stand_in(json.dumps(turn.blocks[i].id)) for i in arranged.order]
    )
    if note is not None:
        assert arranged.note_tokens == note_length(note)
        context += note
    return chat([], context.removesuffix("\n\n"), turn.question.text)


def real_prompts(turns: Sequence[DemoTurn], replayed: Replayed) -> list[list[int]]:
    return [tokens_of(real_chat(turn, arranged)) for turn, arranged in zip(turns, replayed.arranged, strict=True)]


def test_text_shares_some_blocks_but_not_all(turns: list[DemoTurn]) -> None:
    """The tests below would prove nothing on requests that share nothing, or everything."""
    before, after = (replay(turns, policy, None).result for policy in ("relevance", "coaccess"))
    assert before.requests == 100
    assert after.total_tokens > 50_000
    assert 0 < before.saved_tokens < after.saved_tokens < 0.8 * after.total_tokens
    assert 0 < after.misses.new < after.prefilled_tokens


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_is_the_preamble_its_blocks_and_the_rest(turns: list[DemoTurn], policy: str) -> None:
    """Blocks have the same tokens in every place, so that their lengths add up."""
    replayed = replay(turns, policy, None)
    for turn, arranged, prompt in zip(turns, replayed.arranged, real_prompts(turns, replayed), strict=True):
        whole = [*PREAMBLE]
        for i in arranged.order:
            whole += encode(piece(turn, i))
        assert prompt[: len(whole)] == whole


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_unbounded_hits_equal_the_emulators(turns: list[DemoTurn], policy: str) -> None:
    """Cached are the preamble, the model's hit, and what the next tokens happen to have in common; no more."""
    replayed = replay(turns, policy, None)
    prompts = real_prompts(turns, replayed)
    single_tokens, kv_blocks = (PrefixCache(1 + sum(map(len, prompts)), block_size=size) for size in (1, 16))
    for number, (turn, arranged, prompt) in enumerate(zip(turns, replayed.arranged, prompts, strict=True)):
        certain = len(PREAMBLE) + replayed.saved[number]
        by_chance = in_common_behind(certain, prompt, prompts[:number])
        # The first request finds nothing, not even the preamble; the last token of a prompt is never a hit.
        expected = min(certain + by_chance, len(prompt) - 1) if number else 0
        assert serve(single_tokens, prompt) == expected
        assert serve(kv_blocks, prompt) == expected // 16 * 16
        missed = first_missed(turn, arranged, replayed.saved[number])
        if missed is not None:
            assert by_chance < length(piece(turn, missed))


def in_common_behind(certain: int, prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> int:
    """The most tokens behind `certain` that an earlier prompt has too, if it has all tokens up to there."""
    return max((shared(prompt, other) - certain for other in earlier if shared(prompt, other) >= certain), default=0)


def first_missed(turn: DemoTurn, arranged: ContextOrder, saved: int) -> int | None:
    """The block behind a hit, which must end where a block ends."""
    for i in arranged.order:
        if not saved:
            return i
        saved -= length(piece(turn, i))
        assert saved >= 0
    return None


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_bounded_hits_equal_the_emulators_within_a_block(turns: list[DemoTurn], policy: str, share: float) -> None:
    """Both keep what was used last, each path from its head: the model whole blocks, the emulator single tokens.

    So what the model holds the emulator holds too; and of the first block that the model lost, a part at most. Prompts
    here are the preamble, the blocks and one token to close, for all of which the emulator has room besides. The
    closing tokens that have not come yet leave it a little more for context: hence the roomier model as other bound.
    """
    capacity = int(share * replay(turns, policy, None).result.prefilled_tokens)
    exact = replay(turns, policy, capacity)
    roomier = served_again(turns, exact, capacity + len(turns))
    cache = PrefixCache(capacity + len(PREAMBLE) + len(turns) + 1, block_size=1)
    cached_context = 0
    for number, (turn, arranged) in enumerate(zip(turns, exact.arranged, strict=True)):
        blocks = [encode(piece(turn, i)) for i in arranged.order]
        cached = max(serve(cache, [*PREAMBLE, *chain(*blocks), MESSAGE_END]) - len(PREAMBLE), 0)
        missed = first_missed(turn, arranged, roomier.saved[number])
        part_of_it = 0 if missed is None else length(piece(turn, missed)) - 1
        assert exact.saved[number] <= cached <= roomier.saved[number] + part_of_it
        cached_context += cached
    assert exact.result.misses.evicted > 0
    assert 0 <= cached_context - exact.result.saved_tokens <= 0.01 * exact.result.total_tokens


def served_again(turns: Sequence[DemoTurn], replayed: Replayed, capacity: int) -> Replayed:
    """The same orders, whatever a planner would make of another capacity."""
    again = Repeated(replayed.arranged)
    return Replayed(Replay(Workload(recorded(turns))).run_arranger(again, capacity, name="again"), replayed.arranged)


class Repeated:
    def __init__(self, arranged: Sequence[ContextOrder]) -> None:
        self._arranged = iter(arranged)

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        return next(self._arranged)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ["relevance", "greedy", "coaccess"])
def test_tail_hits_equal_the_emulators(turns: list[DemoTurn], policy: str) -> None:
    """If conversations keep their context, hits differ only by the tokens that separate messages."""
    replayed = replay(turns, policy, None, "tail")
    writes = policy != "relevance"
    cache = PrefixCache(2 * (replayed.result.total_tokens + replayed.result.note_tokens), block_size=1)
    histories: dict[int, list[Message]] = {}
    not_modelled: Counter[int] = Counter()  # tokens of the history, per conversation
    written: Counter[int] = Counter()  # tokens of labels and notes in the history, per conversation
    sequences: list[list[int]] = []
    saved_note_tokens = 0
    for number, (turn, arranged) in enumerate(zip(turns, replayed.arranged, strict=True)):
        conversation = turn.question.conversation
        in_full = [i for i in arranged.order if i not in arranged.references]
        context = "".join(labelled(turn, i) if writes else piece(turn, i) for i in in_full)
        labels = lasting(turn)
        if arranged.references:
            context += TEMPLATES.location_annotation([labels[i] for i in arranged.order if i in arranged.references])
        note = (
            order_note(
                TEMPLATES,
                "both",
                arranged.order,
                [labels[i] for i in arranged.order],
                [turn.blocks[i].text for i in arranged.order],
            )
            if writes
            else None
        )
        if note is not None:
            context += note + "\n\n" * bool(arranged.references)
        messages = chat(histories.get(conversation, []), context.removesuffix("\n\n"), turn.question.text)
        prompt = tokens_of(messages)

        found_notes = (
            written[conversation] if conversation in histories else found_labels(turn, arranged, replayed.saved[number])
        )
        saved_note_tokens += found_notes
        certain = len(PREAMBLE) + replayed.saved[number] + found_notes + not_modelled[conversation]
        by_chance = in_common_behind(certain, prompt, sequences)
        assert serve(cache, prompt, encode(ANSWER)) == (min(certain + by_chance, len(prompt) - 1) if number else 0)
        if conversation in histories:
            assert by_chance == 0
            not_modelled[conversation] += BEHIND_ANSWER
        sequences.append([*prompt, *encode(ANSWER)])
        histories[conversation] = [*messages[1:], {"role": "assistant", "content": ANSWER}]
        written[conversation] += arranged.written_tokens
    assert replayed.result.saved_note_tokens == saved_note_tokens
    assert (saved_note_tokens > 0) == writes
    assert (replayed.result.referring_requests > 0) == (policy != "relevance")


def found_labels(turn: DemoTurn, arranged: ContextOrder, saved: int) -> int:
    """Return the tokens of the labels in front of the first blocks of a prompt, of which `saved` tokens are found."""
    found = 0
    for i, label in zip(arranged.order, arranged.label_tokens, strict=False):
        saved -= length(piece(turn, i))
        found += label if saved >= 0 else 0
    return found


def test_engine_over_http_reports_the_same_hits(turns: list[DemoTurn]) -> None:
    replayed = replay(turns, "coaccess", None)
    prompts = real_prompts(turns, replayed)
    config = EmulatorConfig(
        kv_blocks=sum(map(len, prompts)) // 16 + len(prompts),
        prefill_rate=math.inf,
        base_ttft_ms=0,
        decode_rate=math.inf,
    )
    with EmulatorServer(config) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        for number, (turn, arranged, prompt) in enumerate(zip(turns, replayed.arranged, prompts, strict=True)):
            messages = real_chat(turn, arranged)
            usage = client.chat.completions.create(model=config.model, messages=messages, max_tokens=1).usage  # type: ignore[arg-type]
            assert usage is not None
            assert usage.prompt_tokens == len(prompt)
            assert usage.prompt_tokens_details is not None
            certain = len(PREAMBLE) + replayed.saved[number]
            expected = min(certain + in_common_behind(certain, prompt, prompts[:number]), len(prompt) - 1)
            assert (usage.prompt_tokens_details.cached_tokens or 0) == (expected // 16 * 16 if number else 0)


def test_kv_blocks_and_whole_prompts_change_ratios_little(turns: list[DemoTurn]) -> None:
    """The room of questions and annotations, and hits cut to whole KV blocks, are not modelled and matter little.

    These prompts are short, so that the difference is larger than elsewhere.
    """
    ratios: dict[str, tuple[float, float]] = {}
    for policy in ("relevance", "greedy", "coaccess"):
        capacity = int(0.3 * replay(turns, policy, None).result.prefilled_tokens)
        replayed = replay(turns, policy, capacity)
        cache = PrefixCache(capacity // 16, block_size=16)
        cached = sum(max(serve(cache, prompt) - len(PREAMBLE), 0) for prompt in real_prompts(turns, replayed))
        ratios[policy] = replayed.result.hit_ratio, cached / replayed.result.total_tokens
        assert replayed.result.misses.evicted > 0
    for modelled, real in ratios.values():
        assert -0.01 < modelled - real < 0.04
    for policy in ("greedy", "coaccess"):
        assert ratios[policy][1] > 1.5 * ratios["relevance"][1]
