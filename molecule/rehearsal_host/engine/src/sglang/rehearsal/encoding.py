# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prompts and output, through the real deepseek-recipe and the checkpoint's tokenizer.

As in SGLang 0.5.23 the tool parser decides how prompts are written: V4 unless it
is `deepseekv32`. Output is parsed from token ids when one of the two V4 parsers
was given; otherwise the text goes out as the model wrote it.
"""
from __future__ import annotations

import codecs
import copy
import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import deepseek_recipe as recipe

RECIPE_MODEL = "DeepSeek-V4-Pro"
EOS = 1
EOS_TEXT = "<｜end▁of▁sentence｜>"
BOS_TEXT = "<｜begin▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
REASONING_PARSER, TOOL_PARSER = "deepseek-v4", "deepseekv4"
JSON_FORMATS = ("json_object", "json_schema")


class BadRequest(ValueError):
    """The request cannot be rendered; status 400."""


@dataclass
class Prompt:
    """What the model gets: the text with the places of its special tokens, and the ids."""

    text: str
    ids: list[int]
    special: list[tuple[int, int]]
    dialect: str = "v4"

    def turns(self) -> list[tuple[str, str]]:
        """[(role, text)]: "" for what stands before the first turn, then "user" and "assistant"."""
        turns, role, start = [], "", 0
        for begin, end in self.special:
            token = self.text[begin:end]
            if token in (USER, ASSISTANT):
                turns.append((role, self.text[start:begin]))
                role, start = ("user" if token == USER else "assistant"), end
        turns.append((role, self.text[start:]))
        return turns

    @property
    def thinking(self) -> bool:
        return self.text.endswith(THINK)


@dataclass
class Delta:
    reasoning: str = ""
    content: str = ""
    calls: list[dict] = field(default_factory=list)  # {index, name or None, arguments}

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Encoder:
    """The tokenizer of the checkpoint and the prompt format of the server."""

    def __init__(self, tokenizer_path: str, reasoning_parser: str | None, tool_call_parser: str | None):
        path = Path(tokenizer_path) / "tokenizer.json"
        if not path.is_file():
            raise OSError("%s is missing: DeepSeek-V4 needs the checkpoint's tokenizer" % path)
        self.reasoning_parser = reasoning_parser
        self.tool_call_parser = tool_call_parser
        self.dialect = "v32" if tool_call_parser == "deepseekv32" else "v4"
        self.by_tokens = self.dialect == "v4" and (reasoning_parser == REASONING_PARSER or tool_call_parser == TOOL_PARSER)
        if self.by_tokens and (reasoning_parser not in (None, REASONING_PARSER) or tool_call_parser not in (None, TOOL_PARSER)):
            raise ValueError(
                "--reasoning-parser %s and --tool-call-parser %s cannot be mixed with other parsers, got %r and %r"
                % (REASONING_PARSER, TOOL_PARSER, reasoning_parser, tool_call_parser)
            )
        text = path.read_text(encoding="utf-8")
        self.tokenizer = recipe.Tokenizer.from_str(text)
        self.special_tokens = recipe.SpecialTokens(image="<｜deepseek_image｜>")
        self.options = recipe.ConversionOptions().with_special_tokens(self.special_tokens)
        self.v4 = recipe.DeepseekV4Encoding().with_special_tokens(self.special_tokens).with_tokenizer(self.tokenizer)
        self._path = path
        # SGLang encodes one prompt at boot, so that a bad tokenizer ends the start and not the first request.
        if self.tokenizer.encode(THINK + END_THINK) != [128821, 128822]:
            raise ValueError("%s does not give %s and %s the ids 128821 and 128822" % (path, THINK, END_THINK))

    # ---- prompt

    def render(self, body: dict, thinking: bool) -> Prompt:
        """`body` is an SGLang chat request; `thinking` the server's decision for it."""
        return self._render_v32(body, thinking) if self.dialect == "v32" else self._render_v4(body, thinking)

    def encode_text(self, text: str) -> Prompt:
        return Prompt(text, self.tokenizer.encode(text), [])

    def _render_v4(self, body: dict, thinking: bool) -> Prompt:
        converted = self._convert(recipe_request(body, thinking))
        rendered = self.v4.render_conversation(converted.conversation)
        return Prompt(rendered.prompt, self.v4.encode(converted.conversation), list(rendered.special_ranges))

    def _convert(self, request: dict):
        try:
            return recipe.ChatCompletionRequest({**request, "model": RECIPE_MODEL}).convert(self.options)
        except recipe.ConversionError as error:
            raise BadRequest(_message_of(error)) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(str(error)) from None

    def _render_v32(self, body: dict, thinking: bool) -> Prompt:
        """A prompt of the former generation: the block is called function_calls, thinking has no effort."""
        text, special = "", []

        def add(piece: str, is_special: bool = False) -> None:
            nonlocal text
            if is_special:
                special.append((len(text), len(text) + len(piece)))
            text += piece

        add(BOS_TEXT, True)
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        if tools:
            schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            add("\n\n## Tools\n\nCalls are written in a <%sfunction_calls> block. The functions:\n%s\n" % (DSML, schemas))
        for message in body["messages"]:
            content = text_of(message.get("content"))
            role = message.get("role")
            if role in ("system", "developer"):
                add(content)
            elif role == "user":
                add(USER, True)
                add(content)
            elif role == "tool":
                add(USER, True)
                add("<tool_result>%s</tool_result>" % content)
            elif role == "assistant":
                add(ASSISTANT, True)
                add(END_THINK, True)
                add(content)
                add(EOS_TEXT, True)
        add(ASSISTANT, True)
        add(THINK if thinking else END_THINK, True)
        return Prompt(text, self.tokenizer.encode(text), special, "v32")

    # ---- output

    @functools.cached_property
    def _pieces(self) -> dict[int, bytes]:
        return _pieces(json.loads(self._path.read_text(encoding="utf-8")))

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._pieces.get(item, b"") for item in ids).decode("utf-8", "replace")

    def pieces(self, ids: list[int]) -> list[bytes]:
        return [self._pieces.get(item, b"") for item in ids]

    def parser(self, body: dict, thinking: bool):
        separate = body.get("separate_reasoning", True) is not False
        tools = bool(body.get("tools")) and self.tool_call_parser is not None and body.get("tool_choice") != "none"
        if self.by_tokens:
            wanted = (body.get("response_format") or {}).get("type")
            return TokenParser(self, thinking, tools, wanted in JSON_FORMATS, self.reasoning_parser is not None and separate)
        explicit = (body.get("chat_template_kwargs") or {}).get("thinking") is True
        return TextParser(self, reasoning=bool(self.reasoning_parser) and separate and explicit and thinking, tools=tools)


def recipe_request(body: dict, thinking: bool) -> dict:
    """An SGLang chat body as deepseek-recipe's own API takes it."""
    request = {"messages": copy.deepcopy(body["messages"]), "thinking": {"type": "enabled" if thinking else "disabled"}}
    effort = body.get("reasoning_effort")
    if isinstance(effort, str) and re.fullmatch(r"\d+(\.\d+)?", effort.strip()):
        effort = float(effort)
    if isinstance(effort, (int, float)):
        raise BadRequest("DeepSeek-V4 reasoning_effort must be a named tier, got %r" % effort)
    if effort not in (None, "none"):
        request["reasoning_effort"] = effort
    wanted = body.get("response_format")
    if wanted and wanted.get("type") != "structural_tag":
        request["response_format"] = wanted
    choice = body.get("tool_choice")
    if body.get("tools") and choice != "none":
        request["tools"] = [
            {"type": "function", "function": {key: value for key, value in tool["function"].items() if value is not None}}
            for tool in body["tools"]
        ]
        # A forced choice is a matter of the grammar; the prompt stays that of "auto".
        request["tool_choice"] = "auto"
    for message in request["messages"]:
        if message.get("content") is None:
            message["content"] = ""
        if message.get("role") == "developer":
            message["role"] = "system"
        for call in message.get("tool_calls") or []:
            arguments = call["function"].get("arguments")
            if arguments is not None and not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    last = request["messages"][-1] if request["messages"] else {}
    if last.get("role") == "assistant" and isinstance(last.get("content"), str):
        last.pop("tool_calls", None)
        if body.get("continue_final_message"):
            last["prefix"] = True
        else:  # SGLang sends a trailing assistant turn again as the user's
            request["messages"][-1] = {"role": "user", "content": last["content"]}
    return request


def text_of(content) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _message_of(error: recipe.ConversionError) -> str:
    try:
        return json.loads(error.body)["error"]["message"]
    except (TypeError, ValueError, KeyError):
        return str(error.body)


def _pieces(tokenizer: dict) -> dict[int, bytes]:
    """{id: bytes} of a byte-level BPE vocabulary; special tokens are empty, as a detokenizer skips them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(other)}
    pieces = {}
    for word, item in tokenizer["model"]["vocab"].items():
        try:
            pieces[item] = bytes([alphabet[letter] for letter in word])
        except KeyError:
            pieces[item] = word.encode()
    for token in tokenizer["added_tokens"]:
        pieces[token["id"]] = b"" if token["special"] else token["content"].encode()
    return pieces


class TokenParser:
    """deepseek-recipe's stream processor, fed ids."""

    def __init__(self, encoder: Encoder, thinking: bool, tools: bool, json_output: bool, separate: bool):
        stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
        options = recipe.ParsingOptions(
            parse_tool_calls=tools, parse_json_output=json_output, thinking_initial_stage=stage,
            special_tokens=encoder.special_tokens,
        )
        request = recipe.ConversationRequest(recipe.Conversation(), recipe.ModelVersion.DeepseekV4Pro)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", RECIPE_MODEL)
        self._processor = recipe.StreamProcessor(generator, options, encoder.tokenizer)
        self._separate = separate

    def feed(self, ids: list[int]) -> Delta:
        if self._processor.finished or not ids:
            return Delta()
        return self._delta(self._processor.push(recipe.InferenceChunk.tokens(ids)))

    def finish(self, reason: str) -> Delta:
        if self._processor.finished:
            return Delta()
        kind = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}.get(reason)
        chunks = self._processor.finish() if kind is None else self._processor.push(recipe.InferenceChunk.finish(kind))
        return self._delta(chunks)

    def _delta(self, chunks) -> Delta:
        delta = Delta()
        for chunk in chunks:
            piece = json.loads(chunk.to_json())["choices"][0]["delta"]
            if piece.get("role"):
                continue
            reasoning, content = piece.get("reasoning_content") or "", piece.get("content") or ""
            if not self._separate:
                reasoning, content = "", reasoning + content
            delta.reasoning += reasoning
            delta.content += content
            for call in piece.get("tool_calls") or ():
                function = call["function"]
                delta.calls.append({"index": call["index"], "name": function.get("name"), "arguments": function["arguments"]})
        return delta


class TextParser:
    """The text as it is; an incomplete UTF-8 sequence waits for its rest, as in a detokenizer.

    With a reasoning parser of another family the thought is split off at its closing tag. A `deepseekv32` tool
    parser looks for <｜DSML｜function_calls>, which a V4 model does not write.
    """

    OPEN = "<%sfunction_calls>" % DSML
    INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
    PARAMETER = re.compile(r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL)

    def __init__(self, encoder: Encoder, reasoning: bool, tools: bool):
        self._encoder = encoder
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reasoning = reasoning
        self._tools = tools
        self._held = ""

    def feed(self, ids: list[int]) -> Delta:
        return self._split(self._decoder.decode(b"".join(self._encoder.pieces(ids))))

    def finish(self, reason: str) -> Delta:
        delta = self._split(self._decoder.decode(b"", True))
        held, self._held = self._held, ""
        for index, (name, inside) in enumerate(self.INVOKE.findall(held)):
            values = {key: text if kind == "true" else json.loads(text) for key, kind, text in self.PARAMETER.findall(inside)}
            delta.calls.append({"index": index, "name": name, "arguments": json.dumps(values, ensure_ascii=False)})
        if not delta.calls:
            delta.content += held
        return delta

    def _split(self, text: str) -> Delta:
        delta = Delta()
        if self._reasoning:
            thought, tag, rest = text.partition(END_THINK)
            delta.reasoning = thought
            if tag:
                self._reasoning = False
            text = rest
        if self._tools and (self._held or self.OPEN.startswith((text[text.find("<"):])[:len(self.OPEN)]) and "<" in text):
            self._held += text
            if not self.OPEN.startswith(self._held[:len(self.OPEN)]) and not self._held.startswith(self.OPEN):
                text, self._held = self._held, ""
            else:
                text = ""
        delta.content = text
        return delta
