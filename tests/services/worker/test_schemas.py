"""Random JSON schemas: whatever the mask lets through parses and validates.

`PENSTOCK_SEARCH=10` draws 2,000 schemas.
"""

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from penstock.protocol.config import Config
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker.grammars import Grammars
from tests.search import scaled

NUM_SCHEMAS = scaled(200)
ROWS = 20
MAX_TOKENS = 50_000
"""never reached: every schema bounds its texts, or ends them soon enough by chance"""
IM_END = 258
PATTERNS = ("^[a-c]{1,4}$", r"^\d{2,3}-\w$", "x", "^(ab|é)+$", "^[^a-z]{0,3}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname")
Schema = dict[str, Any]


class Schemas:
    """Makes schemas: objects and arrays down to `depth`, with `$ref`s to definitions of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.definitions: Schema = {}

    def make(self) -> Schema:
        for name in ("leaf", "branch"):
            self.definitions[name] = self.schema(depth=1)
        self.definitions["tree"] = {"items": {"$ref": "#/$defs/tree"}, "type": ["array", "null"]}
        self.definitions["tree"]["maxItems"] = 2
        return {**self.schema(depth=3), "$defs": self.definitions}

    def schema(self, depth: int) -> Schema:
        kinds = [self.string, self.number, self.enum, self.const, self.type_only]
        if depth:
            kinds = [self.object, self.array, self.any_of, self.tuple, self.ref, *kinds]
        return self.random.choice(kinds)(depth - 1)

    def object(self, depth: int) -> Schema:
        names = self.random.sample(
            ("a", "é", 'q"', "long name", "b\n", ""), self.random.randint(0, 4)
        )
        additional = self.random.choice((True, False, self.schema(0), None))
        schema: Schema = {"type": "object"}
        if additional is not None:
            schema["additionalProperties"] = additional
        schema["properties"] = {name: self.schema(depth) for name in names}
        schema["required"] = [name for name in names if self.random.random() < 0.5]
        return schema

    def array(self, depth: int) -> Schema:
        least = self.random.randint(0, 2)
        most = least + self.random.randint(0, 3)
        return {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": most}

    def tuple(self, depth: int) -> Schema:
        items = [self.schema(depth) for _ in range(self.random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self.random.randint(1, 3))]}

    def ref(self, _: int) -> Schema:
        names = list(self.definitions)
        return {"$ref": f"#/$defs/{self.random.choice(names)}"} if names else {"type": "null"}

    def string(self, _: int) -> Schema:
        schema: Schema = {"type": "string"}
        match self.random.randrange(4):
            case 0:
                schema["minLength"] = self.random.randint(0, 5)
                schema["maxLength"] = schema["minLength"] + self.random.randint(0, 9)
            case 1:
                schema["pattern"] = self.random.choice(PATTERNS)
            case 2:
                schema["format"] = self.random.choice(FORMATS)
        return schema

    def number(self, _: int) -> Schema:
        schema: Schema = {"type": self.random.choice(("integer", "number"))}
        low = self.random.randint(-300, 300)
        if self.random.random() < 0.6:
            schema[self.random.choice(("minimum", "exclusiveMinimum"))] = low
        if self.random.random() < 0.6:
            schema[self.random.choice(("maximum", "exclusiveMaximum"))] = low + 20
        if schema["type"] == "integer" and self.random.random() < 0.3:
            schema["multipleOf"] = self.random.randint(1, 9)
        return schema

    def enum(self, _: int) -> Schema:
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 4))}

    def const(self, _: int) -> Schema:
        return {"const": self.random.choice(VALUES)}

    def type_only(self, _: int) -> Schema:
        types = ("null", "boolean", "integer", "string")
        if self.random.random() < 0.2:
            return {"type": self.random.sample(types, 2)}
        return {"type": self.random.choice(types)}


VALUES = (None, True, 0, -7, 2.5, "", "a", 'é"\\\n', [], [1, "b"], {}, {"k": [None]})


def texts(schemas: list[Schema], seed: int) -> list[str]:
    """Return a random text for each: every token that is allowed is as likely as any other."""
    noise = np.random.default_rng(seed)
    grammars = Grammars(Config().model_folder)
    outputs = [bytearray() for _ in schemas]
    for slot, schema in enumerate(schemas):
        grammars.add(slot, StructuredOutputs(json=schema), [], [IM_END])
    slots = list(range(len(schemas)))
    for _ in range(MAX_TOKENS):
        masks = np.zeros((len(schemas), grammars.num_words), np.int32)
        failed = grammars.fill(masks, {slot: slot for slot in slots})
        assert not failed, [(failed[slot], schemas[slot]) for slot in failed]
        bits = np.unpackbits(masks[slots].view(np.uint8), axis=1, bitorder="little")
        token_ids = (noise.random(bits.shape) * bits).argmax(axis=1).tolist()
        drawn = dict(zip(slots, token_ids, strict=True))
        grammars.accept(drawn)
        for slot, token_id in drawn.items():
            if token_id != IM_END:
                outputs[slot].append(token_id)
        slots = [slot for slot in slots if drawn[slot] != IM_END]
        if not slots:
            return [output.decode() for output in outputs]
    raise AssertionError(f"{MAX_TOKENS} tokens, and these continue: {[schemas[s] for s in slots]}")


@pytest.mark.search
@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, ROWS))
def test_random_schemas(first: int) -> None:
    schemas = [Schemas(seed).make() for seed in range(first, first + ROWS)]
    for schema, text in zip(schemas, texts(schemas, first), strict=True):
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text))
