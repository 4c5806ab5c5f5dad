# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations, and the prompts that deepseek-recipe makes of them: writes corpus.json beside this file.

Needs deepseek-recipe 0.2.0 (python -m pip install deepseek-recipe==0.2.0). The conversations are made from a fixed
seed, so the file only changes with the recipe or with this program.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

COUNT = 220
HERE = Path(__file__).resolve().parent
WORDS = ("snow", "Zürich", "été", "日本", "a\nb", "  spaced  ", "\"quoted\"", "<b>tag</b>", "50 %", "emoji 🙂", "tab\there",
         "back\\slash", "{{ braces }}", "{% raw %}", "$HOME", "</tool>", "'single'", "x=1;", "Ω≈ç", "ﬁne")
VALUES = ("Paris", "", "line\nbreak", 'say "hi"', 3, -7, 0, 1.5, 0.1, True, False, None, [], {}, [1, "two", None, [3]],
          {"deep": {"er": ["é", 2.25, {"x": False}]}}, "日本語", "<&>", "{\"json\": 1}")
TOOLS = (
    {"name": "get_weather", "description": "Weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "City — name"},
                                         "unit": {"type": "string", "enum": ["c", "f"]}}, "required": ["city"]}},
    {"name": "noargs"},
    {"name": "search", "description": "Find \"things\"\nquickly", "parameters": {
        "type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer", "default": 5},
                                         "deep": {"type": "object", "properties": {}, "additionalProperties": True}}}},
    {"name": "calc", "description": "", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}},
)


def sentence(dice, least=1, most=4):
    return " ".join(dice.choice(WORDS) for unused in range(dice.randint(least, most)))


def content(dice):
    """A text, or a list of text parts."""
    if dice.random() < 0.15:
        return [{"type": "text", "text": sentence(dice)} for unused in range(dice.randint(1, 3))]
    return sentence(dice) if dice.random() < 0.93 else ""


def calls_and_results(dice, tools, number):
    """An assistant turn with one to four calls in parallel, and their results in any order."""
    calls = []
    for index in range(dice.randint(1, 4)):
        arguments = {dice.choice(("city", "q", "n", "x", "é y", "deep")): dice.choice(VALUES)
                     for unused in range(dice.randint(0, 3))}
        calls.append({"id": "call_%d_%d" % (number, index), "type": "function", "function": {
            "name": dice.choice(tools)["name"], "arguments": json.dumps(arguments, ensure_ascii=dice.random() < 0.5)}})
    message = {"role": "assistant", "content": dice.choice(("", None, sentence(dice))), "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content(dice)} for call in calls]
    dice.shuffle(results)
    return [message] + results


def conversation(dice, number):
    """A request body without a model."""
    tools = dice.sample(TOOLS, dice.randint(1, 2)) if dice.random() < 0.6 else []
    messages = []
    for unused in range(dice.choice((0, 0, 1, 1, 1, 2))):
        messages.append({"role": "system", "content": content(dice)})
    for turn in range(dice.randint(1, 4)):
        for unused in range(dice.choice((1, 1, 1, 2))):
            messages.append({"role": "user", "content": content(dice)})
        if dice.random() < 0.08:
            messages.append({"role": "system", "content": sentence(dice)})
        if tools or dice.random() < 0.2:
            for step in range(dice.choice((0, 1, 1, 2))):
                block = calls_and_results(dice, tools or TOOLS, 100 * turn + step)
                if dice.random() < 0.7:
                    block[0]["reasoning_content"] = sentence(dice)
                messages += block
        answer = {"role": "assistant", "content": content(dice)}
        if dice.random() < 0.6:
            answer["reasoning_content"] = dice.choice((sentence(dice), ""))
        messages.append(answer)
    if dice.random() < 0.85:
        # Up to the question, or to the results, that the model answers next.
        while messages[-1]["role"] == "assistant":
            messages.pop()
    body = {"messages": messages, "thinking": dice.random() < 0.5}
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if dice.random() < 0.5:
        body["reasoning_effort"] = dice.choice(("low", "high", "max", "medium", "xhigh"))
    if dice.random() < 0.04:
        messages.append({"role": "latest_reminder", "content": sentence(dice)})
    return body


def main():
    """Make, render, write."""
    import deepseek_recipe as recipe

    tokens = recipe.SpecialTokens()
    options = recipe.ConversionOptions().with_special_tokens(tokens)
    encoding = recipe.DeepseekV4Encoding().with_special_tokens(tokens)
    dice = random.Random(20)
    entries, number, refused = [], 0, 0
    while len(entries) < COUNT:
        number += 1
        body = conversation(dice, number)
        request = dict(body, model="DeepSeek-V4-Pro", thinking={"type": "enabled" if body["thinking"] else "disabled"})
        try:
            converted = recipe.ChatCompletionRequest(request).convert(options)
        except recipe.ConversionError:
            refused += 1
            continue
        entries.append(dict(body, prompt=encoding.render_conversation(converted.conversation).prompt))
    text = json.dumps({"recipe": recipe.__version__, "conversations": entries}, ensure_ascii=False, indent=0)
    (HERE / "corpus.json").write_text(text + "\n", encoding="utf-8")
    print("%d conversations, %d refused by the recipe" % (len(entries), refused))


if __name__ == "__main__":
    main()
