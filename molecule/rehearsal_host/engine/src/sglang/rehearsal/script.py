# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the model says. A function of the rendered prompt: what did not get into the prompt is not known here.

It reads the tools, the wished-for format and the conversation back out of the
prompt text, and answers as a model does: raw text with `...</think>` when the
prompt ends in <think>, and tool calls as DSML markup.
"""

from __future__ import annotations

import json
import re

from sglang.rehearsal.encoding import DSML, END_THINK, EOS_TEXT, Prompt
from sglang.rehearsal.faults import Faults

NUMBER = r"(\d[\d,_]*)"
OPERATIONS = (
    (re.compile(NUMBER + r"\s*(?:\*|x|X|×|·|⋅|\\times|times|multiplied by)\s*" + NUMBER), "×", lambda a, b: a * b),
    (re.compile(NUMBER + r"\s*(?:\+|plus)\s*" + NUMBER), "+", lambda a, b: a + b),
    (re.compile(NUMBER + r"\s*(?:-|−|minus)\s*" + NUMBER), "−", lambda a, b: a - b),
)
REPEAT = re.compile(r"(?:repeat|echo)(?: back)?(?: the following)?(?: text)?(?: exactly| verbatim| after me)[^:]{0,40}:\s*(.+)", re.IGNORECASE | re.DOTALL)
ONLY = re.compile(
    r"(?:answer|reply|respond|say)(?: only| just)?(?: with)?(?: only)?(?: just)?(?: exactly)?(?: the)?(?: single| one)?(?: word| text)"
    r"\s*:?\s*[\"'\u201c`]?([^\s\"'\u201d`.!?]+)",
    re.IGNORECASE,
)
COUNT = re.compile(r"count(?: up)? (?:from (\d+) )?to (\d+)", re.IGNORECASE)
WORDS = re.compile(r"(?:write|generate|produce)\D{0,40}?(\d+)[ -]words?", re.IGNORECASE)
WHAT_IS = re.compile(r"what (?:is|was|are) (?:the |my |our )?([^?\n]{2,60}?)\?", re.IGNORECASE)
NAMES = re.compile(r"[A-ZÀ-ÞĀ-Ž][\w'\u2019-]+(?: [A-ZÀ-ÞĀ-Ž][\w'\u2019-]+)*")
RESULT = re.compile(r"<tool_result>(.*?)</tool_result>", re.DOTALL)
CALL = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
PARAMETER = re.compile(r'<｜DSML｜parameter name="([^"]+)" string="(?:true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL)
FORMAT = "## Response Format:"
GARBAGE = "!" * 4000
NO_NAMES = {
    "I",
    "Use",
    "What",
    "The",
    "Please",
    "Then",
    "And",
    "Also",
    "How",
    "Give",
    "Tell",
    "Call",
    "Check",
    "Find",
    "JSON",
    "Celsius",
    "Fahrenheit",
    "Answer",
}


def say(prompt: Prompt, faults: Faults, forced: bool | str = False, json_object: bool = False) -> str:
    """The raw text of the answer, without the end token. `forced`: a tool must be called (or the one of that name)."""
    if faults.get("text") is not None:
        return faults.get("text")
    if faults.get("garbage"):
        return GARBAGE
    if faults.get("empty"):
        return ""
    scene = Scene(prompt)
    thought, answer = scene.play(faults, forced, json_object)
    if not prompt.thinking:
        return answer
    if faults.get("never_close"):
        return thought + " " + answer + EOS_TEXT
    return thought + END_THINK + answer


class Scene:
    """The prompt, read."""

    def __init__(self, prompt: Prompt):
        turns = prompt.turns()
        self.head = turns[0][1]
        self.turns = list(turns[1:-1])
        self.tools = list(schemas(self.head))
        self.format = wanted_format(self.head)
        self.question = ""
        self.results: list[str] = []
        self.calls: list[tuple[str, dict]] = []
        if self.turns and self.turns[-1][0] == "user":
            last = self.turns[-1][1]
            self.results = RESULT.findall(last)
            self.question = RESULT.sub("", last).strip()
            if self.results:
                before = [text for role, text in self.turns[:-1]]
                if len(self.turns) > 1:
                    self.calls = [(name, dict(PARAMETER.findall(inside))) for name, inside in CALL.findall(before[-1])]
                if not self.question:
                    asked = [text for role, text in self.turns[:-1] if role == "user" and not RESULT.search(text)]
                    self.asked = asked[-1].strip() if asked else ""
        # everything that can hold a needle: all but the question itself
        self.text = self.head + "\n" + "\n".join(text for role, text in self.turns)
        self.had_calls = any(role == "assistant" and "<%sinvoke" % DSML in text for role, text in self.turns)

    # ---- which kind of answer

    def play(self, faults: Faults, forced: bool | str, json_object: bool) -> tuple[str, str]:
        if self.results and not self.question:
            return "The tools have answered; I can sum that up.", self.sum_up()
        calls = self.wanted_calls(forced)
        if calls:
            return self.call(calls, faults)
        if self.format is not None or json_object:
            value = fit(self.format if isinstance(self.format, dict) and self.format else {"type": "object"}, Pool(self.question, self.sums(faults)))
            return "I have to answer with JSON of the given form.", json.dumps(value, ensure_ascii=False)
        return self.prose(faults)

    def prose(self, faults: Faults) -> tuple[str, str]:
        found = REPEAT.search(self.question)
        if found:
            return "I have to give that text back.", found.group(1).strip()
        sums = self.sums(faults)
        if sums:
            a, sign, b, _result = sums[0]
            thought = "We need %d %s %d." % (a, sign, b)
            if sign == "×" and b > 10:
                tens, ones = b - b % 10, b % 10
                thought += " %d × %d = %d, %d × %d = %d, together %d." % (a, tens, a * tens, a, ones, a * ones, a * b)
            text = ", ".join("%d %s %d = %s" % (a, sign, b, ("**%d**" if faults.get("bold") else "%d") % r) for a, sign, b, r in sums)
            return thought, text + "."
        needle = self.needle()
        if needle:
            return "The text says it.", needle
        found = COUNT.search(self.question)
        if found:
            first, last = int(found.group(1) or 1), int(found.group(2))
            return "Counting.", " ".join(map(str, range(first, min(last, first + 20000) + 1)))
        found = WORDS.search(self.question)
        if found:
            words = [
                "the",
                "quick",
                "router",
                "hands",
                "every",
                "prompt",
                "to",
                "one",
                "half",
                "and",
                "every",
                "token",
                "comes",
                "back",
                "from",
                "the",
                "other",
            ] * 4000
            return "A long text is asked for.", " ".join(words[: min(int(found.group(1)), 20000)])
        found = ONLY.search(self.question)
        if found:
            return "One word is enough.", found.group(1)
        if "capital" in self.question.lower() and "France" in self.question:
            return "France has one capital.", "Paris."
        short = " ".join(self.question.split())[:80]
        return "Nothing to compute here.", "This is the rehearsal engine. You wrote: %s" % (short or "(nothing)")

    def sums(self, faults: Faults) -> list[tuple[int, str, int, int]]:
        found = []
        for pattern, sign, operate in OPERATIONS:
            for left, right in pattern.findall(self.question):
                a, b = (int(re.sub(r"[,_]", "", text)) for text in (left, right))
                found.append((a, sign, b, operate(a, b) + (1 if faults.get("wrong_number") else 0)))
            if found:
                break
        return found

    def needle(self) -> str | None:
        for thing in WHAT_IS.findall(self.question):
            pattern = re.compile(r"\b" + re.escape(thing.strip()) + r"\s*(?:is|was|are|:|=)\s*:?\s*([^\n.?!,;]+)", re.IGNORECASE)
            for found in pattern.finditer(self.text):
                value = found.group(1).strip()
                if value:
                    return "The %s is %s." % (thing.strip(), value)
        return None

    def sum_up(self) -> str:
        parts = []
        for place, result in enumerate(self.results):
            values = ", ".join(self.calls[place][1].values()) if place < len(self.calls) else ""
            parts.append("%s: %s" % (values, result.strip()) if values else result.strip())
        return "Here is what the tools returned. " + "; ".join(parts) + "."

    # ---- tools

    def wanted_calls(self, forced: bool | str) -> list[tuple[str, dict]]:
        tools = [tool for tool in self.tools if not isinstance(forced, str) or tool["name"] == forced]
        if not tools:
            return []
        chosen = [tool for tool in tools if asked_for(tool, self.question)]
        if not chosen and forced:
            chosen = tools[:1]
        calls = []
        for tool in chosen:
            calls += arguments_for(tool, self.question, self.sums(Faults()))
        return calls

    def call(self, calls: list[tuple[str, dict]], faults: Faults) -> tuple[str, str]:
        thought = "I need " + " and ".join("%s(%s)" % (name, json.dumps(values, ensure_ascii=False)) for name, values in calls) + "."
        if faults.get("no_call"):
            return thought, ""
        if faults.get("call_as_text"):
            return thought, "\n".join("%s(%s)" % (name, json.dumps(values, ensure_ascii=False)) for name, values in calls)
        if faults.get("one_call"):
            calls = calls[:1]
        if faults.get("same_call"):
            calls = [(name, calls[0][1]) for name, _values in calls]
        if faults.get("extra_call"):
            calls = calls + calls[-1:]
        if faults.get("wrap_arguments") and self.had_calls:
            calls = [(name, {"arguments": values}) for name, values in calls]
        text = markup(calls)
        if faults.get("bare_invoke"):
            text = text.replace("<%stool_calls>\n" % DSML, "").replace("\n</%stool_calls>" % DSML, "")
        if faults.get("cut_markup"):
            text = "<|DSML|inv"
        if faults.get("ascii_markup") or faults.get("bare_invoke"):
            text = text.replace("｜", "|")
        # A model that sees tools for the former generation's block still writes the one it was trained on.
        return thought, "\n\n" + text


def schemas(head: str):
    """The tool schemas of a prompt: one JSON object with a name on a line of its own."""
    for line in head.splitlines():
        if line.startswith("{"):
            try:
                tool = json.loads(line)
            except ValueError:
                continue
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                yield tool


def wanted_format(head: str):
    _before, mark, after = head.partition(FORMAT)
    if not mark:
        return None
    for line in after.splitlines():
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]{3,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", name))]


COMMON = set(
    [
        "get",
        "set",
        "for",
        "the",
        "and",
        "with",
        "from",
        "tool",
        "function",
        "call",
        "list",
        "that",
        "this",
        "info",
        "information",
        "data",
        "given",
        "return",
        "returns",
        "current",
        "use",
        "into",
        "your",
        "any",
        "all",
        "are",
        "one",
        "two",
        "not",
        "you",
        "can",
        "will",
    ]
)


def asked_for(tool: dict, question: str) -> bool:
    """Does the question speak of what the tool is called, or twice of what it is described by?"""
    said = {word.lower()[:5] for word in re.findall(r"[A-Za-z]{3,}", question)}
    if tool["name"] in question or any(word[:5] in said for word in words_of(tool["name"]) if word not in COMMON):
        return True
    told = {word[:5] for word in words_of(tool.get("description") or "") if word not in COMMON}
    return len(told & said) >= 2


def names_in(question: str) -> list[str]:
    """Capitalised words, those that belong together as one; the word that opens a sentence is no name."""
    names = []
    for found in NAMES.finditer(question):
        name, before = found.group(), question[: found.start()].rstrip()
        if not before or before[-1] in '.!?:\n"\u201c(':
            name = name.partition(" ")[2]
        if name and name.split()[0] not in NO_NAMES:
            names.append(name)
    return names


class Pool:
    """Values of a question: names, quoted texts, numbers, dates. Taken in order, each once."""

    def __init__(self, question: str, sums: list = ()):
        self.question = question
        self.quoted = [a or b for a, b in re.findall(r"\"([^\"]+)\"|\u201c([^\u201d]+)\u201d", question)]
        self.dates = re.findall(r"\b\d{4}-\d{2}-\d{2}\b", question)
        bare = re.sub(r"\b\d{4}-\d{2}-\d{2}\b", " ", question)
        self.numbers = [float(text) if "." in text else int(text) for text in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])", bare)]
        self.names = names_in(question)
        self.sums = [result for _a, _sign, _b, result in sums]

    def named(self, key: str) -> str | None:
        """`unit celsius`, `unit: celsius`, `unit="celsius"`."""
        name = re.sub(r"[_-]", r"[ _-]", re.escape(key).replace(r"\_", "_").replace(r"\-", "-"))
        found = re.search(r"\b%s\b\s*(?:is|=|:)?\s*[\"\u201c]?([\w.@/-]+)" % name, self.question, re.IGNORECASE)
        return found.group(1).rstrip(".") if found else None


def fit(schema: dict, pool: Pool, key: str = "", root: dict | None = None, depth: int = 0):
    """A value for the schema out of the pool."""
    root = schema if root is None else root
    if depth > 12:
        return None
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].lstrip("#/").split("/"):
            target = target.get(step, {}) if isinstance(target, dict) else {}
        return fit(target, pool, key, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        said = pool.question.lower()
        return next((value for value in schema["enum"] if isinstance(value, str) and value.lower() in said), schema["enum"][0])
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            options = [option for option in schema[word] if option.get("type") != "null"]
            if word == "allOf":
                merged = {name: value for option in options for name, value in option.items()}
                return fit(merged, pool, key, root, depth + 1)
            return fit(options[0], pool, key, root, depth + 1)
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind == "object":
        needed = set(schema.get("required", []))
        value = {}
        for name, part in (schema.get("properties") or {}).items():
            if name in needed or not schema.get("required") or pool.named(name) is not None or _enum_said(part, pool):
                value[name] = fit(part, pool, name, root, depth + 1)
        return value
    if kind == "array":
        items = schema.get("items") or {"type": "string"}
        count = 1
        if items.get("type") == "string" and "enum" not in items:
            count = max(1, len(pool.quoted) or len(pool.names))
        elif items.get("type") in ("integer", "number"):
            count = max(1, len(pool.numbers))
        elif "enum" in items:
            return [value for value in items["enum"] if str(value).lower() in pool.question.lower()] or [items["enum"][0]]
        count = min(max(count, schema.get("minItems", 0)), schema.get("maxItems", count))
        return [fit(items, pool, "", root, depth + 1) for _place in range(count)]
    if kind in ("integer", "number"):
        return _number(schema, pool, key, kind)
    if kind == "boolean":
        return not re.search(r"\b(?:no|not|without|false)\b[^.]{0,20}%s" % re.escape(key.replace("_", " ")), pool.question, re.IGNORECASE)
    if kind == "null":
        return None
    return _string(schema, pool, key)


def _enum_said(schema: dict, pool: Pool) -> bool:
    return any(isinstance(value, str) and re.search(r"\b%s\b" % re.escape(value), pool.question, re.IGNORECASE) for value in schema.get("enum", ()))


def _number(schema: dict, pool: Pool, key: str, kind: str):
    named = pool.named(key) if key else None
    if named is not None and re.fullmatch(r"-?\d+(\.\d+)?", named):
        value = float(named)
        if value in pool.numbers:
            pool.numbers.remove(value)
    elif pool.sums:
        value = pool.sums.pop(0)
    elif pool.numbers:
        value = pool.numbers.pop(0)
    else:
        value = schema.get("default", schema.get("minimum", 1))
    if "minimum" in schema:
        value = max(value, schema["minimum"])
    if "maximum" in schema:
        value = min(value, schema["maximum"])
    return int(value) if kind == "integer" or float(value).is_integer() else value


def _string(schema: dict, pool: Pool, key: str) -> str:
    if schema.get("format") == "date" or key.endswith("date"):
        return pool.dates.pop(0) if pool.dates else "2026-01-01"
    named = pool.named(key) if key else None
    for source in (pool.quoted, pool.names):
        if source:
            return source.pop(0)
    if named is not None and named.lower() not in ("of", "is", "in", "for", "and", "the", "a", "with"):
        return named
    if pool.sums:
        return str(pool.sums.pop(0))
    return schema.get("default") or key or "text"


def arguments_for(tool: dict, question: str, sums: list) -> list[tuple[str, dict]]:
    """One call for each name when the tool takes one text of its own, else one call for all."""
    schema = tool.get("parameters") or {}
    properties = schema.get("properties") or {}
    needed = schema.get("required") or list(properties)[:1]
    texts = [
        name
        for name in needed
        if properties.get(name, {}).get("type") == "string" and "enum" not in properties[name] and properties[name].get("format") != "date"
    ]
    pool = Pool(question, sums)
    names = pool.quoted or pool.names
    if len(texts) == 1 and len(names) > 1 and not any(part.get("type") in ("object", "array") for part in properties.values()):
        calls = []
        for name in dict.fromkeys(names):
            part = Pool(question)
            part.quoted, part.names = [], [name]
            calls.append((tool["name"], fit(schema, part)))
        return calls
    return [(tool["name"], fit(schema, pool) if properties else {})]


def markup(calls: list[tuple[str, dict]]) -> str:
    lines = ["<%stool_calls>" % DSML]
    for name, values in calls:
        lines.append('<%sinvoke name="%s">' % (DSML, name))
        for key, value in values.items():
            text = isinstance(value, str)
            lines.append(
                '<%sparameter name="%s" string="%s">%s</%sparameter>'
                % (DSML, key, "true" if text else "false", value if text else json.dumps(value, ensure_ascii=False), DSML)
            )
        lines.append("</%sinvoke>" % DSML)
    lines.append("</%stool_calls>" % DSML)
    return "\n".join(lines)
