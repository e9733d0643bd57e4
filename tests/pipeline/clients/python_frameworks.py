"""Clients in Python that run functions, retry or evaluate on their own."""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cells import (
    COUNT,
    COUNTED,
    EMBEDDING_V1,
    KEY,
    MESSAGES,
    MODEL,
    REPEAT,
    V1,
    Answer,
    check,
    check_answer,
    check_pieces,
    check_vectors,
)


class OpenaiAgents:
    """The agents use /v1/responses by default."""

    package = "openai-agents"

    def __init__(self) -> None:
        import agents

        agents.set_tracing_disabled(True)
        self.agents: Any = agents

    def agent(self, **fields: Any) -> Any:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)  # one for each event loop
        self.agents.set_default_openai_client(client, use_for_tracing=False)
        return self.agents.Agent(name="a", model=MODEL, **fields)

    def run(self, agent: Any, prompt: str = COUNT) -> Any:
        return asyncio.run(self.agents.Runner.run(agent, prompt)).final_output

    def text(self) -> None:
        check(self.run(self.agent()), COUNTED)

    def stream(self) -> None:
        async def pieces() -> list[str]:
            result = self.agents.Runner.run_streamed(self.agent(), COUNT)
            events = [one.data async for one in result.stream_events() if hasattr(one, "data")]
            return [one.delta for one in events if one.type == "response.output_text.delta"]

        check_pieces(iter(asyncio.run(pieces())))

    def tools(self) -> None:
        @self.agents.function_tool  # type: ignore[untyped-decorator]
        def take(x: int) -> str:
            """Take a number."""
            return f"took {x}"

        agent = self.agent(tools=[take], tool_use_behavior="stop_on_first_tool")
        check(self.run(agent, REPEAT), "took 1")

    def schema(self) -> None:
        check_answer(self.run(self.agent(output_type=Answer)))


class Instructor:
    """instructor, in its default mode (a forced call) and with a schema."""

    package = "instructor"

    def ask(self, mode: str, **fields: Any) -> Any:
        import instructor
        from openai import OpenAI

        openai = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
        client: Any = instructor.from_openai(openai, mode=getattr(instructor.Mode, mode))
        return client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_retries": 0} | fields
        )

    def text(self) -> None:
        answer = self.ask("TOOLS", response_model=None)
        check(answer.choices[0].message.content, COUNTED)

    def stream(self) -> None:
        import instructor

        kind = instructor.Partial[Answer]  # type: ignore[type-var]
        *_, last = self.ask("TOOLS", response_model=kind, stream=True)
        check_answer(Answer.model_validate(last.model_dump()))

    def tools(self) -> None:
        check_answer(self.ask("TOOLS", response_model=Answer))

    def schema(self) -> None:
        check_answer(self.ask("JSON_SCHEMA", response_model=Answer))


class PydanticAi:
    package = "pydantic-ai-slim"

    def agent(self, **fields: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=V1, api_key=KEY)
        return Agent(OpenAIChatModel(MODEL, provider=provider), **fields)

    def text(self) -> None:
        check(self.agent().run_sync(COUNT).output, COUNTED)

    def stream(self) -> None:
        async def pieces() -> list[str]:
            async with self.agent().run_stream(COUNT) as result:
                return [one async for one in result.stream_text(delta=True, debounce_by=None)]

        check_pieces(iter(asyncio.run(pieces())))

    def tools(self) -> None:
        from pydantic_ai import UsageLimitExceeded, UsageLimits

        agent, taken = self.agent(), []

        @agent.tool_plain  # type: ignore[untyped-decorator]
        def take(x: int) -> str:
            taken.append(x)
            return "done"

        try:
            agent.run_sync(REPEAT, usage_limits=UsageLimits(request_limit=1))
        except UsageLimitExceeded:  # the tool's result is not sent back
            check(taken, [1])

    def schema(self) -> None:
        from pydantic_ai import NativeOutput

        check_answer(self.agent(output_type=NativeOutput(Answer)).run_sync(COUNT).output)
        one = {"parallel_tool_calls": False}  # the demo model would call until its context is full
        agent = self.agent(output_type=Answer, model_settings=one)
        check_answer(agent.run_sync(COUNT).output)


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self) -> None:
        from llama_index.llms.openai_like import OpenAILike

        self.model: Any = OpenAILike(
            model=MODEL,
            api_base=V1,
            api_key=KEY,
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )

    def text(self) -> None:
        check(self.model.complete(COUNT).text, COUNTED)

    def stream(self) -> None:
        check_pieces(chunk.delta for chunk in self.model.stream_complete(COUNT))

    def tools(self) -> None:
        from llama_index.core.tools import FunctionTool

        def take(x: int) -> int:
            """Take a number."""
            return x

        tool = FunctionTool.from_defaults(take)
        answer = self.model.chat_with_tools([tool], user_msg=REPEAT)
        (call,) = self.model.get_tool_calls_from_response(answer)
        check((call.tool_name, call.tool_kwargs), ("take", {"x": 1}))

    def schema(self) -> None:
        check_answer(self.model.as_structured_llm(Answer).complete(COUNT).raw)

    def embeddings(self) -> None:
        from llama_index.embeddings.openai_like import OpenAILikeEmbedding

        model = OpenAILikeEmbedding(
            model_name=MODEL, api_base=EMBEDDING_V1, api_key=KEY, max_retries=0
        )
        check_vectors(model.get_text_embedding_batch(["one", "two"]))


class LmEval:
    """lm-eval, with a task of sums: answers, and choices by the log probabilities of prompts."""

    package = "lm-eval"
    SUMS = ((17, 25), (3, 4), (60, 31))
    TOKENIZER = Path(__file__).parents[3] / "models" / "demo" / "checkpoint"

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()  # until this object ends
        self.folder = Path(self._temporary.name)
        # otherwise it looks for the task on the Hub
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder), "OPENAI_API_KEY": KEY}

    def task(self, name: str, **fields: Any) -> dict[str, Any]:
        path = self.folder / "sums.json"
        rows = [
            {"sum": f"{a}+{b}=", "result": str(a + b), "choices": [str(a + b + 1), str(a + b)]}
            for a, b in self.SUMS
        ]
        path.write_text("\n".join(map(json.dumps, rows)))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        prompt = {"test_split": "test", "doc_to_text": "{{sum}}", "target_delimiter": ""}
        return {"task": name, "output_type": name} | data | prompt | fields

    def evaluate(self, kind: str, path: str, tasks: list[dict[str, Any]], **fields: Any) -> Any:
        import lm_eval

        settings = {"model": MODEL, "base_url": f"{V1}/{path}", "tokenizer": str(self.TOKENIZER)}
        return lm_eval.simple_evaluate(
            model=kind,
            model_args=settings | fields,
            tasks=tasks,
            bootstrap_iters=0,
            apply_chat_template=kind == "local-chat-completions",
            log_samples=True,
        )

    def text(self) -> None:
        until = {"until": ["\n"], "max_gen_toks": 32}
        answers = self.task("generate_until", doc_to_target="result", generation_kwargs=until)
        choices = self.task("multiple_choice", doc_to_choice="choices", doc_to_target=1)
        for tokenized_requests in (True, False):
            found = self.evaluate(
                *("local-completions", "completions", [answers, choices]),
                batch_size=2,
                tokenized_requests=tokenized_requests,
            )
            self.check_answers(found)
            for sample in found["samples"]["multiple_choice"]:
                (wrong, is_wrong_greedy), (right, is_right_greedy) = sample["filtered_resps"]
                check([is_wrong_greedy, is_right_greedy], [False, True])
                check(wrong < -5 and -0.1 < right < 0, True)
        self.check_answers(
            self.evaluate("local-chat-completions", "chat/completions", [answers], num_concurrent=2)
        )

    def check_answers(self, found: Any) -> None:
        samples = found["samples"]["generate_until"]
        texts = [text for sample in samples for text in sample["filtered_resps"]]
        check(texts, [str(a + b) for a, b in self.SUMS])
