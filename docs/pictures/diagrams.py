"""Draw the diagrams of docs/concepts.md, conversations.md and choice.md: `python docs/pictures/diagrams.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from drawing import Drawing, number

FOLDER = Path(__file__).parent

_WIDTH = 640
_LEFT, _RIGHT = 24, 616
_BAR = 36
_SIZE = 17


def diagrams() -> dict[str, str]:
    """Return each SVG by the name of its file; the same bytes each time."""
    drawn = {
        "kv-blocks.svg": kv_blocks(),
        "placement.svg": placement(),
        "scopes.svg": scopes(),
        "residency.svg": residency(),
        "profiles.svg": profiles(),
        "references.svg": references(),
        "plan-life.svg": plan_life(),
        "conversations.svg": conversations(),
        "choice.svg": choice(),
    }
    return {name: str(drawing) for name, drawing in drawn.items()}


def kv_blocks() -> Drawing:
    """Draw two prompts in KV blocks, of which the second shares the first five."""
    drawing = Drawing(
        _WIDTH,
        258,
        "A prefix cache reuses KV blocks up to the first difference",
        "Two prompts of twelve KV blocks each. They have the same instructions and the same passage A. The second one "
        "reuses these five blocks. Passage C stands in both prompts, but behind another text, so it is computed again.",
    )
    parts = {"instructions": 2, "passage A": 3, "passage B": 3, "passage C": 3, "question": 1}
    other = {"instructions": 2, "passage A": 3, "passage D": 3, "passage C": 3, "question": 1}
    _caption(drawing, 36, "An earlier prompt")
    _blocks(drawing, 48, parts.values(), cached=0)
    _names(drawing, 104, parts)
    _caption(drawing, 148, "The next prompt: five blocks are cached")
    _blocks(drawing, 160, other.values(), cached=5)
    _names(drawing, 216, other)
    _legend(drawing, 236)
    return drawing


def placement() -> Drawing:
    """Draw the second turn of a conversation, with the context in front and behind the history."""
    drawing = Drawing(
        _WIDTH,
        338,
        "Head and tail placement in the second turn of a conversation",
        "Head: instructions, a new context, the history, the question. What is cached is the beginning of the context "
        "that another request shares. Tail: instructions, the first context, the first question and answer, then a new "
        "context with a reference, and the question. All of the first turn is cached.",
    )
    _caption(drawing, 36, "Head: the context is rebuilt in front of the history")
    head = [("instr.", 70, True), ("context: A, B", 170, True), ("D", 70, False), ("history", 130, False)]
    _bar(drawing, 48, [*head, ("question 2", 152, False)])
    drawing.text(_LEFT, 106, "cached: what another prompt begins with, in any conversation", _SIZE, "dim")
    _caption(drawing, 158, "Tail: the context is appended and stays")
    tail = [("instr.", 70, True), ("A, B, C", 116, True), ("question 1", 100, True), ("answer 1", 92, True)]
    _bar(drawing, 170, [*tail, ("D, see [A]", 106, False), ("question 2", 108, False)])
    drawing.text(_LEFT, 228, "cached: all of the first turn; A is not sent again", _SIZE, "dim")
    drawing.text(_LEFT, 272, "Where the context stands decides what is correct:", _SIZE)
    drawing.text(_LEFT, 296, "only a tail may have references, because only there", _SIZE)
    drawing.text(_LEFT, 320, "the earlier text is still in the prompt.", _SIZE)
    return drawing


def scopes() -> Drawing:
    """Draw three scopes of one planner."""
    drawing = Drawing(
        _WIDTH,
        236,
        "Scopes of one planner",
        "One planner holds a scope for each tenant, model and preamble. Each scope has its own prefix tree, window and "
        "labels. Nothing crosses from one scope to another.",
    )
    _caption(drawing, 36, "One planner, three scopes")
    rows = (("acme", "Qwen3-8B", "support"), ("acme", "Qwen3-8B", "sales"), ("umbrella", "Qwen3-8B", "support"))
    for column, (tenant, model, preamble) in enumerate(rows):
        left = _LEFT + column * 202
        drawing.box(left, 52, 188, 160, "new", 8)
        for row, (name, value) in enumerate((("tenant", tenant), ("model", model), ("preamble", preamble))):
            drawing.text(left + 12, 80 + row * 24, name, _SIZE, "dim")
            drawing.text(left + 176, 80 + row * 24, value, _SIZE, "bold", "end")
        drawing.box(left + 12, 142, 164, 58, "cached", 6)
        drawing.text(left + 94, 166, "prefix tree,", _SIZE, "on-cached", "middle")
        drawing.text(left + 94, 188, "window, labels", _SIZE, "on-cached", "middle")
    return drawing


def residency() -> Drawing:
    """Draw the sources of what the engine holds, the most trusted first."""
    drawing = Drawing(
        _WIDTH,
        282,
        "Sources of what the engine holds, most trusted first",
        "KV events report every block that the engine stores or drops. The cached tokens of an answer report how much "
        "of one prompt was reused. The time to the first token shows whether it was reused at all. The prediction is "
        "what remains. Each source corrects the ones below it.",
    )
    rows = (
        ("1  KV events", "every block stored or dropped"),
        ("2  cached tokens", "how much of one prompt was reused"),
        ("3  time to first token", "whether it was reused at all"),
        ("4  prediction", "the prompts served so far"),
    )
    for row, (name, meaning) in enumerate(rows):
        top, inset = 20 + row * 64, row * 26
        drawing.box(_LEFT + inset, top, _RIGHT - _LEFT - inset, 50, "cached" if row == 0 else "new", 6)
        look = "on-cached" if row == 0 else ""
        drawing.text(_LEFT + inset + 14, top + 31, name, _SIZE, f"{look} bold".strip())
        drawing.text(_RIGHT - 12, top + 31, meaning, 16, look or "dim", "end")
        if row:
            _arrow_down(drawing, _LEFT + inset + 20, top - 13, 13)
    return drawing


def profiles() -> Drawing:
    """Draw where hits may end in one prompt, by the kind of cache."""
    drawing = Drawing(
        _WIDTH,
        386,
        "Where a hit may end, by kind of cache",
        "Full attention: at every KV block. Checkpoints: at the end of an earlier prompt and at junctions. Marks: only "
        "at marks that the request sets. Units: at each 128 tokens from a minimum on. Slots: anywhere, but only in the "
        "last prompt of a slot.",
    )
    rows: tuple[tuple[str, Sequence[float]], ...] = (
        ("full attention: at every KV block", [i / 24 for i in range(1, 24)]),
        ("checkpoints: ends of prompts, and junctions", [0.42, 0.88]),
        ("marks: where the request set one", [0.25, 0.58]),
        ("units: each 128 tokens, from a minimum on", [0.5, 0.625, 0.75, 0.875]),
        ("slots: anywhere in the slot's last prompt", [i / 48 for i in range(1, 30)]),
    )
    for row, (name, ends) in enumerate(rows):
        top = 20 + row * 68
        drawing.text(_LEFT, top + 16, name, _SIZE)
        drawing.box(_LEFT, top + 26, _RIGHT - _LEFT, 22, "new", 4)
        for end in ends:
            drawing.box(_LEFT + end * (_RIGHT - _LEFT) - 2, top + 24, 4, 26, "cached", 1)
    drawing.box(_LEFT, 354, 4, 12, "cached", 1)
    drawing.text(_LEFT + 12, 365, "a hit may end here", 16, "dim")
    return drawing


def references() -> Drawing:
    """Draw a conversation in which the second turn refers to a block of the first."""
    drawing = Drawing(
        _WIDTH,
        316,
        "A reference quotes the first words of a block in the same prompt",
        "Turn 1 shows a block on Ada Lovelace in full. Turn 2 finds the same block again. The prompt of turn 2 still "
        "holds turn 1, so one sentence quotes its first words in place of the text.",
    )
    _caption(drawing, 36, "Turn 1 stays in the history")
    drawing.box(_LEFT, 48, _RIGHT - _LEFT, 96, "cached", 8)
    drawing.text(_LEFT + 14, 78, "Ada Lovelace wrote the first algorithm, for an engine ...", _SIZE, "on-cached")
    drawing.text(_LEFT + 14, 104, "Charles Babbage designed the engine, with a mill ...", _SIZE, "on-cached")
    drawing.text(_LEFT + 14, 130, "Who wrote the first algorithm?", _SIZE, "on-cached")
    _caption(drawing, 180, "Turn 2 finds the block on Ada Lovelace again")
    drawing.box(_LEFT, 192, _RIGHT - _LEFT, 96, "new", 8)
    drawing.text(_LEFT + 14, 222, "She never saw the engine run.", _SIZE)
    drawing.text(_LEFT + 14, 248, "Also use the passages above that begin with", _SIZE, "noted")
    drawing.text(_LEFT + 14, 270, '"Ada Lovelace wrote the first".', _SIZE, "noted")
    _arrow_up(drawing, 560, 147, 44)
    return drawing


def plan_life() -> Drawing:
    """Draw the life of a plan."""
    drawing = Drawing(
        _WIDTH,
        304,
        "The life of a plan",
        "Plan: the blocks get an order, and the plan is open. Send: the model gets the prompt. Then commit, if the "
        "application has the answer: the order is learned and the blocks count as seen. Or abandon, on an error or a "
        "cancellation: nothing is remembered.",
    )
    boxes = (("retrieve", "new"), ("plan", "cached"), ("send", "new"))
    for column, (name, look) in enumerate(boxes):
        left = _LEFT + column * 148
        drawing.box(left, 100, 116, 54, look, 8)
        drawing.text(left + 58, 133, name, 19, "on-cached bold" if look == "cached" else "bold", "middle")
        _arrow_right(drawing, left + 118, 127, 28)
    drawing.text(_LEFT + 206, 182, "open: counts as in flight", 16, "dim", "middle")
    drawing.box(466, 36, 150, 74, "cached", 8)
    drawing.text(541, 68, "commit", 19, "on-cached bold", "middle")
    drawing.text(541, 94, "answered, stored", 15, "on-cached", "middle")
    drawing.box(466, 144, 150, 74, "note", 8)
    drawing.text(541, 176, "abandon", 19, "bold", "middle")
    drawing.text(541, 202, "failed, cancelled", 15, "", "middle")
    drawing.text(_LEFT, 256, "After commit: the order is learned, the blocks count as seen.", _SIZE)
    drawing.text(_LEFT, 282, "After abandon: nothing is remembered.", _SIZE)
    return drawing


def conversations() -> Drawing:
    """Draw the three ways in which the planner learns what a prompt holds already."""
    drawing = Drawing(
        _WIDTH,
        486,
        "Three ways to know what the history of a prompt holds",
        "History shown: the planner searches the messages themselves. Branch: each turn has an id and a record of what "
        "the history up to it holds; the next turn names the one that it continues, so two turns may continue one. "
        "Name: one record follows one linear history, and the application reports each change of it.",
    )
    _caption(drawing, 36, "1  The history is shown: the messages decide")
    shown = [("A, B", 100, True), ("answer", 96, True), ("C", 60, True), ("answer", 96, True)]
    _bar(drawing, 50, [*shown, ("D, see [A]", 130, False), ("question", 110, False)])
    drawing.text(_LEFT, 108, "[A] is in these very messages; whatever happened to them is harmless", 16, "dim")

    _caption(drawing, 158, "2  A branch: name the turn that this prompt continues")
    turns = (("id1", "A, B", 24, 204), ("id2", "A, B, C", 190, 174), ("id4", "A, B, E", 190, 244))
    for name, record, left, top in (*turns, ("id3", "A, B, C, D", 356, 174)):
        drawing.box(left, top, 132, 52, "cached", 8)
        drawing.text(left + 66, top + 21, name, 16, "on-cached bold", "middle")
        drawing.text(left + 66, top + 42, record, 15, "on-cached", "middle")
    _arrow_right(drawing, 324, 200, 30)
    for y in (200, 270):
        drawing.path(f"M156 230L166 230L178 {y}L176 {y + 1}L165 231L156 231z", "dim")
        _arrow_right(drawing, 174, y, 14)
    for y, words in ((196, "never changes"), (216, "once written"), (276, "a fork or a retry")):
        drawing.text(504 if y < 250 else 336, y, words, 16, "dim")
    drawing.text(_LEFT, 322, "no record under this id: every text is sent in full", 16, "dim")

    _caption(drawing, 372, "3  A name: one record for one linear history")
    for number_, left in enumerate((24, 118, 212), 1):
        drawing.box(left, 388, 80, 40, "new", 8)
        drawing.text(left + 40, 414, f"turn {number_}", 16, "", "middle")
        _arrow_right(drawing, left + 81, 408, 12 if number_ < 3 else 60)
    drawing.box(356, 382, 260, 52, "cached", 8)
    drawing.text(486, 403, "chat-42", 16, "on-cached bold", "middle")
    drawing.text(486, 424, "A, B, C, D", 15, "on-cached", "middle")
    drawing.text(_LEFT, 464, "the messages stay unseen, so you report: commit; forget before a cut", 16, "dim")
    return drawing


def choice() -> Drawing:
    """Draw a request with more candidates than places, fed by relevance alone and by a choice."""
    drawing = Drawing(
        _WIDTH,
        352,
        "A choice feeds a candidate that the engine holds in place of one that scores about the same",
        "Eight candidates, A to H, with falling scores, for five places. A, B and C are always fed. D and E may leave. "
        "F and G score nearly as high as E, H does not. Relevance alone feeds A to E, and only A is cached. The engine "
        "holds the path A, F, C. With a choice F has the place of E, and three of five passages are cached.",
    )
    scores = {"A": "9.1", "B": "8.4", "C": "7.9", "D": "6.2", "E": "6.0", "F": "5.9", "G": "5.5", "H": "3.1"}
    width = (_RIGHT - _LEFT) / len(scores)
    _caption(drawing, 36, "Eight candidates with their scores, for five places")
    _bar(drawing, 48, [(f"{name}  {score}", width, False) for name, score in scores.items()])
    for start, end, words in ((0, 3, "always fed"), (3, 5, "may leave"), (5, 7, "may enter"), (7, 8, "too low")):
        left = _LEFT + start * width
        drawing.box(left + 4, 90, (end - start) * width - 8, 2, "dim")
        drawing.text(left + (end - start) * width / 2, 110, words, 16, "dim", "middle")
    _caption(drawing, 158, "Relevance alone: one of five is cached")
    _bar(drawing, 170, [(name, width, name == "A") for name in "ABCDE"])
    _caption(drawing, 248, "With a choice: the engine holds the path A, F, C")
    _bar(drawing, 260, [(name, width, name in "AFC") for name in "AFCBD"])
    drawing.text(_LEFT + 5 * width + 12, 284, "F in place of E", _SIZE, "noted")
    _legend(drawing, 326)
    return drawing


def _caption(drawing: Drawing, y: float, words: str) -> None:
    drawing.text(_LEFT, y, words, 18, "bold")


def _blocks(drawing: Drawing, y: float, lengths: Iterable[int], cached: int) -> None:
    """Draw KV blocks as cells, and a wider gap behind each part."""
    lengths = list(lengths)
    gap = 6
    cell = (_RIGHT - _LEFT - gap * (len(lengths) - 1)) / sum(lengths)
    x, drawn = float(_LEFT), 0
    for length in lengths:
        for _ in range(length):
            look = "cached" if drawn < cached else "new"
            drawing.box(x + 1, y, cell - 2, _BAR, look, 3)
            x += cell
            drawn += 1
        x += gap


def _names(drawing: Drawing, y: float, parts: dict[str, int]) -> None:
    gap = 6
    cell = (_RIGHT - _LEFT - gap * (len(parts) - 1)) / sum(parts.values())
    x = float(_LEFT)
    for name, length in parts.items():
        is_last = name == list(parts)[-1]
        drawing.text(_RIGHT if is_last else x, y, name, 16, "dim", "end" if is_last else "start")
        x += cell * length + gap


def _bar(drawing: Drawing, y: float, parts: Sequence[tuple[str, float, bool]]) -> None:
    x = float(_LEFT)
    for name, width, is_cached in parts:
        drawing.box(x, y, width, _BAR, "cached" if is_cached else "new")
        drawing.box(x, y, width, _BAR, "frame")
        drawing.text(x + width / 2, y + 24, name, 16, "on-cached" if is_cached else "", "middle")
        x += width


def _legend(drawing: Drawing, y: float) -> None:
    for left, look, meaning in ((0, "cached", "cached"), (110, "new", "computed")):
        drawing.box(_LEFT + left, y - 4, 14, 14, look, 3)
        drawing.text(_LEFT + left + 20, y + 8, meaning, 16, "dim")


def _arrow_right(drawing: Drawing, x: float, y: float, length: float) -> None:
    drawing.box(x, y - 1, length - 6, 2, "dim")
    drawing.path(f"M{number(x + length - 8)} {number(y - 5)}L{number(x + length)} {number(y)}v0l-8 5z", "dim")


def _arrow_down(drawing: Drawing, x: float, y: float, length: float) -> None:
    drawing.box(x - 1, y, 2, length - 6, "dim")
    drawing.path(f"M{number(x - 5)} {number(y + length - 8)}l5 8l5 -8z", "dim")


def _arrow_up(drawing: Drawing, x: float, y: float, length: float) -> None:
    drawing.box(x - 1, y + 8, 2, length - 8, "noted")
    drawing.path(f"M{number(x - 6)} {number(y + 9)}l6 -9l6 9z", "noted")


if __name__ == "__main__":
    for name, svg in diagrams().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
