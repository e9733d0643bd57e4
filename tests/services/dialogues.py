"""Random conversations in OpenAI's form, and as transformers takes them."""

import json
import random
from typing import Any

_SOME = """
hello 17+25= naïve 日本語 👩🏽‍🚀 <think> </think> <tool_call> </tool_call> <|im_end|>
<tool_response> </tool_response> <|im_start|> <|im_start|>user <|endoftext|> <tools> {%if%}
{{messages}} <function=f> <parameter=a> & < > " '
"""
WORDS = [*_SOME.split(), "\\", "\x00", "\ufeff", "\u202e\u200d", "e\u0301"]
SPACES = [" ", "", "\n", "\n\n", "\t", "  "]
NAMES = ["f", "get_weather", "größe", "a-b.c"]


class Dialogues:
    """A generator of request bodies, the same ones for each seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def body(self) -> dict[str, Any]:
        """Return fields of a chat request. A last message of the assistant may be continued."""
        chance = self.random.random
        messages: list[dict[str, Any]] = []
        if chance() < 0.5:
            messages.append({"role": self._one("system", "developer"), "content": self.content()})
        for _ in range(self.random.randint(1, 4)):
            messages += self._turn()
        while chance() < 0.7 and messages[-1]["role"] not in ("user", "tool"):
            messages.pop()
            if not messages:
                messages = [{"role": "user", "content": self.text()}]
        body: dict[str, Any] = {"messages": messages}
        last = messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last and chance() < 0.5:
            # not trimmed; without what transformers looks for in vain, as templates move it
            last["content"] = f"x{self.text()}x".replace("</think>", "")
            body["continue_final_message"] = True
        elif chance() < 0.2:
            body["add_generation_prompt"] = self._one(True, False)
        if chance() < 0.5:
            body["tools"] = [self._tool() for _ in range(self.random.randint(0, 3))]
        if chance() < 0.5:
            body["chat_template_kwargs"] = {"enable_thinking": self._one(True, False)}
            if chance() < 0.3:
                body["chat_template_kwargs"]["preserve_thinking"] = self._one(True, False)
        return body

    def text(self) -> str:
        number = self._one(0, 1, 1, 3, 9)
        return "".join(self._one(*WORDS) + self._one(*SPACES) for _ in range(number))

    def content(self) -> Any:
        if self.random.random() < 0.7:
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self.random.randint(0, 3))]

    def value(self, depth: int = 0) -> Any:
        """Return a value of JSON, of which MessagePack has all numbers."""
        kinds = ["text", "number", "constant"] + ["map", "list"] * (depth < 3)
        match self.random.choice(kinds):
            case "text":
                return self.text()
            case "number":
                return self._one(0, -1, 1.0, -0.0, 1e-7, 1e22, 0.1, 2**63, -(2**63), 5e-324)
            case "constant":
                return self._one(None, True, False)
            case "map":
                return self._map(depth)
        return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]

    def _turn(self) -> list[dict[str, Any]]:
        question = {"role": "user", "content": self.content()}
        if self.random.random() < 0.1:
            question["name"] = "Ann"
        turn = [question]
        for _ in range(self._one(0, 0, 1, 2)):
            calls = [self._call() for _ in range(self.random.randint(1, 3))]
            turn.append(self._answer() | {"tool_calls": calls})
            turn += [
                {"role": "tool", "content": self.content(), "tool_call_id": one["id"]}
                for one in calls
            ]
        return [*turn, self._answer()] if self.random.random() < 0.8 else turn

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": self.content()}
        match self._one("", "", "field", "empty", "text", "null"):
            case "field":
                answer["reasoning_content"] = self.text()
            case "empty":
                answer["reasoning_content"] = ""
            case "text":
                answer["content"] = f"<think>\n{self.text()}\n</think>\n\n{self.text()}"
            case "null":
                answer["reasoning_content"] = None
        return answer

    def _call(self) -> dict[str, Any]:
        arguments = self._map(0)
        text = json.dumps(arguments, ensure_ascii=self._one(True, False))
        function = {"name": self._one(*NAMES), "arguments": text}
        return {"id": f"c{self.random.random()}", "type": "function", "function": function}

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._one(*NAMES)}
        if self.random.random() < 0.7:
            function["description"] = self.text()
        if self.random.random() < 0.8:
            properties = {name: {"type": "string", **self._map(1)} for name in self._map(2)}
            function["parameters"] = {"type": "object", "properties": properties}
        if self.random.random() < 0.3:
            function["strict"] = self._one(True, False)
        return {"type": "function", "function": function}

    def _map(self, depth: int) -> dict[str, Any]:
        names = [self._one("a", "b", "é", "x y", "") for _ in range(self.random.randint(0, 3))]
        return {name: self.value(depth + 1) for name in names}

    def _one(self, *choices: Any) -> Any:
        return self.random.choice(choices)


def for_transformers(body: dict[str, Any], *, joins_parts: bool) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template`, with arguments of calls as maps.

    joins_parts: for templates that do not know parts of a content.
    """
    messages = []
    for one in body["messages"]:
        message = dict(one)
        if joins_parts and isinstance(one["content"], list):
            message["content"] = "\n".join(part["text"] for part in one["content"])
        if one["role"] == "developer":
            message["role"] = "system"
        if "tool_calls" in one:
            calls = [dict(call["function"]) for call in one["tool_calls"]]
            for call in calls:
                call["arguments"] = json.loads(call["arguments"])
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(message)
    continues = body.get("continue_final_message", False)
    return {
        "tools": body.get("tools") or None,
        "add_generation_prompt": body.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
        "conversation": messages,
        **body.get("chat_template_kwargs", {}),
    }
