# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The jinja template makes the prompts that deepseek-recipe makes, byte for byte."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parents[2] / "files/chat_templates/tool_chat_template_deepseekv4.jinja"
CORPUS = json.loads((HERE / "corpus.json").read_text(encoding="utf-8"))["conversations"]


@functools.cache
def template():
    """The template, with jinja as transformers and engines set it up."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return jinja.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(body, unwrap=False):
    """As an engine calls it: arguments of past calls decoded, tools with or without their wrapper."""
    messages = copy.deepcopy(body["messages"])
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = body.get("tools")
    if tools and unwrap:
        tools = [tool["function"] for tool in tools]
    extra = {"reasoning_effort": body["reasoning_effort"]} if "reasoning_effort" in body else {}
    return template().render(
        messages=messages, tools=tools, add_generation_prompt=True, thinking=body["thinking"], **extra)


def test_the_corpus_holds_what_it_is_for():
    messages = [message for body in CORPUS for message in body["messages"]]
    assert len(CORPUS) >= 200
    assert sum(body["thinking"] for body in CORPUS) > 80 and sum(not body["thinking"] for body in CORPUS) > 80
    assert sum("tools" in body for body in CORPUS) > 80
    assert sum(message["role"] == "system" for message in messages) > 80
    assert sum(message["role"] == "tool" for message in messages) > 100
    assert sum(len(message.get("tool_calls") or []) > 1 for message in messages) > 60
    assert sum("reasoning_content" in message for message in messages) > 100
    assert sum(sum(message["role"] == "user" for message in body["messages"]) > 1 for body in CORPUS) > 80


@pytest.mark.parametrize("start", range(0, len(CORPUS), 20))
def test_prompts_are_equal(start):
    for number, body in enumerate(CORPUS[start:start + 20], start):
        assert render(body) == body["prompt"], number
        assert render(body, unwrap=True) == body["prompt"], number


def test_thinking_is_off_unless_asked_for():
    text = template().render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"


def test_arguments_that_are_no_object_go_out_as_text():
    text = template().render(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": '{"a":'}}]}], add_generation_prompt=False)
    assert '<｜DSML｜parameter name="arguments" string="true">{"a":</｜DSML｜parameter>' in text
    assert text.endswith("<｜end▁of▁sentence｜>")


def test_the_corpus_is_what_the_recipe_says():
    recipe = pytest.importorskip("deepseek_recipe", reason="deepseek-recipe is not installed here")
    tokens = recipe.SpecialTokens()
    options = recipe.ConversionOptions().with_special_tokens(tokens)
    encoding = recipe.DeepseekV4Encoding().with_special_tokens(tokens)
    for body in CORPUS:
        request = {key: value for key, value in body.items() if key != "prompt"}
        request.update(model="DeepSeek-V4-Pro", thinking={"type": "enabled" if body["thinking"] else "disabled"})
        converted = recipe.ChatCompletionRequest(request).convert(options)
        assert encoding.render_conversation(converted.conversation).prompt == body["prompt"]


def test_the_template_is_jinja_without_extensions():
    jinja2.Environment().parse(TEMPLATE.read_text(encoding="utf-8"))
