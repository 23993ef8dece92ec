"""The official OpenAI client for Python against `roundhouse serve`: what users of it meet."""

import asyncio
import base64
import os
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

import openai
from openai import AsyncOpenAI, OpenAI

BINARY, MODEL = sys.argv[1:3]
PICTURE = os.path.join(MODEL, "../../tests/probes/images/two_shapes.png")
KEY = "a key of the tests"
GARDEN = [{"role": "user", "content": "Spell garden backwards."}]
COUNT = [{"role": "user", "content": "Count from 5 to 16."}]
SUM = [{"role": "user", "content": "What is 46 + 37?"}]
STORY = [{"role": "user", "content": "Tell me a short story about Mia the fox and the lamp."}]


class Server:
    """A server of the demo model on a free port."""

    def __init__(self, *options):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDHOUSE_")}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process = subprocess.Popen(
            [BINARY, "serve", MODEL, "--port", "0", "--context", "2048", *options],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment,
        )
        self.notes = []
        for line in self.process.stderr:
            self.notes.append(line)
            if line.startswith("listening on "):
                self.url = line.split()[2]
                break
        else:
            raise RuntimeError("the server does not listen: " + "".join(self.notes))
        threading.Thread(target=lambda: self.notes.extend(self.process.stderr), daemon=True).start()
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(self.url + "/ready") as answer:
                    assert answer.status == 200
                    return
            except urllib.error.HTTPError as error:
                assert error.code == 503 and time.monotonic() < deadline, "not ready: " + "".join(self.notes)
                time.sleep(0.01)

    def stop(self):
        self.process.terminate()
        status = self.process.wait(timeout=40)
        assert status == 0, f"status {status}: " + "".join(self.notes)

    def client(self, **options):
        return OpenAI(base_url=self.url + "/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 60, **options})


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--api-key", KEY)
        cls.addClassCleanup(cls.server.stop)
        cls.client = cls.server.client()
        cls.chat = staticmethod(cls.client.chat.completions.create)

    def test_models_are_listed_and_fetched_from_the_list(self):
        models = self.client.models.list()
        self.assertEqual([(model.id, model.object) for model in models], [("tiny", "model")])

    def test_a_chat(self):
        reply = self.chat(model="tiny", messages=GARDEN, temperature=0)
        self.assertEqual(reply.object, "chat.completion")
        choice = reply.choices[0]
        self.assertEqual((choice.index, choice.finish_reason), (0, "stop"))
        self.assertEqual((choice.message.role, choice.message.content), ("assistant", "n-e-d-r-a-g."))
        self.assertEqual(choice.model_extra["token_sha"], "f4c8f07e9377")
        usage = reply.usage
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (19, 8, 27))
        self.assertEqual(usage.completion_tokens_details.reasoning_tokens, 0)
        self.assertIsInstance(reply.model_extra["seed"], int)

    def test_a_streamed_chat_is_the_whole_one(self):
        whole = self.chat(model="tiny", messages=STORY, temperature=0)
        stream = self.chat(
            model="tiny", messages=STORY, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        text, usage, reasons, shas = "", None, [], []
        for chunk in stream:
            self.assertEqual(chunk.object, "chat.completion.chunk")
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    reasons.append(choice.finish_reason)
                    shas.append(choice.model_extra["token_sha"])
            if chunk.usage:
                self.assertEqual(chunk.choices, [])
                usage = chunk.usage
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual((reasons, shas), (["stop"], [whole.choices[0].model_extra["token_sha"]]))
        self.assertEqual(usage, whole.usage)

    def test_without_include_usage_there_is_none(self):
        chunks = list(self.chat(model="tiny", messages=GARDEN, stream=True))
        self.assertTrue(all(chunk.usage is None for chunk in chunks))
        self.assertTrue(all(chunk.choices for chunk in chunks))

    def test_a_stream_that_is_left_leaves_no_load(self):
        stream = self.chat(
            model="tiny", messages=STORY, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        deadline = time.monotonic() + 3
        while True:
            with urllib.request.urlopen(self.server.url + "/metrics") as answer:
                lines = answer.read().decode().splitlines()
            if "roundhouse_lanes 0" in lines:
                break
            self.assertLess(time.monotonic(), deadline, "the lane is not free")
            time.sleep(0.02)

    def test_several_choices_with_a_seed(self):
        ask = dict(model="tiny", messages=STORY, n=3, seed=7, temperature=4, max_tokens=20)
        one, two = self.chat(**ask), self.chat(**ask)
        texts = [choice.message.content for choice in one.choices]
        self.assertEqual([choice.index for choice in one.choices], [0, 1, 2])
        self.assertEqual(len(set(texts)), 3)
        self.assertEqual(texts, [choice.message.content for choice in two.choices])
        parts = ["", "", ""]
        for chunk in self.chat(**ask, stream=True):
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
        self.assertEqual(parts, texts)

    def test_log_probabilities(self):
        reply = self.chat(model="tiny", messages=GARDEN, temperature=0, logprobs=True, top_logprobs=3)
        content = reply.choices[0].logprobs.content
        self.assertEqual(len(content), reply.usage.completion_tokens)
        for token in content:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual(token.logprob, token.top_logprobs[0].logprob)
            self.assertEqual(bytes(token.bytes).decode(errors="replace"), token.token)
        streamed = []
        for chunk in self.chat(
            model="tiny", messages=GARDEN, temperature=0, logprobs=True, top_logprobs=3, stream=True
        ):
            for choice in chunk.choices:
                if choice.logprobs:
                    streamed += choice.logprobs.content
        self.assertEqual(streamed, content)

    def test_a_picture_beside_a_text(self):
        with open(PICTURE, "rb") as file:
            url = "data:image/png;base64," + base64.b64encode(file.read()).decode()

        def ask(*parts):
            return self.chat(model="tiny", messages=[{"role": "user", "content": list(parts)}], temperature=0)

        picture = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
        question = {"type": "text", "text": "What color is the square?"}
        reply = ask(picture, question)
        self.assertEqual(reply.choices[0].message.content, "The square is blue.")
        self.assertEqual(reply.usage.prompt_tokens, 103)
        self.assertEqual(ask(question, picture).usage.prompt_tokens, 103)
        link = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
        with self.assertRaises(openai.BadRequestError) as caught:
            ask(link, question)
        self.assertEqual(caught.exception.param, "messages[0].content[0].image_url.url")

    def test_stop_texts(self):
        for stop in (", 10", [", 12", ", 10"]):
            reply = self.chat(model="tiny", messages=COUNT, temperature=0, stop=stop)
            self.assertEqual((reply.choices[0].message.content, reply.choices[0].finish_reason), ("5, 6, 7, 8, 9", "stop"))

    def test_limits_by_either_name(self):
        for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
            reply = self.chat(model="tiny", messages=COUNT, **limit)
            self.assertEqual((reply.usage.completion_tokens, reply.choices[0].finish_reason), (5, "length"))

    def test_reasoning_has_its_field(self):
        ask = dict(model="tiny", messages=SUM, temperature=0)
        reply = self.chat(**ask, extra_body={"enable_thinking": True})
        message = reply.choices[0].message
        self.assertEqual(message.content, "46 + 37 = 83.")
        self.assertTrue(message.model_extra["reasoning_content"].startswith("Tens: 40 + 30 = 70."))
        self.assertGreater(reply.usage.completion_tokens_details.reasoning_tokens, 30)
        reasoning = content = ""
        for chunk in self.chat(**ask, stream=True, extra_body={"chat_template_kwargs": {"enable_thinking": True}}):
            for choice in chunk.choices:
                reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                content += choice.delta.content or ""
        self.assertEqual((reasoning, content), (message.model_extra["reasoning_content"], message.content))
        plain = self.chat(**ask, reasoning_effort="none").choices[0].message
        self.assertEqual((plain.content, plain.model_extra.get("reasoning_content")), ("46 + 37 = 83.", None))

    def test_options_of_other_servers_go_in_the_extra_body(self):
        extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": [23]}
        reply = self.chat(model="tiny", messages=COUNT, temperature=1, max_tokens=60, extra_body=extra)
        self.assertEqual(reply.choices[0].message.content, "5, 6, 7, 8")

    def test_completions(self):
        create = self.client.completions.create
        reply = create(model="tiny", prompt=["5, 6, 7,", "Once upon a time"], max_tokens=8, temperature=0, logprobs=2)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1])
        self.assertEqual(reply.object, "text_completion")
        for choice in reply.choices:
            self.assertEqual(len(choice.logprobs.tokens), 8)
            self.assertEqual(len(choice.logprobs.token_logprobs), 8)
        text = ""
        for chunk in create(model="tiny", prompt="5, 6, 7,", max_tokens=8, temperature=0, stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        self.assertEqual(text, reply.choices[0].text)
        ids = create(model="tiny", prompt=[20, 11, 220], max_tokens=4)
        self.assertEqual(ids.usage.prompt_tokens, 3)

    def test_errors_are_of_their_types(self):
        ask = dict(model="tiny", messages=GARDEN)

        def raised(kind, call):
            with self.assertRaises(kind) as caught:
                call()
            return caught.exception

        bad = raised(openai.BadRequestError, lambda: self.chat(**ask, temperature=-1))
        self.assertEqual((bad.status_code, bad.param, bad.type), (400, "temperature", "invalid_request_error"))
        unknown = raised(openai.BadRequestError, lambda: self.chat(**ask, extra_body={"reasoning_efort": "low"}))
        self.assertEqual(unknown.param, "reasoning_efort")
        streamed = raised(openai.BadRequestError, lambda: self.chat(**ask, n=0, stream=True))
        self.assertEqual(streamed.param, "n")
        missing = raised(openai.NotFoundError, lambda: self.chat(model="nobody", messages=GARDEN))
        self.assertEqual(missing.code, "model_not_found")
        wrong_key = self.server.client(api_key="another")
        raised(openai.AuthenticationError, lambda: wrong_key.chat.completions.create(**ask))
        raised(openai.NotFoundError, lambda: self.client.embeddings.create(model="tiny", input="a"))
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        self.assertEqual(raised(openai.BadRequestError, lambda: self.chat(**ask, tools=tools)).param, "tools")

    def test_what_is_ignored_is_named(self):
        raw = self.client.chat.completions.with_raw_response.create(
            model="tiny", messages=GARDEN, user="me", metadata={"a": "b"}
        )
        self.assertEqual(set(raw.headers["x-roundhouse-ignored"].replace(" ", "").split(",")), {"user", "metadata"})
        self.assertEqual(raw.parse().choices[0].message.role, "assistant")

    def test_many_at_once(self):
        async def all_of_them():
            async with AsyncOpenAI(base_url=self.server.url + "/v1", api_key=KEY, max_retries=0) as client:
                asks = [
                    client.chat.completions.create(model="tiny", messages=GARDEN, temperature=0) for _ in range(24)
                ]
                return await asyncio.gather(*asks)

        shas = {reply.choices[0].model_extra["token_sha"] for reply in asyncio.run(all_of_them())}
        self.assertEqual(shas, {"f4c8f07e9377"})


class Full(unittest.TestCase):
    """A server without room: the client learns so, and comes again when it is told to."""

    def test_a_full_server_is_a_rate_limit_that_passes(self):
        server = Server("--lanes", "1", "--queue", "0")
        self.addCleanup(server.stop)
        client = server.client()
        stream = client.chat.completions.create(
            model="tiny", messages=STORY, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with self.assertRaises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="tiny", messages=GARDEN)
        self.assertGreaterEqual(int(caught.exception.response.headers["retry-after"]), 1)
        threading.Timer(1.5, stream.close).start()
        patient = server.client(max_retries=8)
        reply = patient.chat.completions.create(model="tiny", messages=GARDEN, temperature=0)
        self.assertEqual(reply.choices[0].message.content, "n-e-d-r-a-g.")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
